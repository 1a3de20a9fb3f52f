#include "model/plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace furious {
namespace {

HeadFunction time_step_of(const BlockConfig& block) {
  HeadFunction function;
  function.f = block.discretize == Discretization::sigmoid ? Activation::sigmoid : Activation::softplus;
  if (block.dt_limit > 0) function.limit = static_cast<float>(block.dt_limit);
  if (block.dt_least > 0) function.least = static_cast<float>(block.dt_least);
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

// Makes the plan from top to bottom. Functions return the value that the next one reads.
class Builder {
 public:
  explicit Builder(const ModelConfig& config) : config_(config), block_(config.block) {}

  Plan build() {
    const Value x = value("x", config_.hidden);
    plan_.input = x;
    const Value h = norm("input_layernorm", x, "h");
    project(h);
    const auto [q, k, v] = queries_keys_values();
    const Value log_decay = decay();
    plan_.mixer_values = scaled_values(v);
    const Value o = mix(q, k, v, log_decay);
    plan_.mixed = project_out(gated(h, o), x);
    plan_.output = config_.mlp == Mlp::none ? plan_.mixed : mlp(plan_.mixed);
    release_values();
    return std::move(plan_);
  }

 private:
  Value value(std::string name, int64_t dim) { return value(std::move(name), 0, dim); }
  Value value(std::string name, int64_t heads, int64_t dim) {
    plan_.values.push_back({std::move(name), heads, dim});
    return static_cast<Value>(plan_.values.size()) - 1;
  }
  // A value of the same shape.
  Value like(Value x, std::string name) { return value(std::move(name), plan_.values[x].heads, plan_.values[x].dim); }

  Weight weight(std::string name, const Shape& shape, Start start, int64_t fan_in = 0) {
    plan_.weights.push_back({std::move(name), shape, start, fan_in});
    return static_cast<Weight>(plan_.weights.size()) - 1;
  }
  Weight mixing_weight(const std::string& name, const Shape& shape, Start start = Start::linear, int64_t fan_in = 0) {
    return weight("self_attn." + name, shape, start, fan_in);
  }
  void add(Op op) { plan_.ops.push_back(std::move(op)); }

  Value norm(const std::string& name, Value x, std::string out) {
    const Value y = like(x, std::move(out));
    if (config_.layer_norm) {
      const Weight scale = weight(name + ".weight", {config_.hidden}, Start::ones);
      add(LayerNormOp{x, y, scale, weight(name + ".bias", {config_.hidden}, Start::zeros), config_.norm_eps});
      return y;
    }
    add(RmsNormOp{x, y, kNo, weight(name + ".weight", {config_.hidden}, Start::ones), config_.norm_eps});
    return y;
  }

  Value head_norm(const std::string& name, Value x) {
    const Value y = like(x, "norm(" + plan_.values[x].name + ")");
    const auto [_, heads, dim] = plan_.values[x];
    const Shape shape = block_.qk_norm_per_head ? Shape{heads, dim} : Shape{dim};
    const float eps = block_.qk_norm_eps > 0 ? block_.qk_norm_eps : config_.norm_eps;
    add(RmsNormOp{x, y, kNo, mixing_weight(name, shape, Start::ones), eps});
    return y;
  }

  // The products that read h and make q, k, v, time steps and decays.
  void project(Value h) {
    LinearOp linear{h, {mixing_weight("qkv_proj.weight", {config_.qkv_width(), config_.hidden})}, {}};
    qkv_ = value("qkv", config_.qkv_width());
    linear.y.push_back(qkv_);
    if (block_.qkv_bias) {  // a product of several weights has no bias
      linear.bias = mixing_weight("qkv_proj.bias", {config_.qkv_width()}, Start::zeros);
      add(std::exchange(linear, LinearOp{h, {}, {}}));
    }
    if (block_.conv_window > 0) {
      conv_weight_ = mixing_weight("conv1d.weight", {config_.qkv_width(), block_.conv_window}, Start::taps);
      if (block_.conv_bias)
        conv_bias_ = mixing_weight("conv1d.bias", {config_.qkv_width()}, Start::bias, block_.conv_window);
    }
    const int64_t heads = config_.heads();
    if (block_.has_dt()) {
      linear.weights.push_back(mixing_weight("dt_proj.weight", {heads, config_.hidden}));
      linear.y.push_back(dt_ = value("dt_proj", heads));
    }
    if (block_.dt_bias) dt_bias_ = mixing_weight("dt_proj.bias", {heads}, Start::dt_bias);
    if (block_.has_decay_projection()) {
      linear.weights.push_back(mixing_weight("A_mask_proj.weight", {config_.decays(), config_.hidden}));
      linear.y.push_back(decay_ = value("A_mask_proj", config_.decays()));
    }
    if (block_.decay_bias) decay_bias_ = mixing_weight("A_mask_proj.bias", {config_.decays()}, Start::zeros);
    if (!linear.weights.empty()) add(std::move(linear));
  }

  std::array<Value, 3> queries_keys_values() {
    Value qkv = qkv_;
    if (conv_weight_ != kNo) {
      qkv = like(qkv_, "conv");
      add(ConvOp{qkv_, qkv, conv_weight_, conv_bias_, block_.conv_window,
                 block_.conv_silu ? Activation::silu : Activation::none});
    }
    Value q = value("q", config_.q_heads, config_.qk_dim), k = value("k", config_.k_heads, config_.qk_dim);
    const Value v = value("v", config_.v_heads, config_.head_dim);
    add(SplitOp{qkv, {q, k, v}});
    if (block_.qk_activation != Activation::none) {
      const Value from_q = std::exchange(q, like(q, "act(q)")), from_k = std::exchange(k, like(k, "act(k)"));
      add(ActivationOp{from_q, q, block_.qk_activation});
      add(ActivationOp{from_k, k, block_.qk_activation});
    }
    if (block_.qk_norm) {
      q = head_norm("q_norm.weight", q);
      k = head_norm("k_norm.weight", k);
    }
    if (block_.rope) {
      const Value from_q = std::exchange(q, like(q, "rope(q)")), from_k = std::exchange(k, like(k, "rope(k)"));
      add(RopeOp{from_q, q, block_.rope_pairing, block_.rope_base, block_.rope_scaling});
      add(RopeOp{from_k, k, block_.rope_pairing, block_.rope_base, block_.rope_scaling});
    }
    return {q, k, v};
  }

  // The log-decay, or kNo; turns the projection of the time step into dt.
  Value decay() {
    if (dt_ != kNo) {
      const Value x = std::exchange(dt_, like(dt_, "dt"));
      add(HeadFunctionOp{x, dt_, dt_bias_, time_step_of(block_)});
    }
    if (decay_ != kNo) {
      const Value x = std::exchange(decay_, like(decay_, "a"));
      add(HeadFunctionOp{x, decay_, decay_bias_, decay_of(block_)});
    }
    if (block_.decay == DecayKind::softplus_dt) {
      const Value a = std::exchange(decay_, like(decay_, "a dt"));
      add(DiscretizeOp{a, dt_, decay_});
    }
    if (block_.decay == DecayKind::original) {
      decay_ = value("a", config_.heads());
      add(OriginalDecayOp{dt_, decay_, mixing_weight("A_log", {config_.heads()}, Start::a_log), decay_factor(block_)});
    }
    return decay_;
  }

  Value scaled_values(Value v) {
    if (block_.discretize == Discretization::dt || block_.discretize == Discretization::sigmoid) {
      const Value y = value("v dt", config_.heads(), config_.head_dim);
      add(DiscretizeOp{v, dt_, y});
      return y;
    }
    const Activation f = value_activation(block_);
    if (f == Activation::none) return v;
    const Value y = like(v, "act(v)");
    add(ActivationOp{v, y, f});
    return y;
  }

  Value mix(Value q, Value k, Value v, Value log_decay) {
    const Value o = value("o", config_.heads(), config_.head_dim);
    add(MixerOp{q, k, plan_.mixer_values, log_decay, o, block_.mixer()});
    if (!block_.d_residual) return o;
    const Value y = like(o, "o + D v");
    add(ResidualOp{o, v, y, mixing_weight("D", {config_.heads(), config_.head_dim}, Start::ones)});
    return y;
  }

  // The Z gate and the norm after the mixer, and the gated branch beside it.
  Value gated(Value h, Value o) {
    const int64_t width = config_.out_width();
    Value z = kNo;
    if (block_.z_gate) {
      LinearOp linear{h, {mixing_weight("z_gate_proj.weight", {width, config_.hidden})}, {z = value("z", width)}};
      if (block_.z_gate_bias) linear.bias = mixing_weight("z_gate_proj.bias", {width}, Start::bias, config_.hidden);
      add(std::move(linear));
    }
    if (block_.norm == Norm::none) {
      const int64_t groups = block_.out_norm_groups;
      const Value y = groups > 1 ? value("out_norm", groups, width / groups) : value("out_norm", width);
      const Shape shape = groups > 1 ? Shape{groups, width / groups} : Shape{width};
      add(RmsNormOp{o, y, z, mixing_weight("out_norm.weight", shape, Start::ones), block_.out_norm_eps});
      o = y;
    } else if (block_.z_gate_sigmoid) {
      const Value s = value("sigmoid(z)", width), y = value("sigmoid(z) o", width);
      add(HeadFunctionOp{z, s, kNo, {.f = Activation::sigmoid}});
      add(DiscretizeOp{o, s, y});
      o = y;
    } else if (z != kNo) {
      const Value y = value("silu(z) o", width);
      add(SwigluOp{z, o, y});
      o = y;
    }
    if (config_.branch == 0) return o;
    const Value branch =
        gated_pair(h, "self_attn.branch_gate_proj.weight", "self_attn.branch_proj.weight", config_.branch, "branch");
    const Value y = value("[branch, o]", config_.branch + width);
    add(ConcatOp{branch, o, y});
    return y;
  }

  // silu(x W_gateᵀ) ⊙ (x W_upᵀ)
  Value gated_pair(Value x, const std::string& gate, const std::string& up, int64_t width, const std::string& name,
                   bool bias = false) {
    const Weight gate_weight = weight(gate, {width, config_.hidden}, Start::linear);
    const Weight up_weight = weight(up, {width, config_.hidden}, Start::linear);
    const Value a = value(name + " gate", width), b = value(name + " up", width), y = value(name, width);
    if (bias) {
      add(LinearOp{x, {gate_weight}, {a}, weight(bias_of(gate), {width}, Start::zeros)});
      add(LinearOp{x, {up_weight}, {b}, weight(bias_of(up), {width}, Start::zeros)});
    } else {
      add(LinearOp{x, {gate_weight, up_weight}, {a, b}});
    }
    add(SwigluOp{a, b, y});
    return y;
  }

  Value project_out(Value o, Value x) {
    const Value y = like(x, "x + block");
    const int64_t width = config_.branch + config_.out_width();
    add_to_residual(o, "self_attn.o_proj.weight", width, block_.out_bias, x, y);
    return y;
  }

  // y = o Wᵀ (+ bias) + x
  void add_to_residual(Value o, const std::string& name, int64_t width, bool bias, Value x, Value y) {
    const Weight matrix = weight(name, {config_.hidden, width}, Start::linear);
    if (!bias) return add(LinearOp{o, {matrix}, {y}, kNo, x});
    const Value product = like(y, "product");
    add(LinearOp{o, {matrix}, {product}, weight(bias_of(name), {config_.hidden}, Start::zeros)});
    add(AddOp{product, x, y});
  }
  static std::string bias_of(const std::string& weight) {
    return weight.substr(0, weight.size() - std::string_view("weight").size()) + "bias";
  }

  Value mlp(Value x) {
    const Value m = norm("post_attention_layernorm", x, "m");
    const int64_t width = config_.intermediate;
    const std::string up = "mlp.up_proj.weight";
    Value inner = kNo;
    if (config_.mlp == Mlp::swiglu) {
      inner = gated_pair(m, "mlp.gate_proj.weight", up, width, "mlp", config_.mlp_bias);
    } else {
      const Value a = value("mlp up", width);
      inner = value("mlp", width);
      LinearOp linear{m, {weight(up, {width, config_.hidden}, Start::linear)}, {a}};
      if (config_.mlp_bias) linear.bias = weight(bias_of(up), {width}, Start::zeros);
      add(std::move(linear));
      add(ActivationOp{a, inner, Activation::gelu_tanh});
    }
    const Value y = like(x, "x + mlp");
    add_to_residual(inner, "mlp.down_proj.weight", width, config_.mlp_bias, x, y);
    return y;
  }

  void release_values() {
    plan_.last_read.resize(plan_.ops.size());
    std::vector<char> read_later(plan_.values.size(), 0);
    read_later[plan_.output] = 1;
    for (size_t i = plan_.ops.size(); i-- > 0;)
      for (const auto& values : {inputs_of(plan_.ops[i]), outputs_of(plan_.ops[i])})
        for (const Value v : values)
          if (!std::exchange(read_later[v], 1)) plan_.last_read[i].push_back(v);
  }

  const ModelConfig& config_;
  const BlockConfig& block_;
  Plan plan_;
  Value qkv_ = kNo, dt_ = kNo, decay_ = kNo;
  Weight conv_weight_ = kNo, conv_bias_ = kNo, dt_bias_ = kNo, decay_bias_ = kNo;
};

}  // namespace

Weight Plan::weight(std::string_view name) const {
  const auto found = std::ranges::find(weights, name, &WeightInfo::name);
  return found == weights.end() ? kNo : static_cast<Weight>(found - weights.begin());
}

namespace {

struct Reads {
  std::vector<Value> operator()(const RmsNormOp& op) const { return {op.x, op.gate}; }
  std::vector<Value> operator()(const LinearOp& op) const { return {op.x, op.residual}; }
  std::vector<Value> operator()(const OriginalDecayOp& op) const { return {op.dt}; }
  std::vector<Value> operator()(const DiscretizeOp& op) const { return {op.x, op.dt}; }
  std::vector<Value> operator()(const MixerOp& op) const { return {op.q, op.k, op.v, op.log_decay}; }
  std::vector<Value> operator()(const ResidualOp& op) const { return {op.o, op.v}; }
  std::vector<Value> operator()(const SwigluOp& op) const { return {op.gate, op.up}; }
  std::vector<Value> operator()(const ConcatOp& op) const { return {op.a, op.b}; }
  std::vector<Value> operator()(const AddOp& op) const { return {op.a, op.b}; }
  std::vector<Value> operator()(const auto& op) const { return {op.x}; }
};

struct Writes {
  std::vector<Value> operator()(const LinearOp& op) const { return op.y; }
  std::vector<Value> operator()(const SplitOp& op) const { return op.parts; }
  std::vector<Value> operator()(const auto& op) const { return {op.y}; }
};

struct Weighs {
  std::vector<Weight> operator()(const RmsNormOp& op) const { return {op.weight}; }
  std::vector<Weight> operator()(const LayerNormOp& op) const { return {op.weight, op.bias}; }
  std::vector<Weight> operator()(const LinearOp& op) const {
    std::vector<Weight> weights = op.weights;
    weights.push_back(op.bias);
    return weights;
  }
  std::vector<Weight> operator()(const ConvOp& op) const { return {op.weight, op.bias}; }
  std::vector<Weight> operator()(const HeadFunctionOp& op) const { return {op.bias}; }
  std::vector<Weight> operator()(const OriginalDecayOp& op) const { return {op.a_log}; }
  std::vector<Weight> operator()(const ResidualOp& op) const { return {op.d}; }
  std::vector<Weight> operator()(const auto&) const { return {}; }
};

struct Role {
  const Plan& plan;

