#include <cstring>
#include <vector>

#include "ops/mixer/hopper.cuh"
#include "ops/token_program.cuh"
#include "tensor/arena.h"
#include "tensor/launch.cuh"

// Every multiprocessor has one block, and all blocks walk the same list of operations, each with its own share of the
// rows of a weight or a state. What waits for nobody are the weights, the states and the windows: a warp of its own
// fetches them, piece by piece, into a ring of shared memory, as far ahead as there is room. So memory is busy while
// the blocks wait for each other's activations.
//
// An activation travels as a word that holds its 16 bits and a tag, the number of the operation that wrote it counted
// over all tokens: who reads it reads until the tag is the one he waits for. That takes one way through the L2 cache,
// where a meeting of all blocks takes three. Numbers of f32 travel the same way in two words. Nobody can be overtaken:
// who writes an activation anew has read all that the operation before wrote, and each block of that had read its own
// input before it wrote. Only a step reads less than all, its own head; but the operation after it reads all heads.
//
// A piece is some tiles of eight rows of a product, or some rows of a state (with the first of them the window's
// tokens), and says everything that is to be done with it. Where it lies in the ring, and which piece must have been
// used up before, is known when the program is made.
//
// Sums are always taken in the same order.

namespace furious {
namespace cuda {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;  // that compute; one more warp fetches
constexpr int kSlots = 8;                           // pieces that are known at once
constexpr int kMostGroups = 4;                      // of eight rows of weights, in a piece
constexpr int kDescriptionBytes = 512;
constexpr int kMostTokens = static_cast<int>(kStepTokens);  // of a window, for a block
constexpr int kFewestRows = 64;                             // of a state, in a piece
static_assert(kThreads / 8 == kMostTokens && 8 * kMostGroups == 32 && kMostSequences <= kWarps);

struct Piece {
  enum class Kind : uint8_t { embedding, linear, step };
  int needs;  // pieces that must have been used before this one is fetched; the fetching warp looks here
  Kind kind;
  bool first, last;  // of its operation
  bool final;        // of the last operation
  int operation;     // its number
  int at;            // byte of the ring
  int begin, count;  // tiles or rows: of each block's share, from which one and how many
  int share;         // tiles of a block
  union {
    EmbeddingCall embedding;
    LinearCall linear;
    StepCall step;
  };
};
static_assert(sizeof(Piece) <= kDescriptionBytes && alignof(Piece) <= 16);

// What a step needs besides the numbers of its piece, and no operation since the last token has written.
struct Window {
  Page page;  // for the new token
  double before;
  double totals[kMostTokens];
  int pending;
};

struct Memory {
  alignas(16) char pieces[kSlots][kDescriptionBytes];
  Window windows[kSlots];
  Barrier fetched[kSlots], used[kSlots];
  float q[kLargestDim], k[kLargestDim], v[kLargestDim], log_decay;  // of the new token
  float phi[kThreads];
  float weights[kMostTokens];
  float squares[2][kWarps][kMostSequences];  // by turns, since the operation before may still be reading its own
  float warps[kWarps];
};

struct Program {
  const uint4* pieces;  // each of kDescriptionBytes
  int count;
  unsigned* tags;        // of each block: the first of this token
  int* const* counters;  // of the mixers' caches
  int caches;
  int activations, sums;  // bytes of shared memory; the ring follows
  int operations;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__global__ void token_kernel(const Program) {}  // without bulk copies: never launched
#else

// The threads that compute.
__device__ void meet() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(kThreads) : "memory");
}

__device__ uint4 load_relaxed(const uint4* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ uint64_t load_relaxed(const uint64_t* from) {
  uint64_t x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];\n" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ void store_relaxed(uint32_t* to, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;\n" ::"l"(to), "r"(x) : "memory");
}
__device__ void store_relaxed(uint64_t* to, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;\n" ::"l"(to), "l"(x) : "memory");
}

// Addresses of shared memory that the compiler cannot make anew in every turn of a loop.
__device__ uint32_t fixed_address(const void* pointer) {
  uint32_t address;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(address) : "r"(shared_address(pointer)));
  return address;
}
__device__ uint4 load_shared(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}

// The 16 bits of an activation, and its value.
__device__ uint32_t bits_of(float x) {
  return pack(x, 0.0f);
}
__device__ float value_of(uint32_t word) {
  return __uint_as_float(word << 16);
}

// How numbers travel from block to block: an activation under its tag in a word, a number of f32 in two.
struct Tagged {
  uint32_t tag;  // of 16 bits

