// The plan of a layer for one token of every sequence, with operations fused that one kernel computes.
//
//   FusedLinear   h = RMSNorm(x ⊙ silu(gate)) or x ⊙ silu(gate) or x, the products that read h, and their epilogues:
//                 convolution, activation, time step and decay, gated pair, or the sum with the residual
//   FusedMixer    the mixer's step with rotary positions of q and k and v ⊙ dt before it, and + D ⊙ v after it
//
// All other operations are unchanged. A fused operation lists the operations of the plan that it covers: a backend
// without a kernel for it runs those instead.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "model/plan.h"

namespace furious {

struct FusedLinear {
  enum class Kind : uint8_t {
    value,    // + bias, convolution, activation
    add,      // + residual
    swiglu,   // weight is that of the gate, second that of the other factor
    softplus  // factor · softplus(+ bias), in f32; with a_log also decay = −exp(a_log) · that
  };
  // One weight of the product, and its epilogue.
  struct Part {
    Kind kind = Kind::value;
    Weight weight = kNo, second = kNo, bias = kNo;
    Value y = kNo;
    Value residual = kNo;                         // add
    Weight conv_weight = kNo;                     // value
    Activation activation = Activation::none;     // value
    Activation qk_activation = Activation::none;  // value: another one, applied to the first qk_width numbers
    int64_t qk_width = 0;
    float factor = 1;    // softplus
    Weight a_log = kNo;  // softplus
    Value decay = kNo;   // softplus with a_log
  };
  static constexpr size_t kMostParts = 4;

  Value x = kNo, gate = kNo;
  Weight norm = kNo;
  float eps = 0;
  std::vector<Part> parts;  // all of kind swiglu, or none
};

struct FusedMixer {
  MixerOp mixer;                    // its q, k, v are rotated and discretized, its y is before + D ⊙ v
  Value q = kNo, k = kNo, v = kNo;  // before rotation and discretization
  std::optional<RopeOp> rope;       // of q; that of k is the same
  Value dt = kNo;                   // v ⊙ dt
  Weight d = kNo;                   // + D ⊙ v
  Value y = kNo;                    // the result
};

struct TokenOp {
  std::variant<FusedLinear, FusedMixer, Op> op;
  std::vector<int> covers;  // indices of Plan::ops, in order
};

struct TokenPlan {
  Plan plan;
  std::vector<TokenOp> ops;
  // Where each value is stored if all fused operations run fused: the parts of a SplitOp, and the outputs of
  // activations fused with a product, are columns of another value.
  struct Place {
    Value value = kNo;
    int64_t column = 0;
  };
  std::vector<Place> places;
};

TokenPlan plan_tokens(const Plan& plan);

}  // namespace furious
