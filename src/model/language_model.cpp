#include "model/language_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "decode/token_linear.h"
#include "decode/token_program.h"
#include "ops/elementwise.h"
#include "ops/nn/conv.h"
#include "ops/nn/cross_entropy.h"
#include "ops/nn/decay.h"
#include "ops/nn/embedding.h"
#include "ops/nn/linear.h"
#include "ops/nn/rms_norm.h"
#include "ops/nn/swiglu.h"
#include "ops/optim/adamw.h"
#include "ops/random.h"
#include "ops/views.h"
#include "tensor/check.h"
#include "tensor/graph.h"

namespace furious {
namespace {

MixerCache::Sizes cache_sizes(const ModelConfig& config, int64_t batch) {
  return {batch, config.q_heads, config.k_heads, config.v_heads, config.qk_dim, config.head_dim};
}

double dt_bias_of(double log_dt) {
  const double dt = std::exp(log_dt);
  return dt + std::log(-std::expm1(-dt));  // softplus⁻¹
}

HeadFunction time_step_of(const BlockConfig& block) {
  HeadFunction function;
  function.f = block.discretize == Discretization::sigmoid ? Activation::sigmoid : Activation::softplus;
  if (block.dt_limit > 0) function.limit = static_cast<float>(block.dt_limit);
  return function;
}

// The square of a mask has twice its logarithm.
float decay_factor(const BlockConfig& block) {
  return block.square_mask ? 2.0f : 1.0f;
}

// Of the decay's projection.
HeadFunction decay_of(const BlockConfig& block) {
  HeadFunction function;
  function.factor = -decay_factor(block);
  if (block.decay == DecayKind::softplus2) function.f = Activation::softplus2;
  if (block.decay == DecayKind::silu) function.f = Activation::silu;
  if (block.decay == DecayKind::log_sigmoid) {
    function.f = Activation::log_sigmoid;
    function.factor = decay_factor(block);
  }
  return function;
}

bool scales_values(const BlockConfig& block) {
  return block.discretize == Discretization::dt || block.discretize == Discretization::sigmoid;
}

Activation value_activation(const BlockConfig& block) {
  switch (block.discretize) {
    case Discretization::silu:
      return Activation::silu;
    case Discretization::softplus:
      return Activation::softplus;
    case Discretization::softplus2:
      return Activation::softplus2;
    case Discretization::none:
    case Discretization::dt:
    case Discretization::sigmoid:
      return Activation::none;
  }
  return Activation::none;
}

double rms_of(const Tensor& x) {
  const Tensor exact = to_dtype(x, DType::f32);
  return gradient_norm(std::span(&exact, 1)) / std::sqrt(static_cast<double>(exact.elements()));
}

}  // namespace

// Makes parameters in order: new ones, each of which draws from a random stream of its own, so that one switch does not
// move the others' numbers, or ones that `fill` gives. With a `visit`, it tells of them and makes none.
class LanguageModel::Maker {
 public:
  Maker(std::vector<Parameter>& parameters, Device device, uint64_t seed, Initialization initialization)
      : parameters_(parameters), device_(device), seed_(seed), initialization_(initialization) {}
  Maker(std::vector<Parameter>& parameters, Device device, Fill fill)
      : parameters_(parameters), device_(device), fill_(std::move(fill)) {}
  Maker(std::vector<Parameter>& parameters, Visit visit) : parameters_(parameters), visit_(std::move(visit)) {}

