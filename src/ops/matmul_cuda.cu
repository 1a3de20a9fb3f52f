#include <cublasLt.h>

#include <array>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

#include "ops/elementwise.h"
#include "ops/fp8.h"
#include "ops/fp8_kernels.h"
#include "ops/matmul_kernels.h"
#include "ops/random.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr double kTunedFlops = 1e10;  // of a product that is worth a choice: more than 10 µs
constexpr int kCandidates = 12;

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

// A kernel. The library's type has no name that std::vector could use.
struct Algorithm {
  cublasLtMatmulAlgo_t algo;
};

// The library's description of a product and the kernel it chose.
struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  Algorithm algorithm = {};
  std::array<uint32_t, 4> alignments = {};  // of the library's A, B, C and D
  double flops = 0;
  int attempts = 3;  // to find a faster kernel, that are left
};

// Times what a stream runs between start() and stop().
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    for (Event& event : events_) {
      cudaEvent_t created = nullptr;
      cuda::check(cudaEventCreate(&created), "event");
      event.reset(created);
    }
  }
  void start() const { cuda::check(cudaEventRecord(events_[0].get(), stream_), "event"); }
  // Milliseconds, after it has waited for them to pass.
  float stop() const {
    cuda::check(cudaEventRecord(events_[1].get(), stream_), "event");
    cuda::check(cudaEventSynchronize(events_[1].get()), "matmul");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, events_[0].get(), events_[1].get()), "event");
    return milliseconds;
  }

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Destroy>;

  cudaStream_t stream_;
  std::array<Event, 2> events_;
};

