// The functions of cuBLASLt that the library calls, on the CPU. Like there, the numbers of a column follow each other:
//
//   D = alpha · scale(A) · scale(B) · op(A) op(B) + beta · C          sums are f32
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "emulator/formats.h"
#include "emulator/runtime.h"

namespace furious::emulator {
namespace {

struct Layout {
  cudaDataType_t type;
  int64_t rows, columns, stride;
  int32_t count = 1;
  int64_t distance = 0;  // between one matrix and the next
};

struct Product {
  cublasComputeType_t compute;
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  const float *scale_a = nullptr, *scale_b = nullptr;  // on the device
};

struct Preference {
  std::array<uint32_t, 4> alignments{256, 256, 256, 256};  // of A, B, C and D, in bytes
};

const Layout& of(cublasLtMatrixLayout_t layout) {
  return *reinterpret_cast<const Layout*>(layout);
}
const Product& of(cublasLtMatmulDesc_t product) {
  return *reinterpret_cast<const Product*>(product);
}
const Preference& of(cublasLtMatmulPreference_t preference) {
  return *reinterpret_cast<const Preference*>(preference);
}

size_t bytes_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
      return 1;
    case CUDA_R_16BF:
    case CUDA_R_16F:
      return 2;
    case CUDA_R_32F:
      return 4;
    default:
      return 0;
  }
}

bool is_fp8(const Layout& layout) {
  return bytes_of(layout.type) == 1;
}

float from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

// The upper half of an f16.
float from_e5m2(uint8_t bits) {
  return from_f16(static_cast<uint16_t>(bits << 8));
}

using Table = std::array<float, 256>;

Table table_of(float (*decode)(uint8_t)) {
  Table table;
  for (size_t i = 0; i < table.size(); ++i) table[i] = decode(static_cast<uint8_t>(i));
  return table;
}

// `count` numbers as f32.
void read(float* to, const std::byte* from, int64_t count, cudaDataType_t type, bool tf32) {
  static const Table e4m3 = table_of(from_e4m3), e5m2 = table_of(from_e5m2);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(from);
  const auto* const halves = reinterpret_cast<const uint16_t*>(from);
  const auto* const floats = reinterpret_cast<const float*>(from);
  if (type == CUDA_R_16BF)
    std::transform(halves, halves + count, to, from_bf16);
  else if (type == CUDA_R_16F)
    std::transform(halves, halves + count, to, from_f16);
  else if (type == CUDA_R_32F && tf32)
    std::transform(floats, floats + count, to, to_tf32);
  else if (type == CUDA_R_32F)
    std::copy_n(floats, count, to);
  else
    std::transform(bytes, bytes + count, to, [&](uint8_t x) { return (type == CUDA_R_8F_E4M3 ? e4m3 : e5m2)[x]; });
}

void write(std::byte* to, const float* from, int64_t count, cudaDataType_t type) {
  auto* const halves = reinterpret_cast<uint16_t*>(to);
  if (type == CUDA_R_16BF)
    std::transform(from, from + count, halves, to_bf16);
  else if (type == CUDA_R_16F)
    std::transform(from, from + count, halves, to_f16);
  else
    std::copy_n(from, count, reinterpret_cast<float*>(to));
}

constexpr int64_t kWide = 32;    // rows of D, the inner loop
constexpr int64_t kColumns = 4;  // of D

int64_t rounded_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// A factor as f32 [outer, inner], outer rounded up and filled with zeros.
std::vector<float> unpacked(const Layout& layout, const std::byte* from, bool columns_are_outer, int64_t multiple,
                            bool tf32) {
  const int64_t outer = columns_are_outer ? layout.columns : layout.rows;
  const int64_t inner = columns_are_outer ? layout.rows : layout.columns;
  std::vector<float> all(static_cast<size_t>(rounded_up(outer, multiple) * inner));
  std::vector<float> column(static_cast<size_t>(layout.rows));
  for (int64_t i = 0; i < layout.columns; ++i) {
    const std::byte* const place = from + static_cast<size_t>(i * layout.stride) * bytes_of(layout.type);
    if (columns_are_outer) {
      read(all.data() + i * inner, place, inner, layout.type, tf32);
      continue;
    }
    read(column.data(), place, layout.rows, layout.type, tf32);
    for (int64_t row = 0; row < layout.rows; ++row) all[static_cast<size_t>(row * inner + i)] = column[row];
  }
  return all;
}

// Groups of kWide rows of op(A), each [inner, kWide].
std::vector<float> grouped(const std::vector<float>& rows, int64_t inner) {
  std::vector<float> all(rows.size());
  const auto count = static_cast<int64_t>(rows.size()) / std::max<int64_t>(inner, 1);
  for (int64_t row = 0; row < count; ++row) {
    float* const to = all.data() + row / kWide * kWide * inner + row % kWide;
    for (int64_t k = 0; k < inner; ++k) to[k * kWide] = rows[static_cast<size_t>(row * inner + k)];
  }
  return all;
}

