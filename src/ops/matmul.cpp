#include "ops/matmul.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "ops/fp8.h"
#include "ops/matmul_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

#ifdef FURIOUS_ONEDNN
#include <omp.h>

#include <dnnl.hpp>
#else
#include <cblas.h>
#endif

namespace furious {
namespace {

// A matrix as the libraries see it. No Tensor: tiles are made by several threads, which would count views of one.
struct Matrix {
  std::byte* data;
  int64_t rows, columns, stride;
  DType dtype;

  Matrix(const Tensor& tensor)
      : data(static_cast<std::byte*>(tensor.raw())),
        rows(tensor.size(0)),
        columns(tensor.size(1)),
        stride(row_stride(tensor)),
        dtype(tensor.dtype()) {}
  Matrix part(int64_t row, int64_t row_count, int64_t column, int64_t column_count) const {
    Matrix matrix = *this;
    matrix.data += (row * stride + column) * static_cast<int64_t>(size_of(dtype));
    matrix.rows = row_count;
    matrix.columns = column_count;
    return matrix;
  }
  float* floats() const { return reinterpret_cast<float*>(data); }
};

// out = or += op(a) · op(b), with everything checked.
struct Product {
  Matrix out, a, b;
  bool transpose_a, transpose_b, accumulate;

  int64_t rows() const { return out.rows; }
  int64_t columns() const { return out.columns; }
  int64_t inner() const { return transpose_a ? a.rows : a.columns; }

  // Rows and columns of the result by themselves.
  Product part(int64_t row, int64_t row_count, int64_t column, int64_t column_count) const {
    Product tile = *this;
    tile.out = out.part(row, row_count, column, column_count);
    tile.a = transpose_a ? a.part(0, a.rows, row, row_count) : a.part(row, row_count, 0, a.columns);
    tile.b = transpose_b ? b.part(column, column_count, 0, b.columns) : b.part(0, b.rows, column, column_count);
    return tile;
  }
};

// While it lives, this thread handles no signal that others send: kernels of oneDNN 2 keep data below the stack
// pointer, where the handler's frame would lie. A fault of the program itself (SIGSEGV) is still one. The system call
// rather than pthread_sigmask, which leaves out the signals that the C library sends itself, as setuid does to all
// threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    const uint64_t kOwnFaults = bit(SIGSEGV) | bit(SIGBUS) | bit(SIGFPE) | bit(SIGILL) | bit(SIGTRAP) | bit(SIGSYS);
    set(~kOwnFaults, &before_);
  }
  ~SignalsBlocked() { set(before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  static constexpr uint64_t bit(int signal) { return uint64_t{1} << (signal - 1); }
  static void set(uint64_t mask, uint64_t* before) {
    ::syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, before, sizeof(mask));
  }
  uint64_t before_ = 0;
};

#ifdef FURIOUS_ONEDNN

// While it lives, OpenMP has one thread for this one: oneDNN computes here, and makes none.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

// Before oneDNN is used for the first time. The AMX kernels of oneDNN 2 end in an illegal instruction under Linux:
// AVX-512 is the most that it may use.
void prepare_onednn() {
  [[maybe_unused]] static const bool done = [] {
    if (dnnl_version()->major < 3 && std::getenv("DNNL_MAX_CPU_ISA") == nullptr)
      (void)dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16);
    return true;
  }();
}

// dnnl_sgemm rather than the matmul primitive: as fast on large shapes and 3 to 4 times faster on a single row.
void multiply_f32(const Product& p) {
  prepare_onednn();
  const dnnl_status_t status = dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.rows(), p.columns(),
                                          p.inner(), 1.0f, p.a.floats(), p.a.stride, p.b.floats(), p.b.stride,
                                          p.accumulate ? 1.0f : 0.0f, p.out.floats(), p.out.stride);
  require(status == dnnl_success, "matmul: oneDNN refused a product of [{}, {}] and [{}, {}]", p.rows(), p.inner(),
          p.inner(), p.columns());
}

