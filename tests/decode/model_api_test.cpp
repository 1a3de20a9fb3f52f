// furious/model.h beyond texts: logits, scores, token ids, states in memory and as arrays, forks, continuous batches.
#include <algorithm>
#include <filesystem>

#include "data/corpus.h"
#include "decode/model_parts.h"
#include "furious/model.h"
#include "model/little.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

// Weights large enough that what a model writes depends on what it has read.
Model random_model(const std::string& arch, uint64_t salt = 1) {
  Random random(salt);
  ModelConfig config = little(preset(arch));
  config.vocabulary = 300;  // more than the byte tokenizer has
  const auto fill = [&](const std::string&, const Tensor& out) { copy(out, random.normal_tensor(out.shape(), 0.3)); };
  return Model(std::make_shared<const Model::Parts>(LanguageModel(config, fill), load_tokenizer("byte"), false));
}

std::vector<int32_t> random_ids(Random& random, int64_t count) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random.integer(0, 299)));
  return ids;
}

WriteOptions options_of(int64_t tokens, double temperature = 1) {
  WriteOptions options;
  options.tokens = tokens;
  options.sampling.temperature = temperature;
  options.sampling.seed = 5;
  return options;
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  return relative_error(std::vector<double>(a.begin(), a.end()), std::vector<double>(b.begin(), b.end()));
}

int32_t largest(const std::vector<float>& logits, int64_t known) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.begin() + known) - logits.begin());
}

class ModelOf : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Presets, ModelOf, ::testing::Values("2mamba", "softmax", "mamba2"));

TEST_P(ModelOf, LogitsAreThoseOfTheForwardPass) {
  Random random(2);
  const Model model = random_model(GetParam());
  for (const int64_t length : {1, 2, 77}) {
    const std::vector<int32_t> ids = random_ids(random, length);
    const Tensor expected = model.parts().language_model.logits(int_tensor_of(ids, {1, length}));
    EXPECT_TRUE(same_bits(tensor_of(model.logits(ids), {1, length, 300}), expected)) << length;
  }
  EXPECT_TRUE(model.logits(std::vector<int32_t>{}).empty());
}

TEST_P(ModelOf, ScoresAreTheLogSoftmaxOfLogits) {
  Random random(3);
  const Model model = random_model(GetParam());
  const std::vector<int32_t> ids = random_ids(random, 60);
  const std::vector<float> logits = model.logits(ids);
  const std::vector<double> scores = model.scores(ids);
  ASSERT_EQ(scores.size(), 59u);
  for (size_t i = 0; i < scores.size(); ++i) {
    const float* const row = &logits[i * 300];
    double sum = 0;
    for (int64_t v = 0; v < 300; ++v) sum += std::exp(static_cast<double>(row[v]));
    EXPECT_NEAR(scores[i], row[ids[i + 1]] - std::log(sum), 1e-5 * (1 + std::abs(scores[i]))) << i;
  }
  EXPECT_TRUE(model.scores({}).empty());
  EXPECT_TRUE(model.scores({4}).empty());

  const std::vector<int32_t> prompt = model.prompt("a text");
  const std::vector<TokenLogProbability> of_text = model.text_scores("a text");
  const std::vector<double> expected = model.scores(prompt);
  ASSERT_EQ(of_text.size(), 6u);  // bytes, after eos
  for (size_t i = 0; i < of_text.size(); ++i) {
    EXPECT_EQ(of_text[i].id, prompt[i + 1]);
    EXPECT_EQ(of_text[i].log_probability, expected[i]);
  }
}

TEST(ModelApi, PromptsBeginAsSessionsRead) {
  const Model model = random_model("2mamba");
  EXPECT_EQ(model.prompt("ab"), (std::vector<int32_t>{257, 'a', 'b'}));
  EXPECT_EQ(model.prompt(""), std::vector<int32_t>{257});
  EXPECT_EQ(model.bos(), 256);
  EXPECT_EQ(model.eos(), 257);
  EXPECT_NE(model.config().find("\"hidden_size\": 24"), std::string::npos) << model.config();
  EXPECT_EQ(model.fingerprint(), random_model("2mamba").fingerprint());
  EXPECT_NE(model.fingerprint(), random_model("2mamba", 2).fingerprint());
}

