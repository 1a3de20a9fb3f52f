// The parallel form on Hopper, backward: parallel_backward_cuda.cu says what is computed. Two kernels, as there: one
// owns queries and walks over keys for dq, one owns keys and walks over queries for dk and dv. Constant factors of the
// coefficients c_ij are left to the end.
#include "ops/mixer/gpu/hopper_parallel.cuh"

namespace furious::cuda {
namespace {

// What is left of c_ij's factors, besides decay: f' of the squared score gives 2, an exponential's scale comes last.
template <Score kScore>
__device__ float last_factor(float scale) {
  return kScore == Score::squared ? 2.0f : kScore == Score::exponential ? scale : 1.0f;
}

// One row of a result, added to what the row holds (in bf16) under m.add: the lane's columns. Returns the lane's part
// of row · other, of what is new. `dim`: columns of the row, a multiple of 8.
template <int kDim>
__device__ float finish_row(const float (&acc)[kDim / 8][4], int u, float factor, bf16* to, const bf16* other, int dim,
                            bool add) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t* const words = reinterpret_cast<uint32_t*>(to) + lane % 4;
  const uint32_t* const others = reinterpret_cast<const uint32_t*>(other) + lane % 4;
  // All are issued before the first store, behind which they would wait one by one.
  uint32_t before[kDim / 8] = {}, along[kDim / 8] = {};
  if (add) {
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d)
      if (d * 8 < dim) before[d] = words[d * 4];
  }
  if (other) {
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d)
      if (d * 8 < dim) along[d] = others[d * 4];
  }
  float product = 0;
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    const float2 x = {acc[d][u * 2] * factor, acc[d][u * 2 + 1] * factor};
    const float2 y = unpack(along[d]), z = unpack(before[d]);
    product += x.x * y.x + x.y * y.y;
    if (d * 8 < dim) words[d * 4] = pack(x.x + z.x, x.y + z.y);
  }
  return product;
}

// A token's part of dA; under m.add, key_decay holds the part of the states.
[[maybe_unused]] __device__ void write_decay(double* to, float value, bool add) {
  *to = static_cast<double>(value) + (add ? *to : 0.0);
}

struct Maps {
  CUtensorMap q, k, v, g;
};

template <int kDim>
struct QueryLayout {
  static constexpr int kGroups = kDim == 64 ? 3 : 2;  // warpgroups that multiply: as many as registers hold
  static constexpr int kRegisters = kDim == 64 ? 160 : 232, kCopyRegisters = kDim == 64 ? 32 : 40;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3;

  unsigned char queries[kGroups][kPanels][kPanelBytes];
  unsigned char gradients[kGroups][kPanels][kPanelBytes];
  unsigned char keys[kStages][kPanels][kPanelBytes];
  unsigned char values[kStages][kPanels][kPanelBytes];
  float columns[kStages][kTile];  // factor of a key, or what it adds to the exponent
  float locals[kStages][kTile];   // A_j less that of the block's first query, times log2(e)
  Barrier full[kStages], empty[kStages], ready;
  int first_tile;
};