  __device__ void activation(void* out, int64_t at, float x) const {
    store_relaxed(static_cast<uint32_t*>(out) + at, tag << 16 | bits_of(x));
  }
  __device__ void number(void* out, int64_t at, float x) const {
    store_relaxed(static_cast<uint64_t*>(out) + at, uint64_t{tag} << 32 | __float_as_uint(x));
  }
  __device__ float wait_activation(const uint32_t* from) const {
    uint32_t word;
    do word = load_relaxed(from);
    while (word >> 16 != tag);
    return value_of(word);
  }
  __device__ float wait_number(const uint64_t* from) const {
    uint64_t both;
    do both = load_relaxed(from);
    while (both >> 32 != tag);
    return __uint_as_float(static_cast<uint32_t>(both));
  }
  // Eight neighbours as bf16.
  __device__ uint4 wait_eight(const uint4* from) const {
    uint4 low, high;
    uint32_t other;
    do {
      low = load_relaxed(from);
      high = load_relaxed(from + 1);
      const uint32_t own = tag << 16;
      other = (low.x ^ own) | (low.y ^ own) | (low.z ^ own) | (low.w ^ own) | (high.x ^ own) | (high.y ^ own) |
              (high.z ^ own) | (high.w ^ own);
    } while (other >> 16 != 0);
    const auto both = [](uint32_t first, uint32_t second) { return (first & 0xFFFFu) | second << 16; };
    return {both(low.x, low.y), both(low.z, low.w), both(high.x, high.y), both(high.z, high.w)};
  }
};

// The tiles of a piece that this block has: [first, end).
struct Tiles {
  int first, end;

  __device__ explicit Tiles(const Piece& piece) {
    const int share = static_cast<int>(blockIdx.x) * piece.share;
    first = share + piece.begin;
    end = min(min(first + piece.count, share + piece.share), piece.linear.tiles);
  }
};

// The rows of a state and the tokens of a window that this block has.
struct StepShare {
  int sequence_head, block;
  bool there;
  int first, rows;        // of the piece
  int first_token, kept;  // tokens before the new one
  bool has_new;

  __device__ StepShare(const Piece& piece, int pending) {
    const StepCall& step = piece.step;
    sequence_head = static_cast<int>(blockIdx.x) / step.blocks;
    block = static_cast<int>(blockIdx.x) % step.blocks;
    there = sequence_head < step.heads;
    first = block * step.rows + piece.begin;
    rows = max(0, min(min(piece.count, step.rows - piece.begin), step.cache.state_rows - first));
    first_token = block * step.tokens;
    kept = max(0, min(step.tokens, pending - first_token));
    has_new = first_token <= pending && pending < first_token + step.tokens;
  }
};

// Where the parts of a step's piece lie.
struct StepArea {
  char *values, *normalizers, *k, *v;

  __device__ StepArea(const Piece& piece, char* area) : values(area) {
    const Cache& cache = piece.step.cache;
    normalizers = values + piece.count * padded(cache.v_dim) * 4;
    k = normalizers + piece.count * 4;
    v = k + piece.step.tokens * cache.qk_dim * 2;
  }
};

__device__ void fetch_linear(const Piece& piece, Barrier& fetched, char* area) {
  const LinearCall& call = piece.linear;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 8;  // a lane for a row
  const Tiles tiles(piece);
  const bool pairs = call.pairs(), second = pairs && group % 2 == 1;
  const int tile = tiles.first + (pairs ? group / 2 : group);
  bool there = tile < tiles.end;
  const LinearPart& part = call.part_of(there ? tile : 0);
  const int row = (tile - part.first_tile) * 8 + lane % 8;
  there = there && row < part.rows;
  const int bytes = call.k * 2;
  const int rows = __popc(__ballot_sync(0xFFFFFFFFu, there));
  if (lane == 0) fetched.arrive_and_expect(rows * bytes);
  __syncwarp();
  if (there)
    stream_bytes(area + lane * row_units(call.k) * 16,
                 (second ? part.second : part.weight) + static_cast<int64_t>(row) * call.k, bytes, fetched);
}

__device__ void fetch_step(const Piece& piece, Barrier& fetched, char* area, Window& window) {
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pending = piece.first ? __ldcg(step.counters + kPending) : 0;
  const StepShare own(piece, pending);
  const StepArea to(piece, area);
  const int ld = padded(cache.v_dim);
  if (own.there && own.rows > 0 && lane == 0) {
    const float* state = step.state + own.sequence_head * step.state_numbers;
    const int values = own.rows * ld * 4, normalizers = cache.sum ? padded(own.rows) * 4 : 0;
    fetched.expect(values + normalizers);
    stream_bytes(to.values, state + static_cast<int64_t>(own.first) * ld, values, fetched);
    if (normalizers > 0)
      stream_bytes(to.normalizers, state + static_cast<int64_t>(cache.state_rows) * ld + own.first, normalizers,
                   fetched);
  }
  if (!piece.first || !own.there) {
    if (lane == 0) fetched.arrive();
    return;
  }
  if (cache.decay)
    for (int j = lane; j < own.kept; j += 32) window.totals[j] = cache.total(own.sequence_head, own.first_token + j);
  if (lane == 0) {
    window.pending = pending;
    window.page = cache.pages[pending / kPageTokens];
    window.before = cache.decay && pending > 0 ? cache.total(own.sequence_head, pending - 1) : 0;
  }
  __syncwarp();
  const int k_bytes = cache.qk_dim * 2, v_bytes = cache.v_dim * 2;
  if (lane == 0) fetched.arrive_and_expect(own.kept * (k_bytes + v_bytes));
  __syncwarp();
  const int batch = own.sequence_head / cache.heads, head = own.sequence_head % cache.heads;
  for (int j = lane; j < own.kept; j += 32) {
    const int token = own.first_token + j;
    const Page page = cache.pages[token / kPageTokens];
    stream_bytes(to.k + j * k_bytes, cache.k_row<__nv_bfloat16>(page, batch, head, token), k_bytes, fetched);
    stream_bytes(to.v + j * v_bytes, cache.v_row<__nv_bfloat16>(page, batch, head, token), v_bytes, fetched);
  }
}

