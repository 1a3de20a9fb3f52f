// A kernel that starts before the previous one has ended must not read its results too early: chains of such
// kernels give the same bits as kernels launched in order.
#ifdef FURIOUS_CUDA
#include "cuda.h"
#include "decode/batch.h"
#include "gpu/device.h"
#include "model/little.h"

namespace furious {
namespace {

using namespace furious::testing;

// The logits of every token, as a graph of kernels.
std::vector<Tensor> decode(int64_t batch, int64_t tokens) {
  Random random(1);
  ModelConfig config = little(preset("2mamba"));
  config.hidden = 256;
  LanguageModel model(config, 1, kGpu);
  Compute compute = compute_in(DType::bf16, kGpu);
  compute.token_program = false;
  model.set_compute(compute);
  model.round_weights();
  Batch sequences(model, batch);
  std::vector<Tensor> logits;
  for (int64_t t = 0; t < tokens; ++t)
    logits.push_back(sequences.step(random_tokens(random, {batch, 1}, config.vocabulary)));
  EXPECT_EQ(sequences.ran_as(), "graph");
  for (Tensor& x : logits) x = to_cpu(x);
  return logits;
}

TEST(LaunchCuda, InOrderScopeIsOfItsThreadAndNests) {
  SKIP_WITHOUT_GPU();
  EXPECT_EQ(cuda::launches_early(), cuda::is_hopper(kGpu));
  {
    const cuda::InOrderScope outer;
    { const cuda::InOrderScope inner; }
    EXPECT_FALSE(cuda::launches_early());
  }
  EXPECT_EQ(cuda::launches_early(), cuda::is_hopper(kGpu));
}

TEST(LaunchCuda, OverlappingKernelsGiveTheSameBits) {
  SKIP_WITHOUT_GPU();
  if (!cuda::launches_early()) GTEST_SKIP() << "kernels follow each other in order on this device";
  for (const int64_t batch : {1, 5}) {
    const std::vector<Tensor> early = decode(batch, 300);
    const cuda::InOrderScope in_order;
    const std::vector<Tensor> expected = decode(batch, 300);
    for (size_t t = 0; t < expected.size(); ++t) {
      ASSERT_TRUE(all_finite(expected[t])) << "token " << t;
      ASSERT_TRUE(same_bits(early[t], expected[t])) << "batch " << batch << ", token " << t;
    }
  }
}

}  // namespace
}  // namespace furious
#endif
