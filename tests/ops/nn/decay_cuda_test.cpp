#include "ops/nn/decay.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

constexpr Activation kFunctions[] = {Activation::softplus, Activation::softplus2, Activation::silu, Activation::sigmoid,
                                     Activation::log_sigmoid};

TEST(DecayCuda, HeadFunctionsMatchTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (bool biased : {false, true})
        for (const Shape& shape : {Shape{1, 1, 1}, Shape{2, 9, 16}, Shape{1, 5000, 24}, Shape{3, 7, 13}}) {
          HeadFunction function{.f = random.pick<Activation>({std::begin(kFunctions), std::end(kFunctions)}),
                                .factor = random.pick<float>({-1, 1, -2})};
          if (random.coin()) function.limit = 0.4f;
          if (random.coin()) function.least = 0.2f;
          const Tensor x = rounded(random.normal_tensor(shape, 5), dtype), dy = random.normal_tensor(shape);
          const Tensor bias = biased ? random.normal_tensor({shape[2]}) : Tensor();
          const Tensor x_there = gpu_copy(x, dtype, margin), bias_there = biased ? to_gpu(bias) : Tensor();
          const Tensor y = head_function_forward(x_there, bias_there, function);
          EXPECT_EQ(y.dtype(), DType::f32);
          EXPECT_LT(gpu_error(y, head_function_forward(x, bias, function)), 1e-5) << to_string(shape) << margin;

          const HeadFunctionGradients expected{Tensor::empty_like(x), biased ? Tensor::empty_like(bias) : Tensor()};
          head_function_backward(expected, dy, x, bias, function);
          const auto gradients = [&] {
            const HeadFunctionGradients out{gpu_empty(shape, dtype, margin),
                                            biased ? gpu_empty(bias.shape(), DType::f32) : Tensor()};
            head_function_backward(out, gpu_copy(dy, DType::f32, margin), x_there, bias_there, function);
            return out;
          };
          const HeadFunctionGradients actual = gradients(), again = gradients();
          EXPECT_LT(gpu_error(actual.x, expected.x), tolerance(dtype)) << to_string(shape) << margin;
          if (!biased) continue;
          EXPECT_LT(gpu_error(actual.bias, expected.bias), 1e-4) << to_string(shape) << margin;
          EXPECT_TRUE(same_gpu_bits(actual.bias, again.bias));
        }
}

TEST(DecayCuda, HeadFunctionsAreAccurateAtTheTails) {
  SKIP_WITHOUT_GPU();
  const Tensor x = tensor_of({-80, -20, 0, 20, 1000}, {1, 1, 5});
  for (const Activation f : kFunctions) {
    const Tensor expected = head_function_forward(x, {}, {.f = f});
    const Tensor actual = to_cpu(head_function_forward(to_gpu(x), {}, {.f = f}));
    for (int i = 0; i < 5; ++i)
      EXPECT_NEAR(actual.data<float>()[i], expected.data<float>()[i], 1e-5f * std::fabs(expected.data<float>()[i]))
          << "at " << x.data<float>()[i];
  }
}

TEST(DecayCuda, OriginalDecayMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (const Shape& shape : {Shape{1, 1, 1}, Shape{2, 9, 16}, Shape{1, 5000, 24}, Shape{3, 7, 13}}) {
        const Tensor dt = rounded(random.uniform_tensor(shape, 0.01, 2), dtype), da = random.normal_tensor(shape);
        const Tensor a_log = random.normal_tensor({shape[2]});
        const Tensor dt_there = gpu_copy(dt, dtype, margin);
        const Tensor a = original_decay_forward(dt_there, to_gpu(a_log), 2);
        EXPECT_EQ(a.dtype(), DType::f32);
        EXPECT_LT(gpu_error(a, original_decay_forward(dt, a_log, 2)), 1e-5) << to_string(shape) << margin;

        const OriginalDecayGradients expected{Tensor::empty_like(dt), Tensor::empty_like(a_log)};
        original_decay_backward(expected, da, dt, a_log, 2);
        const OriginalDecayGradients actual{gpu_empty(shape, dtype, margin), gpu_empty(a_log.shape(), DType::f32)};
        original_decay_backward(actual, to_gpu(da), dt_there, to_gpu(a_log), 2);
        EXPECT_LT(gpu_error(actual.dt, expected.dt), tolerance(dtype)) << to_string(shape) << margin;
        EXPECT_LT(gpu_error(actual.a_log, expected.a_log), 1e-4) << to_string(shape) << margin;
      }
}

