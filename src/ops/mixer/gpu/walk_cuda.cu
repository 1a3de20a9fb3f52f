// With chunks of 64 tokens, tables of chunk_tables() for them, D_ij = exp(A_i − A_j) for tokens j ≤ i of one document:
//
//   o_i  = s Σ_j D_ij (q_i·k_j) v_j + s in_i Sᵀ q_i          S  ← through · S  + Σ_j out_j k_j v_jᵀ
//   dq_i = s Σ_j D_ij (g_i·v_j) k_j + s in_i S g_i
//   dk_j = s Σ_i D_ij (g_i·v_j) q_i + out_j T v_j            T  ← through · T + s Σ_i in_i q_i g_iᵀ
//   dv_j = s Σ_i D_ij (q_i·k_j) g_i + out_j Tᵀ k_j           (from the last chunk to the first)
//
// s is the scale, sums over j or i are those within the chunk. The gradient of A_t is q_t·dq_t − k_t·dk_t.
//
// Where there are too few heads for the device, a head is divided into segments: their own sums are computed first, and
// then what enters each of them.
//
// A block has four warps. Each computes 16 tokens of a chunk and holds a quarter of the state, in f32; the others read
// it as bf16 from shared memory. The next chunk is loaded meanwhile. Dimensions are padded with zeros.
#include "ops/mixer/gpu/walk.cuh"

#include "gpu/launch.cuh"
#include "ops/elementwise.h"
#include "ops/mixer/gpu/walk.h"

