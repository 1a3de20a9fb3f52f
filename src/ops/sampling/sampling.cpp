#include "ops/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "ops/sampling/sampling_kernels.h"
#include "ops/sampling/weights.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"
#include "tensor/host_copy.h"

namespace furious {
namespace {

constexpr int64_t kOptionWords = sizeof(SlotOptions) / sizeof(int32_t);
constexpr int64_t kHistoryWords = sizeof(SlotHistory) / sizeof(int32_t);

template <class T>
T* of_slot(const Tensor& table, int64_t slot) {
  return reinterpret_cast<T*>(table.data<int32_t>()) + slot;
}

void check_logits(const ArgumentCheck& check, const Tensor& logits) {
  check.rank("logits", logits, 2);
  check.dtype("logits", logits, {DType::f32});
  check.unit_inner_stride("logits", logits);
  require(logits.size(1) <= INT32_MAX / 2, "{}: {} columns of logits, expected fewer", check.operation(),
          logits.size(1));
}

// The last tokens of `tokens`, as an argument for a device.
NewTokens new_tokens(std::span<const int32_t> tokens, uint64_t count, bool restart) {
  NewTokens out;
  out.count = count;
  out.given = static_cast<int32_t>(std::min<size_t>(tokens.size(), kRepetitionWindow));
  out.restart = restart ? 1 : 0;
  std::fill_n(out.token, kRepetitionWindow, -1);
  std::ranges::copy(tokens.last(static_cast<size_t>(out.given)), out.token);
  return out;
}

}  // namespace

void check_sampling(const Sampling& sampling) {
  require(sampling.temperature >= 0 && std::isfinite(sampling.temperature),
          "sampling: temperature {}, expected 0 or more", sampling.temperature);
  require(sampling.top_k >= 0, "sampling: top-k {}, expected 1 or more, or 0 for all", sampling.top_k);
  require(sampling.top_p > 0 && sampling.top_p <= 1, "sampling: top-p {}, expected more than 0 and at most 1",
          sampling.top_p);
  require(sampling.min_p >= 0 && sampling.min_p <= 1, "sampling: min-p {}, expected 0 to 1", sampling.min_p);
  require(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty),
          "sampling: repetition penalty {}, expected more than 0", sampling.repetition_penalty);
  require(std::isfinite(sampling.frequency_penalty), "sampling: frequency penalty {}, expected a finite number",
          sampling.frequency_penalty);
  require(std::isfinite(sampling.presence_penalty), "sampling: presence penalty {}, expected a finite number",
          sampling.presence_penalty);
  require(sampling.log_probabilities >= -1 && sampling.log_probabilities <= kMostLogProbabilities,
          "sampling: log-probabilities of {} tokens, expected 0 to {}, or -1 for none", sampling.log_probabilities,
          kMostLogProbabilities);
  require(sampling.logit_bias.size() <= static_cast<size_t>(kMostLogitBiases),
          "sampling: a logit bias for {} tokens, expected at most {}", sampling.logit_bias.size(), kMostLogitBiases);
  std::set<int32_t> ids;
  for (const LogitBias& bias : sampling.logit_bias) {
    require(bias.value < INFINITY, "sampling: the logit bias of token {} is {}, expected a number or -inf", bias.id,
            bias.value);  // also NaN
    require(ids.insert(bias.id).second, "sampling: two logit biases for token {}, expected one", bias.id);
  }
}

