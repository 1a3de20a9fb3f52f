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
//   [Q,K,V] = conv(h W_qkv + bias), Q and K with an RMSNorm per head where qk_norm says so
//   dt = softplus(h W_dt + dt_bias), from dt_least to dt_limit    a: the log-decay (DecayKind)
//   o = mixer(act(Q), act(K), V', a) + D ⊙ V       V' = V ⊙ dt, or as Discretization says
//   o = RMSNorm(o ⊙ silu(h W_z))                   out = [silu(h W_u) ⊙ (h W_m), o] W_out + bias
//
// The gated branch of u and m, ModelConfig::branch channels, is that of mamba_ssm's block with d_ssm < d_inner.
struct BlockConfig {
  Score score = Score::squared;
  int64_t score_degree = 0;  // of the scores power and series
  Norm norm = Norm::sum;     // none: an RMSNorm follows the mixer
  int64_t window = 0;        // a token sees so many, itself among them (MixerSpec::window); 0: all before it
  DecayKind decay = DecayKind::softplus;
  bool decay_bias = false;  // a bias on h W_A
  bool qkv_bias = false, out_bias = false;
  bool square_mask = false;  // (QKᵀ ⊙ A)²: the mask is squared with the score, so the log-decay counts twice
  int64_t conv_window = 2;   // 0: no convolution
  bool conv_bias = true;
  bool conv_silu = false;
  Activation qk_activation = Activation::none;
  bool qk_norm = false;           // an RMSNorm of every head of Q and of K, before rotary positions
  bool qk_norm_per_head = false;  // with a weight for each head, not one for all
  float qk_norm_eps = 0;          // 0: that of the other norms
  Discretization discretize = Discretization::none;
  bool dt_bias = false;
  double dt_limit = 0;  // the largest dt; 0: any
  double dt_least = 0;
  bool d_residual = false;
  bool z_gate = false;
  bool z_gate_bias = true;
  bool z_gate_sigmoid = false;         // o ⊙ σ(h W_z); under the sum norm only
  int64_t out_norm_groups = 1;         // parts of the width that the RMSNorm after the mixer treats alone
  float out_norm_eps = 1.1920929e-7f;  // of the RMSNorm after the mixer: f32's epsilon, as in the authors' release
  float scale = 0;                     // of q·k; 0: 1/√qk_dim
  bool rope = false;
  RopePairing rope_pairing = RopePairing::interleaved;
  double rope_base = 10000;
  RopeScaling rope_scaling;

  bool operator==(const BlockConfig&) const = default;
  bool has_dt() const {
    return discretize == Discretization::dt || discretize == Discretization::sigmoid || decay == DecayKind::original ||
           decay == DecayKind::softplus_dt;
  }
  // Whether the decay has a projection of its own, W_A.
  bool has_decay_projection() const { return decay != DecayKind::none && decay != DecayKind::original; }
  MixerSpec mixer() const;
};

// What follows the block in a layer: W_down(silu(h W_gate) ⊙ (h W_up)), W_down gelu(h W_up), or nothing.
enum class Mlp : uint8_t { swiglu, gelu, none };

struct ModelConfig {
  std::string arch;  // the preset the block came from
  BlockConfig block;
  int64_t vocabulary = 0, hidden = 0, layers = 0;
  int64_t intermediate = 0;  // of the MLP; 0 without one
  int64_t q_heads = 0, k_heads = 0, v_heads = 0;
  int64_t decay_heads =
      0;  // of the decay's projection; 0: one for each head. Heads that share k, v and decay share a state
  int64_t head_dim = 0;  // of V and of the mixer's output
  int64_t qk_dim = 0;    // of Q and K; it decides the size of the state
  int64_t branch = 0;    // channels of the gated branch beside the mixer; 0: none
  Mlp mlp = Mlp::swiglu;
  bool mlp_bias = false;
  bool layer_norm = false;  // a layer norm with a bias instead of the RMSNorm before block and MLP and at the end
  float norm_eps = 1e-5f;
  bool tie_embeddings = false;
  bool bos = false;  // trained on texts that begin with bos

  bool operator==(const ModelConfig&) const = default;
  int64_t heads() const;                                                      // the largest of the three
  int64_t decays() const { return decay_heads > 0 ? decay_heads : heads(); }  // for a token
  int64_t states() const;                                                     // of a sequence in a layer
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

// Numbers of the states of a sequence in one layer; 0 where the mixer has none.
int64_t state_numbers(const ModelConfig& config);
// Numbers that one sequence needs in memory while it is generated, after `length` tokens, in all layers.
int64_t cache_numbers(const ModelConfig& config, int64_t length);

}  // namespace furious
