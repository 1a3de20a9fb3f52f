#include "model/run_plan.h"

#include <optional>

#include "ops/elementwise.h"
#include "ops/nn/conv.h"
#include "ops/nn/layer_norm.h"
#include "ops/nn/linear.h"
#include "ops/nn/rms_norm.h"
#include "ops/nn/swiglu.h"
#include "ops/views.h"

namespace furious {

Compute compute_in(DType dtype, Device device) {
  Compute compute;
  compute.precision = dtype == DType::bf16 ? MatmulPrecision::bf16 : MatmulPrecision::f32;
  if (!device.is_cpu()) compute.activations = dtype;
  return compute;
}

Variable WholeSequences::conv(Tape& tape, const ConvOp& op, const Variable& x, const Variable& weight,
                              const Variable& bias) {
  return furious::conv(tape, x, weight, bias, op.activation, boundaries_);
}

Variable WholeSequences::rope(Tape& tape, const RopeOp& op, const Variable& x) {
  return furious::rope(tape, x, op.rope(), boundaries_);
}

Variable WholeSequences::mixer(Tape& tape, const MixerOp& op, const Variable& q, const Variable& k, const Variable& v,
                               const Variable& log_decay) {
  return furious::mixer(tape, op.spec, q, k, v, log_decay, boundaries_, {.precision = compute_.mixer});
}

namespace {

// [batch, length, heads, dim] as [batch, length, heads · dim]; values without heads are that already.
Variable flat(Tape& tape, const Variable& x) {
  const Shape& shape = x.value().shape();
  return x.value().rank() == 3 ? x : reshape(tape, x, {shape[0], shape[1], shape[2] * shape[3]});
}

// Products that read one input, as one on a GPU.
std::vector<Variable> joined(Tape& tape, const Variable& x, std::vector<Variable> weights, MatmulPrecision precision) {
  const size_t count = weights.size();
  std::vector<int64_t> sizes;
  int64_t width = 0;
  for (const Variable& weight : weights) {
    sizes.push_back(weight.value().size(0));
    width += sizes.back();
  }
  // On a GPU, matrix products and mixers are slow where rows do not begin at a multiple of 16 bytes.
  const int64_t aligned = precision == MatmulPrecision::fp8 ? 16 : 8;
  if (width % aligned != 0 && !x.value().device().is_cpu() && x.value().dtype() == DType::bf16) {
    const Tensor& first = weights.front().value();
    sizes.push_back(aligned - width % aligned);
    weights.emplace_back(Tensor::zeros({sizes.back(), first.size(1)}, first.dtype(), first.device()));
  }
  std::vector<Variable> parts = split(tape, joined_linear(tape, x, weights, precision), sizes);
  parts.resize(count);
  return parts;
}

}  // namespace

struct PlanRunner::Visitor {
  const PlanRunner& runner;
  std::vector<Variable>& values;

  Tape& tape() const { return runner.tape_; }
  Variable value(Value v) const { return v == kNo ? Variable() : values[v]; }
  Variable weight(Weight w) const { return w == kNo ? Variable() : runner.weights_[w]; }

