// Choosing tokens on a GPU: a row of logits is divided among the blocks of a cluster (one block where there are no
// clusters), each with its slice in shared memory. What the blocks find goes from each to all through distributed
// shared memory, so that all of them come to the same decisions.
//
// Top-k and top-p reject what was drawn and is not kept, instead of finding the last token that is (sampling.h). A
// round needs one pass over the slice and two barriers of the cluster, and mostly there is one.
//
// All of this runs once for a token, so instructions are mostly fetched for the first time: loops are not unrolled
// beyond what hides the latency of shared memory.
#include <cooperative_groups.h>

#include "gpu/launch.cuh"
#include "ops/sampling/sampling_kernels.h"
#include "ops/sampling/weights.h"

namespace furious::cuda {
namespace {

using namespace sampling;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostBlocks = 8;
constexpr int kSliceStep = kThreads;  // slices are multiples of it
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int kColumns = 1 + static_cast<int>(kMostLogProbabilities);
constexpr int kWindow = static_cast<int>(kRepetitionWindow);

// The options but for the biases, which follow them.
using Options = SlotOptions::Head;
constexpr int kOptionWords = sizeof(Options) / sizeof(uint32_t);

// What the blocks of a row send to each other.
enum Message {
  kRawBest,
  kRawMass,
  kBest,
  kNotFinite,
  kAllMass,
  kKeptMass,
  kAbove,
  kMessages = kAbove + 2 * kThresholds
};

struct Shared {
  alignas(Options) uint32_t option_words[kOptionWords];
  alignas(16) uint64_t message[kMessages][kMostBlocks];  // of every block
  uint64_t of_warp[2 * kThresholds][kWarps];
  uint64_t drawn[kTrials];  // ranks
  int32_t recent[kRepetitionWindow];
  uint64_t best[kMostBlocks][kMostLogProbabilities];
};

struct Arguments {
  const float* logits;
  int64_t stride;
  int vocabulary, slice;
  const int32_t* slots;
  const SlotOptions* options;
  SlotHistory* histories;
  int32_t* ids;
  int32_t* best;
  float* log_probabilities;
  float* scratch;  // [rows, blocks, 2, slice] where slices are too large for shared memory
};

// The blocks of a row.
struct Group {
  int rank, size;

  template <class T>
  __device__ T* in_block(T* here, int other) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) return cooperative_groups::this_cluster().map_shared_rank(here, other);
#endif
    return here;
  }
  // No block may write into another before that has started: arrive() once at the start, wait() before the first write.
  __device__ void arrive() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
  }
  __device__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  __device__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) return cooperative_groups::this_cluster().sync();
#endif
    __syncthreads();
  }
};

// The slice of a block: elements [0, count), the first of which is token `first`. A thread has `each` neighbours, which
// lie kThreads apart in memory: threads access different banks.
struct Slice {
  float* logits;
  uint32_t* weights;  // written where a token is drawn
  int first, count, each;

  __device__ int place_of(int element) const { return element % each * kThreads + element / each; }

  // Calls f(place, id) for the elements of this thread, in order.
  template <class F>
  __device__ void for_each(F&& f) const {
    const int begin = static_cast<int>(threadIdx.x) * each, end = min(each, count - begin);
#pragma unroll 2
    for (int i = 0; i < end; ++i)
      f(i * kThreads + static_cast<int>(threadIdx.x), static_cast<uint32_t>(first + begin + i));
  }
};

__device__ uint32_t high_word(uint64_t x) {
  return static_cast<uint32_t>(x >> 32);
}

struct Larger {
  __device__ uint64_t of_warp(uint64_t x) const {
    const uint32_t high = __reduce_max_sync(kAllLanes, high_word(x));
    const uint32_t low = high_word(x) == high ? static_cast<uint32_t>(x) : 0;
    return static_cast<uint64_t>(high) << 32 | __reduce_max_sync(kAllLanes, low);
  }
};
struct Sum {
  // Of numbers below 2^51.
  __device__ uint64_t of_warp(uint64_t x) const {
    const uint32_t low = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(x) & 0xFFFFFFu);
    return (static_cast<uint64_t>(__reduce_add_sync(kAllLanes, static_cast<uint32_t>(x >> 24))) << 24) + low;
  }
};
// Combines a value of every warp, for all lanes of the warp that calls it. 0 must be neutral.
template <class Combine>
__device__ uint64_t of_all_warps(const uint64_t* of_warp, Combine combine) {
  const unsigned lane = threadIdx.x % 32;
  return combine.of_warp(lane < kWarps ? of_warp[lane] : 0);
}
// Combines a value of every thread of the block, for the threads of warp 0. of_warp[0] may be used again after another
// barrier.
template <class Combine>
__device__ uint64_t reduce_block(Shared& shared, uint64_t x, Combine combine) {
  x = combine.of_warp(x);
  if (threadIdx.x % 32 == 0) shared.of_warp[0][threadIdx.x / 32] = x;
  __syncthreads();
  return threadIdx.x < 32 ? of_all_warps(shared.of_warp[0], combine) : x;
}