TEST(DecayCuda, DiscretizationMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (const Shape& shape : {Shape{1, 1, 1, 1}, Shape{2, 9, 4, 64}, Shape{3, 7, 5, 13}, Shape{1, 3, 2, 600}}) {
        const Tensor v = rounded(random.normal_tensor(shape), dtype), dy = rounded(random.normal_tensor(shape), dtype);
        const Tensor dt = random.uniform_tensor({shape[0], shape[1], shape[2]}, 0.01, 2);
        const Tensor v_there = gpu_copy_heads(v, dtype, margin);
        const Tensor y = discretize_forward(v_there, to_gpu(dt));
        EXPECT_EQ(y.dtype(), dtype);
        EXPECT_LT(gpu_error(y, discretize_forward(v, dt)), tolerance(dtype)) << to_string(shape) << margin;

        const DiscretizeGradients expected{Tensor::empty_like(v), Tensor::empty_like(dt)};
        discretize_backward(expected, dy, v, dt);
        const DiscretizeGradients actual{gpu_empty_heads(shape, dtype, margin), gpu_empty(dt.shape(), DType::f32)};
        discretize_backward(actual, to_gpu(dy, dtype), v_there, to_gpu(dt));
        EXPECT_LT(gpu_error(actual.v, expected.v), tolerance(dtype)) << to_string(shape) << margin;
        EXPECT_LT(gpu_error(actual.dt, expected.dt), 1e-4) << to_string(shape) << margin;
      }
}

TEST(DecayCuda, ResidualMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (const Shape& shape :
           {Shape{1, 1, 1, 1}, Shape{2, 9, 4, 64}, Shape{3, 7, 5, 13}, Shape{2, 500, 24, 64}, Shape{1, 9, 8, 520}}) {
        const Tensor o = rounded(random.normal_tensor(shape), dtype), v = rounded(random.normal_tensor(shape), dtype);
        const Tensor dy = rounded(random.normal_tensor(shape), dtype), d = random.normal_tensor({shape[2], shape[3]});
        const Tensor v_there = gpu_copy_heads(v, dtype, margin);
        const Tensor y = d_residual_forward(to_gpu(o, dtype), v_there, to_gpu(d));
        EXPECT_EQ(y.dtype(), dtype);
        EXPECT_LT(gpu_error(y, d_residual_forward(o, v, d)), tolerance(dtype)) << to_string(shape) << margin;

        const DResidualGradients expected{Tensor::empty_like(v), Tensor::empty_like(d)};
        d_residual_backward(expected, dy, v, d);
        const auto gradients = [&] {
          const DResidualGradients out{gpu_empty_heads(shape, dtype, margin), gpu_empty(d.shape(), DType::f32)};
          d_residual_backward(out, to_gpu(dy, dtype), v_there, to_gpu(d));
          return out;
        };
        const DResidualGradients actual = gradients(), again = gradients();
        EXPECT_LT(gpu_error(actual.v, expected.v), tolerance(dtype)) << to_string(shape) << margin;
        EXPECT_LT(gpu_error(actual.d, expected.d), 1e-4) << to_string(shape) << margin;
        EXPECT_TRUE(same_gpu_bits(actual.d, again.d));
      }
}

TEST(DecayCuda, RecordsItsGradients) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  const Shape shape{2, 5, 3};
  const Tensor x = rounded(random.normal_tensor(shape), DType::bf16), bias = random.normal_tensor({3});
  const Tensor a_log = random.normal_tensor({3}), da = random.normal_tensor(shape);
  const auto gradients = [](const Variable& input, const Variable& shift, const Variable& rates,
                            const Tensor& gradient) {
    Tape tape;
    tape.backward(original_decay(tape, head_function(tape, input, shift, {}), rates), gradient);
  };
  const Variable x_here(x, true), bias_here(bias, true), a_log_here(a_log, true);
  const Variable x_there(to_gpu(x, DType::bf16), true), bias_there(to_gpu(bias), true),
      a_log_there(to_gpu(a_log), true);
  gradients(x_here, bias_here, a_log_here, da);
  gradients(x_there, bias_there, a_log_there, to_gpu(da));
  EXPECT_LT(gpu_error(x_there.gradient(), x_here.gradient()), tolerance(DType::bf16));
  EXPECT_LT(gpu_error(bias_there.gradient(), bias_here.gradient()), 1e-4);
  EXPECT_LT(gpu_error(a_log_there.gradient(), a_log_here.gradient()), 1e-4);
}

}  // namespace
}  // namespace furious
