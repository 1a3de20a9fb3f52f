// The mixers on a GPU: choosing kernels, cumulative decays and their gradient, heads that share an input.
#include "ops/elementwise.h"
#include "ops/mixer/cuda.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kScanThreads = 256;

// Inclusive sum over a block of kScanThreads threads, in order.
__device__ double block_scan(double x, double* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double before = __shfl_up_sync(0xFFFFFFFFu, x, offset);
    if (lane >= offset) x += before;
  }
  if (lane == 31) shared[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x += shared[i];
  return x;
}

// A_t of one row and head. log_decay is [batch, length, heads] with any strides.
__global__ void accumulate_kernel(double* out, const float* a, int64_t batch_stride, int64_t token_stride,
                                  int64_t head_stride, int64_t length) {
  __shared__ double shared[kScanThreads / 32], carry;
  const int64_t head = blockIdx.x, heads = gridDim.x, batch = blockIdx.y;
  const float* from = a + batch * batch_stride + head * head_stride;
  double* to = out + (batch * heads + head) * length;
  if (threadIdx.x == 0) carry = 0;
  for (int64_t first = 0; first < length; first += kScanThreads) {
    const int64_t t = first + threadIdx.x;
    __syncthreads();
    const double sum = carry + block_scan(t < length ? static_cast<double>(from[t * token_stride]) : 0.0, shared);
    __syncthreads();
    if (t < length) to[t] = sum;
    if (threadIdx.x == kScanThreads - 1) carry = sum;
  }
}

// da_t = Σ_{s ≥ t} dA_s within the document: the sum to the end of the row, less that after the document.
__global__ void decay_gradient_kernel(float* da, int64_t batch_stride, int64_t token_stride, int64_t head_stride,
                                      const float* row, const float* key, const int* ends, double* sums,
                                      int64_t length) {
  __shared__ double shared[kScanThreads / 32], carry;
  const int64_t head = blockIdx.x, heads = gridDim.x, batch = blockIdx.y;
  const int64_t offset = (batch * heads + head) * length;
  if (threadIdx.x == 0) carry = 0;
  for (int64_t first = 0; first < length; first += kScanThreads) {
    const int64_t t = length - 1 - first - threadIdx.x;
    __syncthreads();
    const double own =
        t < 0 ? 0.0 : (row ? static_cast<double>(row[offset + t]) : 0.0) + static_cast<double>(key[offset + t]);
    const double sum = carry + block_scan(own, shared);
    __syncthreads();
    if (t >= 0) {
      if (ends)
        sums[offset + t] = sum;
      else
        da[batch * batch_stride + t * token_stride + head * head_stride] = static_cast<float>(sum);
    }
    if (threadIdx.x == kScanThreads - 1) carry = sum;
  }
  if (!ends) return;
  __syncthreads();
  for (int64_t t = threadIdx.x; t < length; t += kScanThreads) {
    const int64_t end = ends[batch * length + t];
    const double after = end < length ? sums[offset + end] : 0.0;
    da[batch * batch_stride + t * token_stride + head * head_stride] = static_cast<float>(sums[offset + t] - after);
  }
}

// out[row, own head] = Σ over the heads it serves of in[row, head]; in is contiguous [rows, heads, dim].
template <class T>
__global__ void sum_groups_kernel(Rows<T> out, const T* in, int64_t own_heads, int group, int dim) {
  const int64_t row = blockIdx.x;  // (token, own head)
  T* to = out[row];
  const T* from = in + row * group * dim;
  for (int c = threadIdx.x; c < dim; c += blockDim.x) {
    float sum = 0;
    for (int h = 0; h < group; ++h) sum += to_float(from[h * dim + c]);
    to[c] = from_float<T>(sum);
  }
}

void sum_groups(const Tensor& out, const Tensor& in) {
  const int64_t own = out.size(2);
  const int64_t count = out.size(0) * out.size(1) * own;
  with_activation_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    sum_groups_kernel<<<static_cast<unsigned>(count), 64, 0, stream(out.device())>>>(
        rows<T>(out), pointer<T>(in), own, static_cast<int>(in.size(2) / own), static_cast<int>(out.size(3)));
  });
  check_launch("mixer: sum over shared heads");
}

dim3 heads_and_rows(const MixerCall& call) {
  return dim3(static_cast<unsigned>(call.shape.heads), static_cast<unsigned>(call.shape.batch));
}

}  // namespace