TEST_P(ModelOf, SamplingOfTheCallersOwn) {
  const Model model = random_model(GetParam());
  Session written(model), stepped(model);
  written.read("the beginning");
  stepped.read_ids(model.prompt("the beginning"));
  EXPECT_EQ(stepped.tokens(), written.tokens());
  const Text text = written.write(options_of(80, 0))[0];
  std::vector<int32_t> all = model.prompt("the beginning"), ids;
  for (int64_t i = 0; i < text.tokens; ++i) {
    const std::vector<float> logits = stepped.logits();
    const std::vector<float> full = model.logits(all);
    EXPECT_LE(relative_difference(logits, {full.end() - 300, full.end()}), 2e-4) << i;
    ids.push_back(largest(logits, 258));
    all.push_back(ids.back());
    stepped.step({ids.back()});
  }
  EXPECT_EQ(ids, text.ids);
  EXPECT_EQ(text.tokens, 80);
}

TEST(ModelApi, IdsOfEachSequence) {
  Random random(4);
  const Model model = random_model("2mamba");
  const std::vector<std::vector<int32_t>> ids{random_ids(random, 30), random_ids(random, 3), random_ids(random, 1)};
  Session session(model, 3);
  EXPECT_TRUE(session.read_ids_each(ids));
  session.step({7, 8, 9});
  for (int i = 0; i < 3; ++i) {
    Session alone(model);
    alone.read_ids(ids[i]);
    alone.step({7 + i});
    EXPECT_EQ(session.tokens(i), alone.tokens());
    EXPECT_LE(relative_difference(session.logits(i), alone.logits()), 1e-5) << i;
  }
  EXPECT_EQ(session.tokens(), 31);
  EXPECT_EQ(session.sequences(), 3);
}

TEST_P(ModelOf, ForksContinueBitForBit) {
  const Model model = random_model(GetParam());
  Session session(model, 2);
  session.read_each({std::string(200, 'x') + "the beginning", "another"});
  session.write(options_of(9));
  Session fork = session.fork();
  EXPECT_EQ(fork.tokens(1), session.tokens(1));
  const auto go_on = [](Session& one) {
    const std::vector<Text> texts = one.write(options_of(90));
    one.read(" and more");
    return std::pair(std::vector{texts[0].ids, texts[1].ids}, std::pair(one.logits(0), one.logits(1)));
  };
  const auto expected = go_on(session);
  EXPECT_EQ(go_on(fork), expected);
  Session untouched(model);
  EXPECT_EQ(untouched.fork().tokens(), 0);  // before anything is read, too
}

TEST_P(ModelOf, StatesInMemory) {
  const TemporaryDirectory folder;
  const Model model = random_model(GetParam());
  Session session(model, 2), from_bytes(model, 2), from_arrays(model, 2);
  session.read_each({std::string(300, 'y') + "x", "the beginning"});
  session.write(options_of(5));
  session.save(folder / "state");
  const std::vector<std::byte> bytes = session.save_bytes();
  const std::string file = read_file((folder / "state").string());
  ASSERT_EQ(bytes.size(), file.size());
  EXPECT_EQ(std::memcmp(bytes.data(), file.data(), file.size()), 0);

  from_bytes.load_bytes(bytes);
  EXPECT_EQ(from_bytes.save_bytes(), bytes);
  const std::vector<SequenceState> states = session.states();
  ASSERT_EQ(states.size(), 2u);
  EXPECT_EQ(states[0].tokens, session.tokens(0));
  EXPECT_EQ(states[0].model, model.fingerprint());
  from_arrays.set_states(states);
  EXPECT_EQ(from_arrays.save_bytes(), bytes);
  const auto go_on = [](Session& one) {
    const std::vector<Text> texts = one.write(options_of(70));
    return std::pair(texts[0].ids, texts[1].ids);
  };
  Session one(model);
  one.set_states({states[1]});
  EXPECT_EQ(one.logits(), session.logits(1));
  const auto expected = go_on(session);
  EXPECT_EQ(go_on(from_bytes), expected);
  EXPECT_EQ(go_on(from_arrays), expected);
}

