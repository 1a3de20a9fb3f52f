// The NCCL path of several GPUs, with a single rank.
#include "cuda.h"
#include "dist/collectives.h"
#include "train/small_run.h"
#include "train/training.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<double> weights_of(const Training& trainer) {
  std::vector<double> all;
  for (const Parameter& parameter : trainer.model().parameters())
    for (double x : to_doubles(to_cpu(parameter.value.value()))) all.push_back(x);
  return all;
}

TEST(DataParallelCuda, OneRankEqualsASingleProcess) {
  SKIP_WITHOUT_GPU();
  if (!nccl_library().starts_with("NCCL 2")) GTEST_SKIP() << "no NCCL: " << nccl_library();
  const TemporaryFolder folder;
  TrainOptions options = small_options(small_data(folder), folder.path("run"));
  options.device = "cuda";
  for (const char* reduce : {"f32", "bf16"}) {
    for (const bool graph : {true, false}) {
      options.reduce = reduce;
      options.accumulate = graph ? 2 : 1;
      Training plain(options), sharded(options, {Communicator::alone(), true, 512});
      if (!graph) sharded.disable_graph();
      TrainStep expected, actual;
      for (int i = 0; i < 8; ++i) {
        expected = plain.step();
        actual = sharded.step();
        EXPECT_NEAR(actual.loss, expected.loss, options.reduce == "f32" ? 0 : 0.02) << reduce << ", step " << i;
      }
      ASSERT_TRUE(actual.ranks.has_value());
      EXPECT_GT(actual.ranks->slowest_seconds, 0);
      EXPECT_GE(actual.ranks->waiting_seconds, 0);
      const double error = relative_error(weights_of(sharded), weights_of(plain));
      EXPECT_LE(error, options.reduce == "f32" ? 0 : 0.05) << reduce;
    }
  }
}

TEST(DataParallelCuda, SavesTheSameCheckpointAsASingleProcess) {
  SKIP_WITHOUT_GPU();
  if (!nccl_library().starts_with("NCCL 2")) GTEST_SKIP() << "no NCCL: " << nccl_library();
  const TemporaryFolder folder;
  TrainOptions options = small_options(small_data(folder), folder.path("run"));
  options.device = "cuda";
  const DataParallel parallel{Communicator::alone(), true, 512};
  Training plain(options), sharded(options, parallel);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(sharded.step().loss, plain.step().loss);
  for (const char* name : {"plain", "sharded"}) std::filesystem::create_directory(folder.path(name));
  plain.save(folder.path("plain"));
  sharded.save(folder.path("sharded"));
  EXPECT_TRUE(read_folder(folder.path("plain")) == read_folder(folder.path("sharded")));
  Training on(options, folder.path("sharded"), parallel);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(on.step().loss, plain.step().loss);
}

}  // namespace
}  // namespace furious
