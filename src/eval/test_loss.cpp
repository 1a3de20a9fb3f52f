#include "eval/test_loss.h"

#include <optional>
#include <vector>

#include "base/error.h"

namespace furious {
namespace {

// The bytes of text that each id stands for.
class TextBytes {
 public:
  explicit TextBytes(const Tokenizer& tokenizer) : bos_(tokenizer.bos()), eos_(tokenizer.eos()) {
    for (int32_t id = 0; id < tokenizer.vocabulary_size(); ++id) {
      inside_.push_back(static_cast<int64_t>(tokenizer.piece(id).size()));
      first_.push_back(static_cast<int64_t>(tokenizer.first_piece(id).size()));
    }
  }
  // After bos or eos a text begins.
  int64_t of(int32_t id, int32_t before) const {
    const bool begins = before >= 0 && (before == bos_ || before == eos_);
    return (begins ? first_ : inside_)[static_cast<size_t>(id)];
  }

 private:
  int32_t bos_, eos_;
  std::vector<int64_t> inside_, first_;
};

}  // namespace

TestLoss test_loss(const LanguageModel& model, const BatchSource& batches, int64_t steps, const Tokenizer* tokenizer,
                   const TestLossProgress& progress) {
  require(batches.vocabulary_size() <= model.config().vocabulary,
          "test loss: the data has {} token ids, the model knows {}: it was trained with another tokenizer",
          batches.vocabulary_size(), model.config().vocabulary);
  std::optional<TextBytes> bytes;
  if (tokenizer != nullptr) bytes.emplace(*tokenizer);
  TestLoss total;
  for (int64_t step = 0; step < steps; ++step) {
    const Batch batch = batches.at(step);
    const Tensor row_losses = Tensor::empty(batch.targets.shape(), DType::f32, model.device());
    model.loss(Tape::off(), batch.inputs, batch.targets, batch.boundaries, row_losses);
    const Tensor losses = Tensor::empty(batch.targets.shape(), DType::f32);
    copy_between(losses, row_losses);
    const int32_t* inputs = batch.inputs.data<int32_t>();
    const int32_t* targets = batch.targets.data<int32_t>();
    for (int64_t i = 0; i < losses.elements(); ++i) {
      if (targets[i] < 0) continue;
      total.sum += static_cast<double>(losses.data<float>()[i]);
      total.tokens += 1;
      if (bytes) total.text_bytes += bytes->of(targets[i], inputs[i]);
    }
    if (progress && !progress(step + 1, total)) break;
  }
  return total;
}

}  // namespace furious
