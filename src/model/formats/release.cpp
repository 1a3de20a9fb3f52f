#include "model/formats/release.h"

#include <algorithm>

#include "base/error.h"
#include "base/names.h"
#include "model/config_json.h"

namespace furious {
namespace {

constexpr std::string_view kJoint = "__";
constexpr std::string_view kSoftmax = "softmax", kMamba = "mamba", kLinear = "linear";
constexpr std::string_view kMixing = "self_attn.";
constexpr const char* kFirstMixing = "model.layers.0.self_attn.";
constexpr const char* kMambaLayer = "mamba_layer.";

// What a token is about: an attention_type has one of each at most.
enum class Part : uint8_t { score, norm, activation, convolution, decay, values, residual, gate };

struct Token {
  std::string_view name;
  Part part;
  void (*set)(BlockConfig& block);
};

constexpr Token kTokens[] = {
    {kLinear, Part::score, [](BlockConfig& b) { b.score = Score::linear; }},
    {"squared", Part::score, [](BlockConfig& b) { b.score = Score::squared; }},
    {"exp", Part::score, [](BlockConfig& b) { b.score = Score::exponential; }},
    {"sm_norm", Part::norm, [](BlockConfig& b) { b.norm = Norm::sum; }},
    {"output_norm", Part::norm, [](BlockConfig& b) { b.norm = Norm::none; }},
    {"out_norm", Part::norm, [](BlockConfig& b) { b.norm = Norm::none; }},
    {"ReLU", Part::activation, [](BlockConfig& b) { b.qk_activation = Activation::relu; }},
    {"silu", Part::activation, [](BlockConfig& b) { b.qk_activation = Activation::silu; }},
    {"in_conv_k_2", Part::convolution, [](BlockConfig& b) { b.conv_window = 2; }},
    {"in_conv_k_3", Part::convolution, [](BlockConfig& b) { b.conv_window = 3; }},
    {"in_conv_k_4", Part::convolution, [](BlockConfig& b) { b.conv_window = 4; }},
    {"A_mask_type_discretize", Part::decay, [](BlockConfig& b) { b.decay = DecayKind::original; }},
    {"A_mask_type_neg_softplus", Part::decay, [](BlockConfig& b) { b.decay = DecayKind::softplus; }},
    {"A_mask_type_neg_softplus_dt", Part::decay, [](BlockConfig& b) { b.decay = DecayKind::softplus_dt; }},
    {"A_mask_type_neg_softplus2", Part::decay, [](BlockConfig& b) { b.decay = DecayKind::softplus2; }},
    {"A_mask_type_neg_silu", Part::decay, [](BlockConfig& b) { b.decay = DecayKind::silu; }},
    {"dt_on_values", Part::values, [](BlockConfig& b) { b.discretize = Discretization::dt; }},
    {"D_res", Part::residual, [](BlockConfig& b) { b.d_residual = true; }},
    {"Z_out_gate", Part::gate, [](BlockConfig& b) { b.z_gate = true; }},
};

std::vector<std::string_view> tokens_of(std::string_view attention_type) {
  std::vector<std::string_view> tokens;
  for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + kJoint.size()) {
    end = attention_type.find(kJoint, begin);
    tokens.push_back(attention_type.substr(begin, end - begin));
  }
  return tokens;
}

std::vector<std::string> known_tokens() {
  std::vector<std::string> names = {std::string(kSoftmax), std::string(kMamba)};
  for (const Token& token : kTokens) names.emplace_back(token.name);
  return names;
}

// The preset with this block; else one of this name.
Preset preset_of(const BlockConfig& block, std::string_view name) {
  for (const Preset& preset : presets())
    if (preset.block == block && preset.single_head_state == 0) return preset;
  return {std::string(name), "switches of the authors' attention_type", block};
}

// The authors' Mamba-2 is mamba_ssm's block with d_ssm < d_inner. Its rows of one projection are
//   [u | m | z | x | B | C | dt], with u and m the gated branch beside the state space; its convolution has [x | B |
//   C].
// Queries, keys and values of ours are C, B and x.
std::vector<StoredRange> mamba_pieces(const ModelConfig& config, const std::string& layer, std::string_view parameter,
                                      const Shape& shape) {
  const int64_t inner = config.out_width(), state = config.qk_dim, branch = config.branch;
  const int64_t u = 0, m = u + branch, z = m + branch, x = z + inner, b = x + inner, c = b + state, dt = c + state;
  const auto projected = [&](int64_t row, int64_t rows) {
    const int64_t width = config.hidden;
    return StoredRange{layer + "in_proj.weight", {dt + config.heads(), width}, row * width, rows * width};
  };
  const auto convolved = [&](int64_t row, int64_t rows) {
    const int64_t window = config.block.conv_window;
    return StoredRange{layer + "conv1d.weight", {inner + 2 * state, 1, window}, row * window, rows * window};
  };
  if (parameter == "qkv_proj.weight") return {projected(c, state), projected(b, state), projected(x, inner)};
  if (parameter == "branch_gate_proj.weight") return {projected(u, branch)};
  if (parameter == "branch_proj.weight") return {projected(m, branch)};
  if (parameter == "z_gate_proj.weight") return {projected(z, inner)};
  if (parameter == "dt_proj.weight") return {projected(dt, config.heads())};
  if (parameter == "conv1d.weight")
    return {convolved(inner + state, state), convolved(inner, state), convolved(0, inner)};
  if (parameter == "dt_proj.bias") return {{layer + "dt_bias", shape}};
  if (parameter == "D") return {{layer + "D", {inner}}};
  if (parameter == "out_norm.weight") return {{layer + "norm.weight", shape}};
  if (parameter == "o_proj.weight") return {{layer + "out_proj.weight", shape}};
  return {{layer + std::string(parameter), shape}};
}

bool is_mamba(const SafetensorsReader& reader) {
  return reader.find(std::string(kFirstMixing) + kMambaLayer + "in_proj.weight") != nullptr;
}

// Of what the heads and the branch put out together.
int64_t mixed_width(const SafetensorsReader& reader) {
  const std::string mixing = kFirstMixing;
  return stored_size(reader, is_mamba(reader) ? mixing + kMambaLayer + "out_proj.weight" : mixing + "o_proj.weight", 1);
}

}  // namespace

