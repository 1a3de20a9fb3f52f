// The Llama family of Hugging Face's library: llama (Llama 2 and 3, SmolLM2), mistral, qwen2 and qwen3.
//
//   model.embed_tokens.weight, model.layers.N.{input_layernorm, post_attention_layernorm}.weight,
//   self_attn.{q,k,v,o}_proj.{weight, bias}, self_attn.{q,k}_norm.weight, mlp.{gate,up,down}_proj.{weight, bias},
//   model.norm.weight, lm_head.weight
#include "model/formats/format.h"

namespace furious {
namespace {

BlockConfig softmax() {
  BlockConfig block = preset("softmax").block;
  block.rope_pairing = RopePairing::halves;
  return block;
}

ModelConfig llama(const ConfigReader& keys) {
  ModelConfig config = read_llama_like(keys, "softmax", softmax());
  bool bias = false;
  keys.optional("attention_bias", bias);
  config.block.qkv_bias = config.block.out_bias = bias;
  keys.optional("mlp_bias", config.mlp_bias);
  config.bos = true;
  keys.finish("llama");
  return config;
}

ModelConfig mistral(const ConfigReader& keys) {
  ModelConfig config = read_llama_like(keys, "mistral", softmax());
  int64_t window = 4096;  // where Hugging Face's library leaves it
  if (keys.contains("sliding_window") && !keys.has("sliding_window")) window = 0;
  keys.optional("sliding_window", window, Range<int64_t>{1, int64_t{1} << 40});
  config.block.window = window;
  config.bos = true;
  keys.finish("mistral");
  return config;
}

// What the Qwen models and those made of them have.
void read_qwen(const ConfigReader& keys) {
  keys.only("use_sliding_window", false, "attention to a sliding window is not computed here");
  keys.ignore({"sliding_window", "max_window_layers", "layer_types"});  // without use_sliding_window
  if (!keys.has("layer_types")) return;
  for (const auto& type : keys.value("layer_types"))
    if (type != "full_attention") keys.unexpected("layer_types", "\"full_attention\" of every layer");
}

ModelConfig qwen2(const ConfigReader& keys) {
  ModelConfig config = read_llama_like(keys, "qwen2", softmax());
  read_qwen(keys);
  config.block.qkv_bias = true;
  keys.finish("qwen2");
  return config;
}

ModelConfig qwen3(const ConfigReader& keys) {
  BlockConfig block = softmax();
  block.qk_norm = true;
  ModelConfig config = read_llama_like(keys, "qwen3", block);
  read_qwen(keys);
  bool bias = false;
  keys.optional("attention_bias", bias);
  config.block.qkv_bias = config.block.out_bias = bias;
  keys.finish("qwen3");
  return config;
}

constexpr Format kFormats[] = {{"llama", "Llama 2, Llama 3, SmolLM2", llama, nullptr},
                               {"mistral", "Mistral", mistral, nullptr},
                               {"qwen2", "Qwen2, Qwen2.5", qwen2, nullptr},
                               {"qwen3", "Qwen3", qwen3, nullptr}};

}  // namespace

const std::span<const Format> kLlamaFormats = kFormats;

ModelConfig read_llama_like(const ConfigReader& keys, const std::string& arch, const BlockConfig& block,
                            const char* activation) {
  ModelConfig config;
  config.arch = arch;
  config.block = block;
  ignore_common_keys(keys);
  keys("vocab_size", config.vocabulary, kWidth);
  keys("hidden_size", config.hidden, kWidth);
  keys("intermediate_size", config.intermediate, kWidth);
  keys("num_hidden_layers", config.layers, kLayers);
  config.norm_eps = 1e-6f;  // where Hugging Face's library leaves it
  keys.optional("rms_norm_eps", config.norm_eps, kEps);
  keys.optional("tie_word_embeddings", config.tie_embeddings);
  keys.only("hidden_act", activation, "the MLP knows no other activation here");
  keys("num_attention_heads", config.q_heads, kHeads);
  config.k_heads = config.q_heads;
  keys.optional("num_key_value_heads", config.k_heads, kHeads);
  config.v_heads = config.k_heads;
  if (!keys.has("head_dim") && config.hidden % config.q_heads != 0)
    keys.unexpected("num_attention_heads", "a divisor of \"hidden_size\", or a \"head_dim\"");
  config.head_dim = config.hidden / config.q_heads;
  keys.optional("head_dim", config.head_dim, kHeadDim);
  config.qk_dim = config.head_dim;
  read_rope(config.block, keys);
  return config;
}

}  // namespace furious
