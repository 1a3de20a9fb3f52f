// `furious train` and `furious bench step` by several processes, as mpirun starts them on this machine.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/run.h"
#include "dist/communicator.h"
#include "model/safetensors.h"
#include "train/log.h"
#include "train/small_run.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

class TrainMpirun : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data;
  std::string small =
      "--hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --length 24 --threads 1 --device cpu "
      "--lr 0.01 --warmup 4 --sample-every 0";

  void SetUp() override {
    if (std::string(FURIOUS_MPIRUN).empty()) GTEST_SKIP() << "built without MPI: mpirun was not found";
    data = small_data(folder);
  }

  std::string train(const std::string& out, const std::string& more) const {
    return fmt::format("train --data {} --out {} {} {}", data, folder.path(out), small, more);
  }
  // Each rank leaves its process id in a file.
  std::string ranks(int count, const std::string& arguments) const {
    return fmt::format("-n {} sh -c 'echo $$ > {}.$OMPI_COMM_WORLD_RANK; exec \"$0\" \"$@\"' {} {}", count,
                       folder.path("process"), FURIOUS_BINARY, arguments);
  }
  static std::string mpirun(const std::string& what) { return fmt::format("{} {} 2>&1", FURIOUS_MPIRUN, what); }
  static RunResult shell(const std::string& command) {
    RunResult result;
    std::FILE* pipe = ::popen(command.c_str(), "r");
    char buffer[4096];
    while (const size_t got = std::fread(buffer, 1, sizeof(buffer), pipe)) result.output.append(buffer, got);
    const int status = ::pclose(pipe);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return result;
  }
  RunResult run_ranks(int count, const std::string& arguments) const { return shell(mpirun(ranks(count, arguments))); }

  size_t logged(const std::string& out) const { return read_log(folder.path(out)).steps.size(); }
  int process(int rank) const { return std::stoi(read_file(folder.path(fmt::format("process.{}", rank)))); }
  // Calls a function with the job after some steps.
  RunResult disturb(const std::string& out, int count, const std::string& more, const std::function<void()>& act) {
    std::thread actor([&] {
      for (int i = 0; i < 6000 && logged(out) < 20; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (logged(out) >= 20) act();
    });
    const RunResult result = run_ranks(count, train(out, "--steps 20000 --save-every 7 --eval-every 0 " + more));
    actor.join();
    return result;
  }
  // The run resumes in one process from an intact checkpoint.
  void expect_resumes(const std::string& out) const {
    const size_t steps = logged(out) + 2;
    expect_run(fmt::format("train --out {} --resume --steps {}", folder.path(out), steps), 0, {"resumed from", "done"});
    for (const auto& entry : fs::directory_iterator(folder.path(out)))
      EXPECT_EQ(entry.path().string().find("tmp-furious"), std::string::npos) << entry.path();
  }
};

void expect_parts(const RunResult& result, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(result.output.find(part), std::string::npos) << "\"" << part << "\" is missing in: " << result.output;
}

size_t times_said(const std::string& output, const std::string& what) {
  size_t count = 0;
  for (size_t at = output.find(what); at != std::string::npos; at = output.find(what, at + 1)) ++count;
  return count;
}

TEST_F(TrainMpirun, OneTwoAndFourRanksLearnTheSame) {
  const std::string options = "--steps 30 --eval-every 10 --clip 1";
  expect_run(train("1", options), 0, {"done after 30 steps"});
  const RunLog expected = read_log(folder.path("1"));
  for (const int count : {2, 4}) {
    const std::string out = std::to_string(count);
    const RunResult result = run_ranks(count, train(out, options));
    ASSERT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(times_said(result.output, "done after 30 steps"), 1u) << result.output;
    EXPECT_EQ(times_said(result.output, fmt::format("{} ranks", count)), 1u) << result.output;
    EXPECT_EQ(times_said(result.output, "increase --steps to continue"), 0u) << result.output;
    const RunLog actual = read_log(folder.path(out));
    ASSERT_EQ(actual.steps.size(), 30u);
    for (size_t i = 0; i < 30; ++i) {
      // Sums over ranks round differently, and training amplifies the difference.
      const double limit = i < 15 ? 1e-3 : 2e-2;
      EXPECT_NEAR(actual.steps[i].loss, expected.steps[i].loss, limit) << i;
      ASSERT_TRUE(actual.steps[i].ranks.has_value());
      EXPECT_EQ(actual.steps[i].ranks->ranks, count);
      ASSERT_EQ(actual.steps[i].test_loss.has_value(), expected.steps[i].test_loss.has_value()) << i;
      EXPECT_NEAR(actual.steps[i].test_loss.value_or(0), expected.steps[i].test_loss.value_or(0), limit);
    }
  }
}