namespace furious::cuda {
namespace {

using namespace walks;

enum class Pass { sums, forward, query, key };  // of the walk; sums: the state alone

// Loads the tiles of a chunk that a pass reads. `reverse` sums are those of (q, g).
template <Pass kPass, int kQk, int kV>
__device__ void load_chunk(Stage<kQk, kV>& stage, const Walk& m, const Place& place, int chunk, bool reverse) {
  const bool sums = kPass == Pass::sums;
  if (!sums || reverse) load_tile<kQk>(stage.q, m.q, place, chunk, m.length, m.qk_dim);
  if (!sums || !reverse) load_tile<kQk>(stage.k, m.k, place, chunk, m.length, m.qk_dim);
  if (!sums || !reverse) load_tile<kV>(stage.v, m.v, place, chunk, m.length, m.v_dim);
  if (sums ? reverse : kPass != Pass::forward) load_tile<kV>(stage.g, m.g, place, chunk, m.length, m.v_dim);
}

// x [16 of this warp] times the state, where x is of qk_dim, or the state transposed, where it is of v_dim.
template <bool kQueries, int kQk, int kV>
__device__ void multiply_state(float (&sum)[(kQueries ? kV : kQk) / 8][4], const Tile<kQueries ? kQk : kV>& x, int own,
                               const Shared<kQk, kV>& memory) {
  constexpr int kX = kQueries ? kQk : kV, kOut = kQueries ? kV : kQk;
  const Tile<kV> state{const_cast<bf16*>(memory.state)};
#pragma unroll
  for (int n = 0; n < kOut / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[n][e] = 0;
#pragma unroll
  for (int step = 0; step < kX / 16; ++step) {
    uint32_t a[4];
    x.a_fragment(a, own, step);
#pragma unroll
    for (int column = 0; column < kOut / 16; ++column) {
      uint32_t b[4];
      if constexpr (kQueries)
        state.b_fragment_transposed(b, step * 16, column);
      else
        state.b_fragment(b, column * 16, step);
      mma(sum[2 * column], a, b[0], b[1]);
      mma(sum[2 * column + 1], a, b[2], b[3]);
    }
  }
}

// Queries of a chunk: the result, or with kGradient dq. Both are s (Σ_j D_ij (x_i·y_j) z_j + in_i S x_i).
template <bool kGradient, int kQk, int kV>
__device__ void run_queries(const Walk& m, const Place& place, int chunk, Stage<kQk, kV>& stage,
                            const Shared<kQk, kV>& memory) {
  constexpr int kX = kGradient ? kV : kQk, kOut = kGradient ? kQk : kV;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32 * 16;
  const Tile<kX> x{kGradient ? stage.g : stage.q}, y{kGradient ? stage.v : stage.k};
  const Tile<kOut> z{kGradient ? stage.k : stage.v};
  const int rows[2] = {own + lane / 4, own + lane / 4 + 8};
  float sum[kOut / 8][4];
  multiply_state<!kGradient, kQk, kV>(sum, x, own, memory);
  scale_rows(sum, m.scale * memory.in[rows[0]], m.scale * memory.in[rows[1]]);
  const TokenDecay decays[2] = {memory.decay[rows[0]], memory.decay[rows[1]]};
  // Tokens of earlier groups: D_ij in two factors, with the first token of this group between i and j.
  const TokenDecay between = memory.decay[own];
  const float factors[2] = {m.scale * decay_between(decays[0], between), m.scale * decay_between(decays[1], between)};
#pragma unroll 1
  for (int first = 0; first <= own; first += 16) {
    float products[2][4];
    dot_products<kX>(products, x, y, own, first);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = first + n * 8 + lane % 4 * 2 + c;
        const TokenDecay at_j = memory.decay[j];
        if (first == own) {
          products[n][c] *= m.scale * pair_weight(decays[0], at_j, rows[0], j);
          products[n][c + 2] *= m.scale * pair_weight(decays[1], at_j, rows[1], j);
        } else {
          const float factor = decay_between(between, at_j);
          products[n][c] *= j >= decays[0].start ? factor * factors[0] : 0.0f;
          products[n][c + 2] *= j >= decays[1].start ? factor * factors[1] : 0.0f;
        }
      }
    add_weighted<kOut>(sum, products, z, first);
  }
  const int token = chunk * kRows;
  if constexpr (kGradient) {
    if (m.row_decay != nullptr)
      write_decay<kQk>(sum, Tile<kQk>{stage.q}, own, 1.0f, m.row_decay + place.row * m.length + token,
                       m.length - token);
    write_rows<kQk>(sum, stage.q + own * kQk, m.dq, place, token + own, m.length, m.qk_dim);
  } else {
    write_rows<kV>(sum, stage.g + own * kV, m.out, place, token + own, m.length, m.v_dim);  // no g in this pass
  }
}

// Keys of a chunk: dk, or with kValues dv. Both are s Σ_i D_ij (x_j·y_i) z_i + out_j T x_j.
template <bool kValues, int kQk, int kV>
__device__ void sum_keys(float (&sum)[(kValues ? kV : kQk) / 8][4], float scale, Stage<kQk, kV>& stage,
                         const Shared<kQk, kV>& memory) {
  constexpr int kX = kValues ? kQk : kV, kOut = kValues ? kV : kQk;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32 * 16;
  const Tile<kX> x{kValues ? stage.k : stage.v}, y{kValues ? stage.q : stage.g};
  const Tile<kOut> z{kValues ? stage.g : stage.q};
  const int rows[2] = {own + lane / 4, own + lane / 4 + 8};
  multiply_state<kValues, kQk, kV>(sum, x, own, memory);
  scale_rows(sum, memory.out[rows[0]], memory.out[rows[1]]);
  const TokenDecay decays[2] = {memory.decay[rows[0]], memory.decay[rows[1]]};
  // Tokens of later groups: D_ij in two factors, with the last token of this group between i and j.
  const TokenDecay between = memory.decay[own + 15];
  const float factors[2] = {scale * decay_between(between, decays[0]), scale * decay_between(between, decays[1])};
#pragma unroll 1
  for (int first = own; first < kRows; first += 16) {
    float products[2][4];
    dot_products<kX>(products, x, y, own, first);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = first + n * 8 + lane % 4 * 2 + c;
        const TokenDecay at_i = memory.decay[i];
        if (first == own) {
          products[n][c] *= scale * pair_weight(at_i, decays[0], i, rows[0]);
          products[n][c + 2] *= scale * pair_weight(at_i, decays[1], i, rows[1]);
        } else {
          const float factor = decay_between(at_i, between);
          products[n][c] *= rows[0] >= at_i.start ? factor * factors[0] : 0.0f;
          products[n][c + 2] *= rows[1] >= at_i.start ? factor * factors[1] : 0.0f;
        }
      }
    add_weighted<kOut>(sum, products, z, first);
  }
}

template <int kQk, int kV>
__device__ void run_keys(const Walk& m, const Place& place, int chunk, Stage<kQk, kV>& stage,
                         const Shared<kQk, kV>& memory) {
  const int own = static_cast<int>(threadIdx.x) / 32 * 16, token = chunk * kRows;
  float dv[kV / 8][4], dk[kQk / 8][4];
  sum_keys<true>(dv, m.scale, stage, memory);
  sum_keys<false>(dk, m.scale, stage, memory);
  if (m.key_decay != nullptr)
    write_decay<kQk>(dk, Tile<kQk>{stage.k}, own, -1.0f, m.key_decay + place.row * m.length + token, m.length - token);
  write_rows<kQk>(dk, stage.k + own * kQk, m.dk, place, token + own, m.length, m.qk_dim);
  write_rows<kV>(dv, stage.v + own * kV, m.dv, place, token + own, m.length, m.v_dim);
}

template <Pass kPass, int kQk, int kV>
__global__ void __launch_bounds__(kThreads, blocks_at_once(kQk, kV)) walk_kernel(const Walk m, const bool reverse) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared<kQk, kV>& memory = *reinterpret_cast<Shared<kQk, kV>*>(bytes);
  const Place place;
  const int first = place.first_chunk(m), count = place.end_chunk(m) - first;
  // Nothing enters a segment behind the last one of the walk.
  if (kPass == Pass::sums && place.segment == (reverse ? 0 : place.segments - 1)) return;
  const auto chunk_of = [&](int i) { return first + (reverse ? count - 1 - i : i); };
  State<kQk, kV> state;
  state.load(m, m.first != nullptr && kPass != Pass::sums ? m.first + place.state(m) : nullptr);
  TokenValues next = load_values(m, place, chunk_of(0));
  load_chunk<kPass>(memory.stages[0], m, place, chunk_of(0), reverse);
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    Stage<kQk, kV>& stage = memory.stages[i % 2];
    const TokenValues values = next;
    keep_values(values, memory);
    if (kPass != Pass::sums) state.share(memory.state);
    if (i + 1 < count) {
      load_chunk<kPass>(memory.stages[(i + 1) % 2], m, place, chunk_of(i + 1), reverse);
      next = load_values(m, place, chunk_of(i + 1));
    }
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    const Tile<kQk> q{stage.q}, k{stage.k};
    const Tile<kV> v{stage.v}, g{stage.g};
    if (reverse)
      state.advance(q, g, memory.in, m.scale, values.through);
    else
      state.advance(k, v, memory.out, 1.0f, values.through);
    if constexpr (kPass == Pass::forward) run_queries<false>(m, place, chunk_of(i), stage, memory);
    if constexpr (kPass == Pass::query) run_queries<true>(m, place, chunk_of(i), stage, memory);
    if constexpr (kPass == Pass::key) run_keys(m, place, chunk_of(i), stage, memory);
    __syncthreads();
  }
  if (m.last != nullptr) state.store(m, m.last + place.state(m));
}

