#include "ops/nn/rope.h"

#include <numeric>

#include "strided.h"

namespace furious {
namespace {

using testing::dense;
using testing::int_tensor_of;
using testing::relative_error;
using testing::same_bits;
using testing::strided_copy;
using testing::to_doubles;

std::vector<double> oracle(const std::vector<double>& x, const Shape& shape, const Rope& rope,
                           const std::vector<int32_t>& starts = {}) {
  const int64_t length = shape[1], heads = shape[2], dim = shape[3];
  std::vector<double> y(x.size());
  for (int64_t token = 0; token < shape[0] * length; ++token) {
    int64_t begin = token / length * length;
    const int64_t row = begin;
    for (int32_t start : starts)
      if (start <= token) begin = std::max<int64_t>(begin, start);
    const double position = static_cast<double>(token - begin + (begin == row ? rope.offset : 0));
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < dim / 2; ++i) {
        const bool halves = rope.pairing == RopePairing::halves;
        const int64_t at = (token * heads + head) * dim;
        const int64_t first = at + (halves ? i : 2 * i);
        const int64_t second = at + (halves ? i + dim / 2 : 2 * i + 1);
        double omega = std::pow(rope.base, -2.0 * i / dim);
        const auto& [factor, low, high, original] = rope.scaling;
        const double s = original > 0 ? std::clamp((original * omega / (2 * M_PI) - low) / (high - low), 0.0, 1.0) : 0;
        omega *= s + (1 - s) / factor;
        const double angle = position * omega;
        y[first] = x[first] * std::cos(angle) - x[second] * std::sin(angle);
        y[second] = x[second] * std::cos(angle) + x[first] * std::sin(angle);
      }
  }
  return y;
}

class RopeTest : public ::testing::TestWithParam<RopePairing> {};
INSTANTIATE_TEST_SUITE_P(Pairings, RopeTest, ::testing::Values(RopePairing::halves, RopePairing::interleaved));

TEST_P(RopeTest, ValueAndGradientMatchTheOracle) {
  testing::Random random(1);
  for (int round = 0; round < 25; ++round) {
    const Shape shape{random.integer(1, 3), random.integer(1, 9), random.integer(1, 3), 2 * random.integer(1, 20)};
    Rope rope{GetParam(), random.pick<double>({100, 10000}), random.pick<int64_t>({0, 5, 1000})};
    rope.scaling = random.pick<RopeScaling>({{}, {4, 0, 0, 0}, {8, 1, 4, 64}, {32, 1, 4, 8192}});
    std::vector<int32_t> starts;
    for (int32_t token = 0; token < shape[0] * shape[1]; ++token)
      if (random.integer(0, 3) == 0) starts.push_back(token);
    const Tensor boundaries = int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
    const Tensor x = random.normal_tensor(shape);
    const Tensor dy = random.normal_tensor(shape);
    const auto f = [&](const std::vector<double>& at) { return oracle(at, shape, rope, starts); };
    EXPECT_LT(relative_error(rope_forward(strided_copy(x), rope, boundaries), f(to_doubles(x))), 1e-6);
    const Tensor dx = testing::strided_empty(shape);
    rope_backward(dx, dy, rope, boundaries);
    EXPECT_LT(relative_error(dx, testing::numeric_gradient(f, to_doubles(x), to_doubles(dy))), 1e-6);
  }
}

TEST_P(RopeTest, AnglesAreAccurateAtAMillionTokens) {
  testing::Random random(2);
  const Shape shape{1, 200, 1, 64};
  const Tensor x = random.normal_tensor(shape);
  const Rope rope{GetParam(), 10000, 999'937};
  EXPECT_LT(relative_error(rope_forward(x, rope), oracle(to_doubles(x), shape, rope)), 2e-7);
}

TEST_P(RopeTest, OffsetContinuesASequence) {
  testing::Random random(3);
  const Tensor x = random.normal_tensor({2, 150, 2, 6});
  const Tensor whole = rope_forward(x, {GetParam(), 10000, 0});
  const Tensor tail = rope_forward(x.slice(1, 128, 22), {GetParam(), 10000, 128});
  EXPECT_TRUE(same_bits(dense(whole.slice(1, 128, 22)), tail));
}

// A step: each row is at the position of its slot.
TEST_P(RopeTest, RowsStartAtThePositionsOfTheirSlots) {
  testing::Random random(6);
  const Tensor x = random.normal_tensor({3, 1, 2, 6});
  const Tensor records = int_tensor_of({0, 7, 0, 123456, 0, 0, 0, 64}, {4, 2});  // of which the second column counts
  const Tensor rows = int_tensor_of({3, 1, 0}, {3});
  const Tensor y = rope_forward(x, {GetParam(), 10000, 2, records.select(1, 1), rows});
  for (const auto& [row, position] : {std::pair<int64_t, int64_t>{0, 64}, {1, 123456}, {2, 7}})
    EXPECT_TRUE(
        same_bits(dense(y.slice(0, row, 1)), rope_forward(x.slice(0, row, 1), {GetParam(), 10000, 2 + position})))
        << row;
}

TEST_P(RopeTest, RecordsItsGradient) {
  testing::Random random(4);
  const Variable x(random.normal_tensor({1, 4, 2, 6}), true);
  const Tensor dy = random.normal_tensor({1, 4, 2, 6});
  const Rope spec{GetParam(), 10000, 7};
  const Tensor boundaries = int_tensor_of({2}, {1});
  const Tensor expected = Tensor::empty_like(dy);
  rope_backward(expected, dy, spec, boundaries);
  Tape tape;
  tape.backward(rope(tape, x, spec, boundaries), dy);
  EXPECT_TRUE(same_bits(x.gradient(), expected));
}

// The score of two tokens depends on their distance alone.
TEST_P(RopeTest, ScoresAreRelative) {
  testing::Random random(5);
  const Tensor q = random.normal_tensor({1, 1, 1, 16}), k = random.normal_tensor({1, 1, 1, 16});
  const auto score = [&](int64_t i, int64_t j) {
    const auto a = to_doubles(rope_forward(q, {GetParam(), 10000, i}));
    const auto b = to_doubles(rope_forward(k, {GetParam(), 10000, j}));
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  EXPECT_NEAR(score(9, 2), score(1009, 1002), 1e-5);
  EXPECT_GT(std::fabs(score(9, 2) - score(9, 5)), 1e-3);
}

TEST(Rope, BadArgumentsAreNamed) {
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  testing::expect_error([&] { rope_forward(zeros({1, 2, 3, 5}), {}); }, {"rope", "\"x\"", "[1, 2, 3, 5]", "even"});
  testing::expect_error([&] { rope_forward(zeros({1, 2, 3}), {}); }, {"rope", "\"x\"", "rank 3"});
  testing::expect_error([&] { rope_forward(zeros({1, 2, 3, 4}), {.offset = -1}); }, {"rope", "offset is -1"});
  testing::expect_error([&] { rope_forward(zeros({1, 2, 3, 4}), {.base = 0}); }, {"rope", "base is 0"});
  const Tensor two = int_tensor_of({1, 2}, {2});
  testing::expect_error([&] { rope_forward(zeros({2, 1, 3, 4}), {.positions = two}); }, {"rope", "positions", "rows"});
  testing::expect_error(
      [&] {
        rope_forward(zeros({2, 1, 3, 4}), {.positions = two, .rows = two});
      },
      {"rope", "slot 2", "0 to 1"});
  testing::expect_error(
      [&] {
        rope_forward(zeros({1, 1, 3, 4}), {.positions = two, .rows = two});
      },
      {"rope", "\"rows\"", "[2]", "[1]"});
  testing::expect_error(
      [&] {
        rope_forward(zeros({1, 2, 3, 4}), {}, int_tensor_of({2}, {1}));
      },
      {"rope", "\"boundaries\"", "2"});
}

}  // namespace
}  // namespace furious
