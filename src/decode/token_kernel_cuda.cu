#include <map>
#include <mutex>

#include "decode/token_kernel.cuh"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"

// Every multiprocessor has one block, and all blocks walk the same list of operations, each with its own share of the
// rows of a weight or a state. Weights, states and windows depend on nothing that the token computes: two warps of
// their own fetch them, piece by piece, into a ring of shared memory, as far ahead as it has space. So memory is busy
// while the blocks wait for each other's activations.
//
// An activation goes from block to block as a word that holds its 16 bits and a tag, the number of the operation that
// wrote it counted over all tokens: a reader polls until the tag is the expected one. That costs one trip through the
// L2 cache, where a barrier of all blocks costs three. Numbers of f32 go from block to block in two words. All blocks
// read the same words at the same time, from one place in the cache: so there are several copies, each for some of the
// blocks. No word is overwritten before everybody has read it: a block writes an activation anew after all its warps
// have read everything that the previous operation wrote, and each block of that had read its own input before it
// wrote. Only a step reads less than all, its own head; but the operation after it reads all heads.
//
// The operations form one long chain, and what counts is how short it is. So the warps that multiply share out the
// columns of a product, and each waits for its own columns of the input alone, with its weights already in registers.
// Their sums go to two more warps, which have loaded everything else that the end of the product needs.
//
// A piece is some tiles of eight rows of a product, or some rows of a state (with the first of them the first tokens of
// the window), and says everything that is to be done with it. Its place in the ring, and the piece that must have been
// used before, are known when the program is made. What differs from token to token and from row to row, the length of
// the window and whether there is a state, is read from the slots' records: further tokens of a window come in chunks
// of their own, as many as there are, through stages in the piece's part of the ring. They lie in the memory for
// rows of the state: a window is that long only before the first fold, or where a cache has no state at all.
//
// Sums are always taken in the same order.

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

// The share of this block in a step: the same for all steps but for the rows of the state.
struct OwnHead {
  int row_head, row, head, block;
  bool active;
  int first, rows;  // of the state

  __device__ explicit OwnHead(const TokenPiece& piece) {
    const StepCall& step = piece.step;
    row_head = quotient(static_cast<int>(blockIdx.x), step.blocks);
    block = static_cast<int>(blockIdx.x) - row_head * step.blocks;
    active = row_head < step.heads;
    row = quotient(row_head, step.cache.heads);
    head = row_head - row * step.cache.heads;
    first = block * step.rows + piece.begin;
    rows = max(0, min(min(piece.count, step.rows - piece.begin), step.cache.state_rows - first));
  }
};

// By one thread. A row has no state before its first fold.
__device__ void fetch_state(const TokenPiece& piece, int slot, Barrier& fetched, char* area, Pace& pace) {
  constexpr int kAtOnce = 4096;
  const OwnHead own(piece);
  if (!own.active || own.rows == 0) return;
  const float* state = load_slot(piece.step.cache.slots + slot).state;
  if (state == nullptr) return;
  const Cache& cache = piece.step.cache;
  const StepArea to(piece, area);
  const int ld = padded(cache.v_dim);
  state += static_cast<int64_t>(own.head) * cache.state_numbers;
  const int values = own.rows * ld * 4, normalizers = cache.sum ? padded(own.rows) * 4 : 0;
  fetched.expect(values + normalizers);
  const char* from = reinterpret_cast<const char*>(state + static_cast<int64_t>(own.first) * ld);
#pragma unroll 1
  for (int at = 0; at < values; at += kAtOnce) pace.copy(to.values + at, from + at, min(kAtOnce, values - at), fetched);
  if (normalizers > 0)
    stream_bytes(to.normalizers, state + static_cast<int64_t>(cache.state_rows) * ld + own.first, normalizers, fetched);
}

// Where a head's tokens lie in a page, in bytes.
struct PageOffsets {
  int k, v, log_decay, total;

  __device__ PageOffsets(const StepCall& step, int head) {
    const Cache& cache = step.cache;
    k = quotient(head, step.k.sharers) * kPageTokens * cache.qk_dim * 2;
    v = cache.v_begin + quotient(head, step.v.sharers) * kPageTokens * cache.v_dim * 2;
    log_decay = cache.decay_begin + head * kPageTokens * 4;
    total = cache.total_begin + head * kPageTokens * 8;
  }
};

// An address in a table of pages; another kernel may have written it.
__device__ char* load_page(const Page* pages, int page) {
  return reinterpret_cast<char*>(__ldcg(reinterpret_cast<const unsigned long long*>(&pages[page].memory)));
}

// The addresses of the pages of a window, in order: a warp loads 32 of them at once, and the next 32 ahead.
struct PageList {
  const Page* pages;
  int first, end;  // of those that the lanes have, and of all
  char *own, *next;

  __device__ PageList(const Page* table, int begin, int end_of_all) : pages(table), first(begin), end(end_of_all) {
    own = load(first);
    next = load(first + 32);
  }
  __device__ char* load(int from) const {
    const int page = from + lane_of_thread();
    return page < end ? load_page(pages, page) : nullptr;
  }
  // By all lanes.
  __device__ char* at(int page) {
    if (page >= first + 32) {
      first += 32;
      own = next;
      next = load(first + 32);
    }
    const auto address = reinterpret_cast<unsigned long long>(own);
    return reinterpret_cast<char*>(__shfl_sync(0xFFFFFFFFu, address, page - first));
  }
};

