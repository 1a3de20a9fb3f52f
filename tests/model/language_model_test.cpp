#include "model/language_model.h"

#include <set>

#include "model/little.h"
#include "ops/adamw.h"

namespace furious {

// How a failing test names its preset.
void PrintTo(const Preset& preset, std::ostream* out);
void PrintTo(const Preset& preset, std::ostream* out) {
  *out << preset.name;
}

namespace {

using namespace furious::testing;

// Tokens [begin, begin + count) of every row, on their own.
Tensor tokens_of(const Tensor& tokens, int64_t begin, int64_t count) {
  const Tensor part = Tensor::empty({tokens.size(0), count}, DType::i32);
  copy(part, tokens.slice(1, begin, count));
  return part;
}

// Weights large enough that every parameter matters.
void enlarge(const LanguageModel& model, Random& random) {
  for (const Parameter& parameter : model.parameters()) {
    const Tensor& x = parameter.value.value();
    add_into(x, random.normal_tensor(x.shape(), 0.2));
  }
}

class EveryPreset : public ::testing::TestWithParam<Preset> {};

// Along its own gradient, each parameter must change the loss as that gradient says.
TEST_P(EveryPreset, GradientsAreFiniteDifferences) {
  Random random(1);
  const ModelConfig config = little(GetParam());
  const LanguageModel model(config, 7);
  enlarge(model, random);
  const Tensor tokens = random_tokens(random, {2, 9}, config.vocabulary);
  const Tensor targets = random_tokens(random, {2, 9}, config.vocabulary);
  const Tensor boundaries = int_tensor_of({4, 13}, {2});
  Tape tape;
  tape.backward(model.loss(tape, tokens, targets, boundaries));
  const auto loss = [&] {
    return static_cast<double>(model.loss(Tape::off(), tokens, targets, boundaries).value().data<float>()[0]);
  };
  for (const Parameter& parameter : model.parameters()) {
    ASSERT_TRUE(parameter.value.gradient()) << parameter.name;
    const std::vector<double> gradient = to_doubles(parameter.value.gradient());
    double norm = 0;
    for (double g : gradient) norm += g * g;
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 1e-5) << parameter.name;
    const Tensor& x = parameter.value.value();
    const Tensor before = to_dtype(x, DType::f32);
    const auto at = [&](double distance) {
      for (int64_t i = 0; i < x.elements(); ++i)
        x.data<float>()[i] = before.data<float>()[i] + static_cast<float>(distance * gradient[i] / norm);
      return loss();
    };
    // Short steps meet the rounding of an f32 loss, long ones the kinks of ReLU and of norms of nearly nothing: the
    // best of several must fit.
    double slope = 0;
    for (const double size : {5e-3, 2e-3, 1e-3, 5e-4, 2e-4}) {
      const double step = size / std::max(1.0, norm);
      const double estimate = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step);
      if (std::fabs(estimate - norm) < std::fabs(slope - norm)) slope = estimate;
    }
    copy(x, before);
    EXPECT_NEAR(slope, norm, 0.02 * norm + 2e-4) << parameter.name;
  }
}

TEST_P(EveryPreset, CacheGivesTheLogitsOfTheFullPass) {
  Random random(2);
  const ModelConfig config = little(GetParam());
  const LanguageModel model(config, 7);
  enlarge(model, random);
  const Tensor tokens = random_tokens(random, {2, 40}, config.vocabulary);
  const Tensor full = model.logits(tokens);
  ModelCache cache(config, 2);
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 12}, {13, 5}}) {
    const Tensor logits = model.read(cache, tokens_of(tokens, begin, count));
    EXPECT_LE(relative_error(logits, full.select(1, begin + count - 1)), 1e-4);
  }
  for (int64_t t = 18; t < 40; ++t) {
    const Tensor logits = model.read(cache, tokens_of(tokens, t, 1));
    ASSERT_LE(relative_error(logits, full.select(1, t)), 1e-4) << "token " << t;
  }
  EXPECT_EQ(cache.tokens(), 40);
  EXPECT_GT(cache.bytes(), 0);
}

