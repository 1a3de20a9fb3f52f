#include <cublasLt.h>

#include <array>
#include <bit>
#include <limits>
#include <map>
#include <mutex>

#include "ops/elementwise.h"
#include "ops/matmul_kernels.h"
#include "ops/random.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

void check(cublasStatus_t status, std::string_view what) {
  require(status == CUBLAS_STATUS_SUCCESS, "matmul: {}: {}", what, cublasLtGetStatusString(status));
}

cudaDataType_t type_of(const Tensor& matrix) {
  return matrix.dtype() == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

int64_t count_of(const Tensor& matrix) {
  return matrix.rank() == 3 ? matrix.size(0) : 1;
}
// Between one matrix and the next.
int64_t distance_of(const Tensor& matrix) {
  return count_of(matrix) > 1 ? matrix.stride(0) : 0;
}

// What a kernel may rely on when it loads many bytes at once.
uint32_t alignment_of(const Tensor& matrix) {
  const auto address = reinterpret_cast<uintptr_t>(matrix.raw());
  const auto distance = static_cast<uintptr_t>(distance_of(matrix)) * size_of(matrix.dtype());
  return uint32_t{1} << std::min(8, std::countr_zero(address | distance));
}

// The library's description of a product and the kernel it chose.
struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  cublasLtMatmulAlgo_t algorithm;
};

// Everything that the choice of a kernel depends on.
using Key = std::array<int64_t, 24>;

Key key_of(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  Key key{options.transpose_a, options.transpose_b, options.accumulate, options.precision == MatmulPrecision::tf32,
          count_of(out)};
  size_t next = 5;
  for (const Tensor* matrix : {&out, &a, &b})
    for (const int64_t value : {matrix->size(-2), matrix->size(-1), row_stride(*matrix), distance_of(*matrix),
                                static_cast<int64_t>(matrix->dtype()), static_cast<int64_t>(alignment_of(*matrix))})
      key[next++] = value;
  key[next] = options.addend ? alignment_of(options.addend) : 0;
  return key;
}

template <class T>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value) {
  check(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)), "layout");
}

template <class T>
void set(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)), "description");
}

template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), "preference");
}

// The library knows columns that follow each other: to it, a matrix of ours is its transpose.
cublasLtMatrixLayout_t layout_of(const Tensor& matrix) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type_of(matrix), static_cast<uint64_t>(matrix.size(-1)),
                                   static_cast<uint64_t>(matrix.size(-2)), row_stride(matrix)),
        "layout");
  if (matrix.rank() == 3) {
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(count_of(matrix)));
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, distance_of(matrix));
  }
  return layout;
}

// cuBLASLt on one device. Lives as long as the process.
class Library {
 public:
  explicit Library(Device device) : workspace_(Tensor::empty({kWorkspaceBytes / 4}, DType::f32, device)) {
    check(cublasLtCreate(&handle_), "cuBLASLt cannot be used");
  }

  static Library& of(Device device) {
    static std::mutex mutex;
    static std::map<int, Library*> libraries;
    const std::lock_guard lock(mutex);
    Library*& library = libraries[device.index];
    if (library == nullptr) library = new Library(device);
    return *library;
  }

  // With the types that the library multiplies.
  void multiply(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options,
                cudaStream_t stream) {
    const Plan& plan = plan_of(out, a, b, options);
    const float alpha = 1;
    const float beta = options.accumulate || options.addend ? 1 : 0;
    const void* const addend = options.addend ? options.addend.raw() : out.raw();
    // A product may be two kernels, the second of which reads what the first left in the workspace.
    const std::lock_guard lock(launch_mutex(out.device()));
    check(cublasLtMatmul(handle_, plan.product, &alpha, b.raw(), plan.b, a.raw(), plan.a, &beta, addend, plan.out,
                         out.raw(), plan.out, &plan.algorithm, workspace_.raw(), kWorkspaceBytes, stream),
          "product");
  }

 private:
  // References stay valid: plans are never removed.
  const Plan& plan_of(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] = plans_.try_emplace(key_of(out, a, b, options));
    if (!is_new) return entry->second;
    try {
      entry->second = new_plan(out, a, b, options);
    } catch (const Error&) {
      plans_.erase(entry);
      throw;
    }
    return entry->second;
  }

  // outᵀ = op(b)ᵀ op(a)ᵀ: the factors change places.
  Plan new_plan(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) const {
    Plan plan;
    const bool tf32 = options.precision == MatmulPrecision::tf32 && a.dtype() == DType::f32;
    check(cublasLtMatmulDescCreate(&plan.product, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "description");
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, options.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, options.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan.a = layout_of(a);
    plan.b = layout_of(b);
    plan.out = layout_of(out);

    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    // A sum that is cut into parts is put together in f32 by a step of its own, in one order.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(b));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(options.addend ? options.addend : out));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(out));
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.product, plan.b, plan.a, plan.out,
                                                                 plan.out, preference, 1, &best, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, fmt::format("no kernel for {} by {}", to_string(a.shape()), to_string(b.shape())));
    require(found > 0, "matmul: cuBLASLt has no kernel for {} by {}", to_string(a.shape()), to_string(b.shape()));
    plan.algorithm = best.algo;
    return plan;
  }

  cublasLtHandle_t handle_ = nullptr;
  Tensor workspace_;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;
};

}  // namespace

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  const cudaStream_t s = stream(out.device());
  const DType dtype = multiplied_in(a, b, options.precision);
  const auto factor = [&](const Tensor& x) { return x.dtype() == dtype ? x : to_dtype(x, dtype); };
  Library::of(out.device()).multiply(out, factor(a), factor(b), options, s);
}

double matmul_rate(MatmulPrecision precision, Device device) {
  constexpr int64_t kSize = 8192;
  const DType dtype = precision == MatmulPrecision::bf16 ? DType::bf16 : DType::f32;
  const Tensor out = Tensor::empty({kSize, kSize}, DType::f32, device);
  // Numbers like those of a model: constants take less power, and would let the clock run faster.
  const auto factor = [&](uint64_t seed) {
    furious::fill_normal(out, 0, 1, seed, 0);
    return to_dtype(out, dtype);
  };
  const Tensor a = factor(1);
  const Tensor b = factor(2);
  const cudaStream_t s = stream(device);
  cudaEvent_t start = nullptr, end = nullptr;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&end), "event");
  float best = std::numeric_limits<float>::infinity();
  for (int run = 0; run < 8; ++run) {
    check(cudaEventRecord(start, s), "event");
    furious::matmul(out, a, b, {.transpose_b = true, .precision = precision});
    check(cudaEventRecord(end, s), "event");
    check(cudaEventSynchronize(end), "matmul");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, end), "event");
    best = std::min(best, milliseconds);
  }
  check(cudaEventDestroy(start), "event");
  check(cudaEventDestroy(end), "event");
  return 2.0 * kSize * kSize * kSize / (static_cast<double>(best) * 1e-3);
}

std::string matmul_library(Device) {
  const size_t version = cublasLtGetVersion();
  return fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace furious::cuda