// One warp. The descriptions of two further pieces are on their way meanwhile.
__device__ void fetch(const Program& program, Memory& memory, char* ring) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto description = [&](int p) {
    return p < program.count ? __ldcg(program.pieces + p * (kDescriptionBytes / 16) + lane) : uint4{};
  };
  uint4 next = description(0), after = description(1);
  for (int p = 0; p < program.count; ++p) {
    const uint4 own = next;
    next = after;
    after = description(p + 2);
    const int slot = p % kSlots, last = __shfl_sync(0xFFFFFFFFu, static_cast<int>(own.x), 0) - 1;
    if (last >= 0) memory.used[last % kSlots].wait(last / kSlots);
    reinterpret_cast<uint4*>(memory.pieces[slot])[lane] = own;
    __syncwarp();
    const Piece& piece = *reinterpret_cast<const Piece*>(memory.pieces[slot]);
    if (piece.kind == Piece::Kind::linear)
      fetch_linear(piece, memory.fetched[slot], ring + piece.at);
    else if (piece.kind == Piece::Kind::step)
      fetch_step(piece, memory.fetched[slot], ring + piece.at, memory.windows[slot]);
    else if (lane == 0)
      memory.fetched[slot].arrive();
    __syncwarp();
  }
}

// When a warp has read all it needs of a piece.
__device__ void release(Barrier& used) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) used.arrive();
}

__device__ void embed(const EmbeddingCall& call, const Tagged& written) {
  const int all = call.batch * call.dim;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < all;
       i += static_cast<int>(gridDim.x) * kThreads) {
    const int64_t id = __ldcg(call.ids + i / call.dim);
    written.activation(call.out, i, call.table[id * call.dim + i % call.dim]);
  }
}

// Activations of a program, wherever a call speaks of bf16, are words.
__device__ const uint32_t* words(const __nv_bfloat16* x) {
  return reinterpret_cast<const uint32_t*>(x);
}

// The warps share out the sequences, so that all are on their way at once.
struct InputShare {
  int warps, sequence, first, threads;  // of a sequence; its own; the first of its numbers; those who share them

  __device__ explicit InputShare(int batch) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    warps = kWarps / batch;
    sequence = warp / warps;
    first = warp % warps * 32 + static_cast<int>(threadIdx.x) % 32;
    threads = warps * 32;
  }
};

// The input of a product, with the norm's weight multiplied in; its square sums go to `to`, one for each warp of a
// sequence.
__device__ void load_input(const LinearCall& call, const InputShare& own, float (&norm)[8], const Tagged& awaited,
                           uint4* activations, float (*to)[kMostSequences]) {
  if (own.sequence >= call.batch) return;
  const int units = call.k / 8;
  const uint4* const x = reinterpret_cast<const uint4*>(words(call.x) + own.sequence * call.x_stride);
  // The gate of a mixer's output was made with the mixer's input.
  const uint4* const gate = reinterpret_cast<const uint4*>(words(call.gate) + own.sequence * call.gate_stride);
  const Tagged made{(awaited.tag - 1) & 0xFFFFu};
  uint4* const row = activations + own.sequence * row_units(call.k);
  float squares = 0;
  for (int unit = own.first; unit < units; unit += own.threads) {
    if (call.norm != nullptr && unit != own.first) load_norm(norm, call.norm, unit);
    uint4 eight = awaited.wait_eight(x + 2 * unit);
    if (call.gate != nullptr) {
      const uint4 z = made.wait_eight(gate + 2 * unit);
      eight = normed(eight, &z, norm, squares);
    } else if (call.norm != nullptr) {
      eight = normed(eight, nullptr, norm, squares);
    }
    row[unit] = eight;
  }
  if (call.norm == nullptr) return;
  squares = warp_sum(squares);
  if (own.first % 32 == 0) to[own.first / 32][own.sequence] = squares;
}

using WarpSums = float[kMostSequences][8];

// The warps share out `groups` of eight rows, and those of a group the columns; `sums` are of a warp. As in
// token_linear_cuda.cu, a lane takes eight neighbours of a row. Rows and sequences that are not there come to something
// that nobody reads.
__device__ void multiply(int batch, int k, int groups, uint32_t activations, uint32_t weights, Barrier& used,
                         WarpSums& sums) {
  constexpr int kAtOnce = 4;  // loads on their way before the first product
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;
  const int units = k / 8, stride = row_units(k);
  const int sharers = kWarps / groups, group = warp / sharers;
  const uint32_t x_row = activations + min(g, batch - 1) * stride * 16;
  const uint32_t w_row = weights + (group * 8 + g) * stride * 16;
  float products[2][4] = {};
  if (group < groups)
    for (int unit = warp % sharers * 4 + t; unit - t < units; unit += kAtOnce * 4 * sharers) {
      uint4 x[kAtOnce], w[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int own = unit + i * 4 * sharers;
        const bool there = own < units;
        const int at = there ? own * 16 : 0;
        x[i] = load_shared(x_row + at);
        w[i] = load_shared(w_row + at);
        if (!there) x[i] = make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t low[4] = {x[i].x, 0, x[i].y, 0}, high[4] = {x[i].z, 0, x[i].w, 0};
        mma(products[0], low, w[i].x, w[i].y);
        mma(products[1], high, w[i].z, w[i].w);
      }
    }
  release(used);
  *reinterpret_cast<float2*>(&sums[g][2 * t]) =
      make_float2(products[0][0] + products[1][0], products[0][1] + products[1][1]);
}

