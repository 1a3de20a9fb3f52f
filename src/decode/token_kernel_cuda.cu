#include <map>
#include <mutex>

#include "decode/token_kernel.cuh"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"

// Every multiprocessor has one block, and all blocks walk the same list of operations, each with its own share of the
// rows of a weight or a state. What waits for nobody are the weights, the states and the windows: two warps of their
// own fetch them, piece by piece, into a ring of shared memory, as far ahead as there is room. So memory is busy while
// the blocks wait for each other's activations.
//
// An activation travels as a word that holds its 16 bits and a tag, the number of the operation that wrote it counted
// over all tokens: who reads it reads until the tag is the one he waits for. That takes one way through the L2 cache,
// where a meeting of all blocks takes three. Numbers of f32 travel the same way in two words. All blocks read the same
// words at the same time, from one place in the cache: so there are some copies of them, and some blocks for each.
// Nobody can be overtaken: who writes an activation anew does so after all warps of his block have read all that the
// operation before wrote, and each block of that had read its own input before it wrote. Only a step reads less than
// all, its own head; but the operation after it reads all heads.
//
// From operation to operation there is one long chain, and what counts is how short it is. So the warps that multiply
// share out the columns of a product, and each waits for its own columns of the input alone, with its weights already
// in registers. What they come to goes to two more warps, which have looked up all else that the end of the product
// needs.
//
// A piece is some tiles of eight rows of a product, or some rows of a state (with the first of them the window's
// tokens), and says everything that is to be done with it. Where it lies in the ring, and which piece must have been
// used up before, is known when the program is made.
//
// Sums are always taken in the same order.

namespace furious::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // that multiply; two more warps fetch
constexpr int kFinishers = 2;                      // warps that finish what the others have multiplied
constexpr int kAllThreads = kThreads + 32 * (kFinishers + 2);

// The columns of a warp of a sequence's activations lie apart, of which it takes four units at a time, so that
// sequences fall into different banks.
[[maybe_unused]] __host__ __device__ int warp_units(int k) {
  return (k + 32 * kWarps - 1) / (32 * kWarps) * 4;
}

// What a block does of a step's piece, and what it needs that no operation since the last token has written. A
// fetching warp works it out.
struct StepShare {
  bool there, has_new;             // whether the block has a share, and the new token is in it
  int first, rows;                 // of the state
  int kept;                        // tokens before the new one
  int block, column, columns_end;  // of the head: which it is, and the columns of the result that it adds up
  const uint32_t *q, *k, *v;       // of the head
  const uint64_t* log_decay;
  uint64_t* partials;
  uint32_t* out;
  uint4 *k_to, *v_to;  // where the new token is kept; heads that share a k or v leave it to the first of them
  float* log_decay_to;
  double* total_to;
  double before, totals[kMostTokens];  // decays up to the tokens kept last, and of those that the block has
};

// The new token of a step.
struct NewToken {
  uint4 k[kLargestHead / 8], v[kLargestHead / 8];  // of bf16
  float q[kLargestHead], log_decay;
  float left;  // of the state, by the decay since it was folded
  double now;
};

// What the warps come to for a piece, each over its columns.
struct WarpSums {
  alignas(16) float rows[8 * kMostGroups][kWarps + 4];  // four more, so that eight rows fall into different banks
  alignas(16) float squares[kWarps];
};

struct Memory {
  alignas(16) char pieces[kSlots][kDescriptionBytes];
  StepShare shares[kSlots];
  // Every thread arrives for itself, once it has read or written all that it has to.
  Barrier described[kSlots], fetched[kSlots], used[kSlots];  // pieces
  Barrier multiplied[2], finished[2];                        // products, by turns
  NewToken tokens[2];  // by turns, since the step before may still be reading its own
  float phi[kMostRows];
  float weights[kMostTokens];
  float normalizer;
  alignas(16) float values[kWarps][kLargestHead];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__global__ void token_kernel(const TokenWork) {}  // without bulk copies: never launched
#else

__device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x % 32);
}
__device__ int warp_of_thread() {
  return static_cast<int>(threadIdx.x / 32);
}

// The same pointer to shared memory, which the compiler then keeps in a register: it would work it out anew for every
// access.
template <class T>
__device__ T* kept(T* shared) {
  uint32_t address;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(address) : "r"(shared_address(shared)));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

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

// The 16 bits of an activation, and its value.
__device__ uint32_t bits_of(float x) {
  return pack(x, 0.0f);
}
__device__ float value_of(uint32_t word) {
  return __uint_as_float(word << 16);
}

// Of what travels, the copy that this block reads.
template <class T>
__device__ const T* own_copy(const T* from) {
  return from + blockIdx.x % kCopies * (kCopyBytes / static_cast<int64_t>(sizeof(T)));
}
template <class T>
__device__ void store_copies(T* to, T x) {
#pragma unroll
  for (int i = 0; i < kCopies; ++i) store_relaxed(to + i * (kCopyBytes / static_cast<int64_t>(sizeof(T))), x);
}

// How numbers travel from block to block: an activation under its tag in a word, a number of f32 in two.
struct Tagged {
  uint32_t tag;  // of 16 bits

