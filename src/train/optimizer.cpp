#include "train/optimizer.h"

#include "base/error.h"
#include "model/safetensors.h"
#include "ops/optim/adamw.h"

namespace furious {
namespace {

std::string first_moment_of(const Parameter& parameter) {
  return "first_moment." + parameter.name;
}

std::string second_moment_of(const Parameter& parameter) {
  return "second_moment." + parameter.name;
}

}  // namespace

Optimizer::Optimizer(const LanguageModel& model, const DataParallel& parallel, DType reduce) : model_(model) {
  if (parallel.sharded) {
    std::vector<Variable> variables;
    for (const Parameter& parameter : model.parameters()) variables.push_back(parameter.value);
    shards_ = std::make_unique<ShardedOptimizer>(parallel.ranks, variables, reduce, parallel.bucket);
    return;
  }
  for (const Parameter& parameter : model.parameters()) {
    const Shape& shape = parameter.value.value().shape();
    moments_.push_back(
        {Tensor::zeros(shape, DType::f32, model.device()), Tensor::zeros(shape, DType::f32, model.device())});
  }
}

void Optimizer::load(const SafetensorsReader& file) {
  const std::vector<Parameter>& parameters = model_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Shape& shape = parameters[i].value.value().shape();
    const Moments moments =
        shards_ ? Moments{Tensor::empty(shape, DType::f32), Tensor::empty(shape, DType::f32)} : moments_[i];
    file.load_into(first_moment_of(parameters[i]), moments.first);
    file.load_into(second_moment_of(parameters[i]), moments.second);
    if (shards_) shards_->set_moments(i, moments.first, moments.second);
  }
}

std::map<std::string, Tensor> Optimizer::state() const {
  std::map<std::string, Tensor> tensors;
  const ShardedOptimizer::Moments gathered = shards_ ? shards_->moments() : ShardedOptimizer::Moments{};
  if (shards_ && gathered.first.empty()) return tensors;
  const std::vector<Parameter>& parameters = model_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    tensors[first_moment_of(parameters[i])] = shards_ ? gathered.first[i] : moments_[i].first;
    tensors[second_moment_of(parameters[i])] = shards_ ? gathered.second[i] : moments_[i].second;
  }
  return tensors;
}

void Optimizer::clear_gradients() {
  gradients_.clear();
  for (const Parameter& parameter : model_.parameters()) parameter.value.clear_gradient();
}

void Optimizer::begin_step() {
  clear_gradients();
  if (shards_) shards_->begin_step();
}

void Optimizer::begin_last_backward() {
  if (shards_) shards_->send();
}

void Optimizer::fail() {
  shards_->fail();
}

void Optimizer::update(const Tensor& norm, const Tensor& constants, double clip) {
  const std::vector<Parameter>& parameters = model_.parameters();
  if (shards_) {
    shards_->finish();
    clip_gradients(norm, constants, shards_->sums(), clip,
                   [this](const Tensor& squares) { shards_->add_squares(squares); });
    adamw_update(shards_->to_update(), constants);
    shards_->gather_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      gradients_.push_back(shards_->gradient(i));
      parameters[i].value.clear_gradient();
    }
    return;
  }
  collect_gradients();
  clip_gradients(norm, constants, gradients_, clip);
  std::vector<AdamWTensors> tensors;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (gradients_[i])
      tensors.push_back({parameters[i].value.value(), gradients_[i], moments_[i].first, moments_[i].second});
  adamw_update(tensors, constants);
}

void Optimizer::finish_gradients(const Tensor& norm, const Tensor& constants) {
  require(!shards_, "optimizer: gradients without an update are not sharded");
  collect_gradients();
  clip_gradients(norm, constants, gradients_, 0);
}

void Optimizer::collect_gradients() {
  for (const Parameter& parameter : model_.parameters()) {
    gradients_.push_back(parameter.value.gradient());
    parameter.value.clear_gradient();
  }
}

}  // namespace furious