__device__ void run_linear(const Piece& piece, Barrier& used, uint32_t area, uint4* activations, WarpSums* sums,
                           const Tagged& awaited, const Tagged& written, Memory& memory) {
  const LinearCall& call = piece.linear;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Tiles tiles(piece);
  if (tiles.first >= tiles.end) return release(used);
  // All that is known of the operation is looked up before its input is there.
  const int batch = call.batch, k = call.k;
  const float eps = call.eps;
  const bool normed = call.norm != nullptr, pairs = call.pairs();
  const int groups = (tiles.end - tiles.first) * (pairs ? 2 : 1), sharers = kWarps / groups;
  const uint32_t x = fixed_address(activations);
  const InputShare input(batch);
  const int square_sums = min(input.warps, (k / 8 + 31) / 32);
  float(*const squares)[kMostSequences] = memory.squares[piece.operation % 2];
  // A thread finishes one element: warps are sequences, lanes results.
  const int tile = tiles.first + lane / 8;
  const LinearPart part = call.part_of(min(tile, tiles.end - 1));
  const int row = (tile - part.first_tile) * 8 + lane % 8;
  const bool finishes = warp < batch && tile < tiles.end && row < part.rows;
  Before before;
  if (finishes) before = load_before(part, warp, row);
  if (piece.first) {
    float norm[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (normed && input.first < k / 8) load_norm(norm, call.norm, input.first);
    load_input(call, input, norm, awaited, activations, squares);
  }
  // Written by this block, or before what it has waited for by now.
  float old = 0;
  if (finishes && part.kind == TokenPart::Kind::add)
    old = value_of(load_relaxed(static_cast<const uint32_t*>(part.out) + static_cast<int64_t>(warp) * part.rows + row));
  meet();
  multiply(batch, k, groups, x, area, used, sums[warp]);
  meet();
  if (!finishes) return;
  // The rows of a pair's tile lie one behind the other: eight of the gate, eight of the other factor.
  const WarpSums* const own = sums + (pairs ? lane / 8 * 2 : lane / 8) * sharers;
  float sum = 0, other = 0, square = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < sharers) sum += own[w][warp][lane % 8];
    if (normed && w < square_sums) square += squares[w][warp];
  }
  if (pairs)
#pragma unroll
    for (int w = 0; w < kWarps / 2; ++w)
      if (w < sharers) other += own[sharers + w][warp][lane % 8];
  if (normed) {
    const float scale = rsqrtf(__fdividef(square, static_cast<float>(k)) + eps);
    sum *= scale;
    other *= scale;
  }
  finish(part, warp, row, sum, other, old, before, written);
}

// What a thread has come to over the pieces of a step.
struct Sums {
  float4 y;
  float n;
  float left;  // of the state, by the decay since it was folded
};

// The weights of this block's tokens, the new one among them, which is also kept: eight threads for a token.
__device__ void weigh_tokens(const Piece& piece, const StepShare& own, const uint4* k, const Window& window, double now,
                             Sums& sums, Memory& memory) {
  const Cache& cache = piece.step.cache;
  const int j = static_cast<int>(threadIdx.x) / 8, lane = static_cast<int>(threadIdx.x) % 8;
  const bool is_new = own.has_new && j == own.kept, there = j < own.kept || is_new;
  float score = 0;
  if (there)
    for (int c = lane * 8; c < cache.qk_dim; c += 64) {
      float x[8];
      if (!is_new) unpack(k[(j * cache.qk_dim + c) / 8], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) score = fmaf(is_new ? memory.k[c + i] : x[i], memory.q[c + i], score);
    }
  for (int offset = 4; offset > 0; offset /= 2) score += __shfl_xor_sync(0xFFFFFFFFu, score, offset);
  if (lane != 0 || !there) return;
  const float weight = cache.weight(score, cache.decay && !is_new ? now - window.totals[j] : 0);
  memory.weights[j] = weight;
  sums.n += weight;
}

// Heads that share a k or v leave it to the first of them.
__device__ void keep_token(const Cache& cache, const StepShare& own, const Window& window, double now,
                           const Memory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int batch = own.sequence_head / cache.heads, head = own.sequence_head % cache.heads;
  if (head % (cache.heads / cache.k_heads) == 0 && thread < cache.qk_dim)
    cache.k_row<__nv_bfloat16>(window.page, batch, head, window.pending)[thread] =
        __float2bfloat16_rn(memory.k[thread]);
  if (head % (cache.heads / cache.v_heads) == 0 && thread < cache.v_dim)
    cache.v_row<__nv_bfloat16>(window.page, batch, head, window.pending)[thread] =
        __float2bfloat16_rn(memory.v[thread]);
  if (cache.decay && thread == 0) {
    const int64_t at = cache.decay_at(own.sequence_head, window.pending);
    window.page.log_decay[at] = memory.log_decay;
    window.page.total[at] = now;
  }
}

