#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "ops/nn/cross_entropy_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/nn/cross_entropy_cpu.cpp"
// In this order: foreach_target.h compiles the rest of this file once for every instruction set.
#include "hwy/foreach_target.h"

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {
namespace {

// The largest number, or NaN if there is one, which makes loss and gradient NaN: Exp alone would turn it into 0.
float largest(const float* x, int64_t count) {
  FloatVector most = set(-std::numeric_limits<float>::infinity());
  auto nan = hn::IsNaN(most);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const FloatVector value = hn::LoadU(kTag, x + i);
    nan = hn::Or(nan, hn::IsNaN(value));
    most = hn::Max(most, value);
  }
  float result = hn::GetLane(hn::MaxOfLanes(kTag, most));
  bool has_nan = !hn::AllFalse(kTag, nan);
  for (; i < count; ++i) {
    has_nan |= std::isnan(x[i]);
    result = std::max(result, x[i]);
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

template <class D>
HWY_INLINE hn::Vec<D> shifted_exp(D d, const float* x, float shift) {
  return hn::Exp(d, hn::Sub(hn::LoadU(d, x), hn::Set(d, shift)));
}

// Σ exp(x − shift); with kStore, x becomes exp(x − shift).
template <bool kStore>
double exp_sum(float* x, int64_t count, float shift) {
  FloatVector sum = hn::Zero(kTag);
  double rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const FloatVector value = shifted_exp(kTag, x + i, shift);
    if (kStore) hn::StoreU(value, kTag, x + i);
    sum = hn::Add(sum, value);
  }
  for (; i < count; ++i) {
    const auto value = shifted_exp(kOneLane, x + i, shift);
    rest += static_cast<double>(hn::GetLane(value));
    if (kStore) hn::StoreU(value, kOneLane, x + i);
  }
  return static_cast<double>(sum_of_lanes(sum)) + rest;
}

void multiply(float* x, int64_t count, float factor) {
  const FloatVector factors = set(factor);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(kTag, x + i), factors), kTag, x + i);
  for (; i < count; ++i) x[i] *= factor;
}

// z s², and the factor 1 + 2 z s of the softmax in the gradient, for s = log(sum) + most.
struct ZLoss {
  double loss = 0, factor = 1;
};
ZLoss z_loss_of(double z, double sum, float most) {
  if (z == 0) return {};
  const double s = std::log(sum) + static_cast<double>(most);
  return {z * s * s, 1 + 2 * z * s};
}

double row_loss(float* logits, int64_t vocabulary, int32_t target, double z) {
  const float most = largest(logits, vocabulary);
  const float distance = most - logits[target];
  const double sum = exp_sum<false>(logits, vocabulary, most);
  return std::log(sum) + static_cast<double>(distance) + z_loss_of(z, sum, most).loss;
}

// Leaves coefficient · ((1 + 2 z s) softmax − onehot) in the place of the logits.
double row_loss_with_gradient(float* logits, int64_t vocabulary, int32_t target, double z, float coefficient) {
  const float most = largest(logits, vocabulary);
  const float distance = most - logits[target];
  const double sum = exp_sum<true>(logits, vocabulary, most);
  const ZLoss more = z_loss_of(z, sum, most);
  multiply(logits, vocabulary, static_cast<float>(static_cast<double>(coefficient) * more.factor / sum));
  logits[target] -= coefficient;
  return std::log(sum) + static_cast<double>(distance) + more.loss;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {
namespace {

HWY_EXPORT(row_loss);
HWY_EXPORT(row_loss_with_gradient);

}  // namespace

namespace cpu {

void cross_entropy_rows(const Tensor& logits, const Tensor& targets, const Tensor& weights, double z_loss,
                        const Tensor& counted, bool with_gradient, const Tensor& losses) {
  const int64_t vocabulary = logits.size(1);
  float* const data = logits.data<float>();
  const int32_t* const ids = targets.data<int32_t>();
  double* const row_losses = losses.data<double>();
  const float* const factors = weights ? weights.data<float>() : nullptr;
  const double share = 1.0 / static_cast<double>(*counted.data<int32_t>());
  parallel_ranges(logits.size(0), kElementsPerThread / 2 / vocabulary, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* const row_logits = data + row * vocabulary;
      const double factor = factors ? static_cast<double>(factors[row]) : 1.0;
      if (ids[row] == kIgnoredTarget) {
        if (with_gradient) std::fill_n(row_logits, vocabulary, 0.0f);
        row_losses[row] = 0;
      } else if (with_gradient) {
        row_losses[row] = factor * HWY_DYNAMIC_DISPATCH(row_loss_with_gradient)(
                                       row_logits, vocabulary, ids[row], z_loss, static_cast<float>(factor * share));
      } else {
        row_losses[row] = factor * HWY_DYNAMIC_DISPATCH(row_loss)(row_logits, vocabulary, ids[row], z_loss);
      }
    }
  });
}

}  // namespace cpu
}  // namespace furious
#endif
