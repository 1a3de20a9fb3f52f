// What the parts of the token kernel share: a block's memory, the words that go from block to block, and where the
// parts of a piece lie. Included by token_kernel_cuda.cu only.
#pragma once

#include "decode/token_kernel.cuh"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"

namespace furious::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // that multiply; two more warps fetch
constexpr int kFinishers = 2;                      // warps that finish what the others have multiplied
constexpr int kAllThreads = kThreads + 32 * (kFinishers + 2);

// The columns of a warp of a row's activations, four units at a time, padded so that rows fall into different banks.
[[maybe_unused]] __host__ __device__ int warp_units(int k) {
  return (k + 32 * kWarps - 1) / (32 * kWarps) * 4;
}

// What a block does of a step's piece, and what it needs that no operation since the last token has written. A
// fetching warp works it out.
struct StepShare {
  bool active, has_new;            // whether the block has a share, and the new token is in it
  int first, rows;                 // of the state
  int tokens;                      // of the window, without the new one
  int position;                    // of the new token in its sequence
  int block, column, columns_end;  // of the head: which it is, and the columns of the result that it adds up
  const uint32_t *q, *k, *v;       // of the head
  const uint64_t *log_decay, *dt;
  const float* d;
  uint64_t* partials;
  uint32_t* out;
  uint4 *k_to, *v_to;  // where the new token is kept; heads that share a k or v leave it to the first of them
  float* log_decay_to;
  double* total_to;
  double before;  // sum of the log-decays up to the newest token in the window
};

// The new token of a step.
struct NewToken {
  uint4 k[kLargestHead / 8], v[kLargestHead / 8];  // of bf16, as they are kept
  alignas(16) float q[kLargestHead];
  float raw_v[kLargestHead], log_decay;
  float left;  // of the state, by the decay since it was folded
  double now;
};

// The sums of the warps for a piece, each over its columns.
struct WarpSums {
  alignas(16) float rows[8 * kMostGroups][kWarps + 4];  // four more, so that eight rows fall into different banks
  alignas(16) float squares[kWarps];
};

struct Memory {
  alignas(16) char pieces[kPieceSlots][kDescriptionBytes];
  StepShare shares[kPieceSlots];
  // Every thread arrives for itself, once it has read or written all that it has to.
  Barrier described[kPieceSlots], fetched[kPieceSlots], used[kPieceSlots];  // pieces
  Barrier multiplied[2], finished[2];                                       // products, in turn
  Barrier chunk_fetched[kMostStages], chunk_used[kMostStages];
  NewToken tokens[2];  // in turn, since the previous step may still be reading its own
  float phi[kMostStateRows];
  float normalizers[kWarps], largest[kWarps];
  alignas(16) float values[kWarps][kLargestHead];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x % 32);
}
__device__ int warp_of_thread() {
  return static_cast<int>(threadIdx.x / 32);
}

// The same pointer to shared memory, which the compiler then keeps in a register: it would work it out anew for every
// access.
template <class T>
__device__ T* in_register(T* shared) {
  uint32_t address;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(address) : "r"(shared_address(shared)));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// A barrier of the threads that compute.
__device__ void sync_compute_warps() {
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
  // Two numbers of which there is one copy each.
  __device__ float2 wait_partials(const uint64_t* first, const uint64_t* second) const {
    uint64_t a, b;
    do {
      a = load_relaxed(first);
      b = load_relaxed(second);
    } while (a >> 32 != tag || b >> 32 != tag);
    return {__uint_as_float(static_cast<uint32_t>(a)), __uint_as_float(static_cast<uint32_t>(b))};
  }
  __device__ float2 wait_activations(const uint32_t* first, const uint32_t* second) const {
    uint32_t a, b;
    first = own_copy(first);
    second = own_copy(second);
    do {
      a = load_relaxed(first);
      b = load_relaxed(second);
    } while (a >> 16 != tag || b >> 16 != tag);
    return {value_of(a), value_of(b)};
  }
  __device__ float2 wait_activation_and_number(const uint32_t* first, const uint64_t* second) const {
    uint32_t a;
    uint64_t b;
    first = own_copy(first);
    second = own_copy(second);
    do {
      a = load_relaxed(first);
      b = load_relaxed(second);
    } while (a >> 16 != tag || b >> 32 != tag);
    return {value_of(a), __uint_as_float(static_cast<uint32_t>(b))};
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

// Where the parts of a step's piece lie: rows of the state, or in their place stages for chunks of a long window, and
// the first tokens of the window.
struct StepArea {
  char *values, *normalizers, *window;

  __device__ StepArea(const TokenPiece& piece, char* area) : values(area) {
    const StepCall& step = piece.step;
    normalizers = values + piece.count * padded(step.cache.v_dim) * 4;
    window = area +
             max(piece.count * state_row_bytes(step.cache), step.stages * window_bytes(step.cache, step.chunk_tokens));
  }
  __device__ char* stage(const StepCall& step, int i) const {
    return values + i * window_bytes(step.cache, step.chunk_tokens);
  }
};

// Where the parts of up to `tokens` tokens lie.
struct WindowArea {
  char *k, *v;
  double* totals;

  __device__ WindowArea(const Cache& cache, int tokens, char* area) : k(area) {
    totals = reinterpret_cast<double*>(k + tokens * cache.qk_dim * 2);
    v = reinterpret_cast<char*>(totals + (cache.decay ? tokens : 0));
  }
};

// The stage of the next chunk, and how often all stages have been used. Those who fill and those who empty them count
// for themselves.
struct StageCursor {
  int stage, round;

  __device__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    ++round;
  }
};

// What a thread keeps from piece to piece.
struct ThreadState {
  unsigned products, steps;  // that the block has had a share in: they use two memories in turn
  float squares;             // of the input of a product, over the columns of the warp
  StageCursor cursor;
  int first_row;  // of the state's rows that its features are of: the same for every step of one piece
  Feature features[kMostStateRows / kThreads];
};

#endif

}  // namespace
}  // namespace furious::cuda
