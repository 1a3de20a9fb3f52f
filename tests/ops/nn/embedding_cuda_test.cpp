#include "ops/nn/embedding.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

// Few ids make long runs, a skewed choice makes some of both.
Tensor random_tokens(Random& random, const Shape& shape, int64_t vocabulary, bool skewed) {
  std::vector<int32_t> ids(shape.elements());
  for (int32_t& id : ids)
    id = static_cast<int32_t>(skewed && random.coin() ? vocabulary / 2 : random.integer(0, vocabulary - 1));
  return int_tensor_of(ids, shape);
}

TEST(EmbeddingCuda, ForwardSelectsRows) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t dim : {1, 33, 64, 1000}) {
      const Tensor table = random.normal_tensor({50, dim}), tokens = random_tokens(random, {2, 70}, 50, false);
      const Tensor y = embedding_forward(to_gpu(table), to_gpu(tokens), dtype);
      EXPECT_EQ(y.dtype(), dtype);
      EXPECT_TRUE(same_bits(to_cpu(y), to_dtype(embedding_forward(table, tokens), dtype)));
    }
}

TEST(EmbeddingCuda, BackwardMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (DType dtype : kActivationTypes)
    for (int64_t vocabulary : {1, 3, 40, 5000})
      for (int64_t count : {1, 31, 32, 33, 1000})
        for (int64_t dim : {1, 33, 64, 520})
          for (bool holds_sum : {false, true}) {
            const Tensor tokens = random_tokens(random, {count}, vocabulary, random.coin());
            const Tensor dy = rounded(random.normal_tensor({count, dim}), dtype);
            const Tensor start = random.normal_tensor({vocabulary, dim});
            const Tensor expected = to_dtype(start, DType::f32), actual = to_gpu(start), again = to_gpu(start);
            embedding_backward({expected, holds_sum}, dy, tokens);
            embedding_backward({actual, holds_sum}, to_gpu(dy, dtype), to_gpu(tokens));
            embedding_backward({again, holds_sum}, to_gpu(dy, dtype), to_gpu(tokens));
            EXPECT_LT(gpu_error(actual, expected), 1e-4)
                << vocabulary << " ids, " << count << " tokens of " << dim << (holds_sum ? ", added" : "");
            EXPECT_TRUE(same_gpu_bits(actual, again));
          }
}

TEST(EmbeddingCuda, RecordsItsGradient) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const Tensor table = random.normal_tensor({20, 16}), tokens = random_tokens(random, {3, 40}, 20, false);
  const Tensor dy = rounded(random.normal_tensor({3, 40, 16}), DType::bf16);
  const Variable here(table, true), there(to_gpu(table), true);
  Tape tape;
  tape.backward(embedding(tape, here, tokens), dy);
  tape.backward(embedding(tape, there, to_gpu(tokens), DType::bf16), to_gpu(dy, DType::bf16));
  EXPECT_EQ(there.gradient().dtype(), DType::f32);
  EXPECT_LT(gpu_error(there.gradient(), here.gradient()), 1e-5);
}

}  // namespace
}  // namespace furious
