// The plan of a layer for one token of every sequence: operations that one kernel computes are joined.
//
//   FusedLinear   h = RMSNorm(x ⊙ silu(gate)) or x ⊙ silu(gate) or x, the products that read h, and what follows each:
//                 convolution, activation, time step and decay, gated pair, or the sum with the residual
//   FusedMixer    the mixer's step with what surrounds it: rotary positions of q and k, v ⊙ dt before, + D ⊙ v after
//
// What fits neither stays as it is. Each joined operation keeps the operations that it stands for: a backend that has
// no kernel for it runs those instead (DecodeBackend in decoder.cpp asks, operation by operation, when the plan is
// made).
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
  // Some rows of the product and what becomes of them.
  struct Part {
    Kind kind = Kind::value;
    Weight weight = kNo, second = kNo, bias = kNo;
    Value y = kNo;
    Value residual = kNo;                         // add
    Weight conv_weight = kNo;                     // value; its bias is `bias`
    Activation activation = Activation::none;     // value
    Activation qk_activation = Activation::none;  // value: a second one, of the first qk_width numbers
    int64_t qk_width = 0;
    float factor = 1;    // softplus
    Weight a_log = kNo;  // softplus
    Value decay = kNo;   // softplus: with a_log
  };
  Value x, gate = kNo;
  Weight norm = kNo;
  float eps = 0;
  std::vector<Part> parts;
};

struct FusedMixer {
  MixerOp mixer;               // its v is what enters after v ⊙ dt, its y what leaves before + D ⊙ v
  Value q, k, v;               // before rotation and discretization
  std::optional<RopeOp> rope;  // of q and of k; the values in it are those of q
  Value dt = kNo;              // v ⊙ dt
  Weight d = kNo;              // + D ⊙ v
  Value y;                     // the result
};

struct TokenOp {
  std::variant<FusedLinear, FusedMixer, Op> op;
  std::vector<int> covers;  // indices of Plan::ops, in order
};

// The values of the parts of a SplitOp lie in the value that is split: `split` of one is where.
struct TokenPlan {
  Plan plan;
  std::vector<TokenOp> ops;
};

TokenPlan plan_tokens(const Plan& plan);

}  // namespace furious
