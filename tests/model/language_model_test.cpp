#include "model/language_model.h"
#include "decode/batch.h"

#include <set>

#include "model/block_oracle.h"
#include "model/config_json.h"
#include "model/little.h"
#include "ops/optim/adamw.h"

namespace furious {

// The name of the preset in the name of a test.
void PrintTo(const Preset& preset, std::ostream* out);
void PrintTo(const Preset& preset, std::ostream* out) {
  *out << preset.name;
}

namespace {

using namespace furious::testing;

// A contiguous copy of tokens [begin, begin + count) of every row.
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

// The parallel pass of both rows of a batch against the oracle, row by row.
void expect_logits_of_the_oracle(const ModelConfig& config) {
  Random random(9);
  const LanguageModel model(config, 7);
  enlarge(model, random);
  const int64_t length = 13;
  const Tensor tokens = random_tokens(random, {2, length}, config.vocabulary);
  const Tensor logits = model.logits(tokens);
  const Oracle oracle(model);
  for (int64_t row = 0; row < 2; ++row) {
    const int32_t* first = tokens.data<int32_t>() + row * length;
    EXPECT_LE(relative_error(logits.select(0, row), oracle.logits({first, first + length})), 3e-5) << "row " << row;
  }
}

// The directional derivative along each parameter's gradient, by finite differences.
void expect_gradients_of_finite_differences(const ModelConfig& config) {
  Random random(1);
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
    // Small steps are limited by f32 rounding of the loss, large ones by kinks of ReLU and of norms near zero: the
    // best of several must match.
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

// One token, many, and then one by one.
void expect_decoding_to_give_the_full_pass(const ModelConfig& config) {
  Random random(2);
  const LanguageModel model(config, 7);
  enlarge(model, random);
  const Tensor tokens = random_tokens(random, {2, 40}, config.vocabulary);
  const Tensor full = model.logits(tokens);
  Batch cache(model, 2);
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {1, 12}, {13, 5}}) {
    const Tensor logits = cache.read(tokens_of(tokens, begin, count));
    EXPECT_LE(relative_error(logits, full.select(1, begin + count - 1)), 1e-4);
  }
  for (int64_t t = 18; t < 40; ++t) {
    const Tensor logits = cache.read(tokens_of(tokens, t, 1));
    ASSERT_LE(relative_error(logits, full.select(1, t)), 1e-4) << "token " << t;
  }
  EXPECT_EQ(cache.tokens(), 40);
  EXPECT_GT(cache.bytes(), 0);
  EXPECT_EQ(cache.ran_as(), "operations");
}

class EveryPreset : public ::testing::TestWithParam<Preset> {};

TEST_P(EveryPreset, LogitsMatchTheOracle) {
  expect_logits_of_the_oracle(little(GetParam()));
}

TEST_P(EveryPreset, GradientsMatchFiniteDifferences) {
  expect_gradients_of_finite_differences(little(GetParam()));
}

TEST_P(EveryPreset, DecodingMatchesTheFullPass) {
  expect_decoding_to_give_the_full_pass(little(GetParam()));
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

TEST(LanguageModel, AnySwitchesTogether) {
  Random random(10);
  for (int i = 0; i < 24; ++i) {
    const ModelConfig config = random_config(random);
    SCOPED_TRACE(config_to_json(config));
    expect_logits_of_the_oracle(config);
    expect_decoding_to_give_the_full_pass(config);
    if (i % 4 == 0) expect_gradients_of_finite_differences(config);
  }
}

// The mask may grow where the log-decay is positive.
TEST(LanguageModel, DecaysThatMayBePositive) {
  for (const DecayKind kind : {DecayKind::softplus2, DecayKind::silu})
    for (const bool bias : {false, true}) {
      ModelConfig config = little(preset("2mamba"));
      config.block.decay = kind;
      config.block.decay_bias = bias;
      SCOPED_TRACE(config_to_json(config));
      expect_logits_of_the_oracle(config);
      expect_gradients_of_finite_differences(config);
      expect_decoding_to_give_the_full_pass(config);
    }
}

// A state that is not square, through several folds.
TEST(LanguageModel, DecodingWithOtherDimensionsOfQueriesAndKeys) {
  for (const char* name : {"2mamba", "mamba2-paper", "softmax"}) {
    SCOPED_TRACE(name);
    Random random(11);
    ModelConfig config = little(preset(name));
    config.layers = 1;
    if (config.branch == 0) config.qk_dim = 12;
    const LanguageModel model(config, 7);
    enlarge(model, random);
    constexpr int64_t kLength = 420;
    const Tensor tokens = random_tokens(random, {1, kLength}, config.vocabulary), full = model.logits(tokens);
    Batch cache(model, 1);
    std::vector<int64_t> bytes;
    for (int64_t t = 0; t < kLength; ++t) {
      const Tensor logits = cache.read(tokens_of(tokens, t, 1));
      ASSERT_LE(relative_error(logits, full.select(1, t)), 2e-4) << "token " << t;
      bytes.push_back(cache.bytes());
    }
    // A state stops growing; a KV cache does not.
    const int64_t fold = MixerCache(config.block.mixer(),
                                    {1, config.q_heads, config.k_heads, config.v_heads, config.qk_dim, config.head_dim})
                             .first_fold();
    EXPECT_EQ(bytes.back() == bytes[kLength - 64], fold > 0 && fold < kLength - 64);
    EXPECT_GE(bytes.back(), 4 * cache_numbers(config, kLength));
  }
}

TEST(LanguageModel, QueryKeyDimensionDecidesTheState) {
  ModelConfig config = model_config("2mamba", "tiny", 258);
  const int64_t length = 1 << 20, conv = config.qkv_width();
  EXPECT_EQ(cache_numbers(config, length), config.layers * (conv + 4 * (32 * 33 / 2) * 33));
  config.qk_dim = 16;
  EXPECT_EQ(cache_numbers(config, length), config.layers * (config.qkv_width() + 4 * (16 * 17 / 2) * 33));
  EXPECT_EQ(conv - config.qkv_width(), 2 * 4 * 16);
  const ModelConfig paper = model_config("mamba2-paper", "tiny", 258);
  EXPECT_EQ(cache_numbers(paper, length), paper.layers * (paper.qkv_width() + 128 * 32));
  EXPECT_EQ(paper.branch, 96);
}

TEST(LanguageModel, CountsItsParameters) {
  const auto expect_count = [](const ModelConfig& config) {
    int64_t visited = 0;
    LanguageModel::visit_parameters(config,
                                    [&](const std::string&, const Shape& shape) { visited += shape.elements(); });
    EXPECT_EQ(visited, parameter_count(config)) << config_to_json(config);
  };
  for (const Preset& preset : presets()) {
    for (const Size& size : sizes()) expect_count(model_config(preset.name, size.name, 32000));
    for (bool tied : {false, true}) {
      ModelConfig config = little(preset);
      config.tie_embeddings = tied;
      config.k_heads = 1;
      config.q_heads = 1;
      expect_count(config);
      const LanguageModel model(config, 1);
      int64_t numbers = 0;
      for (const Parameter& parameter : model.parameters()) numbers += parameter.value.value().elements();
      EXPECT_EQ(numbers, parameter_count(config)) << preset.name;
    }
  }
  Random random(12);
  for (int i = 0; i < 50; ++i) expect_count(random_config(random));
}

struct Moments {
  double least = 0, largest = 0, mean = 0, deviation = 0;
};
Moments moments_of(const Tensor& x) {
  const std::vector<double> values = to_doubles(x);
  const auto n = static_cast<double>(values.size());
  Moments m{values[0], values[0], 0, 0};
  for (const double value : values) {
    m.least = std::min(m.least, value);
    m.largest = std::max(m.largest, value);
    m.mean += value / n;
  }
  for (const double value : values) m.deviation += (value - m.mean) * (value - m.mean) / n;
  m.deviation = std::sqrt(m.deviation);
  return m;
}

const Tensor& parameter_of(const LanguageModel& model, const std::string& name) {
  for (const Parameter& parameter : model.parameters())
    if (parameter.name == name) return parameter.value.value();
  fail("no parameter {}", name);
}

// Wide enough that means and deviations are known to a few per cent.
ModelConfig wide(const char* arch) {
  ModelConfig config = little(preset(arch));
  config.hidden = 128;
  config.intermediate = 96;
  config.vocabulary = 200;
  set_heads(config, preset(arch), 8);
  config.layers = 1;
  return config;
}

void expect_normal(const Tensor& x, double mean = 0) {
  const Moments m = moments_of(x);
  EXPECT_NEAR(m.mean, mean, 0.02 * 5 / std::sqrt(static_cast<double>(x.elements())));
  EXPECT_NEAR(m.deviation, 0.02, 0.003);
  EXPECT_GT(m.largest, mean + 0.04);
}

void expect_uniform(const Tensor& x, double bound) {
  const Moments m = moments_of(x);
  EXPECT_GE(m.least, -bound);
  EXPECT_LE(m.largest, bound);
  EXPECT_NEAR(m.mean, 0, 5 * bound / std::sqrt(3.0 * static_cast<double>(x.elements())));
  EXPECT_NEAR(m.deviation, bound / std::sqrt(3.0), 0.1 * bound);
  EXPECT_GT(m.largest, 0.9 * bound);
  EXPECT_LT(m.least, -0.9 * bound);
}

void expect_constant(const Tensor& x, double value) {
  const Moments m = moments_of(x);
  EXPECT_EQ(m.least, value);
  EXPECT_EQ(m.largest, value);
}

TEST(Initialization, Distributions) {
  const std::string self = "model.layers.0.self_attn.", mlp = "model.layers.0.mlp.";
  for (const std::string& name : initialization_names()) {
    SCOPED_TRACE(name);
    const Initialization kind = initialization_from_name(name);
    const LanguageModel model(wide("mamba2"), 3, {}, kind), paper(wide("mamba2-paper"), 3, {}, kind);
    const LanguageModel fox(wide("fox"), 3, {}, kind);
    const auto of = [&](const std::string& parameter) { return parameter_of(model, parameter); };
    expect_normal(of("model.embed_tokens.weight"));
    expect_normal(of("lm_head.weight"));
    for (const std::string& linear : {self + "qkv_proj.weight", self + "z_gate_proj.weight", self + "dt_proj.weight",
                                      self + "o_proj.weight", mlp + "gate_proj.weight", mlp + "down_proj.weight"}) {
      SCOPED_TRACE(linear);
      if (kind == Initialization::pytorch)
        expect_uniform(of(linear), 1 / std::sqrt(linear.ends_with("down_proj.weight") ? 96.0 : 128.0));
      else
        expect_normal(of(linear));
    }
    for (const char* branch : {"branch_gate_proj.weight", "branch_proj.weight", "o_proj.weight"})
      if (kind == Initialization::pytorch)
        expect_uniform(parameter_of(paper, self + branch), 1 / std::sqrt(128.0));
      else
        expect_normal(parameter_of(paper, self + branch));
    const Tensor taps = of(self + "conv1d.weight");
    if (kind == Initialization::identity) {
      expect_normal(to_dtype(taps.slice(1, 3, 1), DType::f32), 1);
      expect_normal(to_dtype(taps.slice(1, 0, 3), DType::f32), 0);
    } else {
      expect_uniform(taps, 0.5);
    }
    if (kind == Initialization::pytorch) {
      expect_uniform(of(self + "conv1d.bias"), 0.5);
      expect_uniform(of(self + "z_gate_proj.bias"), 1 / std::sqrt(128.0));
    } else {
      expect_constant(of(self + "conv1d.bias"), 0);
      expect_constant(of(self + "z_gate_proj.bias"), 0);
    }
    expect_constant(parameter_of(fox, self + "A_mask_proj.bias"), 0);
    expect_constant(of(self + "D"), 1);
    expect_constant(of(self + "out_norm.weight"), 1);
    expect_constant(of("model.norm.weight"), 1);
    const Moments a_log = moments_of(of(self + "A_log")), dt_bias = moments_of(of(self + "dt_proj.bias"));
    EXPECT_GE(a_log.least, 0);
    EXPECT_LE(a_log.largest, std::log(16.0) + 1e-6);
    EXPECT_GE(std::log1p(std::exp(dt_bias.least)), 0.001 - 1e-6);
    EXPECT_LE(std::log1p(std::exp(dt_bias.largest)), 0.1 + 1e-6);
  }
  expect_error([] { initialization_from_name("pytorhc"); }, {"unknown initialization \"pytorhc\"", "\"pytorch\""});
}

// A switch, or another initialization of the convolution, changes no other parameter.
TEST(Initialization, EveryParameterHasItsOwnStream) {
  const auto expect_same_where_shared = [](const LanguageModel& a, const LanguageModel& b,
                                           const std::set<std::string>& but) {
    int64_t shared = 0;
    for (const Parameter& x : a.parameters())
      for (const Parameter& y : b.parameters())
        if (x.name == y.name && x.value.value().shape() == y.value.value().shape()) {
          const bool differs = std::ranges::any_of(but, [&](const auto& end) { return x.name.ends_with(end); });
          EXPECT_NE(same_bits(x.value.value(), y.value.value()), differs) << x.name;
          ++shared;
        }
    EXPECT_GT(shared, 20);
  };
  const ModelConfig config = little(preset("mamba2"));
  for (const Initialization kind : {Initialization::furious, Initialization::pytorch, Initialization::identity}) {
    const LanguageModel full(config, 5, {}, kind);
    std::set<std::string> but;
    if (kind == Initialization::pytorch) but = {"conv1d.bias"};  // whose bound is the window's
    expect_same_where_shared(full, LanguageModel(little(preset("mamba2s-d")), 5, {}, kind), but);
  }
  const LanguageModel usual(config, 5);
  expect_same_where_shared(usual, LanguageModel(config, 5, {}, Initialization::identity), {"conv1d.weight"});
  expect_same_where_shared(usual, LanguageModel(config, 5, {}, Initialization::pytorch),
                           {"qkv_proj.weight", "dt_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
                            "down_proj.weight", "conv1d.bias", "z_gate_proj.bias"});
}

// Compute::mixer_precision reaches the mixer in training and prefill; a CPU supports only one.
TEST(LanguageModel, MixerPrecisionReachesTheMixer) {
  LanguageModel model(little(preset("2mamba")), 5);
  const Tensor tokens = int_tensor_of({1, 2, 3, 4}, {1, 4});
  for (const MixerPrecision precision : {MixerPrecision::automatic, MixerPrecision::f32}) {
    model.set_compute({.mixer = precision});
    EXPECT_TRUE(all_finite(model.logits(tokens)));
  }
  model.set_compute({.mixer = MixerPrecision::bf16});
  expect_error([&] { model.logits(tokens); }, {"precision", "bf16", "CPU"});
  Batch cache(model, 1);
  expect_error([&] { cache.read(tokens); }, {"precision", "bf16", "CPU"});
}

TEST(LanguageModel, LoadsWeightsFromACallback) {
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

TEST(LanguageModel, FindsTheFirstModuleThatIsNotFinite) {
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
      if (p.name.ends_with("dt_proj.weight")) fill(x, 0);
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
  refused([](ModelConfig& c) { c.block.dt_limit = 1; }, {"dt_limit 1"});
  refused([](ModelConfig& c) { c.block.decay_bias = true, c.block.decay = DecayKind::original; }, {"decay_bias"});
  refused([](ModelConfig& c) { c.block.square_mask = true, c.block.score = Score::exponential; }, {"square_mask"});
  refused([](ModelConfig& c) { c.block.d_residual = true, c.v_heads = 1; }, {"1 heads of V shared by 3"});
  refused([](ModelConfig& c) { c.qk_dim = 300; }, {"head dimension 300"});
  refused([](ModelConfig& c) { c.branch = -1; }, {"branch is -1"});
  refused([](ModelConfig& c) { c.k_heads = 2; }, {"2 heads", "divisor of 3"});
  refused([](ModelConfig& c) { c.qk_dim = 9, c.block.rope = true; }, {"even", "9"});
  refused([](ModelConfig& c) { c.vocabulary = 0; }, {"vocabulary is 0"});
}

}  // namespace
}  // namespace furious