// sums [batch, heads, segments, size]: of each segment alone but the last of the walk → what enters each. `initial`:
// what enters the first. Blocks of kEnterThreads; shared memory for a number of each segment.
constexpr int kEnterThreads = 256;
__global__ void enter_kernel(float* sums, const float* initial, const float* through, int chunks, int segments,
                             int segment_chunks, int size, bool reverse) {
  extern __shared__ float left[];  // what of a state that enters a segment leaves it
  const int64_t row = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int segment = static_cast<int>(threadIdx.x) / 32; segment < segments; segment += kEnterThreads / 32) {
    const int end = min(chunks, (segment + 1) * segment_chunks);
    float product = 1;
    for (int c = segment * segment_chunks + lane; through != nullptr && c < end; c += 32)
      product *= through[row * chunks + c];
    for (int offset = 16; offset > 0; offset /= 2) product *= __shfl_xor_sync(0xFFFFFFFFu, product, offset);
    if (lane == 0) left[segment] = product;
  }
  __syncthreads();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= size) return;
  float state = initial != nullptr ? initial[row * size + i] : 0.0f;
  constexpr int kAhead = 8;  // reads at the same time
  for (int first = 0; first < segments; first += kAhead) {
    const auto segment_of = [&](int n) { return reverse ? segments - 1 - (first + n) : first + n; };
    float own[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
      if (first + n < segments - 1) own[n] = sums[(row * segments + segment_of(n)) * size + i];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (first + n >= segments) break;
      sums[(row * segments + segment_of(n)) * size + i] = state;
      if (first + n < segments - 1) state = fmaf(left[segment_of(n)], state, own[n]);
    }
  }
}

