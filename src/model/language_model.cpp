#include "model/language_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "ops/elementwise.h"
#include "ops/nn/cross_entropy.h"
#include "ops/nn/embedding.h"
#include "ops/nn/layer_norm.h"
#include "ops/nn/linear.h"
#include "ops/nn/rms_norm.h"
#include "ops/optim/adamw.h"
#include "ops/random.h"
#include "tensor/check.h"

namespace furious {
namespace {

double dt_bias_of(double log_dt) {
  const double dt = std::exp(log_dt);
  return dt + std::log(-std::expm1(-dt));  // softplus⁻¹
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
  Maker(std::vector<Parameter>& parameters, Device device, uint64_t seed, Initialization initialization,
        std::function<void()> before_each, DType matrices)
      : parameters_(parameters),
        device_(device),
        matrices_(matrices),
        seed_(seed),
        initialization_(initialization),
        before_each_(std::move(before_each)) {}
  Maker(std::vector<Parameter>& parameters, Device device, Fill fill, DType matrices)
      : parameters_(parameters), device_(device), matrices_(matrices), fill_(std::move(fill)) {}
  Maker(std::vector<Parameter>& parameters, Visit visit) : parameters_(parameters), visit_(std::move(visit)) {}

  Variable embedding(const std::string& name, const Shape& shape) {
    return normal(name, shape, device_.is_cpu() ? matrices_ : DType::f32);
  }
  Variable head(const std::string& name, const Shape& shape) { return normal(name, shape, matrices_); }
  Variable normal(const std::string& name, const Shape& shape, DType dtype) {
    return add(
        name, shape, [&](const Tensor& x, uint64_t stream) { fill_normal(x, 0, 0.02f, seed_, stream); }, dtype);
  }
  Variable uniform(const std::string& name, const Shape& shape, float low, float high, DType dtype = DType::f32) {
    return add(
        name, shape, [&](const Tensor& x, uint64_t stream) { fill_uniform(x, low, high, seed_, stream); }, dtype);
  }
  Variable constant(const std::string& name, const Shape& shape, float value) {
    return add(name, shape, [&](const Tensor& x, uint64_t) { furious::fill(x, value); });
  }
  Variable weight(const std::string& name, const WeightInfo& info) {
    switch (info.start) {
      case Start::ones:
        return constant(name, info.shape, 1);
      case Start::zeros:
        return constant(name, info.shape, 0);
      case Start::linear:
        return linear(name, info.shape);
      case Start::bias:
        return bias(name, info.shape[0], info.fan_in);
      case Start::taps:
        return taps(name, info.shape);
      case Start::dt_bias:
        return mapped(name, info.shape, std::log(0.001f), std::log(0.1f), dt_bias_of);
      case Start::a_log:
        return mapped(name, info.shape, 1, 16, std::log);
    }
    fail("{}: unknown start", name);
  }

 private:
  // The weight [out, in] of a linear layer inside the decoder layers, and the bias of one that reads `in` numbers.
  Variable linear(const std::string& name, const Shape& shape) {
    if (initialization_ != Initialization::pytorch) return normal(name, shape, matrices_);
    return around_zero(name, shape, shape[1], matrices_);
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

  Variable around_zero(const std::string& name, const Shape& shape, int64_t fan_in, DType dtype = DType::f32) {
    const float bound = 1 / std::sqrt(static_cast<float>(fan_in));
    return uniform(name, shape, -bound, bound, dtype);
  }

  template <class New>
  Variable add(const std::string& name, const Shape& shape, New&& new_values, DType dtype = DType::f32) {
    if (visit_) {
      visit_(name, shape);
      return {};
    }
    if (before_each_) before_each_();
    const Tensor value = Tensor::empty(shape, dtype, device_);
    if (fill_) {
      fill_(name, value);
    } else {
      const Tensor drawn = dtype == DType::f32 ? value : Tensor::empty(shape, DType::f32, device_);
      new_values(drawn, hash_of(name));
      if (dtype != DType::f32) copy(value, drawn);
    }
    Variable variable(value, dtype == DType::f32);
    parameters_.push_back({name, variable});
    return variable;
  }

  std::vector<Parameter>& parameters_;
  Device device_;
  DType matrices_ = DType::f32;
  uint64_t seed_ = 0;
  Initialization initialization_ = Initialization::furious;
  std::function<void()> before_each_;
  Fill fill_;
  Visit visit_;
};

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

LanguageModel::LanguageModel(const ModelConfig& config, Device device)
    : config_(config), device_(device), plan_(plan_layer(config)) {}

LanguageModel::LanguageModel(const ModelConfig& config, uint64_t seed, Device device, Initialization initialization,
                             const std::function<void()>& before_each, DType matrices)
    : LanguageModel(config, device) {
  Maker maker(parameters_, device, seed, initialization, before_each, matrices);
  make(maker);
  round_tied_head(matrices);
}

LanguageModel::LanguageModel(const ModelConfig& config, const Fill& fill, Device device, DType matrices)
    : LanguageModel(config, device) {
  Maker maker(parameters_, device, fill, matrices);
  make(maker);
  round_tied_head(matrices);
}

void LanguageModel::round_tied_head(DType matrices) {
  if (!head_ && embedding_.value().dtype() != matrices) head_ = Variable(to_dtype(embedding_.value(), matrices));
}

void LanguageModel::visit_parameters(const ModelConfig& config, const Visit& visit) {
  LanguageModel model(config, Device{});
  Maker maker(model.parameters_, visit);
  model.make(maker);
}

void LanguageModel::make(Maker& maker) {
  embedding_ = maker.embedding("model.embed_tokens.weight", {config_.vocabulary, config_.hidden});
  for (int64_t i = 0; i < config_.layers; ++i) {
    std::vector<Variable>& weights = layers_.emplace_back();
    for (const WeightInfo& info : plan_.weights)
      weights.push_back(maker.weight(fmt::format("model.layers.{}.{}", i, info.name), info));
  }
  norm_ = maker.constant("model.norm.weight", {config_.hidden}, 1);
  if (config_.layer_norm) norm_bias_ = maker.constant("model.norm.bias", {config_.hidden}, 0);
  if (!config_.tie_embeddings) head_ = maker.head("lm_head.weight", {config_.vocabulary, config_.hidden});
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
  const auto rounded = [](const Variable& weight) {
    return weight.value().dtype() == DType::bf16 ? weight : Variable(to_dtype(weight.value(), DType::bf16));
  };
  head_ = rounded(output_weight());
  for (std::vector<Variable>& weights : layers_)
    for (size_t i = 0; i < weights.size(); ++i)
      if (plan_.weights[i].is_matrix()) weights[i] = rounded(weights[i]);
}

int64_t LanguageModel::bytes_per_token() const {
  size_t bytes = norm_.value().bytes() + output_weight().value().bytes();
  for (const std::vector<Variable>& weights : layers_)
    for (const Variable& weight : weights) bytes += weight.value().bytes();
  return static_cast<int64_t>(bytes);
}

Variable LanguageModel::run(Tape& tape, const Tensor& tokens, const Tensor& boundaries, const Observer& observe) const {
  ArgumentCheck("language_model").rank("tokens", tokens, 2);
  const auto ops = std::make_shared<WholeSequences>(boundaries, compute_);
  const auto seen = [observe](const std::string& place, const Variable& out) {
    if (observe) observe(place, out.value());
  };
  Variable x;
  {
    const Tape::Label label(tape, kEmbeddingWork);
    x = embedding(tape, embedding_, checked_ids("tokens", tokens), compute_.activations);
  }
  seen("model.embed_tokens", x);
  for (size_t i = 0; i < layers_.size(); ++i) {
    // Holds what it needs by value: recomputed() runs it again when this function has returned.
    const auto layer = [this, i, ops, observe, seen](Tape& t, const Variable& input) {
      PlanRunner::Observer observe_value;
      if (observe)
        observe_value = [&](Value value, const Variable& out) {
          const std::string name = fmt::format("model.layers.{}.", i);
          if (value == plan_.mixer_values) seen(name + "self_attn.values", out);
          if (value == plan_.mixed) seen(name + "self_attn", out);
          if (value == plan_.output) seen(name + "mlp", out);
        };
      return PlanRunner(plan_, layers_[i], compute_, t, *ops).run(input, observe_value);
    };
    x = compute_.recompute ? recomputed(tape, x, layer) : layer(tape, x);
  }
  const Tape::Label label(tape, kNormWork);
  x = norm_bias_ ? layer_norm(tape, x, norm_, norm_bias_, config_.norm_eps)
                 : rms_norm(tape, x, norm_, config_.norm_eps);
  seen("model.norm", x);
  return x;
}

Tensor LanguageModel::embedded(const Tensor& tokens) const {
  return embedding(Tape::off(), embedding_, checked_ids("tokens", tokens), compute_.activations).value();
}

Tensor LanguageModel::after_layer(size_t layer, const Tensor& x, SequenceOps& ops) const {
  return PlanRunner(plan_, layers_[layer], compute_, Tape::off(), ops).run(Variable(x)).value();
}

Tensor LanguageModel::last_norm(const Tensor& x) const {
  return norm_bias_ ? layer_norm_forward(x, norm_.value(), norm_bias_.value(), config_.norm_eps)
                    : rms_norm_forward(x, norm_.value(), config_.norm_eps).y;
}

Tensor LanguageModel::checked_ids(std::string_view argument, const Tensor& ids, int64_t smallest) const {
  const ArgumentCheck check("language_model");
  check.dtype(argument, ids, {DType::i32});
  if (ids.device() == device_) return ids;
  check.token_ids(argument, ids, smallest, config_.vocabulary);
  return to_device(ids, device_);
}

Variable LanguageModel::loss(Tape& tape, const Tensor& tokens, const Tensor& targets, const Tensor& boundaries,
                             const Tensor& row_losses, const Tensor& weights, double z_loss) const {
  const Tensor targets_here = checked_ids("targets", targets, kIgnoredTarget);
  const Variable h = run(tape, tokens, boundaries);
  const Tape::Label label(tape, kLossWork);
  return cross_entropy(tape, h, output_weight(), targets_here, row_losses, compute_.precision,
                       weights ? to_device(weights, device_) : weights, z_loss);
}

Tensor LanguageModel::logits(const Tensor& tokens, const Tensor& boundaries) const {
  const Tensor h = run(Tape::off(), tokens, boundaries).value();
  return to_device(logits_forward(h, output_weight().value()), {});
}

std::string LanguageModel::first_not_finite(const Tensor& tokens, const Tensor& boundaries) const {
  std::string first;
  int64_t layers_done = 0;
  try {
    run(Tape::off(), tokens, boundaries, [&](const std::string& place, const Tensor& out) {
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
  run(Tape::off(), tokens, boundaries, [&](const std::string& place, const Tensor& out) {
    if (place.ends_with(".values")) rms.push_back(rms_of(out));
  });
  return rms;
}

}  // namespace furious
