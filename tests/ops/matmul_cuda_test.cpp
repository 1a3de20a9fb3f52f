#include "cuda.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/random.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

// On the GPU in this dtype, with rows that lie apart by any distance.
Tensor apart(Random& random, const Tensor& matrix, DType dtype) {
  const int64_t before = random.integer(0, 3), after = random.integer(0, 9);
  const Tensor wide = Tensor::zeros({matrix.size(0), before + matrix.size(1) + after}, dtype, kGpu);
  const Tensor out = wide.slice(1, before, matrix.size(1));
  copy(out, to_gpu(matrix, dtype));
  return out;
}

// As the GPU sees it, in f32 on the CPU.
Tensor rounded(const Tensor& matrix, DType dtype) {
  return to_dtype(to_dtype(matrix, dtype), DType::f32);
}

void check_product(Random& random, int64_t rows, int64_t columns, int64_t inner, DType a_type, DType b_type,
                   DType out_type, MatmulPrecision precision) {
  MatmulOptions options{random.coin(), random.coin(), random.coin(), precision};
  const Tensor a = random.normal_tensor(options.transpose_a ? Shape{inner, rows} : Shape{rows, inner});
  const Tensor b = random.normal_tensor(options.transpose_b ? Shape{columns, inner} : Shape{inner, columns});
  const Tensor before = random.normal_tensor({rows, columns});
  const bool bf16 = precision == MatmulPrecision::bf16 || (a_type == DType::bf16 && b_type == DType::bf16);
  const auto as_multiplied = [&](const Tensor& x, DType dtype) {
    return bf16 ? rounded(rounded(x, dtype), DType::bf16) : rounded(x, dtype);
  };
  const Tensor expected = rounded(before, out_type);
  options.precision = MatmulPrecision::f32;
  matmul(expected, as_multiplied(a, a_type), as_multiplied(b, b_type), options);

  options.precision = precision;
  const Tensor out = apart(random, before, out_type);
  const Tensor a_there = apart(random, a, a_type), b_there = apart(random, b, b_type);
  matmul(out, a_there, b_there, options);
  EXPECT_LT(relative_error(to_cpu(out), expected), tolerance(out_type))
      << rows << " x " << columns << " x " << inner << " " << name_of(a_type) << " " << name_of(b_type) << " "
      << name_of(out_type);
}

// Of sizes that are tuned, into other memory than was there while they were.
TEST(MatmulCuda, TuningKeepsTheBits) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const DType out_type : {DType::bf16, DType::f32})
    for (const auto& [rows, columns, inner] :
         std::vector<std::array<int64_t, 3>>{{4096, 2048, 1024}, {1024, 1024, 8192}, {2000, 3000, 1040}})
      for (const bool transpose_a : {false, true})
        for (const bool accumulate : {false, true}) {
          SCOPED_TRACE(fmt::format("{} x {} x {} {}", rows, columns, inner, name_of(out_type)));
          const MatmulOptions options{transpose_a, !transpose_a, accumulate, MatmulPrecision::bf16};
          const auto normal = [&](const Shape& shape, DType dtype) {
            const Tensor x = Tensor::empty(shape, DType::f32, kGpu);
            fill_normal(x, 0, 1, 7, static_cast<uint64_t>(random.integer(0, 1000)));
            return to_dtype(x, dtype);
          };
          const Tensor a = normal(transpose_a ? Shape{inner, rows} : Shape{rows, inner}, DType::bf16);
          const Tensor b = normal(transpose_a ? Shape{inner, columns} : Shape{columns, inner}, DType::bf16);
          const Tensor before = normal({rows, columns}, out_type);
          const auto product = [&] {
            const Tensor out = Tensor::empty_like(before);
            copy(out, before);
            matmul(out, a, b, options);
            return to_cpu(out);
          };
          const Tensor expected = product();
          {
            const MatmulTuning tuning;
            EXPECT_TRUE(same_bits(product(), expected));
          }
          EXPECT_TRUE(same_bits(product(), expected));
          EXPECT_FALSE(MatmulTuning::active());
        }
}

TEST(MatmulCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (int i = 0; i < 60; ++i) {
    const int64_t most = random.pick<int64_t>({9, 70, 300});
    const int64_t rows = random.integer(1, most), columns = random.integer(1, most), inner = random.integer(1, most);
    for (const DType a : {DType::f32, DType::bf16}) {
      for (const DType b : {DType::f32, DType::bf16, DType::f16}) {
        check_product(random, rows, columns, inner, a, b, DType::f32, MatmulPrecision::f32);
        check_product(random, rows, columns, inner, a, b, DType::f32, MatmulPrecision::bf16);
        check_product(random, rows, columns, inner, a, b, DType::bf16, MatmulPrecision::bf16);
      }
    }
  }
}