template <Score kScore, int kDim>
__global__ void __launch_bounds__(QueryLayout<kDim>::kThreads, 1)
    query_kernel(const __grid_constant__ Maps maps, const Parallel m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = QueryLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const RowBlock rows = row_block<L::kRows, true>(m);
  if (rows.row0 >= rows.end) return;

  init_barriers(shared, L::kGroups);
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    if (warp > 4 * L::kGroups) return;
    if (lane == 0) {
      shared.ready.arrive_and_expect(2 * L::kGroups * L::kPanels * kPanelBytes);
      for (int i = 0; i < L::kGroups; ++i)
        for (int panel = 0; panel < L::kPanels; ++panel) {
          const int row = rows.row0 + i * 64;
          copy_tile(shared.queries[i][panel], maps.q, shared.ready, panel * 64, row, h / m.q.group, b);
          copy_tile(shared.gradients[i][panel], maps.g, shared.ready, panel * 64, row, h, b);
        }
    }
    copy_keys<kScore>(shared, maps.k, maps.v, m, rows);
    return;
  }
  increase_registers<L::kRegisters>();

  const int group = warp / 4;
  const int w0 = rows.row0 + group * 64;
  const int lane_row = warp % 4 * 16 + lane / 4, lane_column = lane % 4 * 2;
  const int64_t head_row = (static_cast<int64_t>(b) * m.heads + h) * m.length;
  const double* const a = m.decay_of(b, h);
  const float scale = score_scale<kScore>(m.scale);
  float acc[kDim / 8][4];
  float delta[2], own[2] = {};  // own: A_i less that of the first, times log2(e); for exponentials the row's exponent
  int start[2] = {}, latest_start = 0;
  clear(acc);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = min(w0 + lane_row + u * 8, rows.end - 1);
    if (a) own[u] = static_cast<float>(a[row] - a[rows.row0]) * kLog2e;
    if (kExponential) own[u] -= m.log_sum[head_row + row];
    delta[u] = m.delta[head_row + row];
    if (m.starts) start[u] = m.starts[b * m.length + row];
  }
  if (m.starts) latest_start = m.starts[b * m.length + min(w0 + 64, rows.end) - 1];
  const int last_tile = (rows.end - 1) / kTile, own_last_tile = w0 < rows.end ? w0 / kTile : -1;
  bool true_sums = false;
  Pipe<L::kStages> pipe;
  shared.ready.wait(0);
  int tile = shared.first_tile;

  for (; tile <= own_last_tile; ++tile, pipe.next()) {
    const int stage = pipe.stage;
    const int key0 = tile * kTile;
    const bool near = key0 >= rows.row0;
    const float* const column = shared.columns[stage] + lane_column;
    const float* const local = shared.locals[stage];
    uint32_t q[kSteps][4], g[kSteps][4];
    float s[kN][4], dp[kN][4];
    load_rows(q, shared.queries[group]);
    load_rows(g, shared.gradients[group]);
    shared.full[stage].wait(pipe.phase);
    const uint64_t keys = operand(shared.keys[stage][0], 0), values = operand(shared.values[stage][0], 0);
    fence_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma<0>(s, q[step], columns_at(keys, step), step > 0);
    commit_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma<0>(dp, g[step], columns_at(values, step), step > 0);
    commit_products();

    float row[2] = {1, 1};
    if (!kExponential && a && near) {
      row[0] = fast_exp2(fminf(own[0] - local[kTile - 1], 0.0f));
      row[1] = fast_exp2(fminf(own[1] - local[kTile - 1], 0.0f));
    }
    // f' and decay first, while the other product runs; for exponentials the weight.
    wait_for_products<1>();
    settle(s);
    with_place(tile == own_last_tile, latest_start > key0, near && !kExponential, [&](auto place) {
      constexpr Place kPlace = decltype(place)::value;
#pragma unroll
      for (int nn = 0; nn < kN; ++nn) {
        const bool from_local = kPlace == Place::diagonal && !kExponential;
        const float2 pair = *reinterpret_cast<const float2*>((from_local ? local + lane_column : column) + nn * 8);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int u = e / 2;
          float& x = s[nn][e];
          float d = e % 2 == 0 ? pair.x : pair.y;
          if constexpr (kExponential) {
            x = fast_exp2(fmaf(x, scale, d + own[u]));
          } else {
            if constexpr (kPlace == Place::diagonal)
              d = scale * fast_exp2(fminf(own[u] - d, 0.0f));
            else if constexpr (kPlace != Place::far)
              d *= row[u];
            x = kScore == Score::squared ? x * d : d;
          }
          if (kPlace == Place::diagonal && column_of(nn, e) > lane_row + u * 8 - lane_column) x = 0.0f;
          if constexpr (kPlace == Place::diagonal || kPlace == Place::near_documents)
            if (key0 + lane_column + column_of(nn, e) < start[u]) x = 0.0f;
        }
      }
    });
    if (!kExponential && a && near && !true_sums) {
      true_sums = true;
      scale_rows(acc, fast_exp2(own[0]), fast_exp2(own[1]));
    }
    wait_for_products<0>();
    settle(dp);
