// furious::Trainer: batches, losses, gradients and checkpoints of a training loop of the caller's own.
#include <filesystem>
#include <limits>

#include "data/corpus.h"
#include "furious/model.h"
#include "furious/train.h"
#include "train/trainer_run.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr int64_t kVocabulary = 40;

TrainOptions own_options() {
  TrainOptions options = small_options("", "");
  options.batch = 2;
  options.length = 12;
  return options;
}

TokenBatch random_batch(Random& random, int64_t rows = 2, int64_t length = 12) {
  TokenBatch batch{rows, length, {}};
  for (int64_t i = 0; i < rows * length; ++i)
    batch.ids.push_back(static_cast<int32_t>(random.integer(0, kVocabulary - 1)));
  return batch;
}

std::vector<std::vector<float>> parameters_of(const Trainer& trainer) {
  std::vector<std::vector<float>> all;
  for (const std::string& name : trainer.parameter_names()) all.push_back(trainer.parameter(name).values);
  return all;
}

std::vector<std::vector<float>> gradients_of(const Trainer& trainer) {
  std::vector<std::vector<float>> all;
  for (const std::string& name : trainer.parameter_names()) all.push_back(trainer.gradient(name).values);
  return all;
}

TEST(Trainer, EqualsARunOnTheSameBatches) {
  for (const char* packing : {"packed", "isolated", "rows"}) {
    const TemporaryFolder folder;
    TrainOptions options = small_options(small_data(folder), folder.path("run"));
    options.packing = packing;
    expect_trainer_equals_run(options, folder.path("own"));
    EXPECT_EQ(Model::load(folder.path("own")).vocabulary(), 258);
  }
}

// Along a direction for each parameter tensor: the derivative of L(p + td) at t = 0 is g·d. Central differences with
// two steps, extrapolated. The loss is an f32, so that a difference has an error of its last bits over the step.
TEST(Trainer, GradientsAgreeWithDifferencesOfTheLoss) {
  Random random(1);
  Trainer trainer(own_options(), {.vocabulary = kVocabulary});
  for (const std::string& name : trainer.parameter_names()) {  // large enough that every parameter has an effect
    std::vector<float> values = trainer.parameter(name).values;
    for (float& value : values) value += static_cast<float>(0.2 * random.normal());
    trainer.set_parameter(name, values);
  }
  TokenBatch batch = random_batch(random);
  batch.documents = {5, 12, 20};
  for (size_t i = 0; i < batch.ids.size(); ++i) batch.weights.push_back(static_cast<float>(random.uniform(-0.5, 2)));
  const TrainStep step = trainer.backward(batch);
  EXPECT_EQ(step.tokens, 24 - 2 - 2);
  EXPECT_NEAR(step.loss, trainer.evaluate(batch), 1e-6);
  double squares = 0;
  int exact = 0;
  const std::vector<std::string> names = trainer.parameter_names();
  for (const std::string& name : names) {
    const std::vector<float> gradient = trainer.gradient(name).values, value = trainer.parameter(name).values;
    double norm = 0, size = 0;
    for (const float g : gradient) norm += static_cast<double>(g) * static_cast<double>(g);
    for (const float x : value) size += static_cast<double>(x) * static_cast<double>(x);
    squares += norm;
    ASSERT_GT(norm, 0) << name;
    // The gradient's own direction and noise of half its size, as a vector of length 1.
    std::vector<double> direction;
    double slope = 0, length = 0;
    for (const float g : gradient) {
      const double noise = random.normal() * std::sqrt(norm / static_cast<double>(gradient.size()));
      direction.push_back(static_cast<double>(g) + 0.5 * noise);
      slope += static_cast<double>(g) * direction.back();
      length += direction.back() * direction.back();
    }
    length = std::sqrt(length);
    slope /= length;
    const auto loss_at = [&](double by) {
      std::vector<float> moved = value;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += static_cast<float>(by * direction[i] / length);
      trainer.set_parameter(name, moved);
      return trainer.evaluate(batch);
    };
    const double h = std::min(0.05 * std::sqrt(size), 1e-2 / std::abs(slope));
    const auto difference = [&](double by) { return (loss_at(by) - loss_at(-by)) / (2 * by); };
    const double measured = (4 * difference(h / 2) - difference(h)) / 3;
    trainer.set_parameter(name, value);
    const double rounding = 2e-6 * (1 + std::abs(step.loss)) / h;
    EXPECT_NEAR(measured, slope, 0.02 * std::abs(slope) + rounding) << name;
    exact += rounding < 0.03 * std::abs(slope);
  }
  EXPECT_GE(exact, static_cast<int>(names.size()) - 2) << "rounding would hide errors";
  EXPECT_NEAR(step.gradient_norm, std::sqrt(squares), 1e-5 * step.gradient_norm);
}

