#include "ops/nn/layer_norm.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

constexpr float kEps = 1e-5f;

TEST(LayerNormCuda, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const DType dtype : kActivationTypes)
    for (const int64_t n : {3, 40, 257, 3072})
      for (const int64_t margin : kMargins) {
        SCOPED_TRACE(::testing::Message() << n << " numbers, margin " << margin);
        const Tensor x = rounded(random.normal_tensor({2, 5, n}, 2), dtype);
        const Tensor dy = rounded(random.normal_tensor({2, 5, n}), dtype);
        const Tensor weight = random.normal_tensor({n}), bias = random.normal_tensor({n});
        const auto run = [&](const Variable& input, const Variable& w, const Variable& b, const Tensor& gradient) {
          Tape tape;
          const Variable y = layer_norm(tape, input, w, b, kEps);
          tape.backward(y, gradient);
          return y.value();
        };
        const Variable here(x, true), weight_here(weight, true), bias_here(bias, true);
        const Variable there(gpu_copy(x, dtype, margin), true), weight_there(to_gpu(weight), true),
            bias_there(to_gpu(bias), true);
        const Tensor expected = run(here, weight_here, bias_here, dy);
        const Tensor actual = run(there, weight_there, bias_there, to_gpu(dy, dtype));
        EXPECT_EQ(actual.dtype(), dtype);
        EXPECT_LT(gpu_error(actual, expected), tolerance(dtype));
        EXPECT_LT(gpu_error(there.gradient(), here.gradient()), 2 * tolerance(dtype));
        EXPECT_LT(gpu_error(weight_there.gradient(), weight_here.gradient()), tolerance(dtype));
        EXPECT_LT(gpu_error(bias_there.gradient(), bias_here.gradient()), 1e-4);
      }
}

}  // namespace
}  // namespace furious
