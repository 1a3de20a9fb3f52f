// The scores that are polynomials, f(x) = Σ_n c_n xⁿ with coefficients known at run time: all but the exponential.
#pragma once

#include "base/random.h"  // FURIOUS_HOST_DEVICE
#include "ops/mixer/mixer.h"

namespace furious {

struct Polynomial {
  float c[kLargestDegree + 1];

  FURIOUS_HOST_DEVICE float operator()(float x) const { return c[0] + x * (c[1] + x * (c[2] + x * (c[3] + x * c[4]))); }
  // f'(x).
  FURIOUS_HOST_DEVICE float slope(float x) const { return c[1] + x * (2 * c[2] + x * (3 * c[3] + x * (4 * c[4]))); }
};
static_assert(kLargestDegree == 4);

inline Polynomial polynomial_of(const MixerSpec& spec) {
  Polynomial f{};
  switch (spec.score) {
    case Score::linear:
      f.c[1] = 1;
      break;
    case Score::squared:
      f.c[2] = 1;
      break;
    case Score::power:
      f.c[spec.degree] = 1;
      break;
    case Score::series:
      f.c[0] = 1;
      for (int n = 1; n <= spec.degree; ++n) f.c[n] = f.c[n - 1] / static_cast<float>(n);
      break;
    case Score::exponential:
      break;
  }
  return f;
}

}  // namespace furious
