// What the kernels of the parallel form on Hopper share.
//
// A block owns rows (queries, or keys) of one head. Its warpgroups multiply, 64 rows each; the first warps of one more
// have tiles of the other side copied ahead and work out decay factors. Tiles far from the block's own rows take
// their factors relative to A at the block's edge; the forward pass keeps sums over them relative to it, backward rows
// have a factor of their own. Tiles beside the own rows take theirs relative to their own edge, times a factor per row;
// only the diagonal tile has an exponential per element. All factors are at most 1.
#pragma once

#include "gpu/device.h"
#include "gpu/hopper.cuh"
#include "gpu/tensor_map.h"
#include "ops/mixer/gpu/parallel-inl.cuh"

namespace furious::cuda {

// Where a tile lies relative to a warpgroup's rows, and whether documents end in it.
enum class Place { far, near, near_documents, diagonal };
template <Place kPlace>
using PlaceConstant = std::integral_constant<Place, kPlace>;

// Calls f with the place as a constant.
template <class F>
__device__ void with_place(bool diagonal, bool documents, bool near, F&& f) {
  if (diagonal)
    f(PlaceConstant<Place::diagonal>());
  else if (documents)
    f(PlaceConstant<Place::near_documents>());
  else if (near)
    f(PlaceConstant<Place::near>());
  else
    f(PlaceConstant<Place::far>());
}

// s = rows · tileᵀ, over 16·kSteps columns, by a warpgroup. Rows are read from shared memory by the product, or loaded
// into registers for every tile, which occupies it as long; on an H200 the forward pass of exponentials is 6 % faster
// so, everything else slower. They cannot stay in registers: the assembler of CUDA 13.0 takes those of an operand that
// is the same through a loop for other things (seen: wrong results from the second turn on).
template <int kSteps, bool kLoadRows = false>
__device__ void multiply_tiles(float (&s)[kTile / 8][4], unsigned char* rows, const unsigned char* tile) {
  [[maybe_unused]] const uint64_t a = operand(rows, 0), b = operand(tile, 0);
  if constexpr (kLoadRows) {
    uint32_t loaded[kSteps][4];
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      panel_of(rows + step / 4 * kPanelBytes).a_fragment(loaded[step], row, step % 4);
    fence_products();  // those registers were written behind the fence of the caller
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma<0>(s, loaded[step], columns_at(b, step), step > 0);
  } else {
    wgmma_new<0, 0>(s, a, b);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) wgmma<0, 0>(s, columns_at(a, step), columns_at(b, step), 1);
  }
}

// Blocks stay on their multiprocessor and compute one piece of work after the other, so that copies for the next run
// while results of the last are written. A piece of work: rows of a head, with tiles of the other side from `tile` on.
struct Work {
  int row0, end;
  int head, batch;  // head < 0: there is no more work
  int tile;

  __device__ bool has_rows() const { return head >= 0 && row0 < end; }
};

// Pieces of work are numbered; blocks take the next number when they are ready for it, which `taken` counts. The pieces
// of `together` lines (a head, or a chunk of one) follow each other, the longest of each line first.
struct Queue {
  int count;
  int together;
  int* taken;
};

// Rows begin with a tile, so the first piece of a head may have rows before the first query, which are zeros and are
// not stored.
template <int kRows, bool kLastFirst>
__device__ Work work_at(const Parallel& m, const Queue& queue, int number) {
  const int length = static_cast<int>(m.length), chunk = m.chunk ? m.chunk : length;
  const int begin = m.first / kTile * kTile;
  const int blocks = (min(chunk, length) - begin + kRows - 1) / kRows, chunks = (length + chunk - 1) / chunk;
  const int first = number / (blocks * queue.together) * queue.together;  // line of the group of lines
  const int together = min(queue.together, queue.count / blocks - first), rest = number - first * blocks;
  const int line = first + rest % together, i = rest / together;
  const int c = line % chunks, head = line / chunks;
  const int heads = static_cast<int>(m.heads);
  const int row0 = begin + c * chunk + (kLastFirst ? blocks - 1 - i : i) * kRows;
  return {row0, min(min(row0 + kRows, (c + 1) * chunk), length), head % heads, head / heads, 0};
}

