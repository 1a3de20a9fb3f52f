#include "ops/matmul.h"

#include <filesystem>

#include "base/parallel.h"
#include "signals.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::relative_error;
using testing::same_bits;
using testing::tensor_of;
using testing::to_doubles;

// op(a) op(b) + start, in double.
std::vector<double> product_oracle(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b,
                                   std::vector<double> start) {
  const std::vector<double> x = to_doubles(a);
  const std::vector<double> y = to_doubles(b);
  const int64_t rows = a.size(transpose_a ? 1 : 0);
  const int64_t inner = a.size(transpose_a ? 0 : 1);
  const int64_t columns = b.size(transpose_b ? 0 : 1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t k = 0; k < inner; ++k)
        start[i * columns + j] +=
            x[transpose_a ? k * rows + i : i * inner + k] * y[transpose_b ? j * inner + k : k * columns + j];
  return start;
}

// A matrix that may be a window into a wider one, so that its rows lie apart.
Tensor random_matrix(testing::Random& random, int64_t rows, int64_t columns, DType dtype = DType::f32) {
  const int64_t margin = random.integer(0, 3);
  const int64_t offset = random.integer(0, margin);
  return random.normal_tensor({rows, columns + margin}, 1, dtype).slice(1, offset, columns);
}

struct Case {
  int64_t rows, columns, inner;
};

void check_product(testing::Random& random, const Case& size, DType b_dtype, MatmulPrecision precision,
                   double tolerance) {
  const MatmulOptions options{random.coin(), random.coin(), random.coin(), precision};
  SCOPED_TRACE(fmt::format("[{}, {}] x [{}, {}] transposed {} {}, accumulate {}", size.rows, size.inner, size.inner,
                           size.columns, options.transpose_a, options.transpose_b, options.accumulate));
  const Tensor a =
      options.transpose_a ? random_matrix(random, size.inner, size.rows) : random_matrix(random, size.rows, size.inner);
  const Tensor b = options.transpose_b ? random_matrix(random, size.columns, size.inner, b_dtype)
                                       : random_matrix(random, size.inner, size.columns, b_dtype);
  const Tensor whole = random.normal_tensor({size.rows, size.columns + 2});
  if (!options.accumulate) fill(whole, NAN);  // previous contents must not matter
  const Tensor out = whole.slice(1, 1, size.columns);
  const std::vector<double> before = to_doubles(whole);
  std::vector<double> start(size.rows * size.columns, 0.0);
  if (options.accumulate) start = to_doubles(out);
  matmul(out, a, b, options);
  // Measured against the size of a typical result: a single dot product may cancel to nearly nothing.
  const double typical = std::sqrt(static_cast<double>(size.rows * size.columns * size.inner));
  const auto expected = product_oracle(a, options.transpose_a, b, options.transpose_b, start);
  EXPECT_LT(relative_error(out, expected, typical), tolerance);
  const std::vector<double> after = to_doubles(whole);
  for (int64_t i = 0; i < size.rows; ++i)
    for (int64_t column : {int64_t{0}, size.columns + 1}) {
      const int64_t at = i * (size.columns + 2) + column;
      EXPECT_TRUE(after[at] == before[at] || (std::isnan(after[at]) && std::isnan(before[at]))) << "margin written";
    }
}

TEST(Matmul, ManyProducts) {
  testing::Random random(11);
  const Tensor a = random.normal_tensor({3, 7, 5}), b = random.normal_tensor({3, 6, 5});
  const Tensor out = Tensor::empty({3, 7, 6}, DType::f32), one = Tensor::empty({7, 6}, DType::f32);
  matmul(out, a, b, {.transpose_b = true});
  for (int64_t i = 0; i < 3; ++i) {
    matmul(one, a.select(0, i), b.select(0, i), {.transpose_b = true});
    EXPECT_TRUE(same_bits(out.select(0, i), one));
  }
  expect_error([&] { matmul(out, a, b.slice(0, 0, 2), {.transpose_b = true}); }, {"\"b\"", "[2, 6, 5]"});
}

TEST(Matmul, AgreesWithTheOracleOnRandomShapes) {
  testing::Random random(10);
  for (int i = 0; i < 60; ++i)
    check_product(random, {random.integer(1, 40), random.integer(1, 40), random.integer(1, 70)}, DType::f32,
                  MatmulPrecision::f32, 1e-6);
}

TEST(Matmul, AgreesWithTheOracleOnThinShapes) {
  testing::Random random(11);
  for (const Case& size :
       {Case{1, 1, 1}, Case{1, 301, 64}, Case{301, 1, 64}, Case{1, 1, 500}, Case{65, 33, 1}, Case{1, 700, 130}})
    for (int i = 0; i < 8; ++i) check_product(random, size, DType::f32, MatmulPrecision::f32, 1e-6);
}

