// The mixers on a GPU: choosing kernels, cumulative decays and their gradient, heads that share an input.
#include <algorithm>
#include <utility>

#include "base/names.h"
#include "base/warning.h"
#include "gpu/rows.cuh"
#include "ops/elementwise.h"
#include "ops/mixer/cost.h"
#include "ops/mixer/gpu/chunk_states.h"
#include "ops/mixer/gpu/heads.cuh"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/gpu/states.h"
#include "ops/mixer/gpu/walk.h"
#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

constexpr int kScanThreads = 256;
constexpr int kPerThread = 4;
constexpr int kSegment = kScanThreads * kPerThread;  // tokens of a block

// Inclusive sum over a block of kScanThreads threads, in order.
__device__ double block_scan(double x, double* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double before = __shfl_up_sync(0xFFFFFFFFu, x, offset);
    if (lane >= offset) x += before;
  }
  if (lane == 31) shared[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x += shared[i];
  __syncthreads();
  return x;
}

// Running sums over the tokens of each row and head. A block walks over the segments of a short row; those of a long
// one have blocks of their own, in two passes: the totals of the segments, and then all of the sums. A source reads and
// writes numbers in the order of the sum.
constexpr int kShortRow = 4;  // segments
template <class Source>
__device__ double segment_total(const Source& source, int64_t segment, double (&own)[kPerThread], double* shared) {
  const int64_t first = segment * kSegment + threadIdx.x * kPerThread;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) own[i] = first + i < source.length ? source.get(first + i) : 0.0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) sum += own[i];
  return block_scan(sum, shared);
}
template <class Source>
__global__ void total_kernel(double* totals, Source source) {
  __shared__ double shared[kScanThreads / 32];
  double own[kPerThread];
  const double sum = segment_total(source, blockIdx.x, own, shared);
  if (threadIdx.x == kScanThreads - 1)
    totals[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}
// Without totals, a block has all segments.
template <class Source>
__global__ void scan_kernel(const double* totals, Source source) {
  __shared__ double shared[kScanThreads / 32], before;
  double sum = 0;
  if (totals) {
    totals += (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x;
    for (unsigned i = threadIdx.x; i < blockIdx.x; i += kScanThreads) sum += totals[i];
    sum = block_scan(sum, shared);
  }
  for (int64_t segment = blockIdx.x; segment * kSegment < source.length; segment += gridDim.x) {
    if (threadIdx.x == kScanThreads - 1) before = sum;
    double own[kPerThread];
    const double until = segment_total(source, segment, own, shared);  // its barriers come before the use of `before`
    sum = before + until;
    double running = sum;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) running -= own[i];
    const int64_t first = segment * kSegment + threadIdx.x * kPerThread;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      running += own[i];
      if (first + i < source.length) source.set(first + i, running);
    }
    __syncthreads();
    if (totals) return;
  }
}
template <class Source>
void scan(const MixerShape& shape, Device device, const Source& source) {
  dim3 grid(blocks_for(shape.length, kSegment), static_cast<unsigned>(shape.heads), static_cast<unsigned>(shape.batch));
  Tensor totals;
  if (grid.x <= kShortRow) {
    grid.x = 1;
  } else {
    totals = Tensor::empty({shape.batch, shape.heads, grid.x}, DType::f64, device);
    total_kernel<<<grid, kScanThreads, 0, stream(device)>>>(totals.data<double>(), source);
    check_launch("mixer: sums of decays");
  }
  scan_kernel<<<grid, kScanThreads, 0, stream(device)>>>(doubles(totals), source);
  check_launch("mixer: sums of decays");
}

// log_decay or its gradient, [batch, length, heads] with any strides.
struct Decays {
  float* data;
  int64_t batch, token, head;

  explicit Decays(const Tensor& a) : data(a.data<float>()), batch(a.stride(0)), token(a.stride(1)), head(a.stride(2)) {}
  __device__ float& at(int64_t b, int64_t t, int64_t h) const { return data[b * batch + t * token + h * head]; }
};

// A_t.
struct CumulativeDecay {
  Decays a;
  double* out;
  int64_t length;

  __device__ double get(int64_t t) const { return static_cast<double>(a.at(blockIdx.z, t, blockIdx.y)); }
  __device__ void set(int64_t t, double sum) const {
    out[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * length + t] = sum;
  }
};

// Σ_{s ≥ t} dA_s: to `sums` where documents end before the row does, else it is da_t.
struct DecayGradient {
  Decays da;
  const double *row, *key;
  double* sums;
  int64_t length;