// Memory beside the arena, whose peak it would change. Undefined where there is none.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (cudaMalloc(&data_, bytes) != cudaSuccess) data_ = nullptr;
    (void)cudaGetLastError();
  }
  ~Scratch() { (void)cudaFree(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

// Adds the number of threads that find a difference to found[0], and of those that find a number other than 0 in x to
// found[1].
__global__ void compare_kernel(const uint16_t* x, const uint16_t* y, int64_t count, int* found) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int differs = 0, some = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    differs |= x[i] != y[i];
    some |= (x[i] & 0x7FFF) != 0;
  }
  differs = __syncthreads_count(differs);
  some = __syncthreads_count(some);
  if (threadIdx.x > 0) return;
  if (differs > 0) atomicAdd(found, differs);
  if (some > 0) atomicAdd(found + 1, some);
}
constexpr int kCompareBlocks = 1024, kCompareThreads = 256;

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
    Plan& plan = plan_of(key_of(out, a, b, options), [&] { return new_plan(out, a, b, options); });
    const std::lock_guard lock(launch_mutex(out.device()));
    tune(plan, out, a.raw(), b.raw(), options.addend, options.accumulate, stream);
    launch(plan, out, a.raw(), b.raw(), options.addend, options.accumulate, stream);
  }

  void multiply(const Tensor& out, const Fp8Factor& a, const Fp8Factor& b, const Fp8Options& options,
                cudaStream_t stream) {
    Plan& plan = plan_of(key_of(out, a, b, options), [&] { return new_plan(out, a, b, options); });
    const std::lock_guard lock(launch_mutex(out.device()));
    // The scales are read by the kernel; where they lie is part of its arguments, and of the description here.
    set(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.scale.raw()));
    set(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.scale.raw()));
    tune(plan, out, a.values.raw(), b.values.raw(), options.addend, options.accumulate, stream);
    launch(plan, out, a.values.raw(), b.values.raw(), options.addend, options.accumulate, stream);
  }

 private:
  // With the launch mutex locked: a product may be two kernels, the second of which reads what the first left in the
  // workspace.
  void launch(const Plan& plan, const Tensor& out, const void* a, const void* b, const Tensor& addend, bool accumulate,
              cudaStream_t stream) const {
    check(run(plan, plan.algorithm, addend ? addend.raw() : out.raw(), out.raw(), a, b, accumulate || addend, stream),
          "product");
  }
  cublasStatus_t run(const Plan& plan, const Algorithm& algorithm, const void* addend, void* out, const void* a,
                     const void* b, bool add, cudaStream_t stream) const {
    const float alpha = 1, beta = add ? 1 : 0;
    return cublasLtMatmul(handle_, plan.product, &alpha, b, plan.b, a, plan.a, &beta, addend, plan.out, out, plan.out,
                          &algorithm.algo, workspace_.raw(), kWorkspaceBytes, stream);
  }

  // With the launch mutex locked. Times cannot be taken, nor results looked at, while a graph is captured.
  void tune(Plan& plan, const Tensor& out, const void* a, const void* b, const Tensor& addend, bool accumulate,
            cudaStream_t stream) const {
    if (plan.attempts == 0 || !MatmulTuning::active() || plan.flops < kTunedFlops || out.rank() != 2) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream, &capture), "matmul");
    if (capture != cudaStreamCaptureStatusNone) return;
    --plan.attempts;
    const int64_t span = (out.size(0) - 1) * row_stride(out) + out.size(1);
    const size_t bytes = (static_cast<size_t>(span) * size_of(out.dtype()) + 255) / 256 * 256;
    const Scratch scratch(2 * bytes + 256);
    if (scratch.data() == nullptr) return;
    std::byte* const expected = scratch.data();
    std::byte* const result = expected + bytes;
    auto* const found = reinterpret_cast<int*>(result + bytes);
    cuda::check(cudaMemsetAsync(expected, 0, 2 * bytes + 256, stream), "matmul");
    const void* const from = addend ? addend.raw() : out.raw();
    const bool add = accumulate || addend;
    const Stopwatch watch(stream);
    // Milliseconds of the best of a few runs; infinity if the kernel does not run.
    const auto time = [&](const Algorithm& algorithm, std::byte* to) {
      constexpr int kRuns = 4;
      float best = std::numeric_limits<float>::infinity();
      for (int i = 0; i < kRuns; ++i) {
        watch.start();
        if (run(plan, algorithm, from, to, a, b, add, stream) != CUBLAS_STATUS_SUCCESS) return best;
        const float milliseconds = watch.stop();
        if (i > 0) best = std::min(best, milliseconds);  // the first loads code
      }
      return best;
    };
    // Whether all numbers are the same. Results that are mostly zeros, as gradients of a first step may be, say
    // nothing.
    bool comparable = true;
    const auto same = [&] {
      const auto count = static_cast<int64_t>(bytes / sizeof(uint16_t));
      int counts[2] = {};
      compare_kernel<<<kCompareBlocks, kCompareThreads, 0, stream>>>(reinterpret_cast<uint16_t*>(expected),
                                                                     reinterpret_cast<uint16_t*>(result), count, found);
      cuda::check(cudaMemcpyAsync(counts, found, sizeof(counts), cudaMemcpyDeviceToHost, stream), "matmul");
      cuda::check(cudaMemsetAsync(found, 0, sizeof(counts), stream), "matmul");
      cuda::check(cudaStreamSynchronize(stream), "matmul");
      comparable = 2 * counts[1] >= std::min<int64_t>(count, kCompareBlocks * kCompareThreads);
      return comparable && counts[0] == 0;
    };
    float best = time(plan.algorithm, expected);
    for (const Algorithm& candidate : algorithms(plan, kCandidates)) {
      if (!comparable) break;
      const float milliseconds = time(candidate, result);
      if (milliseconds < best && same()) {
        best = milliseconds;
        plan.algorithm = candidate;
      }
    }
    if (comparable) plan.attempts = 0;
  }

  // References stay valid: plans are never removed.
  template <class NewPlan>
  Plan& plan_of(const Key& key, const NewPlan& make) {
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
    plan.alignments = {alignment_of(b), alignment_of(a), alignment_of(options.addend ? options.addend : out),
                       alignment_of(out)};
    plan.flops = 2.0 * static_cast<double>(out.size(-2) * out.size(-1) * a.size(options.transpose_a ? -2 : -1));
    choose(plan, fmt::format("{} by {}", to_string(a.shape()), to_string(b.shape())));
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
    plan.alignments = {alignment_of(b.values), alignment_of(a.values),
                       alignment_of(options.addend ? options.addend : out), alignment_of(out)};
    plan.flops = 2.0 * static_cast<double>(a.rows() * b.rows() * a.inner());
    choose(plan, fmt::format("[{}, {}] by [{}, {}] in fp8", a.rows(), a.inner(), b.rows(), b.inner()));
    return plan;
  }

  // The library's first choice of a kernel.
  void choose(Plan& plan, const std::string& sizes) const {
    const std::vector<Algorithm> found = algorithms(plan, 1);
    require(!found.empty(), "matmul: cuBLASLt has no kernel for {}", sizes);
    plan.algorithm = found[0];
  }

  // What the library would choose, the best first.
  std::vector<Algorithm> algorithms(const Plan& plan, int most) const {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    // A sum that is cut into parts is put together in f32 by a step of its own, in one order.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, plan.alignments[0]);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, plan.alignments[1]);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plan.alignments[2]);
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, plan.alignments[3]);
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, plan.product, plan.b, plan.a, plan.out,
                                                                 plan.out, preference, most, results.data(), &found);
    cublasLtMatmulPreferenceDestroy(preference);
    std::vector<Algorithm> algorithms;
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i)
      if (const auto& result = results[static_cast<size_t>(i)]; result.state == CUBLAS_STATUS_SUCCESS)
        algorithms.push_back({result.algo});
    return algorithms;
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
  const Stopwatch watch(stream(device));
  float best = std::numeric_limits<float>::infinity();
  for (int run = 0; run < 8; ++run) {
    watch.start();
    if (fp8)
      furious::matmul_fp8(out, a8, b8, {.fast_sums = true});
    else
      furious::matmul(out, a, b, {.transpose_b = true, .precision = precision});
    best = std::min(best, watch.stop());
  }
  return 2.0 * kSize * kSize * kSize / (static_cast<double>(best) * 1e-3);
}

std::string matmul_library(Device) {
  const size_t version = cublasLtGetVersion();
  return fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace furious::cuda