__device__ void run_step(const Piece& piece, Barrier& used, char* area, const Window& window, float4* scratch,
                         const Tagged& awaited, const Tagged& written, Sums& sums, Memory& memory) {
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x);
  const StepShare own(piece, piece.first ? window.pending : 0);
  if (!own.there) return release(used);
  const StepArea from(piece, area);
  const Feature feature(cache.score, thread < own.rows ? own.first + thread : 0, cache.qk_dim);
  if (piece.first) {
    const int batch = own.sequence_head / cache.heads, head = own.sequence_head % cache.heads;
    // A thread waits for one number, or for few: q, k, v and the decay.
    const int k_from = cache.qk_dim, v_from = 2 * cache.qk_dim, decay_from = v_from + cache.v_dim;
    for (int i = thread; i < decay_from + (cache.decay ? 1 : 0); i += kThreads) {
      if (i < k_from)
        memory.q[i] = cache.scale * awaited.wait_activation(step.q.row(batch, head, cache.heads) + i);
      else if (i < v_from)
        memory.k[i - k_from] = awaited.wait_activation(step.k.row(batch, head, cache.heads) + i - k_from);
      else if (i < decay_from)
        memory.v[i - v_from] = awaited.wait_activation(step.v.row(batch, head, cache.heads) + i - v_from);
      else
        memory.log_decay = awaited.wait_number(reinterpret_cast<const uint64_t*>(step.log_decay) + own.sequence_head);
    }
    sums = {{0, 0, 0, 0}, 0, 1};
  }
  meet();
  const double now = piece.first && cache.decay ? window.before + static_cast<double>(memory.log_decay) : 0;
  if (piece.first) {
    if (cache.decay) sums.left = decay_factor(now);
    weigh_tokens(piece, own, reinterpret_cast<const uint4*>(from.k), window, now, sums, memory);
  }
  if (thread < own.rows) {
    const float phi = sums.left * feature.of(memory.q);
    memory.phi[thread] = phi;
    if (cache.sum) sums.n = fmaf(phi, reinterpret_cast<const float*>(from.normalizers)[thread], sums.n);
  }
  meet();
  const int vectors = cache.v_dim / 4, groups = kThreads / vectors;
  const int column = thread % vectors, group = thread / vectors;
  if (group < groups) {
    uint32_t at = fixed_address(from.values) + (group * vectors + column) * 16;
#pragma unroll 4
    for (int r = group; r < own.rows; r += groups) {
      const uint4 x = load_shared(at);
      add_row(sums.y, memory.phi[r],
              {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)});
      at += groups * vectors * 16;
    }
    if (piece.first) {
      const uint2* const v = reinterpret_cast<const uint2*>(from.v) + column;
      const int count = own.kept + (own.has_new ? 1 : 0);
      for (int j = group; j < count; j += groups) {
        float4 x = reinterpret_cast<const float4*>(memory.v)[column];
        if (j < own.kept) {
          const uint2 raw = v[j * vectors];
          x = {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u), __uint_as_float(raw.y << 16),
               __uint_as_float(raw.y & 0xFFFF0000u)};
        }
        add_row(sums.y, memory.weights[j], x);
      }
    }
  }
  release(used);
  const bool keeps = piece.first && own.has_new;  // while others wait for nothing of it
  if (!piece.last) {
    if (keeps) keep_token(cache, own, window, now, memory);
    return;
  }

  int parts = groups;
  if (32 % vectors == 0) {  // first within a warp, where that leaves whole rows
    for (int offset = vectors; offset < 32; offset *= 2) {
      sums.y.x += __shfl_xor_sync(0xFFFFFFFFu, sums.y.x, offset);
      sums.y.y += __shfl_xor_sync(0xFFFFFFFFu, sums.y.y, offset);
      sums.y.z += __shfl_xor_sync(0xFFFFFFFFu, sums.y.z, offset);
      sums.y.w += __shfl_xor_sync(0xFFFFFFFFu, sums.y.w, offset);
    }
    if (thread % 32 < vectors) scratch[thread / 32 * vectors + column] = sums.y;
    parts = kWarps;
  } else if (group < groups) {
    scratch[thread] = sums.y;
  }
  const float n = warp_sum(sums.n);
  if (thread % 32 == 0) memory.warps[thread / 32] = n;
  meet();
  const int ld = cache.v_dim + 1;
  uint64_t* const partials = step.partials + static_cast<int64_t>(own.sequence_head) * step.blocks * ld;
  if (thread < cache.v_dim) {
    float y = 0;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) y += reinterpret_cast<const float*>(scratch)[part * cache.v_dim + thread];
    written.number(partials, own.block * ld + thread, y);
  } else if (thread == kThreads - 1) {
    float all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += memory.warps[w];
    written.number(partials, own.block * ld + cache.v_dim, all);
  }
  // The blocks of a head share out its columns. A warp adds up one: half of it y, the others n.
  const int width = (cache.v_dim + step.blocks - 1) / step.blocks;
  const int end = min(cache.v_dim, (own.block + 1) * width), lane = thread % 32;
  for (int c = own.block * width + thread / 32; c < end; c += kWarps) {
    float sum = 0;
    for (int part = lane % 16; part < step.blocks; part += 16)
      sum += written.wait_number(partials + part * ld + (lane < 16 ? c : cache.v_dim));
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    const float all = __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
    if (lane == 0)
      written.activation(step.out, static_cast<int64_t>(own.sequence_head) * cache.v_dim + c,
                         cache.sum ? normalized(cache.score, sum, all) : sum);
  }
  if (!keeps) return;
  keep_token(cache, own, window, now, memory);
  meet();  // before a step writes there again
}