// Tokens [first, first + count) of a head's window, by a warp, of which one lane starts the copies. Runs of tokens
// begin at multiples of four, so that their f64 sums begin at multiples of 16 bytes; one sum behind the last may be
// copied.
__device__ void fetch_tokens(const Cache& cache, PageList& pages, const PageOffsets& offsets, int first, int count,
                             const WindowArea& to, Barrier& fetched, Pace& pace) {
  const int k_bytes = cache.qk_dim * 2, v_bytes = cache.v_dim * 2;
  const bool copies = lane_of_thread() == 0;
  if (copies) fetched.expect(count * (k_bytes + v_bytes) + (cache.decay ? (count + 1) / 2 * 16 : 0));
#pragma unroll 1
  for (int j = 0, run; j < count; j += run) {
    const int of_page = (first + j) % kPageTokens;
    run = min(kPageTokens - of_page, count - j);
    const char* const page = pages.at((first + j) / kPageTokens);
    if (!copies) continue;
    if (cache.decay) stream_bytes(to.totals + j, page + offsets.total + of_page * 8, (run + 1) / 2 * 16, fetched);
    pace.copy(to.k + j * k_bytes, page + offsets.k + of_page * k_bytes, run * k_bytes, fetched);
    pace.copy(to.v + j * v_bytes, page + offsets.v + of_page * v_bytes, run * v_bytes, fetched);
  }
}

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

// By one thread: what the block knows of a step.
__device__ void describe_share(const StepCall& step, const OwnHead& own, const SlotRecord& record, int tokens,
                               const PageOffsets& offsets, char* newest_page, double before, StepShare& share) {
  const Cache& cache = step.cache;
  share.first = own.first;
  share.rows = record.state != nullptr ? own.rows : 0;
  share.tokens = tokens;
  share.has_new = own.block == step.blocks - 1;
  share.position = record.tokens;
  share.block = own.block;
  share.column = own.block * step.columns;
  share.columns_end = min(cache.v_dim, (own.block + 1) * step.columns);
  const auto words = [&](const TaggedRows& x, int dim) {
    return x.data + own.row * x.row_stride + quotient(own.head, x.sharers) * dim;
  };
  share.q = words(step.q, cache.qk_dim);
  share.k = words(step.k, cache.qk_dim);
  share.v = words(step.v, cache.v_dim);
  share.log_decay = step.log_decay + own.row_head;
  share.dt = step.dt + own.row_head;
  share.d = step.d + own.head * cache.v_dim;
  share.partials = step.partials + own.row_head * step.blocks * step.partial_width;
  share.out = step.out + own.row_head * cache.v_dim;
  char* const page = newest_page;
  const int of_page = record.pending % kPageTokens;
  const bool keeps_k = quotient(own.head, step.k.sharers) * step.k.sharers == own.head;
  const bool keeps_v = quotient(own.head, step.v.sharers) * step.v.sharers == own.head;
  share.k_to = keeps_k ? reinterpret_cast<uint4*>(page + offsets.k + of_page * cache.qk_dim * 2) : nullptr;
  share.v_to = keeps_v ? reinterpret_cast<uint4*>(page + offsets.v + of_page * cache.v_dim * 2) : nullptr;
  share.log_decay_to = reinterpret_cast<float*>(page + offsets.log_decay) + of_page;
  share.total_to = reinterpret_cast<double*>(page + offsets.total) + of_page;
  share.before = before;
}

// By a warp: what a step needs besides its state.
__device__ void fetch_window(const TokenPiece& piece, int slot, int place, char* area, StageCursor& cursor, Pace& pace,
                             Memory& memory) {
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int lane = lane_of_thread();
  const OwnHead own(piece);
  StepShare& share = memory.shares[place];
  Barrier& fetched = memory.fetched[place];
  if (lane == 0) share.active = own.active;
  if (!own.active) return fetched.arrive();
  const SlotRecord record = load_slot(cache.slots + slot);
  // Shares begin at multiples of four tokens; the last block, which has the fewest, adds the new one.
  const int each = (record.pending + step.blocks - 1) / step.blocks + 3 & ~3;
  const int first = own.block * each, tokens = max(0, min(each, record.pending - first));
  const int at_once = min(tokens, step.first_tokens);
  const StepArea to(piece, area);
  const PageOffsets offsets(step, own.head);
  const bool has_tokens = piece.first && tokens > 0;
  pace.cycles = step.window_cycles;
  PageList pages(record.pages, first / kPageTokens, has_tokens ? (first + tokens - 1) / kPageTokens + 1 : 0);
  const int newest = max(record.pending - 1, 0);
  char* const new_page = load_page(record.pages, record.pending / kPageTokens);
  char* const last_page = load_page(record.pages, newest / kPageTokens);
  double before = 0;
  if (cache.decay && record.pending > 0)
    before = __ldcg(reinterpret_cast<const double*>(last_page + offsets.total) + newest % kPageTokens);
  WindowArea area_of_tokens(cache, step.first_tokens, to.window);
  Barrier* tokens_fetched = &fetched;
#pragma unroll 1
  for (int done = 0, count = at_once;; done += count, count = min(step.chunk_tokens, tokens - done)) {
    if (has_tokens) fetch_tokens(cache, pages, offsets, first + done, count, area_of_tokens, *tokens_fetched, pace);
    if (done == 0) {
      if (lane == 0) describe_share(step, own, record, tokens, offsets, new_page, before, share);
      if (step.d != nullptr && 32 * lane < cache.v_dim) prefetch(step.d + own.head * cache.v_dim + 32 * lane);
      fetched.arrive();
    } else {
      if (lane == 0) tokens_fetched->arrive();
      cursor.advance(step.stages);
    }
    if (!has_tokens || done + count >= tokens) return;
    if (cursor.round > 0) memory.chunk_used[cursor.stage].wait(cursor.round - 1);
    area_of_tokens = WindowArea(cache, step.chunk_tokens, to.stage(step, cursor.stage));
    tokens_fetched = &memory.chunk_fetched[cursor.stage];
  }
}

