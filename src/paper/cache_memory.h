// Cache memory of one head of one layer by sequence length: measured, and by the formulas of the paper's section 5.1.
//
//   softmax   2·N·d                      keys and values of all tokens
//   linear    d·(d + 1)                  the state, with the normalizer's column
//   2mamba    d·(d + 1)²/2 + 3·d         the same with the squares of the keys, and the convolution's last input
//   lazy      the smaller of the two     plain keys and values until the state is smaller (ops/mixer/recurrent.h)
//
// The break-even is the first length at which the state of 2mamba is smaller than keys and values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensor/device.h"

namespace furious {

struct MemoryCurve {
  std::string name;
  std::vector<int64_t> measured;  // bytes after 1, 2, … tokens
  std::vector<int64_t> formula;   // the same, counted; 4 bytes to a number
};

struct CacheMemory {
  int64_t dim = 0;
  std::vector<MemoryCurve> curves;  // softmax, linear, 2mamba, and 2mamba with the lazy fold

  int64_t tokens() const { return static_cast<int64_t>(curves.front().measured.size()); }
  const MemoryCurve& curve(const std::string& name) const;
  // The measured break-even; 0: not within these tokens.
  int64_t break_even() const;
  // The largest quotient of the lazy cache's and softmax attention's bytes, as measured.
  double worst_of_lazy() const;
};

inline constexpr const char* kLazyName = "2mamba, lazy fold";

int64_t break_even_formula(int64_t dim);

// Generates up to `tokens` tokens.
CacheMemory measure_cache_memory(int64_t dim, int64_t tokens, Device device = {});

}  // namespace furious
