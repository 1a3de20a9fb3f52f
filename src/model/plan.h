// A decoder layer as data: a list of typed operations with named values and weights, made from the configuration in
// one place. Training and prefill (model/language_model.cpp), decoding (decode/decoder.cpp) and the persistent decode
// kernel (decode/token_program.h) all run this list; nothing else knows which switches a block has.
//
// A value is a row of numbers for every token, [batch, length, dim] or [batch, length, heads, dim].
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "model/config.h"
#include "ops/nn/decay.h"
#include "ops/nn/rope.h"
#include "tensor/profiler.h"

namespace furious {

using Value = int;              // an index into Plan::values
using Weight = int;             // an index into Plan::weights
inline constexpr int kNo = -1;  // an optional value or weight that an operation does not have

struct ValueInfo {
  std::string name;
  int64_t heads = 0;  // 0: the value has no heads
  int64_t dim = 0;

  int64_t width() const { return heads > 0 ? heads * dim : dim; }
};

// How new weights of a layer are drawn (Initialization in language_model.h has the numbers).
enum class Start : uint8_t { ones, zeros, linear, bias, taps, dt_bias, a_log };

struct WeightInfo {
  std::string name;  // behind "model.layers.N."
  Shape shape;
  Start start = Start::linear;
  int64_t fan_in = 0;  // of a bias: the numbers that its layer reads
  // Of a linear layer: it is multiplied, and may be kept in bf16.
  bool is_matrix() const { return start == Start::linear; }
};

// y = RMSNorm(x ⊙ silu(gate)) ⊙ weight, over the weight's length: all numbers of a token, or those of a head. A weight
// [groups, n] has a row for each group of y.
struct RmsNormOp {
  Value x, y, gate = kNo;
  Weight weight;
  float eps;
};

struct LayerNormOp {
  Value x, y;
  Weight weight, bias;
  float eps;
};

// y[i] = x W[i]ᵀ (+ bias), products that read one input. With a residual, y[0] = x W[0]ᵀ + residual.
struct LinearOp {
  Value x;
  std::vector<Weight> weights;
  std::vector<Value> y;
  Weight bias = kNo;
  Value residual = kNo;
};

// The causal convolution.
struct ConvOp {
  Value x, y;
  Weight weight, bias;
  int64_t window;
  Activation activation;
};

// The parts of x, side by side, as heads.
struct SplitOp {
  Value x;
  std::vector<Value> parts;
};

struct ActivationOp {
  Value x, y;
  Activation f;
};

// Rotary positions.
struct RopeOp {
  Value x, y;
  RopePairing pairing;
  double base;
  RopeScaling scaling = {};

  Rope rope(int64_t offset = 0) const { return {pairing, base, offset, {}, {}, scaling}; }
};

// Per token and head: y = function(x + bias), in f32.
struct HeadFunctionOp {
  Value x, y;
  Weight bias;
  HeadFunction function;
};

// a = −factor · exp(A_log) · dt
struct OriginalDecayOp {
  Value dt, y;
  Weight a_log;
  float factor;
};

// y = x ⊙ dt, for each head of x. A y without heads has a dt for each number.
struct DiscretizeOp {
  Value x, dt, y;
};

struct MixerOp {
  Value q, k, v, log_decay, y;
  MixerSpec spec;
};

// y = o + D ⊙ v
struct ResidualOp {
  Value o, v, y;
  Weight d;
};

// y = silu(gate) ⊙ up
struct SwigluOp {
  Value gate, up, y;
};

// y = a + b
struct AddOp {
  Value a, b, y;
};

// y = [a, b]
struct ConcatOp {
  Value a, b, y;
};

using Op = std::variant<RmsNormOp, LinearOp, ConvOp, SplitOp, ActivationOp, RopeOp, HeadFunctionOp, OriginalDecayOp,
                        DiscretizeOp, MixerOp, ResidualOp, SwigluOp, ConcatOp, LayerNormOp, AddOp>;

struct Plan {
  std::vector<ValueInfo> values;
  std::vector<WeightInfo> weights;
  std::vector<Op> ops;                        // each reads only what those before it have written
  std::vector<std::vector<Value>> last_read;  // of each operation: the values that none after it reads
  Value input = kNo, output = kNo;
  Value mixed = kNo;         // after the token mixing and its residual, before the MLP
  Value mixer_values = kNo;  // what enters the mixer as v

  Weight weight(std::string_view name) const;  // kNo where the layer has none of that name
};

// The values that an operation reads (without kNo), those that it writes, and its weights.
std::vector<Value> inputs_of(const Op& op);
std::vector<Value> outputs_of(const Op& op);
std::vector<Weight> weights_of(const Op& op);
std::string_view name_of(const Op& op);
WorkLabel label_of(const Plan& plan, const Op& op);  // for a profiler

// What surrounds the layers.
inline constexpr WorkLabel kEmbeddingWork{"embedding", "embedding"}, kNormWork{"norm", "rms_norm"},
    kLossWork{"loss", "cross_entropy"}, kOptimizerWork{"optimizer", "adamw"};

// The plan of every layer of such a model. A configuration that cannot work is an error.
Plan plan_layer(const ModelConfig& config);

int64_t parameter_count(const ModelConfig& config);

}  // namespace furious