// Waits for earlier kernels, which may have written states, windows and slots, but no weights. Returns the slot of the
// row that this block has in every step.
__device__ int wait_for_slot(const TokenWork& program, const TokenPiece& piece) {
  wait_for_previous();
  const OwnHead own(piece);
  return own.active ? __ldcg(program.slots + own.row) : 0;
}

// One warp fetches descriptions, weights and states. Meanwhile the descriptions of two further pieces are loaded.
__device__ void fetch(const TokenWork& program, Memory& memory, char* ring) {
  const int lane = lane_of_thread();
  const auto description = [&](int p) {
    return p < program.count ? __ldcg(program.pieces + p * (kDescriptionBytes / 16) + lane) : uint4{};
  };
  uint4 next = description(0), after = description(1);
  Pace pace{2 * Pace::kCycles, static_cast<unsigned>(clock())}, state_pace{Pace::kCycles, pace.next};
  int slot = -1;  // not known yet
#pragma unroll 1
  for (int p = 0; p < program.count; ++p) {
    const uint4 own = next;
    next = after;
    after = description(p + 2);
    const int place = p % kPieceSlots, last = __shfl_sync(0xFFFFFFFFu, static_cast<int>(own.x), 0) - 1;
    if (last >= 0) memory.used[last % kPieceSlots].wait(last / kPieceSlots);
    reinterpret_cast<uint4*>(memory.pieces[place])[lane] = own;
    __syncwarp();
    const TokenPiece& piece = *reinterpret_cast<const TokenPiece*>(memory.pieces[place]);
    Barrier& fetched = memory.fetched[place];
    if (slot < 0 && piece.kind == TokenPiece::Kind::step) slot = wait_for_slot(program, piece);
    if (blockIdx.x == 0 && piece.kind == TokenPiece::Kind::linear && piece.linear.norm != nullptr)
      for (int i = 32 * lane; i < piece.linear.k; i += 1024) prefetch(piece.linear.norm + i);
    memory.described[place].arrive();
    if (lane == 0) {
      if (piece.kind == TokenPiece::Kind::linear)
        fetch_linear(piece, fetched, ring + piece.at, 0, pace);
      else if (piece.kind == TokenPiece::Kind::step)
        fetch_state(piece, slot, fetched, ring + piece.at, state_pace);
    }
    fetched.arrive();
    __syncwarp();
  }
}

// Another fetches what a step needs besides, and half of the weights.
__device__ void fetch_windows(const TokenWork& program, Memory& memory, char* ring) {
  Pace pace{2 * Pace::kCycles, static_cast<unsigned>(clock())}, window_pace{Pace::kCycles, pace.next};
  StageCursor cursor{};
  int slot = -1;  // not known yet
#pragma unroll 1
  for (int p = 0; p < program.count; ++p) {
    const int place = p % kPieceSlots;
    memory.described[place].wait(p / kPieceSlots);
    const TokenPiece& piece = *reinterpret_cast<const TokenPiece*>(memory.pieces[place]);
    if (slot < 0 && piece.kind == TokenPiece::Kind::step) slot = wait_for_slot(program, piece);
    if (piece.kind == TokenPiece::Kind::step) {
      fetch_window(piece, slot, place, ring + piece.at, cursor, window_pace, memory);
    } else {
      if (lane_of_thread() == 0 && piece.kind == TokenPiece::Kind::linear)
        fetch_linear(piece, memory.fetched[place], ring + piece.at, 1, pace);
      memory.fetched[place].arrive();
    }
    __syncwarp();
  }
}

__device__ void embed(const TokenWork& program, const EmbeddingCall& call, const Tagged& written) {
  const int all = call.rows * call.dim;
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

// What a thread keeps from piece to piece.
struct ThreadState {
  unsigned products, steps;  // that the block has had a share in: they use two memories in turn
  float squares;             // of the input of a product, over the columns of the warp
  StageCursor cursor;
  int first_row;  // of the state's rows that its features are of: the same for every step of one piece
  Feature features[kMostStateRows / kThreads];
};

__device__ __noinline__ Feature feature_of_row(const FeatureMap& features, int row) {
  return feature_of(features, row);
}

__device__ void make_features(ThreadState& state, const Cache& cache, int first_row) {
  state.first_row = first_row;
#pragma unroll
  for (int i = 0; i < kMostStateRows / kThreads; ++i) {
    const int row = first_row + static_cast<int>(threadIdx.x) + i * kThreads;
    state.features[i] = feature_of_row(cache.features, row < cache.state_rows ? row : 0);
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

// The lanes of a row of the batch are a power of two.
__device__ int lane_bits(int batch) {
  return batch == 1 ? 5 : batch == 2 ? 4 : batch <= 4 ? 3 : 2;
}

// Waits for a warp's columns of the input and writes them to its shared memory, with the norm's weight multiplied in;
// zeros up to whole fours. Returns the square sum of those that the lane has loaded.
__device__ float load_input(const LinearCall& call, const Columns& own, const Tagged& awaited,
                            const Tagged& gate_awaited, uint4* activations, int stride) {
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
                       gate_awaited.wait_eight(
                           reinterpret_cast<const uint4*>(words(call.gate) + sequence * call.gate_stride) + 2 * unit));
        eight = awaited.wait_eight(x);
        if (has_norm || has_gate) eight = normed(eight, factors, norm, squares);
      }
      *to = eight;
      to += lanes;
      x += 2 * lanes;
    }
  }
  __syncwarp();
  return squares;
}

