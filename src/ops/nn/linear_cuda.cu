#include "gpu/rows.cuh"
#include "ops/nn/linear_kernels.h"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 32;  // of a block: neighbours in memory
constexpr int kAtOnce = 8;    // rows that a block adds
constexpr int64_t kMostSums = 256;

template <class T>
struct FillRows {
  DeviceRows<T> matrix;
  const float* from;

  template <int N>
  __device__ void run(int64_t row, int column) const {
    float values[N];
    load(values, from + column);
    store(matrix[row] + column, values);
  }
};

// sums[y] = the sum of rows [y·span, (y+1)·span), each column by kAtOnce threads whose sums are added in order.
template <class T>
__global__ void sum_rows_kernel(const T* __restrict__ matrix, float* __restrict__ sums, int64_t rows, int64_t columns,
                                int64_t span) {
  __shared__ float parts[kAtOnce][kColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const int64_t begin = blockIdx.y * span;
  const int64_t end = min(rows, begin + span);
  float sum = 0;
  if (column < columns)
    for (int64_t row = begin + threadIdx.y; row < end; row += kAtOnce) sum += to_float(matrix[row * columns + column]);
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int lane = 1; lane < kAtOnce; ++lane) sum += parts[lane][threadIdx.x];
  sums[blockIdx.y * columns + column] = sum;
}

__global__ void add_sums_kernel(const float* sums, float* out, int64_t count, int64_t columns, bool add) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  double total = add ? static_cast<double>(out[column]) : 0.0;
  for (int64_t i = 0; i < count; ++i) total += static_cast<double>(sums[i * columns + column]);
  out[column] = static_cast<float>(total);
}

}  // namespace

void fill_rows(const Tensor& matrix, const Tensor& row) {
  with_activation_type(matrix.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const FillRows<typename OnDevice<T>::Type> f{rows<T>(matrix), row.data<float>()};
    map_rows<kLanes<T>>(matrix.device(), f.matrix.count, f.matrix.size, f, f.matrix, f.from);
  });
}

void linear_backward_bias(const GradientTarget& dbias, const Tensor& dy) {
  const int64_t rows = dy.size(0);
  const int64_t columns = dy.size(1);
  if (columns == 0) return;
  const int64_t span = std::max<int64_t>(8 * kAtOnce, (rows + kMostSums - 1) / kMostSums);
  const int64_t count = (rows + span - 1) / span;
  const Tensor sums = Tensor::empty({count, columns}, DType::f32, dy.device());
  const cudaStream_t s = stream(dy.device());
  if (count > 0) {
    with_activation_type(dy.dtype(), [&](auto zero) {
      const dim3 blocks(blocks_for(columns, kColumns), static_cast<unsigned>(count));
      sum_rows_kernel<<<blocks, dim3(kColumns, kAtOnce), 0, s>>>(pointer<decltype(zero)>(dy), sums.data<float>(), rows,
                                                                 columns, span);
    });
  }
  add_sums_kernel<<<blocks_for(columns, kThreads), kThreads, 0, s>>>(sums.data<float>(), dbias.tensor.data<float>(),
                                                                     count, columns, dbias.holds_sum);
  check_launch("linear_backward_bias");
}

}  // namespace furious::cuda
