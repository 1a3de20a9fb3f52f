// What the states give to the tokens of their chunks, and to their gradients. Here:
//
//   y_i = f_i φ(x_i)ᵀ S   with (q, S), and with (k, dS) for dv
//
// A block has 256 tokens, a warpgroup 64; the operand A, tokens × 16 rows (a, b) of the state, is x_b times x_a of its
// row, made in registers, for 64 values at a time.
#include "ops/mixer/gpu/states_stream.cuh"

namespace furious::cuda {
namespace {

template <int kBlocks>
using ReadShared = Stream<(kBlocks + 3) / 4, 0, 4, 1, kBlocks <= 4 ? 16 : 8>;
// Of the states of a squared score with heads of more than 64, or of a linear one with heads of more than 128 and its
// sums of chunks; and again of their gradients.
constexpr int64_t kMostWideBytes = int64_t{8} << 30;

template <int kBlocks>
__global__ void __launch_bounds__(ReadShared<kBlocks>::kThreads, 1)
    read_kernel(const __grid_constant__ CUtensorMap map, const Reading m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  using Shared = ReadShared<kBlocks>;
  constexpr int kX = Shared::kX;
  constexpr bool kKept = kX == 1;  // x in registers
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  init_barriers<false>(shared);
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, panels = m.dims.v_panels();
  const bool sums = m.normalizer != nullptr;
  if (group == Shared::kGroups) {
    decrease_registers<Shared::kCopyRegisters>();
    if (warp == 0 && lane == 0) copy_all(shared, map, map, m, panels, sums);
    return;
  }
  begin_later(group, 1200);
  increase_registers<Shared::kRegisters>();
  uint32_t turn = 0;
  int pass = 0;
  each_item<Shared::kRows>(m, panels, [&](const auto& item, bool erased) {
    const int head = item.head, first = item.token + group * kPanelRows + warp * 16, row = first + lane / 4;
    const bool writes_sums = sums && item.panel == 0 && lane % 4 == 0;
    if (erased) {
      if (item.panel == 0) write_zeros(m, head, first);
      if (writes_sums)
        for (int i = 0; i < 2; ++i)
          if (row + 8 * i < m.length) m.normalizer[place_of(m, head, row + 8 * i)] = 0;
      return;
    }
    const int place = pass % 2;
    shared.x_full[place].wait(pass / 2);
    ++pass;
    const auto x_panel = [&](int i) { return panel_of(shared.rows[place][group][i]); };
    [[maybe_unused]] uint32_t kept[4][4];
    if constexpr (kKept)
#pragma unroll
      for (int i = 0; i < 4; ++i) x_panel(0).a_fragment(kept[i], warp * 16, i);
    // The i-th 16 columns of x as an operand A.
    const auto x_fragment = [&](uint32_t(&to)[4], int i) {
      if constexpr (kKept) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = kept[i][e];
      } else {
        x_panel(i / 4).a_fragment(to, warp * 16, i % 4);
      }
    };
    float results[1][8][4];
    float(&acc)[8][4] = results[0];
    const auto begin = [&](const uint32_t(&f)[4][4], auto transposed, int add) {
      const uint32_t stage = turn % Shared::kStages;
      shared.full[stage].wait(turn / Shared::kStages);
      ++turn;
      constexpr bool kTransposed = decltype(transposed)::value;
      const uint64_t rows = kTransposed ? operand_transposed(shared.tiles[stage], 0) : operand(shared.tiles[stage], 0);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma<kTransposed>(acc, f[i], kTransposed ? rows_at(rows, i) : columns_at(rows, i), i > 0 || add);
      commit_products();
    };
    // Lets go of a tile; `after` more have begun since.
    const auto release = [&](int after) {
      if (lane == 0) shared.empty[(turn - 1 - after) % Shared::kStages].arrive();
    };
    float n[2] = {};
    if (sums) {
#pragma unroll
      for (int to = 0; to < kX; ++to) {
#pragma unroll
        for (int from = 0; from < kX; ++from) {
          uint32_t f[4][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x_fragment(f[i], 4 * from + i);
          begin(f, std::false_type(), from > 0);
          wait_for_products<0>();
          settle(acc);
          release(0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t f[4];
          x_fragment(f, 4 * to + i);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const uint32_t pair = f[e / 2];  // of row e / 2 % 2
            n[e / 2 % 2] += acc[2 * i + e / 4][e % 4] * (e % 2 == 0 ? low_of(pair) : high_of(pair));
          }
        }
      }
      n[0] = quad_sum(n[0]);
      n[1] = quad_sum(n[1]);
    }
    // A product runs into the next tile. Heads of up to 64 have no loop here, so it need not end for the next four a.
    constexpr bool kLoops = kBlocks > 4;
    uint32_t f[2][4][4];
    int tiles = 0;  // since a product ran alone; a constant where the loops are unrolled
    const auto half_of = [](uint32_t pair) { return multiply_pairs(pair, pack(0.5f, 0.5f)); };
    const auto multiply = [&](bool first, bool last) {
      begin(f[tiles % 2], std::true_type(), !first);
      if (last)
        wait_for_products<0>();
      else
        wait_for_products<1>();
      if (tiles > 0) release(1);
      ++tiles;
      if (!last) return;
      settle(acc);
      release(0);
      tiles = 0;
    };
    // Words of the four a of `block`, for each of the thread's rows: two a each.
    const auto words_of = [&](uint32_t(&to)[2][2], int block, int four) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 words = *reinterpret_cast<const uint2*>(
            x_panel(block / 4).at(warp * 16 + lane / 4 + 8 * i, block % 4 * 2 + four / 2) + four % 2 * 4);
        to[i][0] = words.x;
        to[i][1] = words.y;
      }
    };
    const auto multiply_pairs_of = [&](int block, int other, int four, const uint32_t(&words)[2][2], bool last) {
      uint32_t x[4];
      x_fragment(x, other);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // What counts once is halved, and the result doubled, since most counts twice.
        if (other == block && i < 2) x[i] = half_of(x[i]);
#pragma unroll
        for (int a = 0; a < 4; ++a) {
          const uint32_t word = words[i % 2][a / 2];
          f[tiles % 2][a][i] = multiply_pairs(x[i], a % 2 == 0 ? twice_low(word) : twice_high(word));
        }
      }
      multiply(block + other + four == 0, last);
    };
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const bool last_block = block + 1 == kBlocks;
      uint32_t words[2][2];
#pragma unroll
      for (int four = 0; four < 2; ++four) {
        words_of(words, block, four);
        multiply_pairs_of(block, block, four, words, false);
      }
      uint32_t x[4];
      x_fragment(x, block);
#pragma unroll
      for (int four = 2; four < 4; ++four) {
        words_of(words, block, four);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int two = 0; two < 2; ++two) {
            uint32_t(&to)[4] = f[tiles % 2][four % 2 * 2 + two];
            to[i] = multiply_pairs(half_of(x[2 + i]), twice_low(words[i][two]));
            to[2 + i] = multiply_pairs(half_of(x[2 + i]), twice_high(words[i][two]));
          }
      }
      multiply(false, kLoops || last_block);
#pragma unroll(kLoops ? 1 : 4)
      for (int four = 0; four < 4; ++four) {
        words_of(words, block, four);
#pragma unroll
        for (int other = block + 1; other < kBlocks; ++other)
          multiply_pairs_of(block, other, four, words, kLoops && other + 1 == kBlocks);
      }
    }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = row + 8 * i < m.length;
      factor[i] = there ? 2 * factor_of(m, head, row + 8 * i) : 0.0f;
      if (!sums) continue;
      // Rounding may have made a sum of squares negative.
      const float total = fmaxf(n[i], 0.0f) * factor[i] / 2;
      factor[i] = total < kSmallestNormalizer ? 0.0f : 2 / n[i];
      if (there && writes_sums) m.normalizer[place_of(m, head, row + 8 * i)] = factor[i] > 0 ? total : 0.0f;
    }
    write_rows(m, head, first, results, factor, x_panel(0), item.panel, nullptr);
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) shared.x_empty[place].arrive();
  });