// The sum over the lanes of a row of the batch, in all of them.
__device__ float sum_of_row(float x, int batch) {
  const int lanes = 1 << lane_bits(batch);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    x += offset < lanes ? other : 0.0f;
  }
  return x;
}

__device__ float sum_of(const float* warps) {
  const float4* const four = reinterpret_cast<const float4*>(warps);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) sum += (four[i].x + four[i].y) + (four[i].z + four[i].w);
  return sum;
}

// The warps share out the columns, and each reads its own of the input as they come. Weights are the tensor cores'
// first factor, 16 rows of them, and the activations of the batch the second. What rows beyond the last give is not
// read.
__device__ void multiply(const TokenPiece& piece, Barrier& used, const uint4* weights, uint4* activations,
                         WarpSums* sums, unsigned first_tag, ThreadState& state, Memory& memory) {
  const LinearCall& call = piece.linear;
  const Tiles tiles(piece);
  if (tiles.first >= tiles.end) return used.arrive();
  const int lane = lane_of_thread(), batch = call.batch, stride = row_units(call.k);
  const int groups = (tiles.end - tiles.first) * (call.pairs() ? 2 : 1);
  const bool wide = groups > 2;  // more than 16 rows
  const Columns own(call.k);
  const int x_stride = warp_units(call.k) + 1;
  // A lane has the address of a unit of a row of weights: of rows 0 to 7, 8 to 15 and then the same of the next unit;
  // or of a row of the batch. Tiles are 16 rows and four units: of two groups of rows in turn, or of the same rows
  // further on.
  const int row = lane % 8, lower = lane / 8 % 2;
  const uint4* w_even =
      weights + (row + (groups > 1 ? lower * 8 : 0)) * stride + (own.first < own.end ? own.first : 0) + lane / 16;
  const uint4* w_odd = wide ? w_even + (16 - (groups > 3 ? 0 : lower * 8)) * stride : w_even + 4;
  const uint4* x_even = activations + min(row, batch - 1) * x_stride + lane / 8;
  const int further = wide ? 4 : 8, x_odd = wide ? 0 : 4;
  // Where this warp's sums go, and whose they are.
  const unsigned product = state.products++;
  sums += product % 2 * batch;
  const int of = lane % 4 * 2, squares_of = lane >> lane_bits(batch);
  float* const to = in_register(&sums[of].rows[lane / 4][warp_of_thread()]);
  if (product >= 2) memory.finished[product % 2].wait(static_cast<int>(product / 2) - 1);

  constexpr int kTiles = 64 / kWarps;  // that are loaded before the input is waited for
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
      // A few units behind the last may be read (SharedMemoryPlan::kBehind), but not many: then the first are read
      // again.
      const int step = i % 4 == 0 || (i + 2) / 2 * further < left ? further : -further;
      w_even += step;
      w_odd += step;
    }
    const int next = unit + kTiles / 2 * further;
    more = next < own.end;
    if (!more) used.arrive();
    if (fresh)
      state.squares = load_input(call, own, Tagged(first_tag + piece.x_from), Tagged(first_tag + piece.gate_from),
                                 activations, x_stride);
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
  if (call.norm != nullptr) {
    if (piece.first) state.squares = sum_of_row(state.squares, batch);
    if (squares_of < batch) sums[squares_of].squares[warp_of_thread()] = state.squares;
  }
  memory.multiplied[product % 2].arrive();
}

// A warp finishes the results of some rows of the batch: a lane for each element.
__device__ void finish_product(const TokenPiece& piece, Barrier& used, const WarpSums* sums, unsigned first_tag,
                               unsigned& products, Memory& memory) {
  const LinearCall& call = piece.linear;
  const int lane = lane_of_thread(), warp = warp_of_thread() - kWarps;
  const Tiles tiles(piece);
  used.arrive();
  if (tiles.first >= tiles.end) return;
  const unsigned product = products++;
  const bool pairs = call.pairs();
  const int tile = tiles.first + lane / 8;
  // Everything that is known of the operation is loaded before its sums are waited for.
  const LinearPart part = call.part_of(min(tile, tiles.end - 1));
  const bool normed = call.norm != nullptr;
  const float width = static_cast<float>(call.k), eps = call.eps;
  const Tagged written(first_tag + piece.operation), residual(first_tag + piece.residual_from);
  const int row = (tile - part.first_tile) * 8 + lane % 8;
  const bool valid = tile < tiles.end && row < part.rows;
  // The rows of a pair's tile follow each other: eight of the gate, eight of the other factor.
  const int result = pairs ? lane / 8 * 16 + lane % 8 : lane;
  Before next;
  float next_residual = 0;
  const auto load_next = [&](int sequence) {
    if (!valid || sequence >= call.batch) return;
    next = load_before(part, sequence, row);
    if (part.kind == TokenPart::Kind::add)
      next_residual = residual.wait_activation(piece.residual + sequence * part.rows + row);
  };
#pragma unroll 1
  for (int sequence = warp - kFinishers; sequence < call.batch; sequence += kFinishers) {
    const Before before = next;
    const float old = next_residual;
    load_next(sequence + kFinishers);
    if (sequence < 0) continue;
    const WarpSums& all = *in_register(&sums[product % 2 * call.batch + sequence]);
    memory.multiplied[product % 2].wait(static_cast<int>(product / 2));
    if (!valid) continue;
    float sum = sum_of(all.rows[result]), other = pairs ? sum_of(all.rows[result + 8]) : 0;
    if (normed) {
      const float scale = rsqrtf(__fdividef(sum_of(all.squares), width) + eps);
      sum *= scale;
      other *= scale;
    }
    finish(part, sequence, row, sum, other, old, before, written);
  }
  memory.multiplied[product % 2].wait(static_cast<int>(product / 2));  // where a warp has no row
  memory.finished[product % 2].arrive();
}

