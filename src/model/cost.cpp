#include "model/cost.h"

#include <algorithm>
#include <cmath>

#include "ops/mixer/cost.h"
#include "ops/nn/cross_entropy.h"

namespace furious {
namespace {

// Numbers that the tape keeps of one token: what every operation of a layer returns; the layer's two sums with the
// residual are the results of products.
int64_t kept_by_layer(const ModelConfig& config) {
  const BlockConfig& block = config.block;
  const int64_t heads = config.heads();
  const int64_t out = config.out_width();
  const int64_t qk = (config.q_heads + config.k_heads) * config.qk_dim;
  int64_t kept = 4 * config.hidden + 3 * config.intermediate + config.qkv_width() + out + 3 * heads;
  if (block.conv_window > 0) kept += config.qkv_width();
  if (block.qk_activation != Activation::none) kept += qk;
  if (block.rope) kept += qk;
  if (block.has_dt()) kept += 2 * heads;
  if (block.decay != DecayKind::none) kept += (block.decay == DecayKind::softplus_dt ? 3 : 2) * heads;
  if (block.discretize != Discretization::none) kept += config.v_heads * config.head_dim;
  if (block.d_residual) kept += out;
  if (block.z_gate) kept += out;
  if (block.z_gate || block.norm == Norm::none) kept += out;
  if (config.branch > 0)
    kept += 4 * config.branch + out;  // two projections, their product, and that beside the mixer's
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
