// A linear layer for one token of up to 8 sequences, fused with the operations before and after it into one GPU kernel:
//
//   u = x ⊙ silu(gate)              h = u · weight_norm / sqrt(mean(u²) + eps)              gate and norm are optional
//
// and for each part h Wᵀ followed by the operations of its FusedLinear::Kind. x, gate and weights are bf16, everything
// else is f32. The kernel loads the weights, the slots of the rows and the convolution's states while the previous
// kernel still runs (programmatic dependent launch, gpu/launch.cuh), so the previous kernel must not write them.
#pragma once

#include <span>

#include "decode/token_plan.h"
#include "tensor/tensor.h"

namespace furious {

struct TokenInput {
  Tensor x;     // [rows, n]
  Tensor gate;  // optional, of the same shape
  Tensor norm;  // optional [n]: the weight of an RMSNorm
  float eps = 0;
};

// The tensors of a FusedLinear::Part.
struct TokenPart {
  using Kind = FusedLinear::Kind;
  Kind kind = Kind::value;
  Tensor weight = {}, second = {}, out = {}, bias = {};
  Tensor conv_weight = {}, conv_state = {};  // the state [slots, window − 1, channels] is updated
  Tensor slots = {};                         // i32 [rows]: the slot of each row in conv_state
  Activation after_conv = Activation::none, qk_activation = Activation::none;
  int64_t qk_width = 0;
  float sign = 1;
  Tensor a_log = {}, decay = {};
};

// Whether a kernel supports the call: not on a CPU, for other dtypes, for more than 8 rows, for weights that do not fit
// into shared memory. Outputs (out, decay) may still be undefined.
bool has_token_linear(const TokenInput& in, std::span<const TokenPart> parts);
// Returns false and does nothing if no kernel supports the call.
bool token_linear(const TokenInput& in, std::span<const TokenPart> parts);

namespace cuda {
inline constexpr size_t kMostTokenParts = FusedLinear::kMostParts;
void token_linear(const TokenInput& in, std::span<const TokenPart> parts);
// Whether tiles of a weight [rows, k] fit into shared memory.
bool token_linear_fits(Device device, int64_t batch, int64_t k, TokenPart::Kind kind);
}  // namespace cuda

}  // namespace furious
