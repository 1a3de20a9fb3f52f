#include <cublasLt.h>

#include <array>
#include <bit>
#include <limits>
#include <map>
#include <mutex>

#include "ops/elementwise.h"
#include "ops/fp8.h"
#include "ops/fp8_kernels.h"
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

Key key_of(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options) {
  constexpr int64_t kFp8 = 8;  // unlike the flag that comes first in other keys
  Key key{kFp8,
          options.accumulate || options.addend,
          options.fast_sums,
          out.size(0),
          out.size(1),
          row_stride(out),
          static_cast<int64_t>(out.dtype()),
          alignment_of(out),
          options.addend ? alignment_of(options.addend) : 0};
  size_t next = 9;
  for (const Fp8Factor* factor : {&a, &b})
    for (const int64_t value :
         {factor->inner(), static_cast<int64_t>(factor->format), static_cast<int64_t>(alignment_of(factor->values))})
      key[next++] = value;
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

cublasLtMatrixLayout_t new_layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), stride),
        "layout");
  return layout;
}

cublasLtMatrixLayout_t layout_of(const Fp8Factor& factor) {
  return new_layout(factor.format == Fp8Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2, factor.rows(), factor.inner(),
                    factor.inner());
}

// The library knows columns that follow each other: to it, a matrix of ours is its transpose.
cublasLtMatrixLayout_t layout_of(const Tensor& matrix) {
  const cublasLtMatrixLayout_t layout =
      new_layout(type_of(matrix), matrix.size(-2), matrix.size(-1), row_stride(matrix));
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
    const Plan& plan = plan_of(key_of(out, a, b, options), [&] { return new_plan(out, a, b, options); });
    const std::lock_guard lock(launch_mutex(out.device()));
    launch(plan, out, a.raw(), b.raw(), options.addend, options.accumulate, stream);
  }

  void multiply(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options,
                cudaStream_t stream) {
    const Plan& plan = plan_of(key_of(out, a, b, options), [&] { return new_plan(out, a, b, options); });
    const std::lock_guard lock(launch_mutex(out.device()));
    // The scales are read by the kernel; where they lie is part of its arguments, and of the description here.
    set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.scale.raw()));
    set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.scale.raw()));
    launch(plan, out, a.values.raw(), b.values.raw(), options.addend, options.accumulate, stream);
  }

 private:
  // With the launch mutex locked: a product may be two kernels, the second of which reads what the first left in the
  // workspace.
  void launch(const Plan& plan, const Tensor& out, const void* a, const void* b, const Tensor& addend, bool accumulate,
              cudaStream_t stream) const {
    const float alpha = 1;
    const float beta = accumulate || addend ? 1 : 0;
    check(cublasLtMatmul(handle_, plan.product, &alpha, b, plan.b, a, plan.a, &beta, addend ? addend.raw() : out.raw(),
                         plan.out, out.raw(), plan.out, &plan.algorithm, workspace_.raw(), kWorkspaceBytes, stream),
          "product");
  }

  // References stay valid: plans are never removed.
  template <class NewPlan>
  const Plan& plan_of(const Key& key, const NewPlan& make) {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] = plans_.try_emplace(key);
    if (!is_new) return entry->second;
    try {
      entry->second = make();
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
    choose(plan,
           {alignment_of(b), alignment_of(a), alignment_of(options.addend ? options.addend : out), alignment_of(out)},
           fmt::format("{} by {}", to_string(a.shape()), to_string(b.shape())));
    return plan;
  }

  // Both factors as columns along the inner dimension, the only arrangement that the kernels for 8-bit floats have.
  Plan new_plan(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options) const {
    Plan plan;
    check(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description");
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(options.fast_sums));
    set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.scale.raw()));
    set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.scale.raw()));
    plan.a = layout_of(a);
    plan.b = layout_of(b);
    plan.out = layout_of(out);
    choose(plan,
           {alignment_of(b.values), alignment_of(a.values), alignment_of(options.addend ? options.addend : out),
            alignment_of(out)},
           fmt::format("[{}, {}] by [{}, {}] in fp8", a.rows(), a.inner(), b.rows(), b.inner()));
    return plan;
  }

  // The library's first choice of a kernel. `alignments`: of its A, B, C and D.
  void choose(Plan& plan, const std::array<uint32_t, 4>& alignments, const std::string& sizes) const {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    // A sum that is cut into parts is put together in f32 by a step of its own, in one order.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[3]);
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.product, plan.b, plan.a, plan.out,
                                                                 plan.out, preference, 1, &best, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "no kernel for " + sizes);
    require(found > 0, "matmul: cuBLASLt has no kernel for {}", sizes);
    plan.algorithm = best.algo;
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

void matmul_fp8(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options) {
  Library::of(out.device()).multiply(out, a, b, options, stream(out.device()));
}

double matmul_rate(MatmulPrecision precision, Device device) {
  constexpr int64_t kSize = 8192;
  const bool fp8 = precision == MatmulPrecision::fp8;
  const DType dtype = precision == MatmulPrecision::bf16 || fp8 ? DType::bf16 : DType::f32;
  const Tensor out = Tensor::empty({kSize, kSize}, DType::f32, device);
  // Numbers like those of a model: constants take less power, and would let the clock run faster.
  const auto factor = [&](uint64_t seed) {
    furious::fill_normal(out, 0, 1, seed, 0);
    return to_dtype(out, dtype);
  };
  const Tensor a = factor(1);
  const Tensor b = factor(2);
  const Fp8Factor a8 = fp8 ? furious::to_fp8(a, Fp8Format::e4m3).as_is : Fp8Factor();
  const Fp8Factor b8 = fp8 ? furious::to_fp8(b, Fp8Format::e4m3).as_is : Fp8Factor();
  const cudaStream_t s = stream(device);
  cudaEvent_t start = nullptr, end = nullptr;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&end), "event");
  float best = std::numeric_limits<float>::infinity();
  for (int run = 0; run < 8; ++run) {
    check(cudaEventRecord(start, s), "event");
    if (fp8)
      furious::matmul_fp8(out, a8, b8, {.fast_sums = true});
    else
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
