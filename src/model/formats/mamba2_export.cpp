// Models of ours as Mamba-2 of Hugging Face's library; formats/mamba2.cpp has the names.

#include <fmt/format.h>

#include "model/formats/export_format.h"
#include "model/formats/stored.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

std::optional<Tensor> d_of_heads(const ModelConfig& config, const Tensor& value) {
  const Tensor d = to_device(value, {});
  return shared_rows(d.view({d.elements()}), config.v_heads);
}

std::string other_than_mamba2(const LanguageModel& model) {
  const ModelConfig& config = model.config();
  const BlockConfig& block = config.block;
  if (block.score != Score::linear || block.norm != Norm::none) return "a mixer that is not Mamba-2's";
  if (block.decay != DecayKind::original || block.discretize != Discretization::dt || !block.dt_bias)
    return "another decay or discretization";
  if (config.mlp != Mlp::none) return "an MLP";
  if (block.scale != 1) return "a scale of Q and K";
  if (block.rope || block.qk_norm || block.qk_activation != Activation::none)
    return "rotary positions, a norm or an activation of Q and K";
  if (block.conv_window == 0 || !block.conv_silu) return "no convolution with SiLU";
  if (!block.d_residual || !block.z_gate || config.layer_norm) return "no D residual or gate, or layer norms";
  if (block.z_gate_bias != block.qkv_bias || block.out_bias != block.qkv_bias)
    return "biases of some projections alone";
  if (config.q_heads != config.k_heads || config.v_heads != config.heads()) return "heads shared in another way";
  if (block.out_norm_groups > 1) return "a norm of several groups, which the library computes as one";
  if (config.q_heads > 1) return "several groups without a norm of each";
  if (config.branch > 0 || config.out_width() % config.hidden != 0) return "a width that is no multiple of the hidden";
  if (block.out_norm_eps != config.norm_eps) return "norms with different eps";
  for (const Parameter& parameter : model.parameters())
    if (parameter.name.ends_with("self_attn.D") && !d_of_heads(config, parameter.value.value()))
      return "a D that differs within a head";
  return {};
}

Json mamba2_json(const ModelConfig& config) {
  const BlockConfig& block = config.block;
  Json json = {{"architectures", {"Mamba2ForCausalLM"}},
               {"model_type", "mamba2"},
               {"vocab_size", config.vocabulary},
               {"hidden_size", config.hidden},
               {"num_hidden_layers", config.layers},
               {"num_heads", config.v_heads},
               {"head_dim", config.head_dim},
               {"state_size", config.qk_dim},
               {"n_groups", config.k_heads},
               {"expand", config.out_width() / config.hidden},
               {"conv_kernel", block.conv_window},
               {"use_bias", block.qkv_bias},
               {"use_conv_bias", block.conv_bias},
               {"hidden_act", "silu"},
               {"layer_norm_epsilon", short_number(config.norm_eps)},
               {"residual_in_fp32", true},
               {"tie_word_embeddings", config.tie_embeddings}};
  // The library's own limits where there are none; infinity has no word in JSON that all of its versions read.
  if (block.dt_limit > 0) json["time_step_limit"] = {block.dt_least, block.dt_limit};
  return json;
}

TensorsByName mamba2_tensors(const LanguageModel& model) {
  const ModelConfig& config = model.config();
  const int64_t state = config.k_heads * config.qk_dim, ssm = config.out_width();
  TensorsByName ours, theirs;
  for (const Parameter& parameter : model.parameters()) ours[parameter.name] = to_device(parameter.value.value(), {});
  // [x | B | C] of our [C | B | x].
  const auto turned = [&](const Tensor& rows) {
    return std::vector{rows.slice(0, 2 * state, ssm), rows.slice(0, state, state), rows.slice(0, 0, state)};
  };
  const auto projected = [&](const Tensor& z, const Tensor& qkv, const Tensor& dt) {
    std::vector<Tensor> parts = turned(qkv);
    parts.insert(parts.begin(), z);
    parts.push_back(dt);
    return joined_rows(parts);
  };
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string own = fmt::format("model.layers.{}.", layer), mixing = own + "self_attn.";
    const std::string to = fmt::format("backbone.layers.{}.", layer), mixer = to + "mixer.";
    theirs[to + "norm.weight"] = ours.at(own + "input_layernorm.weight");
    theirs[mixer + "in_proj.weight"] =
        projected(ours.at(mixing + "z_gate_proj.weight"), ours.at(mixing + "qkv_proj.weight"),
                  ours.at(mixing + "dt_proj.weight"));
    if (config.block.qkv_bias) {
      theirs[mixer + "in_proj.bias"] =
          projected(ours.at(mixing + "z_gate_proj.bias"), ours.at(mixing + "qkv_proj.bias"),
                    Tensor::zeros({config.v_heads}, DType::f32));
      theirs[mixer + "out_proj.bias"] = ours.at(mixing + "o_proj.bias");
    }
    const Tensor taps = joined_rows(turned(ours.at(mixing + "conv1d.weight")));
    theirs[mixer + "conv1d.weight"] = taps.view({taps.size(0), 1, taps.size(1)});
    if (config.block.conv_bias) theirs[mixer + "conv1d.bias"] = joined_rows(turned(ours.at(mixing + "conv1d.bias")));
    theirs[mixer + "dt_bias"] = ours.at(mixing + "dt_proj.bias");  // theirs of in_proj is 0: both are added
    theirs[mixer + "A_log"] = ours.at(mixing + "A_log");
    theirs[mixer + "D"] = *d_of_heads(config, ours.at(mixing + "D"));
    theirs[mixer + "norm.weight"] = ours.at(mixing + "out_norm.weight");
    theirs[mixer + "out_proj.weight"] = ours.at(mixing + "o_proj.weight");
  }
  theirs["backbone.embeddings.weight"] = ours.at("model.embed_tokens.weight");
  theirs["backbone.norm_f.weight"] = ours.at("model.norm.weight");
  if (!config.tie_embeddings) theirs["lm_head.weight"] = ours.at("lm_head.weight");
  return theirs;
}

}  // namespace

const ExportFormat kMamba2Export = {"Mamba-2", true, other_than_mamba2, mamba2_json, mamba2_tensors};

}  // namespace furious
