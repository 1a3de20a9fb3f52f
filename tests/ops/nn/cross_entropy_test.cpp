#include "ops/nn/cross_entropy.h"

#include "base/parallel.h"
#include "support.h"

namespace furious {
namespace {

using testing::all_finite;
using testing::expect_error;
using testing::int_tensor_of;
using testing::numeric_gradient;
using testing::relative_error;
using testing::same_bits;
using testing::tensor_of;
using testing::to_doubles;

using Vector = std::vector<double>;

Tensor random_targets(testing::Random& random, const Shape& shape, int64_t vocabulary, bool with_ignored) {
  std::vector<int32_t> ids(shape.elements());
  for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(with_ignored ? -1 : 0, vocabulary - 1));
  return int_tensor_of(ids, shape);
}

Vector row_losses_oracle(const Vector& hidden, const Vector& weight, int64_t dim, const Tensor& targets, double z = 0) {
  const auto vocabulary = static_cast<int64_t>(weight.size()) / dim;
  Vector losses;
  for (int64_t r = 0; r < targets.elements(); ++r) {
    Vector logits(vocabulary);
    for (int64_t v = 0; v < vocabulary; ++v)
      for (int64_t i = 0; i < dim; ++i) logits[v] += hidden[r * dim + i] * weight[v * dim + i];
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double logit : logits) sum += std::exp(logit - most);
    const int32_t target = targets.data<int32_t>()[r];
    const double log_sum = most + std::log(sum);
    losses.push_back(target < 0 ? 0 : log_sum - logits[target] + z * log_sum * log_sum);
  }
  return losses;
}

double loss_oracle(const Vector& hidden, const Vector& weight, int64_t dim, const Tensor& targets, double z = 0) {
  double sum = 0;
  for (double loss : row_losses_oracle(hidden, weight, dim, targets, z)) sum += loss;
  const int32_t* ids = targets.data<int32_t>();
  const auto counted = std::count_if(ids, ids + targets.elements(), [](int32_t id) { return id >= 0; });
  return counted == 0 ? 0 : sum / static_cast<double>(counted);
}

double value_of(const Tensor& loss) {
  return static_cast<double>(*loss.data<float>());
}

TEST(CrossEntropy, LossAgreesWithTheOracle) {
  testing::Random random(40);
  for (int i = 0; i < 25; ++i) {
    const int64_t vocabulary = random.integer(1, 90);
    const int64_t dim = random.integer(1, 20);
    const Shape rows = random.pick<Shape>({{1}, {7}, {2, 9}, {3, 1, 4}});
    const Tensor targets = random_targets(random, rows, vocabulary, random.coin());
    std::vector<int64_t> hidden_shape(rows.begin(), rows.end());
    hidden_shape.push_back(dim);
    const Tensor hidden = random.normal_tensor(Shape(std::span<const int64_t>(hidden_shape)));
    const Tensor weight = random.normal_tensor({vocabulary, dim});
    const Tensor row_losses = Tensor::empty(rows, DType::f32);
    const CrossEntropyResult result = cross_entropy_forward(hidden, weight, targets, {.row_losses = row_losses});
    EXPECT_EQ(result.loss.shape(), (Shape{1}));
    EXPECT_FALSE(result.hidden_gradient.defined());
    EXPECT_FALSE(result.weight_gradient.defined());
    const Vector hs = to_doubles(hidden);
    const Vector ws = to_doubles(weight);
    EXPECT_NEAR(value_of(result.loss), loss_oracle(hs, ws, dim, targets), 5e-6);
    EXPECT_LT(relative_error(row_losses, row_losses_oracle(hs, ws, dim, targets), 1e-2), 5e-6);
  }
}