  std::string_view operator()(const LinearOp& op) const {
    constexpr std::pair<std::string_view, std::string_view> kRoles[] = {{"self_attn.qkv_proj", "qkv product"},
                                                                        {"self_attn.z_gate_proj", "gate product"},
                                                                        {"self_attn.branch", "branch products"},
                                                                        {"self_attn.o_proj", "output product"},
                                                                        {"mlp.", "MLP products"}};
    const std::string& name = plan.weights[op.weights.front()].name;
    for (const auto& [prefix, role] : kRoles)
      if (name.starts_with(prefix)) return role;
    return "products";
  }
  std::string_view operator()(const RmsNormOp&) const { return kNormWork.role; }
  std::string_view operator()(const LayerNormOp&) const { return kNormWork.role; }
  std::string_view operator()(const AddOp&) const { return "residual"; }
  std::string_view operator()(const ConvOp&) const { return "convolution"; }
  std::string_view operator()(const SplitOp&) const { return "split"; }
  std::string_view operator()(const ActivationOp&) const { return "activation"; }
  std::string_view operator()(const SwigluOp&) const { return "activation"; }
  std::string_view operator()(const RopeOp&) const { return "rope"; }
  std::string_view operator()(const HeadFunctionOp&) const { return "decay"; }
  std::string_view operator()(const OriginalDecayOp&) const { return "decay"; }
  std::string_view operator()(const DiscretizeOp&) const { return "decay"; }
  std::string_view operator()(const MixerOp&) const { return "mixer"; }
  std::string_view operator()(const ResidualOp&) const { return "D residual"; }
  std::string_view operator()(const ConcatOp&) const { return "branch"; }
};

}  // namespace

std::vector<Value> inputs_of(const Op& op) {
  std::vector<Value> values = std::visit(Reads(), op);
  std::erase(values, kNo);
  return values;
}

std::vector<Value> outputs_of(const Op& op) {
  return std::visit(Writes(), op);
}

std::vector<Weight> weights_of(const Op& op) {
  std::vector<Weight> weights = std::visit(Weighs(), op);
  std::erase(weights, kNo);
  return weights;
}

WorkLabel label_of(const Plan& plan, const Op& op) {
  return {std::visit(Role{plan}, op), name_of(op)};
}

std::string_view name_of(const Op& op) {
  constexpr std::string_view kNames[] = {"rms_norm",   "linear",        "conv",           "split",      "activation",
                                         "rope",       "head_function", "original_decay", "discretize", "mixer",
                                         "d_residual", "swiglu",        "concat",         "layer_norm", "add"};
  static_assert(std::size(kNames) == std::variant_size_v<Op>);
  return kNames[op.index()];
}

Plan plan_layer(const ModelConfig& config) {
  check_config(config);
  return Builder(config).build();
}

int64_t parameter_count(const ModelConfig& config) {
  int64_t layer = 0;
  for (const WeightInfo& weight : plan_layer(config).weights) layer += weight.shape.elements();
  return config.layers * layer + (config.tie_embeddings ? 1 : 2) * config.vocabulary * config.hidden +
         (config.layer_norm ? 2 : 1) * config.hidden;
}

}  // namespace furious
