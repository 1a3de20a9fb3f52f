#include "ops/symmetric_square.h"

#include <numeric>

#include "strided.h"

namespace furious {
namespace {

using testing::relative_error;
using testing::to_doubles;
using Values = std::vector<double>;

Values oracle(const Values& x, int64_t d) {
  Values y;
  for (size_t row = 0; row < x.size(); row += d)
    for (int64_t i = 0; i < d; ++i)
      for (int64_t j = i; j < d; ++j) y.push_back(x[row + i] * x[row + j] * (i == j ? 1 : std::sqrt(2.0)));
  return y;
}

TEST(SymmetricSquare, ValueAndGradientMatchTheOracle) {
  testing::Random random(1);
  for (int round = 0; round < 20; ++round) {
    const int64_t d = random.integer(1, 35);
    const Shape shape{random.integer(1, 2), random.integer(1, 3), d};
    const Tensor x = random.normal_tensor(shape);
    const Tensor y = symmetric_square_forward(testing::strided_copy(x));
    EXPECT_EQ(y.shape(), (Shape{shape[0], shape[1], d * (d + 1) / 2}));
    EXPECT_LT(relative_error(y, oracle(to_doubles(x), d)), 1e-6);
    const Tensor dy = random.normal_tensor(y.shape());
    const Tensor dx = testing::strided_empty(shape);
    symmetric_square_backward(dx, dy, testing::strided_copy(x));
    const Values expected =
        testing::numeric_gradient([&](const Values& at) { return oracle(at, d); }, to_doubles(x), to_doubles(dy));
    EXPECT_LT(relative_error(dx, expected), 2e-6);
  }
}

TEST(SymmetricSquare, ProductOfFeaturesIsSquareOfProduct) {
  testing::Random random(2);
  const Values q = to_doubles(random.normal_tensor({64})), k = to_doubles(random.normal_tensor({64}));
  const auto features = [](const Values& x) {
    return to_doubles(symmetric_square_forward(testing::tensor_of(std::vector<float>(x.begin(), x.end()), {64})));
  };
  const Values a = features(q), b = features(k);
  const double dot = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
  ASSERT_EQ(a.size(), 2080u);
  EXPECT_NEAR(std::inner_product(a.begin(), a.end(), b.begin(), 0.0), dot * dot, 1e-5 * (1 + dot * dot));
}

TEST(SymmetricSquare, RecordsItsGradient) {
  testing::Random random(3);
  const Variable x(random.normal_tensor({3, 9}), true);
  const Tensor dy = random.normal_tensor({3, 45});
  const Tensor expected = Tensor::empty_like(x.value());
  symmetric_square_backward(expected, dy, x.value());
  Tape tape;
  tape.backward(symmetric_square(tape, x), dy);
  EXPECT_TRUE(testing::same_bits(x.gradient(), expected));
}

TEST(SymmetricSquare, BadArgumentsAreNamed) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  testing::expect_error([&] { symmetric_square_forward(to_dtype(x, DType::f16)); },
                        {"symmetric_square", "\"x\"", "f16"});
  testing::expect_error([&] { symmetric_square_backward(x, x, x); },
                        {"symmetric_square backward", "\"dy\"", "[2, 3]", "[2, 6]"});
}

}  // namespace
}  // namespace furious