// [kColumns, kWide] of op(A) op(B), from a group of rows of A and kColumns columns of B.
void multiply_tile(float* out, const float* a, const float* b, int64_t inner) {
  float sums[kColumns][kWide] = {};
  for (int64_t k = 0; k < inner; ++k)
    for (int64_t column = 0; column < kColumns; ++column) {
      const float factor = b[column * inner + k];
      for (int64_t i = 0; i < kWide; ++i) sums[column][i] = __builtin_fmaf(a[k * kWide + i], factor, sums[column][i]);
    }
  std::memcpy(out, sums, sizeof(sums));
}

// Everything about a product that is read when it is enqueued.
struct Work {
  Product product;
  float alpha, beta;
  Layout a, b, c, d;
  const std::byte *a_data, *b_data, *c_data;
  std::byte* d_data;

  int64_t inner() const { return product.transpose_a == CUBLAS_OP_N ? a.columns : a.rows; }
};

const std::byte* matrix_at(const std::byte* data, const Layout& layout, int64_t index) {
  return data + static_cast<size_t>(index * layout.distance) * bytes_of(layout.type);
}

void multiply_matrix(const Work& work, int64_t index, float alpha) {
  const int64_t inner = work.inner(), rows = work.d.rows;
  const bool tf32 = work.product.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const std::vector<float> a = grouped(
      unpacked(work.a, matrix_at(work.a_data, work.a, index), work.product.transpose_a != CUBLAS_OP_N, kWide, tf32),
      inner);
  const std::vector<float> b =
      unpacked(work.b, matrix_at(work.b_data, work.b, index), work.product.transpose_b == CUBLAS_OP_N, kColumns, tf32);
  const std::byte* const c = matrix_at(work.c_data, work.c, index);
  std::byte* const d = work.d_data + static_cast<size_t>(index * work.d.distance) * bytes_of(work.d.type);
  float tile[kColumns][kWide], addend[kWide];
  for (int64_t row = 0; row < rows; row += kWide)
    for (int64_t column = 0; column < work.d.columns; column += kColumns) {
      multiply_tile(tile[0], a.data() + row * inner, b.data() + column * inner, inner);
      const int64_t high = std::min(kWide, rows - row), wide = std::min(kColumns, work.d.columns - column);
      for (int64_t j = 0; j < wide; ++j) {
        for (float& x : tile[j]) x *= alpha;
        if (work.beta != 0) {
          const int64_t place = (column + j) * work.c.stride + row;
          read(addend, c + static_cast<size_t>(place) * bytes_of(work.c.type), high, work.c.type, false);
          for (int64_t i = 0; i < high; ++i) tile[j][i] += work.beta * addend[i];
        }
        const int64_t place = (column + j) * work.d.stride + row;
        write(d + static_cast<size_t>(place) * bytes_of(work.d.type), tile[j], high, work.d.type);
      }
    }
}

void require_matrices(const void* begin, const Layout& layout, const char* name) {
  if (layout.rows == 0 || layout.columns == 0 || layout.count == 0) return;
  const int64_t last = (layout.count - 1) * layout.distance + (layout.columns - 1) * layout.stride + layout.rows;
  require_memory(begin, static_cast<size_t>(last) * bytes_of(layout.type), name);
}

void multiply(const Work& work) {
  require_matrices(work.a_data, work.a, "cublasLtMatmul: A");
  require_matrices(work.b_data, work.b, "cublasLtMatmul: B");
  if (work.beta != 0) require_matrices(work.c_data, work.c, "cublasLtMatmul: C");
  require_matrices(work.d_data, work.d, "cublasLtMatmul: D");
  float alpha = work.alpha;
  for (const float* scale : {work.product.scale_a, work.product.scale_b}) {
    if (scale == nullptr) continue;
    require_memory(scale, sizeof(float), "cublasLtMatmul: scale");
    alpha *= *scale;
  }
  for (int64_t i = 0; i < work.d.count; ++i) multiply_matrix(work, i, alpha);
}

// Whether the sizes of the matrices fit each other.
bool sizes_fit(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const bool a_as_is = product.transpose_a == CUBLAS_OP_N, b_as_is = product.transpose_b == CUBLAS_OP_N;
  for (const Layout* matrix : {&a, &b, &c, &d})
    if (bytes_of(matrix->type) == 0 || matrix->stride < matrix->rows || matrix->count != d.count) return false;
  return (a_as_is ? a.rows : a.columns) == d.rows && (b_as_is ? b.columns : b.rows) == d.columns &&
         (a_as_is ? a.columns : a.rows) == (b_as_is ? b.rows : b.columns) && c.rows == d.rows && c.columns == d.columns;
}

bool types_fit(const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  if (is_fp8(c) || c.type != d.type) return false;
  if (is_fp8(a) && is_fp8(b)) return a.type != CUDA_R_8F_E5M2 || b.type != CUDA_R_8F_E5M2;
  return a.type == b.type && (d.type == CUDA_R_32F || d.type == a.type);
}

