#include "decode/decoder.h"

#include <algorithm>
#include <set>

#include "decode/batch.h"
#include "decode/state_file.h"
#include "model/little.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr Sampling kGreedy{.temperature = 0, .top_p = 1};

// Weights large enough that what a model writes depends on what it has read.
LanguageModel lively_model(const ModelConfig& config) {
  Random random(1);
  return LanguageModel(config, [&](const std::string&, const Tensor& out) {
    copy_between(out, random.normal_tensor(out.shape(), 0.3));
  });
}

std::vector<int32_t> random_text(Random& random, int64_t length, int64_t vocabulary) {
  std::vector<int32_t> text;
  for (int64_t i = 0; i < length; ++i) text.push_back(static_cast<int32_t>(random.integer(0, vocabulary - 1)));
  return text;
}

// The text of one sequence alone in a decoder.
std::vector<int32_t> alone(const LanguageModel& model, const std::vector<int32_t>& prompt, const Sampling& sampling,
                           int64_t tokens) {
  Decoder decoder(model, 1);
  const int32_t slot = decoder.start();
  decoder.read(slot, prompt);
  decoder.set_sampling(slot, sampling);
  std::vector<int32_t> text;
  for (int64_t i = 0; i < tokens; ++i) text.push_back(decoder.step({&slot, 1}).wait()[0]);
  return text;
}

class DecoderOf : public ::testing::TestWithParam<const char*> {};

// Slots with prompts, lengths and sampling of their own that start and stop at different times, in changing orders.
TEST_P(DecoderOf, SlotsAreIndependent) {
  Random random(2);
  const LanguageModel model = lively_model(little_named(GetParam()));
  struct Sequence {
    std::vector<int32_t> prompt, text;
    Sampling sampling;
    int64_t starts, ends;
    int32_t slot = -1;
  };
  std::vector<Sequence> sequences;
  for (int i = 0; i < 7; ++i) {
    Sequence sequence;
    sequence.prompt = random_text(random, random.pick<int64_t>({1, 2, 33, 190, 300}), model.config().vocabulary);
    sequence.sampling = i % 3 == 0 ? kGreedy : Sampling{.temperature = 2, .top_k = 5 + i, .seed = uint64_t(i)};
    sequence.starts = random.integer(0, 60);
    sequence.ends = sequence.starts + random.integer(1, 140);
    sequences.push_back(sequence);
  }
  Decoder decoder(model, 7);
  for (int64_t t = 0; t < 200; ++t) {
    std::vector<Sequence*> active;
    for (Sequence& sequence : sequences) {
      if (t == sequence.starts) {
        sequence.slot = decoder.start();
        decoder.read(sequence.slot, sequence.prompt);
        decoder.set_sampling(sequence.slot, sequence.sampling);
      }
      if (t == sequence.ends) decoder.stop(sequence.slot);
      if (t >= sequence.starts && t < sequence.ends && random.integer(0, 9) > 0) active.push_back(&sequence);
    }
    if (active.empty()) continue;
    std::rotate(active.begin(), active.begin() + random.integer(0, static_cast<int64_t>(active.size()) - 1),
                active.end());
    std::vector<int32_t> slots;
    for (const Sequence* sequence : active) slots.push_back(sequence->slot);
    const std::vector<int32_t> ids = decoder.step(slots).wait();
    for (size_t i = 0; i < active.size(); ++i) active[i]->text.push_back(ids[i]);
  }
  for (const Sequence& sequence : sequences) {
    EXPECT_EQ(sequence.text,
              alone(model, sequence.prompt, sequence.sampling, static_cast<int64_t>(sequence.text.size())));
    if (sequence.text.size() > 20 && sequence.sampling.temperature > 0) {
      EXPECT_GT(std::set(sequence.text.begin(), sequence.text.end()).size(), 2u) << "the test would see nothing";
    }
  }
}

