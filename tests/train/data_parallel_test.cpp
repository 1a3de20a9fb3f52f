// Training by several ranks. WorldTrainer also runs under mpirun (tests/CMakeLists.txt).
#include "base/hash.h"
#include "ops/elementwise.h"
#include "train/options.h"
#include "train/small_run.h"
#include "train/training.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<double> weights_of(const Training& trainer) {
  std::vector<double> all;
  for (const Parameter& parameter : trainer.model().parameters())
    for (double x : to_doubles(parameter.value.value())) all.push_back(x);
  return all;
}

class WorldTrainer : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);
  TrainOptions options = small_options(data, folder.path("run"));
  Communicator& ranks = Communicator::world();

  // The same batches by this process alone and by all together.
  void expect_same(const DataParallel& parallel, double tolerance, const std::string& what) {
    Training alone(options), all(options, parallel);
    EXPECT_NEAR(*all.test_loss(), *alone.test_loss(), 1e-5) << what;
    for (int i = 0; i < 6; ++i) {
      const TrainStep expected = alone.step(), actual = all.step();
      EXPECT_NEAR(actual.loss, expected.loss, tolerance) << what << ", step " << i;
      EXPECT_NEAR(actual.gradient_norm, expected.gradient_norm, tolerance * expected.gradient_norm) << what;
      ASSERT_TRUE(actual.ranks.has_value());
      EXPECT_EQ(actual.ranks->ranks, ranks.size());
      EXPECT_GE(actual.ranks->slowest_seconds, actual.ranks->fastest_seconds);
      EXPECT_LT(actual.ranks->slowest, ranks.size());
    }
    EXPECT_LT(relative_error(weights_of(all), weights_of(alone)), 10 * tolerance) << what;
    EXPECT_NEAR(*all.test_loss(), *alone.test_loss(), tolerance) << what;
    EXPECT_EQ(
        ranks.all_gather(hash_of(fmt::format("{}", fmt::join(weights_of(all), " ")))),
        std::vector(static_cast<size_t>(ranks.size()), hash_of(fmt::format("{}", fmt::join(weights_of(all), " ")))))
        << what << ": the ranks differ";
  }
};

TEST_F(WorldTrainer, LearnsWhatOneProcessLearns) {
  for (const int64_t bucket : {64, 1000, 5000, 0}) expect_same({ranks, true, bucket}, 2e-4, fmt::format("{}", bucket));
}

TEST_F(WorldTrainer, MatchesASingleProcessForOtherOptions) {
  for (const char* packing : {"isolated", "rows"}) {
    options.packing = packing;
    options.clip = 0.5;
    expect_same({ranks, true, 512}, 2e-4, packing);
  }
  options.packing = "packed";
  options.tie_embeddings = true;
  options.recompute = true;
  options.batch = 8;
  options.accumulate = 2;
  expect_same({ranks, true, 512}, 2e-4, "tied, recomputed, in parts");
  options.arch = "mamba2";
  options.data = "synthetic:recall";
  options.length = 64;
  expect_same({ranks, true, 512}, 2e-4, "mamba2");
}

TEST_F(WorldTrainer, DecayGroupsAndAveragesAreShared) {
  options.weight_decay = 0.5;
  options.ema = 0.9;
  for (const char* group : {"matrices", "layers"}) {
    options.decay_on = group;
    for (const int64_t bucket : {64, 1000, 0}) expect_same({ranks, true, bucket}, 2e-4, group);
  }
}

// Parts of ranks cut through matrices and through the parts of qkv_proj.
TEST_F(WorldTrainer, MuonIsShared) {
  options.optimizer = "muon";
  options.weight_decay = 0.5;
  for (const char* group : {"all", "matrices"}) {
    options.decay_on = group;
    for (const int64_t bucket : {64, 1000, 5000, 0}) expect_same({ranks, true, bucket}, 2e-4, group);
  }
}

TEST_F(WorldTrainer, SendsInBf16) {
  options.reduce = "bf16";
  expect_same({ranks, true, 512}, 2e-2, "bf16");
}

TEST_F(WorldTrainer, DivergenceOfOneRankIsReportedOnAll) {
  const int last = ranks.size() - 1;
  for (const char* name : {"model.layers.1.self_attn.A_mask_proj.weight", "lm_head.weight"}) {
    Training trainer(options, {ranks, true, 512});
    trainer.step();
    for (const Parameter& parameter : trainer.model().parameters())
      if (parameter.name == name && ranks.rank() == last) fill(parameter.value.value(), std::nanf(""));
    const std::string rank = last > 0 ? fmt::format("rank {}: step 2", last) : "step 2";
    expect_error([&] { trainer.step(); }, {rank, "not finite"});
  }
  // All ranks diverged: no single rank is named.
  options.lr = 10;
  options.warmup = 0;
  Training trainer(options, {ranks, true, 512});
  expect_error(
      [&] {
        for (int i = 0; i < 12; ++i) trainer.step();
      },
      {"train: step ", "exploded"});
}

// One rank with a sharded optimizer equals a single process bit for bit, including its checkpoint.
class OneRank : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(DataParallel, OneRank, ::testing::Values("adamw", "muon"));

TEST_P(OneRank, EqualsASingleProcess) {
  const TemporaryFolder folder;
  TrainOptions options = small_options(small_data(folder), folder.path("run"));
  options.optimizer = GetParam();
  options.accumulate = 2;
  const DataParallel parallel{Communicator::alone(), true, 512};
  Training plain(options), sharded(options, parallel);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(sharded.step().loss, plain.step().loss);
  EXPECT_EQ(weights_of(sharded), weights_of(plain));
  for (const char* name : {"plain", "sharded"}) std::filesystem::create_directory(folder.path(name));
  plain.save(folder.path("plain"));
  sharded.save(folder.path("sharded"));
  EXPECT_TRUE(read_folder(folder.path("plain")) == read_folder(folder.path("sharded")));
  Training plain_on(options, folder.path("sharded")), sharded_on(options, folder.path("plain"), parallel);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(sharded_on.step().loss, plain_on.step().loss);
  EXPECT_EQ(weights_of(sharded_on), weights_of(plain_on));
}

TEST(DataParallel, RefusesABatchThatRanksCannotShare) {
  TrainOptions options;
  options.batch = 12;
  options.accumulate = 2;
  for (const int ranks : {1, 2, 3, 6}) check_division(options, ranks);
  expect_error([&] { check_division(options, 4); },
               {"batch of 12", "4 ranks with 2 micro-batches", "start 1, 2, 3, 6 of them", "a batch of 8 or 16"});
}

}  // namespace
}  // namespace furious
