#include "ops/nn/embedding.h"

#include "base/parallel.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::int_tensor_of;
using testing::relative_error;
using testing::same_bits;
using testing::to_doubles;

using Vector = std::vector<double>;

Tensor random_tokens(testing::Random& random, const Shape& shape, int64_t vocabulary) {
  std::vector<int32_t> ids(shape.elements());
  for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(0, vocabulary - 1));
  return int_tensor_of(ids, shape);
}

Vector embedding_oracle(const Vector& table, int64_t dim, const Tensor& tokens) {
  Vector y;
  for (int64_t t = 0; t < tokens.elements(); ++t)
    for (int64_t i = 0; i < dim; ++i) y.push_back(table[tokens.data<int32_t>()[t] * dim + i]);
  return y;
}

TEST(Embedding, ForwardSelectsRows) {
  testing::Random random(30);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (int i = 0; i < 10; ++i) {
      const int64_t vocabulary = random.integer(1, 50);
      const int64_t dim = random.integer(1, 70);
      const Tensor table = random.normal_tensor({vocabulary, dim}, 1, dtype);
      const Tensor tokens = random_tokens(random, {random.integer(1, 3), random.integer(1, 300)}, vocabulary);
      const Tensor y = embedding_forward(table, tokens);
      EXPECT_EQ(y.shape(), (Shape{tokens.size(0), tokens.size(1), dim}));
      EXPECT_EQ(to_doubles(y), embedding_oracle(to_doubles(table), dim, tokens));
    }
}

TEST(Embedding, BackwardAgreesWithFiniteDifferences) {
  testing::Random random(31);
  for (int i = 0; i < 5; ++i) {
    const int64_t vocabulary = random.integer(1, 8);
    const int64_t dim = random.integer(1, 5);
    const Vector table = to_doubles(random.normal_tensor({vocabulary, dim}));
    const Tensor tokens = random_tokens(random, {2, random.integer(1, 9)}, vocabulary);
    const Tensor dy = random.normal_tensor({2, tokens.size(1), dim});
    const Tensor dtable = Tensor::empty({vocabulary, dim}, DType::f32);
    fill(dtable, NAN);
    embedding_backward({dtable, false}, dy, tokens);
    const auto oracle = [&](const Vector& at) { return embedding_oracle(at, dim, tokens); };
    EXPECT_LT(relative_error(dtable, testing::numeric_gradient(oracle, table, to_doubles(dy))), 1e-6);
  }
}

TEST(Embedding, BackwardHasTheSameBitsForAnyNumberOfThreads) {
  testing::Random random(32);
  const Tensor tokens = random_tokens(random, {4, 301}, 17);  // every token many times
  const Tensor dy = random.normal_tensor({4, 301, 133});
  const Tensor start = random.normal_tensor({17, 133});
  const auto run = [&](int count) {
    const int before = threads();
    set_threads(count);
    const Tensor dtable = to_dtype(start, DType::f32);
    embedding_backward({dtable, true}, dy, tokens);
    set_threads(before);
    return dtable;
  };
  const Tensor one = run(1);
  EXPECT_FALSE(same_bits(one, start));
  for (int count : {1, 2, 3, 5}) EXPECT_TRUE(same_bits(one, run(count))) << count;
}

TEST(Embedding, TapeAddsGradientsOfATableUsedTwice) {
  testing::Random random(33);
  const Variable table(random.normal_tensor({5, 3}), true);
  const Tensor first = int_tensor_of({0, 4, 4}, {3});
  const Tensor second = int_tensor_of({4, 1, 0}, {3});
  Tape tape;
  const Variable y = add(tape, embedding(tape, table, first), embedding(tape, table, second));
  const Tensor dy = testing::tensor_of({1, 2, 3, 10, 20, 30, 100, 200, 300}, {3, 3});
  tape.backward(y, dy);
  EXPECT_EQ(to_doubles(table.gradient()), (Vector{101, 202, 303, 10, 20, 30, 0, 0, 0, 0, 0, 0, 111, 222, 333}));
}

TEST(Embedding, NoTokens) {
  const Tensor table = Tensor::zeros({5, 3}, DType::f32);
  const Tensor tokens = Tensor::empty({2, 0}, DType::i32);
  EXPECT_EQ(embedding_forward(table, tokens).shape(), (Shape{2, 0, 3}));
  const Tensor dtable = Tensor::empty({5, 3}, DType::f32);
  fill(dtable, NAN);
  embedding_backward({dtable, false}, Tensor::empty({2, 0, 3}, DType::f32), tokens);
  EXPECT_EQ(to_doubles(dtable), Vector(15, 0.0));
}

TEST(Embedding, RefusesBadInput) {
  const Tensor table = Tensor::zeros({5, 3}, DType::f32);
  const Tensor tokens = int_tensor_of({0, 1, 2, 3}, {2, 2});
  expect_error([&] { embedding_forward({}, tokens); }, {"embedding", "\"table\"", "missing"});
  expect_error([&] { embedding_forward(table, {}); }, {"embedding", "\"tokens\"", "missing"});
  expect_error([&] { embedding_forward(table.view({15}), tokens); }, {"embedding", "\"table\"", "rank 1", "rank 2"});
  expect_error([&] { embedding_forward(table, Tensor::zeros({2}, DType::f32)); }, {"\"tokens\"", "f32", "i32"});
  expect_error([&] { embedding_forward(Tensor::zeros({5, 3}, DType::i32), tokens); }, {"\"table\"", "i32"});
  expect_error(
      [&] {
        embedding_forward(table, int_tensor_of({0, 1, 5, 2}, {2, 2}));
      },
      {"embedding", "\"tokens\"", "holds 5", "position [1, 0]", "5 tokens"});
  expect_error([&] { embedding_forward(table, int_tensor_of({-1}, {1})); }, {"embedding", "holds -1"});
  expect_error(
      [&] {
        embedding_backward({table}, Tensor::zeros({2, 2, 4}, DType::f32), tokens);
      },
      {"embedding_backward", "\"dy\"", "[2, 2, 4]", "[2, 2, 3]"});
  expect_error(
      [&] {
        embedding_backward({table}, Tensor::zeros({1, 3}, DType::f32), int_tensor_of({9}, {1}));
      },
      {"embedding_backward", "holds 9"});
  float there = 0;
  expect_error(
      [&] {
        embedding_forward(Tensor::wrap(&there, {1, 1}, DType::f32, {DeviceKind::cuda, 0}), tokens);
      },
      {"\"tokens\"", "cuda:0", "cpu"});
}

}  // namespace
}  // namespace furious
