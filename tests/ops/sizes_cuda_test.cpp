// Tensors of more than 2³¹ elements on a GPU. Where an index of 32 bits would wrap around, results are compared with
// those of the CPU for a few rows: the first, those around element 2³¹, and the last.
#include <algorithm>

#include "base/random.h"
#include "cuda.h"
#include "ops/matmul.h"
#include "ops/nn/activation.h"
#include "ops/nn/cross_entropy.h"
#include "ops/nn/embedding.h"
#include "ops/nn/rms_norm.h"
#include "ops/nn/rope.h"
#include "ops/optim/adamw.h"
#include "ops/random.h"
#include "support.h"
#include "tensor/arena.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr int64_t kDim = 1024;
constexpr int64_t kRows = (int64_t{1} << 21) + 5;  // × kDim: more than 2³¹ elements

class SizesCuda : public ::testing::Test {
 protected:
  void TearDown() override {
    if (!describe_cuda_devices().empty()) Arena::of(kGpu).trim();
  }
};

#define SKIP_BELOW_GIB(gib)                         \
  SKIP_WITHOUT_GPU();                               \
  Arena::of(kGpu).trim();                           \
  if (memory::available(kGpu) < int64_t{gib} << 30) \
  GTEST_SKIP() << "needs " << (gib) << " GiB of GPU memory, " << (memory::available(kGpu) >> 30) << " are free"

// Random numbers on the GPU.
Tensor random_on_gpu(const Shape& shape, DType dtype, uint64_t stream) {
  const Tensor values = Tensor::empty(shape, DType::f32, kGpu);
  fill_normal(values, 0, 1, 1, stream);
  return dtype == DType::f32 ? values : to_dtype(values, dtype);
}

// Rows that show where an index wraps around.
std::vector<int64_t> telling_rows(int64_t rows, int64_t dim) {
  const int64_t wrap = (int64_t{1} << 31) / dim;
  std::vector<int64_t> telling{0, wrap - 1, wrap, wrap + 1, rows - 1};
  std::erase_if(telling, [&](int64_t row) { return row < 0 || row >= rows; });
  return telling;
}

// Those rows of [rows, dim] on the CPU, in f32.
Tensor some_rows(const Tensor& matrix, const std::vector<int64_t>& rows) {
  const Tensor some = Tensor::empty({static_cast<int64_t>(rows.size()), matrix.size(1)}, DType::f32);
  for (size_t i = 0; i < rows.size(); ++i)
    copy(some.slice(0, static_cast<int64_t>(i), 1), to_cpu(to_dtype(matrix.slice(0, rows[i], 1), DType::f32)));
  return some;
}

// Writes rows of the CPU there.
void put_rows(const Tensor& matrix, const std::vector<int64_t>& rows, const Tensor& some) {
  for (size_t i = 0; i < rows.size(); ++i)
    copy(matrix.slice(0, rows[i], 1), to_gpu(some.slice(0, static_cast<int64_t>(i), 1)));
}

TEST_F(SizesCuda, Elementwise) {
  SKIP_BELOW_GIB(40);
  const int64_t count = (int64_t{1} << 31) + 4099;  // a last group of eight that is not full
  const Tensor x = Tensor::empty({count}, DType::f32, kGpu);
  fill(x, 1);
  EXPECT_DOUBLE_EQ(gradient_norm(std::span(&x, 1)), std::sqrt(static_cast<double>(count)));
  const std::vector<int64_t> places{0, (int64_t{1} << 31) - 4, int64_t{1} << 31, count - 4};
  for (size_t i = 0; i < places.size(); ++i) fill(x.slice(0, places[i], 4), static_cast<float>(i + 2));
  const Tensor y = to_dtype(x, DType::bf16);
  add_into(y, y);
  const Tensor odd =
      Tensor::empty({count + 1}, DType::f32, kGpu).slice(0, 1, count);  // not aligned: element by element
  copy(odd, y);
  for (size_t i = 0; i < places.size(); ++i)
    EXPECT_TRUE(same_bits(to_cpu(odd.slice(0, places[i], 4)), tensor_of(std::vector<float>(4, 2 * (i + 2)), {4})));
  double squares = 4.0 * static_cast<double>(count - 16);
  for (size_t i = 0; i < places.size(); ++i) squares += 4 * 4 * static_cast<double>((i + 2) * (i + 2));
  const Tensor sum = to_dtype(odd, DType::f32);
  EXPECT_DOUBLE_EQ(gradient_norm(std::span(&sum, 1)), std::sqrt(squares));
}

TEST_F(SizesCuda, RandomNumbersAreThoseOfTheCpu) {
  SKIP_BELOW_GIB(10);
  const int64_t count = (int64_t{1} << 31) + 8;
  const Tensor x = Tensor::empty({count}, DType::f32, kGpu);
  fill_uniform(x, 0, 1, 1, 2);
  std::vector<float> last(4);
  four_uniform(1, 2, static_cast<uint64_t>(count / 4 - 1), last.data());
  EXPECT_TRUE(same_bits(to_cpu(x.slice(0, count - 4, 4)), tensor_of(last, {4})));
}