TEST(ModelApi, RefusesStatesThatAreNotItsOwn) {
  const Model model = random_model("2mamba");
  Session session(model);
  session.read(std::string(300, 'z') + "text");
  const std::vector<std::byte> before = session.save_bytes();
  const std::vector<SequenceState> good = session.states();
  SequenceBatch batch(model, 2);
  const auto refused = [&](const auto& change, const std::vector<std::string>& parts) {
    std::vector<SequenceState> states = good;
    change(states[0]);
    expect_error([&] { session.set_states(states); }, parts);
    EXPECT_EQ(session.save_bytes(), before);
    expect_error([&] { batch.add(states[0]); }, parts);
    EXPECT_TRUE(batch.sequences().empty());
  };
  const auto array = [](SequenceState& state, const std::string& name) -> NamedArray& {
    return *std::ranges::find(state.arrays, name, &NamedArray::name);
  };
  refused([](SequenceState& s) { s.model = "another"; }, {"another model"});
  refused([](SequenceState& s) { s.tokens = -1; }, {"-1 tokens"});
  refused([](SequenceState& s) { s.pending = 1 << 20; }, {"window"});
  refused([](SequenceState& s) { s.recent[3] = 300; }, {"token 300", "0 to 299"});
  refused([](SequenceState& s) { s.recent[0] = -1; }, {"token -1"});
  refused([](SequenceState& s) { s.recent.resize(400); }, {"recent"});
  refused([](SequenceState& s) { s.arrays.pop_back(); }, {"logits"});
  refused([](SequenceState& s) { s.arrays.erase(s.arrays.begin()); }, {"conv"});
  refused([](SequenceState& s) { s.arrays.push_back(s.arrays[0]); }, {"two arrays", "layers.0.conv"});
  refused([](SequenceState& s) { s.arrays.push_back({"layers.9.k", {1}, {0}}); }, {"restore"});
  refused([&](SequenceState& s) { array(s, "layers.1.state").values.pop_back(); }, {"layers.1.state", "values"});
  refused([&](SequenceState& s) { std::swap(array(s, "layers.1.k").shape[2], array(s, "layers.1.k").shape[3]); },
          {"\"k\""});
  refused([&](SequenceState& s) { array(s, "layers.1.k").shape[0] = -1; }, {"size of -1"});
  refused([&](SequenceState& s) { array(s, "layers.1.k").shape.assign(3, int64_t{1} << 62); }, {"layers.1.k"});
  refused([&](SequenceState& s) { array(s, "layers.1.k").shape.assign(40, 1); }, {"40 dimensions"});
  expect_error([&] { session.set_states({}); }, {"0 sequences"});
  expect_error([&] { session.set_states({good[0], good[0]}); }, {"2 sequences", "expected 1"});

  std::vector<std::byte> bytes = before;
  bytes[bytes.size() - 100] ^= std::byte{1};
  expect_error([&] { session.load_bytes(bytes); }, {"state in memory", "checksum"});
  bytes.resize(bytes.size() / 2);
  expect_error([&] { session.load_bytes(bytes); }, {"state in memory"});
  expect_error([&] { session.load_bytes({}); }, {"state in memory"});
  Session other(random_model("2mamba", 2));
  expect_error([&] { other.load_bytes(before); }, {"another model"});
  expect_error([&] { other.set_states(good); }, {"another model"});
  std::vector<SequenceState> unmarked = good;
  unmarked[0].model.clear();
  other.set_states(unmarked);  // the caller's decision
  EXPECT_EQ(other.tokens(), session.tokens());
  EXPECT_EQ(session.save_bytes(), before);
}

