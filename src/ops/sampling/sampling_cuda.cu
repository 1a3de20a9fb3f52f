// Choosing tokens on a GPU: a row of logits is divided among the blocks of a cluster (one block where there are no
// clusters), each with its slice in shared memory. What the blocks find goes from each to all through distributed
// shared memory, so that all of them come to the same decisions.
//
// The last token that top-k and top-p keep is found by radix selection, 8 bits at a time, on a word that orders all
// tokens: the distance to the largest logit in 14 bits, then the logit, then the id. The first bits are linear in the
// logit, so that two rounds mostly leave a few candidates, which are compared with each other. Histograms are sums of
// integers: the order of atomic additions does not matter.
#include <cooperative_groups.h>

#include "gpu/launch.cuh"
#include "ops/sampling/sampling_kernels.h"
#include "ops/sampling/weights.h"

namespace furious::cuda {
namespace {

using namespace sampling;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostBlocks = 8;
constexpr int kBins = 256;
constexpr int kCopies = 4;  // of a histogram, for the lanes of a warp: fewer additions to one place
constexpr int kCandidates = 128;
constexpr int kLanesPerCandidate = kThreads / kCandidates;
constexpr int kSliceStep = kWarps * 32;  // slices are multiples of it
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int kColumns = 1 + static_cast<int>(kMostLogProbabilities);
constexpr int kWindow = static_cast<int>(kRepetitionWindow);

// The options but for the biases, which follow them.
using Options = SlotOptions::Head;
constexpr int kOptionWords = sizeof(Options) / sizeof(uint32_t);

// What the blocks of a row tell each other, each once in a row.
enum Message { kRawBest, kRawMass, kBest, kLowest, kKeptMass, kMessages };

struct Shared {
  alignas(Options) uint32_t option_words[kOptionWords];
  uint64_t message[kMessages][kMostBlocks];
  uint64_t of_warp[2][kWarps];
  uint32_t histogram[3][kBins][kCopies];  // tokens, the low and the high 16 bits of their weights
  uint32_t bin_count[2][kBins];           // of this block; in turns, since other blocks read them
  uint64_t bin_mass[2][kBins];
  uint64_t candidate[2][kCandidates];  // of this block, and of all
  uint32_t candidate_weight[2][kCandidates];
  int candidates;
  int32_t recent[kRepetitionWindow];
  uint64_t best[kMostBlocks][kMostLogProbabilities];
  // What a round of the selection has found: digit, tokens in it, tokens and weight above it.
  uint32_t digit, inside, above_count;
  uint64_t above_mass;
  uint64_t total;
  uint64_t last_kept;
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
  float* scratch;  // [rows, slice] where a slice is too large for shared memory, with one block for a row
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

// The slice of a block: elements [0, count), the first of which is token `first`. A warp has a part of `per_warp`
// neighbours.
struct Slice {
  float* logits;
  int first, count, per_warp;

