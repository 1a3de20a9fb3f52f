#include "ops/nn/rope.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

Tensor random_starts(Random& random, int64_t tokens) {
  std::vector<int32_t> starts;
  for (int32_t token = 0; token < tokens; ++token)
    if (random.integer(0, 3) == 0) starts.push_back(token);
  return int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
}

void expect_match(Random& random, const Shape& shape, const Rope& rope, DType dtype, int64_t margin,
                  const Tensor& boundaries) {
  const Tensor x = rounded(random.normal_tensor(shape), dtype), dy = rounded(random.normal_tensor(shape), dtype);
  const Tensor y = rope_forward(gpu_copy_heads(x, dtype, margin), rope, boundaries);
  EXPECT_EQ(y.dtype(), dtype);
  EXPECT_LT(gpu_error(y, rope_forward(x, rope, boundaries)), tolerance(dtype)) << to_string(shape) << margin;
  const Tensor expected = Tensor::empty_like(x), actual = gpu_empty_heads(shape, dtype, margin);
  rope_backward(expected, dy, rope, boundaries);
  rope_backward(actual, to_gpu(dy, dtype), rope, boundaries);
  EXPECT_LT(gpu_error(actual, expected), tolerance(dtype)) << to_string(shape) << margin;
}

class RopeCuda : public ::testing::TestWithParam<RopePairing> {};
INSTANTIATE_TEST_SUITE_P(Pairings, RopeCuda, ::testing::Values(RopePairing::halves, RopePairing::interleaved));

TEST_P(RopeCuda, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (const Shape& shape :
           {Shape{1, 1, 1, 2}, Shape{2, 9, 3, 64}, Shape{3, 7, 2, 26}, Shape{1, 1, 16, 128}, Shape{3, 1500, 19, 16}})
        for (bool packed : {false, true}) {
          Rope rope{GetParam(), random.pick<double>({100, 10000}), random.pick<int64_t>({0, 5, 100000})};
          rope.scaling = random.pick<RopeScaling>({{}, {4, 0, 0, 0}, {8, 1, 4, 64}});
          expect_match(random, shape, rope, dtype, margin,
                       packed ? random_starts(random, shape[0] * shape[1]) : Tensor());
        }
}

TEST_P(RopeCuda, RowsStartAtThePositionsOfTheirSlots) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (DType dtype : kActivationTypes) {
    const Tensor x = rounded(random.normal_tensor({3, 1, 2, 64}), dtype);
    const Tensor records = int_tensor_of({0, 7, 0, 123456, 0, 0, 0, 64}, {4, 2});
    const Tensor rows = int_tensor_of({3, 1, 0}, {3});
    const Tensor there = Tensor::empty({4, 2}, DType::i32, kGpu);
    copy_between(there, records);
    const Tensor y = rope_forward(to_gpu(x, dtype), {GetParam(), 10000, 2, there.select(1, 1), to_gpu(rows)});
    const Tensor expected = rope_forward(x, {GetParam(), 10000, 2, records.select(1, 1), rows});
    for (int64_t row = 0; row < 3; ++row)
      EXPECT_LT(gpu_error(y.slice(0, row, 1), expected.slice(0, row, 1)), tolerance(dtype)) << row;
  }
}

TEST_P(RopeCuda, IsAccurateAtLargePositions) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const Tensor x = random.normal_tensor({1, 8, 2, 64});
  const Rope rope{GetParam(), 10000, int64_t{1} << 28};
  EXPECT_LT(gpu_error(rope_forward(to_gpu(x), rope), rope_forward(x, rope)), 1e-5);
}

}  // namespace
}  // namespace furious
