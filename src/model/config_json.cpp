#include "model/config_json.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "base/names.h"
#include "base/number.h"
#include "model/config_reader.h"
#include "model/formats/format.h"
#include "model/formats/release.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

constexpr JsonLimits kLimits{.bytes = 1 << 20, .depth = 32, .python_words = true};

constexpr std::string_view kOwnType = "furious";
constexpr const char* kAttentionType = "attention_type";  // of the authors' trainer

// In the order of the enumerations.
template <class Enum>
const std::vector<std::string> kNames;
template <>
const std::vector<std::string> kNames<Score> = {"linear", "squared", "exponential", "power", "series"};
template <>
const std::vector<std::string> kNames<Norm> = {"none", "sum"};
template <>
const std::vector<std::string> kNames<DecayKind> = {"none",      "original", "softplus",   "softplus_dt",
                                                    "softplus2", "silu",     "log_sigmoid"};
template <>
const std::vector<std::string> kNames<Discretization> = {"none", "dt", "sigmoid", "silu", "softplus", "softplus2"};
template <>
const std::vector<std::string> kNames<Activation> = {"none", "relu", "silu"};
template <>
const std::vector<std::string> kNames<Mlp> = {"swiglu", "gelu", "none"};
template <>
const std::vector<std::string> kNames<RopePairing> = {"halves", "interleaved"};

class Writer {
 public:
  template <class Number>
  void operator()(const char* key, Number value, Range<Number>) {
    json[key] = value;
  }
  // As short as a float needs: 1e-05, not the digits of the double next to it.
  void operator()(const char* key, float value, Range<float>) {
    json[key] = *parse_number<double>(fmt::format("{}", value));
  }
  void operator()(const char* key, bool value) { json[key] = value; }
  // A key that came later: it is written where it says something, so that older readers know the rest.
  template <class Value, class... More>
  void later(const char* key, const Value& value, const Value& usual, More... range) {
    if (all || value != usual) (*this)(key, value, range...);
  }
  void operator()(const char* key, const std::string& value) { json[key] = value; }
  template <class Enum>
  void operator()(const char* key, Enum value) requires std::is_enum_v<Enum> {
    json[key] = kNames<Enum>[static_cast<size_t>(value)];
    if constexpr (std::is_same_v<Enum, Discretization>)  // a flag where that says it, as it was with one kind only:
      if (value == Discretization::none || value == Discretization::dt)  // state files know a model by this text
        json[key] = value == Discretization::dt;
  }

  Json json;
  bool all = false;  // also keys that came later and say nothing
};

class Reader : public ConfigReader {
 public:
  using ConfigReader::ConfigReader;
  using ConfigReader::operator();

  template <class Enum>
  void operator()(const char* key, Enum& value) const requires std::is_enum_v<Enum> {
    if constexpr (std::is_same_v<Enum, Discretization>) {  // was a flag when there was one kind only
      if (this->value(key).is_boolean()) {
        value = this->value(key).template get<bool>() ? Discretization::dt : Discretization::none;
        return;
      }
    }
    std::string name;
    (*this)(key, name);
    const auto found = std::ranges::find(kNames<Enum>, name);
    if (found == kNames<Enum>.end())
      unknown_name(fmt::format("\"{}\" in {}:", key, origin()), printable(name), kNames<Enum>);
    value = static_cast<Enum>(found - kNames<Enum>.begin());
  }

  template <class Value, class... More>
  void later(const char* key, Value& value, const Value& usual, More... range) const {
    value = usual;
    if (has(key)) (*this)(key, value, range...);
  }
};

// What every Llama says too.
template <class Config, class Keys>
void each_llama_key(Config& config, Keys& keys, int64_t least_intermediate = 1) {
  keys("vocab_size", config.vocabulary, kWidth);
  keys("hidden_size", config.hidden, kWidth);
  keys("intermediate_size", config.intermediate, Range<int64_t>{least_intermediate, kMostWidth});
  keys("num_hidden_layers", config.layers, kLayers);
}