TEST_P(EveryPreset, RecomputationChangesNoBit) {
  Random random(4);
  const ModelConfig config = little(GetParam());
  const Tensor tokens = random_tokens(random, {2, 9}, config.vocabulary);
  const Tensor targets = random_tokens(random, {2, 9}, config.vocabulary);
  const Tensor boundaries = int_tensor_of({4, 13}, {2});
  LanguageModel plain(config, 7), again(config, 7);
  again.set_compute({.recompute = true});
  std::vector<Tensor> losses;
  for (const LanguageModel* model : {&plain, &again}) {
    Tape tape;
    const Variable loss = model->loss(tape, tokens, targets, boundaries);
    tape.backward(loss);
    losses.push_back(loss.value());
  }
  EXPECT_TRUE(same_bits(losses[0], losses[1]));
  for (size_t i = 0; i < plain.parameters().size(); ++i)
    EXPECT_TRUE(same_bits(plain.parameters()[i].value.gradient(), again.parameters()[i].value.gradient()))
        << plain.parameters()[i].name;
}

TEST_P(EveryPreset, LearnsToRepeat) {
  Random random(3);
  const ModelConfig config = little(GetParam());
  const LanguageModel model(config, 7);
  std::vector<Tensor> first, second;
  for (const Parameter& parameter : model.parameters()) {
    first.push_back(Tensor::zeros(parameter.value.value().shape(), DType::f32));
    second.push_back(Tensor::zeros(parameter.value.value().shape(), DType::f32));
  }
  // Every row counts upwards from a random token: the next token follows from the last.
  double early = 0, late = 0;
  for (int step = 1; step <= 60; ++step) {
    std::vector<int32_t> tokens, targets;
    for (int row = 0; row < 4; ++row) {
      const int64_t start = random.integer(0, config.vocabulary - 1);
      for (int64_t t = 0; t < 16; ++t) {
        tokens.push_back(static_cast<int32_t>((start + t) % config.vocabulary));
        targets.push_back(static_cast<int32_t>((start + t + 1) % config.vocabulary));
      }
    }
    Tape tape;
    const Variable loss = model.loss(tape, int_tensor_of(tokens, {4, 16}), int_tensor_of(targets, {4, 16}));
    tape.backward(loss);
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      const Variable& parameter = model.parameters()[i].value;
      AdamW adamw;
      adamw.learning_rate = 1e-2f;
      adamw_update(parameter.value(), parameter.gradient(), first[i], second[i], adamw, step);
      parameter.clear_gradient();
    }
    (step <= 5 ? early : late) = static_cast<double>(loss.value().data<float>()[0]);
  }
  EXPECT_LT(late, 0.5 * early);
}

INSTANTIATE_TEST_SUITE_P(Model, EveryPreset, ::testing::ValuesIn(presets()), [](const auto& test) {
  std::string name = test.param.name;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
});

TEST(LanguageModel, CountsItsParameters) {
  for (const Preset& preset : presets()) {
    for (bool tied : {false, true}) {
      ModelConfig config = little(preset);
      config.tie_embeddings = tied;
      config.k_heads = 1;
      config.q_heads = 1;
      const LanguageModel model(config, 1);
      int64_t numbers = 0;
      for (const Parameter& parameter : model.parameters()) numbers += parameter.value.value().elements();
      EXPECT_EQ(numbers, parameter_count(config)) << preset.name;
    }
  }
}

TEST(LanguageModel, TakesWeightsFromElsewhere) {
  const LanguageModel a(little(preset("mamba2")), 5);
  size_t next = 0;
  const LanguageModel b(a.config(), [&](const std::string& name, const Tensor& out) {
    EXPECT_EQ(name, a.parameters()[next].name);
    copy(out, a.parameters()[next++].value.value());
  });
  Random random(5);
  const Tensor tokens = random_tokens(random, {1, 7}, 23);
  EXPECT_TRUE(same_bits(a.logits(tokens), b.logits(tokens)));
}

