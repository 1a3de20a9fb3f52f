// Mamba-2: Hugging Face's mamba2, the directories of mamba_ssm, and Mistral's consolidated file (Codestral).
//
//   x += W_out(RMSNorm of groups(y ⊙ silu(z)))     y = mixer(Q = C, K = B, V = dt · x, decay −exp(A_log) dt) + D ⊙ x
//
// There is no MLP. The rows of in_proj are [u | m | z | x | B | C | dt], with u and m the gated branch of d_ssm <
// d_inner; the convolution has [x | B | C]; B and C have a head for each group.
//
// In layers.N: norm.weight, mixer.{in_proj, out_proj}.{weight, bias}, mixer.conv1d.{weight [channels, 1, window],
// bias}, mixer.{A_log, dt_bias, D}, mixer.norm.weight.
//
// With several groups, Hugging Face's library forgets them in the norm; this follows mamba_ssm, as the models need it.
#include <algorithm>

#include "model/formats/format.h"

namespace furious {
namespace {

constexpr float kNormEps = 1e-5f;

struct Sizes {
  int64_t inner = 0, ssm = 0, head_dim = 64, state = 128, groups = 1, window = 4;
  bool bias = false, conv_bias = true;
};

ModelConfig mamba2_config(const ConfigReader& keys, const std::string& arch, ModelConfig config, const Sizes& sizes) {
  BlockConfig block = preset("mamba2-paper").block;
  block.conv_window = sizes.window;
  block.conv_bias = sizes.conv_bias;
  block.qkv_bias = block.out_bias = block.z_gate_bias = sizes.bias;
  block.out_norm_eps = kNormEps;
  block.out_norm_groups = sizes.groups;
  block.dt_limit = config.block.dt_limit;
  block.dt_least = config.block.dt_least;
  config.arch = arch;
  config.block = block;
  config.mlp = Mlp::none;
  require(sizes.ssm % sizes.head_dim == 0, "{}: a width of {} is not a multiple of the heads' dimension {}",
          keys.origin(), sizes.ssm, sizes.head_dim);
  require(sizes.inner <= kMostWidth && sizes.ssm / sizes.head_dim <= kMostHeads && sizes.ssm >= sizes.head_dim,
          "{}: a width of {} and heads of {} are more than any model has, or none", keys.origin(), sizes.inner,
          sizes.head_dim);
  config.v_heads = sizes.ssm / sizes.head_dim;
  config.q_heads = config.k_heads = sizes.groups;
  config.head_dim = sizes.head_dim;
  config.qk_dim = sizes.state;
  config.branch = sizes.inner - sizes.ssm;
  require(config.branch >= 0, "{}: \"d_ssm\" is {}, expected at most {}", keys.origin(), sizes.ssm, sizes.inner);
  return config;
}

// [least, most], where infinity is null or {"__float__": "Infinity"}.
void read_dt_limit(ModelConfig& config, const ConfigReader& keys, const char* key) {
  keys.ignore({key});
  if (!keys.has(key)) return;
  const nlohmann::json& limit = keys.value(key);
  const auto is_infinite = [](const nlohmann::json& value) {
    return value.is_null() || (value.is_object() && value == nlohmann::json{{"__float__", "Infinity"}});
  };
  const bool fits =
      limit.is_array() && limit.size() == 2 && limit[0].is_number() && limit[0] >= 0 && limit[0] <= 1e9 &&
      (is_infinite(limit[1]) || (limit[1].is_number() && limit[1] > 0 && limit[1] <= 1e9 && limit[1] >= limit[0]));
  if (!fits) keys.unexpected(key, "two numbers: the least and the largest time step");
  config.block.dt_least = limit[0].get<double>();
  if (!is_infinite(limit[1])) config.block.dt_limit = limit[1].get<double>();
}

int64_t read_expanded(const ConfigReader& keys, int64_t hidden) {
  double expand = 2;
  keys.optional("expand", expand, Range<double>{1e-3, 1e3});
  return static_cast<int64_t>(expand * static_cast<double>(hidden));
}

ModelConfig mamba2(const ConfigReader& keys) {
  ModelConfig config;
  Sizes sizes;
  ignore_common_keys(keys);
  keys("vocab_size", config.vocabulary, kWidth);
  keys("hidden_size", config.hidden, kWidth);
  keys("num_hidden_layers", config.layers, kLayers);
  config.norm_eps = kNormEps;
  keys.optional("layer_norm_epsilon", config.norm_eps, kEps);
  keys.optional("tie_word_embeddings", config.tie_embeddings);
  int64_t heads = 0;
  keys("num_heads", heads, kHeads);
  keys("head_dim", sizes.head_dim, kHeadDim);
  keys("state_size", sizes.state, kHeadDim);
  keys("n_groups", sizes.groups, kHeads);
  keys.optional("conv_kernel", sizes.window, Range<int64_t>{2, 4});
  keys.optional("use_bias", sizes.bias);
  keys.optional("use_conv_bias", sizes.conv_bias);
  sizes.inner = sizes.ssm = read_expanded(keys, config.hidden);
  if (heads * sizes.head_dim != sizes.inner)
    keys.unexpected("num_heads", fmt::format("{} / {}", sizes.inner, sizes.head_dim));
  read_dt_limit(config, keys, "time_step_limit");
  keys.only("hidden_act", "silu", "the convolution knows no other activation here");
  keys.only("rms_norm", true, "norms are RMSNorms here");
  keys.only("norm_before_gate", false, "the gate comes before the norm here");
  keys.ignore({"chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max",
               "time_step_min", "time_step_rank"});  // kernels, training and its start
  keys.finish("mamba2");
  return mamba2_config(keys, "mamba2", config, sizes);
}

void read_padded_vocabulary(ModelConfig& config, const ConfigReader& keys) {
  keys("vocab_size", config.vocabulary, kWidth);
  int64_t multiple = 8;
  keys.optional("pad_vocab_size_multiple", multiple, Range<int64_t>{1, 1 << 16});
  config.vocabulary = std::min((config.vocabulary + multiple - 1) / multiple * multiple, kMostWidth);
}

void read_ssm_around(ModelConfig& config, const ConfigReader& keys) {
  config.norm_eps = kNormEps;
  config.tie_embeddings = true;
  keys.optional("tie_embeddings", config.tie_embeddings);
  keys.only("rms_norm", true, "norms are RMSNorms here");
  keys.only("d_intermediate", 0, "layers have no MLP here");
  if (keys.has("attn_layer_idx") && !keys.value("attn_layer_idx").empty())
    keys.unexpected("attn_layer_idx", "none: layers of attention are not computed here");
  keys.ignore({"attn_layer_idx", "attn_cfg", "residual_in_fp32", "fused_add_norm"});
}

// "ssm_cfg" of mamba_ssm: what it leaves out has the class's defaults.
void read_ssm_cfg(ModelConfig& config, Sizes& sizes, const ConfigReader& keys) {
  if (!keys.has("layer") || keys.value("layer") != "Mamba2")
    fail("{}: \"layer\" is not \"Mamba2\"; Mamba-1 is not computed here", keys.origin());
  keys.optional("d_state", sizes.state, kHeadDim);
  keys.optional("d_conv", sizes.window, Range<int64_t>{2, 4});
  keys.optional("headdim", sizes.head_dim, kHeadDim);
  keys.optional("ngroups", sizes.groups, kHeads);
  keys.optional("bias", sizes.bias);
  keys.optional("conv_bias", sizes.conv_bias);
  sizes.inner = read_expanded(keys, config.hidden);
  sizes.ssm = sizes.inner;
  keys.optional("d_ssm", sizes.ssm, kWidth);
  read_dt_limit(config, keys, "dt_limit");
  keys.only("rmsnorm", true, "a norm follows the mixer here");
  keys.only("norm_before_gate", false, "the gate comes before the norm here");
  keys.only("activation", "swish", "the convolution knows no other activation here");
  keys.ignore({"layer", "D_has_hdim", "chunk_size", "use_mem_eff_path", "A_init_range", "dt_min", "dt_max",
               "dt_init_floor", "conv_init"});  // the tensor of D tells its shape
  keys.finish("mamba_ssm");
}

ModelConfig mamba_ssm(const ConfigReader& keys) {
  ModelConfig config;
  Sizes sizes;
  ignore_common_keys(keys);
  keys("d_model", config.hidden, kWidth);
  keys("n_layer", config.layers, kLayers);
  read_padded_vocabulary(config, keys);
  read_ssm_around(config, keys);
  read_ssm_cfg(config, sizes, keys.inside("ssm_cfg"));
  keys.ignore({"ssm_cfg"});
  keys.finish("mamba_ssm");
  return mamba2_config(keys, "mamba2", config, sizes);
}

ModelConfig consolidated(const ConfigReader& keys) {
  ModelConfig config;
  Sizes sizes;
  keys("dim", config.hidden, kWidth);
  keys("n_layers", config.layers, kLayers);
  read_padded_vocabulary(config, keys);
  read_ssm_around(config, keys);
  sizes.groups = 8;
  keys.optional("n_groups", sizes.groups, kHeads);
  sizes.inner = sizes.ssm = 2 * config.hidden;
  keys.only("model_type", "mamba", "of a consolidated file");
  keys.finish("of a consolidated file");
  return mamba2_config(keys, "mamba2", config, sizes);
}

// Rows of in_proj and of the convolution, which lie one behind the other.
struct Rows {
  int64_t u, m, z, x, b, c, dt, all;

