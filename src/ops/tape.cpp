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
  if (node_->whole) place_in_whole();
  const bool holds_sum = node_->gradient.defined();
  if (!holds_sum) node_->gradient = node_->gradient_place ? node_->gradient_place : Tensor::empty_like(node_->value);
  return {node_->gradient, holds_sum};
}

Tensor Variable::new_gradient() const {
  if (node_->source) return Variable(node_->source).new_gradient();
  if (node_->gradient_place && !node_->gradient) return node_->gradient_place;
  if (!node_->whole || node_->place_taken || node_->gradient) return Tensor::empty_like(node_->value);
  node_->place_taken = true;
  return place_in_whole();
}

// The first part that asks makes the gradient of the whole; by that the tape knows that there is something to gather.
Tensor Variable::place_in_whole() const {
  Node& whole = *node_->whole;
  if (!whole.gradient) whole.gradient = Variable(node_->whole).new_gradient();
  return node_->part(whole.gradient);
}

void Variable::settle_in_whole() const {
  const Tensor place = place_in_whole();
  if (!node_->gradient)
    fill(place, 0.0f);
  else if (node_->gradient.raw() != place.raw())
    copy(place, node_->gradient);
  clear_gradient();
}

void Variable::add_gradient(const Tensor& contribution) const {
  if (!needs_gradient()) return;
  if (node_->whole) place_in_whole();
  require(contribution.shape() == node_->value.shape(), "tape: a gradient of shape {} for a variable of shape {}",
          to_string(contribution.shape()), to_string(node_->value.shape()));
  if (node_->gradient) return add_into(node_->gradient, contribution);
  if (node_->gradient_place && contribution.raw() != node_->gradient_place.raw())
    copy(node_->gradient_place, contribution);
  node_->gradient = node_->gradient_place ? node_->gradient_place : contribution;
}

void Variable::settle(Tensor value, Tensor gradient, std::function<void()> complete) const {
  require(value.shape() == node_->value.shape() && gradient.shape() == node_->value.shape(),
          "tape: a variable of shape {} cannot settle at {} and {}", to_string(node_->value.shape()),
          to_string(value.shape()), to_string(gradient.shape()));
  node_->value = std::move(value);
  node_->gradient_place = std::move(gradient);
  node_->complete = std::move(complete);
}

Tape::Label::Label(Tape& tape, const WorkLabel& label)
    : tape_(tape), before_(tape.label_), scope_(tape.profiler_, label, tape.forward_) {
  if (tape.profiler_ != nullptr) tape.label_ = label;  // Tape::off() is shared by threads and has none
}

Tape::Label::~Label() {
  if (tape_.profiler_ != nullptr) tape_.label_ = before_;
}

std::vector<Variable> Tape::settled_of(const std::vector<Variable>& inputs) {
  std::vector<Variable> settled;
  for (const Variable& input : inputs) {
    if (!input || !input.node_->complete) continue;
    ++input.node_->uses;
    settled.push_back(input);
  }
  return settled;
}

Variable Tape::record(Tensor result, const std::vector<Variable>& inputs, Backward backward) {
  const bool needed =
      recording_ && std::any_of(inputs.begin(), inputs.end(), [](const Variable& v) { return v.needs_gradient(); });
  Variable variable(std::move(result), needed);
  if (needed) entries_.push_back({variable, std::move(backward), settled_of(inputs), label_});
  return variable;
}

std::vector<Variable> Tape::parts(const Variable& x, const std::vector<Part>& functions) {
  const Variable whole(x.value(), recording_ && x.needs_gradient());
  whole.node_->source = x.node_;
  std::vector<Variable> parts;
  int64_t covered = 0;
  for (const Part& function : functions) {
    const Variable& part = parts.emplace_back(function(x.value()), whole.needs_gradient());
    covered += part.value().elements();
    if (!part.needs_gradient()) continue;
    part.node_->whole = whole.node_;
    part.node_->part = function;
  }
  require(covered == x.value().elements(), "tape: parts of {} elements for a variable of {}", covered,
          x.value().elements());
  if (whole.needs_gradient()) {
    entries_.push_back({whole,
                        [x, parts](const Tensor& gradient) {
                          for (const Variable& part : parts) part.settle_in_whole();
                          x.add_gradient(gradient);
                        },
                        settled_of({x}), label_});
  }
  return parts;
}

void Tape::backward(const Variable& result) {
  require(result.value().elements() == 1, "tape: backward without a gradient needs a single number, got shape {}",
          to_string(result.value().shape()));
  Tensor one = Tensor::empty_like(result.value());
  fill(one, 1.0f);
  result.add_gradient(one);
  run_backward();
}

void Tape::backward(const Variable& result, const Tensor& gradient) {
  result.add_gradient(to_dtype(gradient, gradient.dtype()));
  run_backward();
}

void Tape::run_backward() {
  while (!entries_.empty()) {
    const Entry entry = std::move(entries_.back());
    entries_.pop_back();
    if (entry.result.gradient()) {
      const Profiler::Scope scope(profiler_, entry.label, StepPass::backward);
      entry.backward(entry.result.gradient());
      // Nothing reads the gradient of an intermediate result again; its memory serves the next one.
      entry.result.clear_gradient();
    }
    for (const Variable& input : entry.settled)
      if (--input.node_->uses == 0) input.node_->complete();
  }
}

Variable recomputed(Tape& tape, const Variable& x, const std::function<Variable(Tape&, const Variable&)>& f) {
  if (!tape.recording()) return f(tape, x);
  Tape silent = tape.without_recording();
  return tape.record(f(silent, x).value(), {x}, [x, f, profiler = tape.profiler()](const Tensor& gradient) {
    Tape inner(profiler, StepPass::backward);
    const Variable input(x.value(), true);
    inner.backward(f(inner, input), gradient);
    if (input.gradient()) x.add_gradient(input.gradient());
  });
}

Tape Tape::without_recording() const {
  Tape silent(profiler_, forward_);
  silent.recording_ = false;
  return silent;
}

Tape& Tape::off() {
  static Tape tape = Tape().without_recording();
  return tape;
}

}  // namespace furious