TEST_F(SizesCuda, RmsNorm) {
  SKIP_BELOW_GIB(40);
  const Tensor x = random_on_gpu({kRows, kDim}, DType::bf16, 2);
  Random random(1);
  const Tensor weight = random.normal_tensor({kDim});
  const RmsNormResult result = rms_norm_forward(x, to_gpu(weight), 1e-5f);
  const std::vector<int64_t> rows = telling_rows(kRows, kDim);
  const Tensor some = some_rows(x, rows);
  const RmsNormResult expected = rms_norm_forward(some, weight, 1e-5f);
  EXPECT_LE(relative_error(some_rows(result.y, rows), expected.y), 1e-2);

  // Gradients that are zero but in these rows: the weight's is theirs.
  const Tensor dy = result.y;
  fill(dy, 0);
  const Tensor some_dy = to_dtype(to_dtype(random.normal_tensor({some.size(0), kDim}), DType::bf16), DType::f32);
  put_rows(dy, rows, to_dtype(some_dy, DType::bf16));
  const RmsNormGradients out{Tensor::empty_like(x), Tensor::empty({kDim}, DType::f32, kGpu), {}};
  rms_norm_backward(out, dy, x, to_gpu(weight), result.inverse_rms);
  const RmsNormGradients wanted{Tensor::empty_like(some), Tensor::empty({kDim}, DType::f32), {}};
  rms_norm_backward(wanted, some_dy, some, weight, expected.inverse_rms);
  EXPECT_LE(relative_error(some_rows(out.x, rows), wanted.x), 1e-2);
  EXPECT_LE(relative_error(to_cpu(out.weight), wanted.weight), 1e-4);
}

TEST_F(SizesCuda, Matmul) {
  SKIP_BELOW_GIB(40);
  constexpr int64_t kSmall = 64;
  const Tensor x = random_on_gpu({kRows, kDim}, DType::bf16, 2);
  const Tensor w = random_on_gpu({kSmall, kDim}, DType::bf16, 3);
  const std::vector<int64_t> rows = telling_rows(kRows, kDim);
  const Tensor some = some_rows(x, rows), weight = to_cpu(to_dtype(w, DType::f32));
  const auto on_cpu = [](const Shape& shape, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
    const Tensor out = Tensor::empty(shape, DType::f32);
    matmul(out, a, b, options);
    return out;
  };
  const auto count = static_cast<int64_t>(rows.size());
  // A large factor.
  const Tensor y = Tensor::empty({kRows, kSmall}, DType::bf16, kGpu);
  matmul(y, x, w, {.transpose_b = true});
  EXPECT_LE(relative_error(some_rows(y, rows), on_cpu({count, kSmall}, some, weight, {.transpose_b = true})), 1e-2);
  // A sum over its rows, most of which are multiplied by zero.
  fill(y, 0);
  Random random(2);
  const Tensor some_dy = to_dtype(random.normal_tensor({count, kSmall}), DType::bf16);
  put_rows(y, rows, some_dy);
  const Tensor dw = Tensor::empty({kSmall, kDim}, DType::f32, kGpu);
  matmul(dw, y, x, {.transpose_a = true});
  EXPECT_LE(
      relative_error(to_cpu(dw), on_cpu({kSmall, kDim}, to_dtype(some_dy, DType::f32), some, {.transpose_a = true})),
      1e-4);
  // A large result, of factors that are none.
  const Tensor dx = Tensor::empty({kRows, kDim}, DType::bf16, kGpu);
  matmul(dx, y, w);
  EXPECT_LE(relative_error(some_rows(dx, rows), on_cpu({count, kDim}, to_dtype(some_dy, DType::f32), weight, {})),
            1e-2);
}

TEST_F(SizesCuda, CrossEntropy) {
  SKIP_BELOW_GIB(40);
  constexpr int64_t kVocabulary = 64;
  const Tensor hidden = random_on_gpu({kRows, kDim}, DType::bf16, 2);
  Random random(3);
  const Tensor weight = random.normal_tensor({kVocabulary, kDim}, 0.05);
  const std::vector<int64_t> rows = telling_rows(kRows, kDim);
  // Only these rows have a target.
  const auto count = static_cast<int64_t>(rows.size());
  const Tensor some = some_rows(hidden, rows), some_targets = Tensor::empty({count}, DType::i32);
  const Tensor targets = Tensor::empty({kRows}, DType::i32);
  std::fill_n(targets.data<int32_t>(), kRows, kIgnoredTarget);
  for (int64_t i = 0; i < count; ++i)
    targets.data<int32_t>()[rows[i]] = some_targets.data<int32_t>()[i] = static_cast<int32_t>(7 * i + 1);
  const Tensor losses = Tensor::empty({kRows}, DType::f32, kGpu), some_losses = Tensor::empty({count}, DType::f32);
  const CrossEntropyResult found = cross_entropy_forward(
      hidden, to_gpu(weight), to_gpu(targets),
      {.hidden_gradient = true, .weight_gradient = true, .row_losses = losses, .precision = MatmulPrecision::bf16});
  const CrossEntropyResult expected = cross_entropy_forward(
      some, weight, some_targets, {.hidden_gradient = true, .weight_gradient = true, .row_losses = some_losses});
  EXPECT_EQ(*to_cpu(found.counted).data<int32_t>(), count);
  EXPECT_NEAR(*to_cpu(found.loss).data<float>(), *expected.loss.data<float>(), 0.02);
  EXPECT_LE(relative_error(some_rows(losses.view({kRows, 1}), rows), some_losses.view({count, 1})), 1e-2);
  EXPECT_LE(relative_error(some_rows(found.hidden_gradient, rows), expected.hidden_gradient), 2e-2);
  EXPECT_LE(relative_error(to_cpu(found.weight_gradient), expected.weight_gradient), 2e-2);
}

