// `furious ablate` and `furious plot`, by running the binary.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/run.h"
#include "train/small_run.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;
using Json = nlohmann::json;

class AblateCommandTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);

  std::string command(const std::string& rows, const std::string& out, const std::string& more = "") const {
    return fmt::format(
        "ablate {} --data {} --out {} --hidden 16 --intermediate 16 --heads 2 --layers 1 --batch 4 --length 24 --steps "
        "4 "
        "--eval-every 2 --eval-batches 1 --threads 1 --device cpu {}",
        rows, data, folder.path(out), more);
  }
  Json results(const std::string& out) const { return Json::parse(read_file(folder.path(out) + "/results.json")); }
};

// Everything but the time it took.
Json without_rates(Json results) {
  for (Json& row : results["rows"])
    for (Json& run : row["runs"]) run.erase("tokens_per_second");
  return results;
}

TEST_F(AblateCommandTest, TableReportAndJson) {
  expect_run(command("norm 2mamba:conv_window=4", "out", "--seeds 2"), 0,
             {"4 rows, 2 seeds, 4 steps each", "SM Norm + ReLU", "paper test", "3.03", " ± ", "2mamba:conv_window=4",
              "KB at 8k", "done in", "report.html"});
  const Json json = results("out");
  ASSERT_EQ(json["rows"].size(), 4u);
  EXPECT_EQ(json["finished"], true);
  EXPECT_EQ(json["rows"][0]["name"], "linear");
  EXPECT_EQ(json["rows"][0]["paper"]["test_loss"], 3.03);
  EXPECT_EQ(json["rows"][3]["options"]["switches"], "conv_window=4");
  EXPECT_EQ(json["rows"][3]["runs"].size(), 2u);
  EXPECT_EQ(json["rows"][3]["runs"][1]["test"]["step"], (std::vector<double>{2, 4}));
  EXPECT_FALSE(json["rows"][3].contains("paper"));
  EXPECT_GT(json["rows"][3]["state_bytes"], 0);
  EXPECT_NE(read_file(folder.path("out/table.md")).find("| SM Norm + ReLU |"), std::string::npos);
  EXPECT_NE(read_file(folder.path("out/report.html")).find("<svg"), std::string::npos);
  // Made again from the results, the report is the same.
  expect_run(fmt::format("ablate --from {0}/out/results.json --out {0}/again", folder.path("")), 0, {"SM Norm + ReLU"});
  for (const char* name : {"report.html", "table.md", "results.json", "test-loss.svg"})
    EXPECT_EQ(read_file(folder.path("again/") + name), read_file(folder.path("out/") + name)) << name;
}

TEST_F(AblateCommandTest, ResumesAfterKillOrStop) {
  const std::string more = "--steps 30 --save-every 5";
  ASSERT_EQ(run(command("base", "whole", more)).code, 0);
  for (const int signal : {SIGKILL, SIGINT}) {
    const std::string out = fmt::format("signal-{}", signal);
    std::istringstream text(command("base", out, more));
    const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
    const std::string log = folder.path(out + "/runs/mamba2-paper/seed-123/log.jsonl");
    const int status = run_and_signal(words, signal, [&] { return fs::exists(log) && fs::file_size(log) > 0; });
    if (signal == SIGINT) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      EXPECT_EQ(results(out)["finished"], false);
    } else {
      ASSERT_TRUE(WIFSIGNALED(status)) << "it was done before it was killed";
    }
    expect_run(command("base", out, more), 0, {"(already done)", "done in"});
    EXPECT_EQ(without_rates(results(out)), without_rates(results("whole")));
  }
}