#pragma unroll
    for (int nn = 0; nn < kN; ++nn)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[nn][e] *= dp[nn][e] - delta[e / 2];
    uint32_t p[kTile / 16][4];
    pack_rows(p, s);
    const uint64_t rows_of_keys = operand_transposed(shared.keys[stage][0], 0, kPanelBytes);
    fence_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) wgmma<1>(acc, p[step], rows_at(rows_of_keys, step), 1);
    commit_products();
    wait_for_products<0>();
    settle(acc);
    shared.empty[stage].arrive();
  }
  for (; tile <= last_tile; ++tile, pipe.next()) {
    shared.full[pipe.stage].wait(pipe.phase);
    shared.empty[pipe.stage].arrive();
  }

  constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = w0 + lane_row + u * 8;
    float product = 0;  // q·dq
    if (row < rows.end)
      product = finish_row<kDim>(acc, u, last_factor<kScore>(m.scale), m.dq.row(b, row, h),
                                 m.row_decay ? m.q.row(b, row, h) : nullptr, m.qk_dim, m.add);
    if (!m.row_decay) continue;
    product = quad_sum(product);
    if (row < rows.end && lane % 4 == 0) write_decay(m.row_decay + head_row + row, product / kDegree, m.add);
  }
#endif
}

template <int kDim>
struct KeyLayout {
  static constexpr int kGroups = 2;
  static constexpr int kRegisters = kDim == 64 ? 232 : 240, kCopyRegisters = kDim == 64 ? 40 : 24;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static_assert(registers_suffice(kGroups, kRegisters, kCopyRegisters));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kStages = kDim == 64 ? 4 : 3;

  unsigned char keys[kGroups][kPanels][kPanelBytes];
  unsigned char values[kGroups][kPanels][kPanelBytes];
  unsigned char queries[kStages][kPanels][kPanelBytes];
  unsigned char gradients[kStages][kPanels][kPanelBytes];
  float columns[kStages][kTile];  // factor of a query, or its part of the exponent
  float locals[kStages][kTile];   // A_i less that of the block's last key, times log2(e)
  float deltas[kStages][kTile];
  int begins[kStages][kTile];  // starts of the queries' documents
  Barrier full[kStages], empty[kStages], ready;
  int last_tile;
};

