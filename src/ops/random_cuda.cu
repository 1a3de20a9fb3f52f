#include "base/random.h"
#include "ops/random_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

enum class Kind { uniform, normal };

// One thread makes the four numbers of one counter.
template <Kind kKind>
__global__ void fill_kernel(float* out, int64_t elements, float shift, float scale, uint64_t seed, uint64_t stream) {
  const int64_t counter = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t first = counter * 4;
  if (first >= elements) return;
  float four[4];
  if constexpr (kKind == Kind::uniform)
    four_uniform(seed, stream, static_cast<uint64_t>(counter), four);
  else
    four_normal(seed, stream, static_cast<uint64_t>(counter), four);
  // Rounded after each operation, as on the CPU; the compiler would fuse shift + scale * x.
  for (int64_t i = 0; i < 4 && first + i < elements; ++i) out[first + i] = __fadd_rn(shift, __fmul_rn(scale, four[i]));
}

template <Kind kKind>
void launch(const Tensor& out, float shift, float scale, uint64_t seed, uint64_t stream) {
  constexpr int64_t kThreads = 256;
  const int64_t blocks = ((out.elements() + 3) / 4 + kThreads - 1) / kThreads;
  if (blocks == 0) return;
  fill_kernel<kKind><<<static_cast<unsigned>(blocks), kThreads, 0, cuda::stream(out.device())>>>(
      out.data<float>(), out.elements(), shift, scale, seed, stream);
  check_launch("random numbers");
}

}  // namespace

void fill_uniform(const Tensor& out, float low, float range, uint64_t seed, uint64_t stream) {
  launch<Kind::uniform>(out, low, range, seed, stream);
}

void fill_normal(const Tensor& out, float mean, float stddev, uint64_t seed, uint64_t stream) {
  launch<Kind::normal>(out, mean, stddev, seed, stream);
}

}  // namespace furious::cuda
