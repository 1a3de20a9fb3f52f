// The C interface: what it computes, and that whatever goes wrong is a status with a message. tests/package/c_api calls
// it from C.
#include <algorithm>
#include <filesystem>
#include <thread>

#include "furious/furious.h"
#include "furious/model.h"
#include "model/checkpoint.h"
#include "model/little.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

class CInterface : public ::testing::Test {
 protected:
  explicit CInterface(double weight = 0.3) {
    Random random(1);
    ModelConfig config = little(preset("2mamba"));
    config.vocabulary = 300;
    const auto fill = [&](const std::string&, const Tensor& out) {
      copy_between(out, random.normal_tensor(out.shape(), weight));
    };
    save_model(folder_.path(), LanguageModel(config, fill));
    furious_load_options options;
    furious_load_options_init(&options);
    options.tokenizer = "byte";
    options.device = "cpu";
    EXPECT_EQ(furious_model_load(folder_.path().c_str(), &options, &model_), FURIOUS_OK) << furious_last_error();
  }
  ~CInterface() override { furious_model_free(model_); }

  std::vector<int32_t> ids(const std::string& text) const {
    std::vector<int32_t> out(text.size() + 1);
    size_t count = 0;
    EXPECT_EQ(furious_model_encode(model_, text.data(), text.size(), out.data(), out.size(), &count), FURIOUS_OK);
    out.resize(count);
    return out;
  }
  furious_session* session(const std::string& text) const {
    furious_session* out = nullptr;
    EXPECT_EQ(furious_session_new(model_, &out), FURIOUS_OK) << furious_last_error();
    const std::vector<int32_t> read = ids(text);
    EXPECT_EQ(furious_session_prefill(out, read.data(), read.size()), FURIOUS_OK) << furious_last_error();
    return out;
  }
  static std::vector<float> logits(const furious_session* session) {
    std::vector<float> out(300);
    size_t count = 0;
    EXPECT_EQ(furious_session_logits(session, out.data(), out.size(), &count), FURIOUS_OK) << furious_last_error();
    EXPECT_EQ(count, out.size());
    return out;
  }

  TemporaryDirectory folder_;
  furious_model* model_ = nullptr;
};

TEST_F(CInterface, WritesWhatASessionWrites) {
  const std::string prompt = "a prompt of some length";
  LoadOptions options;
  options.tokenizer = "byte";
  options.device = "cpu";
  Session expected(Model::load(folder_.path(), options));
  expected.read(prompt);
  WriteOptions write;
  write.tokens = 60;
  write.sampling.log_probabilities = 0;
  const Text text = expected.write(write)[0];

  furious_session* own = nullptr;
  ASSERT_EQ(furious_session_new(model_, &own), FURIOUS_OK);
  int32_t start = -2, end = -2;
  ASSERT_EQ(furious_model_start_token(model_, &start), FURIOUS_OK);
  ASSERT_EQ(furious_model_end_token(model_, &end), FURIOUS_OK);
  std::vector<int32_t> read = ids(prompt);
  if (start >= 0) read.insert(read.begin(), start);
  ASSERT_EQ(furious_session_prefill(own, read.data(), read.size()), FURIOUS_OK);
  std::vector<int32_t> written;
  int32_t id = -1;
  while (static_cast<int64_t>(written.size()) < text.tokens) {
    ASSERT_EQ(furious_session_sample(own, nullptr, &id), FURIOUS_OK) << furious_last_error();
    written.push_back(id);
  }
  ASSERT_EQ(text.log_probabilities.size(), written.size());
  for (size_t i = 0; i < written.size(); ++i) EXPECT_EQ(written[i], text.log_probabilities[i].id) << i;
  if (text.ending == Ending::eos) {
    EXPECT_EQ(written.back(), end);
  }
  int64_t tokens = 0;
  EXPECT_EQ(furious_session_tokens(own, &tokens), FURIOUS_OK);
  EXPECT_EQ(tokens, expected.tokens());
  furious_session_free(own);
}

