#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "base/error.h"
#include "base/file.h"
#include "model/little.h"
#include "model/safetensors.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;
using Json = nlohmann::ordered_json;
using Tensors = std::map<std::string, Tensor>;

constexpr const char* kQkv = "model.layers.1.self_attn.qkv_proj.weight";

ModelConfig little(std::string_view arch) {
  return testing::little(preset(arch));
}

// A model directory, and its files one by one.
class Checkpoint : public ::testing::Test {
 protected:
  // A model whose every parameter matters.
  LanguageModel random_model(const ModelConfig& config) {
    return LanguageModel(
        config, [&](const std::string&, const Tensor& out) { copy(out, random_.normal_tensor(out.shape(), 0.3)); });
  }
  LanguageModel saved(const ModelConfig& config) {
    LanguageModel model = random_model(config);
    save_model(directory_.path(), model);
    return model;
  }
  void expect_same_logits(const LanguageModel& a, const LanguageModel& b) {
    const Tensor tokens = random_tokens(random_, {1, 9}, a.config().vocabulary);
    EXPECT_TRUE(same_bits(a.logits(tokens), b.logits(tokens)));
  }

  Tensors tensors() const {
    const SafetensorsReader reader(directory_.path());
    Tensors tensors;
    for (const StoredTensor& tensor : reader.tensors()) tensors[tensor.name] = reader.load(tensor.name);
    return tensors;
  }
  void write(const Tensors& tensors) const { write_safetensors(weights_, tensors); }
  Json config() const { return Json::parse(read_text(config_)); }
  void write(const Json& json) const { write_text(config_, json.dump()); }

  void expect_refused(std::vector<std::string> parts, const std::string& arch = "") const {
    parts.push_back(directory_.path().string());
    expect_error([&] { load_model(directory_.path(), arch); }, parts);
  }
  // The saved configuration with one value changed.
  void expect_value_refused(const Json& valid, const std::string& key, const Json& value,
                            std::vector<std::string> parts) const {
    SCOPED_TRACE(key);
    Json changed = valid;
    changed[key] = value;
    write(changed);
    parts.insert(parts.end(), {config_.string(), "\"" + key + "\""});
    expect_error([&] { load_config(directory_.path()); }, parts);
  }

  Random random_{1};
  TemporaryDirectory directory_;
  fs::path config_ = directory_ / "config.json";
  fs::path weights_ = directory_ / "model.safetensors";
};

TEST_F(Checkpoint, EveryPresetRoundTrips) {
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const LanguageModel model = saved(testing::little(preset));
    EXPECT_EQ(load_config(directory_.path()), model.config());
    const LanguageModel loaded = load_model(directory_.path(), preset.name);
    EXPECT_EQ(loaded.config(), model.config());
    expect_same_logits(model, loaded);
  }
}

TEST_F(Checkpoint, EverySwitchRoundTrips) {
  ModelConfig config = little("softmax");
  config.norm_eps = 3.3e-6f;
  config.block.rope_base = 1e6 / 3;
  config.block.rope_pairing = RopePairing::halves;
  config.block.dt_bias = true;
  config.block.discretize = Discretization::dt;
  EXPECT_EQ(config_from_json(config_to_json(config), "test"), config);
  EXPECT_NE(config_to_json(little("2mamba")).find("\"rms_norm_eps\": 1e-05"), std::string::npos);
}

// State files identify a model by this text, and older readers know only these keys: a new key is written only where
// its value differs from the default.
TEST(Switches, ConfigJsonHasAFixedText) {
  EXPECT_EQ(config_to_json(model_config("2mamba-dt", "tiny", 258)), R"({
  "architectures": [
    "FuriousForCausalLM"
  ],
  "model_type": "furious",
  "arch": "2mamba-dt",
  "vocab_size": 258,
  "hidden_size": 128,
  "intermediate_size": 256,
  "num_hidden_layers": 5,
  "q_heads": 4,
  "k_heads": 4,
  "v_heads": 4,
  "head_dim": 32,
  "rms_norm_eps": 1e-05,
  "tie_word_embeddings": false,
  "score": "squared",
  "norm": "sum",
  "decay": "softplus",
  "conv_window": 2,
  "conv_silu": false,
  "qk_activation": "none",
  "discretize": true,
  "dt_bias": false,
  "d_residual": false,
  "z_gate": false,
  "rope": false,
  "rope_pairing": "interleaved",
  "rope_theta": 10000.0,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "torch_dtype": "float32"
}
)");
}

