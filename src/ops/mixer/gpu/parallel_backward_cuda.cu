// The parallel form on tensor cores, backward: the gradient of the output as the passes use it, and the passes.
#include "ops/elementwise.h"
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {
namespace {

constexpr int kPrepareThreads = 256;
constexpr int kPrepareTokens = 4;  // of a thread: enough reads at the same time

// g', δ' and the logarithm of the normalizer, or δ and 1/n where g is left as it is (`scaled` has no data): kLanes
// neighbouring threads have tokens of a head, 8 columns each. Blocks of the heads of the same tokens follow each other.
template <int kLanes>
__global__ void prepare_kernel(const Parallel m, Heads<bf16> scaled, Heads<bf16> g, float* inverses, const float* reach,
                               float* scaled_reach, bool wide, bool exponential) {
  constexpr int kGroups = kPrepareThreads / kLanes;
  const int heads = static_cast<int>(m.heads);
  const int64_t first = static_cast<int64_t>(blockIdx.x / heads) * (kGroups * kPrepareTokens) + threadIdx.x / kLanes;
  const int64_t b = blockIdx.y;
  const int h = static_cast<int>(blockIdx.x) % heads;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, columns = min(m.v_dim - lane * 8, 8);
  union Eight {
    uint4 all;
    bf16 each[8];
  } x[kPrepareTokens] = {}, o[kPrepareTokens] = {};
  float n[kPrepareTokens], r[kPrepareTokens] = {};  // read with the rows: behind a store, reads would wait one by one
#pragma unroll
  for (int j = 0; j < kPrepareTokens; ++j) {
    const int64_t t = first + j * kGroups;
    n[j] = m.sum_norm && t < m.length ? m.normalizer[(b * m.heads + h) * m.length + t] : 1.0f;
    if (scaled_reach && t < m.length) r[j] = reach[(b * m.heads + h) * m.length + t];
    if (t >= m.length || columns <= 0) continue;
    const bf16* const from = g.row(b, t, h) + lane * 8;
    const bf16* const out = m.out.row(b, t, h) + lane * 8;
    if (wide) {
      x[j].all = *reinterpret_cast<const uint4*>(from);
      if (m.sum_norm) o[j].all = *reinterpret_cast<const uint4*>(out);
    } else {
      for (int i = 0; i < columns; ++i) x[j].each[i] = from[i];
      for (int i = 0; m.sum_norm && i < columns; ++i) o[j].each[i] = out[i];
    }
  }
#pragma unroll
  for (int j = 0; j < kPrepareTokens; ++j) {
    const int64_t t = first + j * kGroups, row = (b * m.heads + h) * m.length + t;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += to_float(x[j].each[i]) * to_float(o[j].each[i]);
    sum = warp_sum<kLanes>(sum);  // all lanes of a warp take part
    if (t >= m.length || columns <= 0 || (lane > 0 && !scaled.data)) continue;
    const float inverse = exponential || !m.sum_norm ? 1.0f : fabsf(n[j]) < kSmallestNormalizer ? 0.0f : 1 / n[j];
    if (scaled.data) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[j].each[i] = from_float<bf16>(to_float(x[j].each[i]) * inverse);
      *reinterpret_cast<uint4*>(scaled.row(b, t, h) + lane * 8) = x[j].all;
      sum *= inverse;
    }
    if (lane != 0) continue;
    m.delta[row] = sum;
    if (inverses) inverses[row] = inverse;
    if (scaled_reach) scaled_reach[row] = r[j] * inverse;
    if (m.log_sum) m.log_sum[row] = m.maximum[row] * kLog2e + log2f(n[j]);
  }
}

Parallel backward_of(const MixerCall& call, const TokenTables& tables, const ScaledGradient& scaled,
                     const HeadGradients& gradients) {
  const int64_t heads = call.shape.heads;
  Parallel m = parallel_of(call, tables);
  m.g = heads_of<bfloat16>(scaled.g, heads);
  m.delta = floats(scaled.delta);
  m.log_sum = floats(scaled.log_sum);
  m.inverse = floats(scaled.inverse);
  m.dq = heads_of<bfloat16>(gradients.q, heads);
  m.dk = heads_of<bfloat16>(gradients.k, heads);
  m.dv = heads_of<bfloat16>(gradients.v, heads);
  m.row_decay = doubles(gradients.row_decay);
  m.key_decay = doubles(gradients.key_decay);
  return m;
}

}  // namespace

ScaledGradient scale_gradient(const MixerCall& call, const Tensor& out_gradient, bool in_kernels, const Tensor& reach) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const bool exponential = call.spec.score == Score::exponential;
  const bool wide = rows_are_wide(out_gradient) && rows_are_wide(call.result.out);
  // Without a normalizer there is nothing to divide by, and no δ.
  const bool plain = call.spec.norm == Norm::none;
  const bool as_it_is = (in_kernels || plain) && rows_are_wide(out_gradient);
  ScaledGradient scaled;
  scaled.delta = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f32, device);
  if (call.result.maximum) scaled.log_sum = Tensor::empty_like(scaled.delta);
  if (as_it_is) {
    scaled.g = out_gradient;
    if (plain) {
      furious::fill(scaled.delta, 0);
      return scaled;
    }
    if (!exponential) {
      scaled.inverse = Tensor::empty_like(scaled.delta);
      scaled.reach = reach ? Tensor::empty_like(scaled.delta) : scaled.inverse;
    }
  } else {
    scaled.g = Tensor::empty({shape.batch, shape.length, shape.heads, (shape.v_dim + 7) / 8 * 8}, DType::bf16, device);
  }
  Parallel m = parallel_of(call, {});
  m.delta = floats(scaled.delta);
  m.log_sum = floats(scaled.log_sum);
  const auto prepare = [&](auto kernel, int lanes) {
    const dim3 grid(
        blocks_for(shape.length, kPrepareThreads / lanes * kPrepareTokens) * static_cast<unsigned>(shape.heads),
        static_cast<unsigned>(shape.batch));
    kernel<<<grid, kPrepareThreads, 0, stream(device)>>>(
        m, as_it_is ? Heads<bf16>() : heads_of<bfloat16>(scaled.g, shape.heads),
        heads_of<bfloat16>(out_gradient, shape.heads), floats(scaled.inverse), floats(reach),
        reach ? floats(scaled.reach) : nullptr, wide, exponential);
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
