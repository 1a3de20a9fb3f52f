#include "cuda.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

// A view [3, 5, 2, dim] into a larger tensor, whose rows begin `offset` numbers in.
Tensor part_of(const Tensor& whole, int64_t offset, int64_t dim) {
  return whole.slice(2, offset, 2 * dim).split_dim(2, 2, dim);
}

// Aligned rows are loaded 16 bytes at a time, others number by number; both write the view and nothing else.
TEST(ElementwiseCuda, StridedRowsMatchTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const int64_t dim : {1, 7, 8, 64}) {
    for (const int64_t offset : {0, 3, 8}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        SCOPED_TRACE(fmt::format("heads of {}, offset {}, {}", dim, offset, name_of(dtype)));
        const int64_t width = 2 * dim + 16;
        const Tensor base = to_dtype(to_dtype(random.normal_tensor({3, 5, width}), dtype), DType::f32);
        const Tensor other = to_dtype(to_dtype(random.normal_tensor({3, 5, width}), dtype), DType::f32);
        const Tensor dense = to_dtype(part_of(other, 0, dim), DType::f32);
        // The CPU adds in f32; the GPU rounds the sum once.
        const auto expected = [&](bool adds) {
          const Tensor all = to_dtype(base, DType::f32);
          adds ? add_into(part_of(all, offset, dim), dense) : copy(part_of(all, offset, dim), dense);
          return to_dtype(all, dtype);
        };
        const Tensor dense_there = to_gpu(dense, dtype), other_there = to_gpu(other, dtype);
        for (const Tensor& in : {dense_there, part_of(other_there, 0, dim)}) {
          const Tensor sum = to_gpu(base, dtype), copied = to_gpu(base, dtype);
          add_into(part_of(sum, offset, dim), in);
          EXPECT_TRUE(same_bits(to_cpu(sum), expected(true)));
          copy(part_of(copied, offset, dim), in);
          EXPECT_TRUE(same_bits(to_cpu(copied), expected(false)));
        }
        // Conversions.
        const DType wide = dtype == DType::f32 ? DType::bf16 : DType::f32;
        EXPECT_TRUE(same_bits(to_cpu(to_dtype(part_of(other_there, 0, dim), wide)), to_dtype(dense, wide)));
        EXPECT_TRUE(same_bits(to_cpu(to_dtype(part_of(other_there, 0, dim), DType::f16)), to_dtype(dense, DType::f16)));
        EXPECT_TRUE(same_bits(to_cpu(to_dtype(part_of(other_there, 0, dim), DType::f64)), to_dtype(dense, DType::f64)));
      }
    }
  }
}

TEST(ElementwiseCuda, IntegersAndColumnsFollowTheirStrides) {
  SKIP_WITHOUT_GPU();
  std::vector<int32_t> numbers(48);
  for (int32_t i = 0; i < 48; ++i) numbers[static_cast<size_t>(i)] = (1 << 30) + i;  // more bits than f32 has
  const Tensor here = int_tensor_of(numbers, {6, 8}), there = to_gpu(here);
  const Tensor out = Tensor::empty({6, 4}, DType::i32), out_there = Tensor::empty({6, 4}, DType::i32, kGpu);
  copy(out, here.slice(1, 4, 4));
  copy(out_there, there.slice(1, 4, 4));
  const Tensor back = Tensor::empty({6, 4}, DType::i32);
  copy_between(back, out_there);
  EXPECT_TRUE(same_bits(back, out));
  Random random(2);
  const Tensor x = random.normal_tensor({6, 5});
  EXPECT_TRUE(same_bits(to_cpu(to_dtype(to_gpu(x).select(1, 2), DType::f32)), to_dtype(x.select(1, 2), DType::f32)));
}

}  // namespace
}  // namespace furious