Preset release_architecture(std::string_view attention_type, const std::string& origin) {
  const std::vector<std::string_view> names = tokens_of(attention_type);
  const std::string whole = fmt::format("{}: attention_type \"{}\"", origin, printable(attention_type));
  std::vector<const Token*> tokens;
  for (const std::string_view name : names) {
    const auto found = std::ranges::find(kTokens, name, &Token::name);
    if (found != std::end(kTokens)) {
      tokens.push_back(&*found);
    } else if (name != kSoftmax && name != kMamba) {
      unknown_name(fmt::format("attention_type token in {}:", origin), printable(name), known_tokens());
    } else {
      require(names.size() == 1, "{}: the token {} stands for a whole block; expected no other token beside it", whole,
              name);
      return preset(name == kMamba ? "mamba2-paper" : "softmax");
    }
  }
  if (attention_type == kLinear) return preset("linear");

  require(tokens[0]->part == Part::score, "{}: begins with the token {}; expected a score: linear, squared or exp",
          whole, tokens[0]->name);
  BlockConfig block = preset("linear-outnorm").block;
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (size_t before = 0; before < i; ++before) {
      require(tokens[before] != tokens[i], "{}: the token {} appears twice; expected each one once", whole,
              tokens[i]->name);
      require(tokens[before]->part != tokens[i]->part, "{}: the tokens {} and {} contradict each other; expected one",
              whole, tokens[before]->name, tokens[i]->name);
    }
    tokens[i]->set(block);
  }
  require(std::ranges::count(tokens, Part::norm, [](const Token* token) { return token->part; }) == 1,
          "{}: says nothing of the normalization; expected the token sm_norm or output_norm", whole);
  return preset_of(block, attention_type);
}

Preset named_architecture(const std::string& arch) {
  const bool theirs = arch == kMamba || arch.find(kJoint) != std::string::npos;
  return theirs ? release_architecture(arch, "--arch") : preset(arch);
}

