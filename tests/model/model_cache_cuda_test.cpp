#include "cuda.h"
#include "model/language_model.h"
#include "model/little.h"

namespace furious {
namespace {

using namespace furious::testing;

// Tokens [begin, begin + count) of each sequence.
Tensor part_of(const Tensor& tokens, int64_t begin, int64_t count) {
  const Tensor part = Tensor::empty({tokens.size(0), count}, DType::i32);
  copy(part, tokens.slice(1, begin, count));
  return part;
}

constexpr int64_t kFirst = 40, kLength = 330;  // several folds

TEST(ModelCacheCuda, ReadsAsTheCpuAndTakesOverItsMemory) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const ModelConfig config = little(preset);
    const LanguageModel cpu(config, 1), gpu(config, 1, kGpu);
    const Tensor tokens = random_tokens(random, {2, kLength}, config.vocabulary);
    ModelCache here(config, 2), there(config, 2, kGpu);
    const auto read_both = [&](int64_t begin, int64_t count) {
      const Tensor part = part_of(tokens, begin, count);
      const Tensor expected = cpu.read(here, part);
      ASSERT_LE(relative_error(gpu.read(there, part), expected), 1e-3) << "token " << begin;
    };
    read_both(0, kFirst);
    for (int64_t t = kFirst; t < kLength; ++t) {
      if (t % 97 == 0) {  // each goes on from what the other remembers
        const ModelCache::Contents from_cpu = here.contents(), from_gpu = there.contents();
        here = ModelCache(config, 2, from_gpu);
        there = ModelCache(config, 2, from_cpu, kGpu);
      }
      read_both(t, 1);
    }
  }
}

TEST(ModelCacheCuda, RoundedWeightsAndActivations) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  ModelConfig config = little(preset("2mamba"));
  config.head_dim = 16;
  const LanguageModel cpu(config, 1);
  LanguageModel gpu(config, 1, kGpu);
  gpu.set_compute(compute_in(DType::bf16, kGpu));
  gpu.round_weights();
  const Tensor tokens = random_tokens(random, {2, kLength}, config.vocabulary);
  ModelCache here(config, 2), there(config, 2, kGpu);
  for (int64_t t = 0; t < kLength; ++t) {
    const Tensor part = part_of(tokens, t, 1);
    const Tensor expected = cpu.read(here, part);
    ASSERT_LE(relative_error(gpu.read(there, part), expected), 5e-2) << "token " << t;
  }
}

}  // namespace
}  // namespace furious
