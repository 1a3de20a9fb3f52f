#include "ops/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "ops/optim/adamw_kernels.h"
#include "ops/optim/blend.h"
#include "ops/optim/muon_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

constexpr int64_t kGrain = 1 << 14;
constexpr int kIterations = 5;
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
constexpr double kStepSize = 0.2;  // root mean square of a step, in learning rates

AdamWConstants constants_of(const Tensor& numbers) {
  AdamWConstants constants;
  std::memcpy(&constants, numbers.raw(), sizeof(constants));
  return constants;
}

}  // namespace

namespace cpu {

void muon_momentum(const Tensor& update, const Tensor& momentum, const Tensor& gradient, const Tensor& numbers,
                   float mu) {
  const float scale = constants_of(numbers).gradient_scale;
  if (std::isnan(scale)) return;
  float* const u = update.data<float>();
  float* const m = momentum.data<float>();
  const float* const g = gradient.data<float>();
  parallel_ranges(update.elements(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      m[i] = mu * m[i] + scale * g[i];
      u[i] = scale * g[i] + mu * m[i];
    }
  });
}

void muon_normalize(const Tensor& x, const Tensor& squares) {
  const auto factor = static_cast<float>(1 / (std::sqrt(*squares.data<double>()) + kMuonEpsilon));
  float* const values = x.data<float>();
  parallel_ranges(x.elements(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] *= factor;
  });
}

void muon_apply(const Tensor& parameter, const Tensor& direction, const Tensor& numbers, float factor) {
  const AdamWConstants constants = constants_of(numbers);
  if (std::isnan(constants.gradient_scale)) return;
  const float step = constants.learning_rate * factor;
  float* const p = parameter.data<float>();
  const float* const x = direction.data<float>();
  parallel_ranges(parameter.elements(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p[i] = constants.decay * p[i] - step * x[i];
  });
}

}  // namespace cpu

void orthogonalize(const Tensor& x, MatmulPrecision precision) {
  const ArgumentCheck check("orthogonalize");
  check.rank("x", x, 2);
  const int64_t rows = x.size(0), columns = x.size(1), least = std::min(rows, columns);
  const Device device = x.device();
  check.dense("x", x, DType::f32, {rows, columns}, device);
  if (least == 0) return;
  const bool wide = rows <= columns;
  const Tensor squares = Tensor::empty({1}, DType::f64, device);
  FURIOUS_DISPATCH(device, sum_of_squares(squares, std::span(&x, 1)));
  FURIOUS_DISPATCH(device, muon_normalize(x, squares));
  const Tensor product = Tensor::empty_like(x);
  const Tensor a = Tensor::empty({least, least}, DType::f32, device), a_squared = Tensor::empty_like(a);
  for (int i = 0; i < kIterations; ++i) {
    matmul(a, x, x, {.transpose_a = !wide, .transpose_b = wide, .precision = precision});
    matmul(a_squared, a, a, {.precision = precision});
    blend(a, kB, a, kC, a_squared);
    matmul(product, wide ? a : x, wide ? x : a, {.precision = precision});
    blend(x, kA, x, 1, product);
  }
}

void muon_update(std::span<const MuonTensors> tensors, const Tensor& numbers, double momentum,
                 MatmulPrecision precision) {
  if (tensors.empty()) return;
  const ArgumentCheck check("muon");
  const Device device = numbers.device();
  check.dense("numbers", numbers, DType::f32, {kAdamWConstants}, device);
  for (const MuonTensors& each : tensors) {
    check.rank("parameter", each.parameter, 2);
    const int64_t rows = each.parameter.size(0), columns = each.parameter.size(1);
    const std::vector<int64_t> shape{rows, columns};
    check.dense("parameter", each.parameter, DType::f32, shape, device);
    check.dense("gradient", each.gradient, DType::f32, shape, device);
    check.dense("momentum", each.momentum, DType::f32, shape, device);
    if (each.parameter.elements() == 0) continue;
    const Tensor direction = Tensor::zeros({rows, columns}, DType::f32, device);
    FURIOUS_DISPATCH(device,
                     muon_momentum(direction, each.momentum, each.gradient, numbers, static_cast<float>(momentum)));
    orthogonalize(direction, precision);
    const double factor = kStepSize * std::sqrt(static_cast<double>(std::max(rows, columns)));
    FURIOUS_DISPATCH(device, muon_apply(each.parameter, direction, numbers, static_cast<float>(factor)));
  }
}

int64_t muon_scratch_bytes(int64_t rows, int64_t columns) {
  const int64_t least = std::min(rows, columns);
  return 2 * (rows * columns + least * least) * static_cast<int64_t>(sizeof(float));
}

}  // namespace furious
