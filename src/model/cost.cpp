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

// Of one layer: the form that needs fewer operations.
double mixer_flops(const ModelConfig& config, int64_t batch, int64_t length, const std::vector<Pass>& passes,
                   Device device = {}, DType dtype = DType::f32) {
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
  double parallel = 0, chunked = 0;
  for (const Pass pass : passes) parallel += parallel_flops(shape, segments, pass);
  if (spec.window > 0 && spec.window < length) {  // the pairs of a window
    const auto w = static_cast<double>(spec.window), n = static_cast<double>(length);
    parallel *= (w * (w + 1) / 2 + (n - w) * w) / (n * (n + 1) / 2);
  }
  if (shape.state_rows == 0) return parallel;
  const int64_t chunk = default_chunk(spec, shape.qk_dim, shape.v_dim, device, dtype);
  for (const Pass pass : passes) chunked += chunked_flops(shape, segments, chunk, pass);
  return std::min(parallel, chunked);
}

class StepCosts {
 public:
  StepCosts(const ModelConfig& config, int64_t batch, int64_t length, Device device, DType activations)
      : config_(config),
        plan_(plan_layer(config)),
        batch_(batch),
        length_(length),
        device_(device),
        activations_(activations),
        tokens_(static_cast<double>(batch * length)),
        size_(static_cast<double>(size_of(activations))),
        value_sizes_(plan_.values.size(), size_) {
    // Time steps and decays are f32.
    for (const Op& op : plan_.ops) {
      const auto* product = std::get_if<DiscretizeOp>(&op);
      if (std::holds_alternative<HeadFunctionOp>(op) || std::holds_alternative<OriginalDecayOp>(op) ||
          (product != nullptr && plan_.values[product->y].heads == 0))
        value_sizes_[outputs_of(op).front()] = 4;
    }
  }

  std::vector<WorkCost> count() {
    const double hidden = static_cast<double>(config_.hidden) * tokens_ * size_;
    const double table = static_cast<double>(config_.vocabulary * config_.hidden);
    add(kEmbeddingWork, StepPass::forward, 0, hidden + 4 * hidden / size_);
    add(kEmbeddingWork, StepPass::backward, 0, hidden + 4 * table);
    for (const Op& op : plan_.ops) add_layers(op);
    add(kNormWork, StepPass::forward, 0, 2 * hidden);
    add(kNormWork, StepPass::backward, 0, 3 * hidden);
    // Gradients are computed with the loss, and multiplied by the upstream gradient in the backward pass.
    add(kLossWork, StepPass::forward, 6 * tokens_ * table, 2 * hidden + 8 * table);
    add(kLossWork, StepPass::backward, 0, 2 * hidden + 8 * table);
    // The norm reads gradients; AdamW reads four tensors and writes three.
    add(kOptimizerWork, StepPass::update, 0, 4 * 8 * static_cast<double>(parameter_count(config_)));
    return std::move(costs_);
  }

 private:
  // All layers.
  void add_layers(const Op& op) {
    if (std::holds_alternative<SplitOp>(op)) return;  // views
    const auto layers = static_cast<double>(config_.layers);
    const double weights = 4 * weight_count(op), outputs = bytes(outputs_of(op));
    const bool product = std::holds_alternative<LinearOp>(op), mixer = std::holds_alternative<MixerOp>(op);
    double forward = 0, backward = 0;
    if (product) forward = 2 * tokens_ * weight_count(op);
    if (const auto* conv = std::get_if<ConvOp>(&op))
      forward = 2 * tokens_ * static_cast<double>(plan_.values[conv->y].width() * conv->window);
    if (product || std::holds_alternative<ConvOp>(op)) backward = 2 * forward;
    if (mixer) {
      forward = mixer_flops(config_, batch_, length_, {Pass::forward}, device_, activations_);
      backward = mixer_flops(config_, batch_, length_, {Pass::backward}, device_, activations_);
    }
    const WorkLabel label = label_of(plan_, op);
    add(label, StepPass::forward, layers * forward, layers * (bytes(inputs_of(op)) + outputs + weights));
    // Reads the gradient of the result and what it was made from, writes the gradients of that.
    const std::vector<Value> with_gradient = differentiated(op);
    const double inputs = bytes(with_gradient);
    const double read_again = std::holds_alternative<RopeOp>(op) || std::holds_alternative<ConcatOp>(op) ? 0 : inputs;
    add(label, StepPass::backward, layers * backward,
        layers * (outputs * (mixer ? 2 : 1) + read_again + inputs + weights * (product ? 2 : 1)));
  }

  // Inputs whose gradients an operation computes; that of a residual is the gradient of the result.
  static std::vector<Value> differentiated(const Op& op) {
    if (const auto* linear = std::get_if<LinearOp>(&op)) return {linear->x};
    if (const auto* residual = std::get_if<ResidualOp>(&op)) return {residual->v};
    return inputs_of(op);
  }

  double weight_count(const Op& op) const {
    double count = 0;
    for (const Weight weight : weights_of(op)) count += static_cast<double>(plan_.weights[weight].shape.elements());
    return count;
  }
  double bytes(const std::vector<Value>& values) const {
    double sum = 0;
    for (const Value value : values)
      sum += tokens_ * value_sizes_[value] * static_cast<double>(plan_.values[value].width());
    return sum;
  }

  void add(const WorkLabel& label, StepPass pass, double flops, double bytes) {
    auto found = std::ranges::find_if(costs_, [&](const WorkCost& c) { return c.label == label && c.pass == pass; });
    if (found == costs_.end()) found = costs_.insert(costs_.end(), {label, pass});
    found->flops += flops;
    found->bytes += bytes;
  }

  const ModelConfig& config_;
  Plan plan_;
  int64_t batch_, length_;
  Device device_;
  DType activations_;
  double tokens_, size_;             // bytes of an activation
  std::vector<double> value_sizes_;  // of each value of the plan
  std::vector<WorkCost> costs_;
};

}  // namespace

double training_flops(const ModelConfig& config, int64_t batch, int64_t length) {
  // Every weight of a matrix product is used in three of them, a multiplication and an addition each.
  ModelConfig used = config;
  used.tie_embeddings = true;  // looking an embedding up costs nothing; the output projection does
  const double products = 6 * static_cast<double>(batch * length) * static_cast<double>(parameter_count(used));
  return products +
         static_cast<double>(config.layers) * mixer_flops(config, batch, length, {Pass::forward, Pass::backward});
}

std::vector<WorkCost> training_costs(const ModelConfig& config, int64_t batch, int64_t length, Device device,
                                     DType activations) {
  return StepCosts(config, batch, length, device, activations).count();
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
  const StateBytes states =
      state_bytes(config.block.mixer(), config.qk_dim, config.head_dim, length, device, activations);
  const int64_t heads = batch * config.heads();
  if (states.kept > 0) output += product(heads * (recompute ? 1 : config.layers), states.kept);
  if (states.working > states.kept) output += product(heads, states.working - states.kept);
  return {4 * parameter_count(config) * static_cast<int64_t>(sizeof(float)),
          product(tokens, layers + around) * size + output};
}

}  // namespace furious