// Some tokens of a step: `count` of them in shared memory, and the new one behind them where it is with them.
struct TokenChunk {
  WindowArea area;
  int count;
  bool has_new;
};

constexpr int kTokensAtOnce = 4 * kWarps;  // eight lanes for each
static_assert(kLargestHead == 2 * 8 * 8);
// Where the largest exponent of no tokens would be minus infinity, from which no difference can be taken.
constexpr float kNoExponent = -1e30f;

__device__ float fast_exp(float x) {
  return fast_exp2(x * 1.44269504f);
}

// Adds up tokens of a window. The eight lanes of a token have eight neighbouring columns each, and in heads of more
// than 64 (kHalves 2) eight more; every eight lanes of a warp have sums of their own. There are no branches: a lane
// without columns computes with a zero of q, a token that is not there has the weight zero.
template <bool kSoftmax, int kHalves>
struct TokenSums {
  int k_units, v_units, lane_k[kHalves], lane_v[kHalves];
  bool decay;
  float q[kHalves][8];
  float y[kHalves][8], n;
  float largest;  // exponent under softmax, by which y and n are scaled

  __device__ TokenSums(const StepCall& step, const NewToken& token)
      : k_units(step.cache.qk_dim / 8),
        v_units(step.cache.v_dim / 8),
        decay(step.cache.decay),
        n(0),
        largest(kNoExponent) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int unit = lane_of_thread() % 8 + 8 * half;
      lane_k[half] = unit < k_units ? unit : 0;
      lane_v[half] = unit < v_units ? unit : 0;
      const float4* const from = reinterpret_cast<const float4*>(token.q) + 2 * lane_k[half];
      const float4 low = from[0], high = from[1];
      const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        q[half][i] = unit < k_units ? eight[i] : 0.0f;
        y[half][i] = 0;
      }
    }
  }

  // The last warps come first, since the first ones have more rows of the state.
  static __device__ int first_of_warp() {
    return (kWarps - 1 - warp_of_thread()) * 4;
  }

  // kAtOnce: tokens of a lane, whose latencies overlap.
  template <int kAtOnce>
  __device__ void add(const TokenChunk& chunk, const NewToken& token, const Polynomial& polynomial) {
    const int tokens = chunk.count + (chunk.has_new ? 1 : 0);
#pragma unroll 1
    for (int first = first_of_warp(); first < tokens; first += kAtOnce * kTokensAtOnce) {
      uint4 k[kAtOnce][kHalves], v[kAtOnce][kHalves];
      float log_decay[kAtOnce], weights[kAtOnce];
      bool valid[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = first + i * kTokensAtOnce + lane_of_thread() / 8;
        const bool kept = j < chunk.count;
        valid[i] = j < tokens;
        const uint4* const k_from = kept ? reinterpret_cast<const uint4*>(chunk.area.k) + j * k_units : token.k;
        const uint4* const v_from = kept ? reinterpret_cast<const uint4*>(chunk.area.v) + j * v_units : token.v;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          k[i][half] = k_from[lane_k[half]];
          v[i][half] = v_from[lane_v[half]];
        }
        log_decay[i] = decay && kept ? static_cast<float>(token.now - chunk.area.totals[j]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) weights[i] = product(k[i]);
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] += __shfl_xor_sync(0xFFFFFFFFu, weights[i], offset);
      if constexpr (kSoftmax) {
        float most = largest;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          weights[i] = valid[i] ? weights[i] + log_decay[i] : -INFINITY;
          most = fmaxf(most, weights[i]);
        }
        scale_to(most);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] = fast_exp(weights[i] - most);
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          weights[i] = valid[i] ? polynomial(weights[i]) * fast_exp(log_decay[i]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        n += weights[i];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          float x[8];
          unpack(v[i][half], x);
#pragma unroll
          for (int c = 0; c < 8; ++c) y[half][c] = fmaf(weights[i], x[c], y[half][c]);
        }
      }
    }
  }

  // The sums of the warp, on top of what is in a row of v_dim numbers. All lanes get n. The four lanes that have the
  // same columns exchange half of them with each other, and then half of what is left.
  __device__ void add_to(float* row) {
    const bool second = lane_of_thread() & 8, last = lane_of_thread() & 16;
    if constexpr (kSoftmax) {
      float most = largest;
#pragma unroll
      for (int offset = 8; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
      scale_to(most);
    }
    n += __shfl_xor_sync(0xFFFFFFFFu, n, 8);
    n += __shfl_xor_sync(0xFFFFFFFFu, n, 16);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float four[4], two[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, second ? y[half][i] : y[half][i + 4], 8);
        four[i] = (second ? y[half][i + 4] : y[half][i]) + other;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, last ? four[i] : four[i + 2], 16);
        two[i] = (last ? four[i + 2] : four[i]) + other;
      }
      const int unit = lane_of_thread() % 8 + 8 * half;
      if (unit >= v_units) continue;
      float2* const to = reinterpret_cast<float2*>(row) + 4 * unit + (second ? 2 : 0) + (last ? 1 : 0);
      *to = {to->x + two[0], to->y + two[1]};
    }
  }

 private:
  __device__ float product(const uint4 (&k)[kHalves]) const {
    float sums[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float x[8];
      unpack(k[half], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i % 2] = fmaf(x[i], q[half][i], sums[i % 2]);
    }
    return sums[0] + sums[1];
  }
  __device__ void scale_to(float most) {
    const float factor = fast_exp(largest - most);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int i = 0; i < 8; ++i) y[half][i] *= factor;
    n *= factor;
    largest = most;
  }
};

