// The parallel form on Hopper, backward: parallel_backward_cuda.cu says what is computed. Two kernels, as there: one
// owns queries and walks over keys for dq, one owns keys and walks over queries for dk and dv. Constant factors of the
// coefficients c_ij are left to the end.
#include "ops/mixer/hopper_parallel.cuh"

namespace furious::cuda {
namespace {

// What is left of c_ij's factors, besides decay: f' of the squared score gives 2, an exponential's scale comes last.
template <Score kScore>
__device__ float last_factor(float scale) {
  return kScore == Score::squared ? 2.0f : kScore == Score::exponential ? scale : 1.0f;
}

// One row of a result, added to what is there under m.add: the lane's columns. Returns the lane's part of row · other.
template <int kDim>
__device__ float finish_row(const float (&acc)[kDim / 8][4], int u, float factor, bf16* to, const bf16* other,
                            bool add) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t* const words = reinterpret_cast<uint32_t*>(to) + lane % 4;
  const uint32_t* const others = reinterpret_cast<const uint32_t*>(other) + lane % 4;
  float product = 0;
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    float2 x = {acc[d][u * 2] * factor, acc[d][u * 2 + 1] * factor};
    if (add) {
      const float2 before = unpack(words[d * 4]);
      x.x += before.x;
      x.y += before.y;
    }
    words[d * 4] = pack(x.x, x.y);
    if (other) {
      const float2 y = unpack(others[d * 4]);
      product += x.x * y.x + x.y * y.y;
    }
  }
  return product;
}

template <int kN>
__device__ void clear(float (&acc)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i][e] = 0;
}

struct Maps {
  CUtensorMap q, k, v, g;
};

constexpr int kGroups = 2;  // warpgroups that multiply, 64 rows each; a third's first warp copies
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kRows = 64 * kGroups;

template <int kDim>
struct QueryLayout {
  static constexpr int kPieces = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3;

  unsigned char queries[kGroups][kPieces][kPieceBytes];
  unsigned char gradients[kGroups][kPieces][kPieceBytes];
  unsigned char keys[kStages][kPieces][kPieceBytes];
  unsigned char values[kStages][kPieces][kPieceBytes];
  float columns[kStages][kTile];
  float locals[kStages][kTile];
  Barrier full[kStages], empty[kStages], ready;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(kThreads, 1) query_kernel(const __grid_constant__ Maps maps, const Parallel m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = QueryLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);

  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const int length = static_cast<int>(m.length);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a = m.decay_of(b, h);
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const double reference = a ? a[row0] : 0.0;
  const float scale = score_scale<kScore>(m.scale);
  const int first_tile = first_key_tile<kThreads>(m, a, starts, row0);
  const int last_tile = (min(row0 + kRows, length) - 1) / kTile;

  init_barriers(shared, kGroups);
  if (warp >= 4 * kGroups) {
    give_registers<40>();
    if (warp > 4 * kGroups) return;
    if (lane == 0) {
      shared.ready.arrive_and_expect(2 * kGroups * L::kPieces * kPieceBytes);
      for (int i = 0; i < kGroups; ++i)
        for (int piece = 0; piece < L::kPieces; ++piece) {
          copy_tile(shared.queries[i][piece], maps.q, shared.ready, piece * 64, row0 + i * 64, h / m.q.group, b);
          copy_tile(shared.gradients[i][piece], maps.g, shared.ready, piece * 64, row0 + i * 64, h, b);
        }
    }
    copy_keys<kScore>(shared, maps.k, maps.v, m, a, first_tile, last_tile, row0, reference, scale);
    return;
  }
  take_registers<232>();