TEST(Matmul, AgreesWithTheOracleOnALargerShape) {
  testing::Random random(12);
  for (int i = 0; i < 4; ++i) check_product(random, {193, 257, 301}, DType::f32, MatmulPrecision::f32, 1e-6);
}

TEST(Matmul, AcceptsBf16AndF16Weights) {
  testing::Random random(13);
  for (DType dtype : {DType::bf16, DType::f16})
    for (int i = 0; i < 10; ++i)
      check_product(random, {random.integer(1, 20), random.integer(1, 20), random.integer(1, 40)}, dtype,
                    MatmulPrecision::f32, 1e-6);
}

TEST(Matmul, Bf16ProductsRoundTheFactorsOnly) {
  if (!matmul_supports(MatmulPrecision::bf16)) GTEST_SKIP() << matmul_library() << " has no bf16 products here";
  testing::Random random(14);
  const Tensor a = random.normal_tensor({37, 90});
  const Tensor b = random.normal_tensor({90, 51});
  const Tensor out = Tensor::empty({37, 51}, DType::f32);
  matmul(out, a, b, {.precision = MatmulPrecision::bf16});
  const std::vector<double> zero(37 * 51, 0.0);
  const auto rounded = product_oracle(to_dtype(a, DType::bf16), false, to_dtype(b, DType::bf16), false, zero);
  EXPECT_LT(relative_error(out, rounded), 1e-5);
  EXPECT_GT(relative_error(out, product_oracle(a, false, b, false, zero)), 1e-4);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (int i = 0; i < 12; ++i)
      check_product(random, {random.integer(1, 40), random.integer(1, 40), random.integer(1, 70)}, dtype,
                    MatmulPrecision::bf16, 1e-2);
}

TEST(Matmul, RefusesUnsupportedBf16Products) {
  if (matmul_supports(MatmulPrecision::bf16)) GTEST_SKIP() << matmul_library() << " has them here";
  const Tensor x = Tensor::zeros({2, 2}, DType::f32);
  expect_error(
      [&] {
        matmul(Tensor::zeros({2, 2}, DType::f32), x, x, {.precision = MatmulPrecision::bf16});
      },
      {"matmul", "bf16", matmul_library(), "f32"});
}