  Variable normal(const std::string& name, const Shape& shape) {
    return add(name, shape, [&](const Tensor& x, uint64_t stream) { fill_normal(x, 0, 0.02f, seed_, stream); });
  }
  Variable uniform(const std::string& name, const Shape& shape, float low, float high) {
    return add(name, shape, [&](const Tensor& x, uint64_t stream) { fill_uniform(x, low, high, seed_, stream); });
  }
  Variable constant(const std::string& name, const Shape& shape, float value) {
    return add(name, shape, [&](const Tensor& x, uint64_t) { furious::fill(x, value); });
  }
  // The weight [out, in] of a linear layer inside the decoder layers, and the bias of one that reads `in` numbers.
  Variable linear(const std::string& name, const Shape& shape) {
    if (initialization_ != Initialization::pytorch) return normal(name, shape);
    return around_zero(name, shape, shape[1]);
  }
  Variable bias(const std::string& name, int64_t size, int64_t in) {
    return initialization_ == Initialization::pytorch ? around_zero(name, {size}, in) : constant(name, {size}, 0);
  }
  // Of a convolution [channels, window].
  Variable taps(const std::string& name, const Shape& shape) {
    const int64_t window = shape[1];
    if (initialization_ != Initialization::identity) return around_zero(name, shape, window);
    return add(name, shape, [&](const Tensor& out, uint64_t stream) {
      const Tensor x = Tensor::empty(shape, DType::f32);
      fill_normal(x, 0, 0.02f, seed_, stream);
      for (int64_t i = window - 1; i < x.elements(); i += window) x.data<float>()[i] += 1;
      copy_between(out, x);
    });
  }
  // f(u) of numbers u that are uniform in [low, high); f of the CPU, for the same bits everywhere.
  Variable mapped(const std::string& name, const Shape& shape, float low, float high, double (*f)(double)) {
    return add(name, shape, [&](const Tensor& out, uint64_t stream) {
      const Tensor x = Tensor::empty(shape, DType::f32);
      fill_uniform(x, low, high, seed_, stream);
      for (int64_t i = 0; i < x.elements(); ++i)
        x.data<float>()[i] = static_cast<float>(f(static_cast<double>(x.data<float>()[i])));
      copy_between(out, x);
    });
  }

 private:
  Variable around_zero(const std::string& name, const Shape& shape, int64_t fan_in) {
    const float bound = 1 / std::sqrt(static_cast<float>(fan_in));
    return uniform(name, shape, -bound, bound);
  }

  template <class New>
  Variable add(const std::string& name, const Shape& shape, New&& new_values) {
    if (visit_) {
      visit_(name, shape);
      return {};
    }
    const Tensor value = Tensor::empty(shape, DType::f32, device_);
    if (fill_)
      fill_(name, value);
    else
      new_values(value, hash_of(name));
    Variable variable(value, true);
    parameters_.push_back({name, variable});
    return variable;
  }

  std::vector<Parameter>& parameters_;
  Device device_;
  uint64_t seed_ = 0;
  Initialization initialization_ = Initialization::furious;
  Fill fill_;
  Visit visit_;
};

ModelCache::ModelCache(const ModelConfig& config, int64_t batch, Device device)
    : batch_(batch), rows_(all_slots(batch, device)) {
  for (int64_t i = 0; i < config.layers; ++i) {
    Layer layer{MixerCache(config.block.mixer(), cache_sizes(config, batch), device), {}};
    if (config.block.conv_window > 0)
      layer.conv = Tensor::zeros({batch, config.block.conv_window - 1, config.qkv_width()}, DType::f32, device);
    layers_.push_back(std::move(layer));
  }
}

namespace {

constexpr Tensor MixerContents::*kMixerTensors[] = {&MixerContents::k, &MixerContents::v, &MixerContents::log_decay,
                                                    &MixerContents::state};

// The contents of all slots, which have read as many tokens, as those of one with a batch.
MixerContents joined_contents(const MixerCache& cache, Device where) {
  MixerContents all = cache.contents(0, where);
  for (Tensor MixerContents::*x : kMixerTensors) {
    if (!(all.*x) || cache.slots() == 1) continue;
    Shape shape = (all.*x).shape();
    shape[0] = cache.slots();
    const Tensor batch = Tensor::empty(shape, DType::f32, where);
    for (int64_t slot = 0; slot < cache.slots(); ++slot) copy(batch.slice(0, slot, 1), cache.contents(slot, where).*x);
    all.*x = batch;
  }
  return all;
}

void restore_joined(MixerCache& cache, const MixerContents& all) {
  for (int64_t slot = 0; slot < cache.slots(); ++slot) {
    MixerContents one = all;
    for (Tensor MixerContents::*x : kMixerTensors) {
      if (!(all.*x) || (all.*x).rank() == 0) continue;
      ArgumentCheck("model_cache").contiguous("contents", all.*x);
      require((all.*x).size(0) == cache.slots(), "model_cache: contents of {} sequences, expected {}", (all.*x).size(0),
              cache.slots());
      one.*x = (all.*x).slice(0, slot, 1);
    }
    cache.restore(slot, one);
  }
}

// Calls f(name, tensor) for each tensor of a layer's cache.
void for_each_tensor(int64_t layer, auto& mixer, auto& conv, auto&& f) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  f(prefix + "k", mixer.k);
  f(prefix + "v", mixer.v);
  f(prefix + "log_decay", mixer.log_decay);
  f(prefix + "state", mixer.state);
  f(prefix + "conv", conv);
}

}  // namespace

