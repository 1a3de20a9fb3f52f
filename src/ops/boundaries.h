// Packed documents: several short documents share one row of a batch, and nothing may pass from one to the next.
//
// `boundaries` is an i32 tensor [count] on the CPU, of strictly increasing positions in the flattened [batch * length]
// token sequence at which a new document starts. A row always starts one; its position may be listed or not. A tensor
// that is undefined, or an empty one, means one document per row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
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

// For kernels on a device: of every token its position in its segment, i32 [batch, length] over there. Not there if
// every row is one segment, which needs nothing from the host. Kept until other segments come: all layers of a step
// share them.
Tensor positions_on(Device device, std::span<const Segment> segments, int64_t batch, int64_t length);

// body(segment, begin, end) for every segment that has tokens among [first, last) of the flattened sequence, with the
// part [begin, end) of its row that lies there.
template <class Body>
void for_each_piece(std::span<const Segment> segments, int64_t length, int64_t first, int64_t last, Body&& body) {
  const auto start = [&](const Segment& segment) { return segment.batch * length + segment.begin; };
  const auto end = [&](const Segment& segment) { return segment.batch * length + segment.end; };
  auto segment = std::partition_point(segments.begin(), segments.end(),
                                      [&](const Segment& candidate) { return end(candidate) <= first; });
  for (; segment != segments.end() && start(*segment) < last; ++segment) {
    const int64_t row = segment->batch * length;
    body(*segment, std::max(start(*segment), first) - row, std::min(end(*segment), last) - row);
  }
}

}  // namespace furious