TEST_F(CInterface, StepsForksAndStatesGoOnAlike) {
  furious_session* const read = session("some text!");
  furious_session* const stepped = session("some text");
  EXPECT_EQ(furious_session_step(stepped, ids("!")[0]), FURIOUS_OK);
  const std::vector<float> one = logits(stepped), other = logits(read);
  EXPECT_LE(
      relative_error(std::vector<double>(one.begin(), one.end()), std::vector<double>(other.begin(), other.end())),
      1e-4);
  furious_session* forked = nullptr;
  ASSERT_EQ(furious_session_fork(read, &forked), FURIOUS_OK);
  const std::string file = (folder_ / "state").string();
  ASSERT_EQ(furious_session_save(read, file.c_str()), FURIOUS_OK);
  ASSERT_EQ(furious_session_load(stepped, file.c_str()), FURIOUS_OK);
  furious_session* const restored = session("another text");
  size_t size = 0, written = 0;
  ASSERT_EQ(furious_session_save_bytes(read, nullptr, 0, &size), FURIOUS_OK);
  EXPECT_EQ(size, std::filesystem::file_size(file));
  std::vector<char> state(size);
  EXPECT_EQ(furious_session_save_bytes(read, state.data(), size - 1, &written), FURIOUS_BUFFER_TOO_SMALL);
  EXPECT_EQ(written, size);
  ASSERT_EQ(furious_session_save_bytes(read, state.data(), size, &written), FURIOUS_OK);
  state[size / 2] = static_cast<char>(state[size / 2] ^ 1);
  const std::vector<float> before = logits(restored);
  EXPECT_EQ(furious_session_load_bytes(restored, state.data(), size), FURIOUS_ERROR);  // damaged
  EXPECT_EQ(furious_session_load_bytes(restored, state.data(), 0), FURIOUS_ERROR);
  EXPECT_EQ(logits(restored), before);
  state[size / 2] = static_cast<char>(state[size / 2] ^ 1);
  ASSERT_EQ(furious_session_load_bytes(restored, state.data(), size), FURIOUS_OK) << furious_last_error();
  for (int i = 0; i < 80; ++i) {
    int32_t chosen[4] = {-1, -2, -3, -4};
    ASSERT_EQ(furious_session_sample(read, nullptr, &chosen[0]), FURIOUS_OK);
    ASSERT_EQ(furious_session_sample(forked, nullptr, &chosen[1]), FURIOUS_OK);
    ASSERT_EQ(furious_session_sample(stepped, nullptr, &chosen[2]), FURIOUS_OK);
    ASSERT_EQ(furious_session_sample(restored, nullptr, &chosen[3]), FURIOUS_OK);
    for (const int32_t token : chosen) EXPECT_EQ(token, chosen[0]);
  }
  EXPECT_EQ(logits(read), logits(forked));
  EXPECT_EQ(logits(read), logits(stepped));
  EXPECT_EQ(logits(read), logits(restored));
  int64_t bytes = 0;
  EXPECT_EQ(furious_session_bytes(read, &bytes), FURIOUS_OK);
  EXPECT_GT(bytes, 0);
  for (furious_session* used : {read, stepped, forked, restored}) furious_session_free(used);
  furious_session* empty = nullptr;
  ASSERT_EQ(furious_session_new(model_, &empty), FURIOUS_OK);
  ASSERT_EQ(furious_session_fork(empty, &forked), FURIOUS_OK);
  furious_session_free(empty);
  furious_session_free(forked);
}

TEST_F(CInterface, GreedyChoiceIsTheLargestLogit) {
  furious_session* const own = session("text");
  furious_sampling greedy;
  furious_sampling_init(&greedy);
  greedy.temperature = 0;
  for (int i = 0; i < 5; ++i) {
    const std::vector<float> before = logits(own);
    // Only ids that the tokenizer has are chosen.
    const auto last = before.begin() + 258;
    int32_t id = -1;
    ASSERT_EQ(furious_session_sample(own, &greedy, &id), FURIOUS_OK);
    EXPECT_EQ(id, std::max_element(before.begin(), last) - before.begin());
  }
  furious_session_free(own);
}