// From one warp of each block to all blocks, which can read it after group.sync().
__device__ void send_by_warp(const Group& group, Shared& shared, int message, uint64_t value) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  if (lane < group.size) *group.in_block(&shared.message[message][group.rank], lane) = value;
}
// The same, by warp 0.
__device__ void send(const Group& group, Shared& shared, Message message, uint64_t value) {
  if (threadIdx.x < 32) send_by_warp(group, shared, message, value);
}
// By all lanes of a warp. 0 must be neutral.
template <class Combine>
__device__ uint64_t received(const Group& group, const Shared& shared, int message, Combine combine) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  return combine.of_warp(lane < group.size ? shared.message[message][lane] : 0);
}

__device__ void load_options(Shared& shared, const SlotOptions& from) {
  if (threadIdx.x < kOptionWords)
    shared.option_words[threadIdx.x] = __ldcg(reinterpret_cast<const uint32_t*>(&from.head) + threadIdx.x);
}
__device__ const Options& options_of(const Shared& shared) {
  return *reinterpret_cast<const Options*>(shared.option_words);
}

struct Loaded {
  bool finite = true;
  uint64_t best = 0;  // the largest rank

  __device__ float add(float x, int id) {
    finite = finite && is_finite(x);
    x = usable(x);
    best = max(best, rank_of(x, static_cast<uint32_t>(id)));
    return x;
  }
};

// Loads the slice. The first loads are issued when this is made, so that others can be issued before their results are
// waited for.
struct SliceLoad {
  static constexpr int kFirst = 2;
  const Slice& slice;
  const float* from;
  int packs;
  float4 first[kFirst];

  __device__ SliceLoad(const Slice& to, const float* row) : slice(to), from(row + to.first) {
    packs = reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0 ? slice.count / 4 : 0;
#pragma unroll
    for (int i = 0; i < kFirst; ++i)
      if (static_cast<int>(threadIdx.x) + i * kThreads < packs) first[i] = pack(threadIdx.x + i * kThreads);
  }
  __device__ float4 pack(unsigned i) const {
    return __ldcg(reinterpret_cast<const float4*>(from) + i);
  }
  // Returns what this thread has loaded.
  __device__ Loaded finish() const {
    const int thread = static_cast<int>(threadIdx.x);
    Loaded loaded;
    const auto keep = [&](int i, const float4& x) {
      int row = 4 * i % slice.each, of_thread = 4 * i / slice.each;
      const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        slice.logits[row * kThreads + of_thread] = loaded.add(four[e], slice.first + 4 * i + e);
        if (++row < slice.each) continue;
        row = 0;
        of_thread += 1;
      }
    };
#pragma unroll
    for (int i = 0; i < kFirst; ++i)
      if (thread + i * kThreads < packs) keep(thread + i * kThreads, first[i]);
#pragma unroll 1
    for (int i = thread + kFirst * kThreads; i < packs; i += kThreads) keep(i, pack(static_cast<unsigned>(i)));
#pragma unroll 4
    for (int i = packs * 4 + thread; i < slice.count; i += kThreads)
      slice.logits[slice.place_of(i)] = loaded.add(__ldcg(from + i), slice.first + i);
    return loaded;
  }
};

