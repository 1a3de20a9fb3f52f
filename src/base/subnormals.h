// Flushes subnormal numbers to zero. Weights after a strong decay are often subnormal, and arithmetic on them costs
// Intel CPUs many cycles (docs/performance.md).
#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace furious {

// During its lifetime, this thread reads subnormal operands as zero and flushes subnormal results to zero.
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