TEST_P(ModelOf, PrefillReportsProgressAndStops) {
  Random random(5);
  const Model model = random_model(GetParam());
  const std::vector<int32_t> ids = random_ids(random, 9000);
  Session whole(model), stopped(model), prefix(model), thrown(model);
  std::vector<std::pair<int64_t, int64_t>> calls;
  const auto record = [&](int64_t read, int64_t all) {
    calls.emplace_back(read, all);
    return true;
  };
  EXPECT_TRUE(whole.read_ids(ids, record));
  EXPECT_EQ(calls, (std::vector<std::pair<int64_t, int64_t>>{{4096, 9000}, {8192, 9000}, {9000, 9000}}));
  EXPECT_FALSE(stopped.read_ids(ids, [](int64_t, int64_t) { return false; }));
  struct Own {};
  EXPECT_THROW(thrown.read_ids(ids, [](int64_t, int64_t) -> bool { throw Own(); }), Own);
  prefix.read_ids({ids.begin(), ids.begin() + 4096});
  for (Session* const one : {&stopped, &thrown}) {
    EXPECT_EQ(one->tokens(), 4096);
    EXPECT_EQ(one->save_bytes(), prefix.save_bytes());
    one->read_ids({ids.begin() + one->tokens(), ids.end()});
    EXPECT_EQ(one->save_bytes(), whole.save_bytes());
  }
  // What is already read cannot be stopped.
  EXPECT_TRUE(whole.read("x", [](int64_t, int64_t) { return false; }));
}

TEST_P(ModelOf, SequencesJoinAndLeave) {
  Random random(6);
  const Model model = random_model(GetParam());
  struct Own {
    std::vector<int32_t> prompt, written;
    uint64_t seed;
    int starts, ends, number = -1;
  };
  std::vector<Own> all;
  for (int i = 0; i < 6; ++i) all.push_back({random_ids(random, 1 + 40 * i), {}, uint64_t(i), 7 * i, 7 * i + 18, -1});
  SequenceBatch batch(model, 3);
  EXPECT_EQ(batch.capacity(), 3);
  for (int t = 0; t < 60; ++t) {
    std::vector<int> active;
    std::vector<Own*> owners;
    for (Own& own : all) {
      if (t == own.ends) batch.remove(own.number);
      if (t == own.starts) {
        own.number = batch.add();
        Sampling sampling = options_of(0).sampling;
        sampling.seed = own.seed;
        batch.set_sampling(own.number, sampling);
        batch.read({{own.number, own.prompt}});
      }
      if (t < own.starts || t >= own.ends) continue;
      active.push_back(own.number);
      owners.push_back(&own);
    }
    EXPECT_EQ(batch.sequences().size(), active.size());
    if (active.empty()) continue;
    const std::vector<WrittenToken> tokens = batch.step(active);
    for (size_t i = 0; i < tokens.size(); ++i) owners[i]->written.push_back(tokens[i].id);
  }
  for (const Own& own : all) {
    Session alone(model);
    alone.read_ids(own.prompt);
    WriteOptions options = options_of(18);
    options.sampling.seed = own.seed;
    // eos ends a session's text: what was written up to it is compared.
    const std::vector<int32_t> expected = alone.write(options)[0].ids;
    ASSERT_EQ(own.written.size(), 18u);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), own.written.begin()));
  }
  EXPECT_EQ(batch.bytes(), 0);
}