  const int group = warp / 4;
  const int w0 = row0 + group * 64;
  const int lane_row = warp % 4 * 16 + lane / 4;
  const int64_t head_row = (static_cast<int64_t>(b) * m.heads + h) * m.length;
  float acc[kDim / 8][4];
  clear(acc);
  float delta[2], own[2];  // own: A_i less the reference; for exponentials the part of the exponent of the row
  int start[2];
  shared.ready.wait(0);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = min(w0 + lane_row + u * 8, length - 1);
    own[u] = a ? static_cast<float>(a[row] - reference) : 0.0f;
    if (kExponential) own[u] = own[u] * kLog2e - m.log_sum[head_row + row];
    delta[u] = m.delta[head_row + row];
    start[u] = starts ? starts[row] : 0;
  }
  const int latest_start = starts ? starts[min(w0 + 64, length) - 1] : 0;
  const int own_last_tile = min(w0 / kTile, last_tile);
  bool true_sums = false;

  for (int tile = first_tile; tile <= own_last_tile; ++tile) {
    const int turn = tile - first_tile, stage = turn % L::kStages;
    const int key0 = tile * kTile;
    const bool diagonal = key0 == w0;
    const bool near = key0 >= row0;
    const bool masked = diagonal || latest_start > key0;
    const float* const column = shared.columns[stage];
    const float* const local = shared.locals[stage];
    uint32_t q[kSteps][4], g[kSteps][4];
    float s[kN][4], dp[kN][4];
    load_rows(q, shared.queries[group]);
    load_rows(g, shared.gradients[group]);
    shared.full[stage].wait(turn / L::kStages);
    fence_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<0>(s, q[step], operand(shared.keys[stage][step / 4], step % 4), step > 0);
    commit_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<0>(dp, g[step], operand(shared.values[stage][step / 4], step % 4), step > 0);
    commit_products();

    float row[2] = {1, 1};
    if (!kExponential && a && near) {
      row[0] = __expf(fminf(own[0] - local[kTile - 1], 0.0f));
      row[1] = __expf(fminf(own[1] - local[kTile - 1], 0.0f));
    }
    // f' and decay first, while the other product runs; for exponentials the weight.
    wait_for_products<1>();
    settle(s);
    const auto weigh = [&](auto is_masked, auto is_near) {
      [[maybe_unused]] constexpr bool kMasked = decltype(is_masked)::value, kNear = decltype(is_near)::value;
#pragma unroll
      for (int nn = 0; nn < kN; ++nn) {
        const int c = nn * 8 + lane % 4 * 2;
        const float2 factors = *reinterpret_cast<const float2*>(column + c);
        [[maybe_unused]] const float2 places = kMasked ? *reinterpret_cast<const float2*>(local + c) : float2{};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int u = e / 2;
          float& x = s[nn][e];
          float d = e % 2 == 0 ? factors.x : factors.y;
          if constexpr (kExponential) {
            x = fast_exp2(fmaf(x, scale, d + own[u]));
          } else {
            if constexpr (kNear) d *= row[u];
            if constexpr (kMasked)
              if (diagonal && a) d = scale * __expf(fminf(own[u] - (e % 2 == 0 ? places.x : places.y), 0.0f));
            x = kScore == Score::squared ? x * d : d;
          }
          if constexpr (kMasked) {
            const int query = w0 + lane_row + u * 8, key = key0 + c + e % 2;
            if (key > query || key < start[u]) x = 0.0f;
          }
        }
      }
    };
    if (masked)
      weigh(std::true_type(), std::true_type());
    else if (near && !kExponential)
      weigh(std::false_type(), std::true_type());
    else
      weigh(std::false_type(), std::false_type());
    if (!kExponential && a && near && !true_sums) scale_rows(acc, __expf(own[0]), __expf(own[1]));
    wait_for_products<0>();
    settle(dp);
#pragma unroll
    for (int nn = 0; nn < kN; ++nn)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[nn][e] *= dp[nn][e] - delta[e / 2];
    uint32_t p[kTile / 16][4];
    pack_rows(p, s);
    fence_products();
#pragma unroll
    for (int kk = 0; kk < kTile / 16; ++kk)
      wgmma<1>(acc, p[kk], operand_transposed(shared.keys[stage][0], kk, kPieceBytes), 1);
    commit_products();
    wait_for_products<0>();
    settle(acc);
    if (lane == 0) shared.empty[stage].arrive();
    if (near) true_sums = true;
  }
  for (int tile = own_last_tile + 1; tile <= last_tile; ++tile) {
    const int turn = tile - first_tile, stage = turn % L::kStages;
    shared.full[stage].wait(turn / L::kStages);
    if (lane == 0) shared.empty[stage].arrive();
  }

  constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = w0 + lane_row + u * 8;
    float product = 0;  // q·dq
    if (row < length)
      product = finish_row<kDim>(acc, u, last_factor<kScore>(m.scale), m.dq.row(b, row, h),
                                 m.row_decay ? m.q.row(b, row, h) : nullptr, m.add);
    if (!m.row_decay) continue;
    product = quad_sum(product);
    if (row < length && lane % 4 == 0) m.row_decay[head_row + row] = product / kDegree;
  }
