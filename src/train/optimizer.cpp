#include "train/optimizer.h"

#include <algorithm>
#include <cstddef>

#include "base/error.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"
#include "ops/optim/adamw.h"

namespace furious {
namespace {

constexpr const char* kQkvWeight = "self_attn.qkv_proj.weight";
constexpr int64_t kDecay = offsetof(AdamWConstants, decay) / sizeof(float);

std::string first_moment_of(const Parameter& parameter) {
  return "first_moment." + parameter.name;
}

std::string second_moment_of(const Parameter& parameter) {
  return "second_moment." + parameter.name;
}

bool uses_muon(const TrainOptions& options) {
  return options.optimizer == "muon";
}

// Of a parameter "model.layers.3.mlp.up_proj.weight": "mlp.up_proj.weight"; empty outside the layers.
std::string name_in_layer(const std::string& name) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return {};
  return name.substr(name.find('.', kLayers.size()) + 1);
}

// Queries, keys and values share a matrix for the speed of one product; to Muon they are three.
std::vector<int64_t> row_blocks(const Plan& plan, const WeightInfo& weight) {
  if (weight.name == kQkvWeight)
    for (const Op& op : plan.ops)
      if (const auto* const split = std::get_if<SplitOp>(&op)) {
        std::vector<int64_t> widths;
        for (const Value part : split->parts) widths.push_back(plan.values[static_cast<size_t>(part)].width());
        return widths;
      }
  return {weight.shape[0]};
}

}  // namespace

Optimizer::Optimizer(const LanguageModel& model, const DataParallel& parallel, const TrainOptions& options)
    : model_(model), options_(options) {
  for (const Parameter& parameter : model.parameters()) groups_.push_back(group_of(parameter.name));
  if (parallel.sharded) {
    std::vector<Variable> variables;
    for (const Parameter& parameter : model.parameters()) variables.push_back(parameter.value);
    shards_ = std::make_unique<ShardedOptimizer>(parallel.ranks, variables,
                                                 options.reduce == "bf16" ? DType::bf16 : DType::f32, parallel.bucket);
    return;
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    const auto zeros = [&] {
      return Tensor::zeros(model.parameters()[i].value.value().shape(), DType::f32, model.device());
    };
    moments_.push_back({zeros(), groups_[i].is_muon() ? Tensor() : zeros()});
  }
}

Optimizer::Group Optimizer::group_of(const std::string& name) const {
  const Plan& plan = model_.plan();
  const Weight weight = plan.weight(name_in_layer(name));
  const bool in_layers = weight != kNo && plan.weights[static_cast<size_t>(weight)].is_matrix();
  const bool is_matrix = in_layers || name == "model.embed_tokens.weight" || name == "lm_head.weight";
  Group group;
  group.decays = !splits_decay() || (options_.decay_on == "layers" ? in_layers : is_matrix);
  if (uses_muon(options_) && in_layers) group.row_blocks = row_blocks(plan, plan.weights[static_cast<size_t>(weight)]);
  return group;
}

void Optimizer::load(const SafetensorsReader& file) {
  const std::vector<Parameter>& parameters = model_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Shape& shape = parameters[i].value.value().shape();
    const Moments moments = shards_ ? Moments{Tensor::empty(shape, DType::f32),
                                              groups_[i].is_muon() ? Tensor() : Tensor::empty(shape, DType::f32)}
                                    : moments_[i];
    const std::string second = second_moment_of(parameters[i]);
    require((file.find(second) != nullptr) == moments.second.defined(),
            "{}: was not written by the optimizer {}; use the one of the run", file.path().string(),
            options_.optimizer);
    file.load_into(first_moment_of(parameters[i]), moments.first);
    if (moments.second) file.load_into(second, moments.second);
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
    if (!groups_[i].is_muon())
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

void Optimizer::update(const Tensor& norm, const Tensor& constants) {
  if (shards_) {
    shards_->finish();
    clip_gradients(norm, constants, shards_->sums(), options_.clip,
                   [this](const Tensor& squares) { shards_->add_squares(squares); });
  } else {
    collect_gradients();
    clip_gradients(norm, constants, gradients_, options_.clip);
  }
  const Tensor without_decay = splits_decay() ? to_dtype(constants, DType::f32) : Tensor();
  update_group(true, constants);  // with all matrices of Muon
  if (without_decay) {
    fill(without_decay.slice(0, kDecay, 1), 1);
    update_group(false, without_decay);
  }
  if (!shards_) return;
  shards_->gather_parameters();
  const std::vector<Parameter>& parameters = model_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    gradients_.push_back(shards_->gradient(i));
    parameters[i].value.clear_gradient();
  }
}