// Waits for the new token: every thread for one number, or for few.
__device__ void load_token(const StepCall& step, const StepShare& own, const Tagged& awaited, NewToken& token) {
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), half = cache.qk_dim / 2;
  const int v_from = 2 * cache.qk_dim, end = v_from + cache.v_dim;
#pragma unroll 1
  for (int i = thread; i < end; i += kThreads) {
    if (i >= v_from) {
      const int of = i - v_from;
      float v = step.dt != nullptr ? 0 : awaited.wait_activation(own.v + of), raw = v;
      if (step.dt != nullptr) {
        const float2 both = awaited.wait_activation_and_number(own.v + of, own.dt);
        raw = both.x;
        v = both.x * both.y;
      }
      token.raw_v[of] = raw;
      reinterpret_cast<uint16_t*>(token.v)[of] = static_cast<uint16_t>(bits_of(v));
      continue;
    }
    const bool is_q = i < cache.qk_dim;
    const int of = is_q ? i : i - cache.qk_dim;
    const uint32_t* const from = is_q ? own.q : own.k;
    uint32_t bits;
    if (step.turns != nullptr) {
      const bool is_first = step.halves ? of < half : of % 2 == 0;
      const int pair = step.halves ? (is_first ? of : of - half) : of / 2, distance = step.halves ? half : 1;
      // The angle is kept in turns: the whole ones drop out in double precision.
      const double turns = static_cast<double>(own.position) * step.turns[pair];
      float sine, cosine;
      sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine, &cosine);
      const float2 both = awaited.wait_activations(from + of, from + (is_first ? of + distance : of - distance));
      bits = bits_of(is_first ? both.x * cosine - both.y * sine : both.x * cosine + both.y * sine);
    } else {
      bits = awaited.wait_word(from + of);
    }
    if (is_q)
      token.q[of] = cache.scale * value_of(bits);
    else
      reinterpret_cast<uint16_t*>(token.k)[of] = static_cast<uint16_t>(bits);
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

// The result of a head: what all blocks' sums come to, with D ⊙ v.
__device__ void write_output(const StepCall& step, const StepShare& own, const NewToken& token, float y, float n,
                             float d, int column, const Tagged& written) {
  const Cache& cache = step.cache;
  if (cache.sum) y = normalized(cache.score, y, n);
  if (step.d != nullptr) y = fmaf(d, token.raw_v[column], y);
  written.activation(own.out, column, y);
}

// What the lane has of the sum over the blocks of column c, or in the last 16 lanes of the normalizer, scaled by the
// largest exponent of all.
__device__ float sum_of_blocks(const StepCall& step, const StepShare& own, int c, const Tagged& written) {
  const int lane = lane_of_thread(), v_dim = step.cache.v_dim;
  float sum = 0, largest = kNoExponent;
#pragma unroll 1
  for (int part = lane % 16; part < step.blocks; part += 16) {
    const uint64_t* const from = own.partials + part * step.partial_width;
    const float2 both = written.wait_partials(from + (lane < 16 ? c : v_dim), from + v_dim + 1);
    const float larger = fmaxf(largest, both.y);
    sum = sum * fast_exp(largest - larger) + both.x * fast_exp(both.y - larger);
    largest = larger;
  }
  float most = largest;
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
  return sum * fast_exp(largest - most);
}