#endif
}

Reading reading_of(const MixerCall& call, const Tensor& states, const Tensor& x, const Tensor& u, const Tensor& factors,
                   bool falls, float constant, int empty, const Tensor& out) {
  const MixerShape& shape = call.shape;
  Reading m = {};
  m.states = pointer<bfloat16>(states);
  m.factors = m.reach = floats(factors);
  m.out = heads_of<bfloat16>(out, shape.heads);
  m.out_dim = static_cast<int>(out.size(3));
  m.dims = dims_of(shape);
  m.length = static_cast<int>(shape.length);
  m.chunk = static_cast<int>(call.chunk);
  m.chunks = static_cast<int>(states.size(2));
  m.heads = static_cast<int>(shape.heads);
  m.batch = static_cast<int>(shape.batch);
  m.x_group = static_cast<int>(shape.heads / x.size(2));
  m.u_group = static_cast<int>(shape.heads / u.size(2));
  m.tiles = static_cast<int>(states.size(3));
  m.empty = empty;
  m.falls = falls;
  m.constant = constant;
  m.sum_norm = call.spec.norm == Norm::sum;
  return m;
}

void read(const Reading& m, const CUtensorMap& x, cudaStream_t here) {
  with_blocks(m.dims, [&](auto blocks) {
    using Shared = ReadShared<decltype(blocks)::value>;
    constexpr auto kernel = read_kernel<decltype(blocks)::value>;
    allow_shared_memory(kernel, sizeof(Shared));
    kernel<<<persistent<Shared>(m, m.dims.v_panels()), Shared::kThreads, sizeof(Shared), here>>>(x, m);
  });
  check_launch("mixer: reading states");
}