  template <class F>
  __device__ void each(F&& f) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int end = min(count, (warp + 1) * per_warp);
#pragma unroll 4
    for (int i = warp * per_warp + lane; i < end; i += 32) f(logits[i], static_cast<uint32_t>(first + i));
  }
};

template <class T, class Combine>
__device__ T reduce_warp(T x, Combine combine) {
  for (int offset = 16; offset > 0; offset /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

struct Larger {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Smaller {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};
struct Sum {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct And {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a & b; }
};

// Combines a value of every thread of the block, for the threads of warp 0. `which`: of two places for partial results;
// a place may be used again after another barrier.
template <class Combine>
__device__ uint64_t reduce_block(Shared& shared, int which, uint64_t x, Combine combine) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = reduce_warp(x, combine);
  if (lane == 0) shared.of_warp[which][warp] = x;
  __syncthreads();
  if (warp == 0) x = reduce_warp(shared.of_warp[which][lane % kWarps], combine);
  return x;
}
// The 32 lanes of warp 0 count every partial result more than once.
__device__ uint64_t sum_block(Shared& shared, int which, uint64_t x) {
  return reduce_block(shared, which, x, Sum()) / (32 / kWarps);
}

// From warp 0 of each block to all blocks; they have it after group.sync().
__device__ void tell(const Group& group, Shared& shared, Message message, uint64_t value) {
  if (threadIdx.x < static_cast<unsigned>(group.size))
    *group.in_block(&shared.message[message][group.rank], static_cast<int>(threadIdx.x)) = value;
}
template <class Combine>
__device__ uint64_t told(const Group& group, const Shared& shared, Message message, Combine combine) {
  uint64_t x = shared.message[message][0];
  for (int i = 1; i < group.size; ++i) x = combine(x, shared.message[message][i]);
  return x;
}

// Without a slot: greedy.
__device__ void load_options(Shared& shared, const SlotOptions* from) {
  if (threadIdx.x < kOptionWords && from != nullptr)
    shared.option_words[threadIdx.x] = __ldcg(reinterpret_cast<const uint32_t*>(&from->head) + threadIdx.x);
  if (threadIdx.x == 0 && from == nullptr) *reinterpret_cast<Options*>(shared.option_words) = Options();
}
__device__ const Options& options_of(const Shared& shared) {
  return *reinterpret_cast<const Options*>(shared.option_words);
}

// Returns whether what this thread has loaded was finite.
__device__ bool load(const Slice& slice, const float* row) {
  const int thread = static_cast<int>(threadIdx.x);
  const float* const from = row + slice.first;
  bool finite = true;
  if (reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0) {
    const int packs = slice.count / 4;
#pragma unroll 4
    for (int i = thread; i < packs; i += kThreads) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(from) + i);
      finite = finite && is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w);
      reinterpret_cast<float4*>(slice.logits)[i] = make_float4(usable(x.x), usable(x.y), usable(x.z), usable(x.w));
    }
    for (int i = packs * 4 + thread; i < slice.count; i += kThreads) {
      const float x = __ldcg(from + i);
      finite = finite && is_finite(x);
      slice.logits[i] = usable(x);
    }
    return finite;
  }
#pragma unroll 8
  for (int i = thread; i < slice.count; i += kThreads) {
    const float x = __ldcg(from + i);
    finite = finite && is_finite(x);
    slice.logits[i] = usable(x);
  }
  return finite;
}

// Bias and penalties of the tokens of this slice. Ids of biases are all different; of equal tokens of the history the
// first one does it for all.
__device__ void adjust(Shared& shared, const Slice& slice, const SlotOptions& all, const SlotHistory& history) {
  const int thread = static_cast<int>(threadIdx.x);
  const Options& options = options_of(shared);
  for (int i = thread; i < options.biases; i += kThreads) {
    const int place = __ldcg(&all.bias_id[i]) - slice.first;
    if (place >= 0 && place < slice.count) slice.logits[place] = biased(slice.logits[place], __ldcg(&all.bias[i]));
  }
  if (options.penalties != 0 && thread < kWindow) shared.recent[thread] = __ldcg(&history.token[thread]);
  __syncthreads();
  if (options.penalties != 0 && thread < kWindow) {
    const int32_t id = shared.recent[thread];
    const int place = id - slice.first;
    if (id >= 0 && place >= 0 && place < slice.count) {
      int count = 0, before = 0;
      for (int i = 0; i < kWindow; ++i) {
        const bool same = shared.recent[i] == id;
        count += same ? 1 : 0;
        before += same && i < thread ? 1 : 0;
      }
      if (before == 0)
        slice.logits[place] =
            penalized(slice.logits[place], count, options.repetition, options.frequency, options.presence);
    }
  }
  __syncthreads();
}

__device__ uint64_t largest_of_slice(const Slice& slice) {
  uint64_t best = 0;
  slice.each([&](float logit, uint32_t id) { best = max(best, rank_of(logit, id)); });
  return best;
}

// The k most probable tokens of the slice, to block 0.
__device__ void list_best(const Group& group, Shared& shared, const Slice& slice, int k) {
  uint64_t limit = UINT64_MAX;
  for (int i = 0; i < k; ++i) {
    uint64_t best = 0;
    slice.each([&](float logit, uint32_t id) {
      const uint64_t rank = rank_of(logit, id);
      if (rank < limit) best = max(best, rank);
    });
    best = reduce_block(shared, 0, best, Larger());
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
    best = reduce_warp(best, Larger());
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
  tell(group, shared, kRawBest, reduce_block(shared, 0, largest_of_slice(slice), Larger()));
  group.sync();
  const float largest = logit_of_rank(told(group, shared, kRawBest, Larger()));
  list_best(group, shared, slice, k);
  uint64_t mass = 0;
  slice.each([&](float logit, uint32_t) { mass += weight_of(logit, largest, kLog2E); });
  tell(group, shared, kRawMass, sum_block(shared, 0, mass));
  group.sync();
  mass = told(group, shared, kRawMass, Sum());
  const double subtract = static_cast<double>(largest) + log(static_cast<double>(mass) / kLargestWeight);
  write_best(group, shared, k, subtract, ids, log_probabilities);
  return subtract;
}

// The words that order tokens for the selection.
struct Ordering {
  float largest, per_logit;  // steps of the first 14 bits in a difference of 1

  __device__ Ordering(float largest_logit, float lowest_logit, float scale) : largest(largest_logit) {
    // Past 32 octaves below the largest no weight is above 0.
    const float width = fminf(fminf(largest_logit - lowest_logit, 32.0f / scale), FLT_MAX);
    per_logit = width > 0 ? fminf(16383.0f / width, FLT_MAX) : 0.0f;
  }
  __device__ uint64_t word(float logit, uint32_t id) const {
    const float steps = fminf(__fmul_rn(fminf(__fsub_rn(largest, logit), FLT_MAX), per_logit), 16383.0f);
    const auto distance = static_cast<uint64_t>(static_cast<uint32_t>(steps));
    return (16383 - distance) << 50 | static_cast<uint64_t>(ordered(logit)) << 18 | (0x3FFFFu - id);
  }
  static __device__ uint64_t rank(uint64_t word) {
    return (word >> 18 & 0xFFFFFFFFu) << 32 |
           static_cast<uint32_t>(~(0x3FFFFu - static_cast<uint32_t>(word & 0x3FFFF)));
  }
};

// The histogram of this block's tokens whose words begin with `prefix`, by the next 8 bits.
__device__ void count_bins(Shared& shared, const Slice& slice, const Ordering& ordering, float scale, int round,
                           uint64_t prefix) {
  const unsigned thread = threadIdx.x;
  uint32_t* const all = &shared.histogram[0][0][0];
  for (unsigned i = thread; i < 3 * kBins * kCopies; i += kThreads) all[i] = 0;
  __syncthreads();
  const int shift = 56 - 8 * round;
  slice.each([&](float logit, uint32_t id) {
    const uint64_t word = ordering.word(logit, id);
    if (round > 0 && word >> (shift + 8) != prefix) return;
    const unsigned bin = static_cast<unsigned>(word >> shift) % kBins, copy = thread % kCopies;
    const uint32_t weight = weight_of(logit, ordering.largest, scale);
    atomicAdd(&shared.histogram[0][bin][copy], 1u);
    if (weight == 0) return;
    atomicAdd(&shared.histogram[1][bin][copy], weight & 0xFFFFu);
    atomicAdd(&shared.histogram[2][bin][copy], weight >> 16);
  });
  __syncthreads();
  if (thread < kBins) {
    uint32_t count = 0;
    uint64_t low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      count += shared.histogram[0][thread][i];
      low += shared.histogram[1][thread][i];
      high += shared.histogram[2][thread][i];
    }
    shared.bin_count[round % 2][thread] = count;
    shared.bin_mass[round % 2][thread] = low + (high << 16);
  }
}

// Finds, in the histograms of all blocks, the digit in which the last kept token is.
__device__ void find_digit(const Group& group, Shared& shared, const Options& options, int round) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int bin = kBins - 1 - thread;  // from the largest
  uint32_t count = 0;
  uint64_t mass = 0, count_sum = 0, mass_sum = 0;
  if (thread < kBins) {
    uint32_t counts[kMostBlocks];  // all on their way before the first is there
    uint64_t masses[kMostBlocks];
#pragma unroll
    for (int i = 0; i < kMostBlocks; ++i) {
      counts[i] = i < group.size ? *group.in_block(&shared.bin_count[round % 2][bin], i) : 0;
      masses[i] = i < group.size ? *group.in_block(&shared.bin_mass[round % 2][bin], i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kMostBlocks; ++i) count += counts[i], mass += masses[i];
    count_sum = count;
    mass_sum = mass;
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t c = __shfl_up_sync(kAllLanes, count_sum, offset), m = __shfl_up_sync(kAllLanes, mass_sum, offset);
      if (lane >= offset) count_sum += c, mass_sum += m;
    }
    if (lane == 31) {
      shared.of_warp[0][warp] = count_sum;
      shared.of_warp[1][warp] = mass_sum;
    }
  }
  const uint64_t above_count = shared.above_count, above_mass = shared.above_mass;
  __syncthreads();
  if (thread < kBins) {
    uint64_t total = 0;
    for (int i = 0; i < kBins / 32; ++i) {
      total += shared.of_warp[1][i];
      if (i >= warp) continue;
      count_sum += shared.of_warp[0][i];
      mass_sum += shared.of_warp[1][i];
    }
    if (round > 0) total = shared.total;
    const uint64_t enough = enough_of(total, options.top_p);
    count_sum += above_count;
    mass_sum += above_mass;
    const bool reached = count_sum >= options.top_k || mass_sum >= enough;
    const bool reached_before = count_sum - count >= options.top_k || mass_sum - mass >= enough;
    if (reached && !reached_before) {
      shared.digit = static_cast<uint32_t>(bin);
      shared.inside = count;
      shared.above_count = static_cast<uint32_t>(count_sum - count);
      shared.above_mass = mass_sum - mass;
      shared.total = total;
    }
  }
  __syncthreads();
}

