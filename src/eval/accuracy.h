// Accuracy of greedy decoding: how many targets of a task have the largest logit.
#pragma once

#include <cstdint>
#include <functional>

#include "data/batches.h"
#include "model/language_model.h"

namespace furious {

struct Accuracy {
  int64_t right = 0, asked = 0;

  double rate() const { return static_cast<double>(right) / static_cast<double>(asked); }
  Accuracy& operator+=(const Accuracy& other);
  bool operator==(const Accuracy&) const = default;
};

// Over batches 0 to steps - 1.
Accuracy accuracy(const LanguageModel& model, const BatchSource& batches, int64_t steps);

}  // namespace furious
