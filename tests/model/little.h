// Shared by the model tests: a small model and tokens for it.
#pragma once

#include "model/config.h"
#include "support.h"

namespace furious::testing {

inline ModelConfig little(const Preset& preset) {
  ModelConfig config;
  config.arch = preset.name;
  config.block = preset.block;
  config.vocabulary = 23;
  config.hidden = 24;
  config.intermediate = 32;
  config.layers = 2;
  set_heads(config, preset, 3);
  return config;
}

// A preset, or "shared": heads that share a state, or "window": softmax with a sliding window.
inline ModelConfig little_named(const std::string& name) {
  ModelConfig config = little(preset(name == "shared" ? "2mamba" : name == "window" ? "softmax" : name));
  if (name == "shared") config.k_heads = config.v_heads = config.decay_heads = 1;
  if (name == "window") config.block.window = 37;
  return config;
}

// What published models have beyond the paper's blocks.
inline void add_published_switches(Random& random, ModelConfig& config) {
  BlockConfig& block = config.block;
  block.qkv_bias = random.coin();
  block.out_bias = random.coin();
  block.qk_norm_per_head = block.qk_norm && random.coin();
  if (block.qk_norm && random.coin()) block.qk_norm_eps = 1e-3f;
  if (block.has_dt() && block.dt_limit == 0 && !block.dt_bias) block.dt_least = random.coin() ? 0.4 : 0;
  block.z_gate_sigmoid = block.z_gate && block.norm == Norm::sum && random.coin();
  if (block.norm == Norm::none && random.coin()) block.out_norm_groups = 3;
  if (block.rope) {
    block.rope_pairing = random.pick<RopePairing>({RopePairing::halves, RopePairing::interleaved});
    block.rope_scaling = random.pick<RopeScaling>({{}, {4, 0, 0, 0}, {8, 1, 4, 64}});
  }
  config.mlp = random.pick<Mlp>({Mlp::swiglu, Mlp::gelu, Mlp::none});
  if (config.mlp == Mlp::none) config.intermediate = 0;
  config.mlp_bias = config.mlp != Mlp::none && random.coin();
  config.layer_norm = random.coin();
  if (block.has_decay_projection() && block.decay != DecayKind::softplus_dt) config.decay_heads = random.coin() ? 1 : 0;
  if (block.score == Score::exponential && block.norm == Norm::sum && block.decay == DecayKind::none)
    block.window = random.pick<int64_t>({0, 1, 5, 40});
}

// A model with random switches and dimensions. Scores are those that have a preset in every
// combination: linear, squared and exponential.
inline ModelConfig random_config(Random& random) {
  ModelConfig config = little(preset("2mamba"));
  BlockConfig& block = config.block;
  block.score = random.pick<Score>({Score::linear, Score::squared, Score::exponential});
  block.norm = block.score == Score::exponential || random.coin() ? Norm::sum : Norm::none;
  block.decay = random.pick<DecayKind>(
      {DecayKind::none, DecayKind::original, DecayKind::softplus, DecayKind::softplus_dt, DecayKind::log_sigmoid});
  block.decay_bias = block.has_decay_projection() && random.coin();
  block.square_mask = block.score == Score::squared && block.decay != DecayKind::none && random.coin();
  block.conv_window = random.pick<int64_t>({0, 2, 3, 4});
  block.conv_bias = random.coin();
  block.conv_silu = block.conv_window > 0 && random.coin();
  block.qk_activation = random.pick<Activation>({Activation::none, Activation::relu, Activation::silu});
  block.qk_norm = block.qk_activation == Activation::none && random.coin();
  const bool positive = block.score == Score::linear && block.norm == Norm::sum;  // features, or the sum may be 0
  if (positive) block.qk_activation = Activation::relu, block.qk_norm = false;
  block.discretize =
      random.pick<Discretization>({Discretization::none, Discretization::dt, Discretization::sigmoid,
                                   Discretization::silu, Discretization::softplus, Discretization::softplus2});
  block.dt_bias = block.has_dt() && random.coin();
  if (block.has_dt() && random.coin()) block.dt_limit = 0.6;
  block.d_residual = random.coin();
  block.z_gate = random.coin();
  block.z_gate_bias = random.coin();
  if (random.coin()) block.out_norm_eps = 1e-3f;
  if (random.coin()) block.scale = 0.5f;
  block.rope = !positive && random.coin();
  config.qk_dim = random.pick<int64_t>({8, 10, 16});
  config.branch = random.pick<int64_t>({0, 16});
  config.k_heads = random.pick<int64_t>({1, 3});
  config.q_heads = random.pick<int64_t>({1, 3});
  const bool per_value =
      block.d_residual || block.discretize == Discretization::dt || block.discretize == Discretization::sigmoid;
  if (!per_value && config.q_heads == 3) config.v_heads = random.pick<int64_t>({1, 3});
  config.tie_embeddings = random.coin();
  add_published_switches(random, config);
  return config;
}

inline Tensor random_tokens(Random& random, const Shape& shape, int64_t vocabulary) {
  std::vector<int32_t> tokens(shape.elements());
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.integer(0, vocabulary - 1));
  return int_tensor_of(tokens, shape);
}

}  // namespace furious::testing
