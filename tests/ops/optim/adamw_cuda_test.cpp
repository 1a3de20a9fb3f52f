#include "cuda.h"
#include "ops/optim/adamw.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

AdamWTensors on_gpu(const AdamWTensors& t) {
  return {to_gpu(t.parameter), to_gpu(t.gradient), to_gpu(t.first_moment), to_gpu(t.second_moment)};
}

void compare(const std::vector<AdamWTensors>& here, const std::vector<AdamWTensors>& there) {
  const AdamW options{.learning_rate = 0.01, .weight_decay = 0.1};
  for (int step = 1; step <= 3; ++step) {
    adamw_update(here, options, step, 0.7);
    adamw_update(there, options, step, 0.7);
  }
  for (size_t i = 0; i < here.size(); ++i) {
    ASSERT_LT(relative_error(to_cpu(there[i].parameter), here[i].parameter), 1e-6) << i;
    ASSERT_LT(relative_error(to_cpu(there[i].first_moment), here[i].first_moment), 1e-6) << i;
    ASSERT_LT(relative_error(to_cpu(there[i].second_moment), here[i].second_moment), 1e-6) << i;
  }
}

TEST(AdamWCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  std::vector<AdamWTensors> here, there;
  std::vector<int64_t> sizes{0, 1, 3, 4, 5, 8191, 8192, 8193, 100001};
  for (int i = 0; i < 1300; ++i) sizes.push_back(random.integer(1, 9));  // more than one launch holds
  for (const int64_t size : sizes) {
    here.push_back({random.normal_tensor({size}), random.normal_tensor({size}), Tensor::zeros({size}, DType::f32),
                    Tensor::zeros({size}, DType::f32)});
    there.push_back(on_gpu(here.back()));
  }
  compare(here, there);
}

TEST(AdamWCuda, AnyAlignment) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (int64_t shift = 0; shift < 4; ++shift) {
    const AdamWTensors whole{random.normal_tensor({9000}), random.normal_tensor({9000}),
                             Tensor::zeros({9000}, DType::f32), Tensor::zeros({9000}, DType::f32)};
    const AdamWTensors copied = on_gpu(whole);
    const auto part = [&](const AdamWTensors& t) {
      return AdamWTensors{t.parameter.slice(0, shift, 8995), t.gradient.slice(0, 0, 8995),
                          t.first_moment.slice(0, 1, 8995), t.second_moment.slice(0, 4, 8995)};
    };
    compare({part(whole)}, {part(copied)});
    EXPECT_LT(relative_error(to_cpu(copied.parameter), whole.parameter), 1e-6);  // and nothing beside it
  }
}

TEST(AdamWCuda, ClippingOnTheDeviceScalesAsTheHostDoes) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const float bad : {0.0f, INFINITY}) {
    const Tensor gradient = random.normal_tensor({20000});
    const AdamWTensors here{random.normal_tensor({20000}), gradient, Tensor::zeros({20000}, DType::f32),
                            Tensor::zeros({20000}, DType::f32)};
    const AdamWTensors expected = on_gpu(here), actual = on_gpu(here);
    const double whole = gradient_norm(std::vector{expected.gradient});
    if (bad == 0) adamw_update(std::vector{expected}, {}, 2, 0.5 / whole);
    if (bad != 0) fill(actual.gradient.slice(0, 19999, 1), bad);
    const Tensor numbers = Tensor::empty({kAdamWConstants}, DType::f32, kGpu),
                 norm = Tensor::empty({1}, DType::f64, kGpu);
    const AdamWConstants constants = adamw_constants({}, 2);
    memory::copy(kGpu, numbers.raw(), {}, &constants, sizeof(constants));
    clip_gradients(norm, numbers, std::vector{actual.gradient}, 0.5);
    adamw_update(std::vector{actual}, numbers);
    EXPECT_TRUE(same_bits(to_cpu(actual.parameter), to_cpu(expected.parameter))) << bad;
    EXPECT_EQ(*to_cpu(norm).data<double>() == whole, bad == 0);
  }
}

TEST(AdamWCuda, GradientNorm) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  std::vector<Tensor> here, there;
  for (int i = 0; i < 1400; ++i) {
    const int64_t size = i % 200 == 0 ? random.integer(8000, 70000) : random.integer(0, 40);
    here.push_back(i % 7 == 3 ? Tensor() : random.normal_tensor({size}, std::pow(10.0, random.uniform(-15, 15))));
    there.push_back(here.back() ? to_gpu(here.back()) : Tensor());
  }
  const double norm = gradient_norm(there);
  EXPECT_NEAR(norm / gradient_norm(here), 1, 1e-12);
  EXPECT_EQ(norm, gradient_norm(there));
  for (const float bad : {NAN, INFINITY}) {
    there[1399] = to_gpu(tensor_of({1, bad}, {2}));
    EXPECT_FALSE(std::isfinite(gradient_norm(there)));
  }
}

}  // namespace
}  // namespace furious