// One block for every multiprocessor, or for every piece of work where there are fewer.
template <class Layout, class Kernel, class Maps>
void launch_queue(Kernel kernel, const char* name, const MixerCall& call, const Maps& maps, const Parallel& m,
                  int together = 1) {
  const MixerShape& shape = call.shape;
  const int64_t chunk = m.chunk ? m.chunk : shape.length, begin = shape.first_query / kTile * kTile;
  const int64_t count = blocks_for(std::min(chunk, shape.length) - begin, Layout::kRows) *
                        static_cast<int64_t>(blocks_for(shape.length, chunk)) * shape.heads * shape.batch;
  const Device device = call.inputs.q.device();
  const Tensor taken = Tensor::empty({1}, DType::i32, device);
  check(cudaMemsetAsync(taken.raw(), 0, sizeof(int32_t), stream(device)), name);
  allow_shared_memory(kernel, sizeof(Layout));
  kernel<<<static_cast<unsigned>(std::min<int64_t>(count, multiprocessors())), Layout::kThreads, sizeof(Layout),
           stream(device)>>>(maps, m, Queue{static_cast<int>(count), together, taken.data<int32_t>()});
  check_launch(name);
}

// Of tiles `first` + step·i, i < count, how many decay has erased; they come first in that order. By a warp.
template <class Erased>
__device__ int count_erased_by_warp(int count, Erased&& erased) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int total = 0;
  for (int found = 32; found == 32; total += found)
    found = __popc(__ballot_sync(0xFFFFFFFFu, total + lane < count && erased(total + lane)));
  return total;
}

// The member `sync` of every layout of shared memory. Own rows have kSlots places, tiles kStages.
template <int kSlots, int kStages>
struct Barriers {
  Barrier full[kStages], empty[kStages];  // tiles
  Barrier known[kSlots];                  // a slot's work
  Barrier ready[kSlots], unused[kSlots];  // its rows
  Work work[kSlots];
};

// By all threads, before anything else uses the barriers. A stage is full when a warp has written what belongs to its
// columns and the copies have come. Own rows are ready when the copies have come, the warp that issued them has written
// the first tile, and the warp of fill_rows() has written what belongs to the rows. kReaders: threads that read a
// slot's work besides the warps that multiply.
template <int kReaders = 0, class Shared>
__device__ void init_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      shared.sync.full[i].init(32 + 1);
      shared.sync.empty[i].init(4 * Shared::kGroups);
    }
    for (int i = 0; i < Shared::kSlots; ++i) {
      shared.sync.known[i].init(1);
      shared.sync.ready[i].init(2 + 32);
      shared.sync.unused[i].init(4 * Shared::kGroups + kReaders);
    }
    fence_barriers();
  }
  __syncthreads();
}