#endif
}

template <int kDim>
struct KeyLayout {
  static constexpr int kPieces = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3;

  unsigned char keys[kGroups][kPieces][kPieceBytes];
  unsigned char values[kGroups][kPieces][kPieceBytes];
  unsigned char queries[kStages][kPieces][kPieceBytes];
  unsigned char gradients[kStages][kPieces][kPieceBytes];
  float columns[kStages][kTile];  // factor of the query, or its part of the exponent
  float locals[kStages][kTile];   // A_i less the reference
  float deltas[kStages][kTile];
  int begins[kStages][kTile];  // starts of the queries' documents
  Barrier full[kStages], empty[kStages], ready;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(kThreads, 1) key_kernel(const __grid_constant__ Maps maps, const Parallel m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = KeyLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  constexpr bool kInRegisters = kDim == 64;  // keys and values; heads of 128 leave no room
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);

  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int key0 = static_cast<int>(blockIdx.x) * kRows;  // the first keys have the most queries
  const int length = static_cast<int>(m.length);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const double* const a = m.decay_of(b, h);
  const int* const starts = m.starts ? m.starts + b * m.length : nullptr;
  const int64_t head_row = (static_cast<int64_t>(b) * m.heads + h) * m.length;
  const int last_key = min(key0 + kRows, length) - 1;
  const double reference = a ? a[last_key] : 0.0;
  const float scale = score_scale<kScore>(m.scale);
  const int first_tile = key0 / kTile;
  int end = m.ends ? m.ends[b * m.length + last_key] : length;
  if (m.chunk) end = min(end, (key0 / m.chunk + 1) * m.chunk);
  int last_tile = (end - 1) / kTile;
  if (a)
    last_tile -= count_erased<kThreads>(last_tile - last_key / kTile, [&](int i) {
      return static_cast<float>(a[(last_tile - i) * kTile] - reference) < static_cast<float>(kErased);
    });

  init_barriers(shared, kGroups);
  if (warp >= 4 * kGroups) {
    give_registers<40>();
    if (warp > 4 * kGroups) return;
    if (lane == 0) {
      shared.ready.arrive_and_expect(2 * kGroups * L::kPieces * kPieceBytes);
      for (int i = 0; i < kGroups; ++i)
        for (int piece = 0; piece < L::kPieces; ++piece) {
          copy_tile(shared.keys[i][piece], maps.k, shared.ready, piece * 64, key0 + i * 64, h / m.k.group, b);
          copy_tile(shared.values[i][piece], maps.v, shared.ready, piece * 64, key0 + i * 64, h / m.v.group, b);
        }
    }
    for (int tile = last_tile; tile >= first_tile; --tile) {
      const int turn = last_tile - tile, stage = turn % L::kStages;
      const int row0 = tile * kTile;
      // Tiles after the block's keys take their factors relative to A at the last key, the others at their first query.
      const double base = a && row0 <= last_key ? a[row0] : reference;
      float column[2], local[2], delta[2];
      int begin[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row0 + i * 32 + lane;
        column[i] = kExponential ? -INFINITY : 0.0f, local[i] = 0, delta[i] = 0, begin[i] = 0;
        if (row >= length) continue;
        const double own = a ? a[row] : 0.0;
        local[i] = static_cast<float>(own - reference);
        delta[i] = m.delta[head_row + row];
        column[i] = kExponential ? local[i] * kLog2e - m.log_sum[head_row + row]
                                 : scale * __expf(static_cast<float>(own - base));
        if (starts) begin[i] = starts[row];
      }
      if (turn >= L::kStages) shared.empty[stage].wait(turn / L::kStages - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shared.columns[stage][i * 32 + lane] = column[i];
        shared.locals[stage][i * 32 + lane] = local[i];
        shared.deltas[stage][i * 32 + lane] = delta[i];
        shared.begins[stage][i * 32 + lane] = begin[i];
      }
      __syncwarp();
      if (lane == 0) {
        shared.full[stage].arrive_and_expect(2 * L::kPieces * kPieceBytes);
        for (int piece = 0; piece < L::kPieces; ++piece) {
          copy_tile(shared.queries[stage][piece], maps.q, shared.full[stage], piece * 64, row0, h / m.q.group, b);
          copy_tile(shared.gradients[stage][piece], maps.g, shared.full[stage], piece * 64, row0, h, b);
        }
      }
    }
    return;
  }
  take_registers<232>();

