// Runs the plan of a layer, operation by operation, on a tape.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "model/plan.h"
#include "ops/matmul.h"
#include "ops/tape.h"

namespace furious {

// How a model computes; what it computes stays the same but for rounding.
struct Compute {
  MatmulPrecision precision = MatmulPrecision::f32;
  bool recompute = false;  // keep only the input of each layer for the backward pass, and run the layer again there
  DType activations = DType::f32;                    // bf16 only on a GPU
  MixerPrecision mixer = MixerPrecision::automatic;  // of the products inside the mixer, in training and prefill
  bool token_program = true;                         // decode with the persistent kernel where it runs the model
};
// Products in f32 or bf16; on a GPU activations too.
Compute compute_in(DType dtype, Device device);

// The operations that look at other tokens than their own.
class SequenceOps {
 public:
  virtual ~SequenceOps() = default;
  virtual Variable conv(Tape& tape, const ConvOp& op, const Variable& x, const Variable& weight,
                        const Variable& bias) = 0;
  virtual Variable rope(Tape& tape, const RopeOp& op, const Variable& x) = 0;
  virtual Variable mixer(Tape& tape, const MixerOp& op, const Variable& q, const Variable& k, const Variable& v,
                         const Variable& log_decay) = 0;
};

// Rows that are whole sequences, or documents packed by boundaries (ops/boundaries.h): training and evaluation.
class WholeSequences : public SequenceOps {
 public:
  WholeSequences(Tensor boundaries, const Compute& compute) : boundaries_(std::move(boundaries)), compute_(compute) {}

  Variable conv(Tape& tape, const ConvOp& op, const Variable& x, const Variable& weight, const Variable& bias) override;
  Variable rope(Tape& tape, const RopeOp& op, const Variable& x) override;
  Variable mixer(Tape& tape, const MixerOp& op, const Variable& q, const Variable& k, const Variable& v,
                 const Variable& log_decay) override;

 private:
  Tensor boundaries_;
  const Compute& compute_;
};

class PlanRunner {
 public:
  // `weights` are those of the plan. All must outlive the runner.
  PlanRunner(const Plan& plan, std::span<const Variable> weights, const Compute& compute, Tape& tape,
             SequenceOps& sequence_ops)
      : plan_(plan), weights_(weights), compute_(compute), tape_(tape), sequence_ops_(sequence_ops) {}

  // Called with each value as it is written.
  using Observer = std::function<void(Value value, const Variable& written)>;
  Variable run(const Variable& x, const Observer& observe = {}) const;  // all operations
  // One of them: reads and writes `values`, which has one entry for each value of the plan.
  void run(const Op& op, std::vector<Variable>& values) const;

 private:
  struct Visitor;

  const Plan& plan_;
  std::span<const Variable> weights_;
  const Compute& compute_;
  Tape& tape_;
  SequenceOps& sequence_ops_;
};

}  // namespace furious