template <class Block, class Keys>
void each_switch(Block& block, Keys& keys) {
  keys("score", block.score);
  keys("norm", block.norm);
  keys("decay", block.decay);
  keys.later("score_degree", block.score_degree, int64_t{0}, Range<int64_t>{0, kLargestDegree});
  keys.later("decay_bias", block.decay_bias, false);
  keys.later("square_mask", block.square_mask, false);
  keys.later("qkv_bias", block.qkv_bias, false);
  keys.later("out_bias", block.out_bias, false);
  keys.later("sliding_window", block.window, int64_t{0}, Range<int64_t>{0, int64_t{1} << 40});
  keys("conv_window", block.conv_window, Range<int64_t>{0, 4});
  keys.later("conv_bias", block.conv_bias, true);
  keys("conv_silu", block.conv_silu);
  keys("qk_activation", block.qk_activation);
  keys.later("qk_norm", block.qk_norm, false);
  keys.later("qk_norm_per_head", block.qk_norm_per_head, false);
  keys.later("qk_norm_eps", block.qk_norm_eps, 0.0f, Range<float>{0, 1});
  keys("discretize", block.discretize);
  keys("dt_bias", block.dt_bias);
  keys.later("dt_limit", block.dt_limit, 0.0, Range<double>{0, 1e9});
  keys.later("dt_least", block.dt_least, 0.0, Range<double>{0, 1e9});
  keys("d_residual", block.d_residual);
  keys("z_gate", block.z_gate);
  keys.later("z_gate_bias", block.z_gate_bias, true);
  keys.later("z_gate_sigmoid", block.z_gate_sigmoid, false);
  keys.later("out_norm_groups", block.out_norm_groups, int64_t{1}, kHeads);
  keys.later("out_norm_eps", block.out_norm_eps, BlockConfig().out_norm_eps, kEps);
  keys.later("scale", block.scale, 0.0f, Range<float>{0, 1e6f});
  keys("rope", block.rope);
  keys("rope_pairing", block.rope_pairing);
  keys("rope_theta", block.rope_base, kRopeBase);
  keys.later("rope_factor", block.rope_scaling.factor, 1.0, Range<double>{1e-6, 1e6});
  keys.later("rope_low_turns", block.rope_scaling.low, 0.0, Range<double>{0, 1e6});
  keys.later("rope_high_turns", block.rope_scaling.high, 0.0, Range<double>{0, 1e6});
  keys.later("rope_original_length", block.rope_scaling.original, 0.0, Range<double>{0, 1e12});
}

// Every key of our own, for both directions.
template <class Config, class Keys>
void each_key(Config& config, Keys& keys) {
  keys("arch", config.arch);
  each_llama_key(config, keys, 0);
  keys("q_heads", config.q_heads, kHeads);
  keys("k_heads", config.k_heads, kHeads);
  keys("v_heads", config.v_heads, kHeads);
  keys("head_dim", config.head_dim, kHeadDim);
  keys.later("qk_dim", config.qk_dim, int64_t{config.head_dim}, kHeadDim);
  keys.later("decay_heads", config.decay_heads, int64_t{0}, Range<int64_t>{0, kMostWidth});
  keys.later("mlp", config.mlp, Mlp::swiglu);
  keys.later("mlp_bias", config.mlp_bias, false);
  keys.later("layer_norm", config.layer_norm, false);
  keys.later("branch", config.branch, int64_t{0}, Range<int64_t>{0, kMostWidth});
  keys("rms_norm_eps", config.norm_eps, kEps);
  keys("tie_word_embeddings", config.tie_embeddings);
  each_switch(config.block, keys);
  keys.later("bos", config.bos, config.block.rope && config.block.rope_pairing == RopePairing::halves);
}

ModelConfig own_config(const Reader& reader) {
  ModelConfig config;
  each_key(config, reader);
  reader.only("num_attention_heads", config.heads(), "the largest of q_heads, k_heads and v_heads");
  reader.only("num_key_value_heads", config.k_heads, "the same as k_heads");
  return config;
}