TEST(CrossEntropy, GradientsAgreeWithFiniteDifferences) {
  testing::Random random(41);
  for (int i = 0; i < 10; ++i) {
    const int64_t vocabulary = random.integer(1, 37);
    const int64_t dim = random.integer(1, 6);
    const Tensor targets = random_targets(random, {2, random.integer(1, 4)}, vocabulary, random.coin());
    const Tensor hidden = random.normal_tensor({2, targets.size(1), dim});
    const Tensor weight = random.normal_tensor({vocabulary, dim});
    const CrossEntropyResult result =
        cross_entropy_forward(hidden, weight, targets, {.hidden_gradient = true, .weight_gradient = true});
    const Vector hs = to_doubles(hidden);
    const Vector ws = to_doubles(weight);
    const auto at_hidden = [&](const Vector& v) { return Vector{loss_oracle(v, ws, dim, targets)}; };
    const auto at_weight = [&](const Vector& v) { return Vector{loss_oracle(hs, v, dim, targets)}; };
    EXPECT_NEAR(value_of(result.loss), loss_oracle(hs, ws, dim, targets), 5e-6);
    EXPECT_LT(relative_error(result.hidden_gradient, numeric_gradient(at_hidden, hs, {1}), 1e-2), 5e-6);
    EXPECT_LT(relative_error(result.weight_gradient, numeric_gradient(at_weight, ws, {1}), 1e-2), 5e-6);
  }
}

TEST(CrossEntropy, ZLossAgreesWithFiniteDifferences) {
  testing::Random random(47);
  for (const double z : {1e-4, 0.1, 3.0}) {
    for (int i = 0; i < 4; ++i) {
      const int64_t vocabulary = random.integer(1, 37), dim = random.integer(1, 6), length = random.integer(1, 4);
      const Tensor targets = random_targets(random, {2, length}, vocabulary, random.coin());
      const Tensor hidden = random.normal_tensor({2, length, dim}), weight = random.normal_tensor({vocabulary, dim});
      const CrossEntropyResult result = cross_entropy_forward(
          hidden, weight, targets, {.hidden_gradient = true, .weight_gradient = true, .z_loss = z});
      const CrossEntropyResult loss_alone = cross_entropy_forward(hidden, weight, targets, {.z_loss = z});
      const Vector hs = to_doubles(hidden), ws = to_doubles(weight);
      const auto at_hidden = [&](const Vector& v) { return Vector{loss_oracle(v, ws, dim, targets, z)}; };
      const auto at_weight = [&](const Vector& v) { return Vector{loss_oracle(hs, v, dim, targets, z)}; };
      const double expected = loss_oracle(hs, ws, dim, targets, z);
      EXPECT_NEAR(value_of(result.loss), expected, 5e-6 * std::max(1.0, expected)) << z;
      EXPECT_NEAR(value_of(loss_alone.loss), expected, 5e-6 * std::max(1.0, expected)) << z;
      EXPECT_LT(relative_error(result.hidden_gradient, numeric_gradient(at_hidden, hs, {1}), 1e-2), 1e-5) << z;
      EXPECT_LT(relative_error(result.weight_gradient, numeric_gradient(at_weight, ws, {1}), 1e-2), 1e-5) << z;
    }
  }
  const Tensor x = random.normal_tensor({2, 3}), w = random.normal_tensor({5, 3});
  expect_error([&] { cross_entropy_forward(x, w, int_tensor_of({0, 1}, {2}), {.z_loss = -1}); }, {"z_loss is -1"});
}

TEST(CrossEntropy, WeightsOfRows) {
  testing::Random random(46);
  for (int i = 0; i < 10; ++i) {
    const int64_t vocabulary = random.integer(2, 37), dim = random.integer(1, 6), length = random.integer(1, 5);
    const Tensor targets = random_targets(random, {2, length}, vocabulary, random.coin());
    const Tensor hidden = random.normal_tensor({2, length, dim});
    const Tensor weight = random.normal_tensor({vocabulary, dim});
    const Tensor weights = random.normal_tensor({2, length});  // negative ones, too
    if (random.coin()) weights.data<float>()[0] = 0;
    const Tensor row_losses = Tensor::empty({2, length}, DType::f32);
    const CrossEntropyOptions options{
        .hidden_gradient = true, .weight_gradient = true, .row_losses = row_losses, .weights = weights};
    const CrossEntropyResult result = cross_entropy_forward(hidden, weight, targets, options);
    const Vector hs = to_doubles(hidden), ws = to_doubles(weight), factors = to_doubles(weights);
    const auto rows = [&](const Vector& h, const Vector& w) {
      Vector losses = row_losses_oracle(h, w, dim, targets);
      for (size_t r = 0; r < losses.size(); ++r) losses[r] *= factors[r];
      return losses;
    };
    const int32_t* const ids = targets.data<int32_t>();
    const auto counted = std::max<int64_t>(1, 2 * length - std::count(ids, ids + 2 * length, kIgnoredTarget));
    const auto loss = [&](const Vector& h, const Vector& w) {
      double sum = 0;
      for (const double row : rows(h, w)) sum += row;
      return Vector{sum / static_cast<double>(counted)};
    };
    EXPECT_NEAR(value_of(result.loss), loss(hs, ws)[0], 5e-6);
    EXPECT_LT(relative_error(row_losses, rows(hs, ws), 1e-2), 5e-6);
    const auto at_hidden = [&](const Vector& v) { return loss(v, ws); };
    const auto at_weight = [&](const Vector& v) { return loss(hs, v); };
    EXPECT_LT(relative_error(result.hidden_gradient, numeric_gradient(at_hidden, hs, {1}), 1e-2), 5e-6);
    EXPECT_LT(relative_error(result.weight_gradient, numeric_gradient(at_weight, ws, {1}), 1e-2), 5e-6);
  }
  const Tensor hidden = random.normal_tensor({3, 4}), weight = random.normal_tensor({5, 4});
  const Tensor targets = int_tensor_of({0, 4, 2}, {3}), ones = tensor_of({1, 1, 1}, {3});
  EXPECT_TRUE(same_bits(cross_entropy_forward(hidden, weight, targets, {.weights = ones}).loss,
                        cross_entropy_forward(hidden, weight, targets).loss));
  expect_error([&] { cross_entropy_forward(hidden, weight, targets, {.weights = weight}); }, {"weights"});
}

