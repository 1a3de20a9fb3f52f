// A linear layer for one token of a few sequences, with what comes before and after it, as one kernel of a GPU:
//
//   u = x ⊙ silu(gate)              h = u · weight_norm / sqrt(mean(u²) + eps)              gate and norm are optional
//
// and for each part h Wᵀ with what FusedLinear::Kind says. x, gate and weights are bf16, everything else is f32. The
// kernel fetches the weights, the slots of the rows and the convolution's states while the kernel before it still runs
// (gpu/launch.cuh): that one must not have written them.
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

// FusedLinear::Part with its tensors.
struct TokenPart {
  using Kind = FusedLinear::Kind;
  Kind kind = Kind::value;
  Tensor weight = {}, second = {}, out = {}, bias = {};
  Tensor conv_weight = {}, conv_state = {};  // the state [slots, window − 1, channels] is moved on
  Tensor slots = {};                         // i32 [rows]: where each row has its state of the convolution
  Activation after_conv = Activation::none, qk_activation = Activation::none;
  int64_t qk_width = 0;
  float sign = 1;
  Tensor a_log = {}, decay = {};
};

// Whether there is a kernel for it: not on a CPU, for other dtypes, for more than 8 rows, for weights that do not fit
// into shared memory. Outputs (out, decay) may be undefined yet.
bool has_token_linear(const TokenInput& in, std::span<const TokenPart> parts);
// False, with nothing done, where there is none.
bool token_linear(const TokenInput& in, std::span<const TokenPart> parts);

namespace cuda {
inline constexpr size_t kMostTokenParts = FusedLinear::kMostParts;
void token_linear(const TokenInput& in, std::span<const TokenPart> parts);
// Whether the weights [rows, k] of such a part fit.
bool token_linear_fits(Device device, int64_t batch, int64_t k, TokenPart::Kind kind);
}  // namespace cuda

}  // namespace furious
