// The linear layers of a model for one token of every sequence, each with its neighbours in one pass:
//
//   u = x ⊙ silu(gate)              h = u · weight_norm / sqrt(mean(u²) + eps)              gate and norm are optional
//
//   token_add       to += h Wᵀ
//   token_swiglu    silu(h W_gateᵀ) ⊙ (h W_upᵀ)
//   token_logits    h Wᵀ, in f32
//   token_mixing    what the mixer takes in: qkv = act(conv(h W_qkvᵀ)), dt = f(h W_dtᵀ + bias),
//                   a = g(h W_Aᵀ + bias), that times dt, or −factor·exp(A_log)·dt, z = h W_zᵀ + bias
//
// x, gate [batch, n] are activations, weights as ops/linear.h takes them, everything else is f32. On a GPU, for up to 8
// sequences with activations and weights in bf16, and f and g multiples of softplus, each is one kernel that fetches
// the weights, the slots of the rows and the convolution's states while the kernel before it still runs
// (gpu/launch.cuh): that one must not have written them. In all other cases each is the plain operations one after the
// other.
#pragma once

#include <span>

#include "ops/matmul.h"
#include "ops/nn/decay.h"
#include "ops/slots.h"
#include "tensor/tensor.h"

namespace furious {

struct TokenInput {
  Tensor x;     // [batch, n]
  Tensor gate;  // optional, of the same shape
  Tensor norm;  // optional [n]: the weight of an RMSNorm
  float eps = 0;
};

// h on its own.
Tensor prepared(const TokenInput& in);
void token_add(const Tensor& to, const TokenInput& in, const Tensor& weight, MatmulPrecision precision);
Tensor token_swiglu(const TokenInput& in, const Tensor& gate, const Tensor& up, MatmulPrecision precision);
Tensor token_logits(const TokenInput& in, const Tensor& weight);

// Parameters that a block does not have are not there.
struct TokenMixing {
  Tensor qkv, conv_weight, conv_bias, dt, dt_bias, a_mask, a_mask_bias, a_log, z_gate, z_gate_bias;
  Activation after_conv = Activation::none;
  Activation qk_activation = Activation::none;
  int64_t qk_width = 0;  // channels of qkv, from the first, that it is for
  HeadFunction time_step = {};
  HeadFunction decay = {.factor = -1};  // of h W_Aᵀ
  bool decay_times_dt = false;
  float original_factor = 1;
};
struct TokenMixed {
  Tensor qkv;            // [batch, channels]
  Tensor dt, log_decay;  // [batch, heads] f32
  Tensor z;              // [batch, its width]
};
// Whether the one kernel computes the functions of these.
bool knows_functions(const TokenMixing& weights);
// Moves the convolution's states [slots, window − 1, channels] of these rows on.
TokenMixed token_mixing(const TokenInput& in, const TokenMixing& weights, const Tensor& conv_state,
                        const SlotRows& rows, MatmulPrecision precision);

// h Wᵀ in f32, for h [..., n] of any activation's dtype.
Tensor logits_forward(const Tensor& h, const Tensor& weight);

// Some rows of the product and what becomes of them.
struct TokenPart {
  enum class Kind : uint8_t {
    value,    // + bias, convolution, activation
    add,      // added to what is there
    swiglu,   // weight is that of the gate, second that of the other factor
    softplus  // sign · softplus(+ bias); with a_log also decay = −exp(a_log) · that
  };
  Kind kind = Kind::value;
  Tensor weight = {}, second = {}, out = {}, bias = {};
  Tensor conv_weight = {}, conv_state = {};
  Tensor slots = {};  // i32 [rows]: where each has its state of the convolution
  Activation after_conv = Activation::none, qk_activation = Activation::none;
  int64_t qk_width = 0;
  float sign = 1;
  Tensor a_log = {}, decay = {};
};

namespace cuda {
inline constexpr size_t kMostTokenParts = 4;
void token_linear(const TokenInput& in, std::span<const TokenPart> parts);
// Whether there is room for the weights [rows, k] of such a part.
bool token_linear_fits(Device device, int64_t batch, int64_t k, TokenPart::Kind kind);
}  // namespace cuda

}  // namespace furious