TEST_P(DecoderOf, LogitsMatchTheFullPass) {
  Random random(3);
  const LanguageModel model = lively_model(little_named(GetParam()));
  const std::vector<int32_t> text = random_text(random, 150, model.config().vocabulary);
  const Tensor full = model.logits(int_tensor_of(text, {1, 150}));
  Decoder decoder(model, 3);
  (void)decoder.start();
  const int32_t slot = decoder.start();
  int64_t at = 0;
  for (const int64_t count : {1, 40, 7, 1, 1, 64, 5, 31}) {
    decoder.read(slot, std::span(text).subspan(static_cast<size_t>(at), static_cast<size_t>(count)));
    at += count;
    EXPECT_LE(relative_error(decoder.logits(slot), full.select(0, 0).select(0, at - 1)), 2e-4) << at;
  }
  EXPECT_EQ(decoder.tokens(slot), 150);
}

// Several prompts at once, some of them of slots that have read already, some cut into chunks.
TEST_P(DecoderOf, PromptsReadTogetherEqualThoseReadAlone) {
  Random random(8);
  const LanguageModel model = lively_model(little_named(GetParam()));
  const int64_t vocabulary = model.config().vocabulary;
  // New ones that do not fold yet; new ones that fold and have chunks; further ones of all; one token of each.
  for (const std::vector<std::vector<int64_t>>& rounds :
       {std::vector<std::vector<int64_t>>{{3, 20, 1, 9}, {7, 0, 30, 2}, {1, 1, 1, 1}},
        std::vector<std::vector<int64_t>>{{190, 4100, 400, 33}, {40, 5, 1, 260}}}) {
    Decoder together(model, 4), alone(model, 4);
    std::vector<int32_t> slots;
    for (int i = 0; i < 4; ++i) {
      slots.push_back(together.start());
      ASSERT_EQ(alone.start(), slots.back());
    }
    for (const std::vector<int64_t>& lengths : rounds) {
      std::vector<std::vector<int32_t>> texts;
      std::vector<Decoder::Prompt> prompts;
      for (const int64_t length : lengths) texts.push_back(random_text(random, length, vocabulary));
      for (size_t i = 0; i < slots.size(); ++i) prompts.push_back({slots[i], texts[i]});
      together.read(prompts);
      for (const auto& [slot, tokens] : prompts) alone.read(slot, tokens);
      for (const int32_t slot : slots) {
        EXPECT_EQ(together.tokens(slot), alone.tokens(slot));
        EXPECT_EQ(together.contents(slot).sampling.history, alone.contents(slot).sampling.history);
        // The number of rows of a product, and the form of the mixer, may differ: rounding.
        EXPECT_LE(relative_error(together.logits(slot), alone.logits(slot)), 1e-5) << slot;
      }
    }
    for (int step = 0; step < 80; ++step) {
      for (const int32_t slot : slots) {
        together.set_sampling(slot, kGreedy);
        alone.set_sampling(slot, kGreedy);
      }
      ASSERT_EQ(together.step(slots).wait(), alone.step(slots).wait()) << step;
    }
  }
}

// Chunks of a prompt, and then tokens, against all of it in one pass.
TEST_P(DecoderOf, DecodesAfterChunksAsAfterOnePass) {
  Random random(9);
  const LanguageModel model = lively_model(little_named(GetParam()));
  const std::vector<int32_t> text = random_text(random, 300, model.config().vocabulary);
  Decoder decoder(model, 2);
  const std::vector<int32_t> slots{decoder.start(), decoder.start()};
  decoder.read(slots[0], text);
  size_t at = 0;
  for (const size_t count : {2, 90, 5, 103, 100}) {
    decoder.read(slots[1], std::span(text).subspan(at, count));
    at += count;
  }
  for (const int32_t slot : slots) decoder.set_sampling(slot, kGreedy);
  for (int step = 0; step < 40; ++step) {
    EXPECT_LE(relative_error(decoder.logits(slots[1]), decoder.logits(slots[0])), 2e-4) << step;
    const std::vector<int32_t> ids = decoder.step(slots).wait();
    ASSERT_EQ(ids[0], ids[1]) << step;
  }
}

