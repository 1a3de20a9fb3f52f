#include "cuda.h"
#include "ops/nn/cross_entropy.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

struct Losses {
  Tensor loss, rows, dhidden, dweight;
};

Losses run(const Tensor& hidden, const Tensor& weight, const Tensor& targets, float upstream, double z_loss = 0) {
  const Variable h(hidden, true), w(weight, true);
  const Tensor rows = Tensor::empty(targets.shape(), DType::f32, hidden.device());
  const Tensor gradient = Tensor::empty({1}, DType::f32, hidden.device());
  fill(gradient, upstream);
  Tape tape;
  const Variable loss = cross_entropy(tape, h, w, targets, rows, MatmulPrecision::f32, {}, z_loss);
  tape.backward(loss, gradient);
  return {loss.value(), rows, h.gradient(), w.gradient()};
}

void compare(Random& random, int64_t rows, int64_t vocabulary, int64_t dim, DType dtype) {
  const Tensor hidden = to_dtype(random.normal_tensor({rows, dim}, 1, dtype), DType::f32);
  const Tensor weight = to_dtype(random.normal_tensor({vocabulary, dim}, 1 / std::sqrt(dim), dtype), DType::f32);
  std::vector<int32_t> ids(rows);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(random.coin() ? -1 : 0, vocabulary - 1));
  const Tensor targets = int_tensor_of(ids, {rows});
  const float upstream = random.coin() ? 1.0f : 0.37f;
  const double z_loss = random.pick<double>({0, 1e-4, 0.1});
  const Losses expected = run(hidden, weight, targets, upstream, z_loss);
  const Losses actual = run(to_gpu(hidden, dtype), to_gpu(weight), to_gpu(targets), upstream, z_loss);
  EXPECT_EQ(actual.dhidden.dtype(), dtype);
  EXPECT_EQ(actual.dweight.dtype(), DType::f32);
  const auto check = [&](const char* what, const Tensor& a, const Tensor& b) {
    EXPECT_LT(relative_error(to_cpu(a), b, 1e-12), tolerance(dtype))
        << what << " " << name_of(dtype) << " " << rows << " x " << vocabulary << " x " << dim;
  };
  check("loss", actual.loss, expected.loss);
  check("rows", actual.rows, expected.rows);
  check("dhidden", actual.dhidden, expected.dhidden);
  check("dweight", actual.dweight, expected.dweight);
}

TEST(CrossEntropyCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (int i = 0; i < 25; ++i) {
    const int64_t vocabulary = random.pick<int64_t>({2, 23, 256, 1000, 8192, 9001});
    for (const DType dtype : {DType::f32, DType::bf16})
      compare(random, random.integer(1, 200), vocabulary, random.integer(2, 60), dtype);
  }
}

TEST(CrossEntropyCuda, SeveralChunksOfLogits) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const DType dtype : {DType::f32, DType::bf16}) compare(random, 4600, 32000, 16, dtype);
}

TEST(CrossEntropyCuda, WeightsOfRows) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  for (const int64_t vocabulary : {9, 256}) {
    const Tensor hidden = random.normal_tensor({40, 8}), weight = random.normal_tensor({vocabulary, 8});
    const Tensor weights = random.normal_tensor({40});
    std::vector<int32_t> ids(40);
    for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(-1, vocabulary - 1));
    const Tensor targets = int_tensor_of(ids, {40});
    const auto result = [&](auto&& there) {
      return cross_entropy_forward(there(hidden), there(weight), there(targets),
                                   {.hidden_gradient = true, .weight_gradient = true, .weights = there(weights)});
    };
    const CrossEntropyResult expected = result([](const Tensor& x) { return x; });
    const CrossEntropyResult actual = result([](const Tensor& x) { return to_gpu(x); });
    EXPECT_LT(relative_error(to_cpu(actual.loss), expected.loss), 1e-5);
    EXPECT_LT(relative_error(to_cpu(actual.hidden_gradient), expected.hidden_gradient), 1e-4);
    EXPECT_LT(relative_error(to_cpu(actual.weight_gradient), expected.weight_gradient), 1e-4);
  }
}

TEST(CrossEntropyCuda, AllTargetsIgnoredAndNoRows) {
  SKIP_WITHOUT_GPU();
  for (const int64_t rows : {0, 5}) {
    const Tensor targets = int_tensor_of(std::vector<int32_t>(rows, kIgnoredTarget), {rows});
    Random random(3);
    const Losses losses = run(to_gpu(random.normal_tensor({rows, 4}), DType::bf16),
                              to_gpu(random.normal_tensor({9, 4})), to_gpu(targets), 1);
    EXPECT_EQ(to_doubles(to_cpu(losses.loss)), std::vector<double>{0.0});
    EXPECT_EQ(to_doubles(to_cpu(losses.rows)), std::vector<double>(rows, 0.0));
    EXPECT_EQ(to_doubles(to_cpu(losses.dweight)), std::vector<double>(36, 0.0));
  }
}

TEST(CrossEntropyCuda, SharpAndBrokenLogits) {
  SKIP_WITHOUT_GPU();
  const auto loss = [](const std::vector<float>& logits, int32_t target) {
    const auto count = static_cast<int64_t>(logits.size());
    const Tensor weight = to_gpu(tensor_of(logits, {count, 1}));
    const Tensor hidden = to_gpu(tensor_of({1}, {1, 1}));
    return to_doubles(to_cpu(cross_entropy_forward(hidden, weight, to_gpu(int_tensor_of({target}, {1}))).loss))[0];
  };
  EXPECT_NEAR(loss({80, 0, -300}, 1), 80, 1e-5);
  EXPECT_NEAR(loss({-1000, -1000}, 0), std::log(2.0), 1e-6);
  EXPECT_NEAR(loss({-INFINITY, 3, 3}, 1), std::log(2.0), 1e-6);
  EXPECT_TRUE(std::isnan(loss({1, NAN, 2}, 0)));
  EXPECT_FALSE(std::isfinite(loss({1, INFINITY, 2}, 0)));
  EXPECT_TRUE(std::isnan(loss({1, 2, 3}, 3)));  // no such token
}

TEST(CrossEntropyCuda, SameBitsTwice) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  const Tensor hidden = to_gpu(random.normal_tensor({300, 64}), DType::bf16);
  const Tensor weight = to_gpu(random.normal_tensor({1001, 64}));
  std::vector<int32_t> ids(300);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(-1, 1000));
  const Tensor targets = to_gpu(int_tensor_of(ids, {300}));
  const Losses first = run(hidden, weight, targets, 0.5f), second = run(hidden, weight, targets, 0.5f);
  EXPECT_TRUE(same_bits(to_cpu(first.loss), to_cpu(second.loss)));
  EXPECT_TRUE(same_bits(to_cpu(first.dhidden), to_cpu(second.dhidden)));
  EXPECT_TRUE(same_bits(to_cpu(first.dweight), to_cpu(second.dweight)));
}

}  // namespace
}  // namespace furious