// Softmax minus one-hot by hand, for shapes that finite differences are too slow for.
struct ExactGradients {
  Vector hidden;
  Vector weight;
};
ExactGradients exact_gradients(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  const Vector hs = to_doubles(hidden);
  const Vector ws = to_doubles(weight);
  const int64_t dim = weight.size(1);
  const int64_t vocabulary = weight.size(0);
  const int64_t rows = targets.elements();
  ExactGradients result{Vector(hs.size()), Vector(ws.size())};
  for (int64_t r = 0; r < rows; ++r) {
    Vector p(vocabulary);
    double sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) {
      double logit = 0;
      for (int64_t i = 0; i < dim; ++i) logit += hs[r * dim + i] * ws[v * dim + i];
      sum += p[v] = std::exp(logit);
    }
    for (int64_t v = 0; v < vocabulary; ++v) {
      const double slope = (p[v] / sum - (v == targets.data<int32_t>()[r])) / static_cast<double>(rows);
      for (int64_t i = 0; i < dim; ++i) {
        result.hidden[r * dim + i] += slope * ws[v * dim + i];
        result.weight[v * dim + i] += slope * hs[r * dim + i];
      }
    }
  }
  return result;
}

// 33 MB of logits: more than one chunk, of unequal lengths.
TEST(CrossEntropySlow, SeveralChunks) {
  testing::Random random(42);
  constexpr int64_t kVocabulary = 40009;
  constexpr int64_t kRows = 213;
  constexpr int64_t kDim = 3;
  const Tensor hidden = random.normal_tensor({kRows, kDim});
  const Tensor weight = random.normal_tensor({kVocabulary, kDim});
  const Tensor targets = random_targets(random, {kRows}, kVocabulary, false);
  const CrossEntropyResult result =
      cross_entropy_forward(hidden, weight, targets, {.hidden_gradient = true, .weight_gradient = true});
  EXPECT_NEAR(value_of(result.loss), loss_oracle(to_doubles(hidden), to_doubles(weight), kDim, targets), 2e-5);
  const ExactGradients expected = exact_gradients(hidden, weight, targets);
  EXPECT_LT(relative_error(result.hidden_gradient, expected.hidden), 5e-6);
  EXPECT_LT(relative_error(result.weight_gradient, expected.weight), 5e-6);
}

TEST(CrossEntropy, RowsDoNotDependOnEachOther) {
  testing::Random random(43);
  const Tensor hidden = random.normal_tensor({6, 5});
  const Tensor weight = random.normal_tensor({11, 5});
  const Tensor targets = int_tensor_of({3, -1, 0, 10, -1, 7}, {6});
  const Tensor losses = Tensor::empty({6}, DType::f32);
  const CrossEntropyResult all =
      cross_entropy_forward(hidden, weight, targets, {.hidden_gradient = true, .row_losses = losses});
  EXPECT_EQ(*all.counted.data<int32_t>(), 4);
  const Vector dhidden = to_doubles(all.hidden_gradient);
  for (int64_t row : {1, 4}) {
    EXPECT_EQ(losses.data<float>()[row], 0.0f);
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(dhidden[row * 5 + i], 0.0);
  }
  EXPECT_GT(losses.data<float>()[0], 0.0f);
}