ModelCache::Contents ModelCache::contents(Device where) const {
  Contents contents;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const MixerContents mixer = joined_contents(layers_[i].mixer, where);
    const Tensor& conv = layers_[i].conv;
    const Tensor conv_contents = conv ? to_device(to_dtype(conv, DType::f32), where) : conv;
    contents.tokens = mixer.tokens;
    contents.pending = mixer.pending;
    for_each_tensor(static_cast<int64_t>(i), mixer, conv_contents, [&](const std::string& name, const Tensor& x) {
      if (x) contents.tensors[name] = x;
    });
  }
  return contents;
}

ModelCache::ModelCache(const ModelConfig& config, int64_t batch, const Contents& contents, Device device)
    : batch_(batch), rows_(all_slots(batch, device)) {
  size_t used = 0;
  for (int64_t i = 0; i < config.layers; ++i) {
    MixerContents mixer{contents.tokens, contents.pending, {}, {}, {}, {}};
    Tensor conv;
    for_each_tensor(i, mixer, conv, [&](const std::string& name, Tensor& x) {
      const auto found = contents.tensors.find(name);
      if (found == contents.tensors.end()) return;
      x = found->second;
      ++used;
    });
    require(conv.defined() == (config.block.conv_window > 0),
            "model_cache: the convolution's inputs are in the contents or in the model, but not in both");
    if (conv)
      ArgumentCheck("model_cache")
          .dense("conv", conv, DType::f32, {batch, config.block.conv_window - 1, config.qkv_width()}, conv.device());
    layers_.push_back({MixerCache(config.block.mixer(), cache_sizes(config, batch), device),
                       conv ? to_dtype(to_device(conv, device), DType::f32) : conv});  // its own: a step writes it
    restore_joined(layers_.back().mixer, mixer);
  }
  require(used == contents.tensors.size(), "model_cache: contents with {} tensors, the model knows {} of them",
          contents.tensors.size(), used);
}

int64_t ModelCache::bytes() const {
  int64_t sum = 0;
  for (const Layer& layer : layers_)
    sum += layer.mixer.bytes() + (layer.conv ? static_cast<int64_t>(layer.conv.bytes()) : 0);
  return sum;
}

Compute compute_in(DType dtype, Device device) {
  Compute compute;
  compute.precision = dtype == DType::bf16 ? MatmulPrecision::bf16 : MatmulPrecision::f32;
  if (!device.is_cpu()) compute.activations = dtype;
  return compute;
}

const std::vector<std::string>& initialization_names() {
  static const std::vector<std::string> names{"furious", "pytorch", "identity"};
  return names;
}

Initialization initialization_from_name(std::string_view name) {
  const std::vector<std::string>& names = initialization_names();
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) unknown_name("initialization", name, names);
  return static_cast<Initialization>(found - names.begin());
}

LanguageModel::LanguageModel(const ModelConfig& config, uint64_t seed, Device device, Initialization initialization)
    : LanguageModel(config, device) {
  Maker maker(parameters_, device, seed, initialization);
  make(maker);
}

LanguageModel::LanguageModel(const ModelConfig& config, const Fill& fill, Device device)
    : LanguageModel(config, device) {
  Maker maker(parameters_, device, fill);
  make(maker);
}

void LanguageModel::visit_parameters(const ModelConfig& config, const Visit& visit) {
  LanguageModel model(config, Device{});
  Maker maker(model.parameters_, visit);
  model.make(maker);
}