// Adds up the warps' sums, and then the blocks'. `d`: of the first column of this thread, or of its warp where a head
// has several blocks.
__device__ void combine(const StepCall& step, const StepShare& own, const NewToken& token, float d,
                        const Tagged& written, const Memory& memory) {
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread(), lane = lane_of_thread();
  const int v_dim = step.cache.v_dim, ld = step.partial_width;
  if (thread < ld) {
    float y = 0, n = 0, most = kNoExponent;
    if (step.softmax) {
      float largest[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, largest[w] = memory.largest[w]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = fast_exp(largest[w] - most);
        if (thread < v_dim) y = fmaf(factor, memory.values[w][thread], y);
        n = fmaf(factor, memory.normalizers[w], n);
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (thread < v_dim) y += memory.values[w][thread];
        n += memory.normalizers[w];
      }
    }
    if (step.blocks > 1)
      written.partial(own.partials + own.block * ld + thread, thread < v_dim ? y : thread == v_dim ? n : most);
    else if (thread < v_dim)
      write_output(step, own, token, y, n, d, thread, written);
  }
  if (step.blocks == 1) return;
    // The blocks of a head share out its columns. A warp adds up one: half of it y, the others n.
#pragma unroll 1
  for (int c = own.column + warp; c < own.columns_end; c += kWarps) {
    float sum = 0;
    if (step.softmax) {
      sum = sum_of_blocks(step, own, c, written);
    } else {
#pragma unroll 1
      for (int part = lane % 16; part < step.blocks; part += 16)
        sum += written.wait_partial(own.partials + part * ld + (lane < 16 ? c : v_dim));
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    const float n = __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
    if (c != own.column + warp && step.d != nullptr) d = own.d[c];
    if (lane == 0) write_output(step, own, token, sum, n, d, c, written);
  }
}

// Adds the tokens of a window to the warp's sums in shared memory.
template <bool kSoftmax, int kHalves>
__device__ void add_window(const StepCall& step, const StepShare& own, const StepArea& from, const NewToken& token,
                           StageCursor& cursor, Memory& memory) {
  using Sums = TokenSums<kSoftmax, kHalves>;
  const int warp = warp_of_thread(), lane = lane_of_thread();
  const int all = own.tokens, at_once = min(all, step.first_tokens), each = step.chunk_tokens, stages = step.stages;
  if (kSoftmax && lane == 0) memory.largest[warp] = kNoExponent;
  if (all <= at_once && Sums::first_of_warp() >= at_once + (own.has_new ? 1 : 0)) return;
  const Polynomial polynomial = step.polynomial;
  Sums sums(step, token);
  TokenChunk chunk{WindowArea(step.cache, step.first_tokens, from.window), at_once, own.has_new};
#pragma unroll 1
  for (int done = at_once;; done += each) {
    if (kSoftmax && each > kChunkTokens)
      sums.template add<4>(chunk, token, polynomial);
    else
      sums.template add<2>(chunk, token, polynomial);
    if (done > at_once) {
      __syncwarp();
      if (lane == 0) memory.chunk_used[cursor.stage].arrive();
      cursor.advance(stages);
    }
    if (done >= all) break;
    memory.chunk_fetched[cursor.stage].wait(cursor.round);
    chunk = {WindowArea(step.cache, each, from.stage(step, cursor.stage)), min(each, all - done), false};
  }
  __syncwarp();
  sums.add_to(memory.values[warp]);
  if (lane == 0) {
    memory.normalizers[warp] += sums.n;
    if (kSoftmax) memory.largest[warp] = sums.largest;
  }
}

__device__ void add_window(const StepCall& step, const StepShare& own, const StepArea& from, const NewToken& token,
                           StageCursor& cursor, Memory& memory) {
  const bool wide = max(step.cache.qk_dim, step.cache.v_dim) > 64;
  if (step.softmax)
    wide ? add_window<true, 2>(step, own, from, token, cursor, memory)
         : add_window<true, 1>(step, own, from, token, cursor, memory);
  else
    wide ? add_window<false, 2>(step, own, from, token, cursor, memory)
         : add_window<false, 1>(step, own, from, token, cursor, memory);
}

// Which rows of a state a thread has: a warp reads whole rows, a thread four columns of them.
struct RowGroup {
  int vectors, each, column, first, step;  // rows first, first + step, ...

  __device__ explicit RowGroup(const StepCall& call) : vectors(call.cache.v_dim / 4), each(call.rows_at_once) {
    const int of_warp = lane_of_thread() * call.part_of_row >> 16;
    column = lane_of_thread() - of_warp * vectors;
    step = each * kWarps;
    first = of_warp < each ? warp_of_thread() * each + of_warp : 1 << 16;  // of no row
  }
};

constexpr int kRowsAtOnce = 128 / kWarps;  // that a thread loads before the input is waited for

__device__ void load_rows(float4 (&x)[kRowsAtOnce], const StepCall& call, const StepArea& from, int rows) {
  const RowGroup own(call);
  const float4* const values = reinterpret_cast<const float4*>(from.values) + own.column;
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int r = own.first + i * own.step;
    x[i] = r < rows ? values[r * own.vectors] : float4{0, 0, 0, 0};
  }
}

// The sum φᵀ S of the warp for every column, in the lanes of the first row.
__device__ float4 sum_rows(const float4 (&x)[kRowsAtOnce], const StepCall& call, const StepArea& from, int rows,
                           const float* phi) {
  const RowGroup own(call);
  float4 y = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int r = own.first + i * own.step;
    add_row(y, r < rows ? phi[r] : 0, x[i]);
  }
#pragma unroll 1
  for (int r = own.first + kRowsAtOnce * own.step; r < rows; r += own.step)
    add_row(y, phi[r], reinterpret_cast<const float4*>(from.values)[r * own.vectors + own.column]);
  float4 all = y;
#pragma unroll 1
  for (int i = 1; i < own.each; ++i) {
    const int other = own.column + i * own.vectors;
    all.x += __shfl_sync(0xFFFFFFFFu, y.x, other);
    all.y += __shfl_sync(0xFFFFFFFFu, y.y, other);
    all.z += __shfl_sync(0xFFFFFFFFu, y.z, other);
    all.w += __shfl_sync(0xFFFFFFFFu, y.w, other);
  }
  return all;
}

// What the rows of a state add: sums of the warps in shared memory, which stay there from piece to piece.
__device__ void add_state(const TokenPiece& piece, const StepArea& from, const float4 (&x)[kRowsAtOnce], int rows,
                          const NewToken& token, const ThreadState& state, Memory& memory) {
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread(), lane = lane_of_thread();
  const Cache& cache = piece.step.cache;
  float4 y = {0, 0, 0, 0};
  float n = 0;
  if (rows > 0) {
#pragma unroll
    for (int i = 0; i < kMostStateRows / kThreads; ++i)
      if (thread + i * kThreads < rows)
        memory.phi[thread + i * kThreads] = token.left * state.features[i].of<2>(token.q);
    sync_compute_warps();
    y = sum_rows(x, piece.step, from, rows, memory.phi);
    if (cache.sum) {
#pragma unroll 1
      for (int r = thread; r < rows; r += kThreads)
        n = fmaf(memory.phi[r], reinterpret_cast<const float*>(from.normalizers)[r], n);
      n = warp_sum(n);
    }
  }
  if (lane < cache.v_dim / 4) {
    float4& sum = reinterpret_cast<float4*>(memory.values[warp])[lane];
    if (!piece.first) add_row(y, 1, sum);
    sum = y;
  }
  if (lane == 0) memory.normalizers[warp] = piece.first ? n : memory.normalizers[warp] + n;
}

