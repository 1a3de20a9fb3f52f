// Views as tape operations. None copies a value, and none copies a gradient that was written into new_gradient().
#pragma once

#include <vector>

#include "ops/tape.h"

namespace furious {

// The pieces of x along its last dimension, whose size is the sum of `sizes`.
std::vector<Variable> split(Tape& tape, const Variable& x, const std::vector<int64_t>& sizes);

// The same, each piece [..., count * dim] seen as heads [..., count, dim].
struct Heads {
  int64_t count = 0;
  int64_t dim = 0;
};
std::vector<Variable> split_heads(Tape& tape, const Variable& x, const std::vector<Heads>& pieces);

// The same elements in another shape; x is contiguous.
Variable reshape(Tape& tape, const Variable& x, const Shape& shape);

}  // namespace furious
