#include "eval/accuracy.h"

#include <algorithm>

#include "base/error.h"

namespace furious {

Accuracy& Accuracy::operator+=(const Accuracy& other) {
  right += other.right;
  asked += other.asked;
  return *this;
}

Accuracy accuracy(const LanguageModel& model, const BatchSource& batches, int64_t steps) {
  require(batches.vocabulary_size() <= model.config().vocabulary, "accuracy: the task has {} ids, the model knows {}",
          batches.vocabulary_size(), model.config().vocabulary);
  Accuracy counted;
  for (int64_t step = 0; step < steps; ++step) {
    const Batch batch = batches.at(step);
    const Tensor logits = model.logits(batch.inputs, batch.boundaries);
    const int64_t vocabulary = logits.size(2);
    for (int64_t i = 0; i < batch.targets.elements(); ++i) {
      const int32_t wanted = batch.targets.data<int32_t>()[i];
      if (wanted < 0) continue;
      const float* row = logits.data<float>() + i * vocabulary;
      counted.asked += 1;
      counted.right += std::max_element(row, row + vocabulary) - row == wanted;
    }
  }
  return counted;
}

}  // namespace furious
