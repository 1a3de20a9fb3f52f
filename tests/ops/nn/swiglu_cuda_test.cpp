#include "ops/nn/swiglu.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

TEST(SwigluCuda, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 5, 64}, Shape{2, 1, 33}, Shape{70, 1000}}) {
        const Tensor gate = rounded(random.normal_tensor(shape, 3), dtype);
        const Tensor up = rounded(random.normal_tensor(shape), dtype);
        const Tensor dy = rounded(random.normal_tensor(shape), dtype);
        const Tensor gate_there = gpu_copy(gate, dtype, margin), up_there = gpu_copy(up, dtype, margin);
        const Tensor y = swiglu_forward(gate_there, up_there);
        EXPECT_EQ(y.dtype(), dtype);
        EXPECT_LT(gpu_error(y, swiglu_forward(gate, up)), tolerance(dtype)) << to_string(shape) << margin;
        EXPECT_TRUE(same_gpu_bits(y, swiglu_forward(gate_there, up_there)));

        const SwigluGradients expected{Tensor::empty_like(gate), Tensor::empty_like(up)};
        swiglu_backward(expected, dy, gate, up);
        const SwigluGradients actual{gpu_empty(shape, dtype, margin), gpu_empty(shape, dtype, margin)};
        swiglu_backward(actual, to_gpu(dy, dtype), gate_there, up_there);
        EXPECT_LT(gpu_error(actual.gate, expected.gate), tolerance(dtype)) << to_string(shape) << margin;
        EXPECT_LT(gpu_error(actual.up, expected.up), tolerance(dtype)) << to_string(shape) << margin;
      }
}

TEST(SwigluCuda, ExtremeGatesStayFinite) {
  SKIP_WITHOUT_GPU();
  const Tensor gate = tensor_of({-1e30f, -200, -1, 0, 1, 200, 1e30f}, {7});
  const Tensor up = tensor_of({1, 1, 1, 1, 1, 1, 1}, {7});
  const Tensor y = to_cpu(swiglu_forward(to_gpu(gate), to_gpu(up)));
  EXPECT_LT(relative_error(y, swiglu_forward(gate, up)), 1e-5);
}

TEST(SwigluCuda, RecordsItsGradients) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const Tensor fused = rounded(random.normal_tensor({4, 32}), DType::bf16), dy = random.normal_tensor({4, 16});
  const Variable here(fused, true), there(to_gpu(fused, DType::bf16), true);
  Tape tape;
  tape.backward(swiglu(tape, here), rounded(dy, DType::bf16));
  tape.backward(swiglu(tape, there), to_gpu(dy, DType::bf16));
  EXPECT_LT(gpu_error(there.gradient(), here.gradient()), tolerance(DType::bf16));
}

}  // namespace
}  // namespace furious
