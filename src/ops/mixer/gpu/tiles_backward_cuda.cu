// The parallel form in tiles, backward (tiles_backward.cuh).
#include "ops/mixer/gpu/tiles_backward.cuh"

namespace furious::cuda {
namespace tiles {
namespace {

// δ: a warp per token.
__global__ void delta_kernel(const __grid_constant__ Call m) {
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int t = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (t >= m.length) return;
  const HeadRows g(m.g, b, h), out(m.out, b, h);
  float sum = 0;
  if (lane_index() * 8 < m.v_dim) {
    float x[8], y[8];
    g.load(x, t, lane_index() * 8);
    out.load(y, t, lane_index() * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) m.delta[(b * m.heads + h) * m.length + t] = sum;
}

}  // namespace
}  // namespace tiles

void tiles_backward(const MixerCall& call, const TokenTables& tables, const Tensor& out_gradient,
                    const HeadGradients& gradients) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const cudaStream_t s = stream(device);
  tiles::Call m = tiles::call_of(call, tables);
  m.g = tiles::token_rows(out_gradient, shape.heads);
  m.dq = tiles::token_rows(gradients.q, shape.heads);
  m.dk = tiles::token_rows(gradients.k, shape.heads);
  m.dv = tiles::token_rows(gradients.v, shape.heads);
  m.row_decay = doubles(gradients.row_decay);
  m.key_decay = doubles(gradients.key_decay);
  Tensor delta;
  if (m.sum_norm) {
    delta = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
    m.delta = delta.data<float>();
    tiles::delta_kernel<<<tiles::grid_of(shape, tiles::kWarps), tiles::kThreads, 0, s>>>(m);
    check_launch("mixer_backward");
  }
  tiles::query_gradients(call, m);
  tiles::key_gradients(call, m);
}

}  // namespace furious::cuda