TEST(SequenceBatch, ForksAndStates) {
  const Model model = random_model("2mamba");
  SequenceBatch batch(model, 3);
  const int a = batch.add();
  batch.read({{a, model.prompt(std::string(250, 'q'))}});
  batch.step({a});
  const int b = batch.fork(a);
  const int c = batch.add(batch.state(a));
  EXPECT_EQ(batch.state(b).arrays.size(), batch.state(a).arrays.size());
  for (int i = 0; i < 70; ++i) {
    const std::vector<WrittenToken> tokens = batch.step({c, a, b});
    ASSERT_EQ(tokens[0].id, tokens[1].id) << i;
    ASSERT_EQ(tokens[2].id, tokens[1].id) << i;
    ASSERT_EQ(batch.logits(a), batch.logits(b));
    ASSERT_EQ(batch.logits(a), batch.logits(c));
  }
  batch.step({a, b}, {4, 5});
  EXPECT_NE(batch.logits(a), batch.logits(b));
  EXPECT_EQ(batch.tokens(a), 251 + 71 + 1);
  Session session(model);  // and into a session
  session.set_states({batch.state(b)});
  EXPECT_EQ(session.logits(), batch.logits(b));
}

TEST(SequenceBatch, LogProbabilitiesOnlyWhereAskedFor) {
  const Model model = random_model("2mamba");
  SequenceBatch batch(model, 2);
  const int a = batch.add(), b = batch.add();
  batch.read({{a, {1, 2}}, {b, {3}}});
  EXPECT_EQ(batch.step({a, b})[0].log_probability, 0);
  Sampling sampling;
  sampling.log_probabilities = 2;
  batch.set_sampling(b, sampling);
  const std::vector<float> logits = batch.logits(b);
  const std::vector<WrittenToken> tokens = batch.step({a, b});
  EXPECT_EQ(tokens[0].log_probability, 0);
  EXPECT_TRUE(tokens[0].most_probable.empty());
  EXPECT_GE(tokens[0].id, 0);
  double sum = 0;
  for (int i = 0; i < 258; ++i) sum += std::exp(static_cast<double>(logits[i]));
  EXPECT_NEAR(tokens[1].log_probability, logits[tokens[1].id] - std::log(sum), 1e-4);
  ASSERT_EQ(tokens[1].most_probable.size(), 2u);
  EXPECT_EQ(tokens[1].most_probable[0].id, largest(logits, 258));
}

TEST(SequenceBatch, RefusesInvalidArguments) {
  const Model model = random_model("2mamba");
  expect_error([&] { SequenceBatch(model, 0); }, {"capacity of 0"});
  SequenceBatch batch(model, 2);
  const int a = batch.add(), b = batch.add();
  expect_error([&] { batch.add(); }, {"all 2 sequences", "remove one"});
  expect_error([&] { batch.fork(a); }, {"all 2 sequences"});
  batch.remove(b);
  for (const int none : {b, -1, 2, 1 << 30}) {
    expect_error([&] { batch.remove(none); }, {"no sequence"});
    expect_error([&] { batch.read({{none, {1}}}); }, {"no sequence"});
    expect_error([&] { batch.step({none}); }, {"no sequence"});
    expect_error([&] { batch.logits(none); }, {"no sequence"});
    expect_error([&] { batch.state(none); }, {"no sequence"});
    expect_error([&] { batch.tokens(none); }, {"no sequence"});
    expect_error([&] { batch.fork(none); }, {"no sequence"});
    expect_error([&] { batch.set_sampling(none, {}); }, {"no sequence"});
  }
  expect_error([&] { batch.step({a}); }, {"read nothing"});
  expect_error([&] { batch.logits(a); }, {"read nothing"});
  expect_error([&] { batch.step({}); }, {"no sequences"});
  expect_error([&] { batch.read({{a, {1, 300}}}); }, {"token 300"});
  expect_error([&] { batch.read({{a, {1}}, {a, {2}}}); }, {"two prompts"});
  batch.read({{a, {1}}});
  expect_error([&] { batch.step({a, a}); }, {"twice"});
  expect_error([&] { batch.step({a}, {1, 2}); }, {"2 ids for 1"});
  expect_error([&] { batch.step({a}, {-1}); }, {"token -1"});
  Sampling sampling;
  sampling.temperature = -1;
  expect_error([&] { batch.set_sampling(a, sampling); }, {"temperature"});
  EXPECT_EQ(batch.tokens(a), 1);
}