  __device__ explicit Tagged(uint32_t number) : tag(number & 0xFFFFu) {}

  __device__ void activation(void* out, int64_t at, float x) const {
    store_copies(static_cast<uint32_t*>(out) + at, tag << 16 | bits_of(x));
  }
  __device__ void number(void* out, int64_t at, float x) const {
    store_copies(static_cast<uint64_t*>(out) + at, uint64_t{tag} << 32 | __float_as_uint(x));
  }
  // A number of which there is one copy.
  __device__ void partial(uint64_t* to, float x) const { store_relaxed(to, uint64_t{tag} << 32 | __float_as_uint(x)); }
  __device__ uint32_t wait_word(const uint32_t* from) const {
    uint32_t word;
    from = own_copy(from);
    do word = load_relaxed(from);
    while (word >> 16 != tag);
    return word;
  }
  __device__ float wait_activation(const uint32_t* from) const { return value_of(wait_word(from)); }
  __device__ float wait_number(const uint64_t* from) const { return wait_partial(own_copy(from)); }
  __device__ float wait_partial(const uint64_t* from) const {
    uint64_t both;
    do both = load_relaxed(from);
    while (both >> 32 != tag);
    return __uint_as_float(static_cast<uint32_t>(both));
  }
  // Eight neighbours as bf16.
  __device__ uint4 wait_eight(const uint4* from) const {
    uint4 low, high;
    uint32_t other;
    from = own_copy(from);
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

// a / b of numbers that are not negative and small, in few instructions.
__device__ int quotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// The tiles of a piece that this block has: [first, end).
struct Tiles {
  int first, end;

  __device__ explicit Tiles(const TokenPiece& piece) {
    const int share = static_cast<int>(blockIdx.x) * piece.share;
    first = share + piece.begin;
    end = min(min(first + piece.count, share + piece.share), piece.linear.tiles);
  }
};

// Where the parts of a step's piece lie.
struct StepArea {
  char *values, *normalizers, *k, *v;

  __device__ StepArea(const TokenPiece& piece, char* area) : values(area) {
    const Cache& cache = piece.step.cache;
    normalizers = values + piece.count * padded(cache.v_dim) * 4;
    k = normalizers + piece.count * 4;
    v = k + piece.step.tokens * cache.qk_dim * 2;
  }
};

// The copies of a block go no faster than memory can serve all blocks: more of them at once would only make the words
// that travel between the blocks wait.
struct Pace {
  static constexpr int kCycles = 62;  // for 1 KiB of a block: about four fifths of what an H200's memory can do
  int cycles;                         // for 1 KiB
  unsigned next;                      // when a copy may go

  __device__ void copy(char* to, const void* from, int bytes, Barrier& fetched) {
    unsigned now;
    do now = static_cast<unsigned>(clock());
    while (static_cast<int>(now - next) < 0);
    stream_bytes(to, from, bytes, fetched);
    next = now + static_cast<unsigned>(bytes * cycles >> 10);
  }
};

// By one thread of each of two warps, which share out the groups of eight rows. Up to whole fours of units, rows end
// with zeros.
__device__ void fetch_linear(const TokenPiece& piece, Barrier& fetched, char* area, int first_group, Pace& pace) {
  const LinearCall& call = piece.linear;
  const Tiles tiles(piece);
  const int k = call.k, bytes = k * 2, halves = call.pairs() ? 2 : 1, step = row_units(k) * 16;
#pragma unroll 1
  for (int i = first_group; i < (tiles.end - tiles.first) * halves; i += 2) {
    const int tile = tiles.first + i / halves;
    const LinearPart& part = call.part_of(tile);
    const int first = (tile - part.first_tile) * 8, rows = min(8, part.rows - first);
    const __nv_bfloat16* from = (i % halves == 1 ? part.second : part.weight) + static_cast<int64_t>(first) * k;
    fetched.expect(rows * bytes);
    char* to = area + 8 * i * step;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      pace.copy(to, from, bytes, fetched);
      for (int pad = bytes; pad < step - 16; pad += 16) *reinterpret_cast<uint4*>(to + pad) = make_uint4(0, 0, 0, 0);
      to += step;
      from += k;
    }
  }
  if (bytes < step - 16) fence_shared_writes();  // before a copy writes there again
}

// The share of this block in a step.
struct OwnHead {
  int sequence_head, block;
  bool there;
  int first, rows;  // of the state

