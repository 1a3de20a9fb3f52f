// What makes model code forward-only: an operation that runs on a tape leaves behind the one closure that undoes it.
//
//   Variable y = rms_norm(tape, x, weight, eps);    computes y; records how dx and dweight follow from dy
//   tape.backward(loss);                            runs the closures last to first, each once, freeing as it goes
//
// A Variable is a tensor with a place for its gradient. Gradients add up: a variable that is used twice, and a
// parameter over several passes, receive the sum.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tensor/tensor.h"

namespace furious {

// Where an operation that can add as it computes puts a gradient, without a temporary.
struct GradientTarget {
  Tensor tensor;
  bool holds_sum = false;  // add to what is there; otherwise nothing is there yet and it is to be overwritten
};

class Variable {
 public:
  Variable() = default;  // not there: an optional argument that was not given
  explicit Variable(Tensor value, bool needs_gradient = false);

  explicit operator bool() const { return node_ != nullptr; }
  const Tensor& value() const;  // not there if the variable is not
  bool needs_gradient() const { return node_ && node_->needs_gradient; }

  // The gradient gathered so far; not there if none has arrived.
  const Tensor& gradient() const { return node_->gradient; }
  // Adds to the gradient. The first contribution is taken over, not copied: the caller gives it away. One that arrives
  // strided, or that shares its memory with another tensor, must be a contiguous copy of its own.
  void add_gradient(const Tensor& contribution) const;
  // The gradient itself, made if none has arrived: the caller must add its whole contribution to it. Only for a
  // variable that needs a gradient.
  GradientTarget gradient_target() const;
  void clear_gradient() const { node_->gradient = {}; }

  bool same_as(const Variable& other) const { return node_ == other.node_; }

 private:
  struct Node {
    Tensor value;
    Tensor gradient;
    bool needs_gradient = false;
  };
  std::shared_ptr<Node> node_;
};

class Tape {
 public:
  // Records `backward` for an operation with this result if any of its inputs needs a gradient; returns the result as a
  // variable. `backward` is called with the gradient of the result, and never called if none arrives.
  using Backward = std::function<void(const Tensor& gradient)>;
  Variable record(Tensor result, std::initializer_list<Variable> inputs, Backward backward);

  // From a result that is a single number (gradient 1), or from any result with its gradient.
  void backward(const Variable& result);
  void backward(const Variable& result, const Tensor& gradient);

  // A tape that does not record, for evaluation and generation.
  static Tape& off();
  bool recording() const { return recording_; }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Variable result;
    Backward backward;
  };
  std::vector<Entry> entries_;
  bool recording_ = true;
};

}  // namespace furious