TEST_F(CInterface, NullPointersAreRefused) {
  furious_session* own = session("text");
  furious_session* other = nullptr;
  furious_model* model = nullptr;
  int64_t number = 0;
  int32_t id = 0;
  size_t size = 0;
  const furious_status refused[] = {
      furious_model_load(nullptr, nullptr, &model),
      furious_model_load("path", nullptr, nullptr),
      furious_model_vocabulary(nullptr, &number),
      furious_model_vocabulary(model_, nullptr),
      furious_model_start_token(nullptr, &id),
      furious_model_start_token(model_, nullptr),
      furious_model_end_token(nullptr, &id),
      furious_model_end_token(model_, nullptr),
      furious_model_encode(nullptr, "x", 1, nullptr, 0, &size),
      furious_model_encode(model_, nullptr, 1, nullptr, 0, &size),
      furious_model_encode(model_, "x", 1, nullptr, 0, nullptr),
      furious_model_encode(model_, "x", 1, nullptr, 1, &size),
      furious_model_decode(nullptr, &id, 1, nullptr, 0, &size),
      furious_model_decode(model_, nullptr, 1, nullptr, 0, &size),
      furious_model_decode(model_, &id, 1, nullptr, 0, nullptr),
      furious_session_new(nullptr, &other),
      furious_session_new(model_, nullptr),
      furious_session_fork(nullptr, &other),
      furious_session_fork(own, nullptr),
      furious_session_prefill(nullptr, &id, 1),
      furious_session_prefill(own, nullptr, 1),
      furious_session_step(nullptr, 0),
      furious_session_logits(nullptr, nullptr, 0, &size),
      furious_session_logits(own, nullptr, 0, nullptr),
      furious_session_sample(nullptr, nullptr, &id),
      furious_session_sample(own, nullptr, nullptr),
      furious_session_tokens(nullptr, &number),
      furious_session_tokens(own, nullptr),
      furious_session_bytes(nullptr, &number),
      furious_session_bytes(own, nullptr),
      furious_session_save(nullptr, "path"),
      furious_session_save(own, nullptr),
      furious_session_load(nullptr, "path"),
      furious_session_load(own, nullptr),
      furious_session_save_bytes(nullptr, nullptr, 0, &size),
      furious_session_save_bytes(own, nullptr, 0, nullptr),
      furious_session_load_bytes(nullptr, "x", 1),
      furious_session_load_bytes(own, nullptr, 1),
  };
  for (size_t i = 0; i < std::size(refused); ++i) EXPECT_EQ(refused[i], FURIOUS_INVALID_ARGUMENT) << "call " << i;
  EXPECT_EQ(model, nullptr);
  EXPECT_EQ(other, nullptr);
  furious_load_options_init(nullptr);
  furious_sampling_init(nullptr);
  furious_session_free(nullptr);
  furious_model_free(nullptr);
  furious_session_free(own);
}

TEST_F(CInterface, MessagesBelongToTheirThread) {
  furious_model* model = nullptr;
  EXPECT_EQ(furious_model_load("/no/such/model", nullptr, &model), FURIOUS_ERROR);
  const std::string own = furious_last_error();
  EXPECT_NE(own.find("/no/such/model"), std::string::npos);
  std::thread([&] {
    EXPECT_STREQ(furious_last_error(), "");
    EXPECT_EQ(furious_session_new(nullptr, nullptr), FURIOUS_INVALID_ARGUMENT);
    EXPECT_NE(std::string(furious_last_error()).find("model"), std::string::npos);
  }).join();
  EXPECT_EQ(furious_last_error(), own);
}

TEST_F(CInterface, RefusedCallsLeaveASessionUsable) {
  furious_session* const own = session("text");
  const std::vector<float> before = logits(own);
  const int32_t bad[] = {5, 300};
  EXPECT_EQ(furious_session_prefill(own, bad, 2), FURIOUS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(furious_last_error()).find("300"), std::string::npos);
  EXPECT_EQ(furious_session_step(own, -1), FURIOUS_INVALID_ARGUMENT);
  EXPECT_EQ(furious_session_load(own, (folder_ / "config.json").c_str()), FURIOUS_ERROR);
  furious_sampling wrong;
  furious_sampling_init(&wrong);
  wrong.temperature = -1;
  int32_t id = 7;
  EXPECT_EQ(furious_session_sample(own, &wrong, &id), FURIOUS_ERROR);
  EXPECT_EQ(id, 7);
  EXPECT_EQ(furious_session_prefill(own, nullptr, 0), FURIOUS_OK);
  EXPECT_EQ(logits(own), before);
  size_t count = 0;
  float one = 0;
  EXPECT_EQ(furious_session_logits(own, &one, 1, &count), FURIOUS_BUFFER_TOO_SMALL);
  EXPECT_EQ(count, 300u);
  EXPECT_EQ(furious_session_sample(own, nullptr, &id), FURIOUS_OK);
  furious_session_free(own);
}

class CInterfaceOfABrokenModel : public CInterface {
 protected:
  CInterfaceOfABrokenModel() : CInterface(1e37) {}  // nothing stays finite
};

TEST_F(CInterfaceOfABrokenModel, ASessionThatFailedWhileItReadSaysSo) {
  furious_session* own = nullptr;
  ASSERT_EQ(furious_session_new(model_, &own), FURIOUS_OK);
  const std::vector<int32_t> read = ids("text");
  EXPECT_EQ(furious_session_prefill(own, read.data(), read.size()), FURIOUS_ERROR);
  EXPECT_NE(std::string(furious_last_error()).find("finite"), std::string::npos) << furious_last_error();
  int64_t tokens = 0;
  furious_session* forked = nullptr;
  for (const furious_status status :
       {furious_session_tokens(own, &tokens), furious_session_step(own, 1), furious_session_fork(own, &forked)}) {
    EXPECT_EQ(status, FURIOUS_ERROR);
    EXPECT_NE(std::string(furious_last_error()).find("an earlier call failed"), std::string::npos);
  }
  furious_session_free(own);
}

}  // namespace
}  // namespace furious
