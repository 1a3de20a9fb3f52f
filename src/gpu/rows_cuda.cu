#include "gpu/rows.cuh"

namespace furious::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kDown = 32;

__global__ void sum_rows_kernel(float* out, const float* partials, int64_t rows, int64_t columns, int64_t stride) {
  __shared__ float shared[kDown][kColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum = 0;
  if (column < columns)
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < rows; row += kDown) sum += partials[row * stride + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  for (int half = kDown / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.y) < half)
      shared[threadIdx.y][threadIdx.x] += shared[threadIdx.y + half][threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.y == 0 && column < columns) out[column] = shared[0][threadIdx.x];
}

}  // namespace

void sum_rows(const Tensor& out, const float* partials, int64_t rows, int64_t stride) {
  const int64_t columns = out.elements();
  if (columns == 0) return;
  sum_rows_kernel<<<blocks_for(columns, kColumns), dim3(kColumns, kDown), 0, stream(out.device())>>>(
      out.data<float>(), partials, rows, columns, stride);
  check_launch("row sums");
}

}  // namespace furious::cuda