  __device__ int64_t place(int64_t i) const {
    return (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * length + length - 1 - i;
  }
  __device__ double get(int64_t i) const { return (row ? row[place(i)] : 0.0) + key[place(i)]; }
  __device__ void set(int64_t i, double sum) const {
    if (sums)
      sums[place(i)] = sum;
    else
      da.at(blockIdx.z, length - 1 - i, blockIdx.y) = static_cast<float>(sum);
  }
};

// da_t = Σ_{s ≥ t} dA_s within the document: the sum to the end of the row, less that after the document.
__global__ void document_kernel(Decays da, const double* sums, const int* ends, int64_t length) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t >= length) return;
  sums += (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * length;
  const int64_t end = ends[blockIdx.z * length + t];
  da.at(blockIdx.z, t, blockIdx.y) = static_cast<float>(sums[t] - (end < length ? sums[end] : 0.0));
}

// out[row, own head] = Σ over the heads it serves of in[row, head]; in is contiguous [rows, heads, dim].
template <class T>
__global__ void sum_groups_kernel(DeviceRows<T> out, const T* in, int64_t own_heads, int group, int dim) {
  const int64_t row = blockIdx.x;  // (token, own head)
  T* to = out[row];
  const T* from = in + row * group * dim;
  for (int c = threadIdx.x; c < dim; c += blockDim.x) {
    float sum = 0;
    for (int h = 0; h < group; ++h) sum += to_float(from[h * dim + c]);
    to[c] = from_float<T>(sum);
  }
}

void sum_groups(const Tensor& out, const Tensor& in) {
  const int64_t own = out.size(2);
  const int64_t count = out.size(0) * out.size(1) * own;
  with_activation_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    sum_groups_kernel<<<static_cast<unsigned>(count), 64, 0, stream(out.device())>>>(
        rows<T>(out), pointer<T>(in), own, static_cast<int>(in.size(2) / own), static_cast<int>(out.size(3)));
  });
  check_launch("mixer: sum over shared heads");
}

}  // namespace

namespace {
thread_local std::string_view forced_name;
}
KernelScope::KernelScope(std::string_view kernel) : before_(std::exchange(forced_name, kernel)) {
  const std::vector<std::string> names{"hopper", "tensor cores", "tiles", "simple", "walk", "chunk states"};
  if (std::ranges::find(names, kernel) != names.end()) return;
  forced_name = before_;
  unknown_name("mixer kernel", kernel, names);
}
KernelScope::~KernelScope() {
  forced_name = before_;
}
std::string_view forced_kernel() {
  return forced_name;
}

bool rows_are_wide(const Tensor& x) {
  return x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 && x.stride(2) % 8 == 0 && x.size(3) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}

TokenTables token_tables(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  TokenTables tables;
  if (call.spec.decay) {
    const Tensor& a = call.inputs.log_decay;
    tables.decay = Tensor::empty({shape.batch, shape.heads, shape.length}, DType::f64, device);
    scan(shape, device, CumulativeDecay{Decays(a), tables.decay.data<double>(), shape.length});
  }
  const int64_t window = call.spec.window > 0 ? std::min(call.spec.window, shape.length) : shape.length;
  if (static_cast<int64_t>(call.segments.size()) > shape.batch || window < shape.length) {
    const Tensor starts = Tensor::empty({shape.batch, shape.length}, DType::i32);
    const Tensor ends = Tensor::empty({shape.batch, shape.length}, DType::i32);
    for (const Segment& segment : call.segments) {
      const int64_t row = segment.batch * shape.length;
      for (int64_t t = segment.begin; t < segment.end; ++t) {
        starts.data<int32_t>()[row + t] = static_cast<int32_t>(std::max(segment.begin, t - window + 1));
        ends.data<int32_t>()[row + t] = static_cast<int32_t>(std::min(segment.end, t + window));
      }
    }
    tables.starts = Tensor::empty(starts.shape(), DType::i32, device);
    tables.ends = Tensor::empty(ends.shape(), DType::i32, device);
    copy_between(tables.starts, starts);
    copy_between(tables.ends, ends);
  }
  return tables;
}

