// One token of every sequence through a whole model as one kernel (Hopper and later), where a kernel for each operation
// would wait most of the time: for the one before it to end, and for the first of its weights.
//
// The program is made once, from work that calls embedding_forward, the functions of ops/token_linear.h and
// MixerCache::step: on this device they then run nothing, but each becomes an operation of the program. Like a graph
// (tensor/graph.h) it keeps the memory that the work takes, and what it reads and writes besides must stay where it
// was, but for the ids of the tokens.
#pragma once

#include <functional>
#include <memory>

#include "tensor/tensor.h"

namespace furious {

class TokenProgram {
 public:
  // bf16 activations and weights; every mixer cache has folded.
  struct Sizes {
    int64_t batch = 0, heads = 0, head_dim = 0;
    int64_t widest = 0;       // input of a linear layer
    int64_t widest_pair = 0;  // of a gated pair
  };
  // Whether the kernel can do it: its blocks wait for each other, so the device must be able to run all of them at
  // once.
  static bool fits(Device device, const Sizes& sizes);
  // Blocks of the kernel that run at once when each takes so many bytes of dynamic shared memory.
  static int resident_blocks(Device device, int shared_bytes);

  TokenProgram(Device device, const std::function<void()>& work);
  ~TokenProgram();
  TokenProgram(const TokenProgram&) = delete;
  TokenProgram& operator=(const TokenProgram&) = delete;

  // In the order of the device's other work. The ids, [batch, 1], are read in place of those that the work had.
  void run(const Tensor& ids) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace furious