// A warp of a warpgroup that multiplies has read what the barrier guards.
__device__ inline void release(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// By one warp: takes pieces of work. copy_rows(work, slot), by one lane, has own rows copied; copy_tiles(work, slot,
// first), by all, has tiles copied after it has called first(tile). kInOrder: a piece is taken only when it is about to
// be computed, since others may wait for it; otherwise one ahead.
template <bool kLastFirst, bool kInOrder, class Shared, class CopyRows, class CopyTiles>
__device__ void hand_out(Shared& shared, const Parallel& m, const Queue& queue, int row_bytes, CopyRows&& copy_rows,
                         CopyTiles&& copy_tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto take = [&] { return lane == 0 ? atomicAdd(queue.taken, 1) : 0; };
  int next = take();
  for (Pipe<Shared::kSlots> slots;; slots.next()) {
    const int slot = slots.stage, number = __shfl_sync(0xFFFFFFFFu, next, 0);
    if (!kInOrder) next = take();
    if (slots.phase > 0) shared.sync.unused[slot].wait(slots.phase - 1);
    const Work work =
        number < queue.count ? work_at<Shared::kRows, kLastFirst>(m, queue, number) : Work{0, 0, -1, 0, 0};
    if (lane == 0) {
      shared.sync.work[slot] = work;
      shared.sync.known[slot].arrive();
      if (work.has_rows()) {
        shared.sync.ready[slot].arrive_and_expect(row_bytes);
        copy_rows(work, slot);
      } else {
        shared.sync.ready[slot].arrive();
        shared.sync.ready[slot].arrive();
      }
    }
    if (work.has_rows())
      copy_tiles(work, slot, [&](int tile) {
        if (lane > 0) return;
        shared.sync.work[slot].tile = tile;
        shared.sync.ready[slot].arrive();
      });
    if (work.head < 0) return;
    if (kInOrder) next = take();
  }
}

// By one warp: fill(work, slot, i, row) writes what belongs to the i-th row of a piece of work; `row` is one it has.
template <class Shared, class Fill>
__device__ void fill_rows(Shared& shared, Fill&& fill) {
  for (Pipe<Shared::kSlots> slots;; slots.next()) {
    const int slot = slots.stage;
    shared.sync.known[slot].wait(slots.phase);
    const Work& work = shared.sync.work[slot];
    const int row0 = work.row0, end = work.end, head = work.head, batch = work.batch;
    if (head >= 0 && row0 < end)
#pragma unroll 2
      for (int i = static_cast<int>(threadIdx.x) % 32; i < Shared::kRows; i += 32)
        fill(Work{row0, end, head, batch, 0}, slot, i, min(row0 + i, end - 1));
    shared.sync.ready[slot].arrive();
    if (head < 0) return;
  }
}

// By one warp: has tiles of keys and values copied, with the decay of their columns, for the queries of `work`.
template <Score kScore, class Shared, class First>
__device__ void copy_keys(Shared& shared, Pipe<Shared::kStages>& pipe, const CUtensorMap& k, const CUtensorMap& v,
                          const Parallel& m, const Work& work, First&& first_is) {
  constexpr bool kExponential = kScore == Score::exponential;
  const int lane = static_cast<int>(threadIdx.x) % 32, length = static_cast<int>(m.length);
  const double* const a = m.decay_of(work.batch, work.head);
  const float scale = score_scale<kScore>(m.scale);
  const double reference = a ? a[work.row0] : 0.0;
  int first = m.starts ? m.starts[work.batch * m.length + work.row0] : 0;
  if (m.chunk) first = max(first, work.row0 / m.chunk * m.chunk);
  first /= kTile;
  if (a)
    first += count_erased_by_warp(work.row0 / kTile - first, [&](int i) {
      return static_cast<float>(reference - a[(first + i) * kTile + kTile - 1]) < static_cast<float>(kErased);
    });
  first_is(first);
  // Read one tile ahead.
  double own[2] = {};
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (a) own[i] = a[min(tile * kTile + i * 32 + lane, length - 1)];
  };
  load(first);
  const int k_head = work.head / m.k.group, v_head = work.head / m.v.group;
  for (int tile = first; tile <= (work.end - 1) / kTile; ++tile, pipe.next()) {
    const int stage = pipe.stage, key0 = tile * kTile;
    if (pipe.phase > 0) shared.sync.empty[stage].wait(pipe.phase - 1);
    if (lane == 0) {
      shared.sync.full[stage].arrive_and_expect(2 * Shared::kPanels * kPanelBytes);
      for (int panel = 0; panel < Shared::kPanels; ++panel) {
        copy_tile(shared.keys[stage][panel], k, shared.sync.full[stage], panel * 64, key0, k_head, work.batch);
        copy_tile(shared.values[stage][panel], v, shared.sync.full[stage], panel * 64, key0, v_head, work.batch);
      }
    }
    __syncwarp();
    const double last = __shfl_sync(0xFFFFFFFFu, own[1], 31);
    const double base = key0 >= work.row0 ? last : reference;
    float column[2], local[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      local[i] = static_cast<float>(own[i] - reference) * kLog2e;
      column[i] = kExponential ? -local[i] : scale * fast_exp2(static_cast<float>(base - own[i]) * kLog2e);
    }
    load(tile + 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.columns[stage][i * 32 + lane] = column[i];
      shared.locals[stage][i * 32 + lane] = local[i];
    }
    shared.sync.full[stage].arrive();
  }
}

// Results of a product as the operand A of the next: 16 columns each.
template <int kN>
__device__ void pack_rows(uint32_t (&p)[kN / 2][4], const float (&s)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    p[i][0] = pack(s[2 * i][0], s[2 * i][1]);
    p[i][1] = pack(s[2 * i][2], s[2 * i][3]);
    p[i][2] = pack(s[2 * i + 1][0], s[2 * i + 1][1]);
    p[i][3] = pack(s[2 * i + 1][2], s[2 * i + 1][3]);
  }
}

template <int kN>
__device__ void clear(float (&acc)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i][e] = 0;
}

// The column of a tile that element e of group n of a result belongs to, less that of the lane's first: a constant.
__device__ constexpr int column_of(int n, int e) {
  return n * 8 + e % 2;
}

}  // namespace furious::cuda