  __device__ explicit OwnHead(const TokenPiece& piece) {
    const StepCall& step = piece.step;
    sequence_head = quotient(static_cast<int>(blockIdx.x), step.blocks);
    block = static_cast<int>(blockIdx.x) - sequence_head * step.blocks;
    there = sequence_head < step.heads;
    first = block * step.rows + piece.begin;
    rows = max(0, min(min(piece.count, step.rows - piece.begin), step.cache.state_rows - first));
  }
};

// By one thread.
__device__ void fetch_state(const TokenPiece& piece, Barrier& fetched, char* area, Pace& pace) {
  constexpr int kAtOnce = 4096;
  const StepCall& step = piece.step;
  const OwnHead own(piece);
  if (!own.there) return;
  const StepArea to(piece, area);
  const int ld = padded(step.cache.v_dim);
  const int row = quotient(own.sequence_head, step.cache.heads), head = own.sequence_head - row * step.cache.heads;
  const SlotRecord slot = load_slot(step.cache.slots + __ldcg(step.slot_of_row + row));
  const float* state = slot.state + static_cast<int64_t>(head) * step.cache.state_numbers;
  const int values = own.rows * ld * 4, normalizers = step.cache.sum ? padded(own.rows) * 4 : 0;
  fetched.expect(values + normalizers);
  const char* from = reinterpret_cast<const char*>(state + static_cast<int64_t>(own.first) * ld);
#pragma unroll 1
  for (int at = 0; at < values; at += kAtOnce) pace.copy(to.values + at, from + at, min(kAtOnce, values - at), fetched);
  if (normalizers > 0)
    stream_bytes(to.normalizers, state + static_cast<int64_t>(step.cache.state_rows) * ld + own.first, normalizers,
                 fetched);
}

// By a warp.
__device__ void fetch_window(const TokenPiece& piece, Barrier& fetched, char* area, StepShare& share) {
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int lane = lane_of_thread();
  const OwnHead own(piece);
  if (lane == 0) share.there = own.there;
  if (!own.there) {
    fetched.arrive();
    return;
  }
  const int batch = quotient(own.sequence_head, cache.heads), head = own.sequence_head - batch * cache.heads;
  const int k_head = quotient(head, step.k_sharers), v_head = quotient(head, step.v_sharers);
  // The rows of a token.
  const auto k_at = [&](Page page, int token) {
    const int row = k_head * kPageTokens + token % kPageTokens;
    return reinterpret_cast<__nv_bfloat16*>(page.memory) + static_cast<int64_t>(row) * cache.qk_dim;
  };
  const auto v_at = [&](Page page, int token) {
    const int row = v_head * kPageTokens + token % kPageTokens;
    return reinterpret_cast<__nv_bfloat16*>(page.memory + cache.v_begin) + static_cast<int64_t>(row) * cache.v_dim;
  };
  const SlotRecord slot = load_slot(cache.slots + __ldcg(step.slot_of_row + batch));
  const int pending = slot.pending;
  const int first_token = own.block * step.tokens, kept = max(0, min(step.tokens, pending - first_token));
  const StepArea to(piece, area);
  if (lane == 0) {
    share.first = own.first;
    share.rows = own.rows;
    share.kept = kept;
    share.has_new = first_token <= pending && pending < first_token + step.tokens;
    share.block = own.block;
    share.column = own.block * step.columns;
    share.columns_end = min(cache.v_dim, (own.block + 1) * step.columns);
    share.q = step.q.data + batch * step.q.row_stride + quotient(head, step.q_sharers) * step.q.head_stride;
    share.k = step.k.data + batch * step.k.row_stride + k_head * step.k.head_stride;
    share.v = step.v.data + batch * step.v.row_stride + v_head * step.v.head_stride;
    share.log_decay = reinterpret_cast<const uint64_t*>(step.log_decay) + own.sequence_head;
    share.partials = step.partials + own.sequence_head * step.partial_numbers;
    share.out = step.out + static_cast<int64_t>(own.sequence_head) * cache.v_dim;
    const Page page = slot.pages[pending / kPageTokens];
    share.k_to = head == k_head * step.k_sharers ? reinterpret_cast<uint4*>(k_at(page, pending)) : nullptr;
    share.v_to = head == v_head * step.v_sharers ? reinterpret_cast<uint4*>(v_at(page, pending)) : nullptr;
    share.log_decay_to = cache.log_decay(page, head, pending);
    share.total_to = cache.total(page, head, pending);
    share.before = cache.decay && pending > 0 ? cache.total_until(slot.pages, head, pending - 1) : 0;
  }
  const int tokens = piece.first ? kept : 0;
  if (cache.decay)
#pragma unroll 1
    for (int j = lane; j < tokens; j += 32) share.totals[j] = cache.total_until(slot.pages, head, first_token + j);
  __syncwarp();
  const int k_bytes = cache.qk_dim * 2, v_bytes = cache.v_dim * 2;
  if (lane == 0) fetched.expect(tokens * (k_bytes + v_bytes));
  __syncwarp();
#pragma unroll 1
  for (int j = lane; j < tokens; j += 32) {
    const int token = first_token + j;
    const Page page = slot.pages[token / kPageTokens];
    stream_bytes(to.k + j * k_bytes, k_at(page, token), k_bytes, fetched);
    stream_bytes(to.v + j * v_bytes, v_at(page, token), v_bytes, fetched);
  }
  fetched.arrive();
}

// One warp fetches descriptions, weights and states. The descriptions of two further pieces are on their way meanwhile.
__device__ void fetch(const TokenWork& program, Memory& memory, char* ring) {
  const int lane = lane_of_thread();
  const auto description = [&](int p) {
    return p < program.count ? __ldcg(program.pieces + p * (kDescriptionBytes / 16) + lane) : uint4{};
  };
  uint4 next = description(0), after = description(1);
  Pace pace{2 * Pace::kCycles, static_cast<unsigned>(clock())}, state_pace{Pace::kCycles, pace.next};
  bool waited = false;  // for the kernels before, which may have written states and windows, but no weights
#pragma unroll 1
  for (int p = 0; p < program.count; ++p) {
    const uint4 own = next;
    next = after;
    after = description(p + 2);
    const int slot = p % kSlots, last = __shfl_sync(0xFFFFFFFFu, static_cast<int>(own.x), 0) - 1;
    if (last >= 0) memory.used[last % kSlots].wait(last / kSlots);
    reinterpret_cast<uint4*>(memory.pieces[slot])[lane] = own;
    __syncwarp();
    const TokenPiece& piece = *reinterpret_cast<const TokenPiece*>(memory.pieces[slot]);
    Barrier& fetched = memory.fetched[slot];
    if (!waited && piece.kind == TokenPiece::Kind::step) {
      wait_for_previous();
      waited = true;
    }
    if (blockIdx.x == 0 && piece.kind == TokenPiece::Kind::linear && piece.linear.norm != nullptr)
      for (int i = 32 * lane; i < piece.linear.k; i += 1024) prefetch(piece.linear.norm + i);
    memory.described[slot].arrive();
    if (lane == 0) {
      if (piece.kind == TokenPiece::Kind::linear)
        fetch_linear(piece, fetched, ring + piece.at, 0, pace);
      else if (piece.kind == TokenPiece::Kind::step)
        fetch_state(piece, fetched, ring + piece.at, state_pace);
    }
    fetched.arrive();
    __syncwarp();
  }
}

// Another fetches what a step needs besides, and half of the weights.
__device__ void fetch_windows(const TokenWork& program, Memory& memory, char* ring) {
  Pace pace{2 * Pace::kCycles, static_cast<unsigned>(clock())};
  bool waited = false;
#pragma unroll 1
  for (int p = 0; p < program.count; ++p) {
    const int slot = p % kSlots;
    memory.described[slot].wait(p / kSlots);
    const TokenPiece& piece = *reinterpret_cast<const TokenPiece*>(memory.pieces[slot]);
    if (!waited && piece.kind == TokenPiece::Kind::step) {
      wait_for_previous();
      waited = true;
    }
    if (piece.kind == TokenPiece::Kind::step) {
      fetch_window(piece, memory.fetched[slot], ring + piece.at, memory.shares[slot]);
    } else {
      if (lane_of_thread() == 0 && piece.kind == TokenPiece::Kind::linear)
        fetch_linear(piece, memory.fetched[slot], ring + piece.at, 1, pace);
      memory.fetched[slot].arrive();
    }
    __syncwarp();
  }
}

__device__ void embed(const TokenWork& program, const EmbeddingCall& call, const Tagged& written) {
  const int all = call.batch * call.dim;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < all;
       i += static_cast<int>(gridDim.x) * kThreads) {
    const int64_t id = __ldcg(program.ids + i / call.dim * program.id_stride);
    written.activation(call.out, i, call.table[id * call.dim + i % call.dim]);
  }
}