void LanguageModel::make(Maker& maker) {
  const ModelConfig& config = config_;
  check_config(config);
  const BlockConfig& block = config.block;
  const int64_t heads = config.heads();
  const int64_t out_width = config.out_width();
  embedding_ = maker.normal("model.embed_tokens.weight", {config.vocabulary, config.hidden});
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string layer_name = fmt::format("model.layers.{}.", i);
    const std::string mixing = layer_name + "self_attn.";
    Layer layer;
    layer.input_norm = maker.constant(layer_name + "input_layernorm.weight", {config.hidden}, 1);
    layer.qkv = maker.linear(mixing + "qkv_proj.weight", {config.qkv_width(), config.hidden});
    if (block.conv_window > 0) {
      layer.conv_weight = maker.taps(mixing + "conv1d.weight", {config.qkv_width(), block.conv_window});
      if (block.conv_bias) layer.conv_bias = maker.bias(mixing + "conv1d.bias", config.qkv_width(), block.conv_window);
    }
    if (block.has_dt()) layer.dt = maker.linear(mixing + "dt_proj.weight", {heads, config.hidden});
    if (block.dt_bias)
      layer.dt_bias = maker.mapped(mixing + "dt_proj.bias", {heads}, std::log(0.001f), std::log(0.1f), dt_bias_of);
    if (block.has_decay_projection())
      layer.a_mask = maker.linear(mixing + "A_mask_proj.weight", {heads, config.hidden});
    if (block.decay_bias) layer.a_mask_bias = maker.constant(mixing + "A_mask_proj.bias", {heads}, 0);
    if (block.decay == DecayKind::original) layer.a_log = maker.mapped(mixing + "A_log", {heads}, 1, 16, std::log);
    if (block.d_residual) layer.d = maker.constant(mixing + "D", {heads, config.head_dim}, 1);
    if (block.z_gate) {
      layer.z_gate = maker.linear(mixing + "z_gate_proj.weight", {out_width, config.hidden});
      if (block.z_gate_bias) layer.z_gate_bias = maker.bias(mixing + "z_gate_proj.bias", out_width, config.hidden);
    }
    if (block.norm == Norm::none) layer.out_norm = maker.constant(mixing + "out_norm.weight", {out_width}, 1);
    if (config.branch > 0) {
      layer.branch_gate = maker.linear(mixing + "branch_gate_proj.weight", {config.branch, config.hidden});
      layer.branch = maker.linear(mixing + "branch_proj.weight", {config.branch, config.hidden});
    }
    layer.out = maker.linear(mixing + "o_proj.weight", {config.hidden, config.branch + out_width});
    layer.mlp_norm = maker.constant(layer_name + "post_attention_layernorm.weight", {config.hidden}, 1);
    layer.gate = maker.linear(layer_name + "mlp.gate_proj.weight", {config.intermediate, config.hidden});
    layer.up = maker.linear(layer_name + "mlp.up_proj.weight", {config.intermediate, config.hidden});
    layer.down = maker.linear(layer_name + "mlp.down_proj.weight", {config.hidden, config.intermediate});
    layers_.push_back(layer);
  }
  norm_ = maker.constant("model.norm.weight", {config.hidden}, 1);
  if (!config.tie_embeddings) head_ = maker.normal("lm_head.weight", {config.vocabulary, config.hidden});
}

int64_t LanguageModel::new_version() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

void LanguageModel::set_compute(const Compute& compute) {
  compute_ = compute;
  version_ = new_version();
}

void LanguageModel::round_weights() {
  version_ = new_version();
  const auto round = [](Variable& weight) {
    if (weight) weight = Variable(to_dtype(weight.value(), DType::bf16));
  };
  head_ = output_weight();
  round(head_);
  for (Layer& l : layers_)
    for (Variable* weight :
         {&l.qkv, &l.dt, &l.a_mask, &l.z_gate, &l.branch_gate, &l.branch, &l.out, &l.gate, &l.up, &l.down})
      round(*weight);
}

int64_t LanguageModel::bytes_per_token() const {
  size_t bytes = 0;
  const auto count = [&](const Variable& weight) { bytes += weight ? weight.value().bytes() : 0; };
  count(norm_);
  count(output_weight());
  for (const Layer& l : layers_)
    for (const Variable& weight :
         {l.input_norm,  l.qkv,   l.conv_weight, l.conv_bias, l.dt,          l.dt_bias,  l.a_mask,
          l.a_mask_bias, l.a_log, l.d,           l.z_gate,    l.z_gate_bias, l.out_norm, l.branch_gate,
          l.branch,      l.out,   l.mlp_norm,    l.gate,      l.up,          l.down})
      count(weight);
  return static_cast<int64_t>(bytes);
}