template <class Run>
void with_widths(const MixerShape& shape, Run&& run) {
  const bool wide_qk = shape.qk_dim > 64, wide_v = shape.v_dim > 64;
  if (std::max(shape.qk_dim, shape.v_dim) <= 32)
    run.template operator()<32, 32>();
  else if (wide_qk && wide_v)
    run.template operator()<128, 128>();
  else if (wide_qk)
    run.template operator()<128, 64>();
  else if (wide_v)
    run.template operator()<64, 128>();
  else
    run.template operator()<64, 64>();
}

// A call with its tables for chunks of kRows, and the segments of a head.
class Call {
 public:
  Call(const MixerCall& call, const TokenTables& tokens)
      : call_(call),
        tables_(chunk_tables({call.spec, call.shape, call.inputs, call.segments, kRows, call.result}, tokens)) {
    const MixerShape& shape = call.shape;
    walk.q = heads_of<bfloat16>(call.inputs.q, shape.heads);
    walk.k = heads_of<bfloat16>(call.inputs.k, shape.heads);
    walk.v = heads_of<bfloat16>(call.inputs.v, shape.heads);
    walk.decay = doubles(tokens.decay);
    walk.starts = tokens.starts ? tables_.within.starts.data<int32_t>() : nullptr;
    walk.in = floats(tables_.in);
    walk.out_factors = floats(tables_.out);
    walk.through = floats(tables_.through);
    walk.length = static_cast<int>(shape.length);
    walk.chunks = static_cast<int>((shape.length + kRows - 1) / kRows);
    walk.qk_dim = static_cast<int>(shape.qk_dim);
    walk.v_dim = static_cast<int>(shape.v_dim);
    walk.scale = shape.scale;
    const int64_t segments = best_segments();
    walk.segment_chunks = static_cast<int>((walk.chunks + segments - 1) / segments);
    segments_ = (walk.chunks + walk.segment_chunks - 1) / walk.segment_chunks;
  }

  // How many segments of a head take the least time. A block takes as long as its chunks; a multiprocessor runs a few
  // at a time. The sums of segments are a pass of their own.
  int64_t best_segments() const {
    constexpr int64_t kShortest = 16;
    constexpr double kPass = 1.4;
    const int64_t all = call_.shape.batch * call_.shape.heads, chunks = walk.chunks;
    int64_t at_once = multiprocessors();
    with_widths(call_.shape, [&]<int kQk, int kV>() { at_once *= blocks_at_once(kQk, kV); });
    const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    int64_t best = 1;
    auto least = static_cast<double>(parts(all, at_once) * chunks);
    for (int64_t segments = 2; segments <= std::min(chunks / kShortest, at_once); ++segments) {
      const double time = kPass * static_cast<double>(parts(all * segments, at_once) * parts(chunks, segments));
      if (time >= least) continue;
      least = time;
      best = segments;
    }
    return best;
  }

  // The state that enters every segment; undefined where there is one segment. `known`: what an earlier call returned.
  Tensor enter(const Tensor& initial, bool reverse, const Tensor& known = {}) {
    const MixerShape& shape = call_.shape;
    if (segments_ == 1) {
      walk.first = floats(initial);
      return {};
    }
    const Shape states{shape.batch, shape.heads, segments_, shape.qk_dim, shape.v_dim};
    if (known && known.dtype() == DType::f32 && known.shape() == states) {
      walk.first = known.data<float>();
      return known;
    }
    sums_ = Tensor::empty(states, DType::f32, device());
    walk.first = nullptr;
    walk.last = sums_.data<float>();
    run<Pass::sums>(reverse);
    walk.last = nullptr;
    const auto size = static_cast<int>(shape.qk_dim * shape.v_dim);
    const dim3 grid(blocks_for(size, kEnterThreads), static_cast<unsigned>(shape.batch * shape.heads));
    enter_kernel<<<grid, kEnterThreads, static_cast<size_t>(segments_) * sizeof(float), stream(device())>>>(
        sums_.data<float>(), floats(initial), walk.through, walk.chunks, static_cast<int>(segments_),
        walk.segment_chunks, size, reverse);
    check_launch("mixer: states between segments");
    walk.first = sums_.data<float>();
    return sums_;
  }
  // Where the pass leaves the states of all segments; the one that leaves the head goes to `to` with copy_last().
  void keep_last() {
    const MixerShape& shape = call_.shape;
    lasts_ = Tensor::empty({shape.batch, shape.heads, segments_, shape.qk_dim, shape.v_dim}, DType::f32, device());
    walk.last = lasts_.data<float>();
  }
  void copy_last(const Tensor& to, bool reverse) const {
    furious::copy(to, lasts_.select(2, reverse ? 0 : segments_ - 1));
  }