TEST(Switches, AreSetByTheirKeys) {
  BlockConfig block = preset("2mamba").block;
  for (const auto& [key, text] : {std::pair{"score", "exponential"},
                                  {"norm", "none"},
                                  {"conv_window", "4"},
                                  {"conv_silu", "true"},
                                  {"rope", "true"},
                                  {"rope_theta", "5e5"}})
    set_switch(block, key, text);
  BlockConfig expected = preset("2mamba").block;
  expected.score = Score::exponential;
  expected.norm = Norm::none;
  expected.conv_window = 4;
  expected.conv_silu = expected.rope = true;
  expected.rope_base = 5e5;
  EXPECT_EQ(block, expected);
  EXPECT_EQ(switch_names().size(), 34u);
  for (const std::string& key : switch_names())  // each key has a valid value
    expect_error([&] { set_switch(block, key, "[]"); }, {key});
  expect_error([&] { set_switch(block, "conv_windw", "2"); }, {"unknown switch", "did you mean \"conv_window\""});
  expect_error([&] { set_switch(block, "conv_window", "5"); }, {"conv_window", "5", "0 to 4"});
  expect_error([&] { set_switch(block, "score", "squard"); }, {"score", "did you mean \"squared\""});
  expect_error([&] { set_switch(block, "rope", "yes"); }, {"rope", "true or false"});
  EXPECT_EQ(block, expected);
}

TEST_F(Checkpoint, LoadingReportsItsProgress) {
  const LanguageModel model = saved(little("2mamba"));
  std::vector<int64_t> reports;
  const auto report = [&](int64_t done, int64_t all) {
    EXPECT_EQ(all, weight_bytes(model.config(), DType::f32));
    reports.push_back(done);
  };
  expect_same_logits(model, load_model(directory_.path(), "", {}, 0, report));
  ASSERT_EQ(reports.size(), model.parameters().size());
  EXPECT_EQ(reports.front(), 0);
  EXPECT_TRUE(std::ranges::is_sorted(reports));
  EXPECT_EQ(reports.back(), weight_bytes(model.config(), DType::f32) -
                                static_cast<int64_t>(model.parameters().back().value.value().bytes()));
  const auto stop = [](int64_t done, int64_t) { require(done == 0, "enough"); };
  expect_error([&] { load_model(directory_.path(), "", {}, 0, stop); }, {"enough"});
}

// A file of 9 TB, most of it a hole: nothing is read or allocated before the error.
TEST_F(Checkpoint, RefusesWhatDoesNotFitIntoMemory) {
  ModelConfig config = little("softmax");
  config.vocabulary = int64_t{1} << 22;
  config.hidden = int64_t{1} << 19;
  config.layers = 1;
  config.tie_embeddings = true;
  uint64_t bytes = 0;
  std::string header = "{";
  LanguageModel::visit_parameters(config, [&](const std::string& name, const Shape& shape) {
    const uint64_t end = bytes + 4 * static_cast<uint64_t>(shape.elements());
    header += fmt::format(R"({}"{}":{{"dtype":"F32","shape":[{}],"data_offsets":[{},{}]}})", bytes > 0 ? "," : "", name,
                          fmt::join(shape.begin(), shape.end(), ","), bytes, end);
    bytes = end;
  });
  header += "}";
  const uint64_t length = header.size();
  write_text(config_, config_to_json(config));
  write_text(weights_, std::string(reinterpret_cast<const char*>(&length), 8) + header);
  std::error_code error;
  fs::resize_file(weights_, 8 + length + bytes, error);
  if (error) GTEST_SKIP() << "no files of " << bytes << " bytes here: " << error.message();
  EXPECT_EQ(check_model(directory_.path()), config);
  expect_refused(
      {"its weights need", fmt::format("({} bytes)", weight_bytes(config, DType::f32)), "on cpu", "are free"});
}

