#include "base/numpy_shuffle.h"

#include <bit>
#include <numeric>
#include <random>

#include "base/error.h"

namespace furious {

std::vector<int64_t> numpy_shuffle(uint32_t seed, int64_t count) {
  require(count >= 0 && count <= int64_t{1} << 32, "shuffle: {} rows, expected at most 2^32", count);
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::mt19937 generator(seed);
  for (uint64_t i = order.size(); i-- > 1;) {
    // Uniform in [0, i] by rejection: as many low bits as i has, drawn again while above i.
    const uint64_t mask = std::bit_ceil(i + 1) - 1;
    uint64_t other = generator() & mask;
    while (other > i) other = generator() & mask;
    std::swap(order[i], order[other]);
  }
  return order;
}

}  // namespace furious
