#include <cmath>

#include "ops/optim/adamw_kernels.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlock = 8192;  // elements of one block of threads

// The tensors of one launch, cut into blocks of kBlock elements, as an argument of the kernel: nothing is copied ahead,
// and a captured graph holds it. An argument may have 32,764 bytes.
template <int kPointers, int kMost>
struct Launch {
  int tensors = 0;
  unsigned first_block[kMost + 1] = {};  // of each tensor, and behind the last
  int64_t elements[kMost];
  float* data[kPointers][kMost];

  void add(std::initializer_list<const Tensor*> of) {
    int i = 0;
    for (const Tensor* tensor : of) data[i++][tensors] = tensor->data<float>();
    elements[tensors] = (*of.begin())->elements();
    first_block[tensors + 1] = first_block[tensors] + blocks_for(elements[tensors], kBlock);
    ++tensors;
  }
  unsigned blocks() const { return first_block[tensors]; }
  bool full() const { return tensors == kMost; }

  __device__ int tensor_of(unsigned block) const {
    int low = 0, high = tensors;  // first_block[low] <= block < first_block[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_block[middle] <= block ? low : high) = middle;
    }
    return low;
  }
};
using Update = Launch<4, 600>;
using Norm = Launch<1, 1200>;
static_assert(sizeof(Update) < 32000 && sizeof(Norm) < 32000);

// Rounded as on the CPU: fused where it says so, and nowhere else.
__device__ void update_element(const AdamWConstants& c, float& parameter, float gradient, float& first, float& second) {
  const float g = __fmul_rn(c.gradient_scale, gradient);
  first = __fmaf_rn(c.beta1, first, __fmul_rn(c.one_minus_beta1, g));
  second = __fmaf_rn(c.beta2, second, __fmul_rn(__fmul_rn(c.one_minus_beta2, g), g));
  const float divisor = __fmaf_rn(__fsqrt_rn(second), c.denominator, c.epsilon);
  const float change = __fdiv_rn(__fmul_rn(c.step_size, first), divisor);
  parameter = __fmaf_rn(c.decay, parameter, -change);
}

__device__ bool is_aligned(const float* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0;
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Update launch, const AdamWConstants* numbers) {
  const AdamWConstants constants = *numbers;
  if (isnan(constants.gradient_scale)) return;
  const int tensor = launch.tensor_of(blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - launch.first_block[tensor]) * kBlock;
  const int count = static_cast<int>(min(kBlock, launch.elements[tensor] - begin));
  float* const parameter = launch.data[0][tensor] + begin;
  const float* const gradient = launch.data[1][tensor] + begin;
  float* const first = launch.data[2][tensor] + begin;
  float* const second = launch.data[3][tensor] + begin;
  int done = 0;
  if (is_aligned(parameter) && is_aligned(gradient) && is_aligned(first) && is_aligned(second)) {
    done = count / 4 * 4;
    for (int i = 4 * static_cast<int>(threadIdx.x); i < done; i += 4 * kThreads) {
      float4 p = *reinterpret_cast<const float4*>(parameter + i);
      const float4 g = *reinterpret_cast<const float4*>(gradient + i);
      float4 m = *reinterpret_cast<const float4*>(first + i);
      float4 v = *reinterpret_cast<const float4*>(second + i);
      update_element(constants, p.x, g.x, m.x, v.x);
      update_element(constants, p.y, g.y, m.y, v.y);
      update_element(constants, p.z, g.z, m.z, v.z);
      update_element(constants, p.w, g.w, m.w, v.w);
      *reinterpret_cast<float4*>(parameter + i) = p;
      *reinterpret_cast<float4*>(first + i) = m;
      *reinterpret_cast<float4*>(second + i) = v;
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads)
    update_element(constants, parameter[i], gradient[i], first[i], second[i]);
}

// The sum of a block's numbers, in one order, for thread 0.
__device__ double block_total(double x) {
  __shared__ double parts[kThreads];
  parts[threadIdx.x] = x;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? parts[0] : 0.0;
}

__global__ void __launch_bounds__(kThreads) square_kernel(const __grid_constant__ Norm launch, double* sums) {
  const int tensor = launch.tensor_of(blockIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - launch.first_block[tensor]) * kBlock;
  const int count = static_cast<int>(min(kBlock, launch.elements[tensor] - begin));
  const float* const data = launch.data[0][tensor] + begin;
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const double x = static_cast<double>(data[i]);
    sum = __fma_rn(x, x, sum);
  }
  sum = block_total(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) total_kernel(const double* sums, int64_t count, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += sums[i];
  sum = block_total(sum);
  if (threadIdx.x == 0) *total = sum;
}

__global__ void scale_kernel(AdamWConstants* numbers, double* norm, double most) {
  *norm = sqrt(*norm);
  const float scale = most > 0 && *norm > most ? static_cast<float>(most / *norm) : 1.0f;
  numbers->gradient_scale = isfinite(*norm) ? scale : __int_as_float(0x7FC00000);
}

// Calls run(table) with the tensors in tables, as few as can be.
template <class Table, class Tensors, class Add, class Run>
void in_launches(const Tensors& tensors, Add&& add, Run&& run) {
  Table table;
  for (const auto& tensor : tensors) {
    add(table, tensor);
    if (!table.full()) continue;
    run(table);
    table.tensors = 0;
  }
  if (table.tensors > 0) run(table);
}

}  // namespace

void adamw_update(std::span<const AdamWTensors> tensors, const Tensor& numbers) {
  const cudaStream_t s = stream(tensors.front().parameter.device());
  in_launches<Update>(
      tensors,
      [](Update& table, const AdamWTensors& t) {
        if (t.parameter.elements() > 0) table.add({&t.parameter, &t.gradient, &t.first_moment, &t.second_moment});
      },
      [&](const Update& table) {
        update_kernel<<<table.blocks(), kThreads, 0, s>>>(table, static_cast<const AdamWConstants*>(numbers.raw()));
        check_launch("adamw");
      });
}

void sum_of_squares(const Tensor& sum, std::span<const Tensor> gradients) {
  const Device device = sum.device();
  const cudaStream_t s = stream(device);
  int64_t blocks = 0;
  for (const Tensor& gradient : gradients) blocks += blocks_for(gradient.elements(), kBlock);
  const Tensor sums = Tensor::empty({blocks}, DType::f64, device);
  int64_t done = 0;
  in_launches<Norm>(
      gradients,
      [](Norm& table, const Tensor& gradient) {
        if (gradient.elements() > 0) table.add({&gradient});
      },
      [&](const Norm& table) {
        square_kernel<<<table.blocks(), kThreads, 0, s>>>(table, sums.data<double>() + done);
        check_launch("gradient_norm");
        done += table.blocks();
      });
  total_kernel<<<1, kThreads, 0, s>>>(sums.data<double>(), done, sum.data<double>());
  check_launch("gradient_norm");
}

void set_scale(const Tensor& numbers, const Tensor& norm, double most) {
  scale_kernel<<<1, 1, 0, stream(numbers.device())>>>(static_cast<AdamWConstants*>(numbers.raw()), norm.data<double>(),
                                                      most);
  check_launch("clip_gradients");
}

}  // namespace furious::cuda
