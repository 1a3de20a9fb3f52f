#include "train/training.h"

#include <cstring>
#include <filesystem>

#include "model/checkpoint.h"
#include "model/cost.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/optim/muon.h"
#include "tensor/arena.h"
#include "train/small_run.h"

namespace furious {
namespace {

using namespace furious::testing;

class TrainingTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);
  TrainOptions options = small_options(data, folder.path("run"));
};

std::vector<double> weights_of(const Training& trainer) {
  std::vector<double> all;
  for (const Parameter& parameter : trainer.model().parameters())
    for (double x : to_doubles(parameter.value.value())) all.push_back(x);
  return all;
}

TEST_F(TrainingTest, LearnsAndReports) {
  options.steps = 80;
  Training trainer(options);
  const double untrained = *trainer.test_loss();
  EXPECT_NEAR(untrained, std::log(258.0), 0.1);
  TrainStep last;
  for (int i = 1; i <= 80; ++i) {
    last = trainer.step();
    ASSERT_EQ(last.step, i);
    ASSERT_GT(last.gradient_norm, 0);
    ASSERT_GT(last.tokens_per_second, 0);
    ASSERT_GT(last.mfu, 0);
  }
  EXPECT_LT(last.loss, 3);
  EXPECT_LT(*trainer.test_loss(), 3);
  EXPECT_FALSE(trainer.sample(20).empty());
}

TEST_F(TrainingTest, OutOfMemoryInAStepSaysWhatWouldFit) {
  options.length = 512;
  options.batch = 32;
  Training whole(options), trainer(options);
  Arena& arena = Arena::of({});
  arena.trim();
  arena.set_limit(arena.usage().reserved + (size_t{8} << 20));
  expect_error([&] { trainer.step(); },
               {"step 1", "out of memory on cpu", "MiB requested", "are free", "--recompute would need"});
  arena.set_limit(0);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(trainer.step().loss, whole.step().loss);  // nothing was lost
  EXPECT_EQ(weights_of(trainer), weights_of(whole));
}

// A loss that explodes is found after the update: the step counts, for AdamW as for the average of the weights.
TEST_F(TrainingTest, AStepThatExplodesCounts) {
  options.ema = 0.5;
  Training trainer(options);
  std::vector<double> sum(weights_of(trainer).size());
  for (int i = 1; i <= 2; ++i) {
    const std::vector<double> before = weights_of(trainer);
    for (const Parameter& parameter : trainer.model().parameters())
      if (parameter.name == "lm_head.weight") {
        fill(parameter.value.value(), 1000);
        fill(parameter.value.value().slice(0, 0, 1), -1000);
      }
    expect_error([&] { trainer.step(); }, {fmt::format("step {}:", i), "exploded"});
    EXPECT_EQ(trainer.steps_done(), i);
    const std::vector<double> after = weights_of(trainer);
    EXPECT_NE(after, before);
    for (size_t k = 0; k < sum.size(); ++k) sum[k] = 0.5 * sum[k] + 0.5 * after[k];
  }
  std::filesystem::create_directory(folder.path("saved"));
  trainer.save(folder.path("saved"));
  const LanguageModel average = load_model(folder.path("saved/ema"));
  std::vector<double> averaged;
  for (const Parameter& parameter : average.parameters())
    for (double x : to_doubles(parameter.value.value())) averaged.push_back(x);
  for (double& x : sum) x /= 0.75;
  EXPECT_LT(relative_error(averaged, sum), 1e-6);
}

TEST_F(TrainingTest, AProfiledStepComputesTheSame) {
  for (const bool recompute : {false, true}) {
    options.recompute = recompute;
    Training plain(options), profiled(options);
    for (int i = 0; i < 2; ++i) {
      Profiler profiler({});
      EXPECT_EQ(profiled.step(&profiler).loss, plain.step().loss);
      int64_t mixers = 0, again = 0;
      for (const Profiler::Row& row : profiler.rows())
        if (row.label.role == "mixer") (row.pass == StepPass::forward ? mixers : again) += row.calls;
      EXPECT_EQ(mixers, plain.model().config().layers);
      EXPECT_EQ(again, (recompute ? 2 : 1) * mixers);  // the forward pass that runs again counts as backward
    }
    EXPECT_EQ(weights_of(profiled), weights_of(plain));
  }
}