TEST(Trainer, BackwardIsAStepWithoutTheUpdate) {
  Random random(2);
  const TokenBatch batch = random_batch(random);
  Trainer one(own_options(), {.vocabulary = kVocabulary}), other(own_options(), {.vocabulary = kVocabulary});
  const auto before = parameters_of(one);
  const TrainStep without = one.backward(batch);
  EXPECT_EQ(parameters_of(one), before);
  EXPECT_EQ(one.steps_done(), 0);
  const TrainStep with = other.step(batch);
  EXPECT_EQ(without.loss, with.loss);
  EXPECT_EQ(without.gradient_norm, with.gradient_norm);
  EXPECT_EQ(gradients_of(one), gradients_of(other));
  EXPECT_NE(parameters_of(other), before);
  one.step(batch);
  EXPECT_EQ(parameters_of(one), parameters_of(other));
}

TEST(Trainer, TargetsAreTheNextTokensUnlessGiven) {
  Random random(3);
  const Trainer trainer(own_options(), {.vocabulary = kVocabulary});
  TokenBatch batch = random_batch(random);
  TokenBatch given = batch;
  for (size_t i = 0; i < 24; ++i) given.targets.push_back(i % 12 == 11 ? -1 : batch.ids[i + 1]);
  EXPECT_EQ(trainer.evaluate(batch), trainer.evaluate(given));
  given.targets[3] = -1;
  EXPECT_NE(trainer.evaluate(batch), trainer.evaluate(given));
}

// A row of two documents against a row for each.
TEST(Trainer, DocumentsAreIndependent) {
  Random random(4);
  const Trainer trainer(own_options(), {.vocabulary = kVocabulary});
  TokenBatch both = random_batch(random, 1, 12);
  both.documents = {7};
  const TokenBatch first{1, 7, {both.ids.begin(), both.ids.begin() + 7}};
  const TokenBatch second{1, 5, {both.ids.begin() + 7, both.ids.end()}};
  EXPECT_NEAR(trainer.evaluate(both), (6 * trainer.evaluate(first) + 4 * trainer.evaluate(second)) / 10, 1e-6);
  both.documents = {0, 7};
  EXPECT_NEAR(trainer.evaluate(both), (6 * trainer.evaluate(first) + 4 * trainer.evaluate(second)) / 10, 1e-6);
}

// Micro-batches take their share of documents and weights.
TEST(Trainer, MicroBatchesAddUp) {
  Random random(5);
  TokenBatch batch = random_batch(random, 4, 12);
  batch.documents = {5, 12, 20, 36, 40};
  for (size_t i = 0; i < 48; ++i) batch.weights.push_back(static_cast<float>(random.uniform(0, 2)));
  TrainOptions options = own_options();
  Trainer whole(options, {.vocabulary = kVocabulary});
  options.batch = 4;
  options.accumulate = 4;
  Trainer parts(options, {.vocabulary = kVocabulary});
  const TrainStep a = whole.backward(batch), b = parts.backward(batch);
  EXPECT_NEAR(a.loss, b.loss, 1e-6);
  EXPECT_EQ(a.tokens, b.tokens);
  const auto expected = gradients_of(whole), actual = gradients_of(parts);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LT(relative_error(std::vector<double>(actual[i].begin(), actual[i].end()),
                             std::vector<double>(expected[i].begin(), expected[i].end()), 1e-8),
              1e-4)
        << whole.parameter_names()[i];
}

