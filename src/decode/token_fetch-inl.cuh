// The two warps of the token kernel that bring weights, states and windows into the ring.
#pragma once

#include "decode/token_memory-inl.cuh"

namespace furious::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The copies of a block go no faster than memory can serve all blocks: more of them at once would only make the words
// that travel between the blocks wait.
struct Pace {
  int cycles;     // for 1 KiB of a block
  unsigned next;  // when a copy may go

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
  state += static_cast<int64_t>(cache.state_head(own.head)) * cache.state_numbers;
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
  Pace pace{2 * program.weight_cycles, static_cast<unsigned>(clock())}, state_pace{kStateCycles, pace.next};
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
  Pace pace{2 * program.weight_cycles, static_cast<unsigned>(clock())}, window_pace{kStateCycles, pace.next};
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

#endif

}  // namespace
}  // namespace furious::cuda
