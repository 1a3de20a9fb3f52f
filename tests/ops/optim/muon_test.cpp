#include "ops/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/parallel.h"
#include "support.h"

namespace furious {
namespace {

using testing::all_finite;
using testing::expect_error;
using testing::relative_error;
using testing::same_bits;
using testing::to_doubles;

using Vector = std::vector<double>;

Tensor numbers_of(const AdamW& options, int64_t step, double scale) {
  const AdamWConstants constants = adamw_constants(options, step, scale);
  const Tensor numbers = Tensor::empty({kAdamWConstants}, DType::f32);
  std::memcpy(numbers.raw(), &constants, sizeof(constants));
  return numbers;
}

struct Matrix {
  int64_t rows, columns;
  Vector values;

  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * columns + j)]; }
  Matrix transposed() const {
    Matrix out{columns, rows, Vector(values.size())};
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) out.values[static_cast<size_t>(j * rows + i)] = at(i, j);
    return out;
  }
};

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix out{a.rows, b.columns, Vector(static_cast<size_t>(a.rows * b.columns))};
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < b.columns; ++j)
      for (int64_t k = 0; k < a.columns; ++k)
        out.values[static_cast<size_t>(i * b.columns + j)] += a.at(i, k) * b.at(k, j);
  return out;
}

// Always in the wide orientation, which must not matter.
Matrix orthogonal_oracle(Matrix x) {
  const bool tall = x.rows > x.columns;
  if (tall) x = x.transposed();
  double squares = 0;
  for (const double value : x.values) squares += value * value;
  for (double& value : x.values) value /= std::sqrt(squares) + 1e-7;
  for (int step = 0; step < 5; ++step) {
    const Matrix a = product(x, x.transposed()), a_squared = product(a, a);
    Matrix b = a;
    for (size_t i = 0; i < b.values.size(); ++i) b.values[i] = -4.7750 * a.values[i] + 2.0315 * a_squared.values[i];
    const Matrix bx = product(b, x);
    for (size_t i = 0; i < x.values.size(); ++i) x.values[i] = 3.4445 * x.values[i] + bx.values[i];
  }
  return tall ? x.transposed() : x;
}

TEST(Muon, FollowsTheOracleOverManySteps) {
  testing::Random random(70);
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 9}, {9, 1}, {3, 5}, {5, 3}, {16, 16}, {7, 40}, {40, 7}, {33, 64}}) {
    const AdamW options{.learning_rate = random.uniform(1e-3, 1e-1), .weight_decay = random.uniform(0, 0.5)};
    const double mu = random.uniform(0.5, 0.98);
    const MuonTensors tensors{random.normal_tensor({rows, columns}), {}, Tensor::zeros({rows, columns}, DType::f32)};
    Vector parameter = to_doubles(tensors.parameter), momentum(parameter.size());
    for (int64_t step = 1; step <= 8; ++step) {
      const double scale = random.uniform(0.1, 1);
      MuonTensors now = tensors;
      now.gradient = random.normal_tensor({rows, columns}, std::pow(10.0, random.uniform(-3, 3)));
      muon_update(std::span(&now, 1), numbers_of(options, step, scale), mu);
      const Vector gradient = to_doubles(now.gradient);
      Matrix direction{rows, columns, Vector(parameter.size())};
      for (size_t i = 0; i < parameter.size(); ++i) {
        momentum[i] = mu * momentum[i] + scale * gradient[i];
        direction.values[i] = scale * gradient[i] + mu * momentum[i];
      }
      direction = orthogonal_oracle(direction);
      const double factor = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
      for (size_t i = 0; i < parameter.size(); ++i)
        parameter[i] = (1 - options.learning_rate * options.weight_decay) * parameter[i] -
                       options.learning_rate * factor * direction.values[i];
    }
    EXPECT_LT(relative_error(tensors.parameter, parameter), 2e-5) << rows << " x " << columns;
    EXPECT_LT(relative_error(tensors.momentum, momentum), 2e-6) << rows << " x " << columns;
  }
}

// A step moves all directions alike: singular values are between 0.7 and 1.2.
TEST(Muon, DirectionsAreNearlyOrthogonal) {
  testing::Random random(71);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{8, 64}, {64, 8}, {4, 300}}) {
    const Tensor x = random.normal_tensor({rows, columns}, 1e3);
    orthogonalize(x);
    const Matrix found{rows, columns, to_doubles(x)};
    const Matrix wide = rows <= columns ? found.transposed() : found;  // its columns are independent
    for (int i = 0; i < 20; ++i) {
      const Matrix v{wide.columns, 1, to_doubles(random.normal_tensor({wide.columns}))};
      const auto norm = [](const Vector& of) {
        double sum = 0;
        for (const double value : of) sum += value * value;
        return std::sqrt(sum);
      };
      const double stretched = norm(product(wide, v).values) / norm(v.values);
      EXPECT_GT(stretched, 0.65);
      EXPECT_LT(stretched, 1.25);
    }
  }
}

TEST(Muon, StepsWithoutAGradientOrWithABadOne) {
  testing::Random random(72);
  const Tensor start = random.normal_tensor({4, 6}), zeros = Tensor::zeros({4, 6}, DType::f32);
  const auto update = [&](const Tensor& gradient, float scale) {
    const MuonTensors tensors{to_dtype(start, DType::f32), gradient, Tensor::zeros({4, 6}, DType::f32)};
    const Tensor numbers = numbers_of({.learning_rate = 0.1}, 1, 1);
    numbers.data<float>()[0] = scale;
    muon_update(std::span(&tensors, 1), numbers, 0.95);
    return tensors;
  };
  EXPECT_TRUE(same_bits(update(zeros, 1).parameter, start));
  const MuonTensors skipped = update(random.normal_tensor({4, 6}), NAN);
  EXPECT_TRUE(same_bits(skipped.parameter, start));
  EXPECT_TRUE(same_bits(skipped.momentum, zeros));
  for (const double size : {1e-30, 1e-12, 1e15})
    EXPECT_TRUE(all_finite(update(random.normal_tensor({4, 6}, size), 1).parameter));
}

TEST(Muon, SameBitsForAnyNumberOfThreads) {
  testing::Random random(73);
  const Tensor start = random.normal_tensor({150, 260}), gradient = random.normal_tensor({150, 260});
  const auto run = [&](int count) {
    const ThreadLimit limit(count);
    const MuonTensors tensors{to_dtype(start, DType::f32), gradient, Tensor::zeros({150, 260}, DType::f32)};
    for (int64_t step = 1; step <= 2; ++step) muon_update(std::span(&tensors, 1), numbers_of({}, step, 1), 0.9);
    return tensors.parameter;
  };
  const Tensor one = run(1);
  EXPECT_FALSE(same_bits(one, start));
  for (const int count : {2, 3, 4}) EXPECT_TRUE(same_bits(one, run(count))) << count;
}

TEST(Muon, RefusesBadInput) {
  const Tensor x = Tensor::zeros({4, 2}, DType::f32), numbers = numbers_of({}, 1, 1);
  const auto update = [&](const MuonTensors& tensors) { muon_update(std::span(&tensors, 1), numbers, 0.9); };
  expect_error([&] { update({Tensor::zeros({4}, DType::f32), x, x}); }, {"muon", "\"parameter\""});
  expect_error([&] { update({x, Tensor::zeros({2, 4}, DType::f32), x}); }, {"muon", "\"gradient\"", "[2, 4]"});
  expect_error([&] { update({x, x, Tensor::zeros({4, 2}, DType::bf16)}); }, {"muon", "\"momentum\"", "bf16"});
}

}  // namespace
}  // namespace furious