Variable LanguageModel::mix(Tape& tape, const Variable& q, const Variable& k, const Variable& v,
                            const Variable& log_decay, const Tensor& boundaries, ModelCache::Layer* cache) const {
  const MixerOptions options{.precision = compute_.mixer};
  if (cache == nullptr) return mixer(tape, config_.block.mixer(), q, k, v, log_decay, boundaries, options);
  const auto row = [](const Variable& x, int64_t slot) { return x ? x.value().slice(0, slot, 1) : Tensor(); };
  const int64_t batch = v.value().size(0);
  if (batch == 1)
    return Variable(cache->mixer.prefill(0, {q.value(), k.value(), v.value(), log_decay.value(), {}, {}}, options));
  const Tensor out =
      Tensor::empty({batch, v.value().size(1), config_.heads(), config_.head_dim}, v.value().dtype(), device_);
  for (int64_t slot = 0; slot < batch; ++slot)
    copy(out.slice(0, slot, 1),
         cache->mixer.prefill(slot, {row(q, slot), row(k, slot), row(v, slot), row(log_decay, slot), {}, {}}, options));
  return Variable(out);
}

Variable LanguageModel::block(Tape& tape, size_t index, const Variable& x, const Tensor& boundaries, ModelCache* caches,
                              const Observer& observe) const {
  const Layer& layer = layers_[index];
  ModelCache::Layer* cache = caches ? &caches->layers_[index] : nullptr;
  const BlockConfig& block = config_.block;
  const Variable h = rms_norm(tape, x, layer.input_norm, config_.norm_eps);
  const int64_t seen = cache ? cache->mixer.tokens(0) : 0;
  std::vector<Variable> weights{layer.qkv};
  if (block.has_dt()) weights.push_back(layer.dt);
  if (block.has_decay_projection()) weights.push_back(layer.a_mask);
  const std::vector<Variable> projected = project(tape, h, weights);
  Variable qkv = projected.front();
  if (block.conv_window > 0) {
    const Activation after = block.conv_silu ? Activation::silu : Activation::none;
    if (cache == nullptr) {
      qkv = conv(tape, qkv, layer.conv_weight, layer.conv_bias, after, boundaries);
    } else {
      const Tensor before = qkv.value();
      const Tensor weight = layer.conv_weight.value(), bias = layer.conv_bias.value();
      qkv = Variable(conv_forward(before, weight, bias, after, {}, cache->conv));
      cache->conv = conv_state(before, block.conv_window, {}, cache->conv);
    }
  }
  const std::vector<Variable> parts = split_heads(
      tape, qkv,
      {{config_.q_heads, config_.qk_dim}, {config_.k_heads, config_.qk_dim}, {config_.v_heads, config_.head_dim}});
  Variable q = activation(tape, parts[0], block.qk_activation);
  Variable k = activation(tape, parts[1], block.qk_activation);
  const Variable& v = parts[2];
  if (block.rope) {
    const Rope positions{block.rope_pairing, block.rope_base, seen, {}, {}};
    q = rope(tape, q, positions, boundaries);
    k = rope(tape, k, positions, boundaries);
  }
  Variable dt, log_decay;
  const Shape& shape = h.value().shape();
  if (block.has_dt()) dt = head_function(tape, projected[1], layer.dt_bias, time_step_of(block));
  if (block.has_decay_projection())
    log_decay = head_function(tape, projected.back(), layer.a_mask_bias, decay_of(block));
  if (block.decay == DecayKind::softplus_dt) {  // times dt, as values of one dimension are
    const Shape per_head = log_decay.value().shape();
    log_decay = reshape(tape, log_decay, {shape[0], shape[1], config_.heads(), 1});
    log_decay = reshape(tape, discretize(tape, log_decay, dt), per_head);
  }
  if (block.decay == DecayKind::original) log_decay = original_decay(tape, dt, layer.a_log, decay_factor(block));

  const Variable values = scales_values(block) ? discretize(tape, v, dt) : activation(tape, v, value_activation(block));
  if (observe) observe(fmt::format("model.layers.{}.self_attn.values", index), values.value());
  Variable o = mix(tape, q, k, values, log_decay, boundaries, cache);
  if (block.d_residual) o = d_residual(tape, o, v, layer.d);
  o = reshape(tape, o, {shape[0], shape[1], config_.out_width()});
  Variable z;
  if (block.z_gate) z = project(tape, h, layer.z_gate, layer.z_gate_bias);
  if (block.norm == Norm::none)
    o = rms_norm(tape, o, layer.out_norm, block.out_norm_eps, z);
  else if (z)
    o = swiglu(tape, z, o);  // silu(z) ⊙ o
  if (config_.branch > 0) {
    const std::vector<Variable> inner = project(tape, h, {layer.branch_gate, layer.branch});
    o = concat(tape, swiglu(tape, inner[0], inner[1]), o);
  }
  return project(tape, o, layer.out, {}, x);
}

