// Sessions of one model in several threads, and batches of sequences, on one GPU.
#include <algorithm>
#include <future>

#include "cuda.h"
#include "data/corpus.h"
#include "decode/batch.h"
#include "decode/model_parts.h"
#include "decode/token_program.h"
#include "furious/model.h"
#include "model/little.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr int kThreads = 8;

// Weights large enough that what a model writes depends on what it has read.
Model random_model(const std::string& arch, DType dtype) {
  Random random(1);
  ModelConfig config = little(preset(arch));
  config.vocabulary = 300;  // more than the byte tokenizer has
  LanguageModel model(
      config, [&](const std::string&, const Tensor& out) { copy_between(out, random.normal_tensor(out.shape(), 0.3)); },
      kGpu);
  model.set_compute(compute_in(dtype, kGpu));
  if (dtype == DType::bf16) model.round_weights();
  return Model(std::make_shared<const Model::Parts>(std::move(model), load_tokenizer("byte"), false));
}

// Some texts that one thread has written, one after the other, and the state after each: steps that are captured
// before the first fold and after it, greedy ones and sampled ones, folds, and a prefill in between.
std::string written_by(const Model& model, int thread, const std::filesystem::path& state) {
  std::string all;
  for (const int length : {3 + thread, 2050 + 17 * thread}) {
    Session session(model, 1 + thread % 2);
    session.read(std::string(static_cast<size_t>(length), static_cast<char>('a' + thread)));
    WriteOptions options;
    options.tokens = 70 + thread;
    options.sampling.seed = static_cast<uint64_t>(thread);
    for (const double temperature : {1.0, 0.0}) {
      options.sampling.temperature = temperature;
      for (const Text& text : session.write(options)) all += text.text;
      session.read("and so on");
    }
    session.save(state);
    all += read_file(state.string());
  }
  return all;
}

class SessionsInThreadsCuda : public ::testing::TestWithParam<std::pair<const char*, DType>> {};

TEST_P(SessionsInThreadsCuda, ConcurrentSessionsAreIndependent) {
  SKIP_WITHOUT_GPU();
  const TemporaryDirectory folder;
  const auto [arch, dtype] = GetParam();
  const Model model = random_model(arch, dtype);
  {
    const LanguageModel& language_model = model.parts().language_model;
    Batch cache(language_model, 1);
    cache.read(Tensor::zeros({1, 2050}, DType::i32));
    for (int i = 0; i < 2; ++i) cache.step(Tensor::zeros({1, 1}, DType::i32));
    const bool has_kernel = TokenProgram::resident_blocks(kGpu, 0) > 0;
    const bool one = has_kernel && dtype == DType::bf16;
    ASSERT_EQ(cache.ran_as(), one ? "persistent kernel" : "graph");
  }
  const auto write = [&](int thread) { return written_by(model, thread, folder / fmt::format("state{}", thread)); };
  std::vector<std::string> alone;
  for (int i = 0; i < kThreads; ++i) alone.push_back(write(i));
  std::vector<std::future<std::string>> together;
  for (int i = 0; i < kThreads; ++i) together.push_back(std::async(std::launch::async, write, i));
  for (int i = 0; i < kThreads; ++i) EXPECT_TRUE(together[i].get() == alone[i]) << "thread " << i;
}

// A token as a graph, as one kernel where the device has it, and from a KV cache.
INSTANTIATE_TEST_SUITE_P(Session, SessionsInThreadsCuda,
                         ::testing::Values(std::pair("2mamba", DType::f32), std::pair("2mamba", DType::bf16),
                                           std::pair("softmax", DType::bf16)),
                         [](const auto& test) {
                           return std::string(test.param.first == std::string("softmax") ? "softmax" : "squared") +
                                  (test.param.second == DType::bf16 ? "_bf16" : "_f32");
                         });

class SequenceBatchCuda : public ::testing::TestWithParam<const char*> {};

// Sequences that join, leave, fork and move to the host and back write what each would write alone. In f32 with the
// most probable token the number of rows in a step changes nothing but the last bits.
TEST_P(SequenceBatchCuda, SequencesJoinAndLeave) {
  SKIP_WITHOUT_GPU();
  const Model model = random_model(GetParam(), DType::f32);
  Sampling greedy;
  greedy.temperature = 0;
  const auto alone = [&](const std::string& text, int64_t count) {
    Session session(model);
    session.read(text);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<float> logits = session.logits();
      ids.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.begin() + 258) - logits.begin()));
      session.step({ids.back()});
    }
    return ids;
  };
  const std::string first(40, 'q'), second(700, 'r');
  SequenceBatch batch(model, 3);
  int a = batch.add();
  const int b = batch.add();
  for (const int sequence : {a, b}) batch.set_sampling(sequence, greedy);
  batch.read({{a, model.prompt(first)}, {b, model.prompt(second)}});
  std::vector<int32_t> of_a, of_b;
  for (int i = 0; i < 150; ++i) {
    if (i == 70) {
      const SequenceState state = batch.state(a);
      batch.remove(a);
      const int other = batch.add(), forked = batch.fork(b);
      batch.read({{other, model.prompt("another")}});
      batch.step({other});
      EXPECT_EQ(batch.logits(forked), batch.logits(b));
      batch.remove(other);
      batch.remove(forked);
      a = batch.add(state);
      batch.set_sampling(a, greedy);
    }
    const std::vector<WrittenToken> tokens = batch.step({b, a});
    of_b.push_back(tokens[0].id);
    of_a.push_back(tokens[1].id);
  }
  EXPECT_EQ(of_a, alone(first, 150));
  EXPECT_EQ(of_b, alone(second, 150));
  batch.remove(a);
  batch.remove(b);
  EXPECT_EQ(batch.bytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(Presets, SequenceBatchCuda, ::testing::Values("2mamba", "softmax", "mamba2"));

}  // namespace
}  // namespace furious