__global__ void __launch_bounds__(kThreads + 32, 1) token_kernel(const __grid_constant__ Program program) {
  extern __shared__ uint4 shared[];
  __shared__ Memory memory;
  const int thread = static_cast<int>(threadIdx.x);
  uint4* const activations = shared;
  char* const sums = reinterpret_cast<char*>(shared) + program.activations;
  char* const ring = sums + program.sums;
  if (thread < kSlots) {
    memory.fetched[thread].init(1);
    memory.used[thread].init(kWarps);
  }
  if (thread < kSlots) fence_barriers();
  __syncthreads();
  if (thread >= kThreads) return fetch(program, memory, ring);

  const uint32_t ring_address = fixed_address(ring);
  const unsigned first_tag = __ldcg(program.tags + blockIdx.x);
  meet();  // before it is written anew
  Sums step_sums{};
  for (int p = 0; p < program.count; ++p) {
    const int slot = p % kSlots;
    Barrier& used = memory.used[slot];
    memory.fetched[slot].wait(p / kSlots);
    const Piece& piece = *reinterpret_cast<const Piece*>(memory.pieces[slot]);
    const Tagged written{(first_tag + piece.operation) & 0xFFFFu}, awaited{(written.tag - 1) & 0xFFFFu};
    if (piece.kind == Piece::Kind::linear) {
      run_linear(piece, used, ring_address + piece.at, activations, reinterpret_cast<WarpSums*>(sums), awaited, written,
                 memory);
    } else if (piece.kind == Piece::Kind::step) {
      run_step(piece, used, ring + piece.at, memory.windows[slot], reinterpret_cast<float4*>(sums), awaited, written,
               step_sums, memory);
    } else {
      embed(piece.embedding, written);
      release(used);
    }
    // What this block has waited for by now comes after all steps, and so after all have read what counts the tokens.
    if (piece.first && piece.final && blockIdx.x == 0)
      for (int i = thread; i < program.caches; i += kThreads) {
        program.counters[i][kPending] += 1;
        program.counters[i][kTokens] += 1;
      }
  }
  if (thread == 0) program.tags[blockIdx.x] = first_tag + program.operations;
}

#endif

// Bytes of shared memory.
struct Room {
  int activations, sums, ring;

  Room(int64_t batch, int64_t widest) {
    constexpr int64_t kSpare = 512;  // where parts begin at round addresses
    activations = static_cast<int>(batch) * row_units(static_cast<int>(widest)) * 16;
    sums = kThreads * 16;
    static_assert(sizeof(WarpSums) * kWarps <= kThreads * 16);
    const int64_t left = most_shared_memory() - static_cast<int64_t>(sizeof(Memory)) - kSpare - activations - sums;
    ring = static_cast<int>(std::max<int64_t>(left, 0) / 128 * 128);
  }
  int largest() const { return ring / 2; }  // piece: while one is used another is fetched
};

int window_bytes(int tokens, int qk_dim, int v_dim) {
  return tokens * (qk_dim + v_dim) * 2;
}
int row_bytes(int v_dim) {  // of a state
  return padded(v_dim) * 4 + 4;
}

// What has been recorded, and where the activations of the program lie that the calls have elsewhere.
struct Recorder {
  struct Mail {
    const char* begin;  // of what it stands for
    int64_t numbers, bytes_each;
    Tensor words;
  };
  Device device;
  std::vector<Tensor>& held;
  std::vector<Piece> operations = {};
  std::vector<Mail> mails = {};

  // Memory is used again within the work: the latest is meant.
  template <class T>
  T* mail_of(T* x) const {
    for (auto mail = mails.rbegin(); mail != mails.rend(); ++mail) {
      const int64_t offset = reinterpret_cast<const char*>(x) - mail->begin;
      if (offset < 0 || offset >= mail->numbers * mail->bytes_each) continue;
      return reinterpret_cast<T*>(static_cast<char*>(mail->words.raw()) + 2 * offset);
    }
    fail("token_program: an operation reads what none has written");
  }
  // Twice the bytes, for the tags. What comes to lie in the same place again, of the same size, has the same.
  template <class T>
  T* mail_for(T* x, int64_t numbers, int64_t bytes_each) {
    for (const Mail& mail : mails)
      if (mail.begin == reinterpret_cast<const char*>(x) && mail.numbers == numbers && mail.bytes_each == bytes_each) {
        const Mail again = mail;
        mails.push_back(again);
        return static_cast<T*>(again.words.raw());
      }
    const Tensor words = Tensor::zeros({numbers * bytes_each / 2}, DType::i32, device);
    held.push_back(words);
    mails.push_back({reinterpret_cast<const char*>(x), numbers, bytes_each, words});
    return static_cast<T*>(words.raw());
  }
};

