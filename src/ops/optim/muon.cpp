#include "ops/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "ops/elementwise.h"
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

namespace {

// Memory for the update of one matrix after the other, with room for the largest.
class Scratch {
 public:
  Scratch(Device device, int64_t elements, int64_t least)
      : squares(Tensor::empty({1}, DType::f64, device)),
        product_(Tensor::empty({elements}, DType::f32, device)),
        a_(Tensor::empty({least * least}, DType::f32, device)),
        a_squared_(Tensor::empty({least * least}, DType::f32, device)) {}

  Tensor product(int64_t rows, int64_t columns) const { return cut(product_, rows, columns); }
  Tensor a(int64_t least) const { return cut(a_, least, least); }
  Tensor a_squared(int64_t least) const { return cut(a_squared_, least, least); }
  static Tensor cut(const Tensor& memory, int64_t rows, int64_t columns) {
    return memory.slice(0, 0, rows * columns).view({rows, columns});
  }

  Tensor squares;

 private:
  Tensor product_, a_, a_squared_;
};

void orthogonalize_with(const Scratch& scratch, const Tensor& x, MatmulPrecision precision) {
  const int64_t rows = x.size(0), columns = x.size(1), least = std::min(rows, columns);
  const Device device = x.device();
  const bool wide = rows <= columns;
  FURIOUS_DISPATCH(device, sum_of_squares(scratch.squares, std::span(&x, 1)));
  FURIOUS_DISPATCH(device, muon_normalize(x, scratch.squares));
  const Tensor product = scratch.product(rows, columns), a = scratch.a(least), a_squared = scratch.a_squared(least);
  for (int i = 0; i < kIterations; ++i) {
    matmul(a, x, x, {.transpose_a = !wide, .transpose_b = wide, .precision = precision});
    matmul(a_squared, a, a, {.precision = precision});
    blend(a, kB, a, kC, a_squared);
    matmul(product, wide ? a : x, wide ? x : a, {.precision = precision});
    blend(x, kA, x, 1, product);
  }
}

}  // namespace

void orthogonalize(const Tensor& x, MatmulPrecision precision) {
  const ArgumentCheck check("orthogonalize");
  check.rank("x", x, 2);
  check.dense("x", x, DType::f32, {x.size(0), x.size(1)}, x.device());
  if (x.elements() == 0) return;
  orthogonalize_with({x.device(), x.elements(), std::min(x.size(0), x.size(1))}, x, precision);
}

void muon_direction(const Tensor& direction, const Tensor& momentum, const Tensor& gradient, const Tensor& numbers,
                    double mu) {
  FURIOUS_DISPATCH(numbers.device(), muon_momentum(direction, momentum, gradient, numbers, static_cast<float>(mu)));
}

void muon_step(const Tensor& parameter, const Tensor& direction, const Tensor& numbers, int64_t rows, int64_t columns) {
  const double factor = kStepSize * std::sqrt(static_cast<double>(std::max(rows, columns)));
  FURIOUS_DISPATCH(numbers.device(), muon_apply(parameter, direction, numbers, static_cast<float>(factor)));
}

void muon_update(std::span<const MuonTensors> tensors, const Tensor& numbers, double momentum,
                 MatmulPrecision precision) {
  if (tensors.empty()) return;
  const ArgumentCheck check("muon");
  const Device device = numbers.device();
  check.dense("numbers", numbers, DType::f32, {kAdamWConstants}, device);
  int64_t elements = 0, least = 0;
  for (const MuonTensors& each : tensors) {
    check.rank("parameter", each.parameter, 2);
    const int64_t rows = each.parameter.size(0), columns = each.parameter.size(1);
    const std::vector<int64_t> shape{rows, columns};
    check.dense("parameter", each.parameter, DType::f32, shape, device);
    check.dense("gradient", each.gradient, DType::f32, shape, device);
    check.dense("momentum", each.momentum, DType::f32, shape, device);
    elements = std::max(elements, rows * columns);
    least = std::max(least, std::min(rows, columns));
  }
  const Scratch scratch(device, elements, least);
  const Tensor directions = Tensor::empty({elements}, DType::f32, device);
  for (const MuonTensors& each : tensors) {
    const int64_t rows = each.parameter.size(0), columns = each.parameter.size(1);
    if (rows * columns == 0) continue;
    const Tensor direction = Scratch::cut(directions, rows, columns);
    fill(direction, 0);  // a scale of NaN leaves it as it is
    muon_direction(direction, each.momentum, each.gradient, numbers, momentum);
    orthogonalize_with(scratch, direction, precision);
    muon_step(each.parameter, direction, numbers, rows, columns);
  }
}

int64_t muon_scratch_bytes(int64_t rows, int64_t columns) {
  const int64_t least = std::min(rows, columns);
  return 2 * (rows * columns + least * least) * static_cast<int64_t>(sizeof(float));
}

}  // namespace furious