// The few tokens whose words begin with `prefix`, of all blocks, compared with each other: finds the last kept one.
__device__ void compare_candidates(const Group& group, Shared& shared, const Slice& slice, const Ordering& ordering,
                                   const Options& options, int shift, uint64_t prefix) {
  const int thread = static_cast<int>(threadIdx.x);
  slice.each([&](float logit, uint32_t id) {
    const uint64_t word = ordering.word(logit, id);
    if (word >> shift != prefix) return;
    const int place = atomicAdd(&shared.candidates, 1);
    shared.candidate[0][place] = word;
    shared.candidate_weight[0][place] = weight_of(logit, ordering.largest, options.scale);
  });
  group.sync();
  int found[kMostBlocks];  // by each block; all on their way before the first is there
  uint64_t words[kMostBlocks];
  uint32_t weights[kMostBlocks];
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) found[i] = i < group.size ? *group.in_block(&shared.candidates, i) : 0;
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i)
    if (thread < found[i]) {
      words[i] = *group.in_block(&shared.candidate[0][thread], i);
      weights[i] = *group.in_block(&shared.candidate_weight[0][thread], i);
    }
  int count = 0;
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    if (thread < found[i]) {
      shared.candidate[1][count + thread] = words[i];
      shared.candidate_weight[1][count + thread] = weights[i];
    }
    count += found[i];
  }
  __syncthreads();
  const int own = thread / kLanesPerCandidate;
  const uint64_t word = own < count ? shared.candidate[1][own] : UINT64_MAX;
  uint64_t number = 0, mass = 0;
  for (int i = thread % kLanesPerCandidate; i < count; i += kLanesPerCandidate) {
    if (shared.candidate[1][i] < word) continue;
    number += 1;
    mass += shared.candidate_weight[1][i];
  }
  for (int offset = kLanesPerCandidate / 2; offset > 0; offset /= 2) {
    number += __shfl_xor_sync(kAllLanes, number, offset);
    mass += __shfl_xor_sync(kAllLanes, mass, offset);
  }
  if (own < count) {
    number += shared.above_count;
    mass += shared.above_mass;
    const uint64_t enough = enough_of(shared.total, options.top_p);
    const bool reached = number >= options.top_k || mass >= enough;
    const bool reached_before = number - 1 >= options.top_k || mass - shared.candidate_weight[1][own] >= enough;
    if (reached && !reached_before) shared.last_kept = Ordering::rank(word);
  }
  __syncthreads();
}

