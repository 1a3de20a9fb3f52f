// Published formats: tiny checkpoints with random weights under their programs' names, against the formulas in double
// precision, which read those names too.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "decode/decoder.h"
#include "furious/train.h"
#include "model/checkpoint.h"
#include "model/export.h"
#include "model/little.h"
#include "model/safetensors.h"
#include "model/torch_file.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;
using Json = nlohmann::ordered_json;
using Vector = std::vector<double>;
using Rows = std::vector<Vector>;
using Tensors = std::map<std::string, Tensor>;

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
double silu(double x) {
  return x * sigmoid(x);
}

// What the oracles share: weights by their stored names.
class Weights {
 public:
  explicit Weights(const Tensors& tensors) {
    for (const auto& [name, tensor] : tensors) weights_[name] = to_doubles(tensor);
  }
  bool has(const std::string& name) const { return weights_.contains(name); }
  const Vector& at(const std::string& name) const { return weights_.at(name); }
  // x Wᵀ, with the bias where there is one; `name` is without ".weight".
  Vector product(const std::string& name, const Vector& x) const {
    const Vector& weight = at(name + ".weight");
    Vector y(weight.size() / x.size());
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t i = 0; i < x.size(); ++i) y[o] += weight[o * x.size() + i] * x[i];
      if (has(name + ".bias")) y[o] += at(name + ".bias")[o];
    }
    return y;
  }
  // RMSNorm of x with the part of the weight from `first` on; a layer norm where there is a bias.
  Vector norm(const std::string& name, Vector x, double eps, size_t first = 0) const {
    const auto n = static_cast<double>(x.size());
    double mean = 0, squares = 0;
    if (has(name + ".bias"))
      for (const double value : x) mean += value / n;
    for (double& value : x) {
      value -= mean;
      squares += value * value;
    }
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] *= at(name + ".weight")[first + i] / std::sqrt(squares / n + eps);
      if (has(name + ".bias")) x[i] += at(name + ".bias")[i];
    }
    return x;
  }
  Rows embedded(const std::string& name, const std::vector<int32_t>& tokens, size_t width) const {
    Rows x;
    for (const int32_t token : tokens) {
      const auto row = at(name + ".weight").begin() + static_cast<int64_t>(token * width);
      x.emplace_back(row, row + static_cast<int64_t>(width));
    }
    return x;
  }

 private:
  std::map<std::string, Vector> weights_;
};

