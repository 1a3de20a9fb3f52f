#include "ops/mixer/cost.h"

#include <algorithm>

namespace furious {
namespace {

// Products per (query, key) pair: q·k and w·v forward; backward those for S, G, dq, dk, dv.
double flops_per_pair(const MixerShape& shape, Pass pass) {
  const auto qk = static_cast<double>(shape.qk_dim);
  const auto v = static_cast<double>(shape.v_dim);
  return pass == Pass::forward ? 2 * qk + 2 * v : 6 * qk + 4 * v;
}

double pairs_of(double length) {
  return length * (length + 1) / 2;
}

// What the chunked form costs beside its flops, in flops at the rate of the parallel form: φ is made and contracted
// beside the products, and every token is packed once more. `furious bench auto` shows whether these fit a machine.
constexpr double kStateOverhead = 1.12;
constexpr double kTokenOverhead = 12000;

// The pairs of one head that the parallel form really visits: a block of queries stops where decay has erased
// everything before. Counted per token block, without looking inside.
double live_pairs(const Tensor& log_decay, const Segment& segment, int64_t head) {
  constexpr int64_t kStep = 64;
  const float* a = log_decay.data<float>() + segment.batch * log_decay.stride(0) + head * log_decay.stride(2);
  std::vector<double> sums;  // A at the end of each step
  double sum = 0;
  for (int64_t t = segment.begin; t < segment.end; ++t) {
    sum += static_cast<double>(a[t * log_decay.stride(1)]);
    if ((t - segment.begin + 1) % kStep == 0 || t + 1 == segment.end) sums.push_back(sum);
  }
  double pairs = 0;
  size_t oldest = 0;
  for (size_t block = 0; block < sums.size(); ++block) {
    while (oldest < block && (block == 0 ? 0.0 : sums[block - 1]) - sums[oldest] < kErased) ++oldest;
    const auto length = static_cast<double>(std::min(kStep, segment.length() - static_cast<int64_t>(block) * kStep));
    pairs += length * static_cast<double>((block - oldest) * kStep) + pairs_of(length);
  }
  return pairs;
}

}  // namespace

double parallel_flops(const MixerShape& shape, const std::vector<Segment>& segments, Pass pass) {
  double pairs = 0;
  for (const Segment& segment : segments) pairs += pairs_of(static_cast<double>(segment.length()));
  return static_cast<double>(shape.heads) * pairs * flops_per_pair(shape, pass);
}

double chunked_flops(const MixerShape& shape, const std::vector<Segment>& segments, int64_t chunk, Pass pass) {
  double inner = 0;
  double outer = 0;
  for (const Segment& segment : segments) {
    const auto length = static_cast<double>(segment.length());
    const auto chunks = static_cast<double>((segment.length() + chunk - 1) / chunk);
    inner += chunks * pairs_of(length / chunks) * flops_per_pair(shape, pass);
    // Reading and writing the state: two products forward; backward also its gradient's, and one made again.
    const double products = pass == Pass::forward ? 2 : 5;
    const double crossing = length * (chunks - 1) / chunks;
    outer += crossing * products * 2 * static_cast<double>(shape.state_rows) * static_cast<double>(shape.state_columns);
  }
  return static_cast<double>(shape.heads) * (inner + outer);
}

int64_t default_chunk(const MixerSpec& spec, int64_t qk_dim, int64_t v_dim, Device device, DType dtype) {
  if (!device.is_cpu()) {
    // Tensor cores work on these states (gpu/chunk_states.h); the larger they are, the fewer go through memory. Others
    // have φ in memory, and many kernels for each chunk.
    const auto fits = [](int64_t dim) { return dim % 8 == 0 && dim <= 256; };
    const bool squared = spec.score == Score::squared;
    if (dtype != DType::bf16 || !fits(qk_dim) || !fits(v_dim) || (!squared && spec.score != Score::linear))
      return state_rows(spec, qk_dim) < 1024 ? 256 : 512;
    if (!squared || qk_dim <= 16) return 256;
    return qk_dim <= 48 || std::max(qk_dim, v_dim) <= 64 ? 512 : qk_dim <= 128 ? 1024 : 2048;
  }
  if (spec.score == Score::linear) return 192;
  // The state is read and written once per chunk; a state too large for the cache wants fewer, longer chunks.
  return state_rows(spec, qk_dim) * v_dim <= (1 << 18) ? 192 : 384;
}

// From times on an H200 (docs/performance.md).
int64_t longest_parallel(const MixerSpec& spec, int64_t qk_dim, int64_t v_dim) {
  if (spec.score != Score::squared) return 1024;
  if (std::max(qk_dim, v_dim) <= 64) return 39 * (qk_dim + v_dim);
  // Where the products are as many as those of the states.
  return 4 * state_rows(spec, qk_dim) * state_columns(spec, v_dim) / (qk_dim + v_dim);
}

bool states_are_kept(const MixerSpec& spec, int64_t qk_dim) {
  return spec.score != Score::squared || (qk_dim > 16 && qk_dim <= 64);
}

StateBytes state_bytes(const MixerSpec& spec, int64_t qk_dim, int64_t v_dim, int64_t length, Device device,
                       DType dtype) {
  if (device.is_cpu() || dtype != DType::bf16 || spec.signed_decay || qk_dim % 8 != 0 || v_dim % 8 != 0 ||
      std::max(qk_dim, v_dim) > (spec.score == Score::linear ? 256 : 128) ||
      length <= longest_parallel(spec, qk_dim, v_dim))
    return {};
  const auto panels = [](int64_t dim) { return (dim + 63) / 64; };
  const int64_t chunk = default_chunk(spec, qk_dim, v_dim, device, dtype), chunks = (length + chunk - 1) / chunk;
  constexpr int64_t kTile = int64_t{64} * 64 * 2;
  if (spec.score == Score::linear) {
    if (spec.norm != Norm::none || (v_dim <= 64 && qk_dim <= 128)) return {};  // a walk keeps little
    const int64_t bytes = chunks * panels(qk_dim) * panels(v_dim) * kTile;
    return {bytes, 4 * bytes};  // with their gradients, and the f32 sums of chunks
  }
  if (spec.score != Score::squared || (qk_dim <= 64 && v_dim > 64)) return {};
  const int64_t blocks = (qk_dim + 15) / 16;
  const int64_t bytes = chunks * (panels(qk_dim) * panels(qk_dim) + panels(v_dim) * blocks * (2 * blocks + 1)) * kTile;
  return states_are_kept(spec, qk_dim) ? StateBytes{bytes, bytes} : StateBytes{0, 2 * bytes};
}

Form choose_form(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                 const std::vector<Segment>& segments, int64_t chunk) {
  if (shape.state_rows == 0) return Form::parallel;
  double chunked = chunked_flops(shape, segments, chunk, Pass::forward) * kStateOverhead;
  for (const Segment& segment : segments)
    if (segment.length() > chunk) chunked += static_cast<double>(shape.heads * segment.length()) * kTokenOverhead;
  double parallel = parallel_flops(shape, segments, Pass::forward);
  if (parallel > chunked && spec.decay) {
    parallel = 0;
    for (const Segment& segment : segments)
      for (int64_t head = 0; head < shape.heads; ++head)
        parallel += live_pairs(inputs.log_decay, segment, head) * flops_per_pair(shape, Pass::forward);
  }
  return parallel <= chunked ? Form::parallel : Form::chunked;
}

}  // namespace furious