// Activations of a program, wherever a call speaks of bf16, are words.
__device__ const uint32_t* words(const __nv_bfloat16* x) {
  return reinterpret_cast<const uint32_t*>(x);
}

// What a thread remembers from piece to piece.
struct Turns {
  unsigned products, steps;  // that the block has had a share in: their memory changes with each
  float squares;             // of the input of a product, over the columns of the warp
  int first_row;             // of the state's rows that its features are of: the same for every step of one piece
  Feature features[kMostRows / kThreads];
};

__device__ __noinline__ Feature feature_of_row(const FeatureMap& features, int row) {
  return feature_of(features, row);
}

__device__ void make_features(Turns& turns, const Cache& cache, int first_row) {
  turns.first_row = first_row;
#pragma unroll
  for (int i = 0; i < kMostRows / kThreads; ++i) {
    const int row = first_row + static_cast<int>(threadIdx.x) + i * kThreads;
    turns.features[i] = feature_of_row(cache.features, row < cache.state_rows ? row : 0);
  }
}

// The columns of a product that a warp has: units [first, end).
struct Columns {
  int first, end;

  __device__ explicit Columns(int k) {
    const int each = warp_units(k);
    first = warp_of_thread() * each;
    end = min(k / 8, first + each);
  }
};

// The lanes of a sequence are a power of two.
__device__ int lane_bits(int batch) {
  return batch == 1 ? 5 : batch == 2 ? 4 : batch <= 4 ? 3 : 2;
}