TEST_F(TrainingTest, MicroBatchesAddUp) {
  for (const char* packing : {"packed", "isolated", "rows"}) {
    options.packing = packing;
    options.accumulate = 1;
    Training whole(options);
    options.accumulate = 4;
    Training parts(options);
    for (int i = 0; i < 3; ++i) {
      const TrainStep a = whole.step(), b = parts.step();
      EXPECT_NEAR(a.loss, b.loss, 1e-5) << packing;
      EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 1e-4 * a.gradient_norm) << packing;
    }
  }
}

// The first step changes a parameter by lr·g / (|g| + eps).
TEST_F(TrainingTest, EpsReachesTheOptimizer) {
  options.weight_decay = 0;
  options.warmup = 0;
  options.lr = 0.5;
  for (const bool sharded : {false, true}) {
    DataParallel parallel;
    parallel.sharded = sharded;
    const auto change = [&](double eps) {
      options.eps = eps;
      Training trainer(options, parallel);
      std::vector<double> weights = weights_of(trainer);
      trainer.step();
      const std::vector<double> after = weights_of(trainer);
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = after[i] - weights[i];
      return weights;
    };
    const std::vector<double> of_a_small = change(1e-3), of_a_large = change(1e-2);
    std::vector<double> expected;
    for (const double moved : of_a_small) {
      const double part = std::abs(moved) / options.lr, gradient = 1e-3 * part / (1 - part);
      expected.push_back(std::copysign(options.lr * gradient / (gradient + 1e-2), moved));
    }
    EXPECT_LT(relative_error(of_a_large, expected), 1e-3) << sharded;
    EXPECT_GT(relative_error(of_a_large, of_a_small), 0.1) << sharded;
  }
}

// Training and its test loss see rows that begin with bos.
TEST_F(TrainingTest, RowsWithBos) {
  options.packing = "rows";
  const double without = *Training(options).test_loss();
  options.bos = true;
  Training trainer(options);
  EXPECT_NE(*trainer.test_loss(), without);
  for (const BatchSource* source : {trainer.data().batches.get(), trainer.data().test.get()}) {
    const Batch batch = source->at(0);
    for (int64_t row = 0; row < batch.inputs.size(0); ++row)
      EXPECT_EQ(batch.inputs.data<int32_t>()[row * batch.inputs.size(1)], 256);
  }
  EXPECT_GT(trainer.step().loss, 0);
}

// The checkpoint records how texts begin in training, also if the initial weights came from another model.
TEST_F(TrainingTest, ModelRecordsWhetherTextsBeginWithBos) {
  options.packing = "rows";
  const std::string path = folder.path("model");
  for (const bool first : {false, true}) {
    options.bos = first;
    options.init.clear();
    std::filesystem::create_directories(path);
    Training(options).save(path);
    EXPECT_EQ(load_config(path).bos, first);
    options.init = path;
    for (const bool then : {false, true}) {
      options.bos = then;
      EXPECT_EQ(Training(options).model().config().bos, then);
    }
  }
}

TEST_F(TrainingTest, RefusesInitialWeightsOfAnotherTokenizer) {
  const std::string path = folder.path("model");
  std::filesystem::create_directories(path);
  Training(options).save(path);
  options.init = path;
  EXPECT_GT(Training(options).step().loss, 0);
  std::filesystem::remove(path + "/tokenizer_config.json");
  folder.write("model/tokenizer.model", small_model());
  expect_error([&] { Training{options}; }, {data, "tokenized with byte", "model's tokenizer"});
}

TEST_F(TrainingTest, ClippingBoundsTheGradientNotItsReport) {
  Training free(options);
  options.clip = 1e-3;
  Training clipped(options);
  EXPECT_EQ(free.step().gradient_norm, clipped.step().gradient_norm);
  // The first step of Adam is independent of the gradient's scale, the second is not.
  free.step();
  clipped.step();
  EXPECT_GT(relative_error(weights_of(clipped), weights_of(free)), 1e-6);
}