TokenTables token_tables(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  TokenTables tables;
  if (call.spec.decay) {
    const Tensor& a = call.inputs.log_decay;
    tables.decay = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f64, device);
    accumulate_kernel<<<heads_and_rows(call), kScanThreads, 0, stream(device)>>>(
        tables.decay.data<double>(), a.data<float>(), a.stride(0), a.stride(1), a.stride(2), shape.length);
    check_launch("mixer: cumulative decay");
  }
  if (static_cast<int64_t>(call.segments.size()) > shape.batch) {
    const Tensor starts = Tensor::empty({shape.batch, shape.length}, DType::i32);
    const Tensor ends = Tensor::empty({shape.batch, shape.length}, DType::i32);
    for (const Segment& segment : call.segments) {
      const int64_t row = segment.batch * shape.length;
      std::fill(starts.data<int32_t>() + row + segment.begin, starts.data<int32_t>() + row + segment.end,
                static_cast<int32_t>(segment.begin));
      std::fill(ends.data<int32_t>() + row + segment.begin, ends.data<int32_t>() + row + segment.end,
                static_cast<int32_t>(segment.end));
    }
    tables.starts = Tensor::empty(starts.shape(), DType::i32, device);
    tables.ends = Tensor::empty(ends.shape(), DType::i32, device);
    copy_between(tables.starts, starts);
    copy_between(tables.ends, ends);
  }
  return tables;
}

Form choose_form(const MixerCall& call) {
  // The lengths up to which the parallel form is faster, measured on an H200 (docs/performance.md).
  constexpr int64_t kOnTensorCores = 65536;
  constexpr int64_t kSimple = 512;
  const int64_t longest = parallel_takes(call) ? kOnTensorCores : kSimple;
  return call.spec.has_state() && call.shape.length > longest ? Form::chunked : Form::parallel;
}

void mixer_forward(const MixerCall& call) {
  const bool chunked = call.chunk < call.shape.length || call.inputs.initial_state || call.result.final_state;
  TokenTables within = token_tables(call);
  Tensor past;
  if (chunked) {
    const ChunkTables chunks = chunk_tables(call, within);
    past = chunked_past(call, chunks);
    within = chunks.within;
  }
  if (!past && parallel_takes(call))
    parallel_forward(call, within);
  else
    simple_forward(call, within, past);
}

void mixer_backward(const MixerCall& call, const Tensor& out_gradient, const Tensor& final_state_gradient,
                    const MixerGradients& gradients) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const TokenTables tables = token_tables(call);
  const auto per_head = [&](const Tensor& gradient) {
    if (gradient.size(2) == shape.heads) return gradient;
    return Tensor::empty({shape.batch, shape.length, shape.heads, gradient.size(3)}, gradient.dtype(), device);
  };
  HeadGradients heads{per_head(gradients.q), per_head(gradients.k), per_head(gradients.v), {}, {}};
  if (call.spec.decay) {
    const Shape tokens{shape.batch, shape.heads, shape.length};
    heads.key_decay = Tensor::empty(tokens, DType::f32, device);
    if (call.spec.norm == Norm::none) heads.row_decay = Tensor::empty(tokens, DType::f32, device);
  }
  const bool chunked = call.chunk < shape.length || call.inputs.initial_state || final_state_gradient;
  const ChunkTables chunks = chunked ? chunk_tables(call, tables) : ChunkTables();
  const TokenTables& within = chunked ? chunks.within : tables;
  if (parallel_takes(call))
    parallel_backward(call, within, scale_gradient(call, out_gradient), heads);
  else
    simple_backward(call, within, out_gradient, heads);
  if (chunked) chunked_backward(call, chunks, out_gradient, final_state_gradient, heads, gradients.initial_state);
  if (gradients.q.size(2) < shape.heads) sum_groups(gradients.q, heads.q);
  if (gradients.k.size(2) < shape.heads) sum_groups(gradients.k, heads.k);
  if (gradients.v.size(2) < shape.heads) sum_groups(gradients.v, heads.v);
  if (!call.spec.decay) return;
  const Tensor& da = gradients.log_decay;
  const Tensor sums = tables.ends ? Tensor::empty_like(tables.decay) : Tensor();
  decay_gradient_kernel<<<heads_and_rows(call), kScanThreads, 0, stream(device)>>>(
      da.data<float>(), da.stride(0), da.stride(1), da.stride(2),
      heads.row_decay ? heads.row_decay.data<float>() : nullptr, heads.key_decay.data<float>(),
      tables.ends ? tables.ends.data<int32_t>() : nullptr, sums ? sums.data<double>() : nullptr, shape.length);
  check_launch("mixer: gradient of the decay");
}

}  // namespace furious::cuda