TEST(Trainer, WeightsOfTheLoss) {
  Random random(6);
  Trainer trainer(own_options(), {.vocabulary = kVocabulary}), same(own_options(), {.vocabulary = kVocabulary});
  TokenBatch batch = random_batch(random, 1, 6), ones = batch, weighted = batch;
  ones.weights.assign(6, 1);
  EXPECT_EQ(trainer.evaluate(ones), trainer.evaluate(batch));
  weighted.weights = {2, 0, -1, 0.5f, 3, 100};  // the last has no target
  double expected = 0;
  for (size_t i = 0; i < 5; ++i) {
    TokenBatch single = batch;
    single.targets.assign(6, -1);
    single.targets[i] = batch.ids[i + 1];
    expected += static_cast<double>(weighted.weights[i]) * trainer.evaluate(single) / 5;
  }
  EXPECT_NEAR(trainer.evaluate(weighted), expected, 1e-5);
  trainer.step(ones);
  same.step(batch);
  EXPECT_EQ(parameters_of(trainer), parameters_of(same));
  EXPECT_EQ(gradients_of(trainer), gradients_of(same));
  weighted.weights.assign(6, 1e4f);  // a large loss is no divergence where it has weights
  EXPECT_GT(trainer.step(weighted).loss, 1e4);
  weighted.weights.assign(6, 0);
  const TrainStep none = trainer.backward(weighted);
  EXPECT_EQ(none.loss, 0);
  EXPECT_EQ(none.gradient_norm, 0);
}

TEST(Trainer, ResumesBitForBit) {
  const TemporaryFolder folder;
  Random random(7);
  std::vector<TokenBatch> batches;
  for (int i = 0; i < 8; ++i) batches.push_back(random_batch(random, i % 3 == 0 ? 3 : 2, i % 2 == 0 ? 12 : 9));
  batches[6].weights.assign(batches[6].ids.size(), 0.5f);
  Trainer whole(own_options(), {.vocabulary = kVocabulary});
  for (int i = 0; i < 4; ++i) whole.step(batches[i]);
  whole.save(folder.path("middle"));
  Trainer resumed = Trainer::resume(folder.path("middle"));
  EXPECT_EQ(resumed.steps_done(), 4);
  EXPECT_EQ(resumed.vocabulary(), kVocabulary);
  EXPECT_EQ(resumed.options().lr, own_options().lr);
  for (int i = 4; i < 8; ++i) {
    const TrainStep a = whole.step(batches[i]), b = resumed.step(batches[i]);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.gradient_norm, b.gradient_norm);
    EXPECT_EQ(a.lr, b.lr);
    EXPECT_EQ(a.step, b.step);
  }
  EXPECT_EQ(parameters_of(whole), parameters_of(resumed));
  whole.save(folder.path("a"));
  resumed.save(folder.path("b"));
  for (const char* file : {"/model.safetensors", "/training.safetensors"})
    EXPECT_TRUE(read_file(folder.path("a") + file) == read_file(folder.path("b") + file)) << file;
  whole.save(folder.path("a"));  // again, in the place of the old one
}