// The rank of the last token that top-k and top-p keep.
__device__ uint64_t find_last_kept(const Group& group, Shared& shared, const Slice& slice, float largest, float lowest,
                                   const Options& options) {
  const Ordering ordering(largest, lowest, options.scale);
  if (threadIdx.x == 0) {
    shared.candidates = 0;
    shared.above_count = 0;
    shared.above_mass = 0;
  }
  uint64_t prefix = 0;
  int round = 0;
  do {
    count_bins(shared, slice, ordering, options.scale, round, prefix);
    group.sync();
    find_digit(group, shared, options, round);
    prefix = prefix << 8 | shared.digit;
    round += 1;
  } while (shared.inside > kCandidates);  // ends at the latest where the words do: no two are equal
  compare_candidates(group, shared, slice, ordering, options, 64 - 8 * round, prefix);
  return shared.last_kept;
}

__device__ bool lane_finds(uint64_t before, uint64_t own, uint64_t wanted) {
  return wanted >= before && wanted < before + own;
}

// Draws a token: calls found(id) in the one thread, of all blocks, that has it.
template <class Found>
__device__ void draw(const Group& group, Shared& shared, const Slice& slice, float largest, uint64_t last_kept,
                     const Options& options, uint64_t position, Found&& found) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto weight = [&](float logit, uint32_t id) -> uint32_t {
    if (last_kept > 0 && rank_of(logit, id) < last_kept) return 0;
    const uint32_t w = weight_of(logit, largest, options.scale);
    return w < options.min_weight ? 0 : w;
  };
  uint64_t mass = 0;
  slice.each([&](float logit, uint32_t id) { mass += weight(logit, id); });
  tell(group, shared, kKeptMass, sum_block(shared, 0, mass));
  group.sync();
  const uint64_t wanted = drawn_from(told(group, shared, kKeptMass, Sum()), options.seed, position);
  uint64_t before = 0;
  for (int i = 0; i < group.rank; ++i) before += shared.message[kKeptMass][i];
  for (int i = 0; i < warp; ++i) before += shared.of_warp[0][i];
  if (!lane_finds(before, shared.of_warp[0][warp], wanted)) return;
  // The part of this warp: every lane has neighbours now, in the order of ids.
  const int per_lane = slice.per_warp / 32, begin = warp * slice.per_warp + lane * per_lane;
  const int end = min(slice.count, begin + per_lane);
  uint64_t own = 0;
  for (int i = begin; i < end; ++i) own += weight(slice.logits[i], static_cast<uint32_t>(slice.first + i));
  uint64_t sum = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  before += sum - own;
  if (!lane_finds(before, own, wanted)) return;
  for (int i = begin; i < end; ++i) {
    const auto id = static_cast<uint32_t>(slice.first + i);
    const uint32_t w = weight(slice.logits[i], id);
    if (lane_finds(before, w, wanted)) return found(id);
    before += w;
  }
}

