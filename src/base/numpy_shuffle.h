// The permutation of numpy.random.seed(seed); numpy.random.shuffle(numpy.arange(count)), which data sets are sampled
// with. NumPy guarantees that this legacy generator never changes.
#pragma once

#include <cstdint>
#include <vector>

namespace furious {

std::vector<int64_t> numpy_shuffle(uint32_t seed, int64_t count);

}  // namespace furious
