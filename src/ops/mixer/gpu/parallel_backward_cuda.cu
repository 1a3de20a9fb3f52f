// The parallel form on tensor cores, backward: the gradient of the output as the passes use it, and the passes.
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {
namespace {

constexpr int kPrepareThreads = 256;

// g', δ' and the logarithm of the normalizer: kLanes neighbouring threads have a token of a head, 8 columns each.
template <int kLanes>
__global__ void prepare_kernel(const Parallel m, Heads<bf16> scaled, Heads<bf16> g, bool wide, bool exponential) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * (kPrepareThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t b = blockIdx.z, h = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, columns = min(m.v_dim - lane * 8, 8);
  const bool valid = t < m.length;  // all lanes of a warp take part in the sum
  const int64_t row = (b * m.heads + h) * m.length + t;
  union Eight {
    uint4 all;
    bf16 each[8];
  } x = {}, o = {};
  float sum = 0;
  if (valid && columns > 0) {
    const bf16* const from = g.row(b, t, h) + lane * 8;
    const bf16* const out = m.out.row(b, t, h) + lane * 8;
    if (wide) {
      x.all = *reinterpret_cast<const uint4*>(from);
      if (m.sum_norm) o.all = *reinterpret_cast<const uint4*>(out);
    } else {
      for (int i = 0; i < columns; ++i) x.each[i] = from[i];
      for (int i = 0; m.sum_norm && i < columns; ++i) o.each[i] = out[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_float(x.each[i]) * to_float(o.each[i]);
  }
  sum = warp_sum<kLanes>(sum);
  if (!valid || columns <= 0) return;
  const float n = m.sum_norm ? m.normalizer[row] : 1.0f;
  const float inverse = exponential || !m.sum_norm ? 1.0f : fabsf(n) < kSmallestNormalizer ? 0.0f : 1 / n;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.each[i] = from_float<bf16>(to_float(x.each[i]) * inverse);
  *reinterpret_cast<uint4*>(scaled.row(b, t, h) + lane * 8) = x.all;
  if (lane != 0) return;
  m.delta[row] = sum * inverse;
  if (m.log_sum) m.log_sum[row] = m.maximum[row] * kLog2e + log2f(n);
}

Parallel backward_of(const MixerCall& call, const TokenTables& tables, const ScaledGradient& scaled,
                     const HeadGradients& gradients) {
  const int64_t heads = call.shape.heads;
  Parallel m = parallel_of(call, tables);
  m.g = heads_of<bfloat16>(scaled.g, heads);
  m.delta = floats(scaled.delta);
  m.log_sum = floats(scaled.log_sum);
  m.dq = heads_of<bfloat16>(gradients.q, heads);
  m.dk = heads_of<bfloat16>(gradients.k, heads);
  m.dv = heads_of<bfloat16>(gradients.v, heads);
  m.row_decay = doubles(gradients.row_decay);
  m.key_decay = doubles(gradients.key_decay);
  return m;
}

}  // namespace

ScaledGradient scale_gradient(const MixerCall& call, const Tensor& out_gradient) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  ScaledGradient scaled;
  scaled.g = Tensor::empty({shape.batch, shape.length, shape.heads, (shape.v_dim + 7) / 8 * 8}, DType::bf16, device);
  scaled.delta = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
  if (call.result.maximum) scaled.log_sum = Tensor::empty_like(scaled.delta);
  Parallel m = parallel_of(call, {});
  m.delta = floats(scaled.delta);
  m.log_sum = floats(scaled.log_sum);
  const bool wide = rows_are_wide(out_gradient) && rows_are_wide(call.result.out);
  const auto prepare = [&](auto kernel, int lanes) {
    const dim3 grid(blocks_for(shape.length, kPrepareThreads / lanes), static_cast<unsigned>(shape.heads),
                    static_cast<unsigned>(shape.batch));
    kernel<<<grid, kPrepareThreads, 0, stream(device)>>>(m, heads_of<bfloat16>(scaled.g, shape.heads),
                                                         heads_of<bfloat16>(out_gradient, shape.heads), wide,
                                                         call.spec.score == Score::exponential);
  };
  if (shape.v_dim <= 32)
    prepare(prepare_kernel<4>, 4);
  else if (shape.v_dim <= 64)
    prepare(prepare_kernel<8>, 8);
  else if (shape.v_dim <= 128)
    prepare(prepare_kernel<16>, 16);
  else
    prepare(prepare_kernel<32>, 32);
  check_launch("mixer_backward");
  return scaled;
}

void parallel_backward(const MixerCall& call, const TokenTables& tables, const ScaledGradient& scaled,
                       const HeadGradients& gradients) {
  Parallel m = backward_of(call, tables, scaled, gradients);
  if (hopper_supports(call)) return hopper_backward(call, m, scaled.g);
  const WideInputs inputs(call.inputs);
  inputs.put_into(m);
  run_pass<Target::dq>(call, m);
  run_pass<Target::dk>(call, m);
  run_pass<Target::dv>(call, m);
}

void inside_chunks_backward(const MixerCall& call, const TokenTables& tables, int64_t chunk,
                            const ScaledGradient& scaled, const HeadGradients& gradients) {
  Parallel m = backward_of(call, tables, scaled, gradients);
  m.chunk = static_cast<int>(chunk);
  m.add = true;
  hopper_backward(call, m, scaled.g);
}

}  // namespace furious::cuda
