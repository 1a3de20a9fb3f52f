#include <algorithm>
#include <filesystem>
#include <fstream>

#include "cuda.h"
#include "data/corpus.h"
#include "decode/model_parts.h"
#include "decode/state_file.h"
#include "furious/model.h"
#include "model/little.h"
#include "ops/sampling/sampling.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

ModelConfig config_of(const std::string& arch, int64_t vocabulary = 300) {  // more than the byte tokenizer has
  ModelConfig config = little(preset(arch));
  config.vocabulary = vocabulary;
  return config;
}

// Weights large enough that what a model writes depends on what it has read.
Model random_model(const std::string& arch, uint64_t salt = 1, const std::string& tokenizer = "byte",
                   Device device = {}) {
  Random random(salt);
  const ModelConfig config = config_of(arch, tokenizer == "byte" ? 300 : 400);
  const auto fill = [&](const std::string&, const Tensor& out) {
    copy_between(out, random.normal_tensor(out.shape(), 0.3));
  };
  const auto loaded = tokenizer == "byte" ? load_tokenizer("byte") : make_sentencepiece(tokenizer, "test");
  return Model(std::make_shared<const Model::Parts>(LanguageModel(config, fill, device), loaded, false));
}

WriteOptions options_of(int64_t tokens, double temperature = 1, uint64_t seed = 5) {
  WriteOptions options;
  options.tokens = tokens;
  options.sampling.temperature = temperature;
  options.sampling.seed = seed;
  return options;
}

std::string read_state(const std::filesystem::path& path) {
  return read_file(path.string());
}

TEST(Session, UseAfterMoveIsAnError) {
  Session session(random_model("2mamba"));
  session.read("text");
  const Session other = std::move(session);
  EXPECT_GT(other.tokens(), 0);
  expect_error([&] { session.tokens(); }, {"session", "moved"});
  expect_error([&] { session.bytes(); }, {"session", "moved"});
  expect_error([&] { session.read("more"); }, {"session", "moved"});
  expect_error([&] { session.write(options_of(1)); }, {"session", "moved"});
  Model first = random_model("2mamba");
  const Model second = std::move(first);
  expect_error([&] { first.encode("text"); }, {"model", "moved"});
  expect_error([&] { Session of_none(first); }, {"model", "moved"});
}

class SessionOfEveryPreset : public ::testing::TestWithParam<Preset> {};

// The next texts and the state after them, of an uninterrupted session and of a loaded one.
TEST_P(SessionOfEveryPreset, ContinuesBitForBitAfterSaveAndLoad) {
  const TemporaryDirectory folder;
  const Model model = random_model(GetParam().name);
  const std::string text = "a prompt of some length, long enough for a fold or two: the window has 64 tokens at most.";
  for (const int64_t written : {0, 3, 70}) {
    Session session(model, 2);
    session.read(text);
    session.write(options_of(written));
    session.save(folder / "state");
    Session again(model, 2);
    again.load(folder / "state");
    EXPECT_EQ(again.tokens(), session.tokens());
    const auto go_on = [&](Session& one, const std::string& name) {
      const std::vector<Text> texts = one.write(options_of(40));
      one.read("and more text");
      one.save(folder / name);
      return texts[0].text + texts[1].text;
    };
    EXPECT_EQ(go_on(session, "a"), go_on(again, "b"));
    EXPECT_TRUE(read_state(folder / "a") == read_state(folder / "b")) << "after " << written << " tokens";
  }
}