// A Trainer goes on from a run, and a run from a Trainer.
TEST(Trainer, SharesCheckpointsWithRuns) {
  const TemporaryFolder folder;
  TrainOptions options = small_options(small_data(folder), folder.path("whole"));
  const TrainResult whole = train(options);
  options.out = folder.path("run");
  TrainObserver observer;
  int64_t done = 0;
  observer.step = [&](const TrainStep& step) { done = step.step; };
  observer.stop = [&] { return done == 5; };
  EXPECT_TRUE(train(options, observer).stopped);
  Trainer trainer = Trainer::resume(options.out);
  EXPECT_EQ(trainer.steps_done(), 5);
  for (int64_t step = 6; step <= 8; ++step) trainer.step(trainer.data_batch(step));
  trainer.save(options.out + "/step-00000008");
  options.resume = true;
  const TrainResult last = train(options);
  EXPECT_EQ(last.steps, 12);
  EXPECT_EQ(last.last.loss, whole.last.loss);
  EXPECT_TRUE(read_file(last.checkpoint + "/model.safetensors") == read_file(whole.checkpoint + "/model.safetensors"));
}

TEST(Trainer, LearningRateOfTheCaller) {
  Random random(8);
  const TokenBatch batch = random_batch(random);
  TrainOptions options = own_options();
  Trainer trainer(options, {.vocabulary = kVocabulary}), scheduled(options, {.vocabulary = kVocabulary});
  const auto before = parameters_of(trainer);
  trainer.set_learning_rate(0);
  EXPECT_EQ(trainer.step(batch).lr, 0);
  EXPECT_EQ(parameters_of(trainer), before);
  trainer.set_learning_rate(0.125);
  EXPECT_EQ(trainer.step(batch).lr, 0.125);
  EXPECT_NE(parameters_of(trainer), before);
  trainer.set_learning_rate({});
  scheduled.step(batch);
  scheduled.step(batch);
  EXPECT_EQ(trainer.step(batch).lr, scheduled.step(batch).lr);
}

TEST(Trainer, ParametersAreReadAndWritten) {
  Random random(9);
  const TokenBatch batch = random_batch(random);
  Trainer trainer(own_options(), {.vocabulary = kVocabulary}), other(own_options(), {.vocabulary = kVocabulary});
  const NamedArray embedding = trainer.parameter("model.embed_tokens.weight");
  EXPECT_EQ(embedding.shape, (std::vector<int64_t>{kVocabulary, 32}));
  trainer.step(batch);
  EXPECT_NE(trainer.parameter(embedding.name).values, embedding.values);
  for (const std::string& name : trainer.parameter_names()) other.set_parameter(name, trainer.parameter(name).values);
  EXPECT_EQ(other.evaluate(batch), trainer.evaluate(batch));
  EXPECT_EQ(parameters_of(other), parameters_of(trainer));
}

TEST(Trainer, StartsFromAModel) {
  const TemporaryFolder folder;
  Random random(10);
  TrainOptions options = own_options();
  Trainer first(options, {.tokenizer = "byte"});
  EXPECT_EQ(first.vocabulary(), 258);
  const TokenBatch batch = random_batch(random);
  first.step(batch);
  first.save(folder.path("model"));
  EXPECT_EQ(Model::load(folder.path("model")).encode("ab"), (std::vector<int32_t>{'a', 'b'}));
  options.init = folder.path("model");
  Trainer second(options);
  EXPECT_EQ(second.steps_done(), 0);
  EXPECT_EQ(parameters_of(second), parameters_of(first));
  second.save(folder.path("again"));  // with the tokenizer of the model
  EXPECT_EQ(Model::load(folder.path("again")).eos(), 257);
  EXPECT_EQ(Trainer(own_options(), {.vocabulary = 300, .tokenizer = "byte"}).vocabulary(), 300);
}

