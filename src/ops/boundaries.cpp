#include "ops/boundaries.h"

#include <span>

#include "base/error.h"
#include "tensor/check.h"

namespace furious {
namespace {

std::span<const int32_t> checked_starts(std::string_view operation, const Tensor& boundaries, int64_t tokens) {
  if (!boundaries) return {};
  ArgumentCheck(operation).dense("boundaries", boundaries, DType::i32, {ArgumentCheck::kAny});
  const std::span<const int32_t> starts(boundaries.data<int32_t>(), boundaries.elements());
  for (size_t i = 0; i < starts.size(); ++i) {
    require(starts[i] >= 0 && starts[i] < tokens, "{}: argument \"boundaries\" holds {} at position {}, expected 0..{}",
            operation, starts[i], i, tokens - 1);
    require(i == 0 || starts[i] > starts[i - 1],
            "{}: argument \"boundaries\" holds {} at position {} after {}, expected strictly increasing values",
            operation, starts[i], i, i == 0 ? 0 : starts[i - 1]);
  }
  return starts;
}

}  // namespace

std::vector<Segment> segments_of(std::string_view operation, const Tensor& boundaries, int64_t batch, int64_t length) {
  const std::span<const int32_t> starts = checked_starts(operation, boundaries, batch * length);
  std::vector<Segment> segments;
  if (length == 0) return segments;
  segments.reserve(batch + starts.size());
  auto next = starts.begin();
  for (int64_t row = 0; row < batch; ++row) {
    int64_t begin = 0;
    for (; next != starts.end() && *next < (row + 1) * length; ++next) {
      const int64_t end = *next - row * length;
      if (end > begin) segments.push_back({row, begin, end});
      begin = end;
    }
    segments.push_back({row, begin, length});
  }
  return segments;
}

}  // namespace furious