thread_local Recorder* recorder = nullptr;

// Cuts an operation into pieces. Returns the bytes that each needs.
std::vector<int> cut(const Piece& operation, const Room& room, int blocks, std::vector<Piece>& pieces) {
  std::vector<int> bytes;
  int share = 1, most = 1;
  if (operation.kind == Piece::Kind::linear) {
    const int groups = operation.linear.pairs() ? 2 : 1, tile = groups * 8 * row_units(operation.linear.k) * 16;
    share = divide_up(operation.linear.tiles, blocks);
    most = std::clamp(room.largest() / tile, 1, kMostGroups / groups);
    for (int begin = 0; begin < share; begin += most) bytes.push_back(std::min(most, share - begin) * tile);
  } else if (operation.kind == Piece::Kind::step) {
    const StepCall& step = operation.step;
    const int window = window_bytes(step.tokens, step.cache.qk_dim, step.cache.v_dim),
              row = row_bytes(step.cache.v_dim);
    share = step.rows;
    most = std::min((room.largest() - window) / row, kThreads) / 4 * 4;
    most = divide_up(divide_up(share, divide_up(share, most)), 4) * 4;
    for (int begin = 0; begin < share; begin += most) bytes.push_back(most * row + (begin == 0 ? window : 0));
  } else {
    bytes.push_back(0);
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    Piece piece = operation;
    piece.begin = static_cast<int>(i) * most;
    piece.count = operation.kind == Piece::Kind::step ? most : std::min(most, share - piece.begin);
    piece.share = share;
    piece.first = i == 0;
    piece.last = i + 1 == bytes.size();
    pieces.push_back(piece);
  }
  return bytes;
}

// Gives every piece its place in the ring, one behind the other, and the piece that must have been used before.
void place(std::vector<Piece>& pieces, const std::vector<int>& bytes, int ring) {
  int at = 0;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const int size = divide_up(bytes[p], 128) * 128;
    if (at + size > ring) at = 0;
    pieces[p].at = at;
    // A slot is written anew when all warps are done with its last piece: when they have used the one after it.
    int needs = static_cast<int>(p) - kSlots + 2;
    for (size_t q = 0; q < p; ++q)
      if (pieces[q].at < at + size && at < pieces[q].at + bytes[q]) needs = std::max(needs, static_cast<int>(q) + 1);
    pieces[p].needs = std::max(needs, 0);
    at += size;
  }
}

}  // namespace

bool recording_program() {
  return recorder != nullptr;
}

void record(const EmbeddingCall& call) {
  Piece piece{};
  piece.kind = Piece::Kind::embedding;
  piece.embedding = call;
  piece.embedding.out = recorder->mail_for(call.out, int64_t{call.batch} * call.dim, 2);
  recorder->operations.push_back(piece);
}

void record(const LinearCall& call) {
  Piece piece{};
  piece.kind = Piece::Kind::linear;
  piece.linear = call;
  piece.linear.x = recorder->mail_of(call.x);
  if (call.gate) piece.linear.gate = recorder->mail_of(call.gate);
  for (int p = 0; p < call.parts; ++p) {
    LinearPart& part = piece.linear.part[p];
    const int64_t numbers = int64_t{call.batch} * part.rows;
    if (part.kind == TokenPart::Kind::add)
      part.out = recorder->mail_of(static_cast<char*>(part.out));
    else if (part.kind == TokenPart::Kind::softplus && part.decay)
      part.decay = recorder->mail_for(part.decay, numbers, 4);
    else if (part.kind == TokenPart::Kind::softplus)
      part.out = recorder->mail_for(static_cast<char*>(part.out), numbers, 4);
    else if (!part.f32_out)
      part.out = recorder->mail_for(static_cast<char*>(part.out), numbers, 2);
  }
  recorder->operations.push_back(piece);
}

void record(const MixerStep& from, const Tensor& out) {
  StepCall call{from.cache,         {},         {}, {}, nullptr, from.counters, from.state,
                from.state_numbers, from.heads, 0,  0,  0,       nullptr,       nullptr};
  const auto words = [](const Token<__nv_bfloat16>& x) {
    return Token<uint32_t>{reinterpret_cast<const uint32_t*>(recorder->mail_of(x.data)), x.batch_stride, x.head_stride,
                           x.own_heads};
  };
  call.q = words(from.q);
  call.k = words(from.k);
  call.v = words(from.v);
  if (from.log_decay) call.log_decay = recorder->mail_of(from.log_decay);
  call.blocks = std::max(1, multiprocessors() / call.heads);
  call.rows = divide_up(divide_up(call.cache.state_rows, call.blocks), 4) * 4;
  call.tokens = divide_up(kStepTokens, call.blocks);
  const Tensor partials = Tensor::zeros({2 * int64_t{call.heads} * call.blocks * (call.cache.v_dim + 1)}, DType::i32,
                                        out.device());  // no word has a tag
  recorder->held.push_back(partials);
  call.partials = static_cast<uint64_t*>(partials.raw());
  call.out = reinterpret_cast<uint32_t*>(
      recorder->mail_for(static_cast<__nv_bfloat16*>(out.raw()), int64_t{call.heads} * call.cache.v_dim, 2));
  Piece piece{};
  piece.kind = Piece::Kind::step;
  piece.step = call;
  recorder->operations.push_back(piece);
}

}  // namespace cuda