// A table, and then activations, of more than 2³¹ elements.
TEST_F(SizesCuda, Embedding) {
  SKIP_BELOW_GIB(40);
  const std::vector<int64_t> ids = telling_rows(kRows, kDim);
  const auto count = static_cast<int64_t>(ids.size());
  const Tensor tokens = Tensor::empty({count}, DType::i32);
  for (int64_t i = 0; i < count; ++i) tokens.data<int32_t>()[i] = static_cast<int32_t>(ids[i]);
  Random random(4);
  {
    const Tensor table = random_on_gpu({kRows, kDim}, DType::f32, 2);
    EXPECT_TRUE(same_bits(to_cpu(embedding_forward(table, to_gpu(tokens))), some_rows(table, ids)));
    const Tensor dy = random.normal_tensor({count, kDim});
    embedding_backward({table, false}, to_gpu(dy), to_gpu(tokens));  // overwrites
    EXPECT_TRUE(same_bits(some_rows(table, ids), dy));
    EXPECT_NEAR(gradient_norm(std::span(&table, 1)), gradient_norm(std::span(&dy, 1)), 1e-3);
  }
  constexpr int64_t kVocabulary = 100;
  const Tensor dy = Tensor::empty({kRows, kDim}, DType::bf16, kGpu), all = Tensor::zeros({kRows}, DType::i32);
  fill(dy, 0);
  const Tensor some = to_dtype(random.normal_tensor({count, kDim}), DType::bf16);
  put_rows(dy, ids, some);
  for (int64_t i = 0; i < count; ++i) all.data<int32_t>()[ids[i]] = static_cast<int32_t>(90 + i);
  const Tensor gradient = Tensor::empty({kVocabulary, kDim}, DType::f32, kGpu);
  embedding_backward({gradient, false}, dy, to_gpu(all));
  EXPECT_TRUE(same_bits(to_cpu(gradient).slice(0, 90, count), to_dtype(some, DType::f32)));
  const Tensor y = embedding_forward(gradient, to_gpu(all), DType::bf16);
  EXPECT_TRUE(same_bits(some_rows(y, ids), to_dtype(some, DType::f32)));
}

// Rows that are not aligned: one element is one item, and there are more than a launch counts.
TEST_F(SizesCuda, RowsOfSeveralLaunches) {
  SKIP_BELOW_GIB(40);
  constexpr int64_t kOdd = 1023, kMany = (int64_t{1} << 31) / kOdd + 7;
  const Tensor x = random_on_gpu({kMany, kOdd}, DType::bf16, 2);
  std::vector<int64_t> rows = telling_rows(kMany, kOdd);
  const Tensor y = activation_forward(x, Activation::silu);
  EXPECT_LE(relative_error(some_rows(y, rows), activation_forward(some_rows(x, rows), Activation::silu)), 1e-2);
}

TEST_F(SizesCuda, RopeOfSeveralLaunches) {
  SKIP_BELOW_GIB(60);
  constexpr int64_t kLength = 1 << 19, kBatch = 4100;  // × 1 pair: more than 2³¹ items
  const Tensor x = Tensor::empty({kBatch, kLength, 1, 2}, DType::bf16, kGpu);
  fill(x, 1);
  const Tensor y = rope_forward(x, {.pairing = RopePairing::interleaved});
  const Tensor row = Tensor::empty({1, kLength, 1, 2}, DType::f32);
  fill(row, 1);
  const Tensor expected = rope_forward(row, {.pairing = RopePairing::interleaved});
  for (const int64_t i : {int64_t{0}, kBatch / 2, kBatch - 5, kBatch - 1})
    EXPECT_LE(relative_error(to_cpu(to_dtype(y.slice(0, i, 1), DType::f32)), expected), 1e-2) << "row " << i;
}

TEST_F(SizesCuda, OutOfMemoryIsAnErrorAfterWhichWorkGoesOn) {
  SKIP_WITHOUT_GPU();
  expect_error([] { Tensor::empty({int64_t{1} << 42}, DType::f32, kGpu); },
               {"out of memory on cuda:0", "MiB requested", "are free"});
  const Tensor x = Tensor::empty({4}, DType::f32, kGpu);
  fill(x, 3);
  EXPECT_TRUE(same_bits(to_cpu(x), tensor_of({3, 3, 3, 3}, {4})));
}

}  // namespace
}  // namespace furious
