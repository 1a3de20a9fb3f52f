// Logs of runs, and the commands that read them (`plot`, `compare`, `watch`), by running the binary.
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "cli/run.h"
#include "train/event_reader.h"
#include "train/log.h"
#include "train/options.h"
#include "train/small_run.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;
using Json = nlohmann::json;

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
  return found;
}

class LogsCommandTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;

  std::string train(const std::string& out, const std::string& more) {
    if (data.empty()) data = small_data(folder);
    return fmt::format(
        "train --data {} --out {} --hidden 16 --intermediate 16 --heads 2 --layers 1 --batch 4 --length 24 --threads 1 "
        "--device cpu --sample-every 0 {}",
        data, folder.path(out), more);
  }
  std::string event_file(const std::string& run) const {
    std::string found;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder.path(run)))
      if (entry.path().filename().string().starts_with("events.out.tfevents.") && entry.file_size() > 0) {
        EXPECT_TRUE(found.empty()) << "two event files with contents";
        found = entry.path().string();
      }
    return found;
  }
  // A run without a model, as `furious train` writes it.
  std::string write_run(const std::string& name, int64_t steps, int64_t done, double scale = 1, uint64_t seed = 123) {
    TrainOptions options;
    options.steps = steps;
    options.lr = 1e-3 * scale;
    options.seed = seed;
    options.out = folder.path(name);
    fs::create_directories(options.out);
    std::string log;
    for (int64_t i = 1; i <= done; ++i) log += line(i, scale);
    std::ofstream(options.out + "/run.toml") << to_toml(options);
    std::ofstream(options.out + "/log.jsonl") << log;
    return options.out;
  }
  static std::string line(int64_t i, double scale = 1) {
    TrainStep step;
    step.step = i;
    step.loss = scale * (1 + 10 / static_cast<double>(i));
    if (i % 5 == 0) step.test_loss = step.loss + 0.125;
    step.tokens_per_second = 1000;
    step.seconds = 90 * static_cast<double>(i);
    step.total_tokens = 4096 * i;
    step.total_flops = 1e12 * static_cast<double>(i);
    return to_line(step) + "\n";
  }

 private:
  std::string data;
};

