// The contract of the public headers: every failure is a furious::Error with a message for the user.
#include <sys/stat.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "data/corpus.h"
#include "data/tokenizer.h"
#include "furious/model.h"
#include "furious/train.h"
#include "model/checkpoint.h"
#include "model/little.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;

class PublicErrors : public ::testing::Test {
 protected:
  PublicErrors() {
    Random random(1);
    ModelConfig config = little(preset("2mamba"));
    config.vocabulary = 258;
    fs::create_directories(folder.path("model"));
    const auto weights = [&](const std::string&, const Tensor& out) { copy(out, random.normal_tensor(out.shape())); };
    save_model(folder.path("model"), LanguageModel(config, weights));
    save_tokenizer(folder.path("model"), *load_tokenizer("byte"));
  }
  // The model with one file replaced.
  std::string with(const std::string& name, const std::string& content) {
    const std::string path = folder.path(fmt::format("model-{}", ++copies));
    fs::copy(folder.path("model"), path);
    folder.write(fmt::format("model-{}/{}", copies, name), content);
    return path;
  }
  std::string config_with(const std::string& key, const nlohmann::json& value) {
    nlohmann::json json = nlohmann::json::parse(read_file(folder.path("model/config.json")));
    json[key] = value;
    return with("config.json", json.dump());
  }

  TemporaryFolder folder;
  int copies = 0;
};

const std::string kLongName = std::string(300, 'n');  // longer than file systems allow

TEST_F(PublicErrors, Loading) {
  const auto refused = [](const std::string& path, const std::vector<std::string>& parts, LoadOptions options = {}) {
    SCOPED_TRACE(path);
    expect_error([&] { Model::load(path, options); }, parts);
  };
  const std::string good = folder.path("model");
  EXPECT_NO_THROW(Model::load(good));
  refused(folder.path("none"), {"none", "does not exist"});
  refused(folder.path(kLongName), {kLongName});
  refused(std::string("a\0b", 3), {});
  refused(folder.path("model/config.json"), {"config.json"});
  refused(with("config.json", "{"), {"config.json", "not JSON"});
  refused(with("config.json", std::string(100'000, '[')), {"config.json", "deep"});
  refused(with("config.json", "[]"), {"config.json"});
  refused(config_with("hidden_size", "wide"), {"hidden_size", "wide"});
  refused(config_with("hidden_size", 1e300), {"hidden_size"});
  refused(config_with("model_type", nlohmann::json::array()), {"model_type"});
  refused(with("model.safetensors", "short"), {"model.safetensors"});
  refused(with("model.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10)), {"model.safetensors"});
  refused(with("tokenizer_config.json", "{"), {"tokenizer_config.json", "not JSON"});
  refused(with("tokenizer_config.json", R"({"tokenizer_class": 3})"), {"tokenizer_config.json", "tokenizer_class"});
  const auto with_option = [](auto field, const auto& value) {
    LoadOptions options;
    options.*field = value;
    return options;
  };
  refused(good, {kLongName}, with_option(&LoadOptions::tokenizer, folder.path(kLongName)));
  refused(good, {"t.model"}, with_option(&LoadOptions::tokenizer, folder.write("t.model", "x")));
  refused(good, {"nowhere"}, with_option(&LoadOptions::device, "nowhere"));
  refused(good, {"f17"}, with_option(&LoadOptions::dtype, "f17"));
  refused(good, {"heads"}, with_option(&LoadOptions::heads, -1));
}

TEST_F(PublicErrors, Sessions) {
  const Model model = Model::load(folder.path("model"));
  expect_error([&] { Session(model, 0); }, {"0 sequences"});
  expect_error([&] { model.decode({1 << 20}); }, {"id 1048576"});
  Session session(model);
  expect_error([&] { session.save(folder.path("early")); }, {"nothing has been read"});
  session.read("text");
  WriteOptions options;
  options.tokens = -1;
  expect_error([&] { session.write(options); }, {"-1 tokens"});
  options.tokens = 20;
  options.sampling.temperature = std::nan("");
  expect_error([&] { session.write(options); }, {"temperature"});
  expect_error([&] { session.save(folder.path("no/such/folder/state")); }, {"no/such/folder"});
  expect_error([&] { session.save(folder.path(kLongName)); }, {kLongName});
  expect_error([&] { session.load(folder.path("none")); }, {"none"});
  expect_error([&] { session.load(folder.path(kLongName)); }, {kLongName});
  expect_error([&] { session.load(folder.path("model")); }, {"model"});
  expect_error([&] { session.load(folder.path("model/model.safetensors")); }, {"not a state file"});
  expect_error([&] { session.load(folder.write("bad", std::string(64, 'x'))); }, {"bad"});
  struct Own {};
  const auto show = [](std::string_view, int) -> bool { throw Own(); };
  EXPECT_THROW(session.write(WriteOptions(), show), Own);  // exceptions of a callback pass unchanged
}

TEST_F(PublicErrors, Training) {
  TrainOptions options;
  options.data = folder.path("none");
  options.out = folder.path("run");
  const auto refused = [&](const auto& change, const std::vector<std::string>& parts) {
    TrainOptions changed = options;
    change(changed);
    expect_error([&] { train(changed); }, parts);
  };
  refused([](TrainOptions&) {}, {"none", "does not exist"});
  refused([](TrainOptions& o) { o.data = ""; }, {"--data"});
  refused([&](TrainOptions& o) { o.data = folder.path(kLongName); }, {kLongName});
  refused([&](TrainOptions& o) { o.data = folder.path("model"); }, {"manifest.json"});
  refused([](TrainOptions& o) { o.data = "synthetic:none"; }, {"none"});
  refused([](TrainOptions& o) { o.lr = std::nan(""); }, {"lr"});
  options.data = "synthetic:recall";
  refused([](TrainOptions& o) { o.arch = "3mamba"; }, {"3mamba"});
  refused([&](TrainOptions& o) { o.out = folder.path(kLongName); }, {kLongName});
  refused([&](TrainOptions& o) { o.out = folder.path("model/config.json"); }, {"config.json"});
  refused([&](TrainOptions& o) { o.init = folder.path("none"); }, {"none"});
  EXPECT_FALSE(options_of_run(folder.path("none")));
  fs::create_directories(folder.path("damaged/step-00000001"));
  folder.write("damaged/step-00000001/training.safetensors", "x");
  expect_error([&] { options_of_run(folder.path("damaged")); }, {"step-00000001", "is damaged"});
}

}  // namespace
}  // namespace furious