// By one warp: has tiles of queries and gradients copied, with what goes with their columns, for the keys of `keys`.
template <Score kScore, class Shared>
__device__ void copy_queries(Shared& shared, const CUtensorMap& q, const CUtensorMap& g, const Parallel& m,
                             const RowBlock& keys) {
  constexpr bool kExponential = kScore == Score::exponential;
  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32, length = static_cast<int>(m.length), last_key = keys.end - 1;
  const double* const a = m.decay_of(b, h);
  const int64_t head_row = (static_cast<int64_t>(b) * m.heads + h) * m.length;
  const float scale = score_scale<kScore>(m.scale);
  const double reference = a ? a[last_key] : 0.0;
  int end = m.ends ? m.ends[b * m.length + last_key] : length;
  if (m.chunk) end = min(end, (keys.row0 / m.chunk + 1) * m.chunk);
  int last_tile = (end - 1) / kTile;
  if (a)
    last_tile -= count_erased_by_warp(last_tile - last_key / kTile, [&](int i) {
      return static_cast<float>(a[(last_tile - i) * kTile] - reference) < static_cast<float>(kErased);
    });
  if (lane == 0) {
    shared.last_tile = last_tile;
    shared.ready.arrive();
  }
  Pipe<Shared::kStages> pipe;
  for (int tile = last_tile; tile >= keys.row0 / kTile; --tile, pipe.next()) {
    const int stage = pipe.stage, row0 = tile * kTile;
    const double base = a && row0 <= last_key ? a[row0] : reference;
    float column[2], local[2], delta[2];
    int begin[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row0 + i * 32 + lane;
      column[i] = kExponential ? -INFINITY : 0.0f, local[i] = 0, delta[i] = 0, begin[i] = 0;
      if (row >= length) continue;
      const double own = a ? a[row] : 0.0;
      local[i] = static_cast<float>(own - reference) * kLog2e;
      delta[i] = m.delta[head_row + row];
      column[i] = kExponential ? local[i] - m.log_sum[head_row + row]
                               : scale * fast_exp2(static_cast<float>(own - base) * kLog2e);
      if (m.starts) begin[i] = m.starts[b * m.length + row];
    }
    if (pipe.phase > 0) shared.empty[stage].wait(pipe.phase - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.columns[stage][i * 32 + lane] = column[i];
      shared.locals[stage][i * 32 + lane] = local[i];
      shared.deltas[stage][i * 32 + lane] = delta[i];
      shared.begins[stage][i * 32 + lane] = begin[i];
    }
    if (lane > 0) shared.full[stage].arrive();
    if (lane == 0) {
      shared.full[stage].arrive_and_expect(2 * Shared::kPanels * kPanelBytes);
      for (int panel = 0; panel < Shared::kPanels; ++panel) {
        copy_tile(shared.queries[stage][panel], q, shared.full[stage], panel * 64, row0, h / m.q.group, b);
        copy_tile(shared.gradients[stage][panel], g, shared.full[stage], panel * 64, row0, h, b);
      }
    }
    __syncwarp();
  }
}

template <Score kScore, int kDim>
__global__ void __launch_bounds__(KeyLayout<kDim>::kThreads, 1)
    key_kernel(const __grid_constant__ Maps maps, const Parallel m) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = KeyLayout<kDim>;
  constexpr bool kExponential = kScore == Score::exponential;
  constexpr int kSteps = kDim / 16, kN = kTile / 8;
  constexpr bool kInRegisters = kDim == 64;  // keys and values; with heads of 128 there are not enough
  extern __shared__ __align__(1024) unsigned char memory[];
  L& shared = *reinterpret_cast<L*>(memory);
  const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const RowBlock block = row_block<L::kRows, false>(m);
  if (block.row0 >= block.end) return;

  init_barriers(shared, L::kGroups);
  if (warp >= 4 * L::kGroups) {
    decrease_registers<L::kCopyRegisters>();
    if (warp > 4 * L::kGroups) return;
    if (lane == 0) {
      shared.ready.arrive_and_expect(2 * L::kGroups * L::kPanels * kPanelBytes);
      for (int i = 0; i < L::kGroups; ++i)
        for (int panel = 0; panel < L::kPanels; ++panel) {
          const int key = block.row0 + i * 64;
          copy_tile(shared.keys[i][panel], maps.k, shared.ready, panel * 64, key, h / m.k.group, b);
          copy_tile(shared.values[i][panel], maps.v, shared.ready, panel * 64, key, h / m.v.group, b);
        }
    }
    copy_queries<kScore>(shared, maps.q, maps.g, m, block);
    return;
  }
  increase_registers<L::kRegisters>();

  const int group = warp / 4;
  const int w0 = block.row0 + group * 64;
  const int lane_row = warp % 4 * 16 + lane / 4, lane_column = lane % 4 * 2;
  const int64_t head_row = (static_cast<int64_t>(b) * m.heads + h) * m.length;
  const double* const a = m.decay_of(b, h);
  const float scale = score_scale<kScore>(m.scale);
  float dk[kDim / 8][4], dv[kDim / 8][4];
  float own[2] = {}, decay_sum[2] = {};  // own: A_j less that of the last key, times log2(e)
  clear(dk);
  clear(dv);
  if (a)