TEST_P(SessionOfEveryPreset, LongTextsAndTheirStates) {
  const TemporaryDirectory folder;
  const Model model = random_model(GetParam().name);
  std::vector<uintmax_t> sizes;
  for (const int64_t length : {700, 1500, 5001}) {
    Session session(model);
    session.read(std::string(length, 'x'));
    session.write(options_of(length % 7));
    session.save(folder / "state");
    sizes.push_back(std::filesystem::file_size(folder / "state"));
  }
  const ModelConfig config = config_of(GetParam().name, 300);
  if (state_rows(config.block.mixer(), config.qk_dim) > 0) {
    EXPECT_EQ(sizes[0], sizes[1]);
    EXPECT_EQ(sizes[1], sizes[2]);
  } else {
    EXPECT_LT(sizes[0] + 100000, sizes[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Session, SessionOfEveryPreset, ::testing::ValuesIn(presets()), [](const auto& test) {
  std::string name = test.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Session, SequencesAreIndependent) {
  for (const char* arch : {"2mamba", "softmax", "mamba2"}) {
    const Model model = random_model(arch);
    Session several(model, 3);
    several.read("the beginning");
    const std::vector<Text> texts = several.write(options_of(30));
    ASSERT_EQ(texts.size(), 3u);
    EXPECT_NE(texts[0].text, texts[1].text);
    for (uint64_t i = 0; i < 3; ++i) {
      Session alone(model);
      alone.read("the beginning");
      EXPECT_EQ(alone.write(options_of(30, 1, 5 + i))[0].text, texts[i].text) << arch << " " << i;
    }
  }
}

TEST(Session, SequencesWithTextsOfTheirOwn) {
  const std::vector<std::string> texts{"the beginning", "", "x", "another beginning, a longer one"};
  for (const char* arch : {"2mamba", "softmax"}) {
    const Model model = random_model(arch);
    Session session(model, 4);
    session.read_each(texts);
    const std::vector<Text> written = session.write(options_of(30));
    session.read_each({" more", " of", "", " it"});
    const std::vector<Text> further = session.write(options_of(20));
    for (uint64_t i = 0; i < 4; ++i) {
      Session alone(model);
      alone.read(texts[i]);
      EXPECT_EQ(alone.write(options_of(30, 1, 5 + i))[0].text, written[i].text) << arch << " " << i;
      alone.read(std::vector<std::string>{" more", " of", "", " it"}[i]);
      EXPECT_EQ(alone.write(options_of(20, 1, 5 + i))[0].text, further[i].text) << arch << " " << i;
    }
    expect_error([&] { session.read_each({"one"}); }, {"read_each", "1 texts", "4 sequences"});
  }
}

// Against the logarithm of the softmax of a full pass, in double.
TEST(Session, LogProbabilitiesOfWhatItWrites) {
  const Model model = random_model("2mamba");
  const LanguageModel& language_model = model.parts().language_model;
  const int64_t known = model.parts().tokenizer->vocabulary_size();
  Session session(model, 2);
  session.read("the beginning");
  WriteOptions options = options_of(25, 1.3);
  options.sampling.frequency_penalty = 0.5;  // changes choices, not log-probabilities
  options.sampling.log_probabilities = 3;
  const std::vector<Text> texts = session.write(options);
  for (const Text& text : texts) {
    ASSERT_EQ(static_cast<int64_t>(text.log_probabilities.size()), text.tokens);
    std::vector<int32_t> ids{model.parts().start};
    for (const int32_t id : model.encode("the beginning")) ids.push_back(id);
    const size_t prompt = ids.size();
    for (const WrittenToken& token : text.log_probabilities) ids.push_back(token.id);
    const auto length = static_cast<int64_t>(ids.size());
    const std::vector<double> logits = to_doubles(language_model.logits(int_tensor_of(ids, {1, length})));
    for (size_t t = 0; t < text.log_probabilities.size(); ++t) {
      const double* const row = &logits[(prompt + t - 1) * static_cast<size_t>(model.vocabulary())];
      double sum = 0;
      for (int64_t i = 0; i < known; ++i) sum += std::exp(row[i]);
      const WrittenToken& token = text.log_probabilities[t];
      EXPECT_NEAR(token.log_probability, row[token.id] - std::log(sum), 1e-3) << t;
      std::vector<double> sorted(row, row + known);
      std::ranges::sort(sorted, std::greater<>());
      ASSERT_EQ(token.most_probable.size(), 3u);
      for (size_t k = 0; k < 3; ++k) {
        const TokenLogProbability& other = token.most_probable[k];
        EXPECT_NEAR(other.log_probability, sorted[k] - std::log(sum), 1e-3) << t << " " << k;
        EXPECT_NEAR(other.log_probability, row[other.id] - std::log(sum), 1e-3) << t << " " << k;
      }
    }
  }
  options.sampling.log_probabilities = 0;
  EXPECT_TRUE(session.write(options)[0].log_probabilities.at(0).most_probable.empty());
  options.sampling.log_probabilities = -1;
  EXPECT_TRUE(session.write(options)[0].log_probabilities.empty());
}

// The device chooses the most probable tokens and reads ahead, or the host does, among one candidate.
TEST(SessionCuda, SamplesTheSameTokensAsTheHost) {
  SKIP_WITHOUT_GPU();
  for (const char* arch : {"2mamba", "softmax"}) {
    const Model model = random_model(arch, 1, "byte", kGpu);
    WriteOptions on_host = options_of(60);
    on_host.sampling.top_k = 1;
    std::vector<std::vector<Text>> texts;
    for (const WriteOptions& options : {options_of(60, 0), on_host}) {
      Session session(model, 2);
      session.read("the beginning");
      texts.push_back(session.write(options));
      session.read(" and more");
      texts.push_back(session.write(options));
    }
    for (size_t i = 0; i < 2; ++i)
      for (size_t row = 0; row < 2; ++row) EXPECT_EQ(texts[i][row].text, texts[i + 2][row].text) << arch;
  }
}

TEST(Session, ShowsTheReturnedText) {
  const Model model = random_model("2mamba");
  Session session(model, 2);
  session.read("x");
  std::vector<std::string> shown(2);
  const std::vector<Text> texts = session.write(options_of(50), [&](std::string_view piece, int sequence) {
    EXPECT_EQ(valid_utf8_prefix(piece), piece.size());
    shown[sequence] += piece;
    return true;
  });
  for (int i = 0; i < 2; ++i) EXPECT_EQ(shown[i], texts[i].text);
  EXPECT_EQ(session.tokens(), 1 + 1 + 50);
}

TEST(Session, EndsAtStopStrings) {
  const Model model = random_model("2mamba");
  const auto write = [&](const std::vector<std::string>& stop) {
    Session session(model);
    session.read("x");
    WriteOptions options = options_of(60);
    options.stop = stop;
    return session.write(options)[0];
  };
  const std::string text = write({}).text;
  const size_t middle = valid_utf8_prefix(std::string_view(text).substr(0, text.size() / 2));
  const std::string_view some = std::string_view(text).substr(middle, 9);  // several tokens of a byte each
  const std::string stop(some.substr(0, valid_utf8_prefix(some)));
  const Text stopped = write({"never in the text", stop});
  EXPECT_EQ(stopped.text, text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped.ending, Ending::stop);
  EXPECT_LT(stopped.tokens, 60);
}

TEST(Session, EndsAtEos) {
  const ModelConfig config = config_of("2mamba");
  const LanguageModel eos_model(config, [&](const std::string& name, const Tensor& out) {
    fill(out, name.find("norm") != std::string::npos || name == "model.embed_tokens.weight" ? 1 : 0);
    if (name == "lm_head.weight") fill(out.select(0, 257), 1);
  });
  const Model model(std::make_shared<const Model::Parts>(eos_model, load_tokenizer("byte"), false));
  Session session(model, 2);
  const std::vector<Text> texts = session.write(options_of(20, 0));
  for (const Text& text : texts) {
    EXPECT_EQ(text.ending, Ending::eos);
    EXPECT_EQ(text.text, "");
    EXPECT_EQ(text.tokens, 1);
  }
}

TEST(Session, CanBeInterrupted) {
  Session session(random_model("2mamba"));
  const Text text = session.write(options_of(50), [](std::string_view, int) { return false; })[0];
  EXPECT_EQ(text.ending, Ending::interrupted);
  EXPECT_LT(text.tokens, 50);
}

TEST(Session, ReadsAnEmptyPromptAndTextInParts) {
  const Model model = random_model("2mamba", 1, small_model());
  Session empty(model), never(model);
  empty.read("");
  EXPECT_EQ(empty.tokens(), 1);  // eos, which begins a text
  const std::string text = never.write(options_of(20))[0].text;
  EXPECT_EQ(empty.write(options_of(20))[0].text, text);

  Session whole(model), parts(model);
  whole.read("the red fox and the snake");
  parts.read("the red fox");
  parts.read(" and the snake");
  EXPECT_EQ(parts.tokens(), whole.tokens());
  EXPECT_EQ(parts.write(options_of(20, 0))[0].text, whole.write(options_of(20, 0))[0].text);
}

TEST(Session, SeveralSequencesStartFromTheStateOfOne) {
  const TemporaryDirectory folder;
  const Model model = random_model("2mamba");
  Session one(model);
  one.read("the beginning");
  one.save(folder / "one");
  Session loaded(model, 3), read(model, 3);
  loaded.load(folder / "one");
  read.read("the beginning");
  const std::vector<Text> expected = read.write(options_of(20)), texts = loaded.write(options_of(20));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(texts[i].text, expected[i].text);
  read.save(folder / "three");
  expect_error([&] { one.load(folder / "three"); }, {"three", "3 sequences", "expected 1"});
}

TEST(Session, RefusesWhatIsNotItsState) {
  const TemporaryDirectory folder;
  Session session(random_model("2mamba"));
  expect_error([&] { session.save(folder / "x"); }, {"nothing has been read"});
  session.read("text");
  session.save(folder / "good");
  const std::string good = read_state(folder / "good");
  const auto refused = [&](const std::string& content, const std::vector<std::string>& parts) {
    std::ofstream(folder / "bad", std::ios::binary) << content;
    expect_error([&] { session.load(folder / "bad"); }, parts);
    session.save(folder / "after");
    EXPECT_TRUE(read_state(folder / "after") == good);
  };
  refused("", {"bad"});
  refused("not a state at all", {"bad"});
  refused(good.substr(0, good.size() / 2), {"bad"});
  std::string flipped = good;
  flipped[flipped.size() - 100] ^= 1;
  refused(flipped, {"bad", "checksum"});
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string content = good;
    content.replace(content.find(from), from.size(), to);
    std::ofstream(folder / "bad", std::ios::binary) << content;
    expect_error([&] { session.load(folder / "bad"); }, {"header or metadata differs from its checksum"});
    content.replace(content.find("furious.checksums"), 7, "another");  // tests the checksums of the state itself
    return content;
  };
  refused(replaced("furious state", "furious stale"), {"not a state file"});
  refused(replaced("\"version\":\"2\"", "\"version\":\"7\""), {"version 7", "expected 2"});
  refused(replaced("\"0.tokens\":\"0", "\"0.tokens\":\"x"), {"\"0.tokens\" is not a number"});
  refused(replaced("00005\"", "00004\""), {"checksum"});
  expect_error([&] { session.load(folder / "none"); }, {"none"});

  Session other_weights(random_model("2mamba", 2)), other_arch(random_model("softmax"));
  expect_error([&] { other_weights.load(folder / "good"); }, {"another model", "other weights"});
  expect_error([&] { other_arch.load(folder / "good"); },
               {"another model, 2mamba", "width 24", "this model is softmax"});
}

TEST(Session, ChecksArguments) {
  const Model model = random_model("2mamba");
  expect_error([&] { Session(model, 0); }, {"0 sequences"});
  Session session(model);
  expect_error([&] { session.write(options_of(-1)); }, {"-1 tokens"});
  expect_error([&] { session.write(options_of(1, -2)); }, {"temperature -2"});
  WriteOptions stop = options_of(1);
  stop.stop = {""};
  expect_error([&] { session.write(stop); }, {"stop string"});
  const LanguageModel small(config_of("2mamba", 100), 1);
  expect_error([&] { Model::Parts(small, load_tokenizer("byte"), false); }, {"258", "100"});
}

TEST(Model, TextsBeginWithBosWhereTheModelWasTrainedSo) {
  ModelConfig config = config_of("softmax");
  const auto byte = load_tokenizer("byte");
  EXPECT_EQ(Model::Parts(LanguageModel(config, 1), byte, false).start, byte->eos());
  EXPECT_EQ(Model::Parts(LanguageModel(config, 1), byte, true).start, byte->bos());
  config.bos = true;
  EXPECT_EQ(Model::Parts(LanguageModel(config, 1), byte, false).start, byte->bos());
}

TEST(StateFile, FingerprintsDependOnEveryWeight) {
  const ModelConfig config = config_of("mamba2");
  const LanguageModel model(config, 1);
  const std::string before = fingerprint(model, "t");
  EXPECT_EQ(before, fingerprint(LanguageModel(config, 1), "t"));
  EXPECT_NE(before, fingerprint(model, "u"));
  for (const Parameter& parameter : model.parameters()) {
    float& last = parameter.value.value().data<float>()[parameter.value.value().elements() - 1];
    const float kept = last;
    last = std::nextafter(last, 10.0f);
    EXPECT_NE(before, fingerprint(model, "t")) << parameter.name;
    last = kept;
  }
}

}  // namespace
}  // namespace furious