__device__ void run_step(const TokenPiece& piece, Barrier& used, char* area, const StepShare& own, unsigned first_tag,
                         ThreadState& state, Memory& memory) {
  if (!own.active) return used.arrive();
  const StepCall& step = piece.step;
  const Cache& cache = step.cache;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_of_thread();
  const Tagged written(first_tag + piece.operation);
  const StepArea from(piece, area);
  if (own.rows > 0 && own.first != state.first_row) make_features(state, cache, own.first);
  float4 x[kRowsAtOnce];
  load_rows(x, step, from, own.rows);
  float d = 0;
  if (step.d != nullptr && piece.last) {
    const int c = step.blocks == 1 ? thread : own.column + warp;
    if (c < cache.v_dim) d = own.d[c];
  }
  if (piece.first) load_token(step, own, Tagged(first_tag + step.inputs_from), memory.tokens[state.steps++ % 2]);
  const NewToken& token = memory.tokens[(state.steps - 1) % 2];
  sync_compute_warps();
  add_state(piece, from, x, own.rows, token, state, memory);
  if (piece.first) add_window(step, own, from, token, state.cursor, memory);
  used.arrive();
  if (piece.last) {
    sync_compute_warps();
    combine(step, own, token, d, written, memory);
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
  Memory& memory = *in_register(&static_memory);
  uint4* const dynamic = in_register(dynamic_memory);
  uint4* const activations = dynamic + warp_of_thread() * program.warp_activations;  // of this warp
  WarpSums* const sums = reinterpret_cast<WarpSums*>(dynamic + kWarps * program.warp_activations);
  char* const ring = reinterpret_cast<char*>(sums) + program.sums;
  if (thread < kPieceSlots) {
    memory.described[thread].init(32);
    memory.fetched[thread].init(64);
    memory.used[thread].init(32 * (kWarps + kFinishers));
  }
  if (thread < 2) {
    memory.multiplied[thread].init(32 * kWarps);
    memory.finished[thread].init(32 * kFinishers);
  }
  if (thread < kMostStages) {
    memory.chunk_fetched[thread].init(1);
    memory.chunk_used[thread].init(kWarps);
  }
  if (thread < kPieceSlots) fence_barriers();
  start_next();
  __syncthreads();
  if (thread >= kAllThreads - 32) return fetch(program, memory, ring);
  if (thread >= kAllThreads - 64) return fetch_windows(program, memory, ring);

  wait_for_previous();
  const unsigned first_tag = __ldcg(program.tags + blockIdx.x);
  const bool finishes = thread >= kThreads;
  ThreadState state{};
  state.first_row = -1;
  for (int p = 0; p < program.count; ++p) {
    const int slot = p % kPieceSlots;
    Barrier& used = memory.used[slot];
    memory.fetched[slot].wait(p / kPieceSlots);
    const TokenPiece& piece = *reinterpret_cast<const TokenPiece*>(memory.pieces[slot]);
    if (finishes) {
      if (piece.kind == TokenPiece::Kind::linear)
        finish_product(piece, used, sums, first_tag, state.products, memory);
      else
        used.arrive();
    } else if (piece.kind == TokenPiece::Kind::linear) {
      multiply(piece, used, reinterpret_cast<const uint4*>(ring + piece.at), activations, sums, first_tag, state,
               memory);
    } else if (piece.kind == TokenPiece::Kind::step) {
      run_step(piece, used, ring + piece.at, memory.shares[slot], first_tag, state, memory);
    } else {
      embed(program, piece.embedding, Tagged(first_tag + piece.operation));
      used.arrive();
    }
    // What this block has waited for by now was computed after all steps, so after all blocks have read the records.
    if (piece.first && piece.final && blockIdx.x == 0 && finishes)
      for (int i = thread - kThreads; i < program.cache_count * program.rows; i += 32 * kFinishers) {
        SlotRecord& record = program.caches[i / program.rows][__ldcg(program.slots + i % program.rows)];
        record.pending += 1;
        record.tokens += 1;
      }
  }
  if (thread == kThreads) program.tags[blockIdx.x] = first_tag + program.operations;
}

#endif

}  // namespace

SharedMemoryPlan::SharedMemoryPlan(int64_t rows, int64_t widest) {
  constexpr int64_t kLine = 128, kSpare = 512;  // for the alignment of the parts
  const auto lines = [](int64_t bytes) { return static_cast<int>(std::max<int64_t>(bytes, 0) / kLine * kLine); };
  warp_activations = static_cast<int>(rows) * (warp_units(static_cast<int>(widest)) + 1) * 16;
  sums = lines(2 * rows * static_cast<int64_t>(sizeof(WarpSums)) + kLine - 1);
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
  const int bytes = SharedMemoryPlan(1, 8).all;
  check(cudaFuncSetAttribute(token_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "token_program");
  // Kernels that overlap ask for the same split of cache and shared memory (gpu/launch.cuh).
  check(cudaFuncSetAttribute(token_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "token_program");
  entry->second = resident_token_blocks(bytes) >= multiprocessors();
  return entry->second;
}

bool run_token_kernel(Device device, const TokenWork& work, int bytes) {
  cudaLaunchConfig_t config{};
  config.stream = stream(device);
  config.gridDim = static_cast<unsigned>(multiprocessors());
  config.blockDim = kAllThreads;
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  // Blocks wait for each other, so all must run at once: a cooperative launch starts none before all fit on the device,
  // and fails where they never do, also when another process holds part of it.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = launches_early() ? 2 : 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, token_kernel, work);
  if (status == cudaErrorCooperativeLaunchTooLarge) {
    (void)cudaGetLastError();  // nothing was launched
    return false;
  }
  check(status, "token_program");
  return true;
}

}  // namespace furious::cuda