// Waits for a warp's columns of the input and writes them to its shared memory, with the norm's weight multiplied in;
// zeros up to whole fours. Returns their square sum, in all lanes of a sequence.
__device__ float load_input(const LinearCall& call, const Columns& own, unsigned operation, uint4* activations,
                            int stride) {
  // The gate of a mixer's output was made with the mixer's input.
  const Tagged awaited(operation - 1), made(operation - 2);
  const int bits = lane_bits(call.batch), lanes = 1 << bits, sequence = lane_of_thread() >> bits;
  const bool has_norm = call.norm != nullptr, has_gate = call.gate != nullptr;
  float squares = 0;
  if (sequence < call.batch) {
    int unit = own.first + (lane_of_thread() & (lanes - 1));
    const uint4* x = reinterpret_cast<const uint4*>(words(call.x) + sequence * call.x_stride) + 2 * unit;
    uint4* to = activations + sequence * stride + unit - own.first;
#pragma unroll 1
    for (; unit < (own.end + 3 & ~3); unit += lanes) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (unit < own.end) {
        float norm[8] = {1, 1, 1, 1, 1, 1, 1, 1}, factors[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        if (has_norm) load_norm(norm, call.norm, unit);
        if (has_gate)
          gate_factors(factors,
                       made.wait_eight(reinterpret_cast<const uint4*>(words(call.gate) + sequence * call.gate_stride) +
                                       2 * unit));
        eight = awaited.wait_eight(x);
        if (has_norm || has_gate) eight = normed(eight, factors, norm, squares);
      }
      *to = eight;
      to += lanes;
      x += 2 * lanes;
    }
  }
  __syncwarp();
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, squares, offset);
    squares += offset < lanes ? other : 0.0f;
  }
  return squares;
}

__device__ float sum_of(const float* warps) {
  const float4* const four = reinterpret_cast<const float4*>(warps);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) sum += (four[i].x + four[i].y) + (four[i].z + four[i].w);
  return sum;
}

// The warps share out the columns, and each takes its own of the input as they come. Weights are the tensor cores'
// first factor, 16 rows of them, and the sequences' activations the second. Rows and sequences that are not there come
// to something that nobody reads.
__device__ void multiply(const TokenPiece& piece, Barrier& used, const uint4* weights, uint4* activations,
                         WarpSums* sums, unsigned first_tag, Turns& turns, Memory& memory) {
  const LinearCall& call = piece.linear;
  const Tiles tiles(piece);
  if (tiles.first >= tiles.end) return used.arrive();
  const int lane = lane_of_thread(), batch = call.batch, stride = row_units(call.k);
  const int groups = (tiles.end - tiles.first) * (call.pairs() ? 2 : 1);
  const bool wide = groups > 2;  // more than 16 rows
  const Columns own(call.k);
  const int x_stride = warp_units(call.k) + 1;
  // A lane has the address of a unit of a row: of rows 0 to 7, 8 to 15 and then the same of the next unit, or of a
  // sequence. Tiles are 16 rows and four units: by turns of two blocks of rows, or of the same rows further on.
  const int row = lane % 8, lower = lane / 8 % 2;
  const uint4* w_even =
      weights + (row + (groups > 1 ? lower * 8 : 0)) * stride + (own.first < own.end ? own.first : 0) + lane / 16;
  const uint4* w_odd = wide ? w_even + (16 - (groups > 3 ? 0 : lower * 8)) * stride : w_even + 4;
  const uint4* x_even = activations + min(row, batch - 1) * x_stride + lane / 8;
  const int further = wide ? 4 : 8, x_odd = wide ? 0 : 4;
  // Where this warp's sums go, and whose they are.
  const unsigned turn = turns.products++;
  sums += turn % 2 * batch;
  const int of = lane % 4 * 2, squares_of = lane >> lane_bits(batch);
  float* const to = kept(&sums[of].rows[lane / 4][warp_of_thread()]);
  if (turn >= 2) memory.finished[turn % 2].wait(static_cast<int>(turn / 2) - 1);

  constexpr int kTiles = 64 / kWarps;  // that are read before the input is there
  float products[4][4] = {};
  bool fresh = piece.first, more;
  int unit = own.first;
  do {
    const int left = own.end - unit;
    uint32_t w[kTiles][2][4];
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      load_matrices(w[i][0], w_even);
      load_matrices(w[i][1], w_even + 2);
      load_matrices(w[i + 1][0], w_odd);
      load_matrices(w[i + 1][1], w_odd + 2);
      // A few units behind the last may be read (TokenRoom::kBehind), but not many: then the first are read again.
      const int step = i % 4 == 0 || (i + 2) / 2 * further < left ? further : -further;
      w_even += step;
      w_odd += step;
    }
    const int next = unit + kTiles / 2 * further;
    more = next < own.end;
    if (!more) used.arrive();
    if (fresh) turns.squares = load_input(call, own, first_tag + piece.operation, activations, x_stride);
    fresh = false;
#pragma unroll
    for (int first = 0; first < kTiles; first += 4) {
      if (first / 2 * further >= left) break;
      uint32_t x[4][4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        load_matrices(x[i], x_even);
        load_matrices(x[i + 1], x_even + x_odd);
        x_even += further;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((first + i) / 2 * further + i % 2 * x_odd >= left) break;
        mma(products[i], w[first + i][0], x[i][0], x[i][1]);
        mma(products[i], w[first + i][1], x[i][2], x[i][3]);
      }
    }
    unit = next;
  } while (more);
  constexpr int kEight = 8 * (kWarps + 4), kSequence = sizeof(WarpSums) / sizeof(float);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    products[0][i] += products[2][i];
    products[1][i] += products[3][i];
    if (!wide) products[0][i] += products[1][i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (of + i < batch) {
      to[i * kSequence] = products[0][i];
      to[i * kSequence + kEight] = products[0][2 + i];
      if (wide) {
        to[i * kSequence + 2 * kEight] = products[1][i];
        to[i * kSequence + 3 * kEight] = products[1][2 + i];
      }
    }
  if (squares_of < batch) sums[squares_of].squares[warp_of_thread()] = turns.squares;
  memory.multiplied[turn % 2].arrive();
}