// Bias and penalties of the tokens of this slice. Ids of biases are all different; of equal tokens of the history the
// first one does it for all.
__device__ void adjust(Shared& shared, const Slice& slice, const SlotOptions& all, const SlotHistory& history) {
  const int thread = static_cast<int>(threadIdx.x);
  const Options& options = options_of(shared);
  for (int i = thread; i < options.biases; i += kThreads) {
    const int element = __ldcg(&all.bias_id[i]) - slice.first;
    if (element < 0 || element >= slice.count) continue;
    float& logit = slice.logits[slice.place_of(element)];
    logit = biased(logit, __ldcg(&all.bias[i]));
  }
  if (options.penalties != 0 && thread < kWindow) shared.recent[thread] = __ldcg(&history.token[thread]);
  __syncthreads();
  if (options.penalties != 0 && thread < kWindow) {
    const int32_t id = shared.recent[thread];
    const int element = id - slice.first;
    if (id >= 0 && element >= 0 && element < slice.count) {
      int count = 0, before = 0;
      for (int i = 0; i < kWindow; ++i) {
        const bool same = shared.recent[i] == id;
        count += same ? 1 : 0;
        before += same && i < thread ? 1 : 0;
      }
      if (before == 0)
        slice.logits[slice.place_of(element)] = penalized(slice.logits[slice.place_of(element)], count,
                                                          options.repetition, options.frequency, options.presence);
    }
  }
  __syncthreads();
}

__device__ uint64_t largest_of_slice(const Slice& slice) {
  uint64_t best = 0;
  slice.for_each([&](int place, uint32_t id) { best = max(best, rank_of(slice.logits[place], id)); });
  return best;
}

// The k most probable tokens of the slice, to block 0.
__device__ void list_best(const Group& group, Shared& shared, const Slice& slice, int k) {
  uint64_t limit = UINT64_MAX;
  for (int i = 0; i < k; ++i) {
    uint64_t best = 0;
    slice.for_each([&](int place, uint32_t id) {
      const uint64_t rank = rank_of(slice.logits[place], id);
      if (rank < limit) best = max(best, rank);
    });
    best = reduce_block(shared, best, Larger());
    if (threadIdx.x == 0) {
      *group.in_block(&shared.best[group.rank][i], 0) = best;
      shared.of_warp[1][0] = best;
    }
    __syncthreads();
    limit = shared.of_warp[1][0];
  }
}

// Block 0 merges the lists of all, in warp 0.
__device__ void write_best(const Group& group, const Shared& shared, int k, double subtract, int32_t* ids,
                           float* log_probabilities) {
  const int lane = static_cast<int>(threadIdx.x);
  if (group.rank != 0 || lane >= 32) return;
  uint64_t limit = UINT64_MAX;
  for (int i = 0; i < static_cast<int>(kMostLogProbabilities); ++i) {
    uint64_t best = 0;
    for (int j = lane; i < k && j < group.size * k; j += 32) {
      const uint64_t rank = shared.best[j / k][j % k];
      if (rank < limit) best = max(best, rank);
    }
    best = Larger().of_warp(best);
    limit = best;
    if (lane > 0) continue;
    ids[1 + i] = best == 0 ? -1 : static_cast<int32_t>(id_of_rank(best));
    log_probabilities[1 + i] =
        best == 0 ? 0.0f : static_cast<float>(static_cast<double>(logit_of_rank(best)) - subtract);
  }
}

// Log-probabilities of the most probable tokens. Returns what is to be subtracted from a logit.
__device__ double find_best(const Group& group, Shared& shared, const Slice& slice, int k, int32_t* ids,
                            float* log_probabilities) {
  send(group, shared, kRawBest, reduce_block(shared, largest_of_slice(slice), Larger()));
  group.sync();
  const float largest = logit_of_rank(received(group, shared, kRawBest, Larger()));
  list_best(group, shared, slice, k);
  uint64_t mass = 0;
  slice.for_each([&](int place, uint32_t) { mass += weight_of(slice.logits[place], largest, kLog2E); });
  send(group, shared, kRawMass, reduce_block(shared, mass, Sum()));
  group.sync();
  mass = received(group, shared, kRawMass, Sum());
  const double subtract = static_cast<double>(largest) + log(static_cast<double>(mass) / kLargestWeight);
  write_best(group, shared, k, subtract, ids, log_probabilities);
  return subtract;
}

// Draws tokens from the logits of all blocks.
struct Draw {
  const Group& group;
  Shared& shared;
  const Slice& slice;
  const Options& options;
  float largest;
  uint64_t position;
  uint64_t floor = 0;  // the largest rank that is not drawn any more
  uint64_t mass = 0;   // of the tokens of this thread that are

