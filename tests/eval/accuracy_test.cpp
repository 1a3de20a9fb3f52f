#include "eval/accuracy.h"

#include <algorithm>

#include "data/synthetic.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::int_tensor_of;

// Batches with fixed contents.
class Fixed final : public BatchSource {
 public:
  Fixed(Tensor inputs, Tensor targets) : batch_{std::move(inputs), std::move(targets), {}} {}
  int64_t batch() const override { return batch_.inputs.size(0); }
  int64_t length() const override { return batch_.inputs.size(1); }
  int32_t vocabulary_size() const override { return 66; }
  Batch at(int64_t, RowRange) const override { return batch_; }

 private:
  Batch batch_;
};

TEST(Accuracy, CountsTheLargestLogitsAtTheTargets) {
  const LanguageModel model(model_config("2mamba", "tiny", 66), 7);
  const Tensor inputs = int_tensor_of({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor logits = model.logits(inputs);
  std::vector<int32_t> best;
  for (int64_t i = 0; i < 6; ++i) {
    const float* row = logits.data<float>() + i * 66;
    best.push_back(static_cast<int32_t>(std::max_element(row, row + 66) - row));
  }
  const int32_t wrong = (best[1] + 1) % 66;
  const Fixed batches(inputs, int_tensor_of({best[0], wrong, -1, best[3], -1, best[5]}, {2, 3}));
  EXPECT_EQ(accuracy(model, batches, 1), (Accuracy{3, 4}));
  EXPECT_EQ(accuracy(model, batches, 3), (Accuracy{9, 12}));
  EXPECT_EQ(accuracy(model, batches, 0), (Accuracy{0, 0}));
}

TEST(Accuracy, ATaskWithMoreIdsThanTheModel) {
  const LanguageModel model(model_config("2mamba", "tiny", 20), 7);
  expect_error([&] { accuracy(model, NeedleTask({}), 1); }, {"ids", "20"});
}

}  // namespace
}  // namespace furious