// Of products of 8-bit floats the library has kernels for one arrangement alone, of aligned matrices.
bool has_fp8_kernel(const Product& product, const Layout& a, const Layout& b, const Layout& d,
                    const Preference& preference) {
  constexpr int64_t kMultiple = 16;
  const DeviceFacts& device = device_facts();
  if (10 * device.major + device.minor < 89) return false;
  if (product.transpose_a != CUBLAS_OP_T || product.transpose_b != CUBLAS_OP_N) return false;
  for (const int64_t size : {a.rows, a.stride, b.stride, d.rows, d.stride * static_cast<int64_t>(bytes_of(d.type))})
    if (size % kMultiple != 0) return false;
  return std::ranges::all_of(preference.alignments, [](uint32_t bytes) { return bytes >= kMultiple; });
}

template <class T>
void take(T& to, const void* from, size_t bytes) {
  if (bytes != sizeof(T)) throw Failure(cudaErrorInvalidValue, fmt::format("cuBLASLt: a value of {} bytes", bytes));
  std::memcpy(&to, from, sizeof(T));
}

void unknown(const char* what, int which) {
  throw Failure(cudaErrorNotSupported, fmt::format("cuBLASLt: {} {}", what, which));
}

template <class Body>
cublasStatus_t blas_call(const Body& body) {
  switch (call(body, LastError::none)) {
    case cudaSuccess:
      return CUBLAS_STATUS_SUCCESS;
    case cudaErrorNotSupported:
      return CUBLAS_STATUS_NOT_SUPPORTED;
    case cudaErrorInvalidValue:
      return CUBLAS_STATUS_INVALID_VALUE;
    default:
      return CUBLAS_STATUS_EXECUTION_FAILED;
  }
}

}  // namespace
}  // namespace furious::emulator

using namespace furious::emulator;

extern "C" {

size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "not supported";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "invalid value";
    default:
      return "execution failed";
  }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  static char only;
  *handle = reinterpret_cast<cublasLtHandle_t>(&only);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* product, cublasComputeType_t compute,
                                        cudaDataType_t scale_type) {
  return blas_call([&] {
    if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_FAST_TF32) unknown("compute type", compute);
    if (scale_type != CUDA_R_32F) unknown("type of factors", scale_type);
    *product = reinterpret_cast<cublasLtMatmulDesc_t>(new Product{.compute = compute});
  });
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  return blas_call([&] {
    Product& product = *reinterpret_cast<Product*>(handle);
    int8_t fast_sums = 0;  // has no effect: sums are f32
    switch (attribute) {
      case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(product.transpose_a, value, bytes);
      case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(product.transpose_b, value, bytes);
      case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        return take(product.scale_a, value, bytes);
      case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        return take(product.scale_b, value, bytes);
      case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
        return take(fast_sums, value, bytes);
      default:
        return unknown("attribute of a product", attribute);
    }
  });
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
  return blas_call([&] {
    if (bytes_of(type) == 0) unknown("type of a matrix", type);
    *layout = reinterpret_cast<cublasLtMatrixLayout_t>(
        new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), stride});
  });
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  return blas_call([&] {
    Layout& layout = *reinterpret_cast<Layout*>(handle);
    switch (attribute) {
      case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return take(layout.count, value, bytes);
      case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return take(layout.distance, value, bytes);
      default:
        return unknown("attribute of a layout", attribute);
    }
  });
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return blas_call([&] { *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference); });
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<Preference*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  return blas_call([&] {
    auto& alignments = reinterpret_cast<Preference*>(handle)->alignments;
    switch (attribute) {
      case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return;  // sums are not cut into parts
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return take(alignments[0], value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return take(alignments[1], value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return take(alignments[2], value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return take(alignments[3], value, bytes);
      default:
        return unknown("preference", attribute);
    }
  });
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t results[], int* found) {
  *found = 0;
  return blas_call([&] {
    if (!sizes_fit(of(product), of(a), of(b), of(c), of(d)))
      throw Failure(cudaErrorInvalidValue, "cuBLASLt: sizes that do not fit each other");
    if (!types_fit(of(a), of(b), of(c), of(d)) ||
        (is_fp8(of(a)) && !has_fp8_kernel(of(product), of(a), of(b), of(d), of(preference))))
      throw Failure(cudaErrorNotSupported, "cuBLASLt: no kernel for this product");
    if (wanted < 1) return;
    results[0] = {};
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
  });
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
  return blas_call([&] {
    const Work work{.product = of(product),
                    .alpha = *static_cast<const float*>(alpha),
                    .beta = *static_cast<const float*>(beta),
                    .a = of(a_layout),
                    .b = of(b_layout),
                    .c = of(c_layout),
                    .d = of(d_layout),
                    .a_data = static_cast<const std::byte*>(a),
                    .b_data = static_cast<const std::byte*>(b),
                    .c_data = static_cast<const std::byte*>(c),
                    .d_data = static_cast<std::byte*>(d)};
    if (!sizes_fit(work.product, work.a, work.b, work.c, work.d))
      throw Failure(cudaErrorInvalidValue, "cuBLASLt: sizes that do not fit each other");
    enqueue(stream, [work] { multiply(work); });
  });
}

}  // extern "C"