  // Computes the weights, of which those below min-p count as zero from then on; and their sums before and after that,
  // to all blocks.
  __device__ void add_up() {
    uint64_t all = 0;
    slice.for_each([&](int place, uint32_t) {
      const uint32_t w = weight_of(slice.logits[place], largest, options.scale), own = w < options.min_weight ? 0 : w;
      all += w;
      mass += own;
      slice.weights[place] = own;
    });
    all = Sum().of_warp(all);
    const uint64_t kept = Sum().of_warp(mass);
    const unsigned warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      shared.of_warp[0][warp] = kept;
      shared.of_warp[1][warp] = all;
    }
    __syncthreads();
    if (warp < 2)
      send_by_warp(group, shared, warp == 0 ? kKeptMass : kAllMass, of_all_warps(shared.of_warp[warp], Sum()));
    group.sync();
  }

  // Finds the tokens that the trials of a round draw: calls found(trial, rank) in one thread of all blocks for each.
  // `of_block`, `of_warp`: masses of all blocks and of the warps of this one.
  template <int trials, class Found>
  __device__ void find(const uint64_t (&wanted)[trials], const uint64_t* of_block, const uint64_t* of_warp,
                       Found&& found) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    static_assert(kWarps + kMostBlocks <= 32);
    uint64_t before = 0;
    if (lane < warp) before = of_warp[lane];
    if (lane >= kWarps && lane - kWarps < group.rank) before = of_block[lane - kWarps];
    before = Sum().of_warp(before);
    bool here = false;
#pragma unroll
    for (int t = 0; t < trials; ++t) here = here || (wanted[t] >= before && wanted[t] - before < of_warp[warp]);
    if (!here) return;
    uint64_t up_to = mass;
#pragma unroll 1
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    before += up_to - mass;
#pragma unroll
    for (int t = 0; t < trials; ++t) {
      if (wanted[t] < before || wanted[t] - before >= mass) continue;
      uint64_t left = wanted[t] - before, chosen = 0;
      slice.for_each([&](int place, uint32_t id) {
        const uint64_t rank = rank_of(slice.logits[place], id);
        const uint64_t w = rank > floor ? slice.weights[place] : 0;
        if (left < w) chosen = rank;
        left = left < w ? UINT64_MAX : left - w;
      });
      found(t, chosen);
    }
  }

  // Number and weights of the tokens above each threshold, to all blocks; `above`: those of this thread.
  __device__ void count_above(const uint64_t (&thresholds)[kThresholds], uint64_t (&above)[kThresholds]) const {
    uint32_t count[kThresholds] = {};
    uint64_t lowest = thresholds[0];
    for (int t = 1; t < kThresholds; ++t) lowest = min(lowest, thresholds[t]);
#pragma unroll
    for (int t = 0; t < kThresholds; ++t) above[t] = 0;
    slice.for_each([&](int place, uint32_t id) {
      const uint64_t rank = rank_of(slice.logits[place], id);
      if (rank <= lowest) return;
      const uint32_t w = slice.weights[place];
#pragma unroll
      for (int t = 0; t < kThresholds; ++t) {
        count[t] += rank > thresholds[t] ? 1 : 0;
        above[t] += rank > thresholds[t] ? w : 0;
      }
    });
    const unsigned warp = threadIdx.x / 32;
#pragma unroll
    for (int t = 0; t < kThresholds; ++t) {
      const uint32_t number = __reduce_add_sync(kAllLanes, count[t]);
      const uint64_t sum = Sum().of_warp(above[t]);
      if (threadIdx.x % 32 == 0) {
        shared.of_warp[2 * t][warp] = number;
        shared.of_warp[2 * t + 1][warp] = sum;
      }
    }
    __syncthreads();
    if (warp < 2 * kThresholds)
      send_by_warp(group, shared, kAbove + static_cast<int>(warp), of_all_warps(shared.of_warp[warp], Sum()));
    group.sync();
  }

  // Returns the rank of a token that top-k and top-p keep, in all threads of all blocks. `bits`: of the first round.
  __device__ uint64_t select(RandomBits bits) {
    const uint64_t enough = enough_of(received(group, shared, kAllMass, Sum()), options.top_p);
    uint64_t left = received(group, shared, kKeptMass, Sum());
    int of_block = kKeptMass, of_warp = 0;
    float most = largest;
#pragma unroll 1
    for (int round = 0;; bits = round_bits(options.seed, position, ++round)) {
      uint64_t wanted[kTrials];
#pragma unroll
      for (int t = 0; t < kTrials; ++t) wanted[t] = drawn_from(left, bits, t);
      find(wanted, shared.message[of_block], shared.of_warp[of_warp], [&](int trial, uint64_t rank) {
#pragma unroll 1
        for (int i = 0; i < group.size; ++i) *group.in_block(&shared.drawn[trial], i) = rank;
      });
      group.sync();
      uint64_t thresholds[kThresholds];
#pragma unroll
      for (int t = 0; t < kTrials; ++t) thresholds[t] = shared.drawn[t];
      add_pivot(thresholds, most);
      uint64_t above_here[kThresholds];
      count_above(thresholds, above_here);
      floor = 0;
#pragma unroll
      for (int t = 0; t < kThresholds; ++t) {
        const uint64_t above = received(group, shared, kAbove + 2 * t + 1, Sum());
        const bool kept = received(group, shared, kAbove + 2 * t, Sum()) < options.top_k && above < enough;
        if (kept && t < kTrials) return thresholds[t];
        if (kept) most = logit_of_rank(thresholds[t]);
        if (kept || thresholds[t] < floor) continue;
        floor = thresholds[t];
        left = above;
        mass = above_here[t];
        of_block = kAbove + 2 * t + 1;
        of_warp = 2 * t + 1;
      }
    }
  }
};