TEST(Matmul, EmptyShapes) {
  const auto zeros = [](int64_t rows, int64_t columns) { return Tensor::zeros({rows, columns}, DType::f32); };
  const Tensor out = tensor_of({1, 2, 3, 4, 5, 6}, {2, 3});
  matmul(out, zeros(2, 0), zeros(0, 3), {.accumulate = true});
  EXPECT_EQ(to_doubles(out), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  matmul(out.slice(1, 0, 2), zeros(2, 0), zeros(0, 2));
  EXPECT_EQ(to_doubles(out), (std::vector<double>{0, 0, 3, 0, 0, 6}));
  matmul(zeros(0, 3), zeros(0, 4), zeros(4, 3));
  matmul(zeros(3, 0), zeros(3, 4), zeros(4, 0));
}

TEST(Matmul, SameBitsTwice) {
  testing::Random random(15);
  const Tensor a = random.normal_tensor({129, 513});
  const Tensor b = random.normal_tensor({513, 77});
  const Tensor first = Tensor::empty({129, 77}, DType::f32);
  const Tensor second = Tensor::empty({129, 77}, DType::f32);
  matmul(first, a, b);
  matmul(second, a, b);
  EXPECT_TRUE(same_bits(first, second));
}

TEST(Matmul, RefusesBadInput) {
  const auto zeros = [](Shape shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor a = zeros({2, 3});
  const Tensor b = zeros({3, 4});
  const Tensor out = zeros({2, 4});
  expect_error([&] { matmul({}, a, b); }, {"matmul", "\"out\"", "missing"});
  expect_error([&] { matmul(out, {}, b); }, {"matmul", "\"a\"", "missing"});
  expect_error([&] { matmul(out, a, {}); }, {"matmul", "\"b\"", "missing"});
  expect_error([&] { matmul(out, zeros({6}), b); }, {"\"a\"", "rank 1", "rank 2"});
  expect_error([&] { matmul(zeros({3, 4}), a, b); }, {"\"a\"", "[2, 3]", "[3, 3]"});
  expect_error([&] { matmul(out, a, b, {.transpose_b = true}); }, {"\"b\"", "[3, 4]", "[4, 3]"});
  expect_error([&] { matmul(out, a, b, {.transpose_a = true}); }, {"\"a\"", "[2, 3]"});
  expect_error([&] { matmul(Tensor::zeros({2, 4}, DType::bf16), a, b); }, {"\"out\"", "bf16", "f32"});
  expect_error([&] { matmul(out, Tensor::zeros({2, 3}, DType::f64), b); }, {"\"a\"", "f64"});
  expect_error([&] { matmul(out, a, Tensor::zeros({3, 4}, DType::i32)); }, {"\"b\"", "i32", "f32 or bf16 or f16"});
  expect_error([&] { matmul(out, zeros({2, 3, 2}).select(2, 0), b); }, {"\"a\"", "stride 2"});
  float there = 0;
  const Tensor elsewhere = Tensor::wrap(&there, {2, 3}, DType::f32, {DeviceKind::cuda, 0});
  expect_error([&] { matmul(out, elsewhere, b); }, {"\"a\"", "cuda:0", "cpu"});
}

// Sizes that are cut into tiles: by rows, by columns, by both, and with a last tile that is smaller.
const std::vector<Case> kTiledCases = {
    {2048, 70, 256}, {130, 3000, 300}, {700, 900, 200}, {5, 9001, 130}, {1, 4100, 512}};

TEST(Matmul, TilesAgreeWithTheOracle) {
  testing::Random random(16);
  const ThreadLimit limit(3);
  for (const Case& size : kTiledCases) {
    check_product(random, size, DType::f32, MatmulPrecision::f32, 1e-6);
    if (matmul_supports(MatmulPrecision::bf16)) check_product(random, size, DType::bf16, MatmulPrecision::bf16, 1e-2);
  }
}

// And inside a loop, where there is one.
TEST(Matmul, SameBitsForAnyNumberOfThreads) {
  testing::Random random(17);
  for (const auto precision : {MatmulPrecision::f32, MatmulPrecision::bf16}) {
    if (!matmul_supports(precision)) continue;
    for (const Case& size : kTiledCases)
      for (const bool transpose : {false, true}) {
        const MatmulOptions options{transpose, !transpose, true, precision};
        const Tensor a =
            transpose ? random.normal_tensor({size.inner, size.rows}) : random.normal_tensor({size.rows, size.inner});
        const Tensor b = transpose ? random.normal_tensor({size.inner, size.columns})
                                   : random.normal_tensor({size.columns, size.inner});
        const Tensor start = random.normal_tensor({size.rows, size.columns});
        const auto product = [&] {
          const Tensor out = to_dtype(start, DType::f32);
          matmul(out, a, b, options);
          return out;
        };
        set_threads(1);
        const Tensor first = product();
        for (const int count : {2, 3, 7}) {
          set_threads(count);
          EXPECT_TRUE(same_bits(first, product())) << count << " threads";
        }
        parallel_for(2, [&](int64_t) { EXPECT_TRUE(same_bits(first, product())); });
        set_threads(0);
      }
  }
}

// The library could create threads of its own for each thread that calls it.
TEST(Matmul, CreatesNoThreadsOutsideThePool) {
  const auto tasks = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
  };
  const ThreadLimit limit(1);
  const Tensor x = Tensor::zeros({600, 600}, DType::f32);
  const auto before = tasks();
  for (const auto precision : {MatmulPrecision::f32, MatmulPrecision::bf16})
    if (matmul_supports(precision)) matmul(Tensor::empty({600, 600}, DType::f32), x, x, {.precision = precision});
  EXPECT_EQ(tasks(), before);
}

// A handler's frame would lie where kernels of oneDNN 2 keep data.
TEST(Matmul, SameBitsUnderConstantSignals) {
  testing::Random random(18);
  for (const auto precision : {MatmulPrecision::f32, MatmulPrecision::bf16}) {
    if (!matmul_supports(precision)) continue;
    std::vector<std::pair<Tensor, Tensor>> factors;
    for (const Case& size : {Case{256, 256, 256}, Case{64, 640, 100}, Case{1, 512, 512}, Case{1100, 600, 40}})
      factors.push_back(
          {random.normal_tensor({size.rows, size.inner}), random.normal_tensor({size.inner, size.columns})});
    const auto products = [&] {
      std::vector<Tensor> results;
      for (const auto& [a, b] : factors) {
        results.push_back(Tensor::empty({a.size(0), b.size(1)}, DType::f32));
        matmul(results.back(), a, b, {.precision = precision});
      }
      return results;
    };
    const ThreadLimit limit(2);
    const std::vector<Tensor> expected = products();
    const testing::ManySignals signals;
    const int64_t before = signals.handled();
    for (int repeat = 0; repeat < 40 || signals.handled() < before + 100; ++repeat) {
      const std::vector<Tensor> results = products();
      for (size_t i = 0; i < results.size(); ++i) ASSERT_TRUE(same_bits(results[i], expected[i])) << i;
    }
  }
}

TEST(Matmul, NamesItsLibrary) {
  const std::string name = matmul_library();
  EXPECT_TRUE(name.starts_with("oneDNN ") || name.starts_with("OpenBLAS ")) << name;
  EXPECT_NE(name.find('.'), std::string::npos) << name;
  EXPECT_EQ(std::count(name.begin(), name.end(), ' '), 1) << name;
}

}  // namespace
}  // namespace furious