// What a Llama's configuration says of everything but positions and heads. What else it may ask for would be computed
// wrongly, so it is refused.
void read_llama(ModelConfig& config, const Reader& reader) {
  each_llama_key(config, reader);
  config.norm_eps = 1e-6f;  // where Hugging Face's library leaves it
  reader.optional("rms_norm_eps", config.norm_eps, kEps);
  reader.optional("tie_word_embeddings", config.tie_embeddings);
  reader.only("attention_bias", false, "projections have no bias here");
  reader.only("mlp_bias", false, "projections have no bias here");
  reader.only("hidden_act", "silu", "the MLP knows no other activation here");
  config.bos = true;
}

// The authors' trainer: a Llama whose attention is replaced by the block that attention_type names. Their softmax has
// rotary positions of its own, interleaved and with base 10000, whatever the keys of a Llama say of them.
ModelConfig release_config(const Reader& reader) {
  std::string attention_type;
  reader(kAttentionType, attention_type);
  const Preset architecture = release_architecture(attention_type, reader.origin());
  ModelConfig config;
  config.arch = architecture.name;
  config.block = architecture.block;
  read_llama(config, reader);
  int64_t heads = 0;
  reader("num_attention_heads", heads, kHeads);
  if (config.hidden % heads != 0) reader.unexpected("num_attention_heads", "a divisor of \"hidden_size\"");
  set_heads(config, architecture, heads);
  reader.only("num_key_value_heads", heads, "the same as num_attention_heads");
  reader.only("head_dim", config.head_dim, "hidden_size / num_attention_heads");
  return config;
}

}  // namespace

std::string config_to_json(const ModelConfig& config) {
  Writer writer;
  writer.json = {{"architectures", Json::array({"FuriousForCausalLM"})}, {"model_type", kOwnType}};
  each_key(config, writer);
  writer.json["num_attention_heads"] = config.heads();
  writer.json["num_key_value_heads"] = config.k_heads;
  writer.json["torch_dtype"] = "float32";
  return writer.json.dump(2) + "\n";
}

const std::vector<std::string>& switch_names() {
  static const std::vector<std::string> names = [] {
    Writer writer;
    writer.all = true;
    const BlockConfig block;
    each_switch(block, writer);
    std::vector<std::string> keys;
    for (const auto& [key, value] : writer.json.items()) keys.push_back(key);
    return keys;
  }();
  return names;
}

void set_switch(BlockConfig& block, const std::string& key, const std::string& text) {
  if (std::ranges::find(switch_names(), key) == switch_names().end()) unknown_name("switch", key, switch_names());
  Writer writer;
  each_switch(block, writer);
  const Json value = Json::parse(text, nullptr, false);
  writer.json[key] = value.is_number() || value.is_boolean() ? value : Json(text);  // names of choices have no quotes
  const Reader reader(Reader::Json(writer.json), "switches");
  each_switch(block, reader);
}

std::string switches_between(const BlockConfig& from, const BlockConfig& to) {
  const auto written = [](const BlockConfig& block) {
    Writer writer;
    writer.all = true;
    each_switch(block, writer);
    return writer.json;
  };
  const Json before = written(from), after = written(to);
  std::string text;
  for (const auto& [key, value] : after.items())
    if (value != before[key])
      text += fmt::format("{}{}={}", text.empty() ? "" : ",", key,
                          value.is_string() ? value.get<std::string>() : value.dump());
  return text;
}

ModelConfig config_from_json(std::string_view text, const std::string& origin) {
  const Reader reader(parse_json(text, origin, kLimits), origin);
  if (reader.contains(kAttentionType)) {
    reader.only("model_type", "llama", "a configuration with an attention_type is one of the authors'");
    return checked_config(release_config(reader), origin);
  }
  const std::string type = type_of(reader);
  if (type == kOwnType) return checked_config(own_config(reader), origin);
  return checked_config(format_of(type, reader).config(reader), origin);
}

const Format* config_format(std::string_view text, const std::string& origin) {
  const Reader reader(parse_json(text, origin, kLimits), origin);
  return reader.contains(kAttentionType) ? nullptr : find_format(type_of(reader));
}

ModelConfig checked_config(const ModelConfig& config, const std::string& origin) {
  try {
    check_config(config);
  } catch (const Error& error) {
    fail("{}: {}", origin, error.what());
  }
  return config;
}

}  // namespace furious