void add(Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// Attention of any of the formats.
struct Attention {
  int64_t hidden = 24, inner = 40, heads = 4, kv_heads = 2, dim = 8, layers = 2, vocabulary = 19;
  double eps = 1e-6, qk_eps = 1e-6, theta = 1e4;
  size_t window = 1000;
  std::function<double(double)> scaled = [](double omega) { return omega; };
  bool rope = true, squared = false, tied = false;
  std::string embedding = "model.embed_tokens", attention = "self_attn.", norm = "input_layernorm",
              mlp_norm = "post_attention_layernorm", decay = "none", gate = "none", up = "mlp.up_proj",
              down = "mlp.down_proj";

  Rows heads_of(const Weights& w, const std::string& name, const Vector& h, size_t t, bool turned) const {
    const Vector all = w.product(name + "_proj", h);
    Rows parts;
    for (size_t begin = 0; begin < all.size(); begin += dim) {
      Vector x(all.begin() + static_cast<int64_t>(begin), all.begin() + static_cast<int64_t>(begin) + dim);
      if (turned && w.has(name + "_norm.weight"))
        x = w.norm(name + "_norm", x, qk_eps, w.at(name + "_norm.weight").size() > x.size() ? begin : 0);
      for (int64_t i = 0; turned && rope && i < dim / 2; ++i) {
        const double power = -2.0 * static_cast<double>(i) / static_cast<double>(dim);
        const double angle = static_cast<double>(t) * scaled(std::pow(theta, power));
        const double a = x[i], b = x[i + dim / 2];
        x[i] = a * std::cos(angle) - b * std::sin(angle);
        x[i + dim / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
      parts.push_back(x);
    }
    return parts;
  }

  void mix(const Weights& w, const std::string& layer, Rows& x) const {
    const std::string name = layer + attention;
    std::vector<Rows> q, k, v;
    Rows total, outputs;
    for (size_t t = 0; t < x.size(); ++t) {
      const Vector h = w.norm(layer + norm, x[t], eps);
      q.push_back(heads_of(w, name + "q", h, t, true));
      k.push_back(heads_of(w, name + "k", h, t, true));
      v.push_back(heads_of(w, name + "v", h, t, false));
      Vector a = w.has(name + decay + ".weight") ? w.product(name + decay, h) : Vector(heads, 1e9);
      for (double& value : a) value = -std::log1p(std::exp(-value));
      if (t > 0) add(a, total.back());
      total.push_back(a);
      Vector o;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t shared = head * kv_heads / heads, decays = head * static_cast<int64_t>(a.size()) / heads;
        Vector y(dim);
        double sum = 0;
        for (size_t j = t < window ? 0 : t + 1 - window; j <= t; ++j) {
          double s = 0;
          for (int64_t i = 0; i < dim; ++i) s += q[t][head][i] * k[j][shared][i] / std::sqrt(static_cast<double>(dim));
          const double weight = (squared ? s * s : std::exp(s)) * std::exp(total[t][decays] - total[j][decays]);
          sum += weight;
          for (int64_t i = 0; i < dim; ++i) y[i] += weight * v[j][shared][i];
        }
        for (const double value : y) o.push_back(value / sum);
      }
      if (w.has(name + gate + ".weight")) {
        const Vector g = w.product(name + gate, h);
        for (size_t i = 0; i < o.size(); ++i) o[i] *= sigmoid(g[i]);
      }
      outputs.push_back(w.product(name + "o_proj", o));
    }
    for (size_t t = 0; t < x.size(); ++t) add(x[t], outputs[t]);
  }

  Vector logits(const Weights& w, const std::vector<int32_t>& tokens) const {
    Rows x = w.embedded(embedding, tokens, hidden);
    for (int64_t i = 0; i < layers; ++i) {
      const std::string layer = fmt::format("model.layers.{}.", i);
      mix(w, layer, x);
      for (Vector& row : x) {
        const Vector m = w.norm(layer + mlp_norm, row, eps);
        Vector u = w.product(layer + up, m);
        const bool gated = w.has(layer + "mlp.gate_proj.weight");
        const Vector g = gated ? w.product(layer + "mlp.gate_proj", m) : u;
        for (size_t c = 0; c < u.size(); ++c)
          u[c] = gated ? u[c] * silu(g[c])
                       : 0.5 * u[c] * (1 + std::tanh(std::sqrt(2 / M_PI) * (u[c] + 0.044715 * std::pow(u[c], 3))));
        add(row, w.product(layer + down, u));
      }
    }
    Vector all;
    for (const Vector& row : x) {
      const Vector y = w.product(tied ? embedding : "lm_head", w.norm("model.norm", row, eps));
      all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  }
};

// Mamba-2, token by token.
struct Mamba2 {
  int64_t hidden = 24, inner = 48, ssm = 48, groups = 1, state = 16, dim = 8, window = 4, layers = 2, vocabulary = 24;
  double least = 0, most = INFINITY;
  bool bias = false, conv_bias = true, tied = false, wide_d = false;
  std::string root = "backbone.", embedding = "embeddings", head = "lm_head";

  int64_t heads() const { return ssm / dim; }
  int64_t channels() const { return ssm + 2 * groups * state; }
  int64_t rows() const { return 2 * (inner - ssm) + ssm + channels() + heads(); }

  Vector logits(const Weights& w, const std::vector<int32_t>& tokens) const {
    Rows x = w.embedded(root + embedding, tokens, hidden);
    for (int64_t i = 0; i < layers; ++i) {
      const std::string layer = fmt::format("{}layers.{}.", root, i), mixer = layer + "mixer.";
      Rows inputs;
      std::vector<Rows> states(heads(), Rows(state, Vector(dim)));
      for (Vector& row : x) {
        const Vector p = w.product(mixer + "in_proj", w.norm(layer + "norm", row, 1e-5));
        const int64_t branch = inner - ssm, z = 2 * branch, first = z + ssm, dt_at = first + channels();
        inputs.emplace_back(p.begin() + first, p.begin() + dt_at);
        Vector c = convolved(w, mixer, inputs), y;
        for (int64_t h = 0; h < heads(); ++h) {
          const double raw = p[dt_at + h] + w.at(mixer + "dt_bias")[h];
          const double dt = std::clamp(std::log1p(std::exp(raw)), least, most);
          const double decay = std::exp(-std::exp(w.at(mixer + "A_log")[h]) * dt);
          const int64_t group = h * groups / heads(), b = ssm + group * state, q = b + groups * state;
          for (int64_t d = 0; d < dim; ++d) {
            const double value = c[h * dim + d];
            double out = w.at(mixer + "D")[wide_d ? h * dim + d : h] * value;
            for (int64_t n = 0; n < state; ++n) {
              double& s = states[h][n][d];
              s = decay * s + c[b + n] * dt * value;
              out += c[q + n] * s;
            }
            y.push_back(out * silu(p[z + h * dim + d]));
          }
        }
        Vector o;
        for (int64_t d = 0; d < branch; ++d) o.push_back(silu(p[d]) * p[branch + d]);
        for (int64_t g = 0, n = ssm / groups; g < groups; ++g) {
          const Vector part = w.norm(mixer + "norm", Vector(y.begin() + g * n, y.begin() + (g + 1) * n), 1e-5, g * n);
          o.insert(o.end(), part.begin(), part.end());
        }
        add(row, w.product(mixer + "out_proj", o));
      }
    }
    Vector all;
    for (const Vector& row : x) {
      const Vector y = w.product(tied ? root + embedding : head, w.norm(root + "norm_f", row, 1e-5));
      all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  }

  // Of the last token.
  Vector convolved(const Weights& w, const std::string& mixer, const Rows& inputs) const {
    Vector c(channels());
    for (int64_t i = 0; i < channels(); ++i) {
      c[i] = conv_bias ? w.at(mixer + "conv1d.bias")[i] : 0;
      for (int64_t back = 0; back < window && back < static_cast<int64_t>(inputs.size()); ++back)
        c[i] += w.at(mixer + "conv1d.weight")[i * window + window - 1 - back] * inputs[inputs.size() - 1 - back][i];
      c[i] = silu(c[i]);
    }
    return c;
  }
};

class Formats : public ::testing::Test {
 protected:
  void tensor(const std::string& name, const Shape& shape, double scale = 0.3) {
    tensors_[name] = random_.normal_tensor(shape, shape.rank() == 1 ? 1 : scale);
  }
  void linear(const std::string& name, int64_t out, int64_t in, bool bias) {
    tensor(name + ".weight", {out, in});
    if (bias) tensor(name + ".bias", {out});
  }
  void norm(const std::string& name, int64_t width, bool bias = false) {
    tensor(name + ".weight", {width});
    if (bias) tensor(name + ".bias", {width});
  }

  struct Biases {
    bool qkv = false, out = false, decay = false, mlp = false, norms = false;
  };
  void attention_tensors(const Attention& a, const Biases& b, int64_t decay_rows, bool gelu = false) {
    tensors_.clear();
    tensor(a.embedding + ".weight", {a.vocabulary, a.hidden});
    for (int64_t i = 0; i < a.layers; ++i) {
      const std::string layer = fmt::format("model.layers.{}.", i), name = layer + a.attention;
      norm(layer + a.norm, a.hidden, b.norms);
      norm(layer + a.mlp_norm, a.hidden, b.norms);
      linear(name + "q_proj", a.heads * a.dim, a.hidden, b.qkv);
      linear(name + "k_proj", a.kv_heads * a.dim, a.hidden, b.qkv);
      linear(name + "v_proj", a.kv_heads * a.dim, a.hidden, b.qkv);
      linear(name + "o_proj", a.hidden, a.heads * a.dim, b.out);
      if (decay_rows > 0) linear(name + a.decay, decay_rows, a.hidden, b.decay);
      if (!gelu) linear(layer + "mlp.gate_proj", a.inner, a.hidden, b.mlp);
      linear(layer + a.up, a.inner, a.hidden, b.mlp);
      linear(layer + a.down, a.hidden, a.inner, b.mlp);
    }
    norm("model.norm", a.hidden, b.norms);
    if (!a.tied) tensor("lm_head.weight", {a.vocabulary, a.hidden});
  }
  Json attention_config(const std::string& type, const Attention& a) const {
    return {{"model_type", type},
            {"vocab_size", a.vocabulary},
            {"hidden_size", a.hidden},
            {"intermediate_size", a.inner},
            {"num_hidden_layers", a.layers},
            {"num_attention_heads", a.heads},
            {"num_key_value_heads", a.kv_heads},
            {"head_dim", a.dim},
            {"rms_norm_eps", a.eps},
            {"rope_theta", a.theta},
            {"tie_word_embeddings", a.tied},
            {"max_position_embeddings", 64}};
  }

  void mamba_tensors(const Mamba2& m) {
    tensors_.clear();
    tensor(m.root + m.embedding + ".weight", {m.vocabulary, m.hidden});
    for (int64_t i = 0; i < m.layers; ++i) {
      const std::string layer = fmt::format("{}layers.{}.", m.root, i), mixer = layer + "mixer.";
      norm(layer + "norm", m.hidden);
      linear(mixer + "in_proj", m.rows(), m.hidden, m.bias);
      linear(mixer + "out_proj", m.hidden, m.inner, m.bias);
      tensor(mixer + "conv1d.weight", {m.channels(), 1, m.window}, 0.5);
      if (m.conv_bias) tensor(mixer + "conv1d.bias", {m.channels()});
      tensor(mixer + "A_log", {m.heads()});
      tensor(mixer + "dt_bias", {m.heads()});
      tensor(mixer + "D", {m.wide_d ? m.ssm : m.heads()});
      norm(mixer + "norm", m.ssm);
    }
    norm(m.root + "norm_f", m.hidden);
    if (!m.tied) tensor(m.head + ".weight", {m.vocabulary, m.hidden});
  }

  void write(const Json& config) const {
    write_text(directory_ / "config.json", config.dump());
    write_safetensors(directory_ / "model.safetensors", tensors_);
  }

  // Fine-tuning from these files.
  void expect_learns(const std::vector<int32_t>& tokens) const {
    TrainOptions options;
    options.init = directory_.path();
    options.device = "cpu";
    options.batch = 1;
    options.length = static_cast<int64_t>(tokens.size());
    options.steps = 6;
    options.warmup = 0;
    options.lr = 1e-2;
    Trainer trainer(options);
    const TokenBatch batch{1, options.length, tokens};
    const double before = trainer.evaluate(batch);
    for (int64_t i = 0; i < options.steps; ++i) trainer.step(batch);
    EXPECT_LT(trainer.evaluate(batch), 0.9 * before);
  }

  // Full pass, fine-tuning and decoding against the oracle, also of what we save of the model.
  template <class Oracle>
  void expect_logits(const Oracle& oracle, WeightDType weights = WeightDType::f32) {
    const LanguageModel model = load_model(directory_.path(), "", {}, 0, {}, weights);
    const std::vector<int32_t> tokens = [&] {
      const Tensor random = random_tokens(random_, {1, 11}, oracle.vocabulary);
      return std::vector<int32_t>(random.data<int32_t>(), random.data<int32_t>() + 11);
    }();
    const Vector expected = oracle.logits(Weights(tensors_), tokens);
    EXPECT_LE(relative_error(model.logits(int_tensor_of(tokens, {1, 11})), expected), 1e-5);
    Decoder decoder(model, 1);
    const int32_t slot = decoder.start();
    decoder.read(slot, std::span(tokens).first(5));
    for (size_t t = 5; t < tokens.size(); ++t) decoder.read_token({&slot, 1}, int_tensor_of({tokens[t]}, {1, 1}));
    const Vector last(expected.end() - model.config().vocabulary, expected.end());
    EXPECT_LE(relative_error(to_doubles(decoder.logits(slot)), last), 1e-5);
    if (weights != WeightDType::f32) return;
    expect_learns(tokens);
    const TemporaryDirectory copy;
    save_model(copy.path(), model);
    const LanguageModel again = load_model(copy.path());
    EXPECT_EQ(again.config(), model.config());
    EXPECT_TRUE(same_bits(again.logits(int_tensor_of(tokens, {1, 11})), model.logits(int_tensor_of(tokens, {1, 11}))));
  }
  void expect_refused(Json config, const std::string& key, const Json& value, std::vector<std::string> parts) const {
    SCOPED_TRACE(key);
    config[key] = value;
    write_text(directory_ / "config.json", config.dump());
    parts.push_back("\"" + key + "\"");
    expect_error([&] { load_config(directory_.path()); }, parts);
  }

  Random random_{1};
  Tensors tensors_;
  TemporaryDirectory directory_;
};

TEST_F(Formats, LlamaWithBiasesAndScaledPositions) {
  Attention a;
  attention_tensors(a, {.qkv = true, .out = true, .mlp = true}, 0);
  Json config = attention_config("llama", a);
  config["attention_bias"] = config["mlp_bias"] = true;
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  a.scaled = [](double omega) { return omega / 4; };
  write(config);
  expect_logits(a);
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 32}};
  a.scaled = [](double omega) {
    const double kept = std::clamp((32 * omega / (2 * M_PI) - 1) / 3, 0.0, 1.0);
    return omega * (kept + (1 - kept) / 8);
  };
  write(config);
  expect_logits(a);
  config["rope_parameters"] = config["rope_scaling"];  // as newer versions write it
  config["rope_parameters"]["rope_theta"] = config["rope_theta"];
  config.erase("rope_scaling");
  config.erase("rope_theta");
  write(config);
  expect_logits(a);
}

TEST_F(Formats, Mistral) {
  Attention a;
  attention_tensors(a, {}, 0);
  Json config = attention_config("mistral", a);
  config["sliding_window"] = nullptr;
  write(config);
  expect_logits(a);
  EXPECT_EQ(load_config(directory_.path()).block.window, 0);
  for (const size_t window : {1, 4, 64}) {
    config["sliding_window"] = a.window = window;
    write(config);
    expect_logits(a);
  }
  config.erase("sliding_window");
  write(config);
  EXPECT_EQ(load_config(directory_.path()).block.window, 4096);
  expect_refused(config, "sliding_window", 0, {"1"});
}

TEST_F(Formats, Qwen2) {
  Attention a;
  a.tied = true;
  attention_tensors(a, {.qkv = true}, 0);
  Json config = attention_config("qwen2", a);
  config["sliding_window"] = 16;
  config["use_sliding_window"] = false;
  config["layer_types"] = {"full_attention", "full_attention"};
  write(config);
  expect_logits(a);
  expect_refused(config, "use_sliding_window", true, {"sliding window"});
  expect_refused(config, "layer_types", {"full_attention", "sliding_attention"}, {"full_attention"});
  expect_refused(config, "hidden_act", "gelu", {"silu"});
}

TEST_F(Formats, Qwen3) {
  const Attention a;
  attention_tensors(a, {}, 0);
  for (int64_t i = 0; i < a.layers; ++i)
    for (const char* n : {"q_norm", "k_norm"}) norm(fmt::format("model.layers.{}.self_attn.{}", i, n), a.dim);
  write(attention_config("qwen3", a));
  expect_logits(a);
}

// Weights of bf16 stay as they are, and give what they give as f32.
TEST_F(Formats, HalfPrecisionStaysInMemory) {
  const Attention a;
  attention_tensors(a, {.qkv = true}, 0);
  for (auto& [name, tensor] : tensors_) tensor = to_dtype(tensor, DType::bf16);
  write(attention_config("qwen2", a));
  expect_logits(a, WeightDType::as_stored);
  const LanguageModel model = load_model(directory_.path(), "", {}, 0, {}, WeightDType::as_stored);
  int64_t bytes = 0;
  for (const Parameter& parameter : model.parameters()) {
    const Tensor& value = parameter.value.value();
    EXPECT_EQ(value.dtype(), value.rank() == 2 ? DType::bf16 : DType::f32) << parameter.name;
    bytes += static_cast<int64_t>(value.bytes());
  }
  EXPECT_EQ(weight_bytes(model.config(), DType::bf16), bytes);
  EXPECT_EQ(load_model(directory_.path()).output_matrix().dtype(), DType::f32);
}

TEST_F(Formats, Brumby) {
  Attention a;
  a.squared = true;
  a.decay = "g_proj";
  for (const int64_t gates : {a.kv_heads, a.heads})
    for (const bool bias : {false, true}) {
      attention_tensors(a, {.qkv = bias, .out = bias, .decay = bias}, gates);
      for (int64_t i = 0; i < a.layers; ++i)
        for (const char* n : {"q_norm", "k_norm"}) norm(fmt::format("model.layers.{}.self_attn.{}", i, n), a.dim);
      Json config = attention_config("brumby", a);
      config["attention_bias"] = bias;
      config["p"] = 2;
      config["chunk_size"] = 16;
      write(config);
      expect_logits(a);
      const ModelConfig loaded = load_config(directory_.path());
      EXPECT_EQ(loaded.states(), gates);
      EXPECT_EQ(state_numbers(loaded), gates * (8 * 9 / 2) * 9);
    }
  const Json config = attention_config("brumby", a);
  expect_refused(config, "p", 4, {"square"});
  expect_refused(config, "use_exp", true, {"softmax"});
  expect_refused(config, "output_gate", true, {"not known"});
}

TEST_F(Formats, PowerCoder) {
  Attention a;
  a.squared = true;
  a.decay = "g_proj";
  a.up = "mlp.c_fc";
  a.down = "mlp.c_proj";
  a.eps = 1e-5;
  for (const bool tied : {true, false}) {
    a.tied = tied;
    attention_tensors(a, {true, true, true, true, true}, a.kv_heads, true);
    Json config = attention_config("powercoder", a);
    config.erase("rms_norm_eps");
    config.erase("tie_word_embeddings");  // the tensors tell
    config["norm_epsilon"] = 1e-5;
    config["hidden_act"] = "gelu_pytorch_tanh";
    write(config);
    expect_logits(a);
    expect_refused(config, "hidden_act", "gelu", {"gelu_pytorch_tanh"});
  }
}

TEST_F(Formats, ForgettingTransformer) {
  Attention a;
  a.heads = 3;  // 24 / 8
  a.rope = false;
  a.embedding = "model.embeddings";
  a.attention = "attn.";
  a.norm = "attn_norm";
  a.mlp_norm = "mlp_norm";
  a.decay = "f_proj";
  a.gate = "g_proj";
  a.qk_eps = 1e-5;
  for (const bool more : {false, true}) {
    a.kv_heads = more ? 1 : 3;
    attention_tensors(a, {.qkv = more, .decay = true}, a.heads);
    for (int64_t i = 0; more && i < a.layers; ++i) {
      const std::string name = fmt::format("model.layers.{}.attn.", i);
      norm(name + "q_norm", a.heads * a.dim);
      norm(name + "k_norm", a.kv_heads * a.dim);
      linear(name + "g_proj", a.hidden, a.hidden, false);
    }
    Json config = {{"model_type", "forgetting_transformer"},
                   {"vocab_size", a.vocabulary},
                   {"hidden_size", a.hidden},
                   {"intermediate_size", a.inner},
                   {"num_hidden_layers", a.layers},
                   {"num_heads", a.heads},
                   {"num_kv_heads", more ? Json(1) : Json(nullptr)},
                   {"norm_eps", a.eps},
                   {"hidden_act", "swish"},
                   {"qk_norm", more},
                   {"qkv_bias", more},
                   {"use_output_gate", more},
                   {"window_size", nullptr}};
    write(config);
    expect_logits(a);
    expect_refused(config, "attnres_block_size", 4, {"not computed"});
    config["hidden_size"] = 300;  // ⌊8 · 300/3⌋ up to a multiple of 256
    config.erase("intermediate_size");
    write_text(directory_ / "config.json", config.dump());
    EXPECT_EQ(load_config(directory_.path()).intermediate, 1024);
  }
}

TEST_F(Formats, Mamba2OfHuggingFace) {
  const auto config_of = [](const Mamba2& m) {
    return Json{{"model_type", "mamba2"},
                {"vocab_size", m.vocabulary},
                {"hidden_size", m.hidden},
                {"num_hidden_layers", m.layers},
                {"num_heads", m.heads()},
                {"head_dim", m.dim},
                {"state_size", m.state},
                {"n_groups", m.groups},
                {"conv_kernel", m.window},
                {"use_bias", m.bias},
                {"use_conv_bias", m.conv_bias},
                {"tie_word_embeddings", m.tied},
                {"time_step_limit", {m.least, Json{{"__float__", "Infinity"}}}},
                {"rms_norm", true}};
  };
  Mamba2 m;
  m.tied = true;
  mamba_tensors(m);
  write(config_of(m));
  expect_logits(m);
  m = {};
  m.groups = 2;
  m.bias = true;
  m.conv_bias = false;
  m.window = 3;
  m.least = 0.3;
  m.most = 0.9;
  mamba_tensors(m);
  Json config = config_of(m);
  config["time_step_limit"] = {m.least, m.most};
  write(config);
  expect_logits(m);
  expect_refused(config, "rms_norm", false, {"RMSNorm"});
  expect_refused(config, "num_heads", 5, {"48 / 8"});
  expect_refused(config, "time_step_limit", {0.5, 0.1}, {"least"});
  config["expand"] = 3;
  expect_refused(config, "num_heads", 6, {"72 / 8"});
}

TEST_F(Formats, Mamba2OfItsAuthorsAndConsolidated) {
  Mamba2 m;
  m.embedding = "embedding";
  m.vocabulary = 24;  // 19 rounded up to a multiple of 8
  m.ssm = 32;
  m.wide_d = true;
  m.groups = 2;
  m.tied = true;
  mamba_tensors(m);
  const Json ssm = {{"layer", "Mamba2"}, {"d_state", m.state}, {"headdim", m.dim},
                    {"ngroups", 2},      {"d_ssm", m.ssm},     {"D_has_hdim", true}};
  Json config = {
      {"d_model", m.hidden}, {"n_layer", m.layers},          {"vocab_size", 19},    {"ssm_cfg", ssm},
      {"rms_norm", true},    {"pad_vocab_size_multiple", 8}, {"d_intermediate", 0}, {"attn_layer_idx", Json::array()}};
  write_text(directory_ / "config.json", config.dump());
  write_text(directory_ / "pytorch_model.bin", TorchFile().bytes(tensors_));
  expect_logits(m);
  EXPECT_TRUE(load_notes(directory_.path()).empty());  // the pickle is read
  // The same in two files.
  Tensors first, second;
  Json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", Json::object()}};
  for (const auto& [name, tensor] : tensors_) {
    const bool early = first.size() < tensors_.size() / 2;
    (early ? first : second)[name] = tensor;
    index["weight_map"][name] = early ? "pytorch_model-00001-of-00002.bin" : "pytorch_model-00002-of-00002.bin";
  }
  fs::remove(directory_ / "pytorch_model.bin");
  write_text(directory_ / "pytorch_model-00001-of-00002.bin", TorchFile().bytes(first));
  write_text(directory_ / "pytorch_model-00002-of-00002.bin", TorchFile().bytes(second));
  write_text(directory_ / "pytorch_model.bin.index.json", index.dump());
  expect_logits(m);
  EXPECT_TRUE(load_notes(directory_.path()).empty());
  fs::remove(directory_ / "pytorch_model-00002-of-00002.bin");
  expect_error([&] { load_model(directory_.path()); }, {"pytorch_model-00002-of-00002.bin", "missing"});
  write_text(directory_ / "pytorch_model-00002-of-00002.bin", TorchFile().bytes(first));
  expect_error([&] { load_model(directory_.path()); }, {"is not in", "pytorch_model-00002-of-00002.bin"});
  fs::remove(directory_ / "pytorch_model.bin.index.json");
  expect_refused(config, "attn_layer_idx", {1}, {"attention"});
  expect_refused(config, "d_intermediate", 64, {"MLP"});
  config["ssm_cfg"]["layer"] = "Mamba1";
  write_text(directory_ / "config.json", config.dump());
  expect_error([&] { load_config(directory_.path()); }, {"Mamba-1"});

  fs::remove(directory_ / "config.json");
  m = {};
  m.hidden = 32;
  m.inner = m.ssm = 64;
  m.groups = 1;
  m.dim = 64;
  m.state = 128;
  m.root = "model.backbone.";
  m.embedding = "embedding";
  m.head = "model.lm_head";
  mamba_tensors(m);
  write_safetensors(directory_ / "consolidated.safetensors", tensors_);
  const Json params = {{"dim", 32},        {"n_layers", 2},           {"vocab_size", m.vocabulary}, {"n_groups", 1},
                       {"rms_norm", true}, {"tie_embeddings", false}, {"model_type", "mamba"}};
  write_text(directory_ / "params.json", params.dump());
  expect_logits(m);
}

// A model of ours with pairs that are neighbours, as Hugging Face's Llama, Qwen2 or Qwen3 with pairs that are halves.
TEST_F(Formats, ExportsTheLlamaFamily) {
  struct Case {
    const char* type;
    bool qkv_bias, out_bias, mlp_bias, qk_norm;
    RopeScaling scaling;
  };
  for (const Case& c :
       {Case{"llama", false, false, false, false, {}}, Case{"llama", true, true, true, false, {8, 1, 4, 32}},
        Case{"qwen2", true, false, false, false, {4, 0, 0, 0}}, Case{"qwen3", false, false, false, true, {}}}) {
    SCOPED_TRACE(c.type);
    ModelConfig config = little(preset("softmax"));
    config.k_heads = config.v_heads = 1;
    config.block.qkv_bias = c.qkv_bias;
    config.block.out_bias = c.out_bias;
    config.mlp_bias = c.mlp_bias;
    config.block.qk_norm = c.qk_norm;
    config.block.rope_scaling = c.scaling;
    ASSERT_EQ(config.block.rope_pairing, RopePairing::interleaved);
    const LanguageModel model(
        config, [&](const std::string&, const Tensor& out) { copy(out, random_.normal_tensor(out.shape(), 0.3)); });
    EXPECT_EQ(export_model(directory_.path(), model).model_type, c.type);
    EXPECT_EQ(Json::parse(read_text(directory_ / "config.json"))["model_type"], c.type);
    const LanguageModel exported = load_model(directory_.path());
    EXPECT_EQ(exported.config().block.rope_pairing, RopePairing::halves);
    const Tensor tokens = random_tokens(random_, {1, 11}, config.vocabulary);
    EXPECT_LE(relative_error(exported.logits(tokens), model.logits(tokens)), 1e-5);
    // The formulas under the exported names.
    Attention a;
    a.inner = config.intermediate;
    a.heads = 3;
    a.kv_heads = 1;
    a.vocabulary = config.vocabulary;
    a.eps = a.qk_eps = config.norm_eps;
    a.scaled = [&](double omega) { return c.scaling(omega); };
    tensors_.clear();
    const SafetensorsReader reader(directory_.path());
    for (const StoredTensor& tensor : reader.tensors()) tensors_[tensor.name] = reader.load(tensor.name);
    expect_logits(a);
  }
}

TEST_F(Formats, SayWhatIsWrong) {
  const Attention a;
  attention_tensors(a, {}, 0);
  Json config = attention_config("llama", a);
  write(config);
  tensors_.erase("model.layers.1.self_attn.v_proj.weight");
  write(config);
  expect_error([&] { load_model(directory_.path()); }, {"no tensor \"model.layers.1.self_attn.v_proj.weight\""});
  tensors_["model.layers.1.self_attn.v_proj.weight"] = random_.normal_tensor({a.kv_heads * a.dim, a.hidden});
  tensors_["model.layers.1.self_attn.g_proj.weight"] = random_.normal_tensor({a.kv_heads, a.hidden});
  write(config);
  expect_error([&] { load_model(directory_.path()); }, {"no place", "g_proj"});
  expect_refused(config, "model_type", "mamba", {"unknown", "did you mean \"mamba2\""});
  expect_refused(config, "attention_multiplier", 0.1, {"not known", "may change"});
}

}  // namespace
}  // namespace furious