TEST(ModelApi, RefusesInvalidArguments) {
  const Model model = random_model("2mamba");
  expect_error([&] { model.logits(std::vector<int32_t>{1, 300}); }, {"token 300", "0 to 299"});
  expect_error([&] { model.logits(std::vector<int32_t>{1}, nullptr); }, {"no memory"});
  expect_error([&] { model.scores({-1, 2}); }, {"token -1"});
  Session session(model, 2);
  expect_error([&] { session.logits(); }, {"read nothing"});
  expect_error([&] { session.logits(2); }, {"sequence 2", "0 to 1"});
  expect_error([&] { session.tokens(-1); }, {"sequence -1"});
  expect_error([&] { session.step({1}); }, {"1 ids for 2"});
  expect_error([&] { session.read_ids_each({{1}}); }, {"1 lists", "2 sequences"});
  expect_error([&] { session.read_ids({1, 2, 300}); }, {"token 300"});
  EXPECT_EQ(session.tokens(), 0);
  expect_error([&] { session.save_bytes(); }, {"nothing has been read"});
}

TEST(ModelApi, UseAfterMoveIsAnError) {
  Model model = random_model("2mamba");
  Session session(model);
  SequenceBatch batch(model, 1);
  const Model other_model = std::move(model);
  const Session other = std::move(session);
  const SequenceBatch other_batch = std::move(batch);
  const std::vector<std::function<void()>> calls{[&] { model.arch(); },
                                                 [&] { model.parameters(); },
                                                 [&] { model.vocabulary(); },
                                                 [&] { model.config(); },
                                                 [&] { model.fingerprint(); },
                                                 [&] { model.encode("x"); },
                                                 [&] { model.decode({1}); },
                                                 [&] { model.prompt("x"); },
                                                 [&] { model.bos(); },
                                                 [&] { model.eos(); },
                                                 [&] { model.logits(std::vector<int32_t>{1}); },
                                                 [&] {
                                                   model.scores({1, 2});
                                                 },
                                                 [&] { model.text_scores("x"); },
                                                 [&] { Session of_none(model); },
                                                 [&] { SequenceBatch of_none(model, 1); },
                                                 [&] { session.read("x"); },
                                                 [&] { session.read_each({"x"}); },
                                                 [&] { session.read_ids({1}); },
                                                 [&] { session.read_ids_each({{1}}); },
                                                 [&] { session.logits(); },
                                                 [&] { session.step({1}); },
                                                 [&] { session.write({}); },
                                                 [&] { session.save("x"); },
                                                 [&] { session.load("x"); },
                                                 [&] { session.save_bytes(); },
                                                 [&] { session.load_bytes({}); },
                                                 [&] { session.states(); },
                                                 [&] { session.set_states({}); },
                                                 [&] { session.fork(); },
                                                 [&] { session.sequences(); },
                                                 [&] { session.tokens(); },
                                                 [&] { session.tokens(0); },
                                                 [&] { session.bytes(); },
                                                 [&] { batch.add(); },
                                                 [&] { batch.add(SequenceState()); },
                                                 [&] { batch.fork(0); },
                                                 [&] { batch.remove(0); },
                                                 [&] { batch.sequences(); },
                                                 [&] { batch.capacity(); },
                                                 [&] { batch.read({}); },
                                                 [&] { batch.set_sampling(0, {}); },
                                                 [&] { batch.step({0}); },
                                                 [&] { batch.step({0}, {1}); },
                                                 [&] { batch.logits(0); },
                                                 [&] { batch.state(0); },
                                                 [&] { batch.tokens(0); },
                                                 [&] { batch.bytes(); }};
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    expect_error(calls[i], {"moved"});
  }
  session = Session(other_model);  // may be assigned to
  session.read("x");
  EXPECT_EQ(session.tokens(), 2);
}

}  // namespace
}  // namespace furious