  explicit Rows(const ModelConfig& config) {
    const int64_t ssm = config.out_width(), state = config.k_heads * config.qk_dim;
    u = 0, m = config.branch, z = m + config.branch, x = z + ssm, b = x + ssm, c = b + state, dt = c + state;
    all = dt + config.v_heads;
  }
};

std::vector<StoredRange> mixer_pieces(const SafetensorsReader& weights, const ModelConfig& config,
                                      const std::string& mixer, const std::string& parameter, const Shape& shape) {
  const Rows rows(config);
  const int64_t ssm = config.out_width(), state = config.k_heads * config.qk_dim, heads = config.v_heads;
  const auto projected = [&](int64_t row, int64_t count) {
    return StoredRange{mixer + "in_proj.weight", {rows.all, config.hidden}, row * config.hidden, count * config.hidden};
  };
  const auto bias = [&](int64_t row, int64_t count) {
    return StoredRange{mixer + "in_proj.bias", {rows.all}, row, count};
  };
  const auto convolved = [&](int64_t row, int64_t count) {
    const int64_t window = config.block.conv_window, first = row - rows.x;
    return StoredRange{mixer + "conv1d.weight", {rows.dt - rows.x, 1, window}, first * window, count * window};
  };
  const auto conv_bias = [&](int64_t row, int64_t count) {
    return StoredRange{mixer + "conv1d.bias", {rows.dt - rows.x}, row - rows.x, count};
  };
  const auto qkv = [&](auto&& part) {
    return std::vector<StoredRange>{part(rows.c, state), part(rows.b, state), part(rows.x, ssm)};
  };
  if (parameter == "qkv_proj.weight") return qkv(projected);
  if (parameter == "qkv_proj.bias") return qkv(bias);
  if (parameter == "conv1d.weight") return qkv(convolved);
  if (parameter == "conv1d.bias") return qkv(conv_bias);
  if (parameter == "branch_gate_proj.weight") return {projected(rows.u, config.branch)};
  if (parameter == "branch_proj.weight") return {projected(rows.m, config.branch)};
  if (parameter == "z_gate_proj.weight") return {projected(rows.z, ssm)};
  if (parameter == "z_gate_proj.bias") return {bias(rows.z, ssm)};
  if (parameter == "dt_proj.weight") return {projected(rows.dt, heads)};
  if (parameter == "dt_proj.bias") {  // both are added before the softplus
    std::vector<StoredRange> sum = {{mixer + "dt_bias", shape}};
    if (config.block.qkv_bias) {
      sum.push_back(bias(rows.dt, heads));
      sum.back().adds = true;
    }
    return sum;
  }
  if (parameter == "D") {
    if (stored_size(weights, mixer + "D", 0) == shape.elements()) return {{mixer + "D", {shape.elements()}}};
    return {{.name = mixer + "D", .shape = {heads}, .unit = 1, .repeat = config.head_dim}};
  }
  if (parameter == "out_norm.weight") return {{mixer + "norm.weight", {shape.elements()}}};
  if (parameter.starts_with("o_proj.")) return {{mixer + "out_proj." + parameter.substr(7), shape}};
  return {{mixer + parameter, shape}};
}

std::vector<StoredRange> pieces(const SafetensorsReader& weights, const ModelConfig& config, const std::string& name,
                                const Shape& shape) {
  const std::string root = weights.find("model.backbone.norm_f.weight") ? "model." : "";
  if (name == "model.embed_tokens.weight") {
    const std::string one = root + "backbone.embedding.weight";
    return {{weights.find(one) ? one : root + "backbone.embeddings.weight", shape}};
  }
  if (name == "model.norm.weight") return {{root + "backbone.norm_f.weight", shape}};
  if (name == "lm_head.weight") return {{root + name, shape}};
  const auto layer = renamed(name, "model.layers.", root + "backbone.layers.");
  if (const auto norm = renamed(*layer, "input_layernorm.", "norm.")) return {{*norm, shape}};
  const std::string mixing = "self_attn.";
  const size_t at = layer->find(mixing);
  return mixer_pieces(weights, config, layer->substr(0, at) + "mixer.", layer->substr(at + mixing.size()), shape);
}

constexpr Format kFormats[] = {{"mamba2", "Mamba-2 (Hugging Face)", mamba2, pieces},
                               {"mamba_ssm", "Mamba-2 (mamba_ssm)", mamba_ssm, pieces},
                               {"mamba_consolidated", "Mamba-2 (consolidated)", consolidated, pieces}};

}  // namespace

const std::span<const Format> kMamba2Formats = kFormats;

}  // namespace furious
