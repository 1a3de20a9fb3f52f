// What makes model code forward-only: an operation that runs on a tape leaves behind the one closure that undoes it.
//
//   Variable y = rms_norm(tape, x, weight, eps);    computes y; records how dx and dweight follow from dy
//   tape.backward(loss);                            runs the closures last to first, each once, freeing as it goes
//
// A Variable is a tensor with a place for its gradient. Gradients add up: a variable that is used twice, and a
// parameter over several passes, receive the sum.
//
// Tape::parts makes views of a variable, such as queries, keys and values out of one fused projection. Their gradients
// meet in one tensor: new_gradient() of a part is its place there, so an operation that writes its gradient into
// new_gradient() fills the fused gradient without a copy.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tensor/profiler.h"
#include "tensor/tensor.h"

namespace furious {

// Where an operation that can add as it computes puts a gradient, without a temporary.
struct GradientTarget {
  Tensor tensor;
  bool holds_sum = false;  // add to what is there; otherwise nothing is there yet and it is to be overwritten
};

class Variable {
 public:
  Variable() = default;  // undefined: an optional argument that was not given
  explicit Variable(Tensor value, bool needs_gradient = false);

  explicit operator bool() const { return node_ != nullptr; }
  const Tensor& value() const;  // undefined if the variable is
  bool needs_gradient() const { return node_ && node_->needs_gradient; }

  // The gradient gathered so far; undefined if none has arrived.
  const Tensor& gradient() const { return node_->gradient; }
  // Memory of the value's shape for one contribution: write all of it, then hand it to add_gradient. That of a part may
  // be strided, with the innermost stride of its value.
  Tensor new_gradient() const;
  // Adds to the gradient. The first contribution is taken over, not copied: the caller gives it away. Unless it comes
  // from new_gradient, it must be contiguous and share its memory with no other tensor.
  void add_gradient(const Tensor& contribution) const;
  // The gradient itself, made if none has arrived: the caller must add its whole contribution to it. Only for a
  // variable that needs a gradient.
  GradientTarget gradient_target() const;
  void clear_gradient() const {
    node_->gradient = {};
    node_->uses = 0;
  }

  // For a variable that outlives tapes, a parameter: from now on its value lies at `value`, which holds the same
  // numbers, and its gradient arrives at `gradient`; `complete` is called when a backward pass has added the last
  // contribution to it.
  void settle(Tensor value, Tensor gradient, std::function<void()> complete) const;

  bool same_as(const Variable& other) const { return node_ == other.node_; }

 private:
  friend class Tape;

  struct Node {
    Tensor value;
    Tensor gradient;
    bool needs_gradient = false;
    // Of a part: the variable whose gradient holds that of all parts, which part this is, and whether its place there
    // has been given out.
    std::shared_ptr<Node> whole;
    std::function<Tensor(const Tensor&)> part;
    bool place_taken = false;
    // Of such a whole: the variable it stands for, which may itself be a part and have a place to offer.
    std::shared_ptr<Node> source;
    // Of a variable that has settled: where its gradient belongs, the recorded operations that have yet to add to it,
    // and who is told when none is left.
    Tensor gradient_place;
    int64_t uses = 0;
    std::function<void()> complete;
  };

  explicit Variable(std::shared_ptr<Node> node) : node_(std::move(node)) {}
  Tensor place_in_whole() const;
  void settle_in_whole() const;

  std::shared_ptr<Node> node_;
};

class Tape {
 public:
  // With a profiler, which must outlive the tape, labelled operations are timed, and so are their backward passes. The
  // forward pass of a tape that runs inside a backward pass counts as that.
  explicit Tape(Profiler* profiler = nullptr, StepPass forward = StepPass::forward)
      : profiler_(profiler), forward_(forward) {}

  // During its lifetime, operations on the tape have this label. No effect without a profiler.
  class Label {
   public:
    Label(Tape& tape, const WorkLabel& label);
    ~Label();
    Label(const Label&) = delete;
    Label& operator=(const Label&) = delete;

   private:
    Tape& tape_;
    WorkLabel before_;
    Profiler::Scope scope_;
  };

  // Records `backward` for an operation with this result if any of its inputs needs a gradient; returns the result as a
  // variable. `backward` is called with the gradient of the result, and never called if none arrives.
  using Backward = std::function<void(const Tensor& gradient)>;
  Variable record(Tensor result, const std::vector<Variable>& inputs, Backward backward);

  // Views of a variable, one per function, that together cover each element once. A function is applied to the value
  // and, later, to the gradient: it must only slice, select, split or view. A part that receives no gradient has zero.
  using Part = std::function<Tensor(const Tensor&)>;
  std::vector<Variable> parts(const Variable& x, const std::vector<Part>& functions);

  // From a result that is a single number (gradient 1), or from any result with its gradient, which stays as it is.
  void backward(const Variable& result);
  void backward(const Variable& result, const Tensor& gradient);

  // A tape that does not record, for evaluation and generation.
  static Tape& off();
  Tape without_recording() const;  // but with the profiler
  bool recording() const { return recording_; }
  Profiler* profiler() const { return profiler_; }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Variable result;
    Backward backward;
    std::vector<Variable> settled;  // of the inputs
    WorkLabel label;
  };
  static std::vector<Variable> settled_of(const std::vector<Variable>& inputs);
  void run_backward();

  std::vector<Entry> entries_;
  bool recording_ = true;
  Profiler* profiler_ = nullptr;
  StepPass forward_ = StepPass::forward;
  WorkLabel label_;
};

// f(tape, x) without keeping what lies between x and the result: the backward pass runs f once more. `f` must give the
// same result each time; the variables it captures receive their gradients as always.
Variable recomputed(Tape& tape, const Variable& x, const std::function<Variable(Tape&, const Variable&)>& f);

}  // namespace furious
