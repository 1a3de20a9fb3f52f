#include "ops/boundaries.h"

#include <mutex>
#include <numeric>
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

Tensor positions_on(Device device, std::span<const Segment> segments, int64_t batch, int64_t length) {
  if (static_cast<int64_t>(segments.size()) <= batch) return {};
  struct Kept {
    std::mutex mutex;
    std::vector<Segment> segments;
    Tensor positions;
  };
  static Kept kept;
  const std::lock_guard lock(kept.mutex);
  const Shape shape{batch, length};
  if (kept.positions && kept.positions.shape() == shape && kept.positions.device() == device &&
      std::ranges::equal(kept.segments, segments))
    return kept.positions;
  kept.positions = {};
  kept.segments.assign(segments.begin(), segments.end());
  const Tensor here = Tensor::empty(shape, DType::i32);
  int32_t* to = here.data<int32_t>();
  for (const Segment& segment : segments) {
    std::iota(to, to + segment.length(), 0);
    to += segment.length();
  }
  const Tensor there = Tensor::empty(shape, DType::i32, device);
  copy_between(there, here);
  kept.positions = there;
  return there;
}

}  // namespace furious
