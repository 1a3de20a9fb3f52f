#include "ops/random.h"

#include <cmath>

#include "base/error.h"
#include "ops/random_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

void check_out(std::string_view operation, const Tensor& out) {
  const ArgumentCheck check(operation);
  check.dtype("out", out, {DType::f32});
  check.contiguous("out", out);
}

}  // namespace

void fill_uniform(const Tensor& out, float low, float high, uint64_t seed, uint64_t stream) {
  check_out("fill_uniform", out);
  const float range = high - low;
  require(std::isfinite(range) && range >= 0, "fill_uniform: range from {} to {}, expected finite ends in order", low,
          high);
  FURIOUS_DISPATCH(out.device(), fill_uniform(out, low, range, seed, stream));
}

void fill_normal(const Tensor& out, float mean, float stddev, uint64_t seed, uint64_t stream) {
  check_out("fill_normal", out);
  require(std::isfinite(mean) && std::isfinite(stddev) && stddev >= 0,
          "fill_normal: mean {} and standard deviation {}, expected finite numbers, the second at least 0", mean,
          stddev);
  FURIOUS_DISPATCH(out.device(), fill_normal(out, mean, stddev, seed, stream));
}

}  // namespace furious
