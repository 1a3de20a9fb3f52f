#include "ops/nn/activation.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

TEST(ActivationCuda, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (Activation kind :
           {Activation::none, Activation::relu, Activation::silu, Activation::softplus, Activation::softplus2,
            Activation::sigmoid, Activation::log_sigmoid, Activation::gelu_tanh})
        for (const Shape& shape : {Shape{1, 1, 1, 2}, Shape{2, 3, 4, 64}, Shape{3, 1, 2, 33}}) {
          const Tensor x = rounded(random.normal_tensor(shape, 3), dtype);
          const Tensor dy = rounded(random.normal_tensor(shape), dtype);
          const Tensor x_there = gpu_copy_heads(x, dtype, margin);
          const Tensor y = activation_forward(x_there, kind);
          EXPECT_EQ(y.dtype(), dtype);
          EXPECT_LT(gpu_error(y, activation_forward(x, kind)), tolerance(dtype)) << to_string(shape) << margin;

          const Tensor expected = Tensor::empty_like(x), actual = gpu_empty_heads(shape, dtype, margin);
          activation_backward(expected, dy, x, kind);
          activation_backward(actual, to_gpu(dy, dtype), x_there, kind);
          EXPECT_LT(gpu_error(actual, expected), tolerance(dtype)) << to_string(shape) << margin;
        }
}

}  // namespace
}  // namespace furious
