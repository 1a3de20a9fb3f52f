// Models of ours as Llama, Qwen2 or Qwen3 of Hugging Face's library, and as Brumby, which has Qwen3's names.
#include "base/error.h"
#include "model/formats/export_format.h"
#include "model/formats/stored.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

// What keeps everything but score, norm, decay and biases from being as in the Llama family; empty: nothing.
std::string other_around(const ModelConfig& config) {
  const BlockConfig& block = config.block;
  if (block.conv_window > 0) return "a convolution";
  if (block.window > 0) return "a sliding window";
  if (!block.rope) return "no rotary positions";
  if (block.qk_activation != Activation::none) return "an activation of Q and K";
  if (block.discretize != Discretization::none) return "a discretization of V";
  if (block.d_residual || block.z_gate || config.branch > 0) return "a D residual, gate or branch";
  if (block.scale > 0) return "a scale of its own";
  if (config.mlp != Mlp::swiglu || config.layer_norm) return "an MLP or norm of another kind";
  if (config.qk_dim != config.head_dim) return "heads of V of another dimension";
  if (config.k_heads != config.v_heads || config.q_heads < config.k_heads) return "heads shared in another way";
  if (block.qk_norm && (block.qk_norm_per_head || (block.qk_norm_eps > 0 && block.qk_norm_eps != config.norm_eps)))
    return "a norm of Q and K with weights or an eps of its own";
  return {};
}

std::string other_than_llama(const LanguageModel& model) {
  const ModelConfig& config = model.config();
  const BlockConfig& block = config.block;
  if (block.score != Score::exponential || block.norm != Norm::sum) return "a mixer that is not softmax attention";
  if (block.decay != DecayKind::none) return "a decay";
  if (const std::string other = other_around(config); !other.empty()) return other;
  if (block.qk_norm && config.mlp_bias) return "biases of the MLP beside a norm of Q and K";
  if (block.out_bias && !block.qkv_bias) return "a bias of the output alone";
  if (block.qkv_bias && !block.out_bias && (config.mlp_bias || block.qk_norm)) return "biases of Q, K and V alone";
  return {};
}

std::string other_than_brumby(const LanguageModel& model) {
  const ModelConfig& config = model.config();
  const BlockConfig& block = config.block;
  if (block.score != Score::squared || block.norm != Norm::sum) return "a mixer that is not power retention";
  if (block.decay != DecayKind::log_sigmoid || block.square_mask) return "no log-sigmoid decay";
  if (const std::string other = other_around(config); !other.empty()) return other;
  if (!block.qk_norm) return "no norm of Q and K";
  if (config.mlp_bias || block.out_bias != block.qkv_bias || block.decay_bias != block.qkv_bias)
    return "biases of some projections alone";
  if (config.decays() != config.k_heads) return "gates that differ between heads of one key";
  return {};
}

Json rope_scaling(const RopeScaling& scaling) {
  if (scaling.original > 0)
    return {{"rope_type", "llama3"},
            {"factor", scaling.factor},
            {"low_freq_factor", scaling.low},
            {"high_freq_factor", scaling.high},
            {"original_max_position_embeddings", static_cast<int64_t>(scaling.original)}};
  if (scaling.factor != 1) return {{"rope_type", "linear"}, {"factor", scaling.factor}};
  return nullptr;
}

Json attention_json(const ModelConfig& config, const char* type, const char* name) {
  const BlockConfig& block = config.block;
  return {{"architectures", {name}},
          {"model_type", type},
          {"vocab_size", config.vocabulary},
          {"hidden_size", config.hidden},
          {"intermediate_size", config.intermediate},
          {"num_hidden_layers", config.layers},
          {"num_attention_heads", config.q_heads},
          {"num_key_value_heads", config.k_heads},
          {"head_dim", config.head_dim},
          {"hidden_act", "silu"},
          {"rms_norm_eps", short_number(config.norm_eps)},
          {"rope_theta", block.rope_base},
          {"rope_scaling", rope_scaling(block.rope_scaling)},
          {"max_position_embeddings", 131072},
          {"tie_word_embeddings", config.tie_embeddings}};
}

Json llama_json(const ModelConfig& config) {
  const BlockConfig& block = config.block;
  if (block.qkv_bias && !block.out_bias) return attention_json(config, "qwen2", "Qwen2ForCausalLM");
  Json json = block.qk_norm ? attention_json(config, "qwen3", "Qwen3ForCausalLM")
                            : attention_json(config, "llama", "LlamaForCausalLM");
  json["attention_bias"] = block.out_bias;
  if (!block.qk_norm) json["mlp_bias"] = config.mlp_bias;
  return json;
}

Json brumby_json(const ModelConfig& config) {
  Json json = attention_json(config, "brumby", "BrumbyForCausalLM");
  json["attention_bias"] = config.block.qkv_bias;
  json["p"] = 2;
  json["use_exp"] = false;
  return json;
}

// Rows of heads whose pairs are neighbours, in the order of pairs that are halves.
Tensor with_halves(const Tensor& rows, int64_t dim) {
  const Tensor out = Tensor::empty_like(rows);
  const int64_t width = rows.elements() / rows.size(0), half = dim / 2;
  const Tensor from = rows.view({rows.size(0), width}), to = out.view({rows.size(0), width});
  for (int64_t begin = 0; begin < rows.size(0); begin += dim)
    for (int64_t i = 0; i < half; ++i) {
      copy_between(to.select(0, begin + i), from.select(0, begin + 2 * i));
      copy_between(to.select(0, begin + half + i), from.select(0, begin + 2 * i + 1));
    }
  return out;
}

// Queries, keys and values apart, and the gate of Brumby.
TensorsByName attention_tensors(const LanguageModel& model) {
  const ModelConfig& config = model.config();
  const bool turned = config.block.rope_pairing == RopePairing::interleaved;
  const auto in_order = [&](const Tensor& rows) { return turned ? with_halves(rows, config.qk_dim) : rows; };
  TensorsByName tensors;
  for (const Parameter& parameter : model.parameters()) {
    const Tensor value = to_device(parameter.value.value(), {});
    const auto mixing = renamed(parameter.name, "self_attn.qkv_proj.", "self_attn.");
    if (const auto gate = renamed(parameter.name, "self_attn.A_mask_proj.", "self_attn.g_proj.")) {
      tensors[*gate] = value;
    } else if (!mixing) {
      const bool norm =
          parameter.name.find("q_norm.") != std::string::npos || parameter.name.find("k_norm.") != std::string::npos;
      tensors[parameter.name] = norm ? in_order(value) : value;
    } else {
      const std::vector<StoredRange> parts = separate_qkv(config, *mixing, value.shape());
      int64_t row = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const Tensor own = value.slice(0, row, parts[i].shape[0]);
        tensors[parts[i].name] = i < 2 ? in_order(own) : own;
        row += parts[i].shape[0];
      }
    }
  }
  return tensors;
}

}  // namespace

const ExportFormat kLlamaExport = {"the Llama family", true, other_than_llama, llama_json, attention_tensors};
const ExportFormat kBrumbyExport = {"Brumby", false, other_than_brumby, brumby_json, attention_tensors};

}  // namespace furious
