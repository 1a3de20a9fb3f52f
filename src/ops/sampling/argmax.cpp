#include "ops/sampling/argmax.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {

void cpu::argmax(const Tensor& best, const Tensor& logits) {
  for (int64_t row = 0; row < logits.size(0); ++row) {
    const float* const first = logits.data<float>() + row * logits.stride(0);
    const float* const end = first + logits.size(1);
    best.data<int32_t>()[2 * row] = static_cast<int32_t>(std::max_element(first, end) - first);
    best.data<int32_t>()[2 * row + 1] = std::all_of(first, end, [](float x) { return std::isfinite(x); }) ? 1 : 0;
  }
}

Tensor argmax(const Tensor& logits) {
  const ArgumentCheck check("argmax");
  check.rank("logits", logits, 2);
  check.dtype("logits", logits, {DType::f32});
  check.unit_inner_stride("logits", logits);
  require(logits.size(1) >= 1, "argmax: rows without a number have no largest");
  Tensor best = Tensor::empty({logits.size(0), 2}, DType::i32, logits.device());
  FURIOUS_DISPATCH(logits.device(), argmax(best, logits));
  return best;
}

}  // namespace furious