TEST_F(TrainingTest, MuonLearnsAndItsMemoryIsCounted) {
  options.steps = 80;
  options.lr = 1e-2;
  Training adamw(options);
  options.optimizer = "muon";
  options.data = data;
  Training muon(options);
  EXPECT_LT(muon.memory().parameters, adamw.memory().parameters);  // one moment less for matrices
  TrainStep last;
  for (int i = 0; i < 80; ++i) last = muon.step();
  EXPECT_LT(last.loss, 3);
  EXPECT_LT(*muon.test_loss(), 3);
  options.ema = 0.99;
  const Training averaged(options);
  EXPECT_EQ(averaged.memory().parameters - muon.memory().parameters, 4 * static_cast<int64_t>(weights_of(muon).size()));
}

// The update of every parameter of a model, from the gradients of the step and the formulas of the optimizers.
TEST_F(TrainingTest, MuonUpdatesTheMatricesOfTheLayersAndAdamWTheRest) {
  options.arch = "mamba2";  // with a convolution, a gate, dt and D
  options.optimizer = "muon";
  options.clip = 0;
  options.lr = 1e-2;
  options.warmup = 0;
  options.weight_decay = 0.3;
  Training trainer(options);
  const ModelConfig& config = trainer.model().config();
  std::vector<Tensor> expected;
  for (const Parameter& parameter : trainer.model().parameters())
    expected.push_back(to_dtype(parameter.value.value(), DType::f32));
  const double rate = trainer.step().lr;
  const AdamW adamw{rate, options.weight_decay, options.beta1, options.beta2, options.eps};
  const AdamWConstants constants = adamw_constants(adamw, 1);
  const Tensor numbers = Tensor::empty({kAdamWConstants}, DType::f32);
  std::memcpy(numbers.raw(), &constants, sizeof(constants));
  int matrices = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Parameter& parameter = trainer.model().parameters()[i];
    const Tensor& gradient = trainer.gradients()[i];
    if (!gradient) continue;
    const auto has = [&](const char* text) { return parameter.name.find(text) != std::string::npos; };
    if (has("proj.weight")) {
      std::vector<int64_t> rows{gradient.size(0)};
      if (has("qkv_proj"))
        rows = {config.q_heads * config.qk_dim, config.k_heads * config.qk_dim, config.v_heads * config.head_dim};
      int64_t begin = 0;
      for (const int64_t count : rows) {
        const MuonTensors tensors{expected[i].slice(0, begin, count), gradient.slice(0, begin, count),
                                  Tensor::zeros({count, gradient.size(1)}, DType::f32)};
        muon_update(std::span(&tensors, 1), numbers, options.muon_momentum);
        begin += count;
      }
      ++matrices;
    } else {
      adamw_update(expected[i], gradient, Tensor::zeros(gradient.shape(), DType::f32),
                   Tensor::zeros(gradient.shape(), DType::f32), adamw, 1);
    }
    EXPECT_TRUE(same_bits(parameter.value.value(), expected[i])) << parameter.name;
  }
  EXPECT_GE(matrices, 2 * 5);
}

TEST_F(TrainingTest, WeightDecayOfGroups) {
  options.weight_decay = 0.5;
  options.lr = 1e-2;
  options.warmup = 0;
  for (const char* optimizer : {"adamw", "muon"}) {
    options.optimizer = optimizer;
    options.decay_on = "all";
    Training all(options);
    options.weight_decay = 0;
    Training none(options);
    options.weight_decay = 0.5;
    all.step();
    none.step();
    for (const char* group : {"matrices", "layers"}) {
      options.decay_on = group;
      Training trainer(options);
      trainer.step();
      for (size_t i = 0; i < trainer.model().parameters().size(); ++i) {
        const Parameter& parameter = trainer.model().parameters()[i];
        const bool embedding = parameter.name == "model.embed_tokens.weight" || parameter.name == "lm_head.weight";
        const bool matrix = parameter.name.ends_with("proj.weight");
        const bool decays = matrix || (embedding && group == std::string("matrices"));
        const Training& expected = decays ? all : none;
        EXPECT_TRUE(same_bits(parameter.value.value(), expected.model().parameters()[i].value.value()))
            << optimizer << " " << group << " " << parameter.name;
      }
    }
  }
}