#pragma unroll
    for (int u = 0; u < 2; ++u)
      own[u] = static_cast<float>(a[min(w0 + lane_row + u * 8, block.end - 1)] - a[block.end - 1]) * kLog2e;
  bool true_sums = false;
  Pipe<L::kStages> pipe;
  shared.ready.wait(0);
  int tile = shared.last_tile;
  const int own_tile = w0 < block.end ? w0 / kTile : tile + 1;

  for (; tile >= own_tile; --tile, pipe.next()) {
    const int stage = pipe.stage;
    const int row0 = tile * kTile;
    const bool near = row0 < block.end;
    const float* const column = shared.columns[stage] + lane_column;
    const float* const local = shared.locals[stage];
    const float* const delta = shared.deltas[stage] + lane_column;
    const int* const begin = shared.begins[stage];
    [[maybe_unused]] uint32_t k[kSteps][4], v[kSteps][4];
    float s[kN][4], dp[kN][4];
    if constexpr (kInRegisters) {
      load_rows(k, shared.keys[group]);
      load_rows(v, shared.values[group]);
    }
    shared.full[stage].wait(pipe.phase);
    const uint64_t queries = operand(shared.queries[stage][0], 0), gradients = operand(shared.gradients[stage][0], 0);
    fence_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if constexpr (kInRegisters)
        wgmma<0>(s, k[step], columns_at(queries, step), step > 0);
      else
        wgmma<0, 0>(s, columns_at(operand(shared.keys[group][0], 0), step), columns_at(queries, step), step > 0);
    commit_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if constexpr (kInRegisters)
        wgmma<0>(dp, v[step], columns_at(gradients, step), step > 0);
      else
        wgmma<0, 0>(dp, columns_at(operand(shared.values[group][0], 0), step), columns_at(gradients, step), step > 0);
    commit_products();

    float row[2] = {1, 1};
    if (!kExponential && a && near) {
      row[0] = fast_exp2(fminf(local[0] - own[0], 0.0f));
      row[1] = fast_exp2(fminf(local[0] - own[1], 0.0f));
    }
    // A query's document may have begun after these keys; rows beyond the last query have no document.
    const bool documents = m.starts && (begin[kTile - 1] > w0 || row0 + kTile > m.length);
    wait_for_products<1>();
    settle(s);
    // Weights become the operand p; s keeps what the coefficients need.
    uint32_t p[kTile / 16][4];
    with_place(tile == own_tile, documents, near && !kExponential, [&](auto place) {
      constexpr Place kPlace = decltype(place)::value;
#pragma unroll
      for (int nn = 0; nn < kN; ++nn) {
        const bool from_local = kPlace == Place::diagonal && !kExponential;
        const float2 pair = *reinterpret_cast<const float2*>((from_local ? local + lane_column : column) + nn * 8);
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int u = e / 2;
          const float x = s[nn][e];
          float d = e % 2 == 0 ? pair.x : pair.y;
          if constexpr (kExponential) {
            w[e] = fast_exp2(fmaf(x, scale, d - own[u]));
          } else {
            if constexpr (kPlace == Place::diagonal)
              d = scale * fast_exp2(fminf(d - own[u], 0.0f));
            else if constexpr (kPlace != Place::far)
              d *= row[u];
            w[e] = x * d;
          }
          if (kPlace == Place::diagonal && column_of(nn, e) < lane_row + u * 8 - lane_column) w[e] = d = 0.0f;
          if constexpr (kPlace == Place::diagonal || kPlace == Place::near_documents)
            if (w0 + lane_row + u * 8 < begin[lane_column + column_of(nn, e)] ||
                row0 + lane_column + column_of(nn, e) >= m.length)
              w[e] = d = 0.0f;
          s[nn][e] = kScore == Score::linear ? d : w[e];
          if constexpr (kScore == Score::squared) w[e] *= x;
        }
        p[nn / 2][nn % 2 * 2] = pack(w[0], w[1]);
        p[nn / 2][nn % 2 * 2 + 1] = pack(w[2], w[3]);
      }
    });
    if (!kExponential && a && near && !true_sums) {
      true_sums = true;
      const float upper = fast_exp2(-own[0]), lower = fast_exp2(-own[1]);
      scale_rows(dk, upper, lower);
      scale_rows(dv, upper, lower);
    }
    const uint64_t rows_of_gradients = operand_transposed(shared.gradients[stage][0], 0, kPanelBytes);
    fence_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) wgmma<1>(dv, p[step], rows_at(rows_of_gradients, step), 1);
    commit_products();
    wait_for_products<kInRegisters ? 1 : 0>();  // heads of 128 need the registers of p for c
    settle(dp);
    uint32_t c[kTile / 16][4];
