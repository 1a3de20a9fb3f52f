// Concurrent use of the public interface gives the same results as sequential
// use. `make tsan` runs these under the thread sanitizer.
#include <gtest/gtest.h>

#include <thread>

#include "base/file.h"
#include "base/parallel.h"
#include "furious/model.h"
#include "signals.h"
#include "train/small_run.h"

namespace furious {
namespace {

using namespace furious::testing;

// Runs f(0), f(1), … each on a thread of its own.
template <class F>
void side_by_side(int count, F&& f) {
  std::vector<std::thread> all;
  for (int i = 0; i < count; ++i) all.emplace_back([&f, i] { f(i); });
  for (std::thread& thread : all) thread.join();
}

class Threads : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data;

  void SetUp() override { data = small_data(folder); }

  TrainOptions options(const std::string& out, const std::string& arch = "2mamba") const {
    TrainOptions options = small_options(data, folder.path(out));
    options.arch = arch;
    options.threads = 2;
    options.sample_every = 6;
    options.sample_tokens = 4;
    return options;
  }
  std::string weights_of(const TrainResult& result) const {
    return read_file(result.checkpoint + "/model.safetensors");
  }
};

std::string written(const Model& model, int which) {
  Session session(model, 1 + which % 2);
  session.read(std::string(20 + 7 * static_cast<size_t>(which), static_cast<char>('a' + which)));
  WriteOptions options;
  options.tokens = 80;  // past a fold
  options.sampling.seed = static_cast<uint64_t>(which);
  std::string all;
  for (const Text& text : session.write(options)) all += text.text + "|";
  return all;
}

TEST_F(Threads, SessionsOfOneModel) {
  for (const char* arch : {"2mamba", "softmax"}) {
    const TrainResult run = train(options(fmt::format("run-{}", arch), arch));
    LoadOptions load;
    load.device = "cpu";
    load.threads = 2;
    const Model model = Model::load(run.checkpoint, load);
    constexpr int kSessions = 8;
    std::vector<std::string> alone(kSessions), together(kSessions);
    for (int i = 0; i < kSessions; ++i) alone[i] = written(model, i);
    side_by_side(kSessions, [&](int i) { together[i] = written(model, i); });
    EXPECT_EQ(together, alone) << arch;
  }
}

TEST_F(Threads, ConcurrentTraining) {
  const std::vector<std::string> archs = {"2mamba", "2mamba", "mamba2", "softmax"};
  std::vector<std::string> alone, together(archs.size());
  for (const std::string& arch : archs)
    alone.push_back(weights_of(train(options(fmt::format("alone-{}", alone.size()), arch))));
  EXPECT_EQ(alone[0], alone[1]);
  side_by_side(static_cast<int>(archs.size()),
               [&](int i) { together[i] = weights_of(train(options(fmt::format("together-{}", i), archs[i]))); });
  for (size_t i = 0; i < archs.size(); ++i) EXPECT_TRUE(together[i] == alone[i]) << archs[i];
}

TEST_F(Threads, TheNumberOfThreadsChangesNoBit) {
  std::vector<std::string> weights;
  for (const int count : {1, 2, 5}) {
    TrainOptions with = options(fmt::format("run-{}", count));
    with.threads = count;
    with.hidden = with.intermediate = 128;
    with.batch = 8;
    with.length = 96;  // large enough that threads share products and loops
    with.steps = 3;
    weights.push_back(weights_of(train(with)));
  }
  EXPECT_TRUE(weights[0] == weights[1]);
  EXPECT_TRUE(weights[0] == weights[2]);
  EXPECT_EQ(threads(), available_cores());  // that of a training ends with it
}

// A program with a timer: its handler runs on every thread that trains.
TEST_F(Threads, TrainingUnderConstantSignals) {
  const auto weights = [&](const std::string& out) {
    TrainOptions with = options(out);
    with.hidden = with.intermediate = 64;
    return weights_of(train(with));
  };
  const std::string expected = weights("quiet");
  std::vector<std::string> disturbed(2);
  const int64_t before = ManySignals::handled();
  side_by_side(2, [&](int i) {
    const ManySignals signals;
    disturbed[i] = weights(fmt::format("disturbed-{}", i));
  });
  for (const std::string& one : disturbed) EXPECT_TRUE(one == expected);
  EXPECT_GT(ManySignals::handled(), before);
}

TEST_F(Threads, LoadingChecksTheirNumber) {
  LoadOptions load;
  load.threads = -1;
  expect_error([&] { Model::load(folder.path("nothing"), load); }, {"threads is -1"});
}

}  // namespace
}  // namespace furious