SlotOptions slot_options(const Sampling& sampling, int64_t vocabulary) {
  check_sampling(sampling);
  // Where it ends does not matter: a factor of 2^100 or of 1e30 leaves nothing to choose.
  const auto factor = [](double x) { return static_cast<float>(std::clamp(x, 1e-30, 1e30)); };
  const auto term = [](double x) { return static_cast<float>(std::clamp(x, -1e30, 1e30)); };
  SlotOptions out;
  SlotOptions::Head& head = out.head;
  head.seed = sampling.seed;
  // Rounded down to 32 bits, so that a tenth of ten equal tokens is one of them.
  if (sampling.top_p < 1)
    head.top_p = static_cast<uint64_t>(std::max(1.0, std::floor(std::ldexp(sampling.top_p, 32)))) << 32;
  if (sampling.top_k > 0 && sampling.top_k < vocabulary) head.top_k = static_cast<uint32_t>(sampling.top_k);
  head.min_weight = static_cast<uint32_t>(std::ceil(sampling.min_p * sampling::kLargestWeight));
  head.greedy = sampling.temperature == 0 ? 1 : 0;
  if (sampling.temperature > 0)
    head.scale = static_cast<float>(std::min(1.4426950408889634 / sampling.temperature, 0x1p100));
  head.repetition = factor(sampling.repetition_penalty);
  head.frequency = term(sampling.frequency_penalty);
  head.presence = term(sampling.presence_penalty);
  head.penalties = head.repetition != 1 || head.frequency != 0 || head.presence != 0 ? 1 : 0;
  head.log_probabilities = static_cast<int32_t>(sampling.log_probabilities);
  int64_t banned = 0;
  for (const LogitBias& bias : sampling.logit_bias) {
    require(bias.id >= 0 && bias.id < vocabulary, "sampling: a logit bias for token {}, expected ids of 0 to {}",
            bias.id, vocabulary - 1);
    const bool ban = std::isinf(bias.value);
    banned += ban ? 1 : 0;
    out.bias_id[head.biases] = bias.id;
    out.bias[head.biases] = ban ? -INFINITY : term(bias.value);
    head.biases += 1;
  }
  require(banned < vocabulary, "sampling: the logit biases exclude all tokens, expected at least one that is left");
  return out;
}

void require_finite_logits(const Tensor& ids) {
  for (int64_t row = 0; row < ids.size(0); ++row)
    require(ids.select(0, row).data<int32_t>()[1] == 1,
            "sampling: a logit is not finite; the model's weights are damaged, or its training diverged");
}

Sampler::Sampler(int64_t slots, int64_t vocabulary, Device device) : vocabulary_(vocabulary) {
  require(slots >= 1, "sampler: {} slots, expected 1 or more", slots);
  require(vocabulary >= 1 && vocabulary <= kLargestSampledVocabulary, "sampler: a vocabulary of {}, expected 1 to {}",
          vocabulary, kLargestSampledVocabulary);
  options_ = Tensor::empty({slots, kOptionWords}, DType::i32, device);
  histories_ = Tensor::empty({slots, kHistoryWords}, DType::i32, device);
  log_probabilities_.resize(static_cast<size_t>(slots), -1);
  for (int64_t slot = 0; slot < slots; ++slot) {
    set(slot, {});
    clear(slot);
  }
}

void Sampler::check_slot(int64_t slot, const char* what) const {
  require(slot >= 0 && slot < slots(), "sampler: {} slot {}, expected 0 to {}", what, slot, slots() - 1);
}

void Sampler::set(int64_t slot, const Sampling& sampling) {
  check_slot(slot, "options for");
  const SlotOptions options = slot_options(sampling, vocabulary_);
  FURIOUS_DISPATCH(options_.device(), set_options(options_.device(), of_slot<SlotOptions>(options_, slot), options));
  log_probabilities_[static_cast<size_t>(slot)] = options.head.log_probabilities;
}

void Sampler::clear(int64_t slot) {
  restore(slot, {});
}

void Sampler::read(int64_t slot, std::span<const int32_t> tokens) {
  check_slot(slot, "tokens for");
  const NewTokens more = new_tokens(tokens, tokens.size(), false);
  FURIOUS_DISPATCH(histories_.device(),
                   append_tokens(histories_.device(), of_slot<SlotHistory>(histories_, slot), more));
}

