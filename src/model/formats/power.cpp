// Power retention: Brumby (Qwen3 with another mixer) and PowerCoder (StarCoder2 with it).
//
//   o = mixer(rope(q), rope(k), v), squared score, sum norm, decay log σ(g_proj h) of each head of K and V
//
// Beyond the tensors of a Llama: self_attn.g_proj.{weight [KV heads or heads, hidden], bias}. PowerCoder has no q/k
// norm, layer norms with biases, and mlp.{c_fc, c_proj} around a GELU.
//
// Upstream's guards against division by zero, (|s| + 1e-7)² and sum + 1e-6 · the largest weight, are left out: they
// move a result by 5e-6 at most.
#include "model/formats/format.h"

namespace furious {
namespace {

BlockConfig power_retention() {
  BlockConfig block;
  block.score = Score::squared;
  block.norm = Norm::sum;
  block.decay = DecayKind::log_sigmoid;
  block.conv_window = 0;
  return block;
}

ModelConfig brumby(const ConfigReader& keys) {
  BlockConfig block = power_retention();
  block.qk_norm = true;
  ModelConfig config = read_llama_like(keys, "brumby", block);
  config.decay_heads = config.k_heads;
  bool bias = false;
  keys.optional("attention_bias", bias);
  config.block.qkv_bias = config.block.out_bias = config.block.decay_bias = bias;
  keys.only("p", 2, "the score is a square here");
  keys.only("use_exp", false, "softmax attention is the format qwen3");
  keys.only("use_sliding_window", false, "retention has no window");
  keys.ignore({"chunk_size", "prefill_chunk_size", "switch_over_seq_len",  // how upstream divides its work
               "sliding_window", "max_window_layers", "layer_types"});
  keys.finish("brumby");
  return config;
}

ModelConfig powercoder(const ConfigReader& keys) {
  ModelConfig config = read_llama_like(keys, "powercoder", power_retention(), "gelu_pytorch_tanh");
  config.decay_heads = config.k_heads;
  config.mlp = Mlp::gelu;
  config.layer_norm = true;
  config.norm_eps = 1e-5f;  // where upstream leaves it
  keys.optional("norm_epsilon", config.norm_eps, kEps);
  bool bias = true;
  keys.optional("use_bias", bias);
  config.block.qkv_bias = config.block.out_bias = config.block.decay_bias = config.mlp_bias = bias;
  keys.only("sliding_window", nullptr, "retention has no window");
  keys.ignore({"chunk_size", "prefill_chunk_size", "switch_over_seq_len"});
  keys.finish("powercoder");
  return config;
}

// The gate has rows for the heads of K and V, or for all heads.
void follow_gate(ModelConfig& config, const SafetensorsReader& weights) {
  constexpr const char* kGate = "model.layers.0.self_attn.g_proj.weight";
  if (weights.find(kGate) && stored_size(weights, kGate, 0) == config.heads()) config.decay_heads = 0;
}

std::vector<StoredRange> pieces(const SafetensorsReader&, const ModelConfig& config, const std::string& name,
                                const Shape& shape) {
  if (const auto theirs = renamed(name, "self_attn.A_mask_proj.", "self_attn.g_proj.")) return {{*theirs, shape}};
  if (config.mlp != Mlp::gelu) return {};
  if (const auto theirs = renamed(name, "mlp.up_proj.", "mlp.c_fc.")) return {{*theirs, shape}};
  if (const auto theirs = renamed(name, "mlp.down_proj.", "mlp.c_proj.")) return {{*theirs, shape}};
  return {};
}

constexpr Format kFormats[] = {{"brumby", "Brumby (power retention)", brumby, pieces, follow_gate},
                               {"powercoder", "PowerCoder (power retention)", powercoder, pieces, follow_gate}};

}  // namespace

const std::span<const Format> kPowerFormats = kFormats;

}  // namespace furious
