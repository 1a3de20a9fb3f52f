#include "model/cost.h"

#include <algorithm>
#include <cmath>

#include "model/plan.h"
#include "ops/mixer/cost.h"
#include "ops/nn/cross_entropy.h"

namespace furious {
namespace {

// Numbers that the tape keeps of one token: what the operations of a layer write, and three numbers of the mixer for
// each head. The parts of a split are views.
int64_t kept_by_layer(const ModelConfig& config) {
  const Plan plan = plan_layer(config);
  int64_t kept = 3 * config.heads();
  for (const Op& op : plan.ops)
    if (!std::holds_alternative<SplitOp>(op))
      for (const Value value : outputs_of(op)) kept += plan.values[value].width();
  return kept;
}

}  // namespace

double training_flops(const ModelConfig& config, int64_t batch, int64_t length) {
  const auto tokens = static_cast<double>(batch * length);
  // Every weight of a matrix product is used in three of them, a multiplication and an addition each.
  ModelConfig used = config;
  used.tie_embeddings = true;  // looking an embedding up costs nothing; the output projection does
  double flops = 6 * tokens * static_cast<double>(parameter_count(used));
  MixerShape shape;
  shape.batch = batch;
  shape.length = length;
  shape.heads = config.heads();
  shape.qk_dim = config.qk_dim;
  shape.v_dim = config.head_dim;
  const MixerSpec spec = config.block.mixer();
  shape.state_rows = state_rows(spec, config.qk_dim);
  shape.state_columns = state_columns(spec, config.head_dim);
  const std::vector<Segment> segments = segments_of("cost", {}, batch, length);
  const auto mixer_flops = [&](auto&& count) { return count(Pass::forward) + count(Pass::backward); };
  double mixer = mixer_flops([&](Pass pass) { return parallel_flops(shape, segments, pass); });
  if (shape.state_rows > 0) {
    const int64_t chunk = default_chunk(spec, config.qk_dim, config.head_dim);
    mixer = std::min(mixer, mixer_flops([&](Pass pass) { return chunked_flops(shape, segments, chunk, pass); }));
  }
  return flops + static_cast<double>(config.layers) * mixer;
}

TrainingMemory training_memory(const ModelConfig& config, int64_t batch, int64_t length, bool recompute, Device device,
                               DType activations) {
  constexpr int64_t kMost = int64_t{1} << 56;  // numbers: what nobody has, and still fits when counted in bytes
  const int64_t tokens = batch * length;
  const int64_t layer = kept_by_layer(config);
  const int64_t layers = recompute ? config.layers * config.hidden + layer : config.layers * layer;
  // Beside the layers: embedding, last norm, its gradient; and what one layer's backward pass works on.
  const int64_t around = 4 * config.hidden + config.qkv_width() + 2 * config.intermediate;
  const auto size = static_cast<int64_t>(size_of(activations));
  const auto product = [&](int64_t a, int64_t b) { return a > kMost / b ? kMost : a * b; };
  int64_t output = std::min(most_logit_bytes(device), product(tokens, config.vocabulary) * size);
  if (activations == DType::bf16) {  // the weights, rounded
    const int64_t embedding = config.vocabulary * config.hidden;
    const int64_t in_layers = parameter_count(config) - (config.tie_embeddings ? 1 : 2) * embedding;
    output += (embedding + in_layers / (recompute ? config.layers : 1)) * size;
  }
  const int64_t states = config.qk_dim == config.head_dim
                             ? kept_state_bytes(config.block.mixer(), config.head_dim, length, device, activations)
                             : 0;
  if (states > 0) output += product(batch * config.heads() * (recompute ? 1 : config.layers), states);
  return {4 * parameter_count(config) * static_cast<int64_t>(sizeof(float)),
          product(tokens, layers + around) * size + output};
}

}  // namespace furious
