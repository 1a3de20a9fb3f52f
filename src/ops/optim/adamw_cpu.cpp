#include "ops/optim/adamw_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/optim/adamw_cpu.cpp"
// In this order: foreach_target.h compiles the rest of this file once for every instruction set.
#include "hwy/foreach_target.h"

#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {
namespace {

template <class D>
HWY_INLINE void update_at(D d, const AdamWConstants& c, float* parameter, const float* gradient, float* first_moment,
                          float* second_moment) {
  const auto g = hn::Mul(hn::Set(d, c.gradient_scale), hn::LoadU(d, gradient));
  const auto m = hn::MulAdd(hn::Set(d, c.beta1), hn::LoadU(d, first_moment), hn::Mul(hn::Set(d, c.one_minus_beta1), g));
  const auto v = hn::MulAdd(hn::Set(d, c.beta2), hn::LoadU(d, second_moment),
                            hn::Mul(hn::Mul(hn::Set(d, c.one_minus_beta2), g), g));
  const auto divisor = hn::MulAdd(hn::Sqrt(v), hn::Set(d, c.denominator), hn::Set(d, c.epsilon));
  const auto change = hn::Div(hn::Mul(hn::Set(d, c.step_size), m), divisor);
  hn::StoreU(m, d, first_moment);
  hn::StoreU(v, d, second_moment);
  hn::StoreU(hn::MulSub(hn::Set(d, c.decay), hn::LoadU(d, parameter), change), d, parameter);
}

void update(int64_t count, const AdamWConstants& c, float* parameter, const float* gradient, float* first_moment,
            float* second_moment) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    update_at(kTag, c, parameter + i, gradient + i, first_moment + i, second_moment + i);
  for (; i < count; ++i) update_at(kOneLane, c, parameter + i, gradient + i, first_moment + i, second_moment + i);
}

double square_sum(const float* x, int64_t count) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const int64_t step = static_cast<int64_t>(hn::Lanes(d));
  auto even = hn::Zero(d);
  auto odd = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * step <= count; i += 2 * step) {
    const auto a = hn::PromoteTo(d, hn::LoadU(df, x + i));
    const auto b = hn::PromoteTo(d, hn::LoadU(df, x + i + step));
    even = hn::MulAdd(a, a, even);
    odd = hn::MulAdd(b, b, odd);
  }
  double sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
  for (; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {
namespace {

HWY_EXPORT(update);
HWY_EXPORT(square_sum);

}  // namespace

namespace cpu {

void adamw_update(int64_t count, const AdamWConstants& constants, float* parameter, const float* gradient,
                  float* first_moment, float* second_moment) {
  HWY_DYNAMIC_DISPATCH(update)(count, constants, parameter, gradient, first_moment, second_moment);
}

double sum_of_squares(const float* x, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(square_sum)(x, count);
}

}  // namespace cpu
}  // namespace furious
#endif