TEST_F(TrainingTest, ZLossIsPartOfTheLossInTraining) {
  Training plain(options);
  options.z_loss = 1e-2;
  Training with(options);
  const double expected = 1e-2 * std::pow(std::log(258.0), 2);  // logits are about 0
  EXPECT_EQ(*plain.test_loss(), *with.test_loss());
  EXPECT_NEAR(with.step().loss - plain.step().loss, expected, 0.05 * expected);
  EXPECT_NE(weights_of(plain), weights_of(with));
}

// Against the weights of every step, averaged in double.
TEST_F(TrainingTest, AverageOfTheWeights) {
  options.ema = 0.8;
  Training trainer(options);
  std::vector<double> sum;
  double weight = 0;
  for (int step = 1; step <= 7; ++step) {
    trainer.step();
    const std::vector<double> now = weights_of(trainer);
    sum.resize(now.size());
    for (size_t i = 0; i < now.size(); ++i) sum[i] = 0.8 * sum[i] + 0.2 * now[i];
    weight = 0.8 * weight + 0.2;
  }
  for (double& each : sum) each /= weight;
  const std::string path = folder.path("saved");
  std::filesystem::create_directories(path);
  trainer.save(path);
  const LanguageModel average = load_model(path + "/ema");
  std::vector<double> found;
  for (const Parameter& parameter : average.parameters())
    for (const double x : to_doubles(parameter.value.value())) found.push_back(x);
  EXPECT_LT(relative_error(found, sum, 1e-3), 1e-5);
  EXPECT_NE(found, weights_of(trainer));
}

TEST_F(TrainingTest, SyntheticTasksNeedNoFiles) {
  for (const char* task : {"synthetic:recall", "synthetic:passkey", "synthetic:lookup"}) {
    options.data = task;
    options.length = 64;
    Training trainer(options);
    EXPECT_GT(trainer.step().loss, 0);
    EXPECT_TRUE(trainer.test_loss().has_value());
    EXPECT_TRUE(trainer.sample(5).empty());
  }
  options.data = "synthetic:recal";
  expect_error([&] { Training{options}; }, {"synthetic:recal", "synthetic:recall"});
}

TEST_F(TrainingTest, Bf16ProductsLearnTheSame) {
  options.dtype = "tf32";
  expect_error([&] { Training{options}; }, {"TF32", "--dtype f32"});
  options.dtype = "fp8";
  expect_error([&] { Training{options}; }, {"a CPU", "fp8", "--dtype bf16", "8.9"});
  options.dtype = "bf16";
  if (!matmul_supports(MatmulPrecision::bf16)) {
    expect_error([&] { Training{options}; }, {"bf16", "--dtype f32"});
    GTEST_SKIP() << "no bf16 products here";
  }
  Training rounded(options);
  options.dtype = "f32";
  Training exact(options);
  double difference = 0;
  for (int i = 0; i < 10; ++i) difference = rounded.step().loss - exact.step().loss;
  EXPECT_NEAR(difference, 0, 0.05);
  EXPECT_NE(difference, 0);
}

// An estimate too small would run out of memory later; one too large would refuse models that fit.
TEST_F(TrainingTest, MemoryEstimateIsCloseToThePeak) {
  for (const char* arch : {"2mamba", "mamba2", "softmax", "linear", "mamba2-paper", "2mamba-outnorm-dt", "fox"}) {
    for (const bool recompute : {false, true}) {
      options.arch = arch;
      options.recompute = recompute;
      options.layers = 4;
      options.length = 96;
      options.batch = 6;
      Arena& arena = Arena::of({});
      const auto before = static_cast<double>(arena.usage().live);
      Training trainer(options);
      arena.reset_peak();
      trainer.step();
      trainer.step();
      const double peak = static_cast<double>(arena.usage().peak) - before;
      const auto estimate = static_cast<double>(
          training_memory(trainer.model().config(), options.batch, options.length, recompute).total());
      EXPECT_GT(estimate, 0.97 * peak) << arch << " " << recompute;
      EXPECT_LT(estimate, 1.5 * peak) << arch << " " << recompute;
    }
  }
}