TEST(MatmulCuda, ManyProducts) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (int i = 0; i < 60; ++i) {
    const int64_t count = random.integer(1, 5), rows = random.integer(1, 90), columns = random.integer(1, 90),
                  inner = random.integer(1, 90);
    MatmulOptions options{random.coin(), random.coin(), random.coin(), MatmulPrecision::f32};
    // Windows into longer matrices: those of a factor lie apart.
    const auto window = [&](int64_t first, int64_t second, bool transposed) {
      const int64_t height = transposed ? second : first, width = transposed ? first : second;
      const int64_t before = random.integer(0, 3);
      return std::pair{random.normal_tensor({count, before + height, width}), before};
    };
    const auto [a, a_from] = window(rows, inner, options.transpose_a);
    const auto [b, b_from] = window(inner, columns, options.transpose_b);
    const auto [expected, from] = window(rows, columns, false);
    const Tensor out = to_gpu(expected), a_there = to_gpu(a), b_there = to_gpu(b);
    const auto part = [](const Tensor& x, int64_t begin) { return x.slice(1, begin, x.size(1) - begin); };
    for (const MatmulPrecision precision : {MatmulPrecision::f32, MatmulPrecision::tf32}) {
      copy(out, to_gpu(expected));
      options.precision = precision;
      const Tensor here = to_dtype(expected, DType::f32);
      matmul(part(here, from), part(a, a_from), part(b, b_from), options);
      matmul(part(out, from), part(a_there, a_from), part(b_there, b_from), options);
      EXPECT_LT(relative_error(to_cpu(out), here), precision == MatmulPrecision::f32 ? 1e-5 : 2e-3)
          << count << " times " << rows << " x " << columns << " x " << inner;
    }
  }
}

TEST(MatmulCuda, LongSumsAndEmptyShapes) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const DType dtype : {DType::f32, DType::bf16})
    check_product(random, 16, 24, 20000, dtype, dtype, DType::f32, MatmulPrecision::f32);
  const auto zeros = [](int64_t rows, int64_t columns) { return Tensor::zeros({rows, columns}, DType::f32, kGpu); };
  const Tensor out = to_gpu(tensor_of({1, 2, 3, 4, 5, 6}, {2, 3}));
  matmul(out, zeros(2, 0), zeros(0, 3), {.accumulate = true});
  EXPECT_EQ(to_doubles(to_cpu(out)), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  matmul(out.slice(1, 0, 2), zeros(2, 0), zeros(0, 2));
  EXPECT_EQ(to_doubles(to_cpu(out)), (std::vector<double>{0, 0, 3, 0, 0, 6}));
  matmul(zeros(0, 3), zeros(0, 4), zeros(4, 3));
}

TEST(MatmulCuda, SameBitsTwice) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor a = to_gpu(random.normal_tensor({33, 9000}), dtype),
                 b = to_gpu(random.normal_tensor({9000, 40}), dtype);
    const Tensor first = Tensor::empty({33, 40}, DType::f32, kGpu), second = Tensor::empty({33, 40}, DType::f32, kGpu);
    matmul(first, a, b);
    for (int i = 0; i < 20; ++i) {
      matmul(second, a, b);
      ASSERT_TRUE(same_bits(to_cpu(first), to_cpu(second)));
    }
  }
}

TEST(MatmulCuda, BadInput) {
  SKIP_WITHOUT_GPU();
  const Tensor x = Tensor::zeros({2, 2}, DType::f32, kGpu), here = Tensor::zeros({2, 2}, DType::f32);
  const Tensor out = Tensor::zeros({2, 2}, DType::bf16, kGpu);
  expect_error([&] { matmul(x, x, here); }, {"\"b\"", "cpu", "cuda:0"});
  expect_error([&] { matmul(out, x, x); }, {"\"out\"", "bf16"});
  expect_error([&] { matmul(x, x, Tensor::zeros({3, 2}, DType::f32, kGpu)); }, {"\"b\"", "[3, 2]"});
}

TEST(MatmulCuda, Rate) {
  SKIP_WITHOUT_GPU();
  const double f32 = matmul_rate(MatmulPrecision::f32, kGpu), bf16 = matmul_rate(MatmulPrecision::bf16, kGpu);
  EXPECT_GT(f32, 1e11);
  EXPECT_GT(bf16, 2 * f32);
  EXPECT_EQ(matmul_library(kGpu).rfind("cuBLASLt ", 0), 0u);
}

}  // namespace
}  // namespace furious