// A warp finishes the results of a sequence, or of some: a lane for each.
__device__ void finish_product(const TokenPiece& piece, Barrier& used, const WarpSums* sums, unsigned first_tag,
                               unsigned& turns, Memory& memory) {
  const LinearCall& call = piece.linear;
  const int lane = lane_of_thread(), warp = warp_of_thread() - kWarps;
  const Tiles tiles(piece);
  used.arrive();
  if (tiles.first >= tiles.end) return;
  const unsigned turn = turns++;
  const bool pairs = call.pairs();
  const int tile = tiles.first + lane / 8;
  // All that is known of the operation is looked up before its sums are there.
  const LinearPart part = call.part_of(min(tile, tiles.end - 1));
  const bool normed = call.norm != nullptr;
  const float width = static_cast<float>(call.k), eps = call.eps;
  const Tagged written(first_tag + piece.operation);
  const int row = (tile - part.first_tile) * 8 + lane % 8;
  const bool there = tile < tiles.end && row < part.rows;
  // The rows of a pair's tile lie one behind the other: eight of the gate, eight of the other factor.
  const int result = pairs ? lane / 8 * 16 + lane % 8 : lane;
#pragma unroll 1
  for (int sequence = warp; sequence < call.batch; sequence += kFinishers) {
    Before before;
    float old = 0;
    if (there) {
      before = load_before(part, sequence, row);
      if (part.kind == TokenPart::Kind::add)
        old = Tagged(first_tag + piece.added_to)
                  .wait_activation(static_cast<const uint32_t*>(part.out) + sequence * part.rows + row);
    }
    const WarpSums& all = *kept(&sums[turn % 2 * call.batch + sequence]);
    memory.multiplied[turn % 2].wait(static_cast<int>(turn / 2));
    if (!there) continue;
    float sum = sum_of(all.rows[result]), other = pairs ? sum_of(all.rows[result + 8]) : 0;
    if (normed) {
      const float scale = rsqrtf(__fdividef(sum_of(all.squares), width) + eps);
      sum *= scale;
      other *= scale;
    }
    finish(part, sequence, row, sum, other, old, before, written);
  }
  memory.multiplied[turn % 2].wait(static_cast<int>(turn / 2));  // where a warp has no sequence
  memory.finished[turn % 2].arrive();
}

// The weight of a token, or of none, by the eight threads that share it.
__device__ float weigh_token(const Cache& cache, const StepShare& own, const uint4* k, const NewToken& token, int j,
                             bool there) {
  const int lane = lane_of_thread() % 8;
  const bool is_new = j == own.kept;
  float score = 0;
  if (there) {
    const uint4* const from = is_new ? token.k : k + j * (cache.qk_dim / 8);
#pragma unroll 1
    for (int c = lane; c < cache.qk_dim / 8; c += 8) {
      float x[8];
      unpack(from[c], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) score = fmaf(x[i], token.q[c * 8 + i], score);
    }
  }
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) score += __shfl_xor_sync(0xFFFFFFFFu, score, offset);
  const float factor = cache.decay && there && !is_new ? decay_factor(token.now - own.totals[j]) : 1.0f;
  return (cache.score == Score::squared ? score * score : score) * factor;
}

__device__ void run_step(const TokenPiece& piece, Barrier& used, char* area, const StepShare& own, unsigned first_tag,
                         Turns& turns, Memory& memory) {
  constexpr int kAtOnce = 128 / kWarps;  // rows of the state that a thread reads before the input is there
  if (!own.there) return used.arrive();
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread(), lane = lane_of_thread();
  const Tagged written(first_tag + piece.operation), awaited(written.tag - 1);
  const StepArea from(piece, area);
  if (own.first != turns.first_row) make_features(turns, cache, own.first);
  // A warp takes whole rows, a thread four columns of them.
  const int vectors = cache.v_dim / 4, each = step.rows_at_once, of_warp = lane * step.part_of_row >> 16;
  const int column = lane - of_warp * vectors, groups = each * kWarps;
  const int group = of_warp < each ? warp * each + of_warp : 1 << 16;  // of no row
  const float4* const values = reinterpret_cast<const float4*>(from.values) + column;
  float4 x[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int r = group + i * groups;
    x[i] = r < own.rows ? values[r * vectors] : float4{0, 0, 0, 0};
  }
  if (piece.first) {
    NewToken& token = memory.tokens[turns.steps++ % 2];
    // A thread waits for one number, or for few.
    const int k_from = cache.qk_dim, v_from = 2 * cache.qk_dim, end = v_from + cache.v_dim;
#pragma unroll 1
    for (int i = thread; i < end; i += kThreads) {
      const int of = i < k_from ? i : i < v_from ? i - k_from : i - v_from;
      const uint32_t word = awaited.wait_word((i < k_from ? own.q : i < v_from ? own.k : own.v) + of);
      if (i < k_from)
        token.q[of] = cache.scale * value_of(word);
      else
        reinterpret_cast<uint16_t*>(i < v_from ? token.k : token.v)[of] = static_cast<uint16_t>(word);
    }
    if (thread == kThreads - 1) {
      token.left = 1;
      if (cache.decay) {
        token.log_decay = awaited.wait_number(own.log_decay);
        token.now = own.before + static_cast<double>(token.log_decay);
        token.left = decay_factor(token.now);
      }
    }
  }
  const NewToken& token = memory.tokens[(turns.steps - 1) % 2];
  meet();
  const int tokens = piece.first ? own.kept + (own.has_new ? 1 : 0) : 0;
#pragma unroll
  for (int i = 0; i < kMostRows / kThreads; ++i)
    if (thread + i * kThreads < own.rows)
      memory.phi[thread + i * kThreads] = token.left * turns.features[i].of<2>(token.q);
      // The last warps weigh the tokens, since the first make the features.
#pragma unroll 1
  for (int j = (kWarps - 1 - warp) * 4 + lane / 8; j - lane / 8 < tokens; j += 4 * kWarps) {
    const float weight = weigh_token(cache, own, reinterpret_cast<const uint4*>(from.k), token, j, j < tokens);
    if (lane % 8 == 0 && j < tokens) memory.weights[j] = weight;
  }
  meet();
  float4 y = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int r = group + i * groups;
    add_row(y, r < own.rows ? memory.phi[r] : 0, x[i]);
  }
