#include <algorithm>

#include "base/parallel.h"
#include "base/random.h"
#include "ops/random_kernels.h"

namespace furious::cpu {
namespace {

constexpr int64_t kGrain = 1 << 10;  // counters, of four numbers each

// out_i = shift + scale · number i, where draw(counter, four) makes four numbers.
template <class Draw>
void fill_with(const Tensor& out, float shift, float scale, Draw&& draw) {
  float* data = out.data<float>();
  const int64_t elements = out.elements();
  parallel_ranges((elements + 3) / 4, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t counter = begin; counter < end; ++counter) {
      float four[4];
      draw(static_cast<uint64_t>(counter), four);
      const int64_t first = counter * 4;
      for (int64_t i = first; i < std::min(first + 4, elements); ++i) data[i] = shift + scale * four[i - first];
    }
  });
}

}  // namespace

void fill_uniform(const Tensor& out, float low, float range, uint64_t seed, uint64_t stream) {
  fill_with(out, low, range, [&](uint64_t counter, float* four) { four_uniform(seed, stream, counter, four); });
}

void fill_normal(const Tensor& out, float mean, float stddev, uint64_t seed, uint64_t stream) {
  fill_with(out, mean, stddev, [&](uint64_t counter, float* four) { four_normal(seed, stream, counter, four); });
}

}  // namespace furious::cpu