// The parameters with weight decay, or those without.
void Optimizer::update_group(bool decays, const Tensor& constants) {
  if (shards_) {
    const auto is_member = [&](size_t parameter) {
      return groups_[parameter].decays == decays && !groups_[parameter].is_muon();
    };
    if (uses_muon(options_) && decays) update_muon_shards(constants);
    const bool all = !splits_decay() && !uses_muon(options_);
    adamw_update(all ? shards_->to_update() : shards_->to_update(is_member), constants);
    return;
  }
  const std::vector<Parameter>& parameters = model_.parameters();
  std::vector<AdamWTensors> adamw;
  std::vector<MuonTensors> muon;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!gradients_[i] || groups_[i].decays != decays) continue;
    const Tensor& value = parameters[i].value.value();
    if (!groups_[i].is_muon()) adamw.push_back({value, gradients_[i], moments_[i].first, moments_[i].second});
    int64_t row = 0;
    for (const int64_t rows : groups_[i].row_blocks) {
      const auto part = [&](const Tensor& of) { return of.slice(0, row, rows); };
      muon.push_back({part(value), part(gradients_[i]), part(moments_[i].first)});
      row += rows;
    }
  }
  // Muon first: it allocates, and nothing has been changed if that fails.
  muon_update(muon, constants, options_.muon_momentum, model_.compute().precision);
  adamw_update(adamw, constants);
}

// A rank advances the momentum of its parts. A direction needs whole matrices, so these are gathered; a rank
// orthogonalizes those that it has a part of, and applies its part.
void Optimizer::update_muon_shards(const Tensor& constants) {
  const std::vector<Parameter>& parameters = model_.parameters();
  const Tensor directions = shards_->zeros_for_all();
  const auto flat = [&](size_t i) {
    const Tensor place = shards_->place_of(directions, i);
    return place.view({place.elements()});
  };
  for (size_t i = 0; i < parameters.size(); ++i)
    if (groups_[i].is_muon())
      for (const auto& [begin, part] : shards_->own_parts(i))
        muon_direction(flat(i).slice(0, begin, part.parameter.elements()), part.first_moment, part.gradient, constants,
                       options_.muon_momentum);
  shards_->gather(directions, [this](size_t i) { return groups_[i].is_muon(); });
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<ShardedOptimizer::OwnPart> parts =
        groups_[i].is_muon() ? shards_->own_parts(i) : std::vector<ShardedOptimizer::OwnPart>();
    int64_t row = 0;
    for (const int64_t rows : groups_[i].row_blocks) {
      const int64_t columns = parameters[i].value.value().size(1), first = row * columns, last = first + rows * columns;
      bool orthogonal = false;
      for (const auto& [at, part] : parts) {
        const int64_t begin = std::max(at, first), end = std::min(at + part.parameter.elements(), last);
        if (begin >= end) continue;
        if (!orthogonal)
          orthogonalize(shards_->place_of(directions, i).slice(0, row, rows), model_.compute().precision);
        orthogonal = true;
        muon_step(part.parameter.slice(0, begin - at, end - begin), flat(i).slice(0, begin, end - begin), constants,
                  rows, columns);
      }
      row += rows;
    }
  }
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

OptimizerMemory optimizer_memory(const TrainOptions& options, const ModelConfig& config) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
  OptimizerMemory memory{2 * parameter_count(config) * kBytes, 0};
  if (!uses_muon(options)) return memory;
  const Plan plan = plan_layer(config);
  for (const WeightInfo& weight : plan.weights) {
    if (!weight.is_matrix()) continue;
    memory.states -= config.layers * weight.shape.elements() * kBytes;
    for (const int64_t rows : row_blocks(plan, weight))
      memory.scratch = std::max(memory.scratch, muon_scratch_bytes(rows, weight.shape[1]));
  }
  return memory;
}

}  // namespace furious
