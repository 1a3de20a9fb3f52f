// A kernel that starts before the previous one has ended must not see what that one has yet to write: chains of such
// kernels give the same bits when each waits for the one before it.
#ifdef FURIOUS_CUDA
#include "cuda.h"
#include "decode/token_linear.h"
#include "gpu/device.h"
#include "ops/mixer/recurrent.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

// Tokens of a little model: h += W_o mixer(swiglu(h)), and the logits of every token.
std::vector<Tensor> decode(int64_t batch, int64_t tokens) {
  Random random(1);
  constexpr int64_t kHidden = 256, kDim = 16;
  const auto weight = [&](int64_t rows, int64_t columns) {
    return to_gpu(random.normal_tensor({rows, columns}, 1 / std::sqrt(static_cast<double>(columns))), DType::bf16);
  };
  const Tensor gate = weight(3 * kDim, kHidden), up = weight(3 * kDim, kHidden), back = weight(kHidden, kDim);
  const Tensor head = weight(1000, kHidden), norm = to_gpu(random.normal_tensor({kHidden}));
  const Tensor h = to_gpu(random.normal_tensor({batch, kHidden}), DType::bf16);
  const Tensor decay = to_gpu(random.uniform_tensor({batch, 1}, -0.1, 0));
  MixerCache cache(mixer_spec("2mamba"), {batch, 1, 1, 1, kDim, kDim}, kGpu);
  std::vector<Tensor> logits;
  for (int64_t t = 0; t < tokens; ++t) {
    const Tensor qkv = token_swiglu({h, {}, norm, 1e-5f}, gate, up, MatmulPrecision::bf16).split_dim(1, 3, kDim);
    const Tensor out = cache.step(qkv.slice(1, 0, 1), qkv.slice(1, 1, 1), qkv.slice(1, 2, 1), decay);
    token_add(h, {out.view({batch, kDim}), {}, {}, 0}, back, MatmulPrecision::bf16);
    logits.push_back(token_logits({h, {}, norm, 1e-5f}, head));
  }
  EXPECT_TRUE(cache.has_folded());
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
