#include "cuda.h"
#include "ops/nn/linear.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

Tensor rounded(const Tensor& x, DType dtype) {
  return to_dtype(to_dtype(x, dtype), DType::f32);
}

// y, dx, dW, db or dr of two layers that share x, W and b or r: the gradients of both add up.
std::vector<Tensor> run(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& dy,
                        const Tensor& residual = {}) {
  const Variable input(x, true), w(weight, true), b = bias ? Variable(bias, true) : Variable();
  const Variable r = residual ? Variable(residual, true) : Variable();
  Tensor y;
  for (int i = 0; i < 2; ++i) {
    Tape tape;
    const Variable result = linear(tape, input, w, b, MatmulPrecision::f32, r);
    y = result.value();
    tape.backward(result, dy);
  }
  std::vector<Tensor> all{y, input.gradient(), w.gradient()};
  if (bias) all.push_back(b.gradient());
  if (residual) all.push_back(r.gradient());
  return all;
}

TEST(LinearCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (int i = 0; i < 40; ++i) {
    const int64_t batch = random.integer(1, 5), length = random.integer(1, 300);
    const int64_t in = random.integer(1, 90), out = random.integer(1, 90);
    const Tensor x = random.normal_tensor({batch, length, in}), dy = random.normal_tensor({batch, length, out});
    const Tensor weight = random.normal_tensor({out, in}, 1 / std::sqrt(in));
    const Tensor bias = random.coin() ? random.normal_tensor({out}) : Tensor();
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto expected = run(rounded(x, dtype), rounded(weight, dtype), bias, rounded(dy, dtype));
      const auto actual = run(to_gpu(x, dtype), to_gpu(weight), bias ? to_gpu(bias) : Tensor(), to_gpu(dy, dtype));
      for (size_t k = 0; k < expected.size(); ++k) {
        EXPECT_EQ(actual[k].dtype(), k < 2 ? dtype : DType::f32) << k;
        EXPECT_LT(relative_error(to_cpu(actual[k]), expected[k]), tolerance(dtype))
            << k << " " << name_of(dtype) << " " << batch * length << " x " << in << " to " << out;
      }
    }
  }
}

TEST(LinearCuda, AddsAResidual) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (int i = 0; i < 20; ++i) {
    const int64_t rows = random.integer(1, 300), in = random.integer(1, 90), out = random.integer(1, 90);
    const Tensor x = random.normal_tensor({rows, in}), dy = random.normal_tensor({rows, out});
    const Tensor weight = random.normal_tensor({out, in}, 1 / std::sqrt(in)), r = random.normal_tensor({rows, out}, 3);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto expected = run(rounded(x, dtype), rounded(weight, dtype), {}, rounded(dy, dtype), rounded(r, dtype));
      const auto actual = run(to_gpu(x, dtype), to_gpu(weight), {}, to_gpu(dy, dtype), to_gpu(r, dtype));
      for (size_t k = 0; k < expected.size(); ++k)
        EXPECT_LT(relative_error(to_cpu(actual[k]), expected[k]), tolerance(dtype))
            << k << " " << name_of(dtype) << " " << rows << " x " << in << " to " << out;
    }
  }
}

TEST(LinearCuda, FusedLayersMatchTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (int i = 0; i < 10; ++i) {
    const int64_t rows = random.integer(1, 300), in = random.integer(1, 90);
    const std::vector<int64_t> sizes{8 * random.integer(1, 12), random.integer(1, 90)};
    const Tensor x = random.normal_tensor({rows, in}), dy = random.normal_tensor({rows, sizes[0] + sizes[1]});
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto results = [&](auto&& place) {
        Random weights_random(6);
        const Variable input(place(rounded(x, dtype), dtype), true);
        std::vector<Variable> weights;
        for (const int64_t size : sizes)
          weights.emplace_back(
              place(rounded(weights_random.normal_tensor({size, in}, 1 / std::sqrt(in)), dtype), DType::f32), true);
        Tape tape;
        const Variable y = joined_linear(tape, input, weights);
        tape.backward(y, place(rounded(dy, dtype), dtype));
        return std::vector{y.value(), input.gradient(), weights[0].gradient(), weights[1].gradient()};
      };
      const auto expected = results([](const Tensor& t, DType) { return t; });
      const auto actual = results([](const Tensor& t, DType to) { return to_gpu(t, to); });
      for (size_t k = 0; k < expected.size(); ++k)
        EXPECT_LT(relative_error(to_cpu(actual[k]), expected[k]), tolerance(dtype))
            << k << " " << name_of(dtype) << " " << rows << " x " << in << " to " << sizes[0] << " + " << sizes[1];
    }
  }
}

TEST(LinearCuda, BiasOfManyRowsAndOfNone) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const int64_t rows : {0, 1, 63, 64, 65, 40000}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor dy = random.normal_tensor({rows, 37});
      const Tensor expected = Tensor::zeros({37}, DType::f32);
      linear_backward_bias({expected, false}, rounded(dy, dtype));
      const Tensor actual = Tensor::zeros({37}, DType::f32, kGpu);
      linear_backward_bias({actual, false}, to_gpu(dy, dtype));
      EXPECT_LT(relative_error(to_cpu(actual), expected), 1e-5) << rows;
    }
  }
}

TEST(LinearCuda, WeightsOfOtherDtypes) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const Tensor x = random.normal_tensor({5, 20}), weight = random.normal_tensor({7, 20});
  for (const DType dtype : {DType::bf16, DType::f16})
    EXPECT_LT(relative_error(to_cpu(linear_forward(to_gpu(x), to_gpu(weight, dtype))),
                             linear_forward(x, to_dtype(weight, dtype))),
              1e-5);
  expect_error([&] { linear_forward(x, to_gpu(weight)); }, {"linear", "\"x\"", "cpu", "cuda:0"});
}

}  // namespace
}  // namespace furious
