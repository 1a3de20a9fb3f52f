// The order that numpy.random.seed(seed); numpy.random.shuffle(numpy.arange(count)) makes: data sets are sampled with
// it, and numpy promises that this old generator never changes.
#pragma once

#include <cstdint>
#include <vector>

namespace furious {

std::vector<int64_t> numpy_shuffle(uint32_t seed, int64_t count);

}  // namespace furious