int64_t told_heads(const SafetensorsReader& reader) {
  const std::string mixing = kFirstMixing;
  for (const char* name : {"A_mask_proj.weight", "A_log", "dt_proj.weight", "D"})  // a row for each head
    if (reader.find(mixing + name)) return stored_size(reader, mixing + name, 0);
  int64_t dim = 0;
  if (is_mamba(reader))
    dim = stored_size(reader, mixing + kMambaLayer + "norm.weight", 0);
  else if (reader.find(mixing + "rotary_emb.freqs"))
    dim = 2 * stored_size(reader, mixing + "rotary_emb.freqs", 0);
  if (dim == 0) return 0;
  const int64_t width = mixed_width(reader);
  require(width % dim == 0, "{}: its heads have {} dimensions, which do not divide {}; the file is damaged",
          reader.path().string(), dim, width);
  return width / dim;
}

ModelConfig release_config(const SafetensorsReader& reader, const std::string& arch, int64_t heads) {
  const std::string origin = reader.path().string();
  const Preset architecture = named_architecture(arch);
  const bool mamba = architecture.single_head_state > 0;
  ModelConfig config;
  config.arch = architecture.name;
  config.block = architecture.block;
  config.bos = true;
  config.vocabulary = stored_size(reader, "model.embed_tokens.weight", 0);
  config.hidden = stored_size(reader, "model.embed_tokens.weight", 1);
  config.intermediate = stored_size(reader, "model.layers.0.mlp.gate_proj.weight", 0);
  while (reader.find(fmt::format("model.layers.{}.input_layernorm.weight", config.layers))) ++config.layers;
  config.tie_embeddings = !reader.find("lm_head.weight");

  const int64_t width = mixed_width(reader);
  const int64_t told = told_heads(reader);
  require(heads == 0 || told == 0 || heads == told, "{}: the tensors are those of {} heads, not {}; leave --heads out",
          origin, told, heads);
  if (told > 0) heads = told;
  require(heads > 0, "{}: no tensor tells how many heads share the {} dimensions; give --heads", origin, width);
  require(width % heads == 0, "{}: {} heads do not divide {} dimensions; expected weights of the authors' release{}",
          origin, heads, width, told > 0 ? "" : " and their --heads");
  config.head_dim = config.qk_dim = width / heads;
  config.branch = mamba ? width - config.head_dim : 0;
  config.q_heads = config.k_heads = config.v_heads = mamba ? 1 : heads;

  // Of the convolution and of dt the authors ran variants under one name of ours.
  const std::string mixing = kFirstMixing, conv = mixing + "conv1d.weight";
  const bool is_preset = std::ranges::find(presets(), arch, &Preset::name) != presets().end();
  if (is_preset && config.block.conv_window > 0 && reader.find(conv))
    config.block.conv_window = stored_size(reader, conv, 2);
  if (config.block.has_dt() && !mamba) config.block.dt_bias = reader.find(mixing + "dt_proj.bias") != nullptr;
  follow_tensors(config, reader);
  return checked_config(config, origin);
}

void follow_tensors(ModelConfig& config, const SafetensorsReader& reader) {
  const std::string mixing = kFirstMixing, conv = mixing + kMambaLayer + "conv1d.weight";
  if (config.block.has_dt() && reader.find(mixing + "dt_bias_value")) config.block.dt_bias = true;
  if (!is_mamba(reader) || !reader.find(conv)) return;
  config.block.conv_window = stored_size(reader, conv, 2);
  config.qk_dim = (stored_size(reader, conv, 0) - config.head_dim) / 2;
}

std::vector<StoredRange> release_pieces(const SafetensorsReader& reader, const ModelConfig& config,
                                        const std::string& name, const Shape& shape) {
  const size_t at = name.find(kMixing);
  if (at == std::string::npos) return {};
  const std::string mixing = name.substr(0, at + kMixing.size());
  const std::string parameter = name.substr(mixing.size());
  if (is_mamba(reader)) return mamba_pieces(config, mixing + kMambaLayer, parameter, shape);
  if (parameter == "dt_proj.bias" && reader.find(mixing + "dt_bias_value"))
    return {{mixing + "dt_bias_value", {1, 1, shape[0]}}};
  return {};
}

}  // namespace furious