TEST(CrossEntropy, AllTargetsIgnored) {
  testing::Random random(44);
  const Tensor losses = random.normal_tensor({3});
  const CrossEntropyResult result = cross_entropy_forward(
      random.normal_tensor({3, 4}), random.normal_tensor({9, 4}), int_tensor_of({-1, -1, -1}, {3}),
      {.hidden_gradient = true, .weight_gradient = true, .row_losses = losses});
  EXPECT_EQ(*result.counted.data<int32_t>(), 0);
  EXPECT_EQ(value_of(result.loss), 0.0);
  EXPECT_EQ(to_doubles(result.hidden_gradient), Vector(12, 0.0));
  EXPECT_EQ(to_doubles(result.weight_gradient), Vector(36, 0.0));
  EXPECT_EQ(to_doubles(losses), Vector(3, 0.0));
}

TEST(CrossEntropy, NoRows) {
  const CrossEntropyResult result =
      cross_entropy_forward(Tensor::empty({0, 4}, DType::f32), Tensor::zeros({9, 4}, DType::f32),
                            Tensor::empty({0}, DType::i32), {.hidden_gradient = true, .weight_gradient = true});
  EXPECT_EQ(value_of(result.loss), 0.0);
  EXPECT_EQ(to_doubles(result.weight_gradient), Vector(36, 0.0));
}

TEST(CrossEntropy, HugeLogitsStayFinite) {
  testing::Random random(45);
  for (double size : {1e4, 1e20, 1e37}) {
    const Tensor hidden = tensor_of({1.0f, -1.0f}, {2, 1});
    const auto big = static_cast<float>(size);
    const Tensor weight = tensor_of({big, -big, 0.0f, big / 2, 1.0f}, {5, 1});
    const Tensor targets = int_tensor_of({0, 0}, {2});
    const CrossEntropyResult result =
        cross_entropy_forward(hidden, weight, targets, {.hidden_gradient = true, .weight_gradient = true});
    // Row 0 is certain and right: loss 0; row 1 is certain of token 1: loss 2·size.
    EXPECT_NEAR(value_of(result.loss) / size, 1.0, 1e-6);
    EXPECT_TRUE(all_finite(result.hidden_gradient));
    EXPECT_EQ(to_doubles(result.weight_gradient), (Vector{0.5, -0.5, 0, 0, 0}));
  }
}

TEST(CrossEntropy, ACommonShiftOfTheLogitsChangesLittle) {
  // Column 1 of hidden is 1 and of weight 1e4: every logit is 1e4 more. What is left of precision is that of f32 there.
  const Tensor hidden = tensor_of({0.5f, 1, -1.5f, 1}, {2, 2});
  const Tensor plain = tensor_of({1, 0, -2, 0, 3, 0}, {3, 2});
  const Tensor shifted = tensor_of({1, 1e4f, -2, 1e4f, 3, 1e4f}, {3, 2});
  const Tensor targets = int_tensor_of({2, 0}, {2});
  const double a = value_of(cross_entropy_forward(hidden, plain, targets).loss);
  const double b = value_of(cross_entropy_forward(hidden, shifted, targets).loss);
  EXPECT_NEAR(a, b, 2e-3);
}

TEST(CrossEntropy, TinyProbabilitiesKeepTheirGradient) {
  // The target has probability e^-80: the gradient of its logit is -1, not NaN.
  const CrossEntropyResult result =
      cross_entropy_forward(tensor_of({1}, {1, 1}), tensor_of({80, 0}, {2, 1}), int_tensor_of({1}, {1}),
                            {.hidden_gradient = true, .weight_gradient = true});
  EXPECT_NEAR(value_of(result.loss), 80, 1e-5);
  EXPECT_EQ(to_doubles(result.weight_gradient), (Vector{1, -1}));
  EXPECT_EQ(to_doubles(result.hidden_gradient), (Vector{80}));
}

