// φ, the features whose product is the score of a query and a key: φ(q)·φ(k) = f(q·k), where f is a polynomial.
//
// For f(x) = x^degree a feature is a product of `degree` elements of x, one feature for every i1 ≤ i2 ≤ … in
// lexicographic order, times √(degree!/Π m!), where m counts how often each index is there. For the series
// f(x) = Σ_{n ≤ degree} xⁿ/n! the elements are those of [x, 1] and the factor is √(1/Π m!), the 1 not counted. With the
// 1 as an element, φ is homogeneous in both cases: Σ_i x_i ∂φ/∂x_i = degree·φ.
//
//   linear: x_i     squared: x_i², √2 x_i x_j     series 2: x_i²/√2, x_i x_j, x_i, 1
#pragma once

#include <cmath>
#include <cstdint>

#include "base/random.h"  // FURIOUS_HOST_DEVICE
#include "ops/mixer/mixer.h"

namespace furious {

struct FeatureMap {
  int dim = 0;       // of x
  int degree = 0;    // 0: the score has no features
  bool one = false;  // of a series

  FURIOUS_HOST_DEVICE int width() const { return dim + (one ? 1 : 0); }
  // Tuples i1 ≤ i2 ≤ … of so many of `width` indices: C(width + degree − 1, degree).
  static int64_t tuples(int64_t width, int64_t degree) {
    int64_t count = 1;
    for (int64_t n = 1; n <= degree; ++n) count = count * (width + n - 1) / n;
    return count;
  }
};

// Pairs a ≤ b of `width` indices in lexicographic order: the first that begins with a (their number, for a = width),
// and the place of (a, b).
FURIOUS_HOST_DEVICE constexpr int first_pair(int width, int a) {
  return a * width - a * (a - 1) / 2;
}
FURIOUS_HOST_DEVICE constexpr int pair_index(int width, int a, int b) {
  return first_pair(width, a) + b - a;
}
// The factor of the feature x_a x_b, a < b, of a squared score: √2.
inline constexpr float kPairFactor = 1.41421356237f;

// The features of a spec, degree 0 if there are none or more than kLargestStateRows.
inline FeatureMap feature_map(const MixerSpec& spec, int64_t qk_dim) {
  if (spec.score == Score::exponential || spec.signed_decay) return {};
  const int degree = spec.degree > 0 ? spec.degree : spec.score == Score::squared ? 2 : 1;
  const FeatureMap map{static_cast<int>(qk_dim), degree, spec.score == Score::series};
  return FeatureMap::tuples(map.width(), degree) <= kLargestStateRows ? map : FeatureMap{};
}

// One feature: factor · Π x[at[n]] over the places that are not −1.
struct Feature {
  int16_t at[kLargestDegree];
  float factor;

  // kDegree: where the map is known to have no higher one.
  template <int kDegree = kLargestDegree>
  FURIOUS_HOST_DEVICE float of(const float* x) const {
    float y = factor;
    for (int n = 0; n < kDegree; ++n)
      if (at[n] >= 0) y *= x[at[n]];
    return y;
  }
};

// Feature f of the map.
FURIOUS_HOST_DEVICE inline Feature feature_of(const FeatureMap& map, int f) {
  Feature feature{{-1, -1, -1, -1}, 1.0f};
  const int width = map.width();
  int lowest = 0, n = 0;
  for (; map.degree - n > 2; ++n) {
    // Those that begin with `lowest` here are as many as pairs or triples of what is left.
    const auto beginning = [&](int w) { return map.degree - n == 3 ? w * (w + 1) / 2 : w * (w + 1) * (w + 2) / 6; };
    for (int count; f >= (count = beginning(width - lowest)); ++lowest) f -= count;
    feature.at[n] = static_cast<int16_t>(lowest);
  }
  if (map.degree - n == 2) {
    const int w = width - lowest;
    const float b = static_cast<float>(2 * w + 1);
    int a = static_cast<int>((b - sqrtf(b * b - 8.0f * static_cast<float>(f))) / 2);
    while (a > 0 && first_pair(w, a) > f) --a;
    while (first_pair(w, a + 1) <= f) ++a;
    f -= first_pair(w, a);
    lowest += a;
    feature.at[n++] = static_cast<int16_t>(lowest);
  }
  feature.at[n++] = static_cast<int16_t>(lowest + f);
  float square = 1;
  int times = 0;  // that the index of place i has come up
  for (int i = 0; i < n; ++i) {
    times = i > 0 && feature.at[i] == feature.at[i - 1] ? times + 1 : 1;
    if (!map.one) square *= static_cast<float>(i + 1);
    if (feature.at[i] < map.dim) square /= static_cast<float>(times);
  }
  feature.factor = sqrtf(square);
  for (int i = 0; i < n; ++i)
    if (feature.at[i] == map.dim) feature.at[i] = -1;
  return feature;
}

// All features of a map of this degree in order, as runs that differ in their last index only: features (prefix, last)
// for last from lowest() to width − 1.
template <int kDegree>
struct FeatureRuns {
  static constexpr int kPrefix = kDegree - 1;
  FeatureMap map;
  int prefix[kPrefix > 0 ? kPrefix : 1] = {};

  FURIOUS_HOST_DEVICE explicit FeatureRuns(const FeatureMap& features) : map(features) {}

  FURIOUS_HOST_DEVICE int lowest() const { return kPrefix > 0 ? prefix[kPrefix > 0 ? kPrefix - 1 : 0] : 0; }
  FURIOUS_HOST_DEVICE int size() const { return map.width() - lowest(); }
  // To the next run; false after the last.
  FURIOUS_HOST_DEVICE bool next() {
    for (int i = kPrefix - 1; i >= 0; --i) {
      if (prefix[i] + 1 == map.width()) continue;
      const int index = prefix[i] + 1;
      for (int j = i; j < kPrefix; ++j) prefix[j] = index;
      return true;
    }
    return false;
  }
  // Π x[prefix] over all places but `without`.
  FURIOUS_HOST_DEVICE float product(const float* x, int without = -1) const {
    float y = 1;
    for (int i = 0; i < kPrefix; ++i)
      if (i != without) y *= x[prefix[i]];
    return y;
  }

  // The factor of a feature of the run, and of that which ends with one more of the prefix's last index.
  struct Factors {
    float each, repeated;
  };
  FURIOUS_HOST_DEVICE Factors factors() const {
    float square = map.one ? 1.0f : static_cast<float>(kDegree);
    int times = 0;
    for (int i = 0; i < kPrefix; ++i) {
      times = i > 0 && prefix[i] == prefix[i - 1] ? times + 1 : 1;
      if (!map.one) square *= static_cast<float>(i + 1);
      if (prefix[i] < map.dim) square /= static_cast<float>(times);
    }
    const bool repeats = kPrefix > 0 && lowest() < map.dim;
    return {sqrtf(square), sqrtf(repeats ? square / static_cast<float>(times + 1) : square)};
  }
};

// f.template operator()<degree>() for the degree of a map.
template <class F>
void with_degree(const FeatureMap& map, F&& f) {
  switch (map.degree) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}
static_assert(kLargestDegree == 4);

}  // namespace furious
