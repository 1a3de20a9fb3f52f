#include "ops/optim/adamw.h"

#include <cstring>

#include "base/parallel.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::relative_error;
using testing::same_bits;
using testing::tensor_of;
using testing::to_doubles;

using Vector = std::vector<double>;

struct Moments {
  Vector parameter, first, second;
};

void oracle_step(Moments& at, const Vector& gradient, const AdamW& o, int64_t step, double scale) {
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = gradient[i] * scale;
    at.first[i] = o.beta1 * at.first[i] + (1 - o.beta1) * g;
    at.second[i] = o.beta2 * at.second[i] + (1 - o.beta2) * g * g;
    const double first = at.first[i] / (1 - std::pow(o.beta1, step));
    const double second = at.second[i] / (1 - std::pow(o.beta2, step));
    at.parameter[i] -= o.learning_rate * o.weight_decay * at.parameter[i];
    at.parameter[i] -= o.learning_rate * first / (std::sqrt(second) + o.epsilon);
  }
}

TEST(AdamW, FollowsTheOracleOverManySteps) {
  testing::Random random(60);
  for (int64_t count : {1, 2, 3, 7, 15, 16, 17, 33, 100, 257}) {
    const AdamW options{.learning_rate = random.uniform(1e-4, 1e-1),
                        .weight_decay = random.uniform(0, 0.5),
                        .beta1 = random.uniform(0.5, 0.95),
                        .beta2 = random.uniform(0.9, 0.999),
                        .epsilon = 1e-8};
    const Tensor parameter = random.normal_tensor({count});
    const Tensor first = Tensor::zeros({count}, DType::f32);
    const Tensor second = Tensor::zeros({count}, DType::f32);
    Moments expected{to_doubles(parameter), Vector(count), Vector(count)};
    for (int64_t step = 1; step <= 20; ++step) {
      const double scale = random.uniform(0.1, 1);
      const Tensor gradient = random.normal_tensor({count}, std::pow(10.0, random.uniform(-3, 3)));
      adamw_update(parameter, gradient, first, second, options, step, scale);
      oracle_step(expected, to_doubles(gradient), options, step, scale);
    }
    EXPECT_LT(relative_error(parameter, expected.parameter), 2e-6) << count;
    EXPECT_LT(relative_error(first, expected.first), 2e-6) << count;
    EXPECT_LT(relative_error(second, expected.second), 2e-6) << count;
  }
}

TEST(AdamW, FirstStepMovesByTheLearningRate) {
  const Tensor parameter = tensor_of({1, 1, 1}, {3});
  const Tensor moments = Tensor::zeros({2, 3}, DType::f32);
  adamw_update(parameter, tensor_of({1e-3f, -50, 0}, {3}), moments.select(0, 0), moments.select(0, 1),
               {.learning_rate = 0.01}, 1);
  EXPECT_LT(relative_error(parameter, {0.99, 1.01, 1.0}), 1e-6);
}

TEST(AdamW, DecayIsDecoupledFromTheGradient) {
  const Tensor parameter = tensor_of({2}, {1});
  const Tensor first = Tensor::zeros({1}, DType::f32);
  const Tensor second = Tensor::zeros({1}, DType::f32);
  adamw_update(parameter, tensor_of({0}, {1}), first, second, {.learning_rate = 0.1, .weight_decay = 0.5}, 1);
  EXPECT_LT(relative_error(parameter, {1.9}), 1e-7);
  EXPECT_EQ(to_doubles(first), Vector{0});
  EXPECT_EQ(to_doubles(second), Vector{0});
}