#pragma unroll
    for (int nn = 0; nn < kN; ++nn) {
      const float2 shifts = *reinterpret_cast<const float2*>(delta + nn * 8);
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = s[nn][e] * (dp[nn][e] - (e % 2 == 0 ? shifts.x : shifts.y));
        if (kExponential) decay_sum[e / 2] += x[e];
      }
      c[nn / 2][nn % 2 * 2] = pack(x[0], x[1]);
      c[nn / 2][nn % 2 * 2 + 1] = pack(x[2], x[3]);
    }
    const uint64_t rows_of_queries = operand_transposed(shared.queries[stage][0], 0, kPanelBytes);
    fence_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) wgmma<1>(dk, c[step], rows_at(rows_of_queries, step), 1);
    commit_products();
    wait_for_products<0>();
    settle(dk);
    settle(dv);
    shared.empty[stage].arrive();
  }
  for (; tile >= block.row0 / kTile; --tile, pipe.next()) {
    shared.full[pipe.stage].wait(pipe.phase);
    shared.empty[pipe.stage].arrive();
  }

  constexpr float kDegree = kScore == Score::squared ? 2 : 1;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int key = w0 + lane_row + u * 8;
    float product = 0;  // k·dk
    if (key < block.end) {
      product = finish_row<kDim>(dk, u, last_factor<kScore>(m.scale), m.dk.row(b, key, h),
                                 m.key_decay ? m.k.row(b, key, h) : nullptr, m.qk_dim, m.add);
      finish_row<kDim>(dv, u, 1.0f, m.dv.row(b, key, h), nullptr, m.v_dim, m.add);
    }
    if (!m.key_decay) continue;
    product = quad_sum(kExponential ? decay_sum[u] : product / kDegree);
    if (key < block.end && lane % 4 == 0) write_decay(m.key_decay + head_row + key, -product, m.add);
  }
#endif
}

template <Score kScore, int kDim>
void launch(const MixerCall& call, const Parallel& m, const Tensor& scaled) {
  using Q = QueryLayout<kDim>;
  using K = KeyLayout<kDim>;
  const Maps maps{tile_map(call.inputs.q), tile_map(call.inputs.k), tile_map(call.inputs.v), tile_map(scaled)};
  const cudaStream_t s = stream(call.inputs.q.device());
  const auto query = query_kernel<kScore, kDim>;
  const auto key = key_kernel<kScore, kDim>;
  allow_shared_memory(query, sizeof(Q));
  allow_shared_memory(key, sizeof(K));
  query<<<row_blocks<Q::kRows>(call.shape, m.chunk), Q::kThreads, sizeof(Q), s>>>(maps, m);
  check_launch("mixer_backward");
  key<<<row_blocks<K::kRows>(call.shape, m.chunk), K::kThreads, sizeof(K), s>>>(maps, m);
  check_launch("mixer_backward");
}

}  // namespace

void hopper_backward(const MixerCall& call, const Parallel& m, const Tensor& scaled) {
  with_score_and_dim(
      call, [&](auto score, auto dim) { launch<decltype(score)::value, decltype(dim)::value>(call, m, scaled); });
}

}  // namespace furious::cuda
