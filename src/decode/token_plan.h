// The plan of a layer for one token of every sequence: operations that one kernel computes are joined.
//
//   FusedLinear   h = RMSNorm(x ⊙ silu(gate)) or x ⊙ silu(gate) or x, the products that read h, and what follows each:
//                 convolution, activation, time step and decay, gated pair, or the sum with the residual
//   FusedMixer    the mixer's step with what surrounds it: rotary positions of q and k, v ⊙ dt before, + D ⊙ v after
//
// What fits neither stays as it is. A joined operation knows the operations of the plan that it stands for: where a
// backend has no kernel for it, those run instead.
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
    Weight conv_weight = kNo;                     // value
    Activation activation = Activation::none;     // value
    Activation qk_activation = Activation::none;  // value: a second one, of the first qk_width numbers
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
  // Where a value lies when all joined operations run as such: parts of a SplitOp, and what an activation that was
  // joined with its product makes of them, are columns of another value.
  struct Place {
    Value value = kNo;
    int64_t column = 0;
  };
  std::vector<Place> places;
};

TokenPlan plan_tokens(const Plan& plan);

}  // namespace furious