TEST(AdamW, LateStepsNeedNoCorrection) {
  Moments expected{{1}, {0.5}, {0.25}};
  const Tensor parameter = tensor_of({1}, {1});
  const Tensor first = tensor_of({0.5f}, {1});
  const Tensor second = tensor_of({0.25f}, {1});
  adamw_update(parameter, tensor_of({1}, {1}), first, second, {}, 1'000'000'000);
  oracle_step(expected, {1}, {}, 1'000'000'000, 1);
  EXPECT_LT(relative_error(parameter, expected.parameter), 1e-7);
}

TEST(AdamW, TinyAndLargeGradientsStayFinite) {
  for (float size : {0.0f, 1e-45f, 1e-30f, 1e-10f, 1e10f, 1e18f}) {
    const Tensor parameter = tensor_of({1, -1}, {2});
    const Tensor first = Tensor::zeros({2}, DType::f32);
    const Tensor second = Tensor::zeros({2}, DType::f32);
    adamw_update(parameter, tensor_of({size, -size}, {2}), first, second, {}, 1);
    EXPECT_TRUE(testing::all_finite(parameter) && testing::all_finite(first) && testing::all_finite(second)) << size;
  }
}

TEST(AdamW, SameBitsForAnyNumberOfThreads) {
  testing::Random random(61);
  constexpr int64_t kCount = 70001;
  const Tensor start = random.normal_tensor({kCount});
  const Tensor gradient = random.normal_tensor({kCount});
  const auto run = [&](int count) {
    const int before = threads();
    set_threads(count);
    const Tensor parameter = to_dtype(start, DType::f32);
    const Tensor first = Tensor::zeros({kCount}, DType::f32);
    const Tensor second = Tensor::zeros({kCount}, DType::f32);
    for (int step = 1; step <= 3; ++step) adamw_update(parameter, gradient, first, second, {}, step, 0.7);
    set_threads(before);
    return parameter;
  };
  const Tensor one = run(1);
  EXPECT_FALSE(same_bits(one, start));
  for (int count : {1, 2, 3, 4}) EXPECT_TRUE(same_bits(one, run(count))) << count;
}

TEST(AdamW, RefusesBadInput) {
  const Tensor x = Tensor::zeros({4}, DType::f32);
  expect_error([&] { adamw_update({}, x, x, x, {}, 1); }, {"adamw", "\"parameter\"", "missing"});
  expect_error([&] { adamw_update(x, {}, x, x, {}, 1); }, {"adamw", "\"gradient\"", "missing"});
  expect_error([&] { adamw_update(x, Tensor::zeros({5}, DType::f32), x, x, {}, 1); }, {"\"gradient\"", "[5]", "[4]"});
  expect_error([&] { adamw_update(x, x, Tensor::zeros({4}, DType::bf16), x, {}, 1); }, {"\"first_moment\"", "bf16"});
  expect_error([&] { adamw_update(x, x, x, Tensor::zeros({2, 2}, DType::f32), {}, 1); }, {"\"second_moment\""});
  expect_error([&] { adamw_update(x, x, x, x, {}, 0); }, {"adamw", "step is 0"});
  expect_error([&] { adamw_update(x, x, x, x, {.beta1 = 1}, 1); }, {"beta1 is 1"});
  expect_error([&] { adamw_update(x, x, x, x, {.beta2 = -0.1}, 1); }, {"beta2 is -0.1"});
  expect_error([&] { adamw_update(x, x, x, x, {.learning_rate = NAN}, 1); }, {"learning rate is nan"});
  expect_error([&] { adamw_update(x, x, x, x, {.weight_decay = -1}, 1); }, {"weight decay is -1"});
  expect_error([&] { adamw_update(x, x, x, x, {.epsilon = 0}, 1); }, {"epsilon is 0"});
  expect_error([&] { adamw_update(x, x, x, x, {}, 1, INFINITY); }, {"gradient scale is inf"});
}

Tensor numbers_of(const AdamWConstants& constants) {
  const Tensor numbers = Tensor::empty({kAdamWConstants}, DType::f32);
  std::memcpy(numbers.raw(), &constants, sizeof(constants));
  return numbers;
}

TEST(ClipGradients, UpdateAppliesTheComputedScale) {
  testing::Random random(64);
  const Tensor gradient = random.normal_tensor({100}), start = random.normal_tensor({100});
  const auto tensors = [&] {
    return std::vector{AdamWTensors{to_dtype(start, DType::f32), gradient, Tensor::zeros({100}, DType::f32),
                                    Tensor::zeros({100}, DType::f32)}};
  };
  const Tensor norm = Tensor::empty({1}, DType::f64);
  const double whole = gradient_norm(std::vector{gradient});
  for (const double most : {0.0, whole / 3, whole * 2}) {
    const auto expected = tensors(), actual = tensors();
    adamw_update(expected, {}, 3, most > 0 && most < whole ? most / whole : 1);
    const Tensor numbers = numbers_of(adamw_constants({}, 3));
    clip_gradients(norm, numbers, std::vector{Tensor(), gradient}, most);
    adamw_update(actual, numbers);
    EXPECT_EQ(*norm.data<double>(), whole);
    EXPECT_TRUE(same_bits(actual[0].parameter, expected[0].parameter)) << most;
  }
}

TEST(ClipGradients, AGradientThatIsNotFiniteChangesNothing) {
  testing::Random random(65);
  for (const float bad : {NAN, INFINITY}) {
    const Tensor gradient = random.normal_tensor({100}), norm = Tensor::empty({1}, DType::f64);
    gradient.data<float>()[7] = bad;
    const Tensor start = random.normal_tensor({100}), parameter = to_dtype(start, DType::f32);
    const Tensor first = Tensor::zeros({100}, DType::f32), second = Tensor::zeros({100}, DType::f32);
    const Tensor numbers = numbers_of(adamw_constants({}, 1));
    clip_gradients(norm, numbers, std::vector{gradient}, 1);
    adamw_update(std::vector{AdamWTensors{parameter, gradient, first, second}}, numbers);
    EXPECT_FALSE(std::isfinite(*norm.data<double>()));
    EXPECT_TRUE(same_bits(parameter, start));
    EXPECT_EQ(to_doubles(first), Vector(100, 0));
  }
}

TEST(GradientNorm, AgreesWithTheOracle) {
  testing::Random random(62);
  std::vector<Tensor> gradients;
  double sum = 0;
  for (int64_t count : {1, 0, 5, 31, 32768, 32769, 70000}) {
    gradients.push_back(random.normal_tensor({count}, std::pow(10.0, random.uniform(-2, 2))));
    for (double value : to_doubles(gradients.back())) sum += value * value;
  }
  gradients.emplace_back();
  EXPECT_NEAR(gradient_norm(gradients) / std::sqrt(sum), 1, 1e-13);
  EXPECT_EQ(gradient_norm({}), 0.0);
}

TEST(GradientNorm, SameBitsForAnyNumberOfThreads) {
  testing::Random random(63);
  const std::vector<Tensor> gradients = {random.normal_tensor({200001}), random.normal_tensor({77, 1001})};
  const auto run = [&](int count) {
    const int before = threads();
    set_threads(count);
    const double norm = gradient_norm(gradients);
    set_threads(before);
    return norm;
  };
  const double one = run(1);
  for (int count : {2, 3, 4}) EXPECT_EQ(one, run(count)) << count;
}

TEST(GradientNorm, IsNotFiniteOnlyForSuchGradients) {
  for (int64_t at : {0, 1, 8, 30, 36}) {
    Tensor gradient = Tensor::zeros({37}, DType::f32);
    float& element = gradient.data<float>()[at];
    const std::vector<Tensor> gradients = {Tensor::zeros({3}, DType::f32), gradient};
    element = NAN;
    EXPECT_TRUE(std::isnan(gradient_norm(gradients)));
    element = -INFINITY;
    EXPECT_EQ(gradient_norm(gradients), INFINITY);
    element = 3e38f;
    EXPECT_NEAR(gradient_norm(gradients) / 3e38, 1, 1e-6);
    element = 1e-40f;
    EXPECT_NEAR(gradient_norm(gradients) / 1e-40, 1, 1e-4);
  }
}

TEST(GradientNorm, RefusesBadInput) {
  expect_error([&] { gradient_norm(std::vector{Tensor::zeros({2}, DType::bf16)}); }, {"gradient_norm", "bf16", "f32"});
  expect_error(
      [&] {
        gradient_norm(std::vector{Tensor::zeros({2, 4}, DType::f32).slice(1, 0, 2)});
      },
      {"gradient_norm", "not contiguous"});
}

}  // namespace
}  // namespace furious