TEST_F(Checkpoint, TiedEmbeddingsAndGroupedHeads) {
  for (const char* arch : {"softmax", "mamba2", "2mamba"}) {
    SCOPED_TRACE(arch);
    ModelConfig config = little(arch);
    config.tie_embeddings = true;
    (arch == std::string("softmax") ? config.v_heads : config.q_heads) = 1;
    config.k_heads = 1;
    const LanguageModel model = saved(config);
    EXPECT_FALSE(tensors().contains("lm_head.weight"));
    expect_same_logits(model, load_model(directory_.path()));
  }
}

TEST_F(Checkpoint, TiedEmbeddingsMayBeStoredTwice) {
  ModelConfig config = little("2mamba");
  config.tie_embeddings = true;
  const LanguageModel model = saved(config);
  Tensors all = tensors();
  all["lm_head.weight"] = all["model.embed_tokens.weight"];
  write(all);
  expect_same_logits(model, load_model(directory_.path()));
  all["lm_head.weight"] = random_.normal_tensor({23, 24});
  write(all);
  expect_refused({"lm_head.weight", "no place"});
}

TEST_F(Checkpoint, ReadsWeightsOfHalfPrecision) {
  const LanguageModel model = saved(little("mamba2"));
  const Tensors all = tensors();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Tensors rounded = all;
    for (auto& [name, tensor] : rounded) tensor = to_dtype(tensor, dtype);
    write(rounded);
    const LanguageModel expected(model.config(), [&](const std::string& name, const Tensor& out) {
      copy(out, to_dtype(rounded.at(name), DType::f32).view(out.shape()));
    });
    expect_same_logits(expected, load_model(directory_.path()));
  }
}