TEST(LanguageModel, FindsTheFirstPlaceThatIsNotFinite) {
  Random random(6);
  const Tensor tokens = random_tokens(random, {1, 7}, 23);
  const auto broken_at = [&](const std::string& parameter) {
    const LanguageModel model(little(preset("2mamba")), 5);
    for (const Parameter& p : model.parameters())
      if (p.name == parameter) fill(p.value.value(), std::nanf(""));
    return model.first_not_finite(tokens);
  };
  EXPECT_EQ(broken_at(""), "");
  EXPECT_EQ(broken_at("model.embed_tokens.weight"), "model.embed_tokens");
  EXPECT_EQ(broken_at("model.layers.1.self_attn.A_mask_proj.weight"), "model.layers.1.self_attn");
  EXPECT_EQ(broken_at("model.layers.0.self_attn.o_proj.weight"), "model.layers.0.self_attn");
  EXPECT_EQ(broken_at("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp");
}

// Values are a projection of the normalized input: with the projection doubled they are twice as large, and a time step
// of softplus(0) makes them smaller by log 2.
TEST(LanguageModel, ValueRms) {
  Random random(8);
  const Tensor tokens = random_tokens(random, {2, 7}, 23);
  const auto rms = [&](const char* arch, float scale) {
    const LanguageModel model(little(preset(arch)), 5);
    for (const Parameter& p : model.parameters()) {
      const Tensor& x = p.value.value();
      if (p.name == "model.layers.0.self_attn.qkv_proj.weight")
        for (int64_t i = 0; i < x.elements(); ++i) x.data<float>()[i] *= scale;
      if (p.name.ends_with("conv1d.bias") || p.name.ends_with("dt_proj.weight")) fill(x, 0);
    }
    return model.value_rms(tokens);
  };
  const std::vector<double> one = rms("2mamba", 1), two = rms("2mamba", 2), discretized = rms("2mamba-dt", 1);
  ASSERT_EQ(one.size(), 2u);
  EXPECT_GT(one[0], 0);
  EXPECT_NEAR(two[0] / one[0], 2, 1e-5);
  EXPECT_NEAR(discretized[0] / one[0], std::log(2.0), 1e-5);
}

TEST(LanguageModel, SameSeedSameWeights) {
  const ModelConfig config = little(preset("mamba2"));
  const LanguageModel a(config, 5), b(config, 5), c(config, 6);
  for (size_t i = 0; i < a.parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(a.parameters()[i].value.value(), b.parameters()[i].value.value()));
    if (a.parameters()[i].name.find("proj.weight") != std::string::npos) {
      EXPECT_FALSE(same_bits(a.parameters()[i].value.value(), c.parameters()[i].value.value()));
    }
  }
}

TEST(ModelConfig, SizesOfThePaper) {
  const ModelConfig small = model_config("softmax", "small", 32000);
  EXPECT_EQ(small.head_dim, 64);
  EXPECT_NEAR(static_cast<double>(parameter_count(small)), 275e6, 5e6);
  EXPECT_EQ(model_config("2mamba", "medium", 32000).layers, 27);
  EXPECT_NEAR(static_cast<double>(parameter_count(model_config("2mamba", "tiny", 258))), 1e6, 0.2e6);
  std::set<std::string> names;
  for (const Preset& p : presets()) EXPECT_TRUE(names.insert(p.name).second) << p.name;
}

TEST(ModelConfig, RefusesWhatCannotWork) {
  expect_error([] { model_config("2mambo", "small", 100); }, {"unknown architecture \"2mambo\"", "\"2mamba\""});
  expect_error([] { model_config("2mamba", "smal", 100); }, {"unknown size \"smal\"", "\"small\""});
  const auto refused = [](auto&& change, const std::vector<std::string>& parts) {
    ModelConfig config = little(preset("2mamba"));
    change(config);
    expect_error([&] { LanguageModel(config, 1); }, parts);
  };
  refused([](ModelConfig& c) { c.block.score = Score::linear; }, {"linear score", "ReLU"});
  refused([](ModelConfig& c) { c.block.conv_window = 5; }, {"conv window 5"});
  refused([](ModelConfig& c) { c.block.conv_window = 0, c.block.conv_silu = true; }, {"no convolution"});
  refused([](ModelConfig& c) { c.block.dt_bias = true; }, {"dt bias"});
  refused([](ModelConfig& c) { c.k_heads = 2; }, {"2 heads", "divisor of 3"});
  refused([](ModelConfig& c) { c.head_dim = 9, c.block.rope = true; }, {"even", "9"});
  refused([](ModelConfig& c) { c.vocabulary = 0; }, {"vocabulary is 0"});
}

}  // namespace
}  // namespace furious