dnnl::engine& cpu_engine() {
  prepare_onednn();
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// How oneDNN sees a matrix, or its transpose: without copying.
dnnl::memory::desc describe(const Matrix& matrix, bool transpose) {
  const auto type = matrix.dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  return transpose ? dnnl::memory::desc({matrix.columns, matrix.rows}, type, dnnl::memory::dims{1, matrix.stride})
                   : dnnl::memory::desc({matrix.rows, matrix.columns}, type, dnnl::memory::dims{matrix.stride, 1});
}

// oneDNN keeps the code it has generated for a shape, so making the primitive again costs microseconds.
dnnl::matmul::primitive_desc bf16_product(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                                          const dnnl::memory::desc& out, bool accumulate) {
  dnnl::primitive_attr attributes;
  if (accumulate) {
    dnnl::post_ops add_to_out;
    add_to_out.append_sum(1.0f);
    attributes.set_post_ops(add_to_out);
  }
  return {dnnl::matmul::desc(a, b, out), attributes, cpu_engine()};
}

void multiply_bf16(const Product& p) {
  dnnl::stream stream(cpu_engine());
  const auto description =
      bf16_product(describe(p.a, p.transpose_a), describe(p.b, p.transpose_b), describe(p.out, false), p.accumulate);
  dnnl::matmul(description)
      .execute(stream, {{DNNL_ARG_SRC, dnnl::memory(description.src_desc(), cpu_engine(), p.a.data)},
                        {DNNL_ARG_WEIGHTS, dnnl::memory(description.weights_desc(), cpu_engine(), p.b.data)},
                        {DNNL_ARG_DST, dnnl::memory(description.dst_desc(), cpu_engine(), p.out.data)}});
  stream.wait();
}

bool has_bf16() {
  static const bool answer = [] {
    using Type = dnnl::memory::data_type;
    const auto square = [](Type type) { return dnnl::memory::desc({16, 16}, type, dnnl::memory::dims{16, 1}); };
    try {
      bf16_product(square(Type::bf16), square(Type::bf16), square(Type::f32), false);
      return true;
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return answer;
}

#else

// OpenBLAS may come with threads of its own; products are divided among ours.
struct OneThread {
  OneThread() { [[maybe_unused]] static const bool done = (openblas_set_num_threads(1), true); }
};

void multiply_f32(const Product& p) {
  cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans, p.transpose_b ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(p.rows()), static_cast<blasint>(p.columns()), static_cast<blasint>(p.inner()), 1.0f,
              p.a.floats(), static_cast<blasint>(p.a.stride), p.b.floats(), static_cast<blasint>(p.b.stride),
              p.accumulate ? 1.0f : 0.0f, p.out.floats(), static_cast<blasint>(p.out.stride));
}

void multiply_bf16(const Product&) {}

bool has_bf16() {
  return false;
}

#endif

// How the result is cut into tiles, by the sizes alone: so its bits do not depend on the number of threads.
struct Tiling {
  int64_t rows, columns;  // of a tile

  explicit Tiling(const Product& p) : rows(p.rows()), columns(p.columns()) {
    // Flops of a tile that is worth a thread, of two tiles that are, and of one that may be divided further.
    constexpr int64_t kTileFlops = 32'000'000, kPairFlops = 8'000'000, kLargeTileFlops = 1'000'000'000;
    constexpr int64_t kTileBytes = 1 << 18;  // of the right factor, where it is read for a few rows only
    constexpr int64_t kFewRows = 16, kTiles = 8, kMostTiles = 32;
    constexpr int64_t kLeastRows = 64, kLeastColumns = 128;  // smaller ones take longer for an element
    const int64_t flops = 2 * p.rows() * p.columns() * p.inner();
    int64_t wanted = std::max<int64_t>(flops / kTileFlops, flops >= kPairFlops ? 2 : 1);
    if (p.rows() < kFewRows)
      wanted = std::min(kMostTiles, 4 * p.columns() * p.inner() / kTileBytes);
    else
      wanted = std::min(wanted, std::clamp(flops / kLargeTileFlops, kTiles, kMostTiles));
    while (count(p) < wanted) {
      const bool by_rows = rows >= 2 * kLeastRows && (rows >= columns || columns < 2 * kLeastColumns);
      if (!by_rows && columns < 2 * kLeastColumns) return;
      halve(by_rows ? rows : columns);
    }
  }
  int64_t row_tiles(const Product& p) const { return (p.rows() + rows - 1) / rows; }
  int64_t count(const Product& p) const { return row_tiles(p) * ((p.columns() + columns - 1) / columns); }

 private:
  static void halve(int64_t& size) {
    constexpr int64_t kMultiple = 64;
    size = std::max(kMultiple, (size / 2 + kMultiple - 1) / kMultiple * kMultiple);
  }
};

void multiply_here(const Product& p, bool bf16) {
  const OneThread one;
  const SignalsBlocked blocked;
  if (bf16)
    multiply_bf16(p);
  else
    multiply_f32(p);
}

void multiply(const Product& p, bool bf16) {
  const Tiling tiling(p);
  if (tiling.count(p) == 1) return multiply_here(p, bf16);
  parallel_for(tiling.count(p), [&](int64_t i) {
    const int64_t row = i % tiling.row_tiles(p) * tiling.rows, column = i / tiling.row_tiles(p) * tiling.columns;
    multiply_here(
        p.part(row, std::min(tiling.rows, p.rows() - row), column, std::min(tiling.columns, p.columns() - column)),
        bf16);
  });
}

void check_matrix(const ArgumentCheck& check, std::string_view argument, const Tensor& matrix, const Tensor& out) {
  check.rank(argument, matrix, out.rank() == 3 ? 3 : 2);
  check.device(argument, matrix, out.device());
  check.unit_inner_stride(argument, matrix);
  require(matrix.size(-2) <= 1 || matrix.stride(-2) >= matrix.size(-1),
          "matmul: argument \"{}\" of shape {} has rows that overlap (stride {})", argument, to_string(matrix.shape()),
          matrix.stride(-2));
}

void check_product(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  const ArgumentCheck check("matmul");
  check_matrix(check, "out", out, out);
  check_matrix(check, "a", a, out);
  check_matrix(check, "b", b, out);
  const bool cpu = out.device().is_cpu();
  check.dtype("out", out, cpu ? std::vector{DType::f32} : std::vector{DType::f32, DType::bf16});
  check.dtype("a", a, cpu ? std::vector{DType::f32} : std::vector{DType::f32, DType::bf16});
  check.dtype("b", b, {DType::f32, DType::bf16, DType::f16});
  require(out.dtype() == DType::f32 || multiplied_in(a, b, options.precision) == DType::bf16,
          "matmul: argument \"out\" has dtype bf16, but {} and {} multiplied in f32 give f32", name_of(a.dtype()),
          name_of(b.dtype()));
  const auto check_shape = [&](std::string_view argument, const Tensor& matrix, bool transpose, int64_t first,
                               int64_t second) {
    std::vector<int64_t> shape = transpose ? std::vector{second, first} : std::vector{first, second};
    if (out.rank() == 3) shape.insert(shape.begin(), out.size(0));
    check.shape(argument, matrix, shape);
  };
  const int64_t inner = a.size(options.transpose_a ? -2 : -1);
  check_shape("a", a, options.transpose_a, out.size(-2), inner);
  check_shape("b", b, options.transpose_b, inner, out.size(-1));
  if (!options.addend) return;
  require(!options.accumulate && out.rank() == 2,
          "matmul: an addend was given, but not for one product into new memory");
  check_matrix(check, "addend", options.addend, out);
  check.shape("addend", options.addend, {out.size(0), out.size(1)});
  check.dtype("addend", options.addend, {out.dtype()});
  require(row_stride(options.addend) == row_stride(out),
          "matmul: argument \"addend\" has rows of stride {}, expected {} as in \"out\"", row_stride(options.addend),
          row_stride(out));
}

}  // namespace

DType multiplied_in(const Tensor& a, const Tensor& b, MatmulPrecision precision) {
  const bool both_bf16 = a.dtype() == DType::bf16 && b.dtype() == DType::bf16;
  const bool narrow = precision == MatmulPrecision::bf16 || precision == MatmulPrecision::fp8;
  return narrow || both_bf16 ? DType::bf16 : DType::f32;
}

int64_t row_stride(const Tensor& matrix) {
  return matrix.size(-2) > 1 ? matrix.stride(-2) : std::max<int64_t>(matrix.size(-1), 1);
}

namespace cpu {

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  require(matmul_supports(options.precision),
          "matmul: bf16 or fp8 products were asked for, but {} has none on this CPU; use precision f32",
          cpu::matmul_library({}));
  if (out.rank() == 3) {
    for (int64_t i = 0; i < out.size(0); ++i) cpu::matmul(out.select(0, i), a.select(0, i), b.select(0, i), options);
    return;
  }
  const bool bf16 = options.precision == MatmulPrecision::bf16;
  if (options.addend) furious::copy(out, options.addend);
  const DType factors = bf16 ? DType::bf16 : DType::f32;
  const Tensor left = a.dtype() == factors ? a : to_dtype(a, factors);
  const Tensor right = b.dtype() == factors ? b : to_dtype(b, factors);
  multiply({out, left, right, options.transpose_a, options.transpose_b, options.accumulate || options.addend}, bf16);
}

double matmul_rate(MatmulPrecision precision, Device) {
  constexpr int64_t kSize = 1536;
  const Tensor a = Tensor::empty({kSize, kSize}, DType::f32);
  const Tensor b = Tensor::empty({kSize, kSize}, DType::f32);
  const Tensor out = Tensor::empty({kSize, kSize}, DType::f32);
  furious::fill(a, 1);
  furious::fill(b, 1);
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < 6; ++run) {
    const auto start = std::chrono::steady_clock::now();
    furious::matmul(out, a, b, {.precision = precision});
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return 2.0 * kSize * kSize * kSize / best;
}

std::string matmul_library(Device) {
#ifdef FURIOUS_ONEDNN
  const dnnl_version_t* version = dnnl_version();
  return fmt::format("oneDNN {}.{}.{}", version->major, version->minor, version->patch);
#else
  const std::string_view build = openblas_get_config();  // "OpenBLAS 0.3.21 DYNAMIC_ARCH …"
  return std::string(build.substr(0, build.find(' ', build.find(' ') + 1)));
#endif
}

}  // namespace cpu

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  check_product(out, a, b, options);
  if (out.elements() == 0) return;
  if (a.elements() == 0) {
    if (options.addend)
      copy(out, options.addend);
    else if (!options.accumulate)
      fill(out, 0.0f);
    return;
  }
  FURIOUS_DISPATCH(out.device(), matmul(out, a, b, options));
}

namespace {
thread_local bool tuning = false;
}
MatmulTuning::MatmulTuning() : before_(std::exchange(tuning, true)) {}
MatmulTuning::~MatmulTuning() {
  tuning = before_;
}
bool MatmulTuning::active() {
  return tuning;
}

bool matmul_supports(MatmulPrecision precision, Device device) {
  if (precision == MatmulPrecision::fp8) return fp8_supported(device);
  return precision != MatmulPrecision::bf16 || !device.is_cpu() || has_bf16();
}

double matmul_rate(MatmulPrecision precision, Device device) {
  return FURIOUS_DISPATCH(device, matmul_rate(precision, device));
}

std::string matmul_library(Device device) {
  return FURIOUS_DISPATCH(device, matmul_library(device));
}

}  // namespace furious