TEST_F(Checkpoint, ReadsShards) {
  const LanguageModel model = saved(little("2mamba"));
  std::map<std::string, Tensors> shards;
  Json map;
  for (const auto& [name, tensor] : tensors()) {
    const std::string file = fmt::format("model-0000{}-of-00003.safetensors", random_.integer(1, 3));
    shards[file][name] = tensor;
    map[name] = file;
  }
  for (const auto& [file, part] : shards) write_safetensors(directory_ / file, part);
  write_text(directory_ / "model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  fs::remove(weights_);
  expect_same_logits(model, load_model(directory_.path()));
}

TEST_F(Checkpoint, StoresHuggingFaceShapesAndFields) {
  saved(little("mamba2"));
  EXPECT_EQ(tensors()["model.layers.0.self_attn.conv1d.weight"].shape(), (Shape{72, 1, 4}));
  EXPECT_EQ(SafetensorsReader(weights_).metadata().at("format"), "pt");
  EXPECT_EQ(config()["architectures"], Json::array({"FuriousForCausalLM"}));
  EXPECT_EQ(config()["num_attention_heads"], 3);
}

// Hugging Face's Llama in double precision, one row of tokens at a time.
class LlamaOracle {
 public:
  struct Sizes {
    int64_t hidden, intermediate, layers, heads, kv_heads, dim, vocabulary;
    double eps, base;
  };
  using Vector = std::vector<double>;
  using Rows = std::vector<Vector>;

  LlamaOracle(const Sizes& sizes, const Tensors& tensors) : sizes_(sizes) {
    for (const auto& [name, tensor] : tensors) weights_[name] = to_doubles(tensor);
  }

  Vector logits(std::span<const int32_t> tokens) const {
    Rows x;
    for (const int32_t token : tokens) {
      const auto row = weights_.at("model.embed_tokens.weight").begin() + token * sizes_.hidden;
      x.emplace_back(row, row + sizes_.hidden);
    }
    for (int64_t i = 0; i < sizes_.layers; ++i) {
      const std::string layer = fmt::format("model.layers.{}.", i);
      add(x, attention(layer + "self_attn.", normed(x, layer + "input_layernorm.weight")));
      add(x, mlp(layer + "mlp.", normed(x, layer + "post_attention_layernorm.weight")));
    }
    Vector all;
    for (const Vector& row : projected(normed(x, "model.norm.weight"), "lm_head.weight"))
      all.insert(all.end(), row.begin(), row.end());
    return all;
  }

 private:
  static void add(Rows& x, const Rows& more) {
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += more[t][i];
  }

  Rows normed(Rows x, const std::string& name) const {
    for (Vector& row : x) {
      double square = 0;
      for (const double value : row) square += value * value;
      for (size_t i = 0; i < row.size(); ++i)
        row[i] *= weights_.at(name)[i] / std::sqrt(square / static_cast<double>(row.size()) + sizes_.eps);
    }
    return x;
  }

  Rows projected(const Rows& x, const std::string& name) const {
    const Vector& weight = weights_.at(name);
    const size_t width = x[0].size();
    Rows y(x.size(), Vector(weight.size() / width));
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t o = 0; o < y[t].size(); ++o)
        for (size_t i = 0; i < width; ++i) y[t][o] += weight[o * width + i] * x[t][i];
    return y;
  }

  // Dimension i turns with dimension i + dim/2.
  Rows turned(const Rows& x) const {
    Rows y = x;
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t begin = 0; begin < x[t].size(); begin += sizes_.dim) {
        for (int64_t i = 0; i < sizes_.dim / 2; ++i) {
          const double power = -2 * static_cast<double>(i) / static_cast<double>(sizes_.dim);
          const double angle = static_cast<double>(t) * std::pow(sizes_.base, power);
          const double first = x[t][begin + i], second = x[t][begin + i + sizes_.dim / 2];
          y[t][begin + i] = first * std::cos(angle) - second * std::sin(angle);
          y[t][begin + i + sizes_.dim / 2] = second * std::cos(angle) + first * std::sin(angle);
        }
      }
    }
    return y;
  }

  Rows attention(const std::string& name, const Rows& h) const {
    const Rows q = turned(projected(h, name + "q_proj.weight"));
    const Rows k = turned(projected(h, name + "k_proj.weight"));
    const Rows v = projected(h, name + "v_proj.weight");
    Rows out(h.size(), Vector(sizes_.heads * sizes_.dim));
    for (int64_t head = 0; head < sizes_.heads; ++head) {
      const int64_t mine = head * sizes_.dim;
      const int64_t shared = head / (sizes_.heads / sizes_.kv_heads) * sizes_.dim;
      for (size_t t = 0; t < h.size(); ++t) {
        Vector weight(t + 1);
        double sum = 0;
        for (size_t s = 0; s <= t; ++s) {
          double score = 0;
          for (int64_t i = 0; i < sizes_.dim; ++i) score += q[t][mine + i] * k[s][shared + i];
          sum += weight[s] = std::exp(score / std::sqrt(static_cast<double>(sizes_.dim)));
        }
        for (size_t s = 0; s <= t; ++s)
          for (int64_t i = 0; i < sizes_.dim; ++i) out[t][mine + i] += weight[s] / sum * v[s][shared + i];
      }
    }
    return projected(out, name + "o_proj.weight");
  }

  Rows mlp(const std::string& name, const Rows& h) const {
    Rows gate = projected(h, name + "gate_proj.weight");
    const Rows up = projected(h, name + "up_proj.weight");
    for (size_t t = 0; t < gate.size(); ++t)
      for (size_t i = 0; i < gate[t].size(); ++i) gate[t][i] *= up[t][i] / (1 + std::exp(-gate[t][i]));
    return projected(gate, name + "down_proj.weight");
  }

  Sizes sizes_;
  std::map<std::string, Vector> weights_;
};

class LlamaCheckpoint : public Checkpoint {
 protected:
  LlamaCheckpoint() {
    write(llama_);
    write(weights());
  }

  // Hugging Face's names; queries, keys and values are separate.
  Tensors weights() {
    const auto& [hidden, intermediate, layers, heads, kv_heads, dim, vocabulary, eps, base] = sizes_;
    Tensors all;
    const auto add = [&](const std::string& name, const Shape& shape) {
      all[name] = random_.normal_tensor(shape, shape.rank() == 1 ? 1 : 0.3);
    };
    add("model.embed_tokens.weight", {vocabulary, hidden});
    for (int64_t i = 0; i < layers; ++i) {
      const std::string layer = fmt::format("model.layers.{}.", i);
      add(layer + "input_layernorm.weight", {hidden});
      add(layer + "self_attn.q_proj.weight", {heads * dim, hidden});
      add(layer + "self_attn.k_proj.weight", {kv_heads * dim, hidden});
      add(layer + "self_attn.v_proj.weight", {kv_heads * dim, hidden});
      add(layer + "self_attn.o_proj.weight", {hidden, heads * dim});
      add(layer + "self_attn.rotary_emb.inv_freq", {dim / 2});
      add(layer + "post_attention_layernorm.weight", {hidden});
      add(layer + "mlp.gate_proj.weight", {intermediate, hidden});
      add(layer + "mlp.up_proj.weight", {intermediate, hidden});
      add(layer + "mlp.down_proj.weight", {hidden, intermediate});
    }
    add("model.norm.weight", {hidden});
    add("lm_head.weight", {vocabulary, hidden});
    return all;
  }