// Other slots step, fork and read between the layers of a pass.
TEST_P(DecoderOf, PassesLayerByLayerEqualReading) {
  Random random(8);
  const LanguageModel model = lively_model(little_named(GetParam()));
  const std::vector<int32_t> prompt = random_text(random, 230, model.config().vocabulary);
  const std::vector<int32_t> other = random_text(random, 40, model.config().vocabulary);
  const Sampling sampling{.temperature = 2, .seed = 5};
  Decoder decoder(model, 3);
  const int32_t writer = decoder.start();
  decoder.read(writer, other);
  decoder.set_sampling(writer, sampling);
  std::vector<int32_t> written;
  const int32_t slot = decoder.start();
  const std::span<const int32_t> all(prompt);
  int64_t layers = 0;
  for (const std::span<const int32_t> part : {all.first(100), all.subspan(100, 1), all.subspan(101)}) {
    const std::shared_ptr<Decoder::Pass> pass = decoder.begin_pass({slot, part});
    while (!decoder.advance(*pass)) {
      ++layers;
      written.push_back(decoder.step({&writer, 1}).wait()[0]);
      const int32_t fork = decoder.fork(writer);
      decoder.read(fork, other);
      decoder.stop(fork);
    }
  }
  EXPECT_EQ(layers, 2 * (model.config().layers - 1));
  EXPECT_EQ(written, alone(model, other, sampling, static_cast<int64_t>(written.size())));

  Decoder whole(model, 1);
  const int32_t same = whole.start();
  for (const std::span<const int32_t> part : {all.first(100), all.subspan(100, 1), all.subspan(101)})
    whole.read(same, part);
  decoder.set_sampling(slot, sampling);
  whole.set_sampling(same, sampling);
  for (int t = 0; t < 5; ++t) {
    EXPECT_TRUE(same_bits(decoder.logits(slot), whole.logits(same))) << t;
    EXPECT_EQ(decoder.step({&slot, 1}).wait(), whole.step({&same, 1}).wait());
  }

  // A pass that is dropped in the middle, with its slot.
  const int32_t dropped = decoder.start();
  std::shared_ptr<Decoder::Pass> pass = decoder.begin_pass({dropped, all});
  ASSERT_GT(model.config().layers, 1);
  EXPECT_FALSE(decoder.advance(*pass));
  pass.reset();
  decoder.stop(dropped);
  expect_error([&] { decoder.begin_pass({slot, {}}); }, {"begin_pass", "0 tokens"});
  expect_error([&] { decoder.begin_pass({dropped, all}); }, {"slot"});
}

TEST_P(DecoderOf, ForksContinueBitForBit) {
  Random random(4);
  const LanguageModel model = lively_model(little_named(GetParam()));
  const std::vector<int32_t> prompt = random_text(random, 210, model.config().vocabulary);
  Decoder decoder(model, 3);
  const int32_t a = decoder.start();
  decoder.read(a, prompt);
  const int32_t b = decoder.fork(a);
  for (const int32_t slot : {a, b}) decoder.set_sampling(slot, {.temperature = 1, .seed = 5});
  const int64_t before = decoder.bytes(a);
  EXPECT_EQ(decoder.bytes(b), before);
  for (int i = 0; i < 80; ++i) {
    if (i == 40) {  // a fork of a fork, after the original was released
      decoder.stop(a);
      EXPECT_EQ(decoder.free_slots(), 2);
      const int32_t c = decoder.fork(b);
      EXPECT_TRUE(same_bits(decoder.logits(b), decoder.logits(c)));
      break;
    }
    const std::vector<int32_t> ids = decoder.step(std::vector{b, a}).wait();
    ASSERT_EQ(ids[0], ids[1]) << i;
    ASSERT_TRUE(same_bits(decoder.logits(a), decoder.logits(b))) << i;
  }
}