TEST(CrossEntropy, ANanIsNotHidden) {
  for (int64_t vocabulary : {3, 16, 33, 64})
    for (int64_t bad = 0; bad < vocabulary; ++bad) {
      const Tensor weight = Tensor::zeros({vocabulary, 1}, DType::f32);
      weight.data<float>()[bad] = NAN;
      const Tensor targets = int_tensor_of({static_cast<int32_t>((bad + 1) % vocabulary)}, {1});
      const Tensor hidden = tensor_of({1}, {1, 1});
      ASSERT_TRUE(std::isnan(value_of(cross_entropy_forward(hidden, weight, targets).loss))) << bad;
      const auto with_gradient = cross_entropy_forward(hidden, weight, targets, {.weight_gradient = true});
      ASSERT_TRUE(std::isnan(value_of(with_gradient.loss))) << bad;
      ASSERT_TRUE(std::isnan(with_gradient.weight_gradient.data<float>()[0])) << bad;
      weight.data<float>()[bad] = INFINITY;
      ASSERT_FALSE(std::isfinite(value_of(cross_entropy_forward(hidden, weight, targets).loss))) << bad;
    }
}

TEST(CrossEntropy, SameBitsTwiceAndWithoutGradients) {
  testing::Random random(46);
  const Tensor hidden = random.normal_tensor({50, 17});
  const Tensor weight = random.normal_tensor({101, 17});
  const Tensor targets = random_targets(random, {50}, 101, true);
  const CrossEntropyOptions wanted{.hidden_gradient = true, .weight_gradient = true};
  const CrossEntropyResult first = cross_entropy_forward(hidden, weight, targets, wanted);
  const CrossEntropyResult second = cross_entropy_forward(hidden, weight, targets, wanted);
  EXPECT_TRUE(same_bits(first.loss, second.loss));
  EXPECT_TRUE(same_bits(first.hidden_gradient, second.hidden_gradient));
  EXPECT_TRUE(same_bits(first.weight_gradient, second.weight_gradient));
  EXPECT_TRUE(same_bits(first.loss, cross_entropy_forward(hidden, weight, targets).loss));
}

TEST(CrossEntropy, StoredWeightsAreConverted) {
  testing::Random random(47);
  const Tensor hidden = random.normal_tensor({5, 7});
  const Tensor weight = random.normal_tensor({13, 7}, 1, DType::bf16);
  const Tensor targets = random_targets(random, {5}, 13, false);
  EXPECT_TRUE(same_bits(cross_entropy_forward(hidden, weight, targets).loss,
                        cross_entropy_forward(hidden, to_dtype(weight, DType::f32), targets).loss));
}

TEST(CrossEntropy, TapeScalesAndAddsGradients) {
  testing::Random random(48);
  const Variable hidden(random.normal_tensor({2, 3, 4}), true);
  const Variable weight(random.normal_tensor({9, 4}), true);
  const Tensor first = random_targets(random, {2, 3}, 9, false);
  const Tensor second = random_targets(random, {2, 3}, 9, true);
  Tape tape;
  const Variable loss =
      add(tape, cross_entropy(tape, hidden, weight, first), cross_entropy(tape, hidden, weight, second));
  tape.backward(loss, tensor_of({-2.5f}, {1}));
  const Vector hs = to_doubles(hidden.value());
  const Vector ws = to_doubles(weight.value());
  const auto both = [&](const Vector& h, const Vector& w) {
    return Vector{loss_oracle(h, w, 4, first) + loss_oracle(h, w, 4, second)};
  };
  const auto at_hidden = [&](const Vector& v) { return both(v, ws); };
  const auto at_weight = [&](const Vector& v) { return both(hs, v); };
  EXPECT_LT(relative_error(hidden.gradient(), numeric_gradient(at_hidden, hs, {-2.5})), 5e-6);
  EXPECT_LT(relative_error(weight.gradient(), numeric_gradient(at_weight, ws, {-2.5})), 5e-6);
}

TEST(CrossEntropy, TapeGivesRowLossesAndRecordsNothingWhenOff) {
  testing::Random random(49);
  const Variable hidden(random.normal_tensor({3, 4}), true);
  const Variable weight(random.normal_tensor({9, 4}), true);
  const Tensor losses = Tensor::empty({3}, DType::f32);
  const Tensor targets = int_tensor_of({0, 8, -1}, {3});
  EXPECT_FALSE(cross_entropy(Tape::off(), hidden, weight, targets, losses).needs_gradient());
  EXPECT_LT(
      relative_error(losses, row_losses_oracle(to_doubles(hidden.value()), to_doubles(weight.value()), 4, targets)),
      5e-6);
}