struct TokenProgram::Parts {
  Device device;
  Arena arena{device};
  std::vector<Tensor> held = {};
  cuda::Program program = {};
  int bytes = 0;
};

bool TokenProgram::fits(Device device, const Sizes& sizes) {
  using namespace cuda;
  (void)stream(device);  // makes it current
  static const bool has_body = [] {
    cudaFuncAttributes kernel{};
    return cudaFuncGetAttributes(&kernel, token_kernel) == cudaSuccess && kernel.ptxVersion >= 90;
  }();
  if (!has_body || sizes.batch > kMostSequences || sizes.head_dim % 8 != 0 || sizes.widest % 8 != 0 ||
      sizes.widest_pair % 8 != 0 || sizes.batch * sizes.heads > multiprocessors())
    return false;
  const Room room(sizes.batch, sizes.widest);
  const auto dim = static_cast<int>(sizes.head_dim);
  const auto rows_fit = [&](int64_t rows, int64_t k) { return rows * (k / 8 + 4) * 16 <= room.largest(); };
  return rows_fit(8, sizes.widest) && rows_fit(16, sizes.widest_pair) &&
         window_bytes(kMostTokens, dim, dim) + kFewestRows * row_bytes(dim) <= room.largest();
}

TokenProgram::TokenProgram(Device device, const std::function<void()>& work) : parts_(new Parts{device}) {
  using namespace cuda;
  (void)stream(device);
  Recorder recording{device, parts_->held};
  {
    const Arena::Scope scope(parts_->arena);
    recorder = &recording;
    try {
      work();
    } catch (...) {
      recorder = nullptr;
      throw;
    }
    recorder = nullptr;
  }
  std::vector<Piece>& operations = recording.operations;

  int64_t batch = 1, widest = 8;
  std::vector<int*> counters;
  for (const Piece& operation : operations) {
    if (operation.kind == Piece::Kind::step) counters.push_back(operation.step.counters);
    if (operation.kind != Piece::Kind::linear) continue;
    batch = std::max<int64_t>(batch, operation.linear.batch);
    widest = std::max<int64_t>(widest, operation.linear.k);
  }
  const Room room(batch, widest);
  std::vector<Piece> pieces;
  std::vector<int> bytes;
  for (Piece& operation : operations) {
    operation.final = &operation == &operations.back();
    operation.operation = static_cast<int>(&operation - operations.data());
    for (int of_piece : cut(operation, room, multiprocessors(), pieces)) bytes.push_back(of_piece);
  }
  place(pieces, bytes, room.ring);

  const auto on_device = [&](const void* from, size_t size) {
    const Tensor there = Tensor::empty({static_cast<int64_t>(size / 4)}, DType::i32, device);
    memory::copy(device, there.raw(), {}, from, size);
    parts_->held.push_back(there);
    return there.raw();
  };
  std::vector<char> descriptions(pieces.size() * kDescriptionBytes);
  for (size_t p = 0; p < pieces.size(); ++p)
    std::memcpy(descriptions.data() + p * kDescriptionBytes, static_cast<const void*>(&pieces[p]), sizeof(Piece));
  Program& program = parts_->program;
  program.pieces = static_cast<const uint4*>(on_device(descriptions.data(), descriptions.size()));
  program.count = static_cast<int>(pieces.size());
  const std::vector<unsigned> tags(static_cast<size_t>(multiprocessors()), 1);  // no word has this one
  program.tags = static_cast<unsigned*>(on_device(tags.data(), tags.size() * sizeof(unsigned)));
  program.operations = static_cast<int>(operations.size());
  program.counters = static_cast<int* const*>(on_device(counters.data(), counters.size() * sizeof(int*)));
  program.caches = static_cast<int>(counters.size());
  program.activations = room.activations;
  program.sums = room.sums;
  parts_->bytes = room.activations + room.sums + room.ring;
  check(cudaFuncSetAttribute(token_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, parts_->bytes),
        "token_program");
}

TokenProgram::~TokenProgram() {
  // The memory goes back to the device, which may not have done its last run.
  if (parts_) synchronize(parts_->device);
}

void TokenProgram::run() const {
  using namespace cuda;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks are there at once, or none
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream(parts_->device);
  config.gridDim = static_cast<unsigned>(multiprocessors());
  config.blockDim = kThreads + 32;
  config.dynamicSmemBytes = static_cast<size_t>(parts_->bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, token_kernel, parts_->program), "token_program");
}

}  // namespace furious