TEST_F(LogsCommandTest, CsvAndEventFilesFollowTheLogAlsoAfterAKill) {
  std::istringstream text(train("run", "--steps 400 --save-every 7 --eval-every 10 --log csv,tensorboard"));
  const std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
  const std::string log_file = folder.path("run/log.jsonl");
  const auto logged = [&] {
    std::ifstream file(log_file);
    return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
  };
  const int status = run_and_signal(words, SIGKILL, [&] { return logged() >= 17; });
  ASSERT_TRUE(WIFSIGNALED(status)) << "it was done before it was killed";
  const RunLog before = read_log(folder.path("run"));
  expect_run(fmt::format("train --resume --out {}", folder.path("run")), 0, {"resumed from", "done after 400 steps"});

  const RunLog log = read_log(folder.path("run"));
  ASSERT_EQ(log.steps.size(), 400u);
  for (size_t i = 0; i < 400; ++i) {
    const TrainStep& step = log.steps[i];
    EXPECT_EQ(step.step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(step.total_tokens, 4 * 24 * step.step);
    EXPECT_GT(step.memory, 0);
    EXPECT_NEAR(step.total_flops / static_cast<double>(step.step), log.steps[0].total_flops, 1);
    EXPECT_GT(step.time, 1.6e9);
    // Time goes on where the steps before the checkpoint ended.
    EXPECT_GT(step.seconds, i == 0 ? 0 : log.steps[i - 1].seconds);
    if (i < 14) {
      EXPECT_EQ(to_line(step), to_line(before.steps[i]));
    }
  }
  std::istringstream csv(read_file(folder.path("run/log.csv")));
  std::string row;
  std::getline(csv, row);
  EXPECT_EQ(row.substr(0, 13), "step,loss,lr,");
  for (int64_t i = 1; i <= 400; ++i) {
    std::getline(csv, row);
    EXPECT_EQ(row.substr(0, row.find(',')), fmt::format("{}", i));
    EXPECT_EQ(count(row, ","), 11u);
  }
  EXPECT_FALSE(std::getline(csv, row));
  const std::vector<ReadEvent> events = read_events(read_file(event_file("run")));
  ASSERT_EQ(events.size(), 402u);
  for (size_t i = 0; i < 400; ++i) {
    EXPECT_EQ(events[i + 2].step, log.steps[i].step);
    EXPECT_EQ(events[i + 2].numbers.at("train/loss"), static_cast<float>(log.steps[i].loss));
    EXPECT_EQ(events[i + 2].numbers.at("train/gradient_norm"), static_cast<float>(log.steps[i].gradient_norm));
    EXPECT_EQ(events[i + 2].numbers.contains("test/loss"), (i + 1) % 10 == 0);
  }
  expect_run(train("other", "--steps 1 --log cvs"), 2, {"--log", "\"cvs\"", "did you mean \"csv\"?"});
  EXPECT_FALSE(fs::exists(folder.path("other")));
}

TEST_F(LogsCommandTest, PlotOverStepsTokensTimeAndFlops) {
  const std::string run_folder = write_run("run", 100, 60);
  const auto picture = [&](const std::string& more) {
    expect_run(fmt::format("plot {} -o {} {}", run_folder, folder.path("x.svg"), more), 0, {"1 run: "});
    return read_file(folder.path("x.svg"));
  };
  const auto labelled = [&](const std::string& svg, const std::string& label) {
    return svg.find(" text-anchor=\"middle\">" + label + "</text>") != svg.npos;
  };
  EXPECT_TRUE(labelled(picture(""), "step"));
  EXPECT_TRUE(labelled(picture("--x step"), "60"));  // the last tick
  EXPECT_TRUE(labelled(picture("--x tokens"), "tokens"));
  EXPECT_TRUE(labelled(picture("--x flops --log-x --log-y"), "FLOPs"));
  EXPECT_TRUE(labelled(picture("--x flops"), "6×10¹³"));
  EXPECT_TRUE(labelled(picture("--x time"), "minutes of training"));  // 90 of them
  EXPECT_EQ(picture("--x time --from 31 --smooth 0 --curves train").find("hours"), std::string::npos);
  std::ofstream(run_folder + "/log.jsonl") << line(1) << line(200);
  EXPECT_TRUE(labelled(picture("--x time"), "hours of training"));
  std::ofstream(run_folder + "/log.jsonl") << R"({"step": 1, "loss": 2.5})"
                                           << "\n";
  expect_run(fmt::format("plot {} -o x.svg --x tokens", run_folder), 1, {"run", "no tokens", "use --x step"});
  expect_run(fmt::format("plot {} -o x.svg --x token", run_folder), 2, {"--x"});
}

TEST_F(LogsCommandTest, LegendsTellRunsOfOneNameApart) {
  for (const char* arch : {"2mamba", "mamba2", "softmax"}) write_run(fmt::format("abl/runs/{}/seed-123", arch), 10, 10);
  expect_run(fmt::format("plot {0} {0}/runs/2mamba -o {1}", folder.path("abl"), folder.path("x.svg")), 0, {"3 runs"});
  const std::string svg = read_file(folder.path("x.svg"));
  for (const char* name : {">2mamba 2.125<", ">mamba2 2.125<", ">softmax 2.125<"})
    EXPECT_NE(svg.find(name), std::string::npos) << name << svg;
  EXPECT_EQ(svg.find("seed-123"), std::string::npos);
}

TEST_F(LogsCommandTest, CompareShowsOptionsThatDifferAndResults) {
  ASSERT_EQ(run(train("runs/a,b", "--steps 4 --eval-every 2 --lr 0.5")).code, 0);
  ASSERT_EQ(run(train("runs/c", "--steps 6 --eval-every 2 --lr 0.25 --log csv --keep 1")).code, 0);
  write_run("runs/d", 100, 7);
  const std::string places = folder.path("runs");
  const RunResult text = run(fmt::format("compare {}/a,b {}/c", places, places));
  EXPECT_EQ(text.code, 0);
  for (const char* part : {"run  ", "a,b", "steps", "lr", "0.25", "test loss", "best test", "train loss", "tokens/s",
                           "parameters", "0.01M", "time", "done"})
    EXPECT_NE(text.output.find(part), std::string::npos) << part << text.output;
  for (const char* part : {"heads", "batch", "keep", "csv", "out"})
    EXPECT_EQ(text.output.find(part), std::string::npos) << part << text.output;
  EXPECT_EQ(count(text.output, "\n"), 3u);
  EXPECT_EQ(count(text.output, "steps"), 1u);  // the option; those that were done are another column

  const Json json = Json::parse(run(fmt::format("compare {} --format json", places)).output);
  ASSERT_EQ(json.size(), 3u);
  const RunLog log = read_log(places + "/c");
  EXPECT_EQ(json[1]["run"], "c");
  EXPECT_EQ(json[1]["options"]["lr"], "0.25");
  EXPECT_EQ(json[1]["options"]["steps"], "6");
  EXPECT_EQ(json[1]["done"], 6);
  EXPECT_EQ(json[1]["test_loss"], *log.steps.back().test_loss);
  EXPECT_EQ(json[1]["best_test_loss"],
            std::min({*log.steps[1].test_loss, *log.steps[3].test_loss, *log.steps[5].test_loss}));
  EXPECT_EQ(json[1]["train_loss"], log.steps.back().loss);
  EXPECT_EQ(json[1]["total_tokens"], 6 * 4 * 24);
  EXPECT_EQ(json[1]["seconds"], log.steps.back().seconds);
  EXPECT_GT(json[1]["parameters"], 1000);
  EXPECT_EQ(json[1]["state"], "done");
  EXPECT_EQ(json[2]["state"], "unfinished");
  EXPECT_TRUE(json[2]["parameters"].is_null());  // no checkpoint

  const std::string csv = run(fmt::format("compare {} --format csv", places)).output;
  EXPECT_EQ(csv.substr(0, 4), "run,");
  EXPECT_NE(csv.find("\n\"a,b\","), std::string::npos) << csv;
  EXPECT_NE(csv.find("best_test_loss"), std::string::npos);
  EXPECT_EQ(run(fmt::format("compare {} --format md", places)).output.substr(0, 6), "| run ");
  expect_run("compare", 2, {"runs"});
  expect_run("compare /nowhere", 1, {"/nowhere does not exist"});
  expect_run(fmt::format("compare {} --format html", places), 2, {"--format"});
}

TEST_F(LogsCommandTest, CompareSurvivesDamage) {
  const std::string bare = write_run("runs/bare", 10, 0), damaged = write_run("runs/damaged", 10, 10);
  write_run("runs/whole", 10, 10, 2);
  std::ofstream(damaged + "/run.toml") << "what\n";
  std::ofstream(bare + "/log.jsonl") << R"({"step": 1, "diverged": "why"})"
                                     << "\n";
  const RunResult result = run("compare " + folder.path("runs"));
  EXPECT_EQ(result.code, 0);
  for (const char* part : {"diverged at step 1", "?", " -\n", "done", "0.002"})
    EXPECT_NE(result.output.find(part), std::string::npos) << part << result.output;
}

TEST_F(LogsCommandTest, WatchWithoutATerminalPrintsOnce) {
  const std::string one = write_run("runs/one", 100, 60), two = write_run("runs/two", 60, 60, 2);
  const RunResult single = run("watch " + one);
  EXPECT_EQ(single.code, 0);
  for (const char* part :
       {"one  step 60/100 (60 %)  loss 1.1667", "1:00:00 left", "test loss 1.2917", "│", "└──", "step\n"})
    EXPECT_NE(single.output.find(part), std::string::npos) << part << single.output;
  EXPECT_EQ(single.output.find('\033'), std::string::npos) << "escape sequences without a terminal";
  EXPECT_GT(count(single.output, "\xE2\xA0") + count(single.output, "\xE2\xA1"), 10u);  // braille
  const RunResult both = run(fmt::format("watch {} --ascii --x tokens", folder.path("runs")));
  for (const char* part : {"a one  step 60/100", "b two  step 60/60 (100 %)", "done in 1:30:00", "bb", "tokens\n"})
    EXPECT_NE(both.output.find(part), std::string::npos) << part << both.output;
  for (const char c : both.output) EXPECT_LT(static_cast<unsigned char>(c), 0x80u);
  // Nothing yet, and a first step that diverged.
  fs::create_directories(folder.path("empty"));
  expect_run("watch " + folder.path("empty"), 0, {"empty  not started"});
  std::ofstream(one + "/log.jsonl").flush();
  expect_run("watch " + one, 0, {"one  no step yet"});
  std::ofstream(one + "/log.jsonl") << R"({"step": 1, "diverged": "why"})"
                                    << "\n";
  expect_run("watch " + one, 0, {"one  diverged in the first step"});
  expect_run("watch /nowhere", 1, {"/nowhere does not exist"});
  expect_run("watch", 2, {"runs"});
  EXPECT_EQ(run(fmt::format("watch {} --every 0", two)).code, 2);
}

// The binary in a terminal of its own.
class InTerminal {
 public:
  InTerminal(const std::vector<std::string>& arguments, int columns, int rows) : terminal_(-1) {
    struct winsize size = {};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = static_cast<unsigned short>(rows);
    std::fflush(nullptr);  // or the child writes it again
    child_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    if (child_ != 0) return;
    ::setenv("TERM", "xterm", 1);
    exec_binary(arguments);
  }
  ~InTerminal() { ::close(terminal_); }

  // Reads until what came since the last call contains the text, or the program has ended.
  bool shows(const std::string& text) {
    while (output_.find(text) == output_.npos)
      if (!read()) return false;
    output_.clear();
    return true;
  }
  void type(const std::string& keys) { EXPECT_EQ(::write(terminal_, keys.data(), keys.size()), ssize_t(keys.size())); }
  void resize(int columns, int rows) {
    struct winsize size = {};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = static_cast<unsigned short>(rows);
    ::ioctl(terminal_, TIOCSWINSZ, &size);
  }
  // Its last output and exit code.
  RunResult end() {
    while (read()) {
    }
    int status = 0;
    ::waitpid(child_, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output_};
  }

 private:
  bool read() {
    char buffer[4096];
    const ssize_t got = ::read(terminal_, buffer, sizeof(buffer));
    if (got > 0) output_.append(buffer, static_cast<size_t>(got));
    return got > 0;
  }

  int terminal_;
  pid_t child_;
  std::string output_;
};

TEST_F(LogsCommandTest, WatchFollowsARunUntilItIsDone) {
  const std::string place = folder.path("run");
  InTerminal terminal({"watch", place, "--every", "0.1"}, 60, 20);
  EXPECT_TRUE(terminal.shows("not started"));
  write_run("run", 30, 3);
  EXPECT_TRUE(terminal.shows("step 3/30 (10 %)"));
  std::ofstream(place + "/log.jsonl", std::ios::app) << line(4) << line(5).substr(0, 20);
  EXPECT_TRUE(terminal.shows("step 4/30"));
  // Resumed from an earlier step.
  write_text(place + "/log.jsonl", line(1) + line(2));
  EXPECT_TRUE(terminal.shows("step 2/30"));
  terminal.resize(30, 5);
  EXPECT_TRUE(terminal.shows("run  step 2/30 (6 %)"));
  std::string rest;
  for (int64_t i = 3; i <= 30; ++i) rest += line(i);
  std::ofstream(place + "/log.jsonl", std::ios::app) << rest;
  const RunResult result = terminal.end();
  EXPECT_EQ(result.code, 0);
  const size_t left = result.output.find("\033[?25h\033[?1049l");  // the screen as it was before
  ASSERT_NE(left, std::string::npos) << result.output;
  EXPECT_NE(result.output.find("step 30/30 (100 %)", left), std::string::npos) << result.output;
}

TEST_F(LogsCommandTest, WatchOfAFolderEndsWhenItsRunsAreDoneAndSilent) {
  write_run("runs/one", 3, 3);
  write_run("runs/two", 3, 3);
  InTerminal terminal({"watch", folder.path("runs")}, 80, 24);
  const RunResult result = terminal.end();
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.output.find("step 3/3 (100 %)"), std::string::npos) << result.output;
}

TEST_F(LogsCommandTest, CtrlCEndsWatchAndLeavesTheTerminalClean) {
  const std::string place = write_run("run", 30, 3);
  InTerminal terminal({"watch", place, folder.path("later")}, 80, 24);
  EXPECT_TRUE(terminal.shows("step 3/30"));
  terminal.type("\x03");
  const RunResult result = terminal.end();
  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.output.find("\033[?25h\033[?1049l"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace furious
