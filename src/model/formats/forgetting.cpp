// The Forgetting Transformer of flash-linear-attention: softmax attention with the decay log σ(f_proj h) of each head.
//
//   model.embeddings.weight, model.layers.N.{attn_norm, mlp_norm}.weight, attn.{q,k,v,o,f,g}_proj.weight,
//   attn.f_proj.bias, attn.{q,k}_norm.weight [heads · dim], mlp.{gate,up,down}_proj.weight, model.norm, lm_head
#include <algorithm>

#include "model/formats/format.h"

namespace furious {
namespace {

constexpr float kQkNormEps = 1e-5f;  // upstream's norm of heads does not get the configuration's

ModelConfig forgetting(const ConfigReader& keys) {
  ModelConfig config;
  config.arch = "fox";
  config.block = preset("fox").block;
  ignore_common_keys(keys);
  keys("vocab_size", config.vocabulary, kWidth);
  keys("hidden_size", config.hidden, kWidth);
  keys("num_hidden_layers", config.layers, kLayers);
  keys("num_heads", config.q_heads, kHeads);
  config.k_heads = config.q_heads;
  keys.optional("num_kv_heads", config.k_heads, kHeads);
  config.v_heads = config.k_heads;
  if (config.hidden % config.q_heads != 0) keys.unexpected("num_heads", "a divisor of \"hidden_size\"");
  config.head_dim = config.qk_dim = config.hidden / config.q_heads;
  int64_t ratio = 4;
  keys.optional("hidden_ratio", ratio, Range<int64_t>{1, 1 << 10});
  config.intermediate = std::min((config.hidden * ratio * 2 / 3 + 255) / 256 * 256, kMostWidth);
  keys.optional("intermediate_size", config.intermediate, kWidth);
  config.norm_eps = 1e-6f;
  keys.optional("norm_eps", config.norm_eps, kEps);
  keys.optional("tie_word_embeddings", config.tie_embeddings);
  keys.optional("qkv_bias", config.block.qkv_bias);
  keys.optional("qk_norm", config.block.qk_norm);
  config.block.qk_norm_per_head = config.block.qk_norm;
  if (config.block.qk_norm) config.block.qk_norm_eps = kQkNormEps;
  keys.optional("use_output_gate", config.block.z_gate);
  config.block.z_gate_sigmoid = config.block.z_gate;
  config.block.z_gate_bias = false;
  keys.only("hidden_act", "swish", "the MLP knows no other activation here");
  keys.only("elementwise_affine", true, "norms have weights here");
  keys.only("attnres_block_size", nullptr, "residuals of attention are not computed here");
  keys.ignore({"fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
               "window_size"});  // kernels and losses; upstream applies no window
  keys.finish("forgetting_transformer");
  return config;
}

std::vector<StoredRange> pieces(const SafetensorsReader&, const ModelConfig& config, const std::string& name,
                                const Shape& shape) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"model.embed_tokens.", "model.embeddings."}, {"input_layernorm.", "attn_norm."},
      {"post_attention_layernorm.", "mlp_norm."},   {"self_attn.A_mask_proj.", "attn.f_proj."},
      {"self_attn.z_gate_proj.", "attn.g_proj."},   {"self_attn.o_proj.", "attn.o_proj."}};
  for (const auto& [ours, theirs] : kNames)
    if (const auto stored = renamed(name, ours, theirs)) return {{*stored, shape}};
  for (const char* norm : {"q_norm.", "k_norm."})
    if (const auto stored = renamed(name, std::string("self_attn.") + norm, std::string("attn.") + norm))
      return {{*stored, {shape.elements()}}};
  if (const auto stored = renamed(name, "self_attn.qkv_proj.", "attn.")) return separate_qkv(config, *stored, shape);
  return {};
}

constexpr Format kFormats[] = {
    {"forgetting_transformer", "Forgetting Transformer (flash-linear-attention)", forgetting, pieces}};

}  // namespace

const std::span<const Format> kForgettingFormats = kFormats;

}  // namespace furious