TEST_F(AblateCommandTest, FlagsOverrideThePapersRecipe) {
  // All options but those that make it small are the paper's.
  expect_run(command("linear", "out", "--paper --warmup 1 --schedule-steps 40"), 0, {"4 steps each", "done in"});
  const Json options = results("out")["rows"][0]["options"];
  const std::map<std::string, std::string> expected = {
      {"size", "small"}, {"packing", "rows"},     {"bos", "true"}, {"initialization", "pytorch"},
      {"eps", "1e-07"},  {"lr", "0.0001"},        {"clip", "0"},   {"weight-decay", "0.01"},
      {"length", "24"},  {"batch", "4"},          {"steps", "4"},  {"eval-every", "2"},
      {"warmup", "1"},   {"schedule-steps", "40"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(options[name], value) << name;
}

TEST_F(AblateCommandTest, Usage) {
  expect_run("ablate --help", 0,
             {"Suites:", "isolated", "stability", "orders", "variants", "Example: furious ablate", "--seeds", "--paper",
              "--recipe", "paper-long", "docs/paper.md"});
  expect_run("ablate base --data x --recipe papr", 2, {"unknown recipe \"papr\"", "did you mean \"paper\""});
  expect_run("ablate base --data x --recipe paper --paper", 2, {"--paper", "--recipe"});
  expect_run("ablate", 2, {"give a suite", "buildup"});
  expect_run("ablate base", 2, {"--data"});
  expect_run("ablate base --data /nowhere", 1, {"/nowhere"});
  expect_run("ablate base --seeds 0 --data x", 2, {"--seeds"});
  expect_run("ablate base --data x --lr fast", 2, {"--lr", "fast"});
  expect_run(command("buildp", "out"), 1, {"unknown suite or preset \"buildp\"", "did you mean \"buildup\""});
  expect_run(command("2mamba:conv_windw=2", "out"), 1, {"unknown key", "did you mean \"conv_window\""});
  expect_run(command("2mamba:dtype=tf32", "out"), 1, {"TF32"});
  expect_run("ablate --from nowhere.json --out " + folder.path("out"), 1, {"nowhere.json"});
  expect_run("ablate base --from nowhere.json", 1, {"leave out the suites"});
  expect_run("ablate --from " + folder.write("bad.json", "{}"), 1, {"--out"});
  expect_run(fmt::format("ablate --from {} --out {}", folder.path("bad.json"), folder.path("out")), 1,
             {"bad.json", "expected the results.json"});
  ASSERT_EQ(run(command("linear", "mine")).code, 0);
  expect_run(command("linear", "mine", "--lr 0.5"), 1, {"lr = 0.5", "another --out"});
}

TEST_F(AblateCommandTest, Grid) {
  const std::string grid = "--grid lr=1e-3,1e-2 --grid seed=5..6";
  expect_run(command("2mamba softmax", "out", grid), 0,
             {"4 rows, 2 seeds, 4 steps each", "2mamba:lr=1e-3", "softmax:lr=1e-2", " ± ", "best", "Best row: "});
  const Json json = results("out");
  ASSERT_EQ(json["rows"].size(), 4u);
  EXPECT_EQ(json["words"], (std::vector<std::string>{"2mamba", "softmax", "--grid lr=1e-3,1e-2", "--grid seed=5,6"}));
  double best = 1e9;
  std::string best_name;
  for (const Json& row : json["rows"]) {
    ASSERT_EQ(row["runs"].size(), 2u);
    EXPECT_EQ(row["runs"][1]["seed"], 6);
    if (row["test_loss"]["mean"] >= best) continue;
    best = row["test_loss"]["mean"];
    best_name = row["name"];
  }
  EXPECT_EQ(json["rows"][1]["options"]["lr"], "0.01");
  EXPECT_NE(read_file(folder.path("out/report.html")).find("Best row: " + best_name), std::string::npos);
  EXPECT_NE(read_file(folder.path("out/table.md")).find("| best |"), std::string::npos);
  // More values train alone.
  const auto more = run(command("2mamba softmax", "out", "--grid lr=1e-3,1e-2,5e-3 --grid seed=5..6"));
  EXPECT_EQ(more.code, 0);
  size_t found = 0;
  for (size_t at = more.output.find("(already done)"); at != more.output.npos;
       at = more.output.find("(already done)", at + 1))
    ++found;
  EXPECT_EQ(found, 8u) << more.output;

  expect_run(command("2mamba", "bad", "--grid lr"), 2, {"--grid", "KEY=VALUE"});
  expect_run(command("2mamba", "bad", "--grid seed=3..1"), 2, {"3..1", "range"});
  expect_run(command("2mamba", "bad", "--grid lr=1,1"), 2, {"the value 1 twice"});
  expect_run(command("2mamba", "bad", "--grid lrr=1,2"), 1, {"row 2mamba:lrr=1", "unknown key", "\"lr\""});
  expect_run(command("2mamba", "bad", "--grid lr=1 --grid lr=2"), 1, {"two grids of lr"});
  // An invalid row is named, and nothing was trained before.
  expect_run(command("softmax 2mamba:heads=2,conv_window=3", "bad", "--grid hidden=16,17"), 1,
             {"row softmax:hidden=17", "17"});
  expect_run(command("2mamba 2mamba:score=linear", "bad"), 1, {"row 2mamba:score=linear"});
  EXPECT_FALSE(fs::exists(folder.path("bad/runs")));
}

TEST_F(AblateCommandTest, SeveralRunsAtOnce) {
  const std::string rows = "2mamba softmax 2mamba:lr=1000", more = "--grid seed=1..2 --steps 6";
  expect_run(command(rows, "one", more), 0, {"done in"});
  const RunResult result = run(command(rows, "several", more + " --jobs 3"));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(result.output.find("(already done)"), std::string::npos) << result.output;
  EXPECT_EQ(without_rates(results("several"))["rows"].size(), 3u);
  Json several = without_rates(results("several")), one = without_rates(results("one"));
  EXPECT_EQ(several, one);  // the same bits
  expect_run(command(rows, "several", more + " --jobs 3"), 0, {"(already done)"});
  for (const auto& entry : fs::recursive_directory_iterator(folder.path("several/runs/2mamba")))
    EXPECT_NE(entry.path().extension(), ".txt") << entry.path();
  expect_run(command("2mamba", "bad", "--jobs 0"), 2, {"--jobs"});
}

TEST_F(AblateCommandTest, SeveralRunsAtOnceResumeAfterAStop) {
  const std::string more = "--steps 40 --save-every 5 --jobs 2";
  ASSERT_EQ(run(command("base", "whole", more)).code, 0);
  for (const int signal : {SIGINT, SIGKILL}) {
    const std::string out = fmt::format("stopped-{}", signal);
    std::istringstream text(command("base", out, more));
    const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
    const std::string log = folder.path(out + "/runs/mamba2-paper/seed-123/log.jsonl");
    const int status = run_and_signal(words, signal, [&] { return fs::exists(log) && fs::file_size(log) > 0; });
    if (signal == SIGINT) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    } else {
      ASSERT_TRUE(WIFSIGNALED(status)) << "it was done before it was killed";
      // The processes are told to stop; until they have, their folders are locked.
      for (int i = 0; i < 600 && run(command("base", out, more)).code != 0; ++i) ::usleep(100'000);
    }
    expect_run(command("base", out, more), 0, {"done in"});
    EXPECT_EQ(without_rates(results(out)), without_rates(results("whole")));
  }
}

TEST_F(AblateCommandTest, Scaling) {
  const std::string rows = "2mamba softmax --grid hidden=16,24,32,48";
  ASSERT_EQ(run(command(rows, "sizes", "--steps 12")).code, 0);
  const std::string json = folder.path("s.json"), out = folder.path("charts");
  expect_run(fmt::format("scaling {} --out {} --json {}", folder.path("sizes"), out, json), 0,
             {"2mamba-hidden=16", "loss = E + A x^-α", "parameters", "flops", "no chart by tokens",
              "chart: " + out + "/parameters.svg"});
  const Json written = Json::parse(read_file(json));
  ASSERT_EQ(written["runs"].size(), 8u);
  const Json& first = written["runs"][0];
  EXPECT_EQ(first["arch"], "2mamba");
  EXPECT_EQ(first["tokens"], 12 * 4 * 24);
  const Json trained = results("sizes");
  for (const Json& row : trained["rows"])
    if (row["name"] == "2mamba:hidden=16") {
      EXPECT_EQ(first["parameters"], row["parameters"]);
      EXPECT_EQ(first["loss"], row["test_loss"]["mean"]);
    }
  std::map<std::string, int> curves;
  for (const Json& curve : written["curves"]) ++curves[curve["axis"]];
  EXPECT_EQ(curves["parameters"], 2);
  EXPECT_EQ(curves["tokens"], 0);  // a point is no curve
  EXPECT_TRUE(written["curves"][0].contains("law"));
  EXPECT_NE(read_file(out + "/parameters.svg").find("Loss by parameters"), std::string::npos);
  EXPECT_NE(read_file(out + "/flops.svg").find("softmax"), std::string::npos);
  EXPECT_NE(read_file(out + "/table.md").find("| α |"), std::string::npos);
  EXPECT_FALSE(fs::exists(out + "/tokens.svg"));
  expect_run(fmt::format("scaling {} --out {} --loss train --without-embedding", folder.path("sizes"), out), 0,
             {"2mamba"});

  // Along the tokens.
  ASSERT_EQ(run(command("2mamba --grid steps=4,6,8,12", "steps", "")).code, 0);
  expect_run(fmt::format("scaling {} --out {}", folder.path("steps"), out), 0,
             {"tokens", "no chart by parameters", "chart: " + out + "/tokens.svg"});

  expect_run("scaling", 2, {"runs"});
  expect_run("scaling " + folder.path("nowhere"), 1, {"scaling: ", "nowhere does not exist"});
  expect_run(fmt::format("scaling {0}/2mamba-hidden=16 {0}/2mamba-hidden=24 {0}/softmax-hidden=16 --out {1}",
                         folder.path("sizes/runs"), out),
             1, {"no architecture has 4 runs", "4 or more sizes"});
  fs::remove(folder.path("steps/runs/2mamba-steps=4/seed-123/log.jsonl"));
  folder.write("steps/runs/2mamba-steps=4/seed-123/log.jsonl", "");
  expect_run(fmt::format("scaling {} --out {}", folder.path("steps"), out), 1,
             {"left out: ", "2mamba-steps=4", "step 0 of 4"});
}

TEST_F(AblateCommandTest, Plot) {
  ASSERT_EQ(run(command("softmax 2mamba", "out")).code, 0);
  const std::string runs = folder.path("out/runs");
  const auto picture = [&](const std::string& more) {
    const std::string svg = folder.path("x.svg");
    expect_run(fmt::format("plot {} -o {}", more, svg), 0, {"x.svg"});
    return read_file(svg);
  };
  const auto count = [](const std::string& text, const std::string& part) {
    size_t found = 0;
    for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  const std::string both = picture(folder.path("out"));
  EXPECT_EQ(count(both, "<polyline"), 4u);
  EXPECT_EQ(count(both, " faint\""), 2u);
  EXPECT_EQ(count(both, "class=\"name "), 2u);  // named once, by distinguishing names, with the last loss
  EXPECT_NE(both.find(">softmax 5."), std::string::npos) << both;
  EXPECT_EQ(picture(fmt::format("{0}/softmax/seed-123/ {0}/2mamba/seed-123/log.jsonl", runs)).size(), both.size());
  EXPECT_EQ(count(picture(runs + " --curves test"), "<polyline"), 2u);
  EXPECT_EQ(count(picture(runs + " --curves train"), " faint\""), 0u);
  const std::string late = picture(runs + "/softmax --curves train --from 3 --smooth 0 --log-x --log-y --title 'a<b'");
  EXPECT_NE(late.find("<title>a&lt;b</title>"), std::string::npos);
  EXPECT_NE(late.find("seed-123"), std::string::npos);
  const size_t points = late.find("points=\"") + 8;
  EXPECT_EQ(count(late.substr(points, late.find('"', points) - points), ","), 2u);  // steps 3 and 4

  expect_run("plot", 2, {"runs"});
  expect_run("plot x", 2, {"--out"});
  expect_run("plot nowhere -o x.svg", 1, {"nowhere does not exist"});
  expect_run(fmt::format("plot {} -o x.svg", data), 1, {data, "contains no run", "log.jsonl"});
  expect_run(fmt::format("plot {}/manifest.json -o x.svg", data), 1, {"is not a folder"});
  expect_run(fmt::format("plot {} -o x.pdf", runs), 1, {"x.pdf", ".svg or .png"});
  expect_run(fmt::format("plot {} -o {}/none/x.svg", runs, folder.path("")), 1, {"none/x.svg"});
  expect_run(fmt::format("plot {} -o x.svg --from 99", runs), 1, {"nothing to draw", "step 99"});
  expect_run(fmt::format("plot {} -o x.svg --curves tset", runs), 2, {"--curves"});
  const RunResult without = run(fmt::format("plot {} -o {}", runs, folder.path("x.png")), "PATH=/nowhere");
  EXPECT_EQ(without.code, 1);
  EXPECT_NE(without.output.find("librsvg2-bin"), std::string::npos) << without.output;
}

}  // namespace
}  // namespace furious