namespace {

// The length up to which the parallel form is faster than the chunked form: where its products are `cost` times those
// of the states, but at least `least`.
int64_t longest_by_products(const MixerShape& shape, double cost, int64_t least) {
  const double equal = 4.0 * static_cast<double>(shape.state_rows * shape.state_columns) /
                       static_cast<double>(shape.qk_dim + shape.v_dim);
  return std::max(least, static_cast<int64_t>(cost * equal));
}

// The same for every call. From times on an H200.
int64_t longest_parallel(const MixerCall& call) {
  constexpr int64_t kSimple = 512;
  if (states_support(call)) return furious::longest_parallel(call.spec, call.shape.qk_dim, call.shape.v_dim);
  if (chunk_states_support(call)) {
    const int64_t dim = std::max(call.shape.qk_dim, call.shape.v_dim);
    return longest_by_products(call.shape, !hopper_supports(call) ? 1 : dim <= 64 ? 3 : dim <= 128 ? 1.75 : 1.35, 2048);
  }
  if (parallel_supports(call)) return longest_by_products(call.shape, 4.5, 4096);  // features go through memory
  if (!tiles_support(call)) return kSimple;
  return longest_by_products(call.shape, product_precision(call) == MixerPrecision::bf16 ? 8 : 2, 2048);
}

enum class Kernels : uint8_t { hopper, tensor_cores, tiles, simple };
constexpr std::string_view kKernelNames[] = {"hopper", "tensor cores", "tiles", "simple"};

Kernels choose_kernels(std::string_view operation, const MixerCall& call) {
  const std::string_view forced = forced_kernel();
  const Kernels chosen = hopper_supports(call)     ? Kernels::hopper
                         : parallel_supports(call) ? Kernels::tensor_cores
                         : tiles_support(call)     ? Kernels::tiles
                                                   : Kernels::simple;
  require(forced.empty() || (forced == "chunk states" ? chunk_states_support(call)
                                                      : forced == kKernelNames[static_cast<int>(chosen)]),
          "{}: the kernels \"{}\" do not compute this call; leave the choice to the mixer", operation, forced);
  if (chosen != Kernels::simple) return chosen;
  const MixerPrecision precision = call.precision;
  require(
      precision == MixerPrecision::automatic || precision == MixerPrecision::f32,
      "{}: argument \"precision\" is {}, but heads of {} (queries and keys) and {} (values) are computed in f32 only; "
      "use auto or f32, or dimensions of at most {}",
      operation, name_of(precision), call.shape.qk_dim, call.shape.v_dim, largest_tile_dim(call.inputs.q.device()));
  return Kernels::simple;
}

bool uses_parallel(Kernels kernels) {
  return kernels == Kernels::hopper || kernels == Kernels::tensor_cores;
}

void ran(const MixerCall& call, std::string_view kernel) {
  if (call.kernel) *call.kernel = kernel;
}

// Inside chunks, or all of a call in the parallel form; `past` as simple_forward() takes it.
void inside_forward(const MixerCall& call, Kernels kernels, const TokenTables& within, const Tensor& past) {
  if (uses_parallel(kernels)) {
    ran(call, kernels == Kernels::hopper && !past ? "hopper" : "tensor cores");
    parallel_forward(call, within, past);
  } else if (kernels == Kernels::tiles) {
    ran(call, "tiles");
    tiles_forward(call, within, past);
  } else {
    ran(call, "simple");
    simple_forward(call, within, past);
  }
}

bool is_chunked(const MixerCall& call) {
  return call.chunk < call.shape.length || call.inputs.initial_state || call.result.final_state;
}

// Whether the kernels write results 16 bytes at a time.
bool writes_wide_rows(const MixerCall& call, bool walks) {
  return walks || hopper_supports(call);
}

}  // namespace

Form choose_form(const MixerCall& call) {
  if (walk_supports(call)) return call.shape.length > 64 ? Form::chunked : Form::parallel;
  return call.shape.state_rows > 0 && call.shape.length > longest_parallel(call) ? Form::chunked : Form::parallel;
}

