#include "ops/tape.h"

#include <algorithm>

#include "base/error.h"
#include "ops/elementwise.h"

namespace furious {

Variable::Variable(Tensor value, bool needs_gradient) : node_(std::make_shared<Node>()) {
  node_->value = std::move(value);
  node_->needs_gradient = needs_gradient;
}

const Tensor& Variable::value() const {
  static const Tensor kNotThere;
  return node_ ? node_->value : kNotThere;
}

GradientTarget Variable::gradient_target() const {
  require(needs_gradient(), "tape: a gradient for a variable that needs none");
  const bool holds_sum = node_->gradient.defined();
  if (!holds_sum) node_->gradient = Tensor::empty(node_->value.shape(), DType::f32, node_->value.device());
  return {node_->gradient, holds_sum};
}

void Variable::add_gradient(const Tensor& contribution) const {
  if (!needs_gradient()) return;
  require(contribution.shape() == node_->value.shape(), "tape: a gradient of shape {} for a variable of shape {}",
          to_string(contribution.shape()), to_string(node_->value.shape()));
  if (node_->gradient)
    add_into(node_->gradient, contribution);
  else
    node_->gradient = contribution;
}

Variable Tape::record(Tensor result, std::initializer_list<Variable> inputs, Backward backward) {
  const bool needed =
      recording_ && std::any_of(inputs.begin(), inputs.end(), [](const Variable& v) { return v.needs_gradient(); });
  Variable variable(std::move(result), needed);
  if (needed) entries_.push_back({variable, std::move(backward)});
  return variable;
}

void Tape::backward(const Variable& result) {
  require(result.value().elements() == 1, "tape: backward without a gradient needs a single number, got shape {}",
          to_string(result.value().shape()));
  Tensor one = Tensor::empty_like(result.value());
  fill(one, 1.0f);
  backward(result, one);
}

void Tape::backward(const Variable& result, const Tensor& gradient) {
  result.add_gradient(gradient);
  while (!entries_.empty()) {
    const Entry entry = std::move(entries_.back());
    entries_.pop_back();
    if (!entry.result.gradient()) continue;
    entry.backward(entry.result.gradient());
    // Nothing reads the gradient of an intermediate result again; its memory serves the next one.
    entry.result.clear_gradient();
  }
}

Tape& Tape::off() {
  static Tape tape = [] {
    Tape silent;
    silent.recording_ = false;
    return silent;
  }();
  return tape;
}

}  // namespace furious