Variable LanguageModel::project(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                                const Variable& residual) const {
  return linear(tape, x, weight, bias, compute_.precision, residual);
}

std::vector<Variable> LanguageModel::project(Tape& tape, const Variable& x,
                                             const std::vector<Variable>& weights) const {
  if (weights.size() == 1) return {project(tape, x, weights.front())};
  std::vector<Variable> all = weights;
  std::vector<int64_t> sizes;
  int64_t width = 0;
  for (const Variable& weight : weights) {
    sizes.push_back(weight.value().size(0));
    width += sizes.back();
  }
  // On a GPU, matrix products and mixers are slow where rows do not begin at a multiple of 16 bytes.
  constexpr int64_t kAligned = 8;
  if (width % kAligned != 0 && !device_.is_cpu() && x.value().dtype() == DType::bf16) {
    const Tensor& first = weights.front().value();
    sizes.push_back(kAligned - width % kAligned);
    all.emplace_back(Tensor::zeros({sizes.back(), first.size(1)}, first.dtype(), device_));
  }
  std::vector<Variable> parts = split(tape, joined_linear(tape, x, all, compute_.precision), sizes);
  parts.resize(weights.size());
  return parts;
}

Variable LanguageModel::mlp(Tape& tape, const Layer& layer, const Variable& x) const {
  const Variable m = rms_norm(tape, x, layer.mlp_norm, config_.norm_eps);
  const std::vector<Variable> inner = project(tape, m, {layer.gate, layer.up});
  return project(tape, swiglu(tape, inner[0], inner[1]), layer.down, {}, x);
}

Variable LanguageModel::hidden(Tape& tape, const Tensor& tokens, const Tensor& boundaries, ModelCache* cache,
                               const Observer& observe) const {
  ArgumentCheck("language_model").rank("tokens", tokens, 2);
  const auto seen = [observe](const std::string& place, const Variable& out) {
    if (observe) observe(place, out.value());
  };
  Variable x = embedding(tape, embedding_, here("tokens", tokens, 0), compute_.activations);
  seen("model.embed_tokens", x);
  for (size_t i = 0; i < layers_.size(); ++i) {
    // Holds what it needs by value: recomputed() runs it again when this function has returned.
    const auto layer = [this, i, boundaries, cache, observe, seen](Tape& t, const Variable& input) {
      const Variable mixed = block(t, i, input, boundaries, cache, observe);
      seen(fmt::format("model.layers.{}.self_attn", i), mixed);
      const Variable out = mlp(t, layers_[i], mixed);
      seen(fmt::format("model.layers.{}.mlp", i), out);
      return out;
    };
    x = compute_.recompute ? recomputed(tape, x, layer) : layer(tape, x);
  }
  x = rms_norm(tape, x, norm_, config_.norm_eps);
  seen("model.norm", x);
  return x;
}

// Token ids that enter from the CPU, checked, on the model's device.
Tensor LanguageModel::here(std::string_view argument, const Tensor& ids, int64_t first) const {
  const ArgumentCheck check("language_model");
  check.dtype(argument, ids, {DType::i32});
  if (ids.device() == device_) return ids;
  check.token_ids(argument, ids, first, config_.vocabulary);
  return to_device(ids, device_);
}

Variable LanguageModel::loss(Tape& tape, const Tensor& tokens, const Tensor& targets, const Tensor& boundaries,
                             const Tensor& row_losses) const {
  const Tensor targets_here = here("targets", targets, kIgnoredTarget);
  return cross_entropy(tape, hidden(tape, tokens, boundaries, nullptr), output_weight(), targets_here, row_losses,
                       compute_.precision);
}

Tensor LanguageModel::logits(const Tensor& tokens, const Tensor& boundaries) const {
  const Tensor h = hidden(Tape::off(), tokens, boundaries, nullptr).value();
  return to_device(logits_forward(h, output_weight().value()), {});
}