// In memory and in a file.
TEST_P(DecoderOf, SnapshotsContinueBitForBit) {
  Random random(5);
  const TemporaryDirectory folder;
  const LanguageModel model = lively_model(little_named(GetParam()));
  Decoder decoder(model, 2), other(model, 4);
  (void)other.start();
  const Sampling sampling{.temperature = 0.9, .top_k = 9, .repetition_penalty = 1.3, .seed = 8};
  std::vector<int32_t> slots;
  for (const int64_t length : {5, 260}) {
    slots.push_back(decoder.start());
    decoder.read(slots.back(), random_text(random, length, model.config().vocabulary));
    decoder.set_sampling(slots.back(), sampling);
  }
  for (int i = 0; i < 9; ++i) (void)decoder.step(slots).wait();
  const std::vector<SlotContents> contents{decoder.contents(slots[0]), decoder.contents(slots[1])};
  save_state(folder / "two.state", contents, model.config(), "print");
  const std::vector<SlotContents> loaded = load_state(folder / "two.state", model.config(), "print");
  ASSERT_EQ(loaded.size(), 2u);
  std::vector<int32_t> restored;
  for (size_t i = 0; i < 2; ++i) {
    restored.push_back(other.start());
    other.read(restored.back(), random_text(random, 70, model.config().vocabulary));  // is replaced by restore
    other.restore(restored.back(), i == 0 ? contents[0] : loaded[1]);
    other.set_sampling(restored.back(), sampling);
    EXPECT_EQ(other.tokens(restored[i]), decoder.tokens(slots[i]));
  }
  for (int i = 0; i < 90; ++i) {
    ASSERT_EQ(other.step(restored).wait(), decoder.step(slots).wait()) << i;
    for (size_t s = 0; s < 2; ++s)
      ASSERT_TRUE(same_bits(other.logits(restored[s]), decoder.logits(slots[s]))) << i << ", sequence " << s;
  }
}

