// The parallel form in tiles, backward. With δ_i = g_i·o_i under the sum norm (else 0), r_i = 1/n_i (else 1), x = q·k:
//
//   dw_ij = (g_i·v_j − δ_i)·r_i      dq_i = Σ_j c_ij k_j      dk_j = Σ_i c_ij q_i      c_ij = ∂w_ij/∂x·dw_ij
//   dv_j = Σ_i w_ij·r_i·g_i          dA_t = Σ_j w_tj·dw_tj − Σ_i w_it·dw_it, without pairs whose mask is saturated
//
// One kernel owns queries and walks over keys for dq, one owns keys and walks over queries for dk and dv; heads above
// 128 have one for each of these, whose sums fill the registers. Scores are made in each kernel, and nothing is added
// up across blocks: the same bits on every run.
#pragma once

#include "ops/mixer/gpu/tiles.cuh"

namespace furious::cuda::tiles {

// Launch the kernels; what they read and write is in `m`.
void query_gradients(const MixerCall& call, const Call& m);
void key_gradients(const MixerCall& call, const Call& m);

// What the backward pass knows of a query, beside its row.
struct alignas(16) Query {
  LogDecay local;
  float delta, inverse, shift;
  int start;
};
__device__ inline Query query_of(const Call& m, int64_t head_row, const int* starts, double reference, int row) {
  Query query = {};
  query.local = log_decay(m.decay ? m.decay[head_row + row] - reference : 0.0);
  query.delta = m.sum_norm ? m.delta[head_row + row] : 0.0f;
  query.inverse = m.inverse_normalizer(m.sum_norm ? m.normalizer[head_row + row] : 1.0f);
  query.shift = m.maximum ? m.maximum[head_row + row] : 0.0f;
  query.start = starts ? starts[row] : 0;
  return query;
}

// c, w·r and w·dw of a pair, from q·k and g·v; `decay` is A_i − A_j.
struct PairGradient {
  float score, value, decay;
};
template <ScoreKind kKind>
__device__ PairGradient pair_gradient(const Call& m, const Query& query, float qk, float gv, float decay) {
  const ScoreFunction::Weight weight = m.f.weight<kKind>(qk, decay, query.shift);
  const float dw = (gv - query.delta) * query.inverse;
  return {weight.slope * dw, weight.w * query.inverse, decay < m.f.saturated ? weight.w * dw : 0.0f};
}
// The same in a far tile, without the factors of the block's rows; `factor` is that of the walked token, and for a
// query with r_i.
template <ScoreKind kKind>
__device__ PairGradient far_gradient(const Call& m, float delta, float factor, float qk, float gv) {
  const ScoreFunction::Weight weight = m.f.plain_weight<kKind>(qk, factor);
  const float dw = gv - delta;
  return {weight.slope * dw, weight.w, weight.w * dw};
}

// Runs weigh<far, masked>. To keep the code of kernels short, a few tiles beside the diagonal are masked without need,
// and so are all tiles of a polynomial score whose decay may grow.
template <ScoreKind kKind, class Weigh>
__device__ void run_variant(bool far, bool masked, Weigh&& weigh) {
  if constexpr (kKind == ScoreKind::exponential) {
    if (!masked) return weigh.template operator()<false, false>();
  } else {
    if (far && !masked) return weigh.template operator()<true, false>();
    if (far) return weigh.template operator()<true, true>();
  }
  weigh.template operator()<false, true>();
}

template <MixerPrecision kPrecision, int kDim>
struct Backward : Layout<kDim> {
  using Base = Layout<kDim>;
  using P = Product<kPrecision, kDim>;
  using Operand = typename P::Operand;
  static constexpr bool kThree = kPrecision == MixerPrecision::tf32x3;
  // With accumulators for both dk and dv fewer registers are left: fewer rows of a tile at a time, or of the warp.
  static constexpr int kKeyM = kThree ? 1 : Base::kM;
  static constexpr int kKeyWarpRows = 16 * kKeyM, kKeyRows = kWarps * kKeyWarpRows;
  static constexpr bool kFew = kThree ? kDim == 128 : kDim == 64 || kPrecision == MixerPrecision::bf16;
  static constexpr int kKeyGroup = kFew ? 16 : Base::kGroup;
  static constexpr bool kKeysAndValues = kDim <= 128;  // in one kernel

  static constexpr int tile_bytes(int own_rows) { return 2 * (own_rows + Base::kTile) * kDim * Operand::kElementBytes; }
  static constexpr int kQueryBytes = tile_bytes(Base::kRows) + Base::kTile * static_cast<int>(sizeof(LogDecay));
  static constexpr int kKeyBytes = tile_bytes(kKeyRows) + Base::kTile * static_cast<int>(sizeof(Query));
  static_assert(kQueryBytes <= Base::kMostBytes && kKeyBytes <= Base::kMostBytes);
};

template <class Kernel>
void launch(Kernel kernel, const MixerCall& call, const Call& m, int rows, int bytes) {
  allow_shared_memory(kernel, static_cast<size_t>(bytes));
  kernel<<<grid_of(call.shape, rows), kThreads, bytes, stream(call.inputs.q.device())>>>(m);
  check_launch("mixer_backward");
}

}  // namespace furious::cuda::tiles