Tensor LanguageModel::read(ModelCache& cache, const Tensor& tokens) const {
  ArgumentCheck("language_model.read").shape("tokens", tokens, {cache.batch(), ArgumentCheck::kAny});
  if (tokens.size(1) == 1) return to_device(step(cache, tokens), {});
  const Tensor h = hidden(Tape::off(), tokens, {}, &cache).value();
  return to_device(logits_forward(h.select(1, h.size(1) - 1), output_weight().value()), {});
}

TokenMixing LanguageModel::token_mixing_of(const Layer& layer) const {
  const BlockConfig& block = config_.block;
  TokenMixing mixing;
  mixing.qkv = layer.qkv.value();
  mixing.conv_weight = layer.conv_weight.value();
  mixing.conv_bias = layer.conv_bias.value();
  mixing.dt = layer.dt.value();
  mixing.dt_bias = layer.dt_bias.value();
  mixing.a_mask = layer.a_mask.value();
  mixing.a_mask_bias = layer.a_mask_bias.value();
  mixing.a_log = layer.a_log.value();
  mixing.z_gate = layer.z_gate.value();
  mixing.z_gate_bias = layer.z_gate_bias.value();
  mixing.after_conv = block.conv_silu ? Activation::silu : Activation::none;
  mixing.qk_activation = block.qk_activation;
  mixing.qk_width = (config_.q_heads + config_.k_heads) * config_.qk_dim;
  mixing.time_step = time_step_of(block);
  mixing.decay = decay_of(block);
  mixing.decay_times_dt = block.decay == DecayKind::softplus_dt;
  mixing.original_factor = decay_factor(block);
  return mixing;
}

// Every layer for one token: what block() and mlp() do for many.
Tensor LanguageModel::token_pass(ModelCache& cache, const Tensor& tokens) const {
  const BlockConfig& block = config_.block;
  const int64_t batch = tokens.size(0), heads = config_.heads(), dim = config_.head_dim;
  const MatmulPrecision precision = compute_.precision;
  const Tensor x = embedding_forward(embedding_.value(), tokens, compute_.activations).view({batch, config_.hidden});
  const auto normed = [&](const Variable& norm) { return TokenInput{x, {}, norm.value(), config_.norm_eps}; };
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    ModelCache::Layer& memory = cache.layers_[i];
    const TokenMixed mixed =
        token_mixing(normed(layer.input_norm), token_mixing_of(layer), memory.conv, cache.rows_, precision);
    const auto part = [&](int64_t begin, int64_t own_heads, int64_t own_dim) {
      return mixed.qkv.view({batch, 1, config_.qkv_width()})
          .slice(2, begin, own_heads * own_dim)
          .split_dim(2, own_heads, own_dim);
    };
    const int64_t q_width = config_.q_heads * config_.qk_dim, k_width = config_.k_heads * config_.qk_dim;
    Tensor q = part(0, config_.q_heads, config_.qk_dim), k = part(q_width, config_.k_heads, config_.qk_dim);
    const Tensor v = part(q_width + k_width, config_.v_heads, dim);
    if (block.rope) {
      const Rope positions{block.rope_pairing, block.rope_base, 0, memory.mixer.positions(), cache.rows_.table};
      q = rope_forward(q, positions);
      k = rope_forward(k, positions);
    }
    Tensor values = v;
    if (scales_values(block)) values = discretize_forward(v, mixed.dt.view({batch, 1, heads}));
    if (value_activation(block) != Activation::none) values = activation_forward(v, value_activation(block));
    Tensor o = memory.mixer.step(cache.rows_, q.select(1, 0), k.select(1, 0), values.select(1, 0), mixed.log_decay);
    if (block.d_residual) o = d_residual_forward(o.view({batch, 1, heads, dim}), v, layer.d.value());
    TokenInput out{o.view({batch, config_.out_width()}), mixed.z, layer.out_norm.value(), block.out_norm_eps};
    if (config_.branch > 0) {
      const Tensor branch =
          token_swiglu(normed(layer.input_norm), layer.branch_gate.value(), layer.branch.value(), precision);
      out = {concat_forward(branch, prepared(out)), {}, {}, 0};
    }
    token_add(x, out, layer.out.value(), precision);
    const Tensor m = token_swiglu(normed(layer.mlp_norm), layer.gate.value(), layer.up.value(), precision);
    token_add(x, {m, {}, {}, 0}, layer.down.value(), precision);
  }
  return token_logits(normed(norm_), output_weight().value());
}

