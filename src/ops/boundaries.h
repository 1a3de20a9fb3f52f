// Packed documents: several short documents share one row of a batch, and nothing may pass from one to the next.
//
// `boundaries` is an i32 tensor [count] on the CPU, of strictly increasing positions in the flattened [batch * length]
// token sequence at which a new document starts. A row always starts one; its position may be listed or not. A tensor
// that is not there, or an empty one, means one document per row.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace furious {

// Tokens [begin, end) of row `batch`: one document, or the part of it that lies in this row.
struct Segment {
  int64_t batch = 0;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t length() const { return end - begin; }
  bool operator==(const Segment&) const = default;
};

// The segments of every row, in order; together they cover each token once. Errors name `operation`.
std::vector<Segment> segments_of(std::string_view operation, const Tensor& boundaries, int64_t batch, int64_t length);

}  // namespace furious
