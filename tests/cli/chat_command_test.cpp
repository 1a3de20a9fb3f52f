// `furious chat`, by running the binary with lines through a pipe.
#include <filesystem>
#include <regex>

#include "cli/letter_model.h"
#include "cli/run.h"
#include "data/corpus.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::run;
using testing::RunResult;
using testing::TemporaryFolder;

class ChatCommand : public ::testing::Test {
 protected:
  ChatCommand() { testing::save_letter_model(model); }
  // The lines that it prints.
  std::vector<std::string> chat(const std::string& input, const std::string& flags = "", int code = 0) const {
    const std::string file = folder.write("input", input);
    const RunResult result =
        run(fmt::format("chat {} --tokens 12 --temperature 0 --threads 1 {} <{}", model, flags, file));
    EXPECT_EQ(result.code, code) << result.output;
    std::vector<std::string> lines;
    for (size_t begin = 0, end; begin < result.output.size(); begin = end + 1) {
      end = std::min(result.output.find('\n', begin), result.output.size());
      lines.push_back(result.output.substr(begin, end - begin));
    }
    return lines;
  }
  static void expect_part(const std::string& line, const std::string& part) {
    EXPECT_NE(line.find(part), std::string::npos) << "\"" << part << "\" is missing in: " << line;
  }
  // "prompt: 31 tokens, 20 of them not read again, …"
  static std::pair<int, int> prompt_and_cached(const std::string& line) {
    std::smatch found;
    EXPECT_TRUE(std::regex_search(line, found, std::regex("prompt: (\\d+) tokens, (\\d+) of them"))) << line;
    return {std::stoi(found[1]), std::stoi(found[2])};
  }

  TemporaryFolder folder;
  std::string model = folder.path("model");
};

TEST_F(ChatCommand, AnswersAndReadsOnlyWhatIsNew) {
  const auto lines = chat("Hello\n/stats\nAnd now?\n/stats\n");
  ASSERT_EQ(lines.size(), 8u);
  EXPECT_EQ(lines[0].size(), 12u);
  EXPECT_EQ(lines[0].find_first_not_of("abcdefghijklmnopqrstuvwxyz"), std::string::npos) << lines[0];
  const auto first = prompt_and_cached(lines[1]);
  EXPECT_EQ(first, std::make_pair(int(sizeof("eUser: Hello\nAssistant:")) - 1, 0));
  expect_part(lines[2], "answer: 12 tokens");
  const auto second = prompt_and_cached(lines[5]);
  EXPECT_EQ(second.first, first.first + 13 + int(sizeof("\nUser: And now?\nAssistant:")) - 1);
  EXPECT_GE(second.second, first.first);  // the first prompt at least
  expect_part(lines[7], "in memory");
}

TEST_F(ChatCommand, BranchesGiveTheAnswersOfAConversationWithoutThem) {
  const auto alone = chat("One\nTwo\n"), other = chat("One\nThree\n");
  const auto lines = chat("One\n/fork\nTwo\n/branch 1\nThree\n/branches\n/back\nTwo\n/branch 2\n/new\nOne\n");
  ASSERT_EQ(lines.size(), 12u);
  EXPECT_EQ(lines[0], alone[0]);
  EXPECT_EQ(lines[1], "branch 2");
  EXPECT_EQ(lines[2], alone[1]);
  EXPECT_EQ(lines[3], "branch 1");
  EXPECT_EQ(lines[4], other[1]);
  EXPECT_EQ(lines[5], "* 1: 4 messages, last: Three");
  EXPECT_EQ(lines[6], "  2: 4 messages, last: Two");
  expect_part(lines[7], "2 messages");
  EXPECT_EQ(lines[8], alone[1]);
  EXPECT_EQ(lines[10], "branch 3");
  EXPECT_EQ(lines[11], alone[0]);
}

TEST_F(ChatCommand, SavesAndLoads) {
  const std::string flags = "--state-dir " + folder.path("states");
  const auto whole = chat("One\nTwo\n");
  const auto saved = chat("One\n/save here\n/states\n", flags);
  ASSERT_EQ(saved.size(), 3u);
  expect_part(saved[1], "saved \"here\"");
  EXPECT_EQ(saved[1].find("until this program ends"), std::string::npos) << saved[1];
  expect_part(saved[2], "here: ");
  for (const std::string& begin : {std::string("/load here\n"), std::string()}) {  // in another process
    const auto lines = chat(begin + "Two\n/stats\n", flags + (begin.empty() ? " --state here" : ""));
    ASSERT_EQ(lines.size(), 5u);
    expect_part(lines[0], "loaded \"here\" as branch 2");
    expect_part(lines[0], "2 messages");
    EXPECT_EQ(lines[1], whole[1]);
    const auto [prompt, cached] = prompt_and_cached(lines[2]);
    EXPECT_GE(cached, prompt - int(sizeof("User: Two\nAssistant:")) + 1);
  }
  const auto again = chat("One\n/save here\n/load heer\n/save ../up\n/save\n", flags);
  ASSERT_EQ(again.size(), 5u);
  expect_part(again[1], "exists already");
  expect_part(again[2], "did you mean \"here\"");
  expect_part(again[3], "is not a name for a state");
  expect_part(again[4], "a name is missing");
  expect_part(chat("One\n/save mine\n").back(), "start it with --state-dir");
}

TEST_F(ChatCommand, MistakesAreLinesNotTheEnd) {
  const auto lines = chat("/frok\n/branch 7\n/back\n/help\n//slash\n\nlast\n/quit\nnever\n");
  expect_part(lines[0], "did you mean \"fork\"");
  expect_part(lines[1], "branches 1 to 1");
  expect_part(lines[2], "no question");
  expect_part(lines[3], "/fork");
  EXPECT_EQ(lines.size(), 3u + 12 + 2);
  EXPECT_EQ(lines.back(), chat("//slash\nlast").back());
}

TEST_F(ChatCommand, Templates) {
  expect_part(chat("", "--chat-template chatlm", 1)[0], "did you mean \"chatml\"");
  EXPECT_NE(chat("Hello", "--chat-template chatml")[0], chat("Hello", "--chat-template plain")[0]);
  EXPECT_EQ(chat("Hello", "--chat-template plain"), chat("Hello"));
  EXPECT_EQ(prompt_and_cached(chat("Hello\n/stats", "--system 'Be brief.'")[1]).first,
            prompt_and_cached(chat("Hello\n/stats")[1]).first + int(sizeof("Be brief.\n\n")) - 1);
}

// SIGINT while it writes ends the answer, not the program.
TEST_F(ChatCommand, AnInterruptStopsTheAnswer) {
  const std::string file = folder.path("output");
  const RunResult result =
      run(fmt::format("chat {} --tokens 100000000 --threads 1 <{} >{} & child=$!; "
                      "for i in $(seq 600); do [ -s {} ] && break; sleep 0.05; done; kill -INT $child; wait $child",
                      model, folder.write("input", "Hello\n/stats\n"), file, file));
  EXPECT_EQ(result.code, 0) << result.output;
  const std::string output = testing::read_file(file);
  EXPECT_NE(output.find("(stopped)\nprompt: "), std::string::npos) << output.substr(0, 2000);
}

}  // namespace
}  // namespace furious