TEST(CrossEntropy, ConstantsGetNoGradient) {
  testing::Random random(50);
  const Variable hidden(random.normal_tensor({3, 4}));
  const Variable weight(random.normal_tensor({9, 4}), true);
  Tape tape;
  tape.backward(cross_entropy(tape, hidden, weight, int_tensor_of({0, 8, 1}, {3})));
  EXPECT_FALSE(hidden.gradient().defined());
  EXPECT_TRUE(weight.gradient().defined());
}

TEST(CrossEntropy, Bf16ProductsAreClose) {
  if (!matmul_supports(MatmulPrecision::bf16)) GTEST_SKIP() << matmul_library() << " has no bf16 products here";
  testing::Random random(51);
  const Tensor hidden = random.normal_tensor({20, 16});
  const Tensor weight = random.normal_tensor({33, 16});
  const Tensor targets = random_targets(random, {20}, 33, false);
  CrossEntropyOptions options{.hidden_gradient = true, .weight_gradient = true};
  const CrossEntropyResult exact = cross_entropy_forward(hidden, weight, targets, options);
  options.precision = MatmulPrecision::bf16;
  const CrossEntropyResult rounded = cross_entropy_forward(hidden, weight, targets, options);
  EXPECT_FALSE(same_bits(exact.weight_gradient, rounded.weight_gradient));
  EXPECT_NEAR(value_of(exact.loss), value_of(rounded.loss), 0.02);
  EXPECT_LT(relative_error(rounded.hidden_gradient, exact.hidden_gradient), 0.02);
  EXPECT_LT(relative_error(rounded.weight_gradient, exact.weight_gradient), 0.02);
}

TEST(CrossEntropy, RefusesBadInput) {
  const auto zeros = [](Shape shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor hidden = zeros({2, 3});
  const Tensor weight = zeros({5, 3});
  const Tensor targets = int_tensor_of({0, 4}, {2});
  expect_error([&] { cross_entropy_forward({}, weight, targets); }, {"cross_entropy", "\"hidden\"", "missing"});
  expect_error([&] { cross_entropy_forward(hidden, {}, targets); }, {"cross_entropy", "\"weight\"", "missing"});
  expect_error([&] { cross_entropy_forward(hidden, weight, {}); }, {"cross_entropy", "\"targets\"", "missing"});
  expect_error([&] { cross_entropy_forward(hidden, zeros({5, 4}), targets); }, {"\"hidden\"", "[2, 3]", "[2, 4]"});
  expect_error([&] { cross_entropy_forward(hidden, zeros({15}), targets); }, {"\"weight\"", "rank 1", "rank 2"});
  expect_error([&] { cross_entropy_forward(hidden, zeros({0, 3}), targets); }, {"\"weight\"", "vocabulary is empty"});
  expect_error(
      [&] {
        cross_entropy_forward(hidden, weight, int_tensor_of({0, 5}, {2}));
      },
      {"cross_entropy", "\"targets\"", "holds 5", "position [1]", "5 tokens"});
  expect_error([&] { cross_entropy_forward(hidden, weight, int_tensor_of({-2, 0}, {2})); }, {"holds -2", "-1 to 4"});
  expect_error([&] { cross_entropy_forward(hidden, weight, int_tensor_of({0}, {1})); }, {"\"hidden\"", "[1, 3]"});
  expect_error(
      [&] {
        cross_entropy_forward(Tensor::zeros({2, 3}, DType::bf16), weight, targets);
      },
      {"\"hidden\"", "bf16", "f32"});
  expect_error([&] { cross_entropy_forward(hidden, weight, targets, {.row_losses = zeros({3})}); },
               {"\"row_losses\"", "[3]", "[2]"});
  expect_error(
      [&] { cross_entropy_forward(hidden, to_dtype(weight, DType::bf16), targets, {.weight_gradient = true}); },
      {"\"weight\"", "bf16", "f32"});
  float there = 0;
  const Tensor elsewhere = Tensor::wrap(&there, {2, 3}, DType::f32, {DeviceKind::cuda, 0});
  expect_error([&] { cross_entropy_forward(elsewhere, weight, targets); }, {"\"hidden\"", "cuda:0", "cpu"});
}

}  // namespace
}  // namespace furious
