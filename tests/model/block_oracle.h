// The whole model in double precision, one sequence at a time, directly from the formulas: no operation of the
// library is used.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "model/language_model.h"
#include "support.h"

namespace furious::testing {

class Oracle {
 public:
  using Values = std::vector<double>;

  explicit Oracle(const LanguageModel& model) : config_(model.config()) {
    for (const Parameter& parameter : model.parameters())
      parameters_[parameter.name] = to_doubles(parameter.value.value());
  }

  // [tokens, vocabulary], one row after the other.
  Values logits(const std::vector<int32_t>& tokens) const {
    const int64_t hidden = config_.hidden;
    std::vector<Values> x;
    for (const int32_t token : tokens) {
      const Values& table = at("model.embed_tokens.weight");
      x.emplace_back(table.begin() + token * hidden, table.begin() + (token + 1) * hidden);
    }
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const std::string name = "model.layers." + std::to_string(layer) + ".";
      add(x, block(token_norm(x, name + "input_layernorm."), name + "self_attn."));
      if (config_.mlp == Mlp::none) continue;
      std::vector<Values> m = token_norm(x, name + "post_attention_layernorm.");
      for (Values& row : m) row = product(name + "mlp.down_proj.weight", inner(name + "mlp.", row));
      add(x, m);
    }
    Values all;
    for (const Values& row : token_norm(x, "model.norm.")) {
      const Values y = product(config_.tie_embeddings ? "model.embed_tokens.weight" : "lm_head.weight", row);
      all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  }

 private:
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static double silu(double x) { return x * sigmoid(x); }
  static double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

  const Values& at(const std::string& name) const { return parameters_.at(name); }
  double bias(const std::string& name, size_t i) const {
    const auto found = parameters_.find(name);
    return found == parameters_.end() ? 0 : found->second[i];
  }
  Values product(const std::string& name, const Values& x) const {
    const Values& weight = at(name);
    Values y(weight.size() / x.size());
    for (size_t row = 0; row < y.size(); ++row)
      for (size_t i = 0; i < x.size(); ++i) y[row] += weight[row * x.size() + i] * x[i];
    for (size_t i = 0; i < y.size(); ++i) y[i] += bias(name.substr(0, name.size() - 6) + "bias", i);
    return y;
  }
  Values inner(const std::string& name, const Values& x) const {
    Values y = product(name + "up_proj.weight", x);
    if (config_.mlp == Mlp::swiglu) return gated(product(name + "gate_proj.weight", x), y);
    for (double& v : y) v = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    return y;
  }
  // The RMSNorm or layer norm of whole tokens.
  std::vector<Values> token_norm(std::vector<Values> x, const std::string& name) const {
    for (Values& row : x) {
      double mean = 0;
      for (const double value : row) mean += value / static_cast<double>(row.size());
      for (double& value : row) value -= config_.layer_norm ? mean : 0;
    }
    x = normed(std::move(x), name + "weight", config_.norm_eps);
    for (Values& row : x)
      for (size_t i = 0; i < row.size(); ++i) row[i] += bias(name + "bias", i);
    return x;
  }
  static Values gated(const Values& gate, const Values& x) {
    Values y = x;
    for (size_t i = 0; i < y.size(); ++i) y[i] *= silu(gate[i]);
    return y;
  }
  std::vector<Values> normed(std::vector<Values> x, const std::string& name, double eps, size_t first = 0) const {
    for (Values& row : x) {
      double squares = 0;
      for (const double value : row) squares += value * value;
      const double r = 1 / std::sqrt(squares / static_cast<double>(row.size()) + eps);
      for (size_t i = 0; i < row.size(); ++i) row[i] *= r * at(name)[first + i];
    }
    return x;
  }
  static void add(std::vector<Values>& x, const std::vector<Values>& y) {
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
  }

