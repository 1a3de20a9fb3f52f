#include "ops/fp8.h"

#include "base/error.h"
#include "ops/fp8_kernels.h"
#include "tensor/check.h"

namespace furious {
namespace {

constexpr int64_t kMultiple = 16;

}  // namespace

bool fp8_supported([[maybe_unused]] Device device) {
#ifdef FURIOUS_CUDA
  return !device.is_cpu() && cuda::fp8_supported(device);
#else
  return false;
#endif
}

bool fp8_fits(int64_t rows, int64_t columns, int64_t inner) {
  return rows > 0 && rows % kMultiple == 0 && columns > 0 && columns % kMultiple == 0 && inner > 0 &&
         inner % kMultiple == 0;
}

Fp8Matrix to_fp8(const Tensor& x, Fp8Format format, bool with_transposed) {
  const ArgumentCheck check("to_fp8");
  check.rank("x", x, 2);
  check.dtype("x", x, {DType::f32, DType::bf16});
  check.unit_inner_stride("x", x);
  require(fp8_supported(x.device()),
          "to_fp8: {} has no products of 8-bit floats; use a GPU of compute capability 8.9 or "
          "later, or bf16",
          name_of(x.device()));
  require(fp8_fits(x.size(0), x.size(1), kMultiple), "to_fp8: argument \"x\" has shape {}, expected multiples of {}",
          to_string(x.shape()), kMultiple);
  require(x.stride(0) % 4 == 0 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0,
          "to_fp8: argument \"x\" has rows of stride {}, expected a multiple of 4, and an address that is one of 16",
          x.stride(0));
  const auto factor = [&](int64_t rows, int64_t inner) {
    return Fp8Factor{Tensor::empty({rows, inner / 4}, DType::i32, x.device()), {}, format};
  };
  Fp8Matrix out;
  out.as_is = factor(x.size(0), x.size(1));
  if (with_transposed) out.transposed = factor(x.size(1), x.size(0));
  out.as_is.scale = out.transposed.scale = Tensor::empty({1}, DType::f32, x.device());
#ifdef FURIOUS_CUDA
  cuda::to_fp8(out, x);
#endif
  return out;
}

void matmul_fp8(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options) {
  const ArgumentCheck check("matmul_fp8");
  check.shape("out", out, {a.rows(), b.rows()});
  check.dtype("out", out, {DType::f32, DType::bf16});
  check.unit_inner_stride("out", out);
  check.device("out", out, a.values.device());
  require(a.inner() == b.inner(), "matmul_fp8: rows of {} and {} numbers, expected equally many", a.inner(), b.inner());
  require(fp8_fits(a.rows(), b.rows(), a.inner()), "matmul_fp8: {} by {} by {}, expected multiples of {}", a.rows(),
          b.rows(), a.inner(), kMultiple);
  require(a.format == Fp8Format::e4m3 || b.format == Fp8Format::e4m3, "matmul_fp8: both factors are e5m2");
  if (options.addend) {
    require(!options.accumulate, "matmul_fp8: an addend was given for a product that is added to \"out\"");
    check.shape("addend", options.addend, {a.rows(), b.rows()});
    check.dtype("addend", options.addend, {out.dtype()});
    require(options.addend.stride(0) == out.stride(0), "matmul_fp8: \"addend\" has rows of stride {}, expected {}",
            options.addend.stride(0), out.stride(0));
  }
#ifdef FURIOUS_CUDA
  cuda::matmul_fp8(out, a, b, options);
#endif
}

}  // namespace furious