TEST(Trainer, CanBeCancelled) {
  const TemporaryFolder folder;
  Random random(11);
  int calls = 0, last = 3;
  const auto cancel = [&] { return ++calls > last; };
  EXPECT_THROW(Trainer(own_options(), {.vocabulary = kVocabulary, .cancel = cancel}), Cancelled);
  EXPECT_EQ(calls, 4);  // while the model was made

  TrainOptions options = own_options();
  options.batch = options.accumulate = 4;
  last = std::numeric_limits<int>::max();
  Trainer trainer(options, {.vocabulary = kVocabulary, .cancel = cancel}), other(options, {.vocabulary = kVocabulary});
  const TokenBatch batch = random_batch(random, 4);
  trainer.step(batch);
  other.step(batch);
  const auto before = parameters_of(trainer);
  last = calls + 3;  // between micro-batches
  EXPECT_THROW(trainer.step(batch), Cancelled);
  EXPECT_EQ(parameters_of(trainer), before);
  EXPECT_EQ(trainer.steps_done(), 1);
  expect_error([&] { trainer.gradient("model.norm.weight"); }, {"no gradients"});
  last = std::numeric_limits<int>::max();
  EXPECT_EQ(trainer.step(batch).loss, other.step(batch).loss);  // nothing was lost
  EXPECT_EQ(parameters_of(trainer), parameters_of(other));

  options = small_options("synthetic:recall", folder.path("run"));
  options.length = 128;
  TrainObserver observer;
  int64_t done = 0;
  observer.step = [&](const TrainStep& step) { done = step.step; };
  observer.cancel = [&] { return done == 7; };
  EXPECT_THROW(train(options, observer), Cancelled);
  EXPECT_EQ(Trainer::resume(folder.path("run")).steps_done(), 6);  // of the newest checkpoint
  observer.cancel = [] { return true; };
  options.resume = true;
  EXPECT_THROW(train(options, observer), Cancelled);  // while the model is loaded
}

TEST(Trainer, RefusesInvalidArguments) {
  const TemporaryFolder folder;
  Random random(12);
  const auto refused = [](const TrainOptions& options, const TrainerSetup& setup,
                          const std::vector<std::string>& parts) {
    expect_error([&] { Trainer(options, setup); }, parts);
  };
  TrainOptions options = own_options();
  refused(options, {}, {"number of token ids is not known"});
  refused(options, {.vocabulary = -1}, {"vocabulary of -1"});
  refused(options, {.vocabulary = 100, .tokenizer = "byte"}, {"vocabulary of 100", "258"});
  refused(options, {.tokenizer = folder.path("none")}, {"none"});
  options.lr = -1;
  refused(options, {.vocabulary = kVocabulary}, {"lr"});
  options = own_options();
  options.arch = "3mamba";
  refused(options, {.vocabulary = kVocabulary}, {"3mamba"});
  options = own_options();
  options.init = folder.path("none");
  refused(options, {}, {"none"});
  expect_error([&] { Trainer::resume(folder.path("none")); }, {"none"});
  std::filesystem::create_directories(folder.path("empty"));
  expect_error([&] { Trainer::resume(folder.path("empty")); }, {"empty"});

  Trainer trainer(own_options(), {.vocabulary = kVocabulary});
  const TokenBatch good = random_batch(random);
  trainer.save(folder.path("before"));
  expect_error([&] { Trainer::resume(folder.path("before"), {}, {.tokenizer = "byte"}); }, {"40 token ids", "258"});
  const auto batch_refused = [&](const auto& change, const std::vector<std::string>& parts) {
    TokenBatch batch = good;
    change(batch);
    expect_error([&] { trainer.step(batch); }, parts);
    expect_error([&] { trainer.backward(batch); }, parts);
    expect_error([&] { trainer.evaluate(batch); }, parts);
  };
  batch_refused([](TokenBatch& b) { b.rows = 0; }, {"0 rows"});
  batch_refused([](TokenBatch& b) { b.length = -3; }, {"-3 tokens"});
  batch_refused([](TokenBatch& b) { b.rows = b.length = int64_t{1} << 40; }, {"2³¹"});
  batch_refused([](TokenBatch& b) { b.ids.pop_back(); }, {"23 ids", "expected 24"});
  batch_refused([](TokenBatch& b) { b.ids[5] = kVocabulary; }, {"40 among ids", "0 to 39"});
  batch_refused([](TokenBatch& b) { b.ids[5] = -1; }, {"-1 among ids"});
  batch_refused([](TokenBatch& b) { b.targets = {1, 2}; }, {"2 targets"});
  batch_refused([](TokenBatch& b) { b.targets.assign(24, -2); }, {"-2 among targets"});
  batch_refused([](TokenBatch& b) { b.weights = {1}; }, {"1 weights"});
  batch_refused([](TokenBatch& b) { b.weights.assign(24, std::nanf("")); }, {"nan", "weights"});
  batch_refused([](TokenBatch& b) { b.documents = {5, 5}; }, {"document starts at 5"});
  batch_refused([](TokenBatch& b) { b.documents = {-1}; }, {"document starts at -1"});
  batch_refused([](TokenBatch& b) { b.documents = {24}; }, {"document starts at 24"});
  expect_error([&] { trainer.set_learning_rate(-1); }, {"learning rate of -1"});
  expect_error([&] { trainer.set_learning_rate(std::nan("")); }, {"learning rate of nan"});
  expect_error([&] { trainer.parameter("model.embed_token.weight"); }, {"model.embed_tokens.weight"});
  expect_error([&] { trainer.set_parameter("model.norm.weight", {1}); }, {"1 values", "expected 32"});
  expect_error([&] { trainer.gradient("model.norm.weight"); }, {"no gradients"});
  expect_error([&] { trainer.data_batch(1); }, {"no data"});
  expect_error([&] { trainer.save(""); }, {"empty"});
  expect_error([&] { trainer.save(folder.path("no/such/folder")); }, {"no/such"});
  EXPECT_FALSE(trainer.test_loss());
  trainer.save(folder.path("after"));  // nothing has changed
  EXPECT_TRUE(read_file(folder.path("after/training.safetensors")) ==
              read_file(folder.path("before/training.safetensors")));
  EXPECT_GT(trainer.step(good).loss, 0);
  options = own_options();
  options.accumulate = 2;
  Trainer halves(options, {.vocabulary = kVocabulary});
  expect_error([&] { halves.step(random_batch(random, 3)); }, {"3 rows", "2 micro-batches"});
  EXPECT_GT(halves.step(good).loss, 0);
}