// Texts of several lengths after contexts of their own, forked and scored together, against a full pass over each.
TEST_P(DecoderOf, ScoresMatchTheFullPass) {
  Random random(12);
  const LanguageModel model = lively_model(little_named(GetParam()));
  const int64_t vocabulary = model.config().vocabulary;
  Decoder decoder(model, 9);
  std::vector<std::vector<int32_t>> contexts, texts;
  std::vector<Decoder::Prompt> prompts;
  for (const int64_t length : {1, 40, 150}) {
    const std::vector<int32_t> context = random_text(random, length, vocabulary);
    const int32_t slot = decoder.start();
    decoder.read(slot, context);
    for (const int64_t own : {1, 2, 70}) {
      contexts.push_back(context);
      texts.push_back(random_text(random, own, vocabulary));
      if (own == 2) {  // what greedy decoding writes
        const std::vector<int32_t> written = alone(model, context, kGreedy, 2);
        texts.back() = {written[0], written[1]};
      }
      prompts.push_back({own == 70 ? slot : decoder.fork(slot), {}});
    }
  }
  for (size_t i = 0; i < texts.size(); ++i) prompts[i].tokens = texts[i];
  const std::vector<TokenScores> scores = decoder.score(prompts, true);
  for (size_t i = 0; i < texts.size(); ++i) {
    std::vector<int32_t> all = contexts[i];
    all.insert(all.end(), texts[i].begin(), texts[i].end());
    const Tensor logits = model.logits(int_tensor_of(all, {1, static_cast<int64_t>(all.size())}));
    ASSERT_EQ(scores[i].log_probabilities.size(), texts[i].size());
    double sum = 0;
    for (size_t t = 0; t < texts[i].size(); ++t) {
      const std::vector<double> row =
          to_doubles(logits.select(0, 0).select(0, static_cast<int64_t>(contexts[i].size() + t) - 1));
      double total = 0;
      for (const double logit : row) total += std::exp(logit);
      const double expected = row[static_cast<size_t>(texts[i][t])] - std::log(total);
      EXPECT_NEAR(scores[i].log_probabilities[t], expected, 2e-3) << i << " " << t;
      sum += expected;
    }
    EXPECT_NEAR(scores[i].sum(), sum, 1e-2);
    EXPECT_EQ(scores[i].greedy, texts[i] == alone(model, contexts[i], kGreedy, static_cast<int64_t>(texts[i].size())));
    EXPECT_EQ(decoder.tokens(prompts[i].slot), static_cast<int64_t>(all.size()) - 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Presets, DecoderOf,
                         ::testing::Values("2mamba", "softmax", "mamba2", "mamba2-paper", "2mamba-e", "shared",
                                           "window"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST(Decoder, RefusesInvalidArguments) {
  const LanguageModel model = lively_model(little(preset("2mamba")));
  expect_error([&] { Decoder(model, 0); }, {"0 slots", "expected 1 or more"});
  Decoder decoder(model, 2);
  const int32_t a = decoder.start(), b = decoder.start();
  expect_error([&] { decoder.start(); }, {"all 2 slots", "stop one"});
  expect_error([&] { decoder.fork(a); }, {"all 2 slots"});
  expect_error([&] { decoder.step(std::vector{a}); }, {"slot 0", "read nothing"});
  expect_error([&] { decoder.step({}); }, {"no slots"});
  decoder.stop(b);
  expect_error([&] { decoder.read(b, std::vector{1}); }, {"slot 1 holds no sequence"});
  expect_error([&] { decoder.tokens(7); }, {"slot 7", "expected 0..1"});
  std::vector<int32_t> late(5000, 1);  // a bad id in the second chunk: nothing is read
  late.back() = 23;
  expect_error([&] { decoder.read(a, late); }, {"token 23", "expected 0 to 22"});
  EXPECT_EQ(decoder.tokens(a), 0);
  decoder.read(a, std::vector{1, 2});
  const std::vector<int32_t> more{3, 4};
  const Decoder::Prompt twice[] = {{a, more}, {a, more}};
  expect_error([&] { decoder.read(twice); }, {"two prompts", "slot 0"});
  expect_error([&] { decoder.step(std::vector{a, a}); }, {"twice"});
  EXPECT_EQ(decoder.contents(a).sampling.position, 2u);  // no token was chosen

  const LanguageModel other = lively_model(little(preset("softmax")));
  Decoder of_other(other, 1);
  const int32_t slot = of_other.start();
  expect_error([&] { of_other.restore(slot, decoder.contents(a)); }, {"restore"});
}

TEST(Decoder, RefusesToScoreNothing) {
  const LanguageModel model = lively_model(little_named("2mamba"));
  Decoder decoder(model, 2);
  const int32_t slot = decoder.start();
  const std::vector<int32_t> text{1, 2}, outside{1, 1 << 20};
  const auto score = [&](std::span<const int32_t> tokens) {
    const Decoder::Prompt prompt{slot, tokens};
    return decoder.score({&prompt, 1});
  };
  expect_error([&] { score(text); }, {"has read nothing"});
  decoder.read(slot, text);
  expect_error([&] { score({}); }, {"no tokens"});
  expect_error([&] { score(outside); }, {"1048576", "expected 0 to"});
  EXPECT_EQ(score(text)[0].log_probabilities.size(), 2u);
}

TEST(Decoder, LogProbabilitiesOfTheChosenAndTheBest) {
  const LanguageModel model = lively_model(little(preset("2mamba")));
  Decoder decoder(model, 2);
  std::vector<int32_t> slots{decoder.start(), decoder.start()};
  decoder.read(slots[0], std::vector{1, 2, 3});
  decoder.read(slots[1], std::vector{4});
  for (const int32_t slot : slots) decoder.set_sampling(slot, {.temperature = 1, .log_probabilities = 3});
  const Tensor logits = decoder.logits(slots[1]);
  const ChosenTokens chosen = decoder.step(slots);
  const int32_t id = chosen.wait()[1];
  double sum = 0;
  for (int64_t i = 0; i < logits.size(0); ++i) sum += std::exp(static_cast<double>(logits.data<float>()[i]));
  const Tensor found = chosen.log_probabilities().select(0, 1);
  EXPECT_NEAR(found.data<float>()[0], static_cast<double>(logits.data<float>()[id]) - std::log(sum), 1e-4);
  const float largest = *std::max_element(logits.data<float>(), logits.data<float>() + logits.size(0));
  EXPECT_NEAR(found.data<float>()[1], static_cast<double>(largest) - std::log(sum), 1e-4);
  EXPECT_EQ(logits.data<float>()[chosen.best().select(0, 1).data<int32_t>()[1]], largest);
}

// Ids behind the vocabulary of the tokenizer are never chosen.
TEST(Decoder, ChoosesOnlyIdsOfTheVocabulary) {
  const LanguageModel model = lively_model(little(preset("2mamba")));
  Decoder decoder(model, 1, 5);
  const int32_t slot = decoder.start();
  decoder.read(slot, std::vector{22});
  decoder.set_sampling(slot, {.temperature = 100, .top_p = 1});
  std::set<int32_t> seen;
  for (int i = 0; i < 60; ++i) seen.insert(decoder.step({&slot, 1}).wait()[0]);
  EXPECT_EQ(seen, (std::set<int32_t>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace furious