TEST_F(TrainingTest, AppliesTheInitialization) {
  for (const std::string& name : initialization_names()) {
    options.initialization = name;
    const Training trainer(options);
    const LanguageModel expected(trainer.model().config(), options.seed, {}, initialization_from_name(name));
    for (size_t i = 0; i < expected.parameters().size(); ++i)
      EXPECT_TRUE(same_bits(trainer.model().parameters()[i].value.value(), expected.parameters()[i].value.value()));
  }
}

TEST_F(TrainingTest, TrainsWithADimensionOfQueriesAndKeys) {
  options.qk_dim = 24;
  Training trainer(options);
  EXPECT_EQ(trainer.model().config().qk_dim, 24);
  EXPECT_NE(trainer.model().config().head_dim, 24);
  double first = 0, last = 0;
  for (int i = 0; i < 12; ++i) (i == 0 ? first : last) = trainer.step().loss;
  EXPECT_LT(last, first);
}

TEST_F(TrainingTest, StepsAllocateNothingFromTheSystem) {
  Training trainer(options);
  for (int i = 0; i < 3; ++i) trainer.step();
  const size_t made = Arena::of({}).usage().segments_made;
  for (int i = 0; i < 5; ++i) trainer.step();
  EXPECT_EQ(Arena::of({}).usage().segments_made, made);
}

TEST_F(TrainingTest, TestLossDoesNotDependOnMicroBatches) {
  Training whole(options);
  options.accumulate = 4;
  Training parts(options);
  EXPECT_NEAR(*whole.test_loss(), *parts.test_loss(), 1e-6);
}

TEST_F(TrainingTest, RefusesModelsThatDoNotFit) {
  options.data = "synthetic:recall";
  options.batch = 1 << 24;
  options.length = 1 << 26;
  expect_error([&] { Training{options}; }, {"train: needs about 2", "smaller --size"});
  options.data = data;
  options.batch = 1 << 20;
  options.length = 600;
  expect_error([&] { Training{options}; }, {"GiB", "activations", "are free", "--accumulate"});
  options.hidden = options.intermediate = 1 << 18;
  options.heads = 1 << 12;
  expect_error([&] { Training{options}; }, {"GiB", "parameters", "smaller --size"});
}

TEST_F(TrainingTest, SaysWhereItDiverged) {
  for (const auto& [name, place] :
       {std::pair{"model.layers.1.self_attn.A_mask_proj.weight", "model.layers.1.self_attn"},
        {"model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp"},
        {"lm_head.weight", "output projection"}}) {
    Training trainer(options);
    trainer.step();
    for (const Parameter& parameter : trainer.model().parameters())
      if (parameter.name == name) fill(parameter.value.value(), std::nanf(""));
    expect_error([&] { trainer.step(); }, {"step 2", place});
    expect_error([&] { trainer.test_loss(); }, {"step 2", place});
  }
  options.lr = 50;
  options.warmup = 0;
  Training trainer(options);
  expect_error(
      [&] {
        for (int i = 0; i < 50; ++i) trainer.step();
      },
      {"step ", "exploded", "--lr", "largest gradient"});
}

TEST(TrainingFlops, CountsProductsAndMixers) {
  ModelConfig config = model_config("2mamba", "tiny", 1000);
  const double one = training_flops(config, 1, 512);
  EXPECT_DOUBLE_EQ(training_flops(config, 3, 512), 3 * one);
  const double products = 6 * 512.0 * static_cast<double>(parameter_count(config) - 1000 * config.hidden);
  const double pairs = 512.0 * 513 / 2;
  const double mixers = 5 * 4 * pairs * (14 * 32);
  EXPECT_NEAR(one, products + mixers, 0.02 * one);
}

}  // namespace
}  // namespace furious
