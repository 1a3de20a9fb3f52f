#include "eval/test_loss.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "base/error.h"
#include "ops/boundaries.h"

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

// The place of a number of tokens in position_losses: that of the power of two that is not below it.
size_t place_of(int64_t known) {
  return static_cast<size_t>(std::bit_width(static_cast<uint64_t>(known - 1)));
}

void add_by_position(std::vector<PositionLoss>& places, const Batch& batch, const Tensor& losses) {
  const int64_t length = batch.targets.size(1);
  for (const Segment& segment : segments_of("test loss", batch.boundaries, batch.targets.size(0), length))
    for (int64_t i = segment.begin; i < segment.end; ++i) {
      const int64_t token = segment.batch * length + i;
      if (batch.targets.data<int32_t>()[token] < 0) continue;
      PositionLoss& place = places.at(place_of(i - segment.begin + 1));
      place.sum += static_cast<double>(losses.data<float>()[token]);
      place.tokens += 1;
    }
}

}  // namespace

std::vector<PositionLoss> position_losses(int64_t length) {
  std::vector<PositionLoss> places(1);
  while (places.back().last < length) {
    const int64_t before = places.back().last;
    places.push_back({before + 1, std::min(2 * before, length)});
  }
  return places;
}

TestLoss test_loss(const LanguageModel& model, const BatchSource& batches, int64_t steps, const Tokenizer* tokenizer,
                   const TestLossProgress& progress, std::vector<PositionLoss>* by_position) {
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
    if (by_position != nullptr) add_by_position(*by_position, batch, losses);
    if (progress && !progress(step + 1, total)) break;
  }
  return total;
}

}  // namespace furious