float score_constant(const MixerCall& call) {
  return call.spec.score == Score::squared ? call.shape.scale * call.shape.scale : call.shape.scale;
}

}  // namespace

bool states_support(const MixerCall& call) {
  const StateDims dims = dims_of(call.shape);
  if (forced_kernel() == "chunk states" || !hopper_supports(call) || call.chunk % kMostRows != 0 ||
      std::max(dims.qk, dims.v) > 256)
    return false;
  // All states are in memory at once.
  const int64_t chunks = (call.shape.length + call.chunk - 1) / call.chunk;
  const auto fit = [&](int64_t tiles) {
    return call.shape.batch * call.shape.heads * chunks * tiles * kPanelBytes <= kMostWideBytes;
  };
  if (call.spec.score == Score::linear)
    return call.spec.norm == Norm::none &&
           (std::max(dims.qk, dims.v) <= 128 || fit(int64_t{3} * dims.qk_panels() * dims.v_panels()));
  if (call.spec.score != Score::squared || std::max(dims.qk, dims.v) > 128) return false;
  return dims.qk <= 64 ? dims.v <= 64 : fit(dims.squared_tiles());
}

void read_states(const MixerCall& call, const ChunkTables& tables, const Tensor& states, const Tensor& past,
                 const Tensor& past_n) {
  const Tensor& q = call.inputs.q;
  Reading m =
      reading_of(call, states, q, q, tables.in, true, score_constant(call), call.inputs.initial_state ? -1 : 0, past);
  m.normalizer = floats(past_n);
  const cudaStream_t here = stream(q.device());
  if (call.spec.score == Score::linear) return read_linear(m, tile_map(q), false, here);
  read(m, tile_map(q), here);
}

void state_gradients(const MixerCall& call, const ChunkTables& tables, const Tensor& states,
                     const ScaledGradient& scaled, const HeadGradients& gradients,
                     const Tensor& initial_state_gradient) {
  const Tensor &q = call.inputs.q, &k = call.inputs.k, &v = call.inputs.v;
  const Tensor& g = scaled.g;
  const Tensor delta = call.spec.norm == Norm::sum ? scaled.delta : Tensor();
  const Tensor& factors = scaled.reach ? scaled.reach : tables.in;
  const float constant = score_constant(call);
  const cudaStream_t here = stream(q.device());
  const CUtensorMap q_map = tile_map(q), k_map = tile_map(k), v_map = tile_map(v), g_map = tile_map(g);
  const int first = call.inputs.initial_state ? -1 : 0, last = static_cast<int>(tables.chunks) - 1;
  Reading dq = reading_of(call, states, q, g, tables.in, true, constant, first, gradients.q);
  dq.factors = floats(factors);
  dq.shift = floats(delta);
  const float degree = call.spec.score == Score::squared ? 2 : 1;
  const auto with_decay = [&](Reading reading, const Tensor& decay, const Tensor& of, float factor) {
    reading.decay = doubles(decay);
    reading.other = heads_of<bfloat16>(of, call.shape.heads);
    reading.decay_factor = factor;
    return reading;
  };
  dq = with_decay(dq, gradients.row_decay, q, 1 / degree);
  const Tensor gradient_states =
      walk_states(call, tables, {q, g, factors, tables.in, delta, {}, initial_state_gradient, constant, true});
  const Reading dk = with_decay(reading_of(call, gradient_states, k, v, tables.out, false, 1.0f, last, gradients.k),
                                gradients.key_decay, k, -1 / degree);
  const Reading dv = reading_of(call, gradient_states, k, k, tables.out, false, 1.0f, last, gradients.v);
  if (call.spec.score == Score::linear) {
    Reading dq_of_g = dq, dk_of_v = dk;
    dq_of_g.x_group = dq.u_group;
    dk_of_v.x_group = dk.u_group;
    read_linear(dq_of_g, g_map, true, here);
    read_linear(dk_of_v, v_map, true, here);
    read_linear(dv, k_map, false, here);
    return;
  }
  contract(dq, q_map, g_map, here);
  contract(dk, k_map, v_map, here);
  read(dv, k_map, here);
}

}  // namespace furious::cuda