TEST(Trainer, DivergenceLeavesTheParameters) {
  Random random(13);
  Trainer trainer(own_options(), {.vocabulary = kVocabulary});
  const TokenBatch batch = random_batch(random);
  std::vector<float> norm = trainer.parameter("model.norm.weight").values;
  norm[0] = std::numeric_limits<float>::infinity();
  trainer.set_parameter("model.norm.weight", norm);
  const auto before = parameters_of(trainer);
  expect_error([&] { trainer.step(batch); }, {"step 1", "not finite"});
  EXPECT_EQ(trainer.steps_done(), 0);
  norm[0] = 1;
  trainer.set_parameter("model.norm.weight", norm);
  EXPECT_GT(trainer.step(batch).loss, 0);
}

TEST(Trainer, UseAfterMoveIsAnError) {
  Random random(14);
  Trainer trainer(own_options(), {.vocabulary = kVocabulary});
  const TokenBatch batch = random_batch(random);
  Trainer other = std::move(trainer);
  EXPECT_GT(other.step(batch).loss, 0);
  const std::vector<std::function<void()>> calls{
      [&] { trainer.step(batch); },       [&] { trainer.backward(batch); }, [&] { trainer.evaluate(batch); },
      [&] { trainer.data_batch(1); },     [&] { trainer.test_loss(); },     [&] { trainer.set_learning_rate(1); },
      [&] { trainer.parameter_names(); }, [&] { trainer.parameter("x"); },  [&] { trainer.set_parameter("x", {}); },
      [&] { trainer.gradient("x"); },     [&] { trainer.save("x"); },       [&] { trainer.steps_done(); },
      [&] { trainer.vocabulary(); },      [&] { trainer.options(); }};
  for (const auto& call : calls) expect_error(call, {"moved"});
  trainer = std::move(other);
  EXPECT_EQ(trainer.steps_done(), 1);
}

}  // namespace
}  // namespace furious