TEST_F(TrainMpirun, ResumesOnAnotherNumberOfRanks) {
  expect_run(train("whole", "--steps 24 --eval-every 8"), 0, {"done"});
  const RunLog expected = read_log(folder.path("whole"));
  // Steps 1 to 6 by four ranks, to 12 by two, to 18 by one, to 24 by four.
  ASSERT_EQ(run_ranks(4, train("run", "--steps 6 --schedule-steps 24 --eval-every 8")).code, 0);
  const std::string resume = fmt::format("train --resume --out {} --steps ", folder.path("run"));
  expect_parts(run_ranks(2, resume + "12"), {"resumed from", "2 ranks", "done after 12 steps"});
  expect_run(resume + "18", 0, {"resumed from", "done after 18 steps"});
  expect_parts(run_ranks(4, resume + "24"), {"resumed from", "4 ranks", "done after 24 steps"});
  const RunLog actual = read_log(folder.path("run"));
  ASSERT_EQ(actual.steps.size(), 24u);
  for (size_t i = 0; i < 24; ++i) EXPECT_NEAR(actual.steps[i].loss, expected.steps[i].loss, 1e-3) << i;
  // Four and one process write the same files.
  const auto names = [&](const std::string& run) {
    std::vector<std::string> found;
    for (const auto& [name, content] : read_folder(folder.path(run) + "/latest")) found.push_back(name);
    const SafetensorsReader training(folder.path(run) + "/latest/training.safetensors");
    for (const StoredTensor& tensor : training.tensors()) found.push_back(tensor.name);
    return found;
  };
  EXPECT_EQ(names("run"), names("whole"));
  expect_parts(run_ranks(3, resume + "30"), {"a batch of 4 cannot be divided among 3 ranks", "start 1, 2, 4 of them"});
}

TEST_F(TrainMpirun, AKilledRankEndsTheJob) {
  const RunResult result = disturb("run", 4, "", [&] { ::kill(process(2), SIGKILL); });
  EXPECT_NE(result.code, 0);
  expect_parts(result, {"furious: rank 2 (", fmt::format("process {}) has exited in step ", process(2)),
                        "--resume, from " + folder.path("run") + "/step-0"});
  EXPECT_EQ(times_said(result.output, " in step "), 1u) << result.output;
  expect_resumes("run");
}

TEST_F(TrainMpirun, ARankThatHangsEndsTheJob) {
  for (const int hanging : {0, 1}) {
    const std::string out = fmt::format("run-{}", hanging);
    const RunResult result = disturb(out, 2, "--timeout 1", [&] { ::kill(process(hanging), SIGSTOP); });
    EXPECT_NE(result.code, 0);
    expect_parts(result, {fmt::format("furious: rank {} (", hanging), "has not answered for 1 s in step ",
                          "--resume, from " + folder.path(out) + "/step-0"});
    EXPECT_EQ(times_said(result.output, " in step "), 1u)
        << result.output;  // nothing more when the stopped rank continues
    expect_resumes(out);
  }
}

TEST_F(TrainMpirun, ASignalToAnyRankSavesOnceAndEndsAll) {
  for (const auto& [rank, signal] : {std::pair{0, SIGTERM}, {3, SIGTERM}, {1, SIGINT}}) {
    const std::string out = fmt::format("run-{}", rank);
    const RunResult result = disturb(out, 4, "", [&, r = rank, s = signal] { ::kill(process(r), s); });
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(times_said(result.output, "stopped after"), 1u) << result.output;
    EXPECT_EQ(times_said(result.output, "resume with: furious train"), 1u) << result.output;
    if (mpi_library().starts_with(
            "Open MPI 4"))  // its mpirun leaves less time for that, and the run says how to get more
      expect_parts(result, {fmt::format("kill -TERM {} stops all ranks", process(0))});
    const RunLog log = read_log(folder.path(out));
    EXPECT_TRUE(fs::exists(folder.path(out) + fmt::format("/step-{:08}", log.steps.back().step)));
    expect_resumes(out);
  }
}

// As mpirun on Ctrl-C and Slurm at a time limit: all ranks get the signal.
TEST_F(TrainMpirun, ASignalToAllSavesOnceAndEndsAll) {
  const RunResult result = disturb("run", 2, "", [&] {
    for (const int rank : {0, 1}) ::kill(process(rank), SIGTERM);
  });
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(times_said(result.output, "stopped after"), 1u) << result.output;
  expect_resumes("run");
}

