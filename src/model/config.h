// What a model is: the switches of its token-mixing block, by name or one by one, and its dimensions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/mixer/mixer.h"
#include "ops/nn/activation.h"
#include "ops/nn/rope.h"

namespace furious {

// The log-decay, with x = h W_A (+ its bias):
//   original −exp(A_log)·dt    softplus −softplus(x)    softplus_dt −softplus(x)·dt    log_sigmoid −softplus(−x)
//   softplus2 −x·softplus(x)   silu −silu(x)            these two may be positive
enum class DecayKind : uint8_t { none, original, softplus, softplus_dt, softplus2, silu, log_sigmoid };

// What the values go through before the mixer:
//   dt V ⊙ softplus(h W_dt + dt_bias)    sigmoid V ⊙ σ(h W_dt + dt_bias), which is then the dt of the decay too
//   silu silu(V)    softplus softplus(V)    softplus2 V ⊙ softplus(V)
enum class Discretization : uint8_t { none, dt, sigmoid, silu, softplus, softplus2 };

// The token-mixing block (every switch of the paper):
//
//   [Q,K,V] = conv(h W_qkv), Q and K with an RMSNorm per head where qk_norm says so
//   dt = min(softplus(h W_dt + dt_bias), dt_limit)    a: the log-decay (DecayKind)
//   o = mixer(act(Q), act(K), V', a) + D ⊙ V       V' = V ⊙ dt, or as Discretization says
//   o = RMSNorm(o ⊙ silu(h W_z))                   out = [silu(h W_u) ⊙ (h W_m), o] W_out
//
// The gated branch of u and m, ModelConfig::branch channels, is that of mamba_ssm's block with d_ssm < d_inner.
struct BlockConfig {
  Score score = Score::squared;
  int64_t score_degree = 0;  // of the scores power and series
  Norm norm = Norm::sum;     // none: an RMSNorm follows the mixer
  DecayKind decay = DecayKind::softplus;
  bool decay_bias = false;   // a bias on h W_A
  bool square_mask = false;  // (QKᵀ ⊙ A)²: the mask is squared with the score, so the log-decay counts twice
  int64_t conv_window = 2;   // 0: no convolution
  bool conv_bias = true;
  bool conv_silu = false;
  Activation qk_activation = Activation::none;
  bool qk_norm = false;  // an RMSNorm of every head of Q and of K, before rotary positions
  Discretization discretize = Discretization::none;
  bool dt_bias = false;
  double dt_limit = 0;  // the largest dt; 0: any
  bool d_residual = false;
  bool z_gate = false;
  bool z_gate_bias = true;
  float out_norm_eps = 1.1920929e-7f;  // of the RMSNorm after the mixer: f32's epsilon, as in the authors' release
  float scale = 0;                     // of q·k; 0: 1/√qk_dim
  bool rope = false;
  RopePairing rope_pairing = RopePairing::interleaved;
  double rope_base = 10000;

  bool operator==(const BlockConfig&) const = default;
  bool has_dt() const {
    return discretize == Discretization::dt || discretize == Discretization::sigmoid || decay == DecayKind::original ||
           decay == DecayKind::softplus_dt;
  }
  // Whether the decay has a projection of its own, W_A.
  bool has_decay_projection() const { return decay != DecayKind::none && decay != DecayKind::original; }
  MixerSpec mixer() const;
};

struct ModelConfig {
  std::string arch;  // the preset the block came from
  BlockConfig block;
  int64_t vocabulary = 0, hidden = 0, intermediate = 0, layers = 0;
  int64_t q_heads = 0, k_heads = 0, v_heads = 0;
  int64_t head_dim = 0;  // of V and of the mixer's output
  int64_t qk_dim = 0;    // of Q and K; it decides the size of the state
  int64_t branch = 0;    // channels of the gated branch beside the mixer; 0: none
  float norm_eps = 1e-5f;
  bool tie_embeddings = false;
  bool bos = false;  // trained on texts that begin with bos

  bool operator==(const ModelConfig&) const = default;
  int64_t heads() const;  // the largest of the three
  int64_t qkv_width() const { return (q_heads + k_heads) * qk_dim + v_heads * head_dim; }
  int64_t out_width() const { return heads() * head_dim; }  // of the mixer's output
};

// Architectures and ablation rows of the paper; unknown names are answered with the nearest.
struct Preset {
  std::string name;
  std::string description;
  BlockConfig block;
  // One head of the size's head dimension with a state of so many rows, beside a branch that has the rest of the width
  // (the authors' Mamba-2 baseline); 0: the size's heads.
  int64_t single_head_state = 0;
};
const std::vector<Preset>& presets();
const Preset& preset(std::string_view name);

struct Size {
  std::string name;
  int64_t hidden, intermediate, heads, layers;
};
const std::vector<Size>& sizes();
int64_t size_heads(std::string_view size);
ModelConfig model_config(std::string_view arch, std::string_view size, int64_t vocabulary);
// Gives a model of this width and so many heads its heads, dimensions and branch, as the preset has them.
void set_heads(ModelConfig& config, const Preset& preset, int64_t heads);

// Throws an Error with the reason when the switches or dimensions cannot work together.
void check_config(const ModelConfig& config);

// Numbers that one sequence needs in memory while it is generated, after `length` tokens, in all layers.
int64_t cache_numbers(const ModelConfig& config, int64_t length);

}  // namespace furious
