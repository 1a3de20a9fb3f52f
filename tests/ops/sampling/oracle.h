// Sampling written down once more, plainly and in double precision, for tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "ops/sampling/sampling.h"
#include "support.h"

namespace furious::testing {

struct SamplingOracle {
  std::vector<int32_t> order;         // ids, the most probable first; of equal ones the smaller id
  std::vector<double> probabilities;  // of each id, after everything; 0 if it is not kept
  std::set<int32_t> kept;
  double margin = 1;  // how far top-p and min-p were from keeping one more or one less, relative to the mass
};

// Bias and penalties are f32 like the logits, so that equal ones stay equal.
inline std::vector<float> adjusted_logits(std::span<const float> logits, const Sampling& sampling,
                                          std::span<const int32_t> history) {
  std::vector<float> out(logits.begin(), logits.end());
  for (const LogitBias& bias : sampling.logit_bias) out[bias.id] += static_cast<float>(bias.value);
  std::map<int32_t, int> counts;
  for (const int32_t id : history.last(std::min<size_t>(history.size(), kRepetitionWindow))) counts[id] += 1;
  for (const auto& [id, count] : counts) {
    if (id < 0 || static_cast<size_t>(id) >= out.size()) continue;
    const auto penalty = static_cast<float>(sampling.repetition_penalty);
    float x = out[id] > 0 ? out[id] / penalty : out[id] * penalty;
    x -= static_cast<float>(sampling.frequency_penalty) * static_cast<float>(count);
    x -= static_cast<float>(sampling.presence_penalty);
    out[id] = x;
  }
  return out;
}

inline SamplingOracle sampling_oracle(std::span<const float> logits, const Sampling& sampling,
                                      std::span<const int32_t> history = {}) {
  const std::vector<float> l = adjusted_logits(logits, sampling, history);
  SamplingOracle out;
  out.order.resize(l.size());
  for (size_t i = 0; i < l.size(); ++i) out.order[i] = static_cast<int32_t>(i);
  std::stable_sort(out.order.begin(), out.order.end(), [&](int32_t a, int32_t b) { return l[a] > l[b]; });
  out.probabilities.resize(l.size(), 0.0);
  if (sampling.temperature == 0) {
    out.kept = {out.order[0]};
    out.probabilities[out.order[0]] = 1;
    return out;
  }
  std::vector<double> weights(l.size());
  double all = 0;
  for (size_t i = 0; i < l.size(); ++i)
    all += weights[i] = std::exp((static_cast<double>(l[i]) - l[out.order[0]]) / sampling.temperature);
  double mass = 0, kept_mass = 0;
  for (size_t i = 0; i < l.size(); ++i) {
    const double weight = weights[out.order[i]];
    if (i > 0 && sampling.top_p < 1) out.margin = std::min(out.margin, std::abs(mass / all - sampling.top_p));
    if (sampling.top_p < 1 && mass >= sampling.top_p * all * (1 - 1e-9)) break;
    if (sampling.top_k > 0 && static_cast<int64_t>(i) >= sampling.top_k) break;
    mass += weight;
    if (sampling.min_p > 0) out.margin = std::min(out.margin, std::abs(weight - sampling.min_p));
    if (weight < sampling.min_p) continue;
    out.kept.insert(out.order[i]);
    kept_mass += weight;
  }
  for (const int32_t id : out.kept) out.probabilities[id] = weights[id] / kept_mass;
  return out;
}

// One token after `history`, by a sampler of its own. `draw`: for further random numbers.
inline int32_t sample(std::span<const float> logits, const Sampling& sampling, std::span<const int32_t> history = {},
                      uint64_t draw = 0) {
  const auto count = static_cast<int64_t>(logits.size());
  Sampler sampler(1, count, {});
  sampler.set(0, sampling);
  const auto recent = history.last(std::min<size_t>(history.size(), kRepetitionWindow));
  sampler.restore(0, {history.size() + draw, {recent.begin(), recent.end()}});
  const Tensor row = Tensor::empty({1, count}, DType::f32);
  std::ranges::copy(logits, row.data<float>());
  const Choice choice = sampler.choose(row, all_slots(1));
  require_finite_logits(choice.ids);
  return choice.ids.data<int32_t>()[0];
}

inline std::vector<float> random_logits(Random& random, int64_t count, double scale = 3) {
  std::vector<float> logits(count);
  for (float& logit : logits) logit = static_cast<float>(scale * random.normal());
  return logits;
}

// Options of all kinds, alone and together.
inline Sampling random_sampling(Random& random, int64_t vocabulary) {
  Sampling out;
  const auto sometimes = [&](int of) { return random.integer(1, of) == 1; };
  out.temperature = sometimes(8) ? 0 : random.pick<double>({1e-3, 0.3, 0.8, 1, 1.0, 1.7, 20, 1e6});
  out.top_k = sometimes(2) ? random.pick<int64_t>({1, 2, 40, 129, 1000, vocabulary, vocabulary + 5}) : 0;
  out.top_p = sometimes(2) ? random.pick<double>({1e-9, 0.1, 0.5, 0.9, 0.95, 0.999}) : 1;
  out.min_p = sometimes(4) ? random.pick<double>({1e-6, 0.01, 0.1, 0.7, 1}) : 0;
  out.repetition_penalty = sometimes(4) ? random.pick<double>({0.7, 1.1, 2}) : 1;
  out.frequency_penalty = sometimes(4) ? random.pick<double>({-0.5, 0.3, 1}) : 0;
  out.presence_penalty = sometimes(4) ? random.pick<double>({-1, 0.5, 2}) : 0;
  out.seed = static_cast<uint64_t>(random.integer(0, INT64_MAX));
  std::set<int32_t> ids;
  for (int64_t i = sometimes(4) ? random.pick<int64_t>({1, 5, 300}) : 0; i > 0; --i) {
    const auto id = static_cast<int32_t>(random.integer(0, vocabulary - 1));
    if (static_cast<int64_t>(ids.size()) + 1 == vocabulary || !ids.insert(id).second) continue;
    out.logit_bias.push_back({id, sometimes(3) ? -std::numeric_limits<double>::infinity() : random.normal() * 5});
  }
  return out;
}

}  // namespace furious::testing
