#include <map>
#include <mutex>

#include "decode/token_fetch-inl.cuh"
#include "decode/token_product-inl.cuh"
#include "decode/token_step-inl.cuh"

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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__global__ void token_kernel(const TokenWork) {}  // without bulk copies: never launched
#else

__device__ void embed(const TokenWork& program, const EmbeddingCall& call, const Tagged& written) {
  const int all = call.rows * call.dim;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < all;
       i += static_cast<int>(gridDim.x) * kThreads) {
    const int64_t id = __ldcg(program.ids + i / call.dim * program.id_stride);
    written.activation(call.out, i, call.table[id * call.dim + i % call.dim]);
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
