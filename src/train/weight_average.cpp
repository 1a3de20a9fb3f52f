#include "train/weight_average.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"
#include "ops/optim/blend.h"

namespace furious {
namespace {

std::string name_of(const Parameter& parameter) {
  return "ema." + parameter.name;
}

}  // namespace

WeightAverage::WeightAverage(const LanguageModel& model, double decay)
    : model_(model), decay_(static_cast<float>(decay)) {
  for (const Parameter& parameter : model.parameters())
    sums_.push_back(Tensor::zeros(parameter.value.value().shape(), DType::f32, model.device()));
}

void WeightAverage::update(const Tensor& constants) {
  const auto kept = static_cast<float>(decay_), added = static_cast<float>(1 - decay_);
  const Tensor gradient_scale = constants.slice(0, 0, 1);
  for (size_t i = 0; i < sums_.size(); ++i)
    blend(sums_[i], kept, sums_[i], added, model_.parameters()[i].value.value(), gradient_scale);
}

LanguageModel WeightAverage::averaged(int64_t steps) const {
  const std::vector<Parameter>& parameters = model_.parameters();
  const double divisor = 1 - std::pow(decay_, static_cast<double>(steps));
  const auto fill = [&](const std::string& name, const Tensor& out) {
    const auto i = static_cast<size_t>(std::ranges::find(parameters, name, &Parameter::name) - parameters.begin());
    if (steps == 0) return copy(out, to_device(parameters[i].value.value(), {}));
    const Tensor sum = to_device(sums_[i], {});
    blend(out, static_cast<float>(1 / divisor), sum, 0, sum);
  };
  return LanguageModel(model_.config(), fill);
}

void WeightAverage::add_state(std::map<std::string, Tensor>& tensors) const {
  for (size_t i = 0; i < sums_.size(); ++i) tensors[name_of(model_.parameters()[i])] = sums_[i];
}

void WeightAverage::load(const SafetensorsReader& file) {
  for (size_t i = 0; i < sums_.size(); ++i) {
    const std::string name = name_of(model_.parameters()[i]);
    require(file.find(name) != nullptr,
            "{}: has no average of the weights; leave --ema out to resume, or start a new run", file.path().string());
    file.load_into(name, sums_[i]);
  }
}

}  // namespace furious