// Whether token_pass() can be one kernel.
bool LanguageModel::fits_program(const ModelCache& cache) const {
  const BlockConfig& block = config_.block;
  if (device_.is_cpu() || !compute_.token_program || compute_.activations != DType::bf16 ||
      output_weight().value().dtype() != DType::bf16 || block.rope || block.discretize != Discretization::none ||
      block.d_residual || config_.branch > 0 || block.mixer().degree > 0 || config_.qk_dim != config_.head_dim ||
      !knows_functions(token_mixing_of(layers_.front())) || !cache.layers_.front().mixer.has_folded(0))
    return false;
  return TokenProgram::fits(device_,
                            {cache.batch(), config_.heads(), config_.head_dim,
                             std::max({config_.hidden, config_.intermediate, config_.out_width()}), config_.hidden});
}

std::string_view LanguageModel::step_runs_as(const ModelCache& cache) const {
  if (device_.is_cpu()) return "operations";
  return fits_program(cache) ? "one kernel" : "graph";
}

Tensor LanguageModel::step(ModelCache& cache, const Tensor& tokens) const {
  ArgumentCheck("language_model.step").shape("tokens", tokens, {cache.batch(), 1});
  const Tensor ids = here("tokens", tokens, 0);
  for (ModelCache::Layer& layer : cache.layers_) layer.mixer.prepare(cache.rows_, compute_.activations);
  if (!cache.ids_) cache.ids_ = Tensor::empty_like(ids);
  const bool as_program = fits_program(cache);
  if (!as_program) copy(cache.ids_, ids);
  cache.ran_as_ = "operations";
  if (device_.is_cpu()) return token_pass(cache, cache.ids_);
  ModelCache::Recording& recorded = cache.recorded_;
  if (recorded.version != version_) {
    recorded = {version_, {}, {}, {}};
    if (!as_program) return token_pass(cache, cache.ids_);  // the first token makes everything ready
  }
  std::vector<int64_t> places;
  for (const ModelCache::Layer& layer : cache.layers_) {
    places.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(layer.conv.raw())));
    for (int64_t place : layer.mixer.recording(cache.rows_)) places.push_back(place);
  }
  if (recorded.run && recorded.places == places) {
    for (ModelCache::Layer& layer : cache.layers_) layer.mixer.advance(cache.rows_);
  } else {
    recorded.run = {};
    recorded.logits = {};
    recorded.places = std::move(places);
    const auto record = [&]<class Record>() {
      Tensor logits;
      const auto made = std::make_shared<Record>(device_, [&] { logits = token_pass(cache, cache.ids_); });
      // The logits lie in the record's memory: who holds them holds the record.
      const auto owner = std::make_shared<std::pair<std::shared_ptr<Record>, Tensor>>(made, logits);
      recorded.logits = Tensor::wrap(logits.raw(), logits.shape(), logits.dtype(), device_, owner);
      recorded.run = [made](const Tensor& own) {
        if constexpr (std::is_same_v<Record, TokenProgram>)
          made->run(own);
        else
          made->run();
      };
    };
    as_program ? record.operator()<TokenProgram>() : record.operator()<Graph>();
  }
  recorded.run(ids);
  cache.ran_as_ = as_program ? "one kernel" : "graph";
  return recorded.logits;
}

std::string LanguageModel::first_not_finite(const Tensor& tokens, const Tensor& boundaries) const {
  std::string first;
  int64_t layers_done = 0;
  try {
    hidden(Tape::off(), tokens, boundaries, nullptr, [&](const std::string& place, const Tensor& out) {
      if (first.empty() && !std::isfinite(rms_of(out))) first = place;
      if (place.ends_with(".mlp")) ++layers_done;
    });
  } catch (const Error&) {  // the mixer refuses decays that are not finite
    if (first.empty()) first = fmt::format("model.layers.{}.self_attn", layers_done);
  }
  return first;
}

std::vector<double> LanguageModel::value_rms(const Tensor& tokens, const Tensor& boundaries) const {
  std::vector<double> rms;
  hidden(Tape::off(), tokens, boundaries, nullptr, [&](const std::string& place, const Tensor& out) {
    if (place.ends_with(".values")) rms.push_back(rms_of(out));
  });
  return rms;
}

}  // namespace furious
