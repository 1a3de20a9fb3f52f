// One token of every sequence through a whole model as one persistent kernel (Hopper and later). A kernel for each
// operation would spend most of its time waiting: for the previous kernel to end, and for the first of its weights.
//
// The program is made from the plan of a layer (decode/token_plan.h). It stays valid from token to token, at any length
// of the sequences and across folds: everything that changes is read from the caches' records of their slots. It must
// be made anew when a weight, a convolution's state, or a cache's table of records moves to another address.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "decode/token_plan.h"
#include "ops/mixer/recurrent.h"
#include "ops/slots.h"
#include "tensor/tensor.h"

namespace furious {

// Matrices are bf16, everything else is f32; all are contiguous and on one device.
struct TokenProgramInputs {
  const TokenPlan* plan = nullptr;           // of every layer; read while the program is made
  std::vector<std::vector<Tensor>> weights;  // [layer][Weight]
  Tensor embedding;                          // f32 [vocabulary, hidden]
  Tensor norm;                               // before the output matrix
  float norm_eps = 0;
  Tensor head;               // the output matrix [vocabulary, hidden]
  std::vector<Tensor> conv;  // [layer]: state [slots, window − 1, channels]; undefined without convolution
  std::vector<const MixerCache*> mixers;  // [layer]: of bf16 keys and values, with these slots
  // Row i of the batch is slot rows.table[i]. The table's numbers may change between tokens, its address may not.
  SlotRows rows;
};

class TokenProgram {
 public:
  static constexpr int64_t kMostRows = 8;

  // Why the kernel cannot run this operation of the plan for so many rows on this device, as a phrase; empty: it can.
  // Without an operation: whether it can run at all, which is that its blocks, which wait for each other, all fit on
  // the device at once.
  static std::string missing(Device device, const TokenPlan& plan, const TokenOp& op, int64_t rows);
  static std::string missing(Device device, int64_t rows);
  // The first reason of any operation of the plan; empty: the kernel runs all of it.
  static std::string missing(Device device, const TokenPlan& plan, int64_t rows);
  // Blocks of the kernel that run at once when each uses so many bytes of dynamic shared memory.
  static int resident_blocks(Device device, int shared_bytes);

  // For a plan of which nothing is missing.
  TokenProgram(Device device, const TokenProgramInputs& inputs);
  ~TokenProgram();
  TokenProgram(const TokenProgram&) = delete;
  TokenProgram& operator=(const TokenProgram&) = delete;

  // Reads one token of every row, ids i32 [rows, 1] on the device, in the order of the device's other work.
  // MixerCache::prepare() of every cache comes before, and its advance() after.
  // False, with nothing done, where the blocks do not all fit on the device at once: another process may hold part of
  // it.
  bool run(const Tensor& ids) const;
  // f32 [rows, vocabulary], written by every run(). Whoever holds them holds the program's memory, not the program.
  const Tensor& logits() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace furious