  template <Pass kPass>
  void run(bool reverse) const {
    with_widths(call_.shape, [&]<int kQk, int kV>() {
      constexpr auto kernel = walk_kernel<kPass, kQk, kV>;
      constexpr size_t bytes = sizeof(Shared<kQk, kV>);
      allow_shared_memory(kernel, bytes);
      const dim3 grid(static_cast<unsigned>(segments_), static_cast<unsigned>(call_.shape.heads),
                      static_cast<unsigned>(call_.shape.batch));
      kernel<<<grid, kThreads, bytes, stream(device())>>>(walk, reverse);
    });
    check_launch("mixer: walk over chunks");
  }

  Walk walk = {};

 private:
  Device device() const { return call_.inputs.q.device(); }

  const MixerCall& call_;
  ChunkTables tables_;
  int64_t segments_ = 1;
  Tensor sums_, lasts_;
};

bool fits_in_shared_memory(const MixerShape& shape, Device device) {
  (void)stream(device);  // makes it current
  bool fits = false;
  with_widths(shape,
              [&]<int kQk, int kV>() { fits = sizeof(Shared<kQk, kV>) <= static_cast<size_t>(most_shared_memory()); });
  return fits;
}

}  // namespace

bool walk_supports(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const std::string_view forced = forced_kernel();
  const auto fits = [](int64_t dim) { return dim % 8 == 0 && dim <= kLargestWalkDim; };
  // With wider values the states of chunks are faster (chunk_states.h).
  const bool chosen = shape.v_dim <= 64;
  return (forced == "walk" || (forced.empty() && chosen)) && call.inputs.q.dtype() == DType::bf16 &&
         call.precision == MixerPrecision::automatic && call.spec.score == Score::linear &&
         call.spec.norm == Norm::none && !call.spec.signed_decay && fits(shape.qk_dim) && fits(shape.v_dim) &&
         shape.first_query == 0 && rows_are_wide(call.inputs.q) && rows_are_wide(call.inputs.k) &&
         rows_are_wide(call.inputs.v) && shape.length <= (int64_t{1} << 30) &&
         fits_in_shared_memory(shape, call.inputs.q.device());
}

Tensor walk_forward(const MixerCall& call, const TokenTables& tokens) {
  Call walk(call, tokens);
  const Tensor states = walk.enter(call.inputs.initial_state, false);
  walk.walk.out = heads_of<bfloat16>(call.result.out, call.shape.heads);
  if (call.result.final_state) walk.keep_last();
  walk.run<Pass::forward>(false);
  if (call.result.final_state) walk.copy_last(call.result.final_state, false);
  return states;
}

void walk_backward(const MixerCall& call, const TokenTables& tokens, const Tensor& out_gradient,
                   const HeadGradients& gradients, const Tensor& initial_state_gradient) {
  const int64_t heads = call.shape.heads;
  Tensor g = out_gradient;
  if (!rows_are_wide(g)) {
    g = Tensor::empty(g.shape(), g.dtype(), g.device());
    furious::copy(g, out_gradient);
  }
  Call walk(call, tokens);
  walk.walk.g = heads_of<bfloat16>(g, heads);
  walk.walk.dq = heads_of<bfloat16>(gradients.q, heads);
  walk.walk.dk = heads_of<bfloat16>(gradients.k, heads);
  walk.walk.dv = heads_of<bfloat16>(gradients.v, heads);
  walk.walk.row_decay = doubles(gradients.row_decay);
  walk.walk.key_decay = doubles(gradients.key_decay);
  walk.enter(call.inputs.initial_state, false, call.result.states);
  walk.run<Pass::query>(false);
  walk.enter({}, true);
  if (initial_state_gradient) walk.keep_last();
  walk.run<Pass::key>(true);
  if (initial_state_gradient) walk.copy_last(initial_state_gradient, true);
}

}  // namespace furious::cuda