// A cluster for a row.
__global__ void __launch_bounds__(kThreads) choose_kernel(const Arguments arguments, int blocks) {
  extern __shared__ __align__(16) float dynamic[];
  __shared__ Shared shared;
  start_next();
  const Group group{static_cast<int>(blockIdx.x) % blocks, blocks};
  group.arrive();
  const int64_t row = blockIdx.x / static_cast<unsigned>(blocks);
  const int first = group.rank * arguments.slice;
  const Slice slice{arguments.scratch != nullptr ? arguments.scratch + row * arguments.slice : dynamic, first,
                    max(0, min(arguments.slice, arguments.vocabulary - first)), arguments.slice / kWarps};
  const float* const logits = arguments.logits + row * arguments.stride;
  wait_for_previous();
  const int slot = arguments.slots != nullptr ? __ldcg(arguments.slots + row) : 0;
  SlotHistory* const history = arguments.slots != nullptr ? arguments.histories + slot : nullptr;
  // Read here: the block that has found the token may have written it while others are still at it.
  const uint64_t position = history != nullptr ? __ldcg(&history->position) : 0;
  load_options(shared, arguments.slots != nullptr ? arguments.options + slot : nullptr);
  const bool finite_here = __syncthreads_and(load(slice, logits));
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
  if (history != nullptr && (options.biases > 0 || options.penalties != 0))
    adjust(shared, slice, arguments.options[slot], *history);

  const bool selects = options.greedy == 0 && (options.top_k != UINT32_MAX || options.top_p != 0);
  tell(group, shared, kBest, reduce_block(shared, 0, largest_of_slice(slice), Larger()));
  uint64_t lowest = UINT32_MAX;
  if (selects) {
    slice.each([&](float logit, uint32_t) {
      if (logit != minus_infinity()) lowest = min(lowest, static_cast<uint64_t>(ordered(logit)));
    });
    lowest = reduce_block(shared, 1, lowest, Smaller());
  }
  tell(group, shared, kLowest, lowest << 1 | (finite_here ? 1u : 0u));
  group.sync();
  const uint64_t best = told(group, shared, kBest, Larger());
  const bool finite = (told(group, shared, kLowest, And()) & 1) != 0;
  const auto found = [&](uint32_t id) {
    arguments.ids[2 * row] = static_cast<int32_t>(id);
    arguments.ids[2 * row + 1] = finite ? 1 : 0;
    if (history != nullptr) {
      history->token[position % kWindow] = static_cast<int32_t>(id);
      history->position = position + 1;
    }
    if (!lists) return;
    arguments.best[row * kColumns] = static_cast<int32_t>(id);
    arguments.log_probabilities[row * kColumns] =
        static_cast<float>(static_cast<double>(usable(__ldcg(logits + id))) - subtract);
  };
  if (options.greedy != 0 || !finite) {
    if (group.rank == 0 && threadIdx.x == 0) found(id_of_rank(best));
    return;
  }
  const float largest = logit_of_rank(best);
  uint64_t last_kept = 0;
  if (selects) {
    const uint64_t low = told(group, shared, kLowest, Smaller()) >> 1;
    last_kept = find_last_kept(group, shared, slice, largest, logit_of_rank(low << 32), options);
  }
  draw(group, shared, slice, largest, last_kept, options, position, found);
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

// Blocks for a row: as many as the device has room for in one wave, and enough for slices to fit into shared memory.
int blocks_for_rows(const ChooseCall& call, size_t most_bytes) {
  if (!launches_early()) return 1;  // no clusters
  const auto fits = [&](int blocks) {
    return (call.vocabulary / blocks + kSliceStep) * static_cast<int64_t>(sizeof(float)) <=
           static_cast<int64_t>(most_bytes);
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
  const size_t bytes = static_cast<size_t>(slice) * sizeof(float);
  require(bytes <= most_bytes || blocks == 1, "sampling: {} blocks for a row of {}, expected more", blocks,
          call.vocabulary);
  Tensor scratch;
  if (bytes > most_bytes) scratch = Tensor::empty({call.rows, slice}, DType::f32, call.device);
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