  const int group = warp / 4;
  const int w0 = key0 + group * 64;
  const int lane_row = warp % 4 * 16 + lane / 4;
  float dk[kDim / 8][4], dv[kDim / 8][4];
  clear(dk);
  clear(dv);
  float own[2], decay_sum[2] = {};
  shared.ready.wait(0);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int key = min(w0 + lane_row + u * 8, length - 1);
    own[u] = a ? static_cast<float>(a[key] - reference) : 0.0f;
    if (kExponential) own[u] *= kLog2e;
  }
  bool true_sums = false;

  for (int tile = last_tile; tile >= first_tile; --tile) {
    const int turn = last_tile - tile, stage = turn % L::kStages;
    const int row0 = tile * kTile;
    shared.full[stage].wait(turn / L::kStages);
    if (row0 + kTile - 1 < w0 || w0 >= length) {
      if (lane == 0) shared.empty[stage].arrive();
      continue;
    }
    const bool diagonal = row0 == w0;
    const bool near = row0 <= last_key;
    const float* const column = shared.columns[stage];
    const float* const local = shared.locals[stage];
    const float* const delta = shared.deltas[stage];
    const int* const begin = shared.begins[stage];
    const bool masked = diagonal || begin[kTile - 1] > w0 || (starts && row0 + kTile > length);
    [[maybe_unused]] uint32_t k[kSteps][4], v[kSteps][4];
    float s[kN][4], dp[kN][4];
    if constexpr (kInRegisters) {
      load_rows(k, shared.keys[group]);
      load_rows(v, shared.values[group]);
    }
    fence_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t queries = operand(shared.queries[stage][step / 4], step % 4);
      if constexpr (kInRegisters)
        wgmma<0>(s, k[step], queries, step > 0);
      else
        wgmma<0, 0>(s, operand(shared.keys[group][step / 4], step % 4), queries, step > 0);
    }
    commit_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t gradients = operand(shared.gradients[stage][step / 4], step % 4);
      if constexpr (kInRegisters)
        wgmma<0>(dp, v[step], gradients, step > 0);
      else
        wgmma<0, 0>(dp, operand(shared.values[group][step / 4], step % 4), gradients, step > 0);
    }
    commit_products();

    float row[2] = {1, 1};
    if (!kExponential && a && near) {
      row[0] = __expf(fminf(local[0] - own[0], 0.0f));
      row[1] = __expf(fminf(local[0] - own[1], 0.0f));
    }
    wait_for_products<1>();
    settle(s);
    // Weights become the operand p; s keeps what the coefficients need.
    uint32_t p[kTile / 16][4];
    const auto weigh = [&](auto is_masked, auto is_near) {
      [[maybe_unused]] constexpr bool kMasked = decltype(is_masked)::value, kNear = decltype(is_near)::value;
#pragma unroll
      for (int nn = 0; nn < kN; ++nn) {
        const int c = nn * 8 + lane % 4 * 2;
        const float2 factors = *reinterpret_cast<const float2*>(column + c);
        [[maybe_unused]] const float2 places = kMasked ? *reinterpret_cast<const float2*>(local + c) : float2{};
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int u = e / 2;
          const float x = s[nn][e];
          float d = e % 2 == 0 ? factors.x : factors.y;
          if constexpr (kExponential) {
            w[e] = fast_exp2(fmaf(x, scale, d - own[u]));
          } else {
            if constexpr (kNear) d *= row[u];
            if constexpr (kMasked)
              if (diagonal && a) d = scale * __expf(fminf((e % 2 == 0 ? places.x : places.y) - own[u], 0.0f));
            w[e] = x * d;
          }
          if constexpr (kMasked) {
            const int key = w0 + lane_row + u * 8, query = row0 + c + e % 2;
            if (key > query || key < begin[c + e % 2] || query >= length) w[e] = d = 0.0f;
          }
          s[nn][e] = kScore == Score::linear ? d : w[e];
          if constexpr (kScore == Score::squared) w[e] *= x;
        }
        p[nn / 2][nn % 2 * 2] = pack(w[0], w[1]);
        p[nn / 2][nn % 2 * 2 + 1] = pack(w[2], w[3]);
      }
    };
    if (masked)
      weigh(std::true_type(), std::true_type());
    else if (near && !kExponential)
      weigh(std::false_type(), std::true_type());
    else
      weigh(std::false_type(), std::false_type());
    if (!kExponential && a && near && !true_sums) {
      const float upper = __expf(-own[0]), lower = __expf(-own[1]);
      scale_rows(dk, upper, lower);
      scale_rows(dv, upper, lower);
    }
    fence_products();