// A cluster for a row.
__global__ void __launch_bounds__(kThreads) choose_kernel(const Arguments arguments, int blocks) {
  extern __shared__ __align__(16) float dynamic[];
  __shared__ Shared shared;
  start_next();
  const Group group{static_cast<int>(blockIdx.x) % blocks, blocks};
  group.arrive();
  const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
  const int first = group.rank * arguments.slice;
  float* const memory =
      arguments.scratch != nullptr ? arguments.scratch + int64_t{blockIdx.x} * 2 * arguments.slice : dynamic;
  const Slice slice{memory, reinterpret_cast<uint32_t*>(memory + arguments.slice), first,
                    max(0, min(arguments.slice, arguments.vocabulary - first)), arguments.slice / kThreads};
  const float* const logits = arguments.logits + row * arguments.stride;
  wait_for_previous();
  const int slot = __ldcg(arguments.slots + row);
  const SliceLoad loading(slice, logits);
  SlotHistory& history = arguments.histories[slot];
  // Read here: the block that has found the token may have written it while others are still at it.
  const uint64_t position = __ldcg(&history.position);
  load_options(shared, arguments.options[slot]);
  Loaded loaded = loading.finish();
  const bool finite_here = __syncthreads_and(loaded.finite);
  group.wait();
  const Options& options = options_of(shared);

  const bool lists = arguments.best != nullptr && options.log_probabilities >= 0;
  double subtract = 0;
  if (lists)
    subtract = find_best(group, shared, slice, options.log_probabilities, arguments.best + row * kColumns,
                         arguments.log_probabilities + row * kColumns);
  else if (arguments.best != nullptr && group.rank == 0 && threadIdx.x < kColumns) {
    arguments.best[row * kColumns + threadIdx.x] = -1;
    arguments.log_probabilities[row * kColumns + threadIdx.x] = 0;
  }
  if (options.biases > 0 || options.penalties != 0) {
    adjust(shared, slice, arguments.options[slot], history);
    loaded.best = largest_of_slice(slice);
  }
  send(group, shared, kBest, reduce_block(shared, loaded.best, Larger()));
  send(group, shared, kNotFinite, finite_here ? 0 : 1);
  group.sync();
  const uint64_t best = received(group, shared, kBest, Larger());
  const bool finite = received(group, shared, kNotFinite, Sum()) == 0;
  const auto found = [&](uint64_t rank) {
    const uint32_t id = id_of_rank(rank);
    arguments.ids[2 * row] = static_cast<int32_t>(id);
    arguments.ids[2 * row + 1] = finite ? 1 : 0;
    history.token[position % kWindow] = static_cast<int32_t>(id);
    history.position = position + 1;
    if (!lists) return;
    arguments.best[row * kColumns] = static_cast<int32_t>(id);
    arguments.log_probabilities[row * kColumns] =
        static_cast<float>(static_cast<double>(usable(__ldcg(logits + id))) - subtract);
  };
  const bool leads = group.rank == 0 && threadIdx.x == 0;
  if (options.greedy != 0 || !finite) {
    if (leads) found(best);
    return;
  }
  Draw draw{group, shared, slice, options, logit_of_rank(best), position};
  const RandomBits bits = round_bits(options.seed, position, 0);  // while the blocks wait for each other
  draw.add_up();
  if (options.top_k != UINT32_MAX || options.top_p != 0) {
    const uint64_t chosen = draw.select(bits);
    if (leads) found(chosen);
  } else {
    const uint64_t wanted[1] = {drawn_from(received(group, shared, kKeptMass, Sum()), bits, 0)};
    draw.find(wanted, shared.message[kKeptMass], shared.of_warp[0], [&](int, uint64_t rank) { found(rank); });
  }
}

