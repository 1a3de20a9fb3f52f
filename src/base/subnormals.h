// Numbers below the smallest normal f32 as zero. Weights that decay has all but erased are such numbers, and each costs
// an Intel CPU many cycles (docs/performance.md).
#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace furious {

// While it lives, this thread takes subnormal numbers for zero and makes none.
class FlushSubnormals {
 public:
#ifdef __SSE2__
  FlushSubnormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero);
  }
  ~FlushSubnormals() {
    _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned before_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
};

}  // namespace furious
