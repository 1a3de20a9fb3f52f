// What a model is: the switches of its token-mixing block, by name or one by one, and its dimensions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/activation.h"
#include "ops/mixer/mixer.h"
#include "ops/rope.h"

namespace furious {

enum class DecayKind : uint8_t { none, original, softplus };

// The token-mixing block (every switch of the paper):
//
//   [Q,K,V] = conv(h W_qkv)    dt = softplus(h W_dt + dt_bias)    a = −exp(A_log)·dt (original) | −softplus(h W_A)
//   o = mixer(act(Q), act(K), V ⊙ dt, a) + D ⊙ V                  out = RMSNorm(o ⊙ silu(h W_z)) W_out
struct BlockConfig {
  Score score = Score::squared;
  Norm norm = Norm::sum;  // none: an RMSNorm follows the mixer
  DecayKind decay = DecayKind::softplus;
  int64_t conv_window = 2;  // 0: no convolution
  bool conv_silu = false;
  Activation qk_activation = Activation::none;
  bool discretize = false;
  bool dt_bias = false;
  bool d_residual = false;
  bool z_gate = false;
  bool rope = false;
  RopePairing rope_pairing = RopePairing::interleaved;
  double rope_base = 10000;

  bool operator==(const BlockConfig&) const = default;
  bool has_dt() const { return discretize || decay == DecayKind::original; }
  MixerSpec mixer() const { return {score, decay != DecayKind::none, norm}; }
};

struct ModelConfig {
  std::string arch;  // the preset the block came from
  BlockConfig block;
  int64_t vocabulary = 0, hidden = 0, intermediate = 0, layers = 0;
  int64_t q_heads = 0, k_heads = 0, v_heads = 0, head_dim = 0;
  float norm_eps = 1e-5f;
  bool tie_embeddings = false;

  bool operator==(const ModelConfig&) const = default;
  int64_t heads() const;  // the largest of the three
  int64_t qkv_width() const { return (q_heads + k_heads + v_heads) * head_dim; }
};

// Architectures and ablation rows of the paper; unknown names are answered with the nearest.
struct Preset {
  std::string name;
  std::string description;
  BlockConfig block;
};
const std::vector<Preset>& presets();
const Preset& preset(std::string_view name);

struct Size {
  std::string name;
  int64_t hidden, intermediate, heads, layers;
};
const std::vector<Size>& sizes();
ModelConfig model_config(std::string_view arch, std::string_view size, int64_t vocabulary);

// Throws an Error with the reason when the switches or dimensions cannot work together.
void check_config(const ModelConfig& config);

int64_t parameter_count(const ModelConfig& config);
// Numbers that one sequence needs in memory while it is generated, after `length` tokens, in all layers.
int64_t cache_numbers(const ModelConfig& config, int64_t length);

}  // namespace furious