__global__ void set_options_kernel(SlotOptions* to, const SlotOptions options) {
  const auto* const from = reinterpret_cast<const uint32_t*>(&options);
  for (unsigned i = threadIdx.x; i < sizeof(SlotOptions) / sizeof(uint32_t); i += blockDim.x)
    reinterpret_cast<uint32_t*>(to)[i] = from[i];
}

__global__ void append_tokens_kernel(SlotHistory* to, const NewTokens tokens) {
  const auto thread = static_cast<int>(threadIdx.x);
  const uint64_t position = (tokens.restart != 0 ? 0 : to->position) + tokens.count;
  __syncthreads();
  if (tokens.restart != 0) to->token[thread] = -1;
  __syncthreads();
  if (thread < tokens.given)
    to->token[(position - static_cast<uint64_t>(tokens.given - thread)) % kWindow] = tokens.token[thread];
  if (thread == 0) to->position = position;
}

// Logits and weights.
int64_t slice_bytes(int64_t slice) {
  return slice * static_cast<int64_t>(sizeof(float) + sizeof(uint32_t));
}

// Blocks for a row: as many as the device has room for in one wave, and enough for slices to fit into shared memory.
int blocks_for_rows(const ChooseCall& call, size_t most_bytes) {
  if (!launches_early()) return 1;  // no clusters
  const auto fits = [&](int blocks) {
    return slice_bytes(call.vocabulary / blocks + kSliceStep) <= static_cast<int64_t>(most_bytes);
  };
  int blocks = 1;
  while (blocks < kMostBlocks &&
         (!fits(blocks) || (call.vocabulary > blocks * 2048 && 2 * blocks * call.rows <= 2 * multiprocessors())))
    blocks *= 2;
  return blocks;
}

}  // namespace

void choose(const ChooseCall& call) {
  if (call.rows == 0) return;
  const cudaStream_t work = stream(call.device);
  static const size_t own_bytes = [] {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, choose_kernel), "sampling");
    return attributes.sharedSizeBytes;
  }();
  const size_t most_bytes = static_cast<size_t>(most_shared_memory()) - own_bytes;
  const int blocks = call.blocks > 0 && launches_early() ? call.blocks : blocks_for_rows(call, most_bytes);
  const int64_t slice = (call.vocabulary + blocks * kSliceStep - 1) / (blocks * kSliceStep) * kSliceStep;
  const auto bytes = static_cast<size_t>(slice_bytes(slice));
  Tensor scratch;
  if (bytes > most_bytes) scratch = Tensor::empty({call.rows, blocks, 2, slice}, DType::f32, call.device);
  const Arguments arguments{call.logits,
                            call.stride,
                            static_cast<int>(call.vocabulary),
                            static_cast<int>(slice),
                            call.slots,
                            call.options,
                            call.histories,
                            call.ids,
                            call.best,
                            call.log_probabilities,
                            scratch ? scratch.data<float>() : nullptr};
  check(cudaFuncSetAttribute(choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_bytes)),
        "sampling");
  check(cudaFuncSetAttribute(choose_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "sampling");
  cudaLaunchAttribute launch[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks_for(call.rows * blocks, 1);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = scratch ? 0 : bytes;
  config.stream = work;
  config.attrs = launch;
  if (launches_early()) {
    launch[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    launch[0].val.programmaticStreamSerializationAllowed = 1;
    launch[1].id = cudaLaunchAttributeClusterDimension;
    launch[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config.numAttrs = blocks > 1 ? 2 : 1;
  }
  check(cudaLaunchKernelEx(&config, choose_kernel, arguments, blocks), "sampling");
}

void set_options(Device device, SlotOptions* to, const SlotOptions& options) {
  set_options_kernel<<<1, 256, 0, stream(device)>>>(to, options);
  check_launch("sampling");
}

void append_tokens(Device device, SlotHistory* to, const NewTokens& tokens) {
  append_tokens_kernel<<<1, kWindow, 0, stream(device)>>>(to, tokens);
  check_launch("sampling");
}

void copy_history(Device device, SlotHistory* to, const SlotHistory* from) {
  check(cudaMemcpyAsync(to, from, sizeof(SlotHistory), cudaMemcpyDeviceToDevice, stream(device)), "sampling");
}

}  // namespace furious::cuda
