#include "paper/cache_memory.h"

#include "decode/batch.h"
#include "model/language_model.h"
#include "support.h"
#include "tensor/arena.h"

namespace furious {
namespace {

using testing::expect_error;

ModelConfig one_head(const std::string& arch, int64_t dim) {
  ModelConfig config;
  config.arch = arch;
  config.block = preset(arch).block;
  config.vocabulary = 2;
  config.hidden = config.intermediate = config.head_dim = config.qk_dim = dim;
  config.layers = config.q_heads = config.k_heads = config.v_heads = 1;
  return config;
}

// Compares the reported size of a cache with the bytes that the arena allocated.
TEST(CacheMemory, MeasuredBytesAreAllocatedBytes) {
  constexpr int64_t kDim = 16, kTokens = 200, kWaste = 511;  // per tensor, whose size is rounded up to blocks
  const CacheMemory memory = measure_cache_memory(kDim, kTokens);
  for (const auto& [name, arch] : {std::pair{"softmax", "softmax"}, {kLazyName, "2mamba"}}) {
    SCOPED_TRACE(name);
    const ModelConfig config = one_head(arch, kDim);
    const LanguageModel model(config, 1);
    Decoder decoder(model, 1);
    const int32_t slot = decoder.start(), token = 0;
    // Without the memory of an empty slot and of the decoder itself.
    const auto empty = decoder.bytes();
    const size_t before = Arena::of({}).usage().live;
    for (int64_t n = 1; n <= kTokens; ++n) {
      decoder.read(slot, {&token, 1});
      const auto allocated = static_cast<int64_t>(Arena::of({}).usage().live - before);
      const int64_t said = memory.curve(name).measured[n - 1] - empty;
      ASSERT_GE(allocated, said) << n;
      const int64_t pages = (n + CachePage::kTokens - 1) / CachePage::kTokens;
      ASSERT_LE(allocated, said + kWaste * (3 * pages + 2)) << n;  // k, v and decays of each; state and convolution
    }
  }
}

TEST(CacheMemory, FormulasOfThePaper) {
  EXPECT_EQ(break_even_formula(64), 1058);
  for (const int64_t dim : {8, 10, 64}) {
    const CacheMemory memory = measure_cache_memory(dim, 3);
    EXPECT_EQ(memory.curve("softmax").formula[2], 4 * 2 * 3 * dim);
    EXPECT_EQ(memory.curve("linear").formula[0], 4 * dim * (dim + 1));
    EXPECT_EQ(memory.curve("2mamba").formula[0], 4 * (dim * (dim + 1) * (dim + 1) / 2 + 3 * dim));
    EXPECT_EQ(memory.curve(kLazyName).formula[2], 4 * (2 * 3 * dim + 3 * dim));
    // States have the counted size, to the byte.
    for (const char* name : {"linear", "2mamba"}) EXPECT_EQ(memory.curve(name).measured, memory.curve(name).formula);
    const int64_t even = break_even_formula(dim);
    EXPECT_GT(2 * even * dim, dim * (dim + 1) * (dim + 1) / 2 + 3 * dim);
    EXPECT_LE(2 * (even - 1) * dim, dim * (dim + 1) * (dim + 1) / 2 + 3 * dim);
  }
}

TEST(CacheMemory, BreakEvenAndLazyFold) {
  const CacheMemory memory = measure_cache_memory(16, 300);
  // A cache grows in pages, so the break-even is within one page of the formula.
  EXPECT_NEAR(static_cast<double>(memory.break_even()), static_cast<double>(break_even_formula(16)),
              CachePage::kTokens);
  const auto &lazy = memory.curve(kLazyName).measured, &plain = memory.curve("softmax").measured;
  // Besides keys and values it contains a decay for each token, and the convolution's inputs.
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_LE(lazy[i], plain[i] + plain[i] / 32 + 3 * 16 * 4) << i + 1;
  EXPECT_LT(lazy.back(), plain.back() / 2);
  EXPECT_EQ(lazy.back(), lazy[250]);
  EXPECT_GT(memory.worst_of_lazy(), 1);
  EXPECT_EQ(measure_cache_memory(16, 20).break_even(), 0);
}

TEST(CacheMemory, RefusesInvalidArguments) {
  expect_error([] { measure_cache_memory(64, 0); }, {"0 tokens"});
  expect_error([] { measure_cache_memory(4, 10); }, {"head dimension 4"});
  expect_error([] { measure_cache_memory(8, 1).curve("mamba"); }, {"mamba"});
}

}  // namespace
}  // namespace furious