#pragma unroll
    for (int kk = 0; kk < kTile / 16; ++kk)
      wgmma<1>(dv, p[kk], operand_transposed(shared.gradients[stage][0], kk, kPieceBytes), 1);
    commit_products();
    wait_for_products<1>();
    settle(dp);
    uint32_t c[kTile / 16][4];
#pragma unroll
    for (int nn = 0; nn < kN; ++nn) {
      const float2 shifts = *reinterpret_cast<const float2*>(delta + nn * 8 + lane % 4 * 2);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = s[nn][e] * (dp[nn][e] - (e % 2 == 0 ? shifts.x : shifts.y));
        if (kExponential) decay_sum[e / 2] += x[e];
      }
      c[nn / 2][nn % 2 * 2] = pack(x[0], x[1]);
      c[nn / 2][nn % 2 * 2 + 1] = pack(x[2], x[3]);
    }
    fence_products();
#pragma unroll
    for (int kk = 0; kk < kTile / 16; ++kk)
      wgmma<1>(dk, c[kk], operand_transposed(shared.queries[stage][0], kk, kPieceBytes), 1);
    commit_products();
    wait_for_products<0>();
    settle(dk);
    settle(dv);
    if (lane == 0) shared.empty[stage].arrive();
    if (near) true_sums = true;
  }

  constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int key = w0 + lane_row + u * 8;
    float product = 0;  // k·dk
    if (key < length) {
      product = finish_row<kDim>(dk, u, last_factor<kScore>(m.scale), m.dk.row(b, key, h),
                                 m.key_decay ? m.k.row(b, key, h) : nullptr, m.add);
      finish_row<kDim>(dv, u, 1.0f, m.dv.row(b, key, h), nullptr, m.add);
    }
    if (!m.key_decay) continue;
    product = quad_sum(kExponential ? decay_sum[u] : product / kDegree);
    if (key < length && lane % 4 == 0) m.key_decay[head_row + key] = -product;
  }
#endif
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m, const Tensor& scaled) {
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v), tile_map(scaled)};
  const cudaStream_t s = stream(call.inputs.q.device());
  const dim3 grid(blocks_for(call.shape.length, kRows), static_cast<unsigned>(call.shape.heads),
                  static_cast<unsigned>(call.shape.batch));
  const auto query = query_kernel<kScore, kDim>;
  const auto key = key_kernel<kScore, kDim>;
  allow_shared_memory(query, sizeof(QueryLayout<kDim>));
  allow_shared_memory(key, sizeof(KeyLayout<kDim>));
  query<<<grid, kThreads, sizeof(QueryLayout<kDim>), s>>>(maps, m);
  check_launch("mixer_backward");
  key<<<grid, kThreads, sizeof(KeyLayout<kDim>), s>>>(maps, m);
  check_launch("mixer_backward");
}

}  // namespace

void hopper_backward(const MixerCall& call, const Parallel& m, const Tensor& scaled) {
  with_score_and_dim(
      call, [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m, scaled); });
}

}  // namespace furious::cuda