void warn_where_slow(const MixerCall& call) {
  // Pairs of a query and a key, over the sequences of the call: no kernels need long for fewer, and the steps of a
  // decoder have few.
  constexpr double kFewPairs = 1 << 20;
  const MixerShape& shape = call.shape;
  const double pairs =
      static_cast<double>(shape.batch) * static_cast<double>(shape.queries()) * static_cast<double>(shape.length);
  if (pairs <= kFewPairs || !forced_kernel().empty()) return;
  const MixerInputs& in = call.inputs;
  if (in.q.dtype() == DType::f16) {
    const bool tf32 = computed_options({}, shape, in.q.device()).precision == MixerPrecision::tf32;
    if (call.precision == MixerPrecision::automatic)
      warn_once("mixer: f16",
                fmt::format("mixer: f16 inputs are copied to f32 and computed in {}, several times as slowly as bf16; "
                            "use bf16 tensors, or precision bf16 (--mixer-precision bf16), which rounds them",
                            tf32 ? "TF32" : "f32"));
    return;
  }
  const bool chunked = is_chunked(call);
  const Kernels kernels = choose_kernels("mixer_forward", call);
  const bool bf16 = in.q.dtype() == DType::bf16 && product_precision(call) == MixerPrecision::bf16;
  const bool odd = shape.qk_dim % 8 != 0 || shape.v_dim % 8 != 0;
  const bool wide = rows_are_wide(in.q) && rows_are_wide(in.k) && rows_are_wide(in.v);
  const std::string_view dtype = name_of(in.q.dtype());
  const std::string dims = fmt::format("heads of {} (queries and keys) and {} (values)", shape.qk_dim, shape.v_dim);
  if (kernels == Kernels::simple)
    warn_once("mixer: simple",
              fmt::format("mixer: {} in {} are computed without tensor cores, many times as slowly; use dimensions of "
                          "at most {}, or bf16 tensors with precision auto",
                          dims, dtype, largest_tile_dim(in.q.device())));
  std::vector<std::string> remedies;
  if (odd) remedies.emplace_back("dimensions that are multiples of 8");
  if (!odd && bf16 && !wide) remedies.emplace_back("rows of q, k and v that begin at multiples of 16 bytes");
  if (chunked && !states_support(call) && !chunk_states_support(call)) {
    if (!bf16) remedies.emplace_back("bf16 tensors with precision auto");
    if (call.spec.degree > 0 || call.spec.signed_decay)
      remedies.emplace_back("a linear or squared score without signed decay");
    std::string use = fmt::format("{}", fmt::join(remedies, " and "));
    const bool states = in.initial_state || call.result.final_state;
    if (!states && choose_form(call) == Form::parallel)
      use += fmt::format("{}the parallel form", use.empty() ? "" : ", or ");
    if (!use.empty())
      warn_once(
          "mixer: chunked, " + use,
          fmt::format("mixer: the chunked form of this call ({}; {}; {} with precision {}) writes its features to "
                      "memory, several times as slowly as kernels that do not; use {}",
                      to_string(call.spec), dims, dtype, name_of(call.precision), use));
  } else if (kernels == Kernels::tensor_cores && hopper_supports_wide_rows(call)) {
    const std::string use = fmt::format("{}", fmt::join(remedies, " and "));
    warn_once("mixer: rows, " + use,
              fmt::format("mixer: {} whose rows cannot be read 16 bytes at a time run slower kernels than this GPU has "
                          "for others; use {}",
                          dims, use));
  }
}

Tensor mixer_forward(const MixerCall& call) {
  const bool chunked = is_chunked(call);
  const bool walks = chunked && walk_supports(call);
  if (!rows_are_wide(call.result.out) && writes_wide_rows(call, walks)) {
    MixerResult result = call.result;
    result.out = Tensor::empty(call.result.out.shape(), DType::bf16, call.inputs.q.device());
    const Tensor states = mixer_forward(
        {call.spec, call.shape, call.inputs, call.segments, call.chunk, result, call.precision, call.kernel});
    furious::copy(call.result.out, result.out);
    return states;
  }
  if (walks) {
    ran(call, "walk");
    return walk_forward(call, token_tables(call));
  }
  warn_where_slow(call);
  const Kernels kernels = choose_kernels("mixer_forward", call);
  TokenTables within = token_tables(call);
  Tensor past;
  if (chunked) {
    const ChunkTables chunks = chunk_tables(call, within);
    if (states_support(call)) {
      ran(call, "states");
      const Tensor states = chunk_states(call, chunks);
      past = Tensor::empty_like(call.result.out);
      const Tensor past_n = call.result.normalizer ? Tensor::empty_like(call.result.normalizer) : Tensor();
      read_states(call, chunks, states, past, past_n);
      inside_chunks_forward(call, within, call.chunk, past, past_n);
      return states_are_kept(call.spec, call.shape.qk_dim) ? states : Tensor();
    }
    if (chunk_states_support(call)) {
      // Past values of a squared score have a positive share of the normalizer, which they can be divided by.
      const bool hopper = kernels == Kernels::hopper && call.chunk % 256 == 0 &&
                          (call.spec.score == Score::squared || call.spec.norm == Norm::none);
      const Past from_states = chunk_states_past(call, chunks, hopper);
      if (from_states.values) {
        inside_chunks_forward(call, within, call.chunk, from_states.values, from_states.normalizer);
      } else {
        inside_forward(call, kernels, chunks.within, from_states.columns);
      }
      ran(call, "chunk states");
      return {};
    }
    past = chunked_past(call, chunks);
    within = chunks.within;
  }
  inside_forward(call, kernels, within, past);
  return {};
}