TEST_F(TrainMpirun, DetectsDifferencesAtStart) {
  const auto two = [&](const std::string& first, const std::string& second) {
    return shell(mpirun(fmt::format("-n 1 {} {} : -n 1 {} {}", FURIOUS_BINARY, first, FURIOUS_BINARY, second)));
  };
  RunResult result = two(train("run", "--lr 0.5"), train("run", "--lr 0.25"));
  EXPECT_EQ(result.code, 1);
  expect_parts(result, {"rank 1 (", "its --lr is 0.25, but rank 0 has 0.5"});
  EXPECT_EQ(times_said(result.output, "furious: "), 1u) << result.output;
  const std::string bench = "bench step --hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --device cpu ";
  result = two(bench + "--length 24", bench + "--length 48");
  EXPECT_EQ(result.code, 1);
  expect_parts(result, {"rank 1 (", "its --length is 48, but rank 0 has 24"});
  const std::string other = small_data(folder, "other");
  fs::remove_all(other);
  {
    TokenizeOptions options;
    options.inputs = {folder.write("other.txt", std::string(5000, 'x') + "\n")};
    options.tokenizer = "byte";
    options.out = other;
    tokenize_corpus(options);
  }
  result = two(train("run", ""), train("run", "--data " + other));
  EXPECT_EQ(result.code, 1);
  expect_parts(result, {"rank 1 (", "its data is fnv1a64:"});
  // Another binary: a copy with a few bytes appended.
  const std::string changed = folder.path("furious");
  fs::copy_file(FURIOUS_BINARY, changed);
  std::ofstream(changed, std::ios::app) << "another";
  result = shell(
      mpirun(fmt::format("-n 1 {} {} : -n 1 {} {}", FURIOUS_BINARY, train("run", ""), changed, train("run", ""))));
  EXPECT_EQ(result.code, 1);
  expect_parts(result, {"rank 1 (", "its program is furious"});
  EXPECT_FALSE(fs::exists(folder.path("run")));
}

TEST_F(TrainMpirun, AnErrorOfOneRankEndsAll) {
  RunResult result = run_ranks(2, train("run", "--data /nowhere"));
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(times_said(result.output, "/nowhere"), 1u) << result.output;
  // The folder of rank 0 is removed; the other ranks do not see that.
  result = disturb("run", 2, "", [&] { fs::rename(folder.path("run"), folder.path("elsewhere")); });
  EXPECT_NE(result.code, 0);
  expect_parts(result, {"furious: rank 0 (", ") in step ", "cannot", "--resume, from "});
  EXPECT_EQ(times_said(result.output, " in step "), 1u) << result.output;
  expect_resumes("elsewhere");
}

TEST_F(TrainMpirun, BenchStepReportsScaling) {
  const std::string json = folder.path("step.json");
  const RunResult result = run_ranks(
      2, fmt::format("bench step --hidden 32 --intermediate 32 --heads 2 --layers 2 --batch 4 --length 24 --threads 1 "
                     "--vocab 100 --steps 2 --reduce bf16 --device cpu --json {}",
                     json));
  EXPECT_EQ(result.code, 0);
  expect_parts(result, {"2 ranks:", "tokens/s each", "scaling efficiency", "in communication"});
  const auto scaling = nlohmann::json::parse(read_file(json)).at("scaling");
  EXPECT_EQ(scaling.at("ranks"), 2);
  EXPECT_EQ(scaling.at("tokens_per_second_of_ranks").size(), 2u);
  EXPECT_GT(scaling.at("efficiency"), 0);
  EXPECT_GT(scaling.at("waiting_seconds"), 0);
}

TEST_F(TrainMpirun, OtherCommandsRefuseSeveralRanks) {
  const RunResult result = run_ranks(2, "presets");
  EXPECT_EQ(result.code, 1);
  expect_parts(result, {"`presets` runs in one process"});
}

TEST(SeveralProcesses, AreRefusedWithoutMpi) {
  if (!std::string(FURIOUS_MPIRUN).empty()) GTEST_SKIP() << "built with MPI";
  const RunResult result = run("train --data x --out y", "OMPI_COMM_WORLD_SIZE=2");
  EXPECT_EQ(result.code, 1);
  expect_parts(result, {"2 processes were started together", "built without MPI"});
}

}  // namespace
}  // namespace furious