#pragma unroll 1
  for (int r = group + kAtOnce * groups; r < own.rows; r += groups) add_row(y, memory.phi[r], values[r * vectors]);
#pragma unroll 1
  for (int j = group; j < tokens; j += groups) {
    const uint2 raw = reinterpret_cast<const uint2*>(j < own.kept ? from.v + j * vectors * 8
                                                                  : reinterpret_cast<const char*>(token.v))[column];
    const float4 v = {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u), __uint_as_float(raw.y << 16),
                      __uint_as_float(raw.y & 0xFFFF0000u)};
    add_row(y, memory.weights[j], v);
  }
  float n = 0;
  if (warp == kWarps - 1 && cache.sum) {
#pragma unroll 2
    for (int r = lane; r < own.rows; r += 32)
      n = fmaf(memory.phi[r], reinterpret_cast<const float*>(from.normalizers)[r], n);
#pragma unroll 1
    for (int j = lane; j < tokens; j += 32) n += memory.weights[j];
  }
  used.arrive();
  // The sums of a warp lie in shared memory, from piece to piece.
  float4 all = y;
#pragma unroll 1
  for (int i = 1; i < each; ++i) {
    const int other = column + i * vectors;
    all.x += __shfl_sync(0xFFFFFFFFu, y.x, other);
    all.y += __shfl_sync(0xFFFFFFFFu, y.y, other);
    all.z += __shfl_sync(0xFFFFFFFFu, y.z, other);
    all.w += __shfl_sync(0xFFFFFFFFu, y.w, other);
  }
  if (lane < vectors) {
    float4& sum = reinterpret_cast<float4*>(memory.values[warp])[lane];
    if (!piece.first) add_row(all, 1, sum);
    sum = all;
  }
  if (warp == kWarps - 1 && cache.sum) {
    n = warp_sum(n);
    if (lane == 0) memory.normalizer = piece.first ? n : memory.normalizer + n;
  }
  if (piece.last) {
    meet();
    const int ld = cache.v_dim + 1;
    if (thread <= cache.v_dim) {
      float sum = 0;
      if (thread < cache.v_dim) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += memory.values[w][thread];
      } else {
        sum = memory.normalizer;
      }
      written.partial(own.partials + own.block * ld + thread, sum);
    }
    // The blocks of a head share out its columns. A warp adds up one: half of it y, the others n.
#pragma unroll 1
    for (int c = own.column + warp; c < own.columns_end; c += kWarps) {
      float sum = 0;
#pragma unroll 1
      for (int part = lane % 16; part < step.blocks; part += 16)
        sum += written.wait_partial(own.partials + part * ld + (lane < 16 ? c : cache.v_dim));
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
      const float all = __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
      if (lane == 0) written.activation(own.out, c, cache.sum ? normalized(cache.score, sum, all) : sum);
    }
  }
  if (!piece.first || !own.has_new) return;
  // The last threads, which have no column, keep the new token.
  const int i = kThreads - 1 - thread;
  if (own.k_to != nullptr && i < cache.qk_dim / 8) own.k_to[i] = token.k[i];
  if (own.v_to != nullptr && i < cache.v_dim / 8) own.v_to[i] = token.v[i];
  if (cache.decay && i == 0) {
    *own.log_decay_to = token.log_decay;
    *own.total_to = token.now;
  }
}