  LlamaOracle::Sizes sizes_ = {32, 48, 2, 4, 2, 8, 23, 2e-5, 500};
  Json llama_ = {{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"hidden_act", "silu"},
                 {"attention_bias", false},
                 {"hidden_size", 32},
                 {"intermediate_size", 48},
                 {"num_hidden_layers", 2},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"vocab_size", 23},
                 {"rms_norm_eps", 2e-5},
                 {"rope_theta", 500.0},
                 {"rope_scaling", nullptr},
                 {"torch_dtype", "float32"}};
};

TEST_F(LlamaCheckpoint, MatchesTheLlamaOracle) {
  const LanguageModel model = load_model(directory_.path());
  EXPECT_EQ(model.config().arch, "softmax");
  EXPECT_EQ(model.config().k_heads, 2);
  const Tensor tokens = random_tokens(random_, {1, 7}, 23);
  const auto expected = LlamaOracle(sizes_, tensors()).logits(std::span(tokens.data<int32_t>(), 7));
  EXPECT_LE(relative_error(model.logits(tokens), expected), 1e-5);
  save_model(directory_.path(), model);
  expect_same_logits(model, load_model(directory_.path()));
}

TEST_F(LlamaCheckpoint, ReadsEveryEquivalentConfiguration) {
  const ModelConfig config = load_config(directory_.path());
  EXPECT_EQ(config.norm_eps, 2e-5f);
  EXPECT_EQ(config.head_dim, 8);
  Json changed = llama_;
  for (const char* key : {"rms_norm_eps", "rope_theta", "num_key_value_heads"}) changed.erase(key);
  write(changed);
  const ModelConfig plain = load_config(directory_.path());
  EXPECT_EQ(plain.norm_eps, 1e-6f);
  EXPECT_EQ(plain.block.rope_base, 10000);
  EXPECT_EQ(plain.k_heads, 4);
  changed["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 700}};
  changed["head_dim"] = 16;
  changed["tie_word_embeddings"] = true;
  write(changed);
  const ModelConfig newer = load_config(directory_.path(), "softmax");
  EXPECT_EQ(newer.block.rope_base, 700);
  EXPECT_EQ(newer.head_dim, 16);
  EXPECT_TRUE(newer.tie_embeddings);
  changed["rope_scaling"] = {{"rope_type", "default"}};  // scales nothing
  changed["dtype"] = "bfloat16";
  write(changed);
  EXPECT_EQ(load_config(directory_.path()), newer);
}

// Python's json module writes Infinity and NaN, which are not JSON.
TEST_F(LlamaCheckpoint, ReadsInfinityAndNaNAsNull) {
  const std::string before = llama_.dump();
  const auto with = [&](const std::string& more) {
    write_text(directory_ / "config.json", before.substr(0, before.size() - 1) + more + "}");
    return load_config(directory_.path());
  };
  const ModelConfig expected = load_config(directory_.path());
  EXPECT_EQ(with(R"(, "bos_token_id": [0.0, Infinity], "low": -Infinity, "no": NaN)"), expected);
  EXPECT_EQ(with(R"(, "_name_or_path": "Infinity \\\" NaN", "\\\\": Infinity)"), expected);
  expect_error([&] { with(R"(, "a": Infinit)"); }, {"not JSON"});
}

TEST_F(LlamaCheckpoint, RefusesWhatWouldBeComputedWrongly) {
  const auto refused = [&](const std::string& key, const Json& value, const std::vector<std::string>& parts) {
    expect_value_refused(llama_, key, value, parts);
  };
  refused("attention_bias", 1, {"is 1, expected true or false"});
  refused("rope_scaling", {{"factor", 8.0}, {"rope_type", "llama3"}}, {"low_freq_factor", "missing"});
  refused("rope_scaling", {{"factor", 0.0}, {"type", "linear"}}, {"factor"});
  refused("rope_scaling", {{"factor", 8.0}, {"rope_type", "yarn"}}, {"yarn", "\"default\", \"linear\" or \"llama3\""});
  refused("logit_scale", 0.5, {"not known", "may change"});
  refused("quantization_config", {{"bits", 4}}, {"not known"});
  refused("rope_interleaved", true, {"expected false"});
  refused("rope_scaling", {{"factor", 8.0}}, {"rope_scaling", "expected null"});
  refused("rope_parameters", {{"rope_type", "yarn"}}, {"yarn", "default"});
  refused("rope_parameters", {{"rope_theta", "500"}}, {"rope_theta"});
  refused("hidden_act", "gelu", {"gelu", "silu"});
  refused("model_type", "mistrall", {"mistrall", "did you mean \"mistral\""});
  refused("num_attention_heads", 5, {"divisor"});
  refused("hidden_size", nullptr, {"null", "an integer"});
  write(llama_);
  expect_refused({"softmax, not 2mamba", "--arch"}, "2mamba");
  Tensors all = tensors();
  all.erase("model.layers.1.self_attn.k_proj.weight");
  write(all);
  expect_refused({"no tensor \"model.layers.1.self_attn.k_proj.weight\""});
}

class ReleaseCheckpoint : public Checkpoint {
 protected:
  // As the authors save it: no configuration, and a mask among the weights.
  LanguageModel released(const ModelConfig& config) {
    LanguageModel model = saved(config);
    fs::remove(config_);
    Tensors all = tensors();
    for (int64_t i = 0; i < config.layers; ++i)
      all[fmt::format("model.layers.{}.self_attn.attn_mask", i)] = Tensor::zeros({1, 1, 5, 5}, DType::f32);
    write(all);
    return model;
  }
};

TEST_F(ReleaseCheckpoint, DimensionsFollowFromShapes) {
  ModelConfig softmax = little("softmax");
  softmax.q_heads = softmax.k_heads = softmax.v_heads = 2;
  softmax.head_dim = softmax.qk_dim = 64;
  ModelConfig mamba2 = little("mamba2");
  mamba2.block.dt_bias = false;
  ModelConfig wide = little("2mamba");
  wide.block.conv_window = 3;
  wide.tie_embeddings = true;
  for (ModelConfig config : {little("2mamba"), mamba2, softmax, wide, little("mamba2"), little("outnorm-d")}) {
    SCOPED_TRACE(config.arch);
    config.bos = true;
    const int64_t heads = config.arch == "softmax" ? 2 : 0;  // no tensor determines it
    const LanguageModel model = released(config);
    for (const fs::path& path : {directory_.path(), weights_}) {
      EXPECT_EQ(load_config(path, config.arch, heads), config);
      expect_same_logits(model, load_model(path, config.arch, {}, heads));
    }
  }
}

TEST_F(ReleaseCheckpoint, RequiresTheArchitecture) {
  released(little("2mamba"));
  expect_refused({"--arch", "its tensors are those of 2mamba, 2mamba-e"});
  expect_refused({"no tensor", "dt_proj", "another architecture"}, "2mamba-dt");
  expect_refused({"no tensor", "out_norm"}, "2mamba-outnorm");
  expect_error([&] { load_model(directory_.path(), "2mambo"); }, {"unknown architecture", "\"2mamba\""});
  released(little("2mamba-dt"));
  expect_refused({"no place for 2 of the tensors", "model.layers.0.self_attn.dt_proj.weight"}, "2mamba");
  write(Tensors{{"x", tensor_of({1}, {1})}});
  expect_refused({"--arch"});
  expect_refused({"no tensor \"model.embed_tokens.weight\""}, "2mamba");
}

TEST_F(ReleaseCheckpoint, RequiresHeadsThatTensorsDoNotDetermine) {
  released(little("softmax"));
  expect_refused({"no tensor tells", "24 dimensions", "--heads"}, "softmax");
  released(little("2mamba"));
  Tensors all = tensors();
  all["model.layers.0.self_attn.A_mask_proj.weight"] = random_.normal_tensor({5, 24});
  write(all);
  expect_refused({"5 heads do not divide 24"}, "2mamba");
  all["model.layers.0.self_attn.A_mask_proj.weight"] = random_.normal_tensor({12, 24});
  write(all);
  expect_refused({"head dimension 2"}, "2mamba");
}

TEST_F(Checkpoint, NamesTheTensorThatIsWrong) {
  const LanguageModel model = saved(little("2mamba"));
  const Tensors valid = tensors();
  const auto refused = [&](auto&& change, const std::vector<std::string>& parts) {
    Tensors all = valid;
    change(all);
    write(all);
    expect_refused(parts);
  };
  refused([](Tensors& all) { all.erase(kQkv); }, {"no tensor", kQkv, "[72, 24]", "incomplete"});
  refused(
      [&](Tensors& all) {
        all[kQkv] = random_.normal_tensor({24, 72});
      },
      {kQkv, "has shape [24, 72], expected [72, 24]"});
  refused([&](Tensors& all) { all[kQkv] = Tensor::zeros({72, 24}, DType::i32); }, {kQkv, "dtype I32"});
  refused(
      [&](Tensors& all) {
        all["model.layers.0.self_attn.conv1d.weight"] = random_.normal_tensor({72, 2});
      },
      {"conv1d.weight", "has shape [72, 2], expected [72, 1, 2]"});
  refused(
      [&](Tensors& all) {
        for (const char* name : {"a", "b\x1b", "c", "d", "e"}) all[name] = tensor_of({1}, {1});
      },
      {"2mamba of 2 layers", "no place for 5 of the tensors", "a, b\\x1b, c, …"});
  write(valid);
  Json fewer = config();
  fewer["num_hidden_layers"] = 1;
  write(fewer);
  expect_refused({"no place", "of 1 layers", "model.layers.1."});
  fs::remove(weights_);
  expect_refused({"neither model.safetensors"});
  expect_error([&] { load_config(directory_ / "nothing"); }, {"nothing", "does not exist"});
}

TEST_F(Checkpoint, NamesTheKeyThatIsWrong) {
  const Json valid = Json::parse(config_to_json(little("mamba2")));
  const auto refused = [&](const std::string& key, const Json& value, const std::vector<std::string>& parts) {
    expect_value_refused(valid, key, value, parts);
  };
  for (const char* key : {"vocab_size", "hidden_size", "num_hidden_layers", "q_heads", "head_dim", "conv_window"})
    for (const Json& value :
         {Json(-1), Json(1.5), Json("3"), Json(nullptr), Json(1e300), Json(UINT64_MAX), Json(INT64_MAX)})
      refused(key, value, {"expected an integer"});
  refused("tie_word_embeddings", 1, {"true or false"});
  refused("rms_norm_eps", 0, {"is 0, expected a number from"});
  refused("rope_theta", "10000", {"expected a number from"});
  refused("score", "sqared", {"sqared", "did you mean \"squared\""});
  refused("decay", 3, {"is 3, expected a string"});
  refused("num_attention_heads", 7, {"is 7, expected 3"});
  refused("model_type", "fast", {"known: furious, llama"});
  for (const auto& item : valid.items()) {
    if (item.key() == "architectures" || item.key() == "torch_dtype" || item.key().starts_with("num_attention") ||
        item.key().starts_with("num_key"))
      continue;
    Json changed = valid;
    changed.erase(item.key());
    write(changed);
    expect_error([&] { load_config(directory_.path()); }, {config_.string(), "\"" + item.key() + "\" is missing"});
  }
  write_text(config_, "{");
  expect_error([&] { load_config(directory_.path()); }, {config_.string(), "not JSON"});
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  expect_error([&] { config_from_json(R"({"model_type":)" + deep + "}", "here"); }, {"here", "deep"});
  Json impossible = valid;
  impossible["k_heads"] = 2;
  impossible.erase("num_key_value_heads");
  write(impossible);
  expect_error([&] { load_config(directory_.path()); }, {config_.string(), "2 heads"});
}

// Sizes beyond any memory, which contradict a file of a few kilobytes.
TEST_F(Checkpoint, AllocatesNoMoreThanTheFileContains) {
  saved(little("2mamba"));
  const Json valid = config();
  for (const auto& [key, value] : std::map<std::string, int64_t>{{"vocab_size", 1 << 22},
                                                                 {"hidden_size", 1 << 22},
                                                                 {"intermediate_size", 1 << 22},
                                                                 {"num_hidden_layers", 1 << 14}}) {
    Json changed = valid;
    changed[key] = value;
    write(changed);
    expect_refused({"tensor"});
  }
  // A tensor of an unknown dtype may have any shape.
  const std::string header =
      R"({"model.embed_tokens.weight":{"dtype":"X","shape":[4194304,4194304],"data_offsets":[0,0]}})";
  const uint64_t length = header.size();
  write_text(weights_, std::string(reinterpret_cast<const char*>(&length), sizeof length) + header);
  Json huge = valid;
  huge["vocab_size"] = huge["hidden_size"] = 1 << 22;
  write(huge);
  expect_refused({"model.embed_tokens.weight", "dtype X"});
}

TEST_F(Checkpoint, FuzzedConfigurations) {
  int accepted = 0, refused = 0;
  const std::vector<Json> values = {0,
                                    1,
                                    -1,
                                    2,
                                    3,
                                    4,
                                    64,
                                    1.5,
                                    1e300,
                                    UINT64_MAX,
                                    INT64_MAX,
                                    4194304,
                                    "",
                                    "none",
                                    "sum",
                                    "relu",
                                    "llama",
                                    "furious",
                                    "original",
                                    true,
                                    false,
                                    nullptr,
                                    Json::array(),
                                    Json::object()};
  const std::vector<std::string> archs = {"2mamba", "mamba2", "softmax"};
  for (int round = 0; round < 3; ++round) {
    saved(little(archs[round]));
    const std::string valid = read_text(config_);
    for (int i = 0; i < 300; ++i) {
      std::string text = valid;
      if (random_.coin()) {
        Json json = Json::parse(text);
        for (int64_t n = random_.integer(1, 2); n > 0; --n) {
          const auto at = std::next(json.begin(), random_.integer(0, static_cast<int64_t>(json.size()) - 1));
          if (random_.integer(0, 5) == 0)
            json.erase(at);
          else
            *at = random_.pick(values);
        }
        text = json.dump();
      } else {
        for (int64_t n = random_.integer(1, 3); n > 0; --n)
          text[random_.integer(0, static_cast<int64_t>(text.size()) - 1)] = static_cast<char>(random_.integer(0, 255));
        if (random_.integer(0, 5) == 0) text.resize(random_.integer(0, static_cast<int64_t>(text.size())));
      }
      std::ofstream(config_, std::ios::binary) << text;
      try {
        load_model(directory_.path());
        ++accepted;
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(accepted, 10);
  EXPECT_GT(refused, 100);
}

TEST_F(Checkpoint, FuzzedTensorSets) {
  int accepted = 0, refused = 0;
  for (const char* arch : {"2mamba", "mamba2", "linear-outnorm"}) {
    ModelConfig config = little(arch);
    config.q_heads = config.k_heads = config.v_heads = 1;
    config.head_dim = config.qk_dim = 64;
    saved(config);
    const bool keeps_config = random_.coin();
    if (!keeps_config) fs::remove(config_);
    const Tensors valid = tensors();
    for (int i = 0; i < 60; ++i) {
      Tensors all = valid;
      for (int64_t n = random_.integer(0, 2); n > 0; --n) {
        const auto at = std::next(all.begin(), random_.integer(0, static_cast<int64_t>(all.size()) - 1));
        const Tensor tensor = at->second;
        switch (random_.integer(0, 3)) {
          case 0:
            all.erase(at);
            break;
          case 1:  // under another name
            all[std::next(all.begin(), random_.integer(0, static_cast<int64_t>(all.size()) - 1))->first] = tensor;
            break;
          case 2:
            at->second = tensor.view({1, tensor.elements()});
            break;
          default:
            at->second = Tensor::zeros({random_.integer(0, 3), random_.integer(0, 100)},
                                       random_.pick<DType>({DType::f32, DType::i32, DType::f64}));
        }
      }
      write(all);
      try {
        load_model(directory_.path(), random_.integer(0, 9) == 0 ? "" : arch);
        ++accepted;
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(accepted, 20);
  EXPECT_GT(refused, 40);
}

}  // namespace
}  // namespace furious
