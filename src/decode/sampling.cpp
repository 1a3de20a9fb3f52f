#include "decode/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/random.h"

namespace furious {
namespace {

constexpr uint64_t kSampleStream = 0x73616d706c65;  // "sample"

struct Candidate {
  double logit;
  int32_t id;
  double weight = 0;  // its probability times a constant
};

bool less_probable(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit < b.logit : a.id > b.id;
}

std::vector<Candidate> candidates_of(std::span<const float> logits, const Sampling& sampling,
                                     std::span<const int32_t> history) {
  std::vector<Candidate> candidates(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    require(std::isfinite(logits[i]),
            "sampling: the logit of token {} is {}; the model's weights are damaged, or its "
            "training diverged",
            i, logits[i]);
    candidates[i] = {static_cast<double>(logits[i]), static_cast<int32_t>(i)};
  }
  const size_t recent = std::min<size_t>(history.size(), kRepetitionWindow);
  for (const int32_t id : history.last(recent)) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size()) continue;
    const auto logit = static_cast<double>(logits[id]);  // as it came: a token that was there twice is changed once
    candidates[id].logit = logit > 0 ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
  }
  return candidates;
}

}  // namespace

void check_sampling(const Sampling& sampling) {
  require(sampling.temperature >= 0 && std::isfinite(sampling.temperature),
          "sampling: temperature {}, expected 0 or more", sampling.temperature);
  require(sampling.top_k >= 0, "sampling: top-k {}, expected 1 or more, or 0 for all", sampling.top_k);
  require(sampling.top_p > 0 && sampling.top_p <= 1, "sampling: top-p {}, expected more than 0 and at most 1",
          sampling.top_p);
  require(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty),
          "sampling: repetition penalty {}, expected more than 0", sampling.repetition_penalty);
}

int32_t sample(std::span<const float> logits, const Sampling& sampling, std::span<const int32_t> history,
               uint64_t position) {
  check_sampling(sampling);
  require(!logits.empty(), "sampling: there are no logits");
  std::vector<Candidate> candidates = candidates_of(logits, sampling, history);
  const Candidate best = *std::max_element(candidates.begin(), candidates.end(), less_probable);
  if (sampling.temperature == 0) return best.id;

  double mass = 0;
  for (Candidate& candidate : candidates)
    mass += candidate.weight = std::exp((candidate.logit - best.logit) / sampling.temperature);
  auto kept = candidates.begin();  // [kept, end) is kept: all, or the most probable ones, which a heap gives in order
  if (sampling.top_k > 0 || sampling.top_p < 1) {
    const double enough = sampling.top_p < 1 ? sampling.top_p * mass : std::numeric_limits<double>::infinity();
    const int64_t most = sampling.top_k > 0 ? sampling.top_k : static_cast<int64_t>(candidates.size());
    std::make_heap(candidates.begin(), candidates.end(), less_probable);
    kept = candidates.end();
    mass = 0;
    while (kept != candidates.begin() && candidates.end() - kept < most && mass < enough) {
      std::pop_heap(candidates.begin(), kept, less_probable);
      mass += (--kept)->weight;
    }
  }
  const uint32_t bits = random_bits(sampling.seed, kSampleStream, position).word[0];
  double place = mass * static_cast<double>(uniform_from_bits(bits));
  for (auto it = kept; it != candidates.end(); ++it) {
    place -= it->weight;
    if (place < 0) return it->id;
  }
  return candidates.back().id;  // the sum was rounded
}

}  // namespace furious