  void operator()(const RmsNormOp& op) const {
    const bool per_head = runner.plan_.values[op.y].heads > 0;
    const auto grouped = [&](const Variable& x) {  // as the heads of y
      const ValueInfo& y = runner.plan_.values[op.y];
      const Shape& shape = x.value().shape();
      return !x || (shape.rank() == 4 && shape[2] == y.heads)
                 ? x
                 : reshape(tape(), x, {shape[0], shape[1], y.heads, y.dim});
    };
    const Variable x = per_head ? grouped(value(op.x)) : flat(tape(), value(op.x));
    const Variable gate = per_head ? grouped(value(op.gate)) : value(op.gate);
    values[op.y] = rms_norm(tape(), x, weight(op.weight), op.eps, gate);
  }
  void operator()(const LayerNormOp& op) const {
    values[op.y] = layer_norm(tape(), value(op.x), weight(op.weight), weight(op.bias), op.eps);
  }
  void operator()(const LinearOp& op) const {
    const MatmulPrecision precision = runner.compute_.precision;
    const Variable x = flat(tape(), value(op.x));
    if (op.weights.size() == 1) {
      values[op.y[0]] = linear(tape(), x, weight(op.weights[0]), weight(op.bias), precision, value(op.residual));
      return;
    }
    std::vector<Variable> weights;
    for (const Weight w : op.weights) weights.push_back(weight(w));
    const std::vector<Variable> parts = joined(tape(), x, std::move(weights), precision);
    for (size_t i = 0; i < parts.size(); ++i) values[op.y[i]] = parts[i];
  }
  void operator()(const ConvOp& op) const {
    values[op.y] = runner.sequence_ops_.conv(tape(), op, value(op.x), weight(op.weight), weight(op.bias));
  }
  void operator()(const SplitOp& op) const {
    std::vector<Heads> heads;
    for (const Value part : op.parts) heads.push_back({runner.plan_.values[part].heads, runner.plan_.values[part].dim});
    const std::vector<Variable> parts = split_heads(tape(), value(op.x), heads);
    for (size_t i = 0; i < parts.size(); ++i) values[op.parts[i]] = parts[i];
  }
  void operator()(const ActivationOp& op) const { values[op.y] = activation(tape(), value(op.x), op.f); }
  void operator()(const RopeOp& op) const { values[op.y] = runner.sequence_ops_.rope(tape(), op, value(op.x)); }
  void operator()(const HeadFunctionOp& op) const {
    values[op.y] = head_function(tape(), value(op.x), weight(op.bias), op.function);
  }
  void operator()(const OriginalDecayOp& op) const {
    values[op.y] = original_decay(tape(), value(op.dt), weight(op.a_log), op.factor);
  }
  void operator()(const DiscretizeOp& op) const {
    const Variable dt = value(op.dt);
    if (runner.plan_.values[op.y].heads > 0) {
      values[op.y] = discretize(tape(), value(op.x), dt);
      return;
    }
    const Variable x = flat(tape(), value(op.x));
    const Shape shape = x.value().shape();
    const Variable heads = reshape(tape(), x, {shape[0], shape[1], shape[2], 1});  // heads of one number
    values[op.y] = reshape(tape(), discretize(tape(), heads, dt), shape);
  }
  void operator()(const MixerOp& op) const {
    values[op.y] = runner.sequence_ops_.mixer(tape(), op, value(op.q), value(op.k), value(op.v), value(op.log_decay));
  }
  void operator()(const ResidualOp& op) const {
    values[op.y] = d_residual(tape(), value(op.o), value(op.v), weight(op.d));
  }
  void operator()(const SwigluOp& op) const {
    values[op.y] = swiglu(tape(), flat(tape(), value(op.gate)), flat(tape(), value(op.up)));
  }
  void operator()(const AddOp& op) const {
    values[op.y] = add(tape(), flat(tape(), value(op.a)), flat(tape(), value(op.b)));
  }
  void operator()(const ConcatOp& op) const {
    values[op.y] = concat(tape(), flat(tape(), value(op.a)), flat(tape(), value(op.b)));
  }
};

void PlanRunner::run(const Op& op, std::vector<Variable>& values) const {
  std::optional<Tape::Label> label;
  if (tape_.profiler() != nullptr) label.emplace(tape_, label_of(plan_, op));
  std::visit(Visitor{*this, values}, op);
}

Variable PlanRunner::run(const Variable& x, const Observer& observe) const {
  std::vector<Variable> values(plan_.values.size());
  values[plan_.input] = x;
  for (size_t i = 0; i < plan_.ops.size(); ++i) {
    run(plan_.ops[i], values);
    if (observe)
      for (const Value written : outputs_of(plan_.ops[i])) observe(written, values[written]);
    for (const Value done : plan_.last_read[i]) values[done] = {};
  }
  return values[plan_.output];
}

}  // namespace furious
