#include "ops/nn/conv.h"

#include "strided.h"

namespace furious {
namespace {

using testing::dense;
using testing::int_tensor_of;
using testing::relative_error;
using testing::same_bits;
using testing::strided_copy;
using testing::to_doubles;

struct Case {
  int64_t batch, length, channels, window;
  Activation activation;
  std::vector<int32_t> starts;

  Tensor boundaries() const { return int_tensor_of(starts, {static_cast<int64_t>(starts.size())}); }
  Shape shape() const { return {batch, length, channels}; }
  // Whether a document starts at this token of this row.
  bool starts_at(int64_t row, int64_t token) const {
    return token == 0 || std::count(starts.begin(), starts.end(), row * length + token) > 0;
  }
};

double activated(double x, Activation activation) {
  if (activation == Activation::relu) return std::max(x, 0.0);
  return activation == Activation::silu ? x / (1 + std::exp(-x)) : x;
}

std::vector<double> oracle(const Case& c, const std::vector<double>& x, const std::vector<double>& weight,
                           const std::vector<double>& bias) {
  std::vector<double> y;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t t = 0; t < c.length; ++t)
      for (int64_t channel = 0; channel < c.channels; ++channel) {
        double sum = bias[channel];
        for (int64_t back = 0; back < c.window && t - back >= 0; ++back) {
          sum +=
              weight[channel * c.window + c.window - 1 - back] * x[((b * c.length) + t - back) * c.channels + channel];
          if (c.starts_at(b, t - back)) break;
        }
        y.push_back(activated(sum, c.activation));
      }
  return y;
}

Case random_case(testing::Random& random) {
  Case c{random.integer(1, 3),
         random.integer(1, 12),
         random.integer(1, 21),
         random.integer(2, 4),
         random.pick<Activation>({Activation::none, Activation::relu, Activation::silu}),
         {}};
  const int64_t rarity = random.integer(0, 4);
  for (int32_t token = 0; token < c.batch * c.length; ++token)
    if (random.integer(0, rarity) == 0 && rarity < 4) c.starts.push_back(token);
  return c;
}

struct Data {
  Data(testing::Random& random, const Case& c)
      : x(random.normal_tensor(c.shape())),
        weight(random.normal_tensor({c.channels, c.window})),
        bias(random.normal_tensor({c.channels})),
        dy(random.normal_tensor(c.shape())) {}
  Tensor x, weight, bias, dy;
};

ConvGradients gradients_of(const Case& c, const Data& data) {
  const ConvGradients out{testing::strided_empty(c.shape()), Tensor::empty_like(data.weight),
                          Tensor::empty_like(data.bias)};
  conv_backward(out, data.dy, strided_copy(data.x), data.weight, data.bias, c.activation, c.boundaries());
  return out;
}

TEST(Conv, MatchesTheOracle) {
  testing::Random random(1);
  for (int round = 0; round < 60; ++round) {
    const Case c = random_case(random);
    const Data data(random, c);
    const auto expected = oracle(c, to_doubles(data.x), to_doubles(data.weight), to_doubles(data.bias));
    const Tensor y = conv_forward(strided_copy(data.x), data.weight, data.bias, c.activation, c.boundaries());
    EXPECT_LT(relative_error(y, expected, 1), 1e-6) << "round " << round;
  }
}

TEST(Conv, GradientsMatchFiniteDifferences) {
  testing::Random random(2);
  for (int round = 0; round < 30; ++round) {
    const Case c = random_case(random);
    const Data data(random, c);
    const auto x = to_doubles(data.x), weight = to_doubles(data.weight), bias = to_doubles(data.bias);
    const auto dy = to_doubles(data.dy);
    const ConvGradients out = gradients_of(c, data);
    const auto dx = testing::numeric_gradient([&](const auto& at) { return oracle(c, at, weight, bias); }, x, dy);
    const auto dw = testing::numeric_gradient([&](const auto& at) { return oracle(c, x, at, bias); }, weight, dy);
    const auto db = testing::numeric_gradient([&](const auto& at) { return oracle(c, x, weight, at); }, bias, dy);
    EXPECT_LT(relative_error(out.x, dx, 1), 3e-6) << "round " << round;
    EXPECT_LT(relative_error(out.weight, dw, 1), 3e-6) << "round " << round;
    EXPECT_LT(relative_error(out.bias, db, 1), 3e-6) << "round " << round;
  }
}

// Gradients reach back over the ends of the kernel's tiles of tokens, and not over those of documents.
TEST(Conv, GradientsAreRightWhereTilesMeet) {
  testing::Random random(9);
  for (int64_t window : {2, 3, 4})
    for (const std::vector<int32_t>& starts : {std::vector<int32_t>{}, {15}, {16}, {17}, {18, 19, 34}}) {
      const Case c{1, 50, 2, window, Activation::silu, starts};
      const Data data(random, c);
      const auto weight = to_doubles(data.weight), bias = to_doubles(data.bias);
      const auto dx = testing::numeric_gradient([&](const auto& at) { return oracle(c, at, weight, bias); },
                                                to_doubles(data.x), to_doubles(data.dy));
      EXPECT_LT(relative_error(gradients_of(c, data).x, dx), 3e-6) << "window " << window;
    }
}

// Longer than a tile of tokens and than a block of the sums, and wider than any vector.
TEST(Conv, ManyTokensMatchTheOracle) {
  testing::Random random(3);
  const Case c{2, 150, 19, 4, Activation::silu, {0, 31, 32, 33, 97, 150, 200, 299}};
  const Data data(random, c);
  const auto x = to_doubles(data.x), weight = to_doubles(data.weight), bias = to_doubles(data.bias);
  const Tensor y = conv_forward(data.x, data.weight, data.bias, c.activation, c.boundaries());
  EXPECT_LT(relative_error(y, oracle(c, x, weight, bias)), 1e-6);
  const ConvGradients out = gradients_of(c, data);
  const auto dw =
      testing::numeric_gradient([&](const auto& at) { return oracle(c, x, at, bias); }, weight, to_doubles(data.dy));
  EXPECT_LT(relative_error(out.weight, dw), 3e-6);
}

// Every document alone gives what it gives when packed with others, wherever the boundary lies.
TEST(Conv, NothingLeaksAcrossABoundary) {
  testing::Random random(4);
  for (int64_t window : {2, 3, 4})
    for (int32_t boundary = 1; boundary < 9; ++boundary) {
      const Case c{1, 9, 5, window, Activation::silu, {boundary}};
      const Data data(random, c);
      const Tensor y = conv_forward(data.x, data.weight, data.bias, c.activation, c.boundaries());
      const ConvGradients packed = gradients_of(c, data);
      for (const auto& [begin, count] : {std::pair<int64_t, int64_t>(0, boundary), {boundary, 9 - boundary}}) {
        const auto part = [&](const Tensor& tensor) { return dense(tensor.slice(1, begin, count)); };
        const Tensor alone = conv_forward(part(data.x), data.weight, data.bias, c.activation);
        EXPECT_TRUE(same_bits(part(y), alone));
        const ConvGradients out{Tensor::empty_like(alone), Tensor::empty_like(data.weight),
                                Tensor::empty_like(data.bias)};
        conv_backward(out, part(data.dy), part(data.x), data.weight, data.bias, c.activation);
        EXPECT_TRUE(same_bits(part(packed.x), out.x));
      }
    }
}

TEST(Conv, SplitAnywhereWithStateEqualsOnePass) {
  testing::Random random(5);
  for (int round = 0; round < 40; ++round) {
    Case c = random_case(random);
    c.starts.clear();
    const Data data(random, c);
    const Tensor whole = conv_forward(data.x, data.weight, data.bias, c.activation);
    const int64_t cut = random.integer(0, c.length);
    const Tensor head = strided_copy(data.x).slice(1, 0, cut);
    const Tensor tail = data.x.slice(1, cut, c.length - cut);
    const Tensor state = conv_state(head, c.window);
    EXPECT_TRUE(same_bits(dense(whole.slice(1, cut, c.length - cut)),
                          conv_forward(tail, data.weight, data.bias, c.activation, {}, state)));
    EXPECT_TRUE(same_bits(conv_state(tail, c.window, {}, state), conv_state(data.x, c.window)));
  }
}

TEST(Conv, StepsEqualOnePass) {
  testing::Random random(6);
  for (int64_t window : {2, 3, 4}) {
    const Case c{3, 7, 37, window, Activation::silu, {}};
    const Data data(random, c);
    const Tensor whole = conv_forward(data.x, data.weight, data.bias, c.activation);
    const Tensor state = Tensor::zeros({c.batch, window - 1, c.channels}, DType::f32);
    for (int64_t t = 0; t < c.length; ++t) {
      const Tensor y =
          conv_step(state, all_slots(state.size(0)), data.x.select(1, t), data.weight, data.bias, c.activation);
      EXPECT_TRUE(same_bits(y, dense(whole.select(1, t)))) << "token " << t;
    }
    EXPECT_TRUE(same_bits(state, conv_state(data.x, window)));
  }
}

// Rows of slots in any order, of which some stay where they are.
TEST(Conv, StepsOfSlots) {
  testing::Random random(9);
  const Case c{4, 30, 19, 4, Activation::silu, {}};
  const Data data(random, c);
  const Tensor whole = conv_forward(data.x, data.weight, data.bias, c.activation);
  const Tensor state = Tensor::zeros({c.batch, c.window - 1, c.channels}, DType::f32);
  std::vector<int64_t> seen(4);
  for (int step = 0; step < 60; ++step) {
    std::vector<int32_t> slots;
    for (int32_t slot = 0; slot < 4; ++slot)
      if (seen[slot] < c.length && random.integer(0, 1) == 1)
        slots.insert(slots.begin() + random.integer(0, static_cast<int64_t>(slots.size())), slot);
    const Tensor x = Tensor::empty({static_cast<int64_t>(slots.size()), c.channels}, DType::f32);
    for (size_t i = 0; i < slots.size(); ++i)
      copy(x.select(0, static_cast<int64_t>(i)), data.x.select(0, slots[i]).select(0, seen[slots[i]]));
    const Tensor y = conv_step(state, slot_rows(slots), x, data.weight, data.bias, c.activation);
    for (size_t i = 0; i < slots.size(); ++i)
      ASSERT_TRUE(same_bits(dense(y.select(0, static_cast<int64_t>(i))),
                            dense(whole.select(0, slots[i]).select(0, seen[slots[i]]++))));
  }
  for (int64_t slot = 0; slot < 4; ++slot)
    EXPECT_TRUE(same_bits(dense(state.slice(0, slot, 1)),
                          conv_state(data.x.slice(0, slot, 1).slice(1, 0, seen[slot]), c.window)));
}

TEST(Conv, StateHoldsTheLastDocumentOnly) {
  const Tensor x = testing::tensor_of({1, 2, 3, 4, 5, 6}, {2, 3, 1});
  EXPECT_EQ(to_doubles(conv_state(x, 4)), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(to_doubles(conv_state(x, 4, int_tensor_of({1, 5}, {2}))), (std::vector<double>{0, 2, 3, 0, 0, 6}));
  const Tensor state = testing::tensor_of({7, 8, 9, 10, 11, 12}, {2, 3, 1});
  EXPECT_EQ(to_doubles(conv_state(x.slice(1, 0, 1), 4, {}, state)), (std::vector<double>{8, 9, 1, 11, 12, 4}));
  EXPECT_EQ(to_doubles(conv_state(x.slice(1, 0, 2), 4, int_tensor_of({1}, {1}), state)),
            (std::vector<double>{0, 0, 2, 12, 4, 5}));
}

TEST(Conv, SameBitsForEveryNumberOfThreads) {
  testing::Random random(7);
  const Case c{2, 333, 65, 4, Activation::silu, {5, 100, 400, 401}};
  const Data data(random, c);
  const auto run = [&] {
    return std::pair(conv_forward(data.x, data.weight, data.bias, c.activation, c.boundaries()), gradients_of(c, data));
  };
  const auto [y, d] = testing::with_threads(1, run);
  for (int count : {1, 2, 5}) {
    const auto [y_again, d_again] = testing::with_threads(count, run);
    EXPECT_TRUE(same_bits(y, y_again));
    EXPECT_TRUE(same_bits(dense(d.x), dense(d_again.x)));
    EXPECT_TRUE(same_bits(d.weight, d_again.weight));
    EXPECT_TRUE(same_bits(d.bias, d_again.bias));
  }
}

TEST(Conv, RecordsItsGradients) {
  testing::Random random(8);
  const Case c{2, 5, 6, 3, Activation::silu, {3, 8}};
  const Data data(random, c);
  const ConvGradients expected = gradients_of(c, data);
  const Variable x(data.x, true), weight(data.weight, true), bias(data.bias, true);
  Tape tape;
  tape.backward(conv(tape, x, weight, bias, c.activation, c.boundaries()), data.dy);
  EXPECT_TRUE(same_bits(x.gradient(), dense(expected.x)));
  EXPECT_TRUE(same_bits(weight.gradient(), expected.weight));
  EXPECT_TRUE(same_bits(bias.gradient(), expected.bias));
}

// Without a bias: the bits of a bias of zero, and no gradient for it.
TEST(Conv, TheBiasIsOptional) {
  testing::Random random(10);
  for (int64_t window : {2, 4}) {
    const Case c{2, 19, 13, window, Activation::silu, {3, 21}};
    Data data(random, c);
    fill(data.bias, 0);
    const Tensor y = conv_forward(data.x, data.weight, data.bias, c.activation, c.boundaries());
    EXPECT_TRUE(same_bits(conv_forward(data.x, data.weight, {}, c.activation, c.boundaries()), y));
    const ConvGradients expected = gradients_of(c, data);
    const Variable x(data.x, true), weight(data.weight, true);
    Tape tape;
    tape.backward(conv(tape, x, weight, {}, c.activation, c.boundaries()), data.dy);
    EXPECT_TRUE(same_bits(x.gradient(), dense(expected.x)));
    EXPECT_TRUE(same_bits(weight.gradient(), expected.weight));
    const Tensor state = random.normal_tensor({2, window - 1, 13}), same = dense(state);
    const Tensor token = random.normal_tensor({2, 13});
    EXPECT_TRUE(same_bits(conv_step(state, all_slots(state.size(0)), token, data.weight, {}, c.activation),
                          conv_step(same, all_slots(same.size(0)), token, data.weight, data.bias, c.activation)));
    EXPECT_TRUE(same_bits(state, same));
  }
}

TEST(Conv, NoTokens) {
  const Tensor x = Tensor::zeros({2, 0, 3}, DType::f32);
  const Tensor weight = Tensor::zeros({3, 2}, DType::f32);
  const Tensor bias = Tensor::zeros({3}, DType::f32);
  EXPECT_EQ(conv_forward(x, weight, bias, Activation::none).elements(), 0);
  const ConvGradients out{Tensor::empty_like(x), Tensor::empty_like(weight), Tensor::empty_like(bias)};
  conv_backward(out, x, x, weight, bias, Activation::none);
  EXPECT_EQ(to_doubles(out.weight), std::vector<double>(6));
}

TEST(Conv, BadArgumentsAreNamed) {
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor x = zeros({2, 5, 3}), weight = zeros({3, 2}), bias = zeros({3});
  const auto run = [&](const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& boundaries = {},
                       const Tensor& state = {}) {
    return [=] { conv_forward(a, b, c, Activation::none, boundaries, state); };
  };
  testing::expect_error(run(zeros({5, 3}), weight, bias), {"conv", "\"x\"", "rank 2", "[5, 3]"});
  testing::expect_error(run(x, zeros({4, 2}), bias), {"conv", "\"weight\"", "[4, 2]", "[3, any]"});
  testing::expect_error(run(x, zeros({3, 5}), bias), {"conv", "window of 5", "2, 3 or 4"});
  testing::expect_error(run(x, zeros({3, 1}), bias), {"conv", "window of 1"});
  testing::expect_error([&] { conv_forward(x, weight, bias, Activation::softplus); },
                        {"conv", "activation", "none, relu or silu"});
  testing::expect_error(run(x, weight, zeros({2})), {"conv", "\"bias\"", "[2]", "[3]"});
  testing::expect_error(run(x, weight, bias, int_tensor_of({4, 2}, {2})), {"conv", "\"boundaries\"", "2", "4"});
  testing::expect_error(run(x, weight, bias, {}, zeros({2, 2, 3})), {"conv", "\"state\"", "[2, 2, 3]", "[2, 1, 3]"});
  testing::expect_error(
      [&] {
        conv_step(zeros({2, 2, 3}), slot_rows({0}), zeros({1, 3}), weight, bias, Activation::none);
      },
      {"conv_step", "\"state\"", "[2, 2, 3]", "[any, 1, 3]"});
  const auto step = [&](const SlotRows& rows) {
    return [=] {
      conv_step(Tensor::zeros({2, 1, 3}, DType::f32), rows, Tensor::zeros({2, 3}, DType::f32), weight, bias,
                Activation::none);
    };
  };
  testing::expect_error(step(slot_rows({0, 2})), {"conv_step", "slot 2", "0 to 1"});
  testing::expect_error(step(slot_rows({1, 1})), {"conv_step", "slot 1", "twice"});
  testing::expect_error(step(slot_rows({1})), {"conv_step", "1 slots for 2 rows"});
}

}  // namespace
}  // namespace furious