void Sampler::copy(int64_t from, int64_t to) {
  check_slot(from, "a copy of");
  check_slot(to, "a copy into");
  if (from == to) return;
  FURIOUS_DISPATCH(histories_.device(), copy_history(histories_.device(), of_slot<SlotHistory>(histories_, to),
                                                     of_slot<SlotHistory>(histories_, from)));
}

Sampler::Contents Sampler::contents(int64_t slot) const {
  check_slot(slot, "contents of");
  const Tensor here = HostCopy(histories_.slice(0, slot, 1)).wait();
  const auto& history = *of_slot<const SlotHistory>(here, 0);
  Contents out{history.position, {}};
  const uint64_t known = std::min<uint64_t>(history.position, kRepetitionWindow);
  for (uint64_t p = history.position - known; p < history.position; ++p)
    if (const int32_t id = history.token[p % kRepetitionWindow]; id >= 0) out.history.push_back(id);
  return out;
}

void Sampler::restore(int64_t slot, const Contents& contents) {
  check_slot(slot, "contents for");
  require(contents.history.size() <= std::min<uint64_t>(contents.position, kRepetitionWindow),
          "sampler: {} recent tokens of a sequence of {}, expected at most {} of them", contents.history.size(),
          contents.position, std::min<uint64_t>(contents.position, kRepetitionWindow));
  const NewTokens tokens = new_tokens(contents.history, contents.position, true);
  FURIOUS_DISPATCH(histories_.device(),
                   append_tokens(histories_.device(), of_slot<SlotHistory>(histories_, slot), tokens));
}

bool Sampler::wants_log_probabilities(const SlotRows& rows) const {
  return std::ranges::any_of(rows.slots, [&](int32_t slot) { return log_probabilities_[slot] >= 0; });
}

void Sampler::set_blocks_per_row(int blocks) {
  require(blocks == 0 || blocks == 1 || blocks == 2 || blocks == 4 || blocks == 8,
          "sampler: {} blocks for a row, expected 1, 2, 4 or 8, or 0 to choose by the sizes", blocks);
  blocks_per_row_ = blocks;
}

Choice Sampler::choose(const Tensor& logits, const SlotRows& rows) {
  const ArgumentCheck check("sampler");
  check_logits(check, logits);
  const Device device = histories_.device();
  check.device("logits", logits, device);
  check.dense("rows", rows.table, DType::i32, {logits.size(0)}, device);
  require(rows.size() == logits.size(0), "sampler: {} slots for {} rows of logits, expected as many", rows.size(),
          logits.size(0));
  require(logits.size(1) >= vocabulary_, "sampler: {} columns of logits, expected at least the vocabulary of {}",
          logits.size(1), vocabulary_);
  for (const int32_t slot : rows.slots) check_slot(slot, "a row of");
  Choice out;
  out.ids = Tensor::empty({logits.size(0), 2}, DType::i32, device);
  const bool wanted = wants_log_probabilities(rows);
  if (wanted) {
    out.best = Tensor::empty({logits.size(0), 1 + kMostLogProbabilities}, DType::i32, device);
    out.log_probabilities = Tensor::empty({logits.size(0), 1 + kMostLogProbabilities}, DType::f32, device);
  }
  ChooseCall call{};
  call.logits = logits.data<float>();
  call.stride = logits.stride(0);
  call.rows = logits.size(0);
  call.vocabulary = vocabulary_;
  call.slots = rows.table.data<int32_t>();
  call.options = of_slot<const SlotOptions>(options_, 0);
  call.histories = of_slot<SlotHistory>(histories_, 0);
  call.ids = out.ids.data<int32_t>();
  call.best = wanted ? out.best.data<int32_t>() : nullptr;
  call.log_probabilities = wanted ? out.log_probabilities.data<float>() : nullptr;
  call.device = device;
  call.blocks = blocks_per_row_;
  FURIOUS_DISPATCH(device, choose(call));
  return out;
}

}  // namespace furious
