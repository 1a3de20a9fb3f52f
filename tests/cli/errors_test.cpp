// Error messages of the command line: one line, without C++ names.
#include <algorithm>

#include "cli/run.h"
#include "data/corpus.h"

namespace furious {
namespace {

using testing::run;
using testing::RunResult;
using testing::TemporaryFolder;

TEST(CommandErrors, AreOneLineWithoutCppNames) {
  const TemporaryFolder folder;
  const std::string name(300, 'n');
  const std::string text = folder.write("a.txt", "some text"), empty = folder.write("b.txt.gz", "");
  const std::string results = folder.write(
      "results.json",
      R"({"words": ["x"], "finished": true, "rows": [{"name": "a", "label": "a", "parameters": 1, "state_bytes": 1,
          "options": {"length": "many", "batch": "2"}, "runs": []}]})");
  const std::string deep = folder.write("deep.json", std::string(200'000, '['));
  for (const std::string& arguments :
       {"tokenize --tokenizer byte --out o " + name, "tokenize --tokenizer byte " + text + " --out " + name,
        fmt::format("tokenize --tokenizer byte --out {} {} {}", folder.path("out"), text, empty),
        "tokenize --tokenizer " + name + " --out o " + text, "generate " + name + " --prompt x",
        "generate " + folder.path("none") + " --prompt x",
        "train --device cpu --data " + name + " --out " + folder.path("run"),
        "train --config " + folder.write("c.toml", "steps = \"many\"") + " --out o", "plot " + name + " --out x.svg",
        "ablate --from " + results + " --out " + folder.path("report"), "ablate --from " + deep + " --out o",
        "niah --from " + deep, "niah --from " + folder.write("n.json", R"({"unit": 1})"),
        "eval " + name + " --data x"}) {
    SCOPED_TRACE(arguments);
    const RunResult result = run(arguments);
    EXPECT_TRUE(result.code == 1 || result.code == 2) << result.code;
    EXPECT_EQ(result.output.rfind("furious: ", 0), 0u) << result.output;
    EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << result.output;
    for (const char* word : {"filesystem error", "json.exception", "stod", "stoll", "bad_alloc", "terminate", "what()",
                             "basic_string", "internal error"})
      EXPECT_EQ(result.output.find(word), std::string::npos) << result.output;
  }
}

}  // namespace
}  // namespace furious