  double score(double s) const {
    const BlockConfig& block = config_.block;
    switch (block.score) {
      case Score::linear:
        return s;
      case Score::squared:
        return s * s;
      case Score::exponential:
        return std::exp(s);
      case Score::power:
        return std::pow(s, static_cast<double>(block.score_degree));
      case Score::series:
        break;
    }
    double sum = 1, term = 1;
    for (int64_t n = 1; n <= block.score_degree; ++n) sum += term *= s / static_cast<double>(n);
    return sum;
  }
  double log_decay(double x, double dt, double a_log) const {
    switch (config_.block.decay) {
      case DecayKind::none:
        return 0;
      case DecayKind::original:
        return -std::exp(a_log) * dt;
      case DecayKind::softplus:
        return -softplus(x);
      case DecayKind::softplus_dt:
        return -softplus(x) * dt;
      case DecayKind::softplus2:
        return -x * softplus(x);
      case DecayKind::silu:
        return -silu(x);
      case DecayKind::log_sigmoid:
        return std::log(sigmoid(x));
    }
    return 0;
  }
  double value(double v, double dt) const {
    switch (config_.block.discretize) {
      case Discretization::none:
        return v;
      case Discretization::dt:
      case Discretization::sigmoid:
        return v * dt;
      case Discretization::silu:
        return silu(v);
      case Discretization::softplus:
        return softplus(v);
      case Discretization::softplus2:
        return v * softplus(v);
    }
    return 0;
  }
  // Applies rotary positions to the pairs of a head.
  void turn(double* head, size_t position) const {
    const int64_t dim = config_.qk_dim;
    const bool halves = config_.block.rope_pairing == RopePairing::halves;
    for (int64_t i = 0; i < dim / 2; ++i) {
      double omega = std::pow(config_.block.rope_base, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
      const auto& [factor, low, high, original] = config_.block.rope_scaling;
      const double kept = original > 0 ? std::clamp((original * omega / (2 * M_PI) - low) / (high - low), 0.0, 1.0) : 0;
      omega *= kept + (1 - kept) / factor;
      const double angle = static_cast<double>(position) * omega;
      double &first = head[halves ? i : 2 * i], &second = head[halves ? i + dim / 2 : 2 * i + 1];
      const double before = first;
      first = before * std::cos(angle) - second * std::sin(angle);
      second = second * std::cos(angle) + before * std::sin(angle);
    }
  }

  std::vector<Values> block(const std::vector<Values>& h, const std::string& name) const {
    const BlockConfig& block = config_.block;
    const size_t length = h.size(), width = static_cast<size_t>(config_.qkv_width());
    const int64_t heads = config_.heads(), dim = config_.head_dim, qk_dim = config_.qk_dim;
    const int64_t qk_width = (config_.q_heads + config_.k_heads) * qk_dim;
    std::vector<Values> raw, qkv(length, Values(width));
    for (const Values& row : h) raw.push_back(product(name + "qkv_proj.weight", row));
    for (size_t t = 0; t < length; ++t)
      for (size_t c = 0; c < width; ++c) {
        double sum = raw[t][c];
        const auto window = static_cast<size_t>(block.conv_window);
        if (window > 0) {
          sum = bias(name + "conv1d.bias", c);
          for (size_t back = 0; back < window && back <= t; ++back)
            sum += at(name + "conv1d.weight")[c * window + window - 1 - back] * raw[t - back][c];
          if (block.conv_silu) sum = silu(sum);
        }
        if (c < static_cast<size_t>(qk_width)) {
          if (block.qk_activation == Activation::relu) sum = std::max(sum, 0.0);
          if (block.qk_activation == Activation::silu) sum = silu(sum);
        }
        qkv[t][c] = sum;
      }
    if (block.qk_norm)
      for (Values& row : qkv)
        for (int64_t head = 0; head < config_.q_heads + config_.k_heads; ++head) {
          const auto begin = row.begin() + head * qk_dim;
          const std::string weight = name + (head < config_.q_heads ? "q_norm.weight" : "k_norm.weight");
          const double eps = block.qk_norm_eps > 0 ? block.qk_norm_eps : config_.norm_eps;
          const int64_t own = head < config_.q_heads ? head : head - config_.q_heads;
          const int64_t first = block.qk_norm_per_head ? own * qk_dim : 0;
          std::ranges::copy(normed({Values(begin, begin + qk_dim)}, weight, eps, first).front(), begin);
        }
    if (block.rope)
      for (size_t t = 0; t < length; ++t)
        for (int64_t head = 0; head < config_.q_heads + config_.k_heads; ++head) turn(&qkv[t][head * qk_dim], t);
    std::vector<Values> dt(length, Values(heads)), total(length, Values(heads));
    for (size_t t = 0; t < length; ++t) {
      const Values x_dt = block.has_dt() ? product(name + "dt_proj.weight", h[t]) : Values(heads);
      const Values x_a =
          block.has_decay_projection() ? product(name + "A_mask_proj.weight", h[t]) : Values(config_.decays());
      for (int64_t head = 0; head < heads; ++head) {
        const double x = x_dt[head];
        dt[t][head] = block.discretize == Discretization::sigmoid ? sigmoid(x) : softplus(x);
        dt[t][head] = std::max(dt[t][head], block.dt_least);
        if (block.dt_limit > 0) dt[t][head] = std::min(dt[t][head], block.dt_limit);
        double a = log_decay(x_a[head / (heads / config_.decays())], dt[t][head], bias(name + "A_log", head));
        if (block.square_mask) a *= 2;
        total[t][head] = a + (t > 0 ? total[t - 1][head] : 0);
      }
    }
    const double scale =
        block.scale > 0 ? static_cast<double>(block.scale) : 1 / std::sqrt(static_cast<double>(qk_dim));
    std::vector<Values> out;
    for (size_t t = 0; t < length; ++t) {
      Values o;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t q_at = head / (heads / config_.q_heads) * qk_dim;
        const int64_t k_at = (config_.q_heads + head / (heads / config_.k_heads)) * qk_dim;
        const int64_t v_at = qk_width + head / (heads / config_.v_heads) * dim;
        Values y(dim);
        double n = 0;
        const auto window = static_cast<size_t>(block.window);
        for (size_t j = window > 0 && t >= window ? t + 1 - window : 0; j <= t; ++j) {
          double s = 0;
          for (int64_t i = 0; i < qk_dim; ++i) s += qkv[t][q_at + i] * qkv[j][k_at + i];
          const double w = score(scale * s) * std::exp(std::min(total[t][head] - total[j][head], 60.0));
          n += w;
          for (int64_t i = 0; i < dim; ++i) y[i] += w * value(qkv[j][v_at + i], dt[j][head]);
        }
        for (int64_t i = 0; i < dim; ++i) {
          if (block.norm == Norm::sum) y[i] = std::fabs(n) < 1e-30 ? 0 : y[i] / n;
          if (block.d_residual) y[i] += at(name + "D")[head * dim + i] * qkv[t][v_at + i];
        }
        o.insert(o.end(), y.begin(), y.end());
      }
      if (block.z_gate) {
        const Values z = product(name + "z_gate_proj.weight", h[t]);
        if (!block.z_gate_sigmoid) o = gated(z, o);
        for (size_t i = 0; block.z_gate_sigmoid && i < z.size(); ++i) o[i] *= sigmoid(z[i]);
      }
      const auto group = static_cast<int64_t>(o.size()) / block.out_norm_groups;
      for (auto at = o.begin(); block.norm == Norm::none && at != o.end(); at += group) {
        const auto first = static_cast<size_t>(at - o.begin());
        const auto eps = static_cast<double>(block.out_norm_eps);
        std::ranges::copy(normed({Values(at, at + group)}, name + "out_norm.weight", eps, first).front(), at);
      }
      if (config_.branch > 0) {
        Values both =
            gated(product(name + "branch_gate_proj.weight", h[t]), product(name + "branch_proj.weight", h[t]));
        both.insert(both.end(), o.begin(), o.end());
        o = both;
      }
      out.push_back(product(name + "o_proj.weight", o));
    }
    return out;
  }

  ModelConfig config_;
  std::map<std::string, Values> parameters_;
};

}  // namespace furious::testing