void mixer_backward(const MixerCall& call, const Tensor& out_gradient, const Tensor& final_state_gradient,
                    const MixerGradients& gradients) {
  const MixerShape& shape = call.shape;
  const Device device = call.inputs.q.device();
  const bool chunked = call.chunk < shape.length || call.inputs.initial_state || final_state_gradient;
  const bool walks = chunked && !final_state_gradient && walk_supports(call);
  const Kernels kernels = walks ? Kernels::tensor_cores : choose_kernels("mixer_backward", call);
  const TokenTables tables = token_tables(call);
  const bool wide = writes_wide_rows(call, walks);
  const auto per_head = [&](const Tensor& gradient) {
    if (gradient.size(2) == shape.heads && (!wide || rows_are_wide(gradient))) return gradient;
    return Tensor::empty({shape.batch, shape.length, shape.heads, gradient.size(3)}, gradient.dtype(), device);
  };
  HeadGradients heads{per_head(gradients.q), per_head(gradients.k), per_head(gradients.v), {}, {}};
  if (call.spec.decay) {
    const Shape tokens{shape.batch, shape.heads, shape.length};
    heads.key_decay = Tensor::empty(tokens, DType::f64, device);
    // With a decay that may grow, pairs whose mask is saturated have no part in it, so that it does not cancel.
    if (call.spec.norm == Norm::none || call.spec.signed_decay || !uses_parallel(kernels))
      heads.row_decay = Tensor::empty(tokens, DType::f64, device);
  }
  const ChunkTables chunks = chunked && !walks ? chunk_tables(call, tables) : ChunkTables();
  const TokenTables& within = chunked ? chunks.within : tables;
  if (walks) {
    walk_backward(call, tables, out_gradient, heads, gradients.initial_state);
  } else if (chunked && states_support(call) && !final_state_gradient) {
    const ScaledGradient scaled = scale_gradient(call, out_gradient, true, chunks.in);
    // Those that a walk leaves are f32, and of segments.
    const bool kept = call.result.states && call.result.states.dtype() == DType::bf16;
    const Tensor states = kept ? call.result.states : chunk_states(call, chunks);
    state_gradients(call, chunks, states, scaled, heads, gradients.initial_state);
    inside_chunks_backward(call, tables, call.chunk, scaled, heads);
  } else {
    if (uses_parallel(kernels))
      parallel_backward(call, within, scale_gradient(call, out_gradient, kernels == Kernels::hopper), heads);
    else if (kernels == Kernels::tiles)
      tiles_backward(call, within, out_gradient, heads);
    else
      simple_backward(call, within, out_gradient, heads);
    if (chunked) chunked_backward(call, chunks, out_gradient, final_state_gradient, heads, gradients.initial_state);
  }
  for (const auto& [to, from] : {std::pair{gradients.q, heads.q}, {gradients.k, heads.k}, {gradients.v, heads.v}}) {
    if (to.size(2) < shape.heads)
      sum_groups(to, from);
    else if (to.raw() != from.raw())
      furious::copy(to, from);
  }
  if (!call.spec.decay) return;
  const Decays da(gradients.log_decay);
  const Tensor sums = tables.ends ? Tensor::empty_like(tables.decay) : Tensor();
  double* const to = sums ? sums.data<double>() : nullptr;
  scan(shape, device, DecayGradient{da, doubles(heads.row_decay), doubles(heads.key_decay), to, shape.length});
  if (!sums) return;
  const dim3 grid(blocks_for(shape.length, kScanThreads), static_cast<unsigned>(shape.heads),
                  static_cast<unsigned>(shape.batch));
  document_kernel<<<grid, kScanThreads, 0, stream(device)>>>(da, to, tables.ends.data<int32_t>(), shape.length);
  check_launch("mixer: gradient of the decay");
}

}  // namespace furious::cuda
