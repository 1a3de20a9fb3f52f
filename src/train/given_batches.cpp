#include "train/given_batches.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace furious {

Batch GivenBatches::at(int64_t, RowRange rows) const {
  const int64_t first = rows.first, count = rows.count < 0 ? batch() - first : rows.count;
  require(first >= 0 && count >= 0 && first + count <= batch(), "batches: rows {}..{} of a batch of {}", first,
          first + count - 1, batch());
  const auto part = [&](const Tensor& of) { return of ? of.slice(0, first, count) : of; };
  Batch out{part(current_.inputs), part(current_.targets), {}, part(current_.weights)};
  if (!current_.boundaries) return out;
  std::vector<int32_t> own;
  const int32_t* const all = current_.boundaries.data<int32_t>();
  for (int64_t i = 0; i < current_.boundaries.elements(); ++i)
    if (all[i] >= first * length() && all[i] < (first + count) * length())
      own.push_back(static_cast<int32_t>(all[i] - first * length()));
  out.boundaries = Tensor::empty({static_cast<int64_t>(own.size())}, DType::i32);
  std::ranges::copy(own, out.boundaries.data<int32_t>());
  return out;
}

}  // namespace furious
