// Mean loss per token, and per byte of text, which is comparable between tokenizers.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "data/batches.h"
#include "data/tokenizer.h"
#include "model/language_model.h"

namespace furious {

struct TestLoss {
  double sum = 0;          // of the losses of all predicted tokens, in nats
  int64_t tokens = 0;      // predicted
  int64_t text_bytes = 0;  // of these tokens; counted with a tokenizer

  double mean() const { return sum / static_cast<double>(tokens); }
  double perplexity() const { return std::exp(mean()); }
  double per_byte() const { return sum / static_cast<double>(text_bytes); }
  double bits_per_byte() const { return per_byte() / std::log(2.0); }
};

// The loss of tokens that are predicted from `first` to `last` tokens before them, in the same row and document.
struct PositionLoss {
  int64_t first = 1, last = 1;
  double sum = 0;
  int64_t tokens = 0;

  double mean() const { return sum / static_cast<double>(tokens); }
};
// Places for rows of this length: 1, 2, 3 to 4, 5 to 8, 9 to 16, …
std::vector<PositionLoss> position_losses(int64_t length);

// Over batches 0 to steps - 1. `progress` is called after each with the sum so far, and ends the work by returning
// false: what was summed by then is returned.
using TestLossProgress = std::function<bool(int64_t batches, const TestLoss& so_far)>;
TestLoss test_loss(const LanguageModel& model, const BatchSource& batches, int64_t steps,
                   const Tokenizer* tokenizer = nullptr, const TestLossProgress& progress = {},
                   std::vector<PositionLoss>* by_position = nullptr);  // of position_losses, to which losses are added

}  // namespace furious