__global__ void __launch_bounds__(kAllThreads, 1) token_kernel(const __grid_constant__ TokenWork program) {
  extern __shared__ uint4 dynamic_memory[];
  __shared__ Memory static_memory;
  const int thread = static_cast<int>(threadIdx.x);
  Memory& memory = *kept(&static_memory);
  uint4* const dynamic = kept(dynamic_memory);
  uint4* const activations = dynamic + warp_of_thread() * program.warp_activations;  // of this warp
  WarpSums* const sums = reinterpret_cast<WarpSums*>(dynamic + kWarps * program.warp_activations);
  char* const ring = reinterpret_cast<char*>(sums) + program.sums;
  if (thread < kSlots) {
    memory.described[thread].init(32);
    memory.fetched[thread].init(64);
    memory.used[thread].init(32 * (kWarps + kFinishers));
  }
  if (thread < 2) {
    memory.multiplied[thread].init(32 * kWarps);
    memory.finished[thread].init(32 * kFinishers);
  }
  if (thread < kSlots) fence_barriers();
  start_next();
  __syncthreads();
  if (thread >= kAllThreads - 32) return fetch(program, memory, ring);
  if (thread >= kAllThreads - 64) return fetch_windows(program, memory, ring);

  wait_for_previous();
  const unsigned first_tag = __ldcg(program.tags + blockIdx.x);
  const bool finishes = thread >= kThreads;
  Turns turns{};
  turns.first_row = -1;
  for (int p = 0; p < program.count; ++p) {
    const int slot = p % kSlots;
    Barrier& used = memory.used[slot];
    memory.fetched[slot].wait(p / kSlots);
    const TokenPiece& piece = *reinterpret_cast<const TokenPiece*>(memory.pieces[slot]);
    if (finishes) {
      if (piece.kind == TokenPiece::Kind::linear)
        finish_product(piece, used, sums, first_tag, turns.products, memory);
      else
        used.arrive();
    } else if (piece.kind == TokenPiece::Kind::linear) {
      multiply(piece, used, reinterpret_cast<const uint4*>(ring + piece.at), activations, sums, first_tag, turns,
               memory);
    } else if (piece.kind == TokenPiece::Kind::step) {
      run_step(piece, used, ring + piece.at, memory.shares[slot], first_tag, turns, memory);
    } else {
      embed(program, piece.embedding, Tagged(first_tag + piece.operation));
      used.arrive();
    }
    // What this block has waited for by now comes after all steps, and so after all have read what counts the tokens.
    if (piece.first && piece.final && blockIdx.x == 0 && finishes)
      for (int i = thread - kThreads; i < program.caches * program.rows; i += 32 * kFinishers) {
        SlotRecord& slot = program.slots[i / program.rows][__ldcg(program.slot_of_row + i % program.rows)];
        slot.pending += 1;
        slot.tokens += 1;
      }
  }
  if (thread == kThreads) program.tags[blockIdx.x] = first_tag + program.operations;
}

#endif

}  // namespace

TokenRoom::TokenRoom(int64_t batch, int64_t widest) {
  constexpr int64_t kLine = 128, kSpare = 512;  // where parts begin at round addresses
  const auto lines = [](int64_t bytes) { return static_cast<int>(std::max<int64_t>(bytes, 0) / kLine * kLine); };
  warp_activations = static_cast<int>(batch) * (warp_units(static_cast<int>(widest)) + 1) * 16;
  sums = lines(2 * batch * static_cast<int64_t>(sizeof(WarpSums)) + kLine - 1);
  const int64_t others = kWarps * warp_activations + sums;
  ring = lines(most_shared_memory() - static_cast<int64_t>(sizeof(Memory)) - kSpare - others);
  all = static_cast<int>(others) + ring;
}

int resident_token_blocks(int bytes) {
  int cooperative = 0, device = 0, blocks = 0;
  check(cudaGetDevice(&device), "token_program");
  check(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device), "token_program");
  if (cooperative == 0 || bytes > most_shared_memory()) return 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, token_kernel, kAllThreads, static_cast<size_t>(bytes)),
        "token_program");
  return blocks * multiprocessors();
}

bool has_token_kernel() {
  static std::mutex mutex;
  static std::map<int, bool> known;
  int device = 0;
  check(cudaGetDevice(&device), "token_program");
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace(device, false);
  if (!is_new) return entry->second;
  cudaFuncAttributes kernel{};
  const bool has_body = cudaFuncGetAttributes(&kernel, token_kernel) == cudaSuccess && kernel.ptxVersion >= 90;
  if (!has_body) {
    (void)cudaGetLastError();  // a kernel without code for this device is not an error here
    return false;
  }
  const int bytes = TokenRoom(1, 8).all;
  check(cudaFuncSetAttribute(token_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "token_program");
  // Kernels that overlap ask for the same split of cache and shared memory (tensor/launch.cuh).
  check(cudaFuncSetAttribute(token_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "token_program");
  entry->second = resident_token_blocks(bytes) >= multiprocessors();
  return entry->second;
}

void run_token_kernel(Device device, const TokenWork& work, int bytes) {
  cudaLaunchConfig_t config{};
  config.stream = stream(device);
  config.gridDim = static_cast<unsigned>(multiprocessors());
  config.blockDim = kAllThreads;
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  // Blocks wait for each other, so all must run at once: a cooperative launch starts none before there is room for all,
  // and fails where there never is, be it that another process has part of the device.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = launches_early() ? 2 : 1;
  check(cudaLaunchKernelEx(&config, token_kernel, work), "token_program");
}

}  // namespace furious::cuda
