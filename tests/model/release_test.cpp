// Checkpoints in the layout of the authors' trainer. tests/data/release/2mamba-* were written and evaluated by the
// authors' own code, the others by make_release_fixtures.py.
#include "model/formats/release.h"
#include "decode/batch.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "decode/model_parts.h"
#include "furious/model.h"
#include "model/checkpoint.h"
#include "model/config_json.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace furious::testing;
using Json = nlohmann::ordered_json;
using Tensors = std::map<std::string, Tensor>;

const fs::path kFolders = FURIOUS_RELEASE_DATA;

// Every attention_type of the authors' trainer and the equivalent configuration.
const std::vector<std::pair<std::string, std::string>> kTypes = {
    {"softmax", "softmax"},
    {"mamba", "mamba2-paper"},
    {"linear", "linear"},
    {"linear__output_norm", "linear-outnorm"},
    {"linear__output_norm__ReLU", "outnorm-relu"},
    {"linear__output_norm__in_conv_k_2", "outnorm-conv2"},
    {"linear__output_norm__in_conv_k_3", "outnorm-conv3"},
    {"linear__output_norm__in_conv_k_4", "outnorm-conv4"},
    {"linear__output_norm__in_conv_k_2__silu", "outnorm-conv2-silu"},
    {"linear__output_norm__in_conv_k_3__silu", "outnorm-conv3-silu"},
    {"linear__output_norm__in_conv_k_4__silu", "outnorm-conv4-silu"},
    {"linear__output_norm__D_res", "outnorm-d"},
    {"linear__output_norm__Z_out_gate", "outnorm-z"},
    {"linear__output_norm__dt_on_values", "outnorm-dt"},
    {"linear__output_norm__A_mask_type_discretize", "outnorm-a-original"},
    {"linear__output_norm__A_mask_type_neg_softplus", "outnorm-a-softplus"},
    {"linear__output_norm__A_mask_type_discretize__in_conv_k_2", "conv2-a-original"},
    {"linear__output_norm__A_mask_type_neg_softplus__in_conv_k_2", "conv2-a-softplus"},
    {"linear__output_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values", "mamba2s"},
    {"linear__output_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values__silu", "mamba2s-silu"},
    {"linear__output_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values__D_res", "mamba2s-d"},
    {"linear__output_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values__Z_out_gate", "mamba2s-z"},
    {"squared__output_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values", "2mamba-outnorm-dt"},
    {"squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values", "2mamba-dt"},
    {"squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2", "2mamba"},
    {"linear__out_norm__A_mask_type_neg_softplus__in_conv_k_2", "conv2-a-softplus"},
    {"exp__sm_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values", "2mamba-e-dt"},
    {"exp__sm_norm__A_mask_type_neg_softplus__in_conv_k_2", "2mamba-e"},
};

std::vector<Tensor> sequences_of(const fs::path& folder) {
  const Json json = Json::parse(read_text(folder / "ids.json"));
  std::vector<Tensor> sequences;
  for (const auto& ids : json.at("sequences").get<std::vector<std::vector<int32_t>>>())
    sequences.push_back(int_tensor_of(ids, {1, static_cast<int64_t>(ids.size())}));
  return sequences;
}

double largest_difference(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = to_doubles(a), y = to_doubles(b);
  EXPECT_EQ(x.size(), y.size());
  double largest = 0;
  for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
    const double difference = std::abs(x[i] - y[i]);
    if (!(difference <= largest)) largest = difference;  // NaN, too
  }
  return largest;
}

// The stored logits: of the whole text in one pass, and of decoding token by token.
void expect_logits(const LanguageModel& model, const fs::path& folder, double tolerance) {
  const SafetensorsReader stored(folder / "logits.safetensors");
  const std::vector<Tensor> sequences = sequences_of(folder);
  ASSERT_EQ(stored.tensors().size(), sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Tensor expected = stored.load(fmt::format("logits.{}", i));
    const int64_t length = sequences[i].size(1);
    ASSERT_EQ(expected.shape(), (Shape{length, model.config().vocabulary}));
    EXPECT_LE(largest_difference(model.logits(sequences[i]), expected), tolerance);
    Batch cache(model, 1);
    for (int64_t t = 0; t < length; ++t) {
      SCOPED_TRACE(t);
      const Tensor token = int_tensor_of({sequences[i].data<int32_t>()[t]}, {1, 1});
      ASSERT_LE(largest_difference(cache.step(token), expected.select(0, t)), tolerance);
    }
  }
}

// The folder's configuration and weights, to change.
class ReleaseTest : public ::testing::Test {
 protected:
  void use(const std::string& name) {
    source_ = kFolders / name;
    for (const char* file : {"config.json", "model.safetensors"}) {
      fs::remove(directory_ / file);
      fs::copy_file(source_ / file, directory_ / file);
      fs::permissions(directory_ / file, fs::perms::owner_write, fs::perm_options::add);
    }
  }
  Json config() const { return Json::parse(read_text(directory_ / "config.json")); }
  void write(const Json& json) const { write_text(directory_ / "config.json", json.dump()); }
  // Floating-point tensors only: masks are not weights.
  Tensors tensors() const {
    const SafetensorsReader reader(directory_.path());
    Tensors tensors;
    for (const StoredTensor& tensor : reader.tensors())
      if (tensor.dtype != "BOOL") tensors[tensor.name] = reader.load(tensor.name);
    return tensors;
  }
  void write(const Tensors& tensors) const { write_safetensors(directory_ / "model.safetensors", tensors); }
  void refused(const std::vector<std::string>& parts, const std::string& arch = "", int64_t heads = 0) const {
    expect_error([&] { load_model(directory_.path(), arch, {}, heads); }, parts);
  }

  TemporaryDirectory directory_;
  fs::path source_;
};

TEST(Release, LogitsOfTheAuthorsCode) {
  for (const auto& [name, arch] : {std::pair{"2mamba-squared", "2mamba"},
                                   {"2mamba-exp", "2mamba-e"},
                                   {"2mamba-softmax", "softmax"},
                                   {"2mamba-mamba", "mamba2-paper"}}) {
    SCOPED_TRACE(name);
    const LanguageModel model = load_model(kFolders / name);
    EXPECT_EQ(model.config().arch, arch);
    expect_logits(model, kFolders / name, 1e-4);
  }
}

TEST(Release, LogitsOfEveryAttentionType) {
  size_t folders = 0;
  for (const auto& entry : fs::directory_iterator(kFolders)) folders += fs::is_directory(entry) ? 1 : 0;
  EXPECT_EQ(kTypes.size() + 4, folders);
  for (const auto& [type, arch] : kTypes) {
    SCOPED_TRACE(type);
    const LanguageModel model = load_model(kFolders / type);
    EXPECT_EQ(model.config().arch, arch);
    EXPECT_EQ(model.config().block, preset(arch).block);
    EXPECT_TRUE(model.config().bos);
    expect_logits(model, kFolders / type, 1e-4);
  }
}

TEST_F(ReleaseTest, SavedInOurFormatItIsTheSameModel) {
  for (const auto& [type, arch] : kTypes) {
    SCOPED_TRACE(type);
    const LanguageModel model = load_model(kFolders / type);
    save_model(directory_.path(), model);
    EXPECT_EQ(config().at("model_type"), "furious");
    const LanguageModel again = load_model(directory_.path(), arch);
    EXPECT_EQ(again.config(), model.config());
    const Tensor tokens = sequences_of(kFolders / type)[0];
    EXPECT_TRUE(same_bits(again.logits(tokens), model.logits(tokens)));
  }
}

TEST_F(ReleaseTest, WithoutItsConfiguration) {
  for (const auto& [type, arch] : kTypes) {
    SCOPED_TRACE(type);
    use(type);
    const LanguageModel model = load_model(directory_.path());
    fs::remove(directory_ / "config.json");
    const int64_t heads = told_heads(SafetensorsReader(directory_.path()));
    // Parameters per head or per frequency determine the heads; other blocks need the flag.
    const bool tells = arch == "softmax" || arch == "mamba2-paper" || arch == "outnorm-d" || arch == "outnorm-dt" ||
                       type.find("A_mask") != std::string::npos;
    EXPECT_EQ(heads, tells ? 2 : 0);
    if (!tells) refused({"no tensor tells", "32 dimensions", "--heads"}, type);
    if (tells) refused({"2 heads, not 4", "--heads"}, type, 4);
    const std::vector<std::string> names = {type, arch};
    for (const std::string& name : names) {
      const LanguageModel bare = load_model(directory_ / "model.safetensors", name, {}, 2);
      EXPECT_EQ(bare.config(), model.config());
      const Tensor tokens = sequences_of(kFolders / type)[0];
      EXPECT_TRUE(same_bits(bare.logits(tokens), model.logits(tokens)));
    }
    expect_error([&] { load_model(directory_.path()); }, {"--arch", arch});
  }
}

// For a preset the tensors determine the window; an attention_type names it.
TEST_F(ReleaseTest, ConvolutionWindowOfWeightsWithoutConfiguration) {
  use("squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2");
  fs::remove(directory_ / "config.json");
  EXPECT_EQ(load_config(directory_.path(), "2mamba").block.conv_window, 2);
  refused({"conv1d.weight", "[96, 1, 2]"}, "squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_3");
  // Of presets with these tensors, those that the authors can have saved.
  expect_error([&] { load_model(directory_.path()); }, {"its tensors are those of 2mamba, 2mamba-e"});
  try {
    load_model(directory_.path());
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("square-mask"), std::string::npos) << error.what();
  }
}

TEST_F(ReleaseTest, HeadsComeFromTensorsOrTheFlag) {
  use("softmax");
  fs::remove(directory_ / "config.json");
  const Tensors with_frequencies = tensors();
  EXPECT_EQ(load_config(directory_.path(), "softmax").head_dim, 16);
  Tensors other = with_frequencies;
  other["model.layers.0.self_attn.rotary_emb.freqs"] = Tensor::zeros({4}, DType::f32);
  write(other);
  EXPECT_EQ(load_config(directory_.path(), "softmax").head_dim, 8);
  other["model.layers.0.self_attn.rotary_emb.freqs"] = Tensor::zeros({3}, DType::f32);
  write(other);
  refused({"6 dimensions", "do not divide 32"}, "softmax");
  for (const char* layer : {"0", "1"}) other.erase(fmt::format("model.layers.{}.self_attn.rotary_emb.freqs", layer));
  write(other);
  refused({"--heads"}, "softmax");
  refused({"5 heads do not divide 32", "--heads"}, "softmax", 5);
  EXPECT_EQ(load_config(directory_.path(), "softmax", 4).q_heads, 4);
  const LanguageModel model = load_model(directory_.path(), "softmax", {}, 2);
  expect_logits(model, source_, 1e-4);
  // With a configuration the flag is not needed.
  EXPECT_EQ(load_config(source_, "softmax", 2).heads(), 2);
  expect_error([&] { load_config(source_, "", 4); }, {"config.json", "2 heads, not 4", "--heads"});
  EXPECT_EQ(load_config(kFolders / "mamba", "", 2).heads(), 1);
  expect_error([&] { load_config(kFolders / "mamba", "", 1); }, {"2 heads, not 1"});
}

TEST_F(ReleaseTest, ArchMustAgreeWithTheConfiguration) {
  use("linear__out_norm__A_mask_type_neg_softplus__in_conv_k_2");
  for (const char* arch : {"conv2-a-softplus", "linear__out_norm__A_mask_type_neg_softplus__in_conv_k_2",
                           "linear__output_norm__in_conv_k_2__A_mask_type_neg_softplus"})
    EXPECT_EQ(load_config(directory_.path(), arch).arch, "conv2-a-softplus");
  refused({"is conv2-a-softplus, not 2mamba", "--arch"}, "2mamba");
  refused({"--arch", "A_mask_type_neg_sofplus", "did you mean \"A_mask_type_neg_softplus\""},
          "linear__out_norm__A_mask_type_neg_sofplus");
  refused({"unknown architecture", "2mamba"}, "2mambo");
  // An attention_type determines the window; for a preset the tensors do.
  use("linear__output_norm__in_conv_k_3");
  fs::remove(directory_ / "config.json");
  EXPECT_EQ(load_config(directory_.path(), "outnorm-conv2", 2).block.conv_window, 3);
  refused({"conv1d.weight", "[96, 1, 3], expected [96, 1, 2]"}, "linear__output_norm__in_conv_k_2", 2);
}

TEST_F(ReleaseTest, DimensionsOfTheConfigurationMustBeThoseOfTheTensors) {
  use("squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2");
  const Json valid = config();
  const auto changed = [&](const std::string& key, const Json& value, const std::vector<std::string>& parts) {
    SCOPED_TRACE(key);
    Json json = valid;
    json[key] = value;
    write(json);
    refused(parts);
  };
  changed("hidden_size", 64, {"\"head_dim\" is 16, expected 32"});
  changed("intermediate_size", 64, {"mlp.gate_proj.weight", "[32, 32], expected [64, 32]"});
  changed("vocab_size", 65, {"model.embed_tokens.weight"});
  changed("num_hidden_layers", 1, {"no place"});
  changed("num_key_value_heads", 1, {"\"num_key_value_heads\" is 1, expected 2"});
  changed("num_attention_heads", 3, {"\"num_attention_heads\" is 3", "divisor"});
  changed("attention_bias", true, {"attention_bias"});
  changed("hidden_act", "gelu", {"hidden_act"});
  changed("model_type", "furious", {"attention_type"});
  changed("model_type", "mamba2", {"model_type"});
  // Heads of another dimension.
  Json json = valid;
  json["num_attention_heads"] = json["num_key_value_heads"] = 4;
  json["head_dim"] = 8;
  write(json);
  refused({"A_mask_proj.weight", "[2, 32], expected [4, 32]"});
}

TEST_F(ReleaseTest, AttentionTypeIsRead) {
  use("squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2");
  const Json valid = config();
  for (const Json& value : {Json(nullptr), Json(3), Json(true), Json::array({"softmax"}), Json::object()}) {
    Json json = valid;
    json["attention_type"] = value;
    write(json);
    refused({"config.json", "\"attention_type\" is " + value.dump(), "expected a string"});
  }
  // The tensors are of another block.
  Json json = valid;
  json["attention_type"] = "softmax";
  write(json);
  refused({"no place", "conv1d"});
  // Without the key it would be a plain Llama, which has no convolution.
  json.erase("attention_type");
  write(json);
  refused({"no place", "conv1d"});
}

TEST(ReleaseTokens, EveryOneIsASwitch) {
  const auto block_of = [](const std::string& type) { return release_architecture(type, "test").block; };
  for (const auto& [type, arch] : kTypes) {
    EXPECT_EQ(release_architecture(type, "test").name, arch);
    EXPECT_EQ(block_of(type), preset(arch).block);
  }
  for (const auto& [token, kind] : {std::pair{"neg_softplus_dt", DecayKind::softplus_dt},
                                    {"neg_softplus2", DecayKind::softplus2},
                                    {"neg_silu", DecayKind::silu}}) {
    const std::string type = fmt::format("squared__sm_norm__A_mask_type_{}__in_conv_k_2", token);
    BlockConfig expected = preset("2mamba").block;
    expected.decay = kind;
    EXPECT_EQ(block_of(type), expected);
    EXPECT_EQ(release_architecture(type, "test").name, type);  // no preset has these switches
  }
  EXPECT_EQ(block_of("linear__ReLU__sm_norm"), preset("linear").block);
  // The order of tokens does not matter.
  EXPECT_EQ(release_architecture("squared__in_conv_k_2__A_mask_type_neg_softplus__sm_norm", "test").name, "2mamba");
}

TEST(ReleaseTokens, RefusesUnknownTokensByName) {
  const auto refused = [](const std::string& type, std::vector<std::string> parts) {
    SCOPED_TRACE(type);
    parts.push_back("test");
    expect_error([&] { release_architecture(type, "test"); }, parts);
  };
  refused("", {"unknown attention_type token", "\"\""});
  refused("sofmax", {"\"sofmax\"", "did you mean \"softmax\""});
  refused("gated_softmax_plusplus_mamba2", {"\"gated_softmax_plusplus_mamba2\""});
  refused("squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2__att2", {"\"att2\""});
  refused("squared__sm_norm__A_mask_type_neg_softplu", {"did you mean \"A_mask_type_neg_softplus\""});
  refused("linear__output_norm__in_conv_k_5", {"\"in_conv_k_5\"", "in_conv_k_4"});
  refused("linear__output_norm__relu", {"\"relu\"", "ReLU"});
  refused("linear____output_norm", {"token", "\"\""});
  refused("linear__output_norm__", {"token", "\"\""});
  refused("linear__output_norm__\x1b[31m", {"\\x1b[31m"});
  refused("linear__output_norm__D_res__D_res", {"D_res", "twice"});
  refused("linear__output_norm__sm_norm", {"output_norm and sm_norm contradict"});
  refused("linear__output_norm__out_norm", {"output_norm and out_norm contradict"});
  refused("linear__output_norm__ReLU__silu", {"ReLU and silu contradict"});
  refused("linear__output_norm__in_conv_k_2__in_conv_k_3", {"in_conv_k_2 and in_conv_k_3 contradict"});
  refused("linear__squared__output_norm", {"linear and squared contradict"});
  refused("squared__sm_norm__A_mask_type_discretize__A_mask_type_neg_silu",
          {"A_mask_type_discretize and A_mask_type_neg_silu contradict"});
  refused("softmax__in_conv_k_2", {"softmax stands for a whole block"});
  refused("linear__output_norm__mamba", {"mamba stands for a whole block"});
  refused("output_norm__linear", {"begins with the token output_norm", "squared"});
  refused("squared", {"normalization", "sm_norm or output_norm"});
  refused("linear__in_conv_k_2", {"normalization", "sm_norm or output_norm"});
  // A combination that cannot work is known only as a whole.
  const Json json = {{"model_type", "llama"},   {"attention_type", "linear__sm_norm"},
                     {"vocab_size", 8},         {"hidden_size", 16},
                     {"intermediate_size", 16}, {"num_hidden_layers", 1},
                     {"num_attention_heads", 2}};
  expect_error([&] { config_from_json(json.dump(), "here"); }, {"here", "linear score under the sum norm"});
}

// Their name for our dt_proj.bias.
TEST_F(ReleaseTest, BiasOfDt) {
  use("squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2__dt_on_values");
  const LanguageModel without = load_model(directory_.path());
  Tensors all = tensors();
  for (const char* layer : {"0", "1"})
    all[fmt::format("model.layers.{}.self_attn.dt_bias_value", layer)] = tensor_of({-3, 1}, {1, 1, 2});
  write(all);
  const LanguageModel model = load_model(directory_.path());
  EXPECT_EQ(model.config().arch, "2mamba-dt");
  EXPECT_TRUE(model.config().block.dt_bias);
  const Tensor tokens = sequences_of(source_)[0];
  EXPECT_GT(largest_difference(model.logits(tokens), without.logits(tokens)), 1e-2);
  fs::remove(directory_ / "config.json");
  EXPECT_EQ(load_config(directory_.path(), "2mamba-dt"), model.config());
  // The same numbers under our name.
  save_model(directory_.path(), without);
  all = tensors();
  for (const char* layer : {"0", "1"})
    all[fmt::format("model.layers.{}.self_attn.dt_proj.bias", layer)] = tensor_of({-3, 1}, {2});
  write(all);
  Json json = config();
  json["dt_bias"] = true;
  write(json);
  EXPECT_TRUE(same_bits(load_model(directory_.path()).logits(tokens), model.logits(tokens)));
}

TEST_F(ReleaseTest, MambaWithAnotherStateSize) {
  use("mamba");
  const Tensors valid = tensors();
  const auto rows = [](const Tensor& x, int64_t first, int64_t count) { return x.slice(0, first, count); };
  const auto joined = [](const std::vector<Tensor>& parts) {
    int64_t count = 0, at = 0;
    for (const Tensor& part : parts) count += part.size(0);
    std::vector<int64_t> sizes(parts[0].shape().begin(), parts[0].shape().end());
    sizes[0] = count;
    const Tensor out = Tensor::empty(Shape(sizes), parts[0].dtype());
    for (const Tensor& part : parts) {
      copy(out.slice(0, at, part.size(0)), part);
      at += part.size(0);
    }
    return out;
  };
  Tensors smaller = valid;  // the first 32 of 128 rows of the state
  for (const char* layer : {"0", "1"}) {
    const std::string own = fmt::format("model.layers.{}.self_attn.mamba_layer.", layer);
    const Tensor in = valid.at(own + "in_proj.weight"), conv = valid.at(own + "conv1d.weight");
    smaller[own + "in_proj.weight"] = joined({rows(in, 0, 64 + 32), rows(in, 64 + 128, 32), rows(in, 320, 1)});
    smaller[own + "conv1d.weight"] = joined({rows(conv, 0, 16 + 32), rows(conv, 16 + 128, 32)});
  }
  write(smaller);
  const LanguageModel model = load_model(directory_.path());
  EXPECT_EQ(model.config().qk_dim, 32);
  EXPECT_EQ(model.config().head_dim, 16);
  EXPECT_EQ(model.config().branch, 16);
  // The same as if the other rows of the state were always 0.
  Tensors zeroed = valid;
  for (const char* layer : {"0", "1"}) {
    const std::string name = fmt::format("model.layers.{}.self_attn.mamba_layer.in_proj.weight", layer);
    zeroed[name] = to_dtype(valid.at(name), DType::f32);
    fill(zeroed[name].slice(0, 64 + 32, 96), 0);
    fill(zeroed[name].slice(0, 64 + 128 + 32, 96), 0);
  }
  write(zeroed);
  const Tensor tokens = sequences_of(source_)[0];
  const LanguageModel larger = load_model(directory_.path());
  EXPECT_EQ(larger.config().qk_dim, 128);
  EXPECT_LE(largest_difference(model.logits(tokens), larger.logits(tokens)), 1e-5);

  Tensors damaged = valid;
  damaged["model.layers.1.self_attn.mamba_layer.in_proj.weight"] = Tensor::zeros({320, 32}, DType::f32);
  write(damaged);
  refused({"layers.1.self_attn.mamba_layer.in_proj.weight", "[320, 32], expected [321, 32]"});
  damaged = valid;
  damaged["model.layers.0.self_attn.mamba_layer.conv1d.bias"] = Tensor::zeros({272}, DType::f32);
  write(damaged);
  refused({"no place", "mamba_layer.conv1d.bias"});
  damaged = valid;
  damaged["model.layers.0.self_attn.mamba_layer.A_log"] = Tensor::zeros({2}, DType::f32);
  write(damaged);
  refused({"mamba_layer.A_log", "[2], expected [1]"});
}

TEST_F(ReleaseTest, RefusesPickles) {
  use("softmax");
  EXPECT_TRUE(load_notes(directory_.path()).empty());
  write_text(directory_ / "config.pt", "not even a pickle");
  const std::vector<std::string> notes = load_notes(directory_.path());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("config.pt is pickled and not read"), std::string::npos) << notes[0];
  EXPECT_EQ(load_notes(directory_ / "model.safetensors"), notes);
  write_text(directory_ / "optimizer.pt", "");
  EXPECT_NE(load_notes(directory_.path())[0].find("config.pt, optimizer.pt are"), std::string::npos);
  expect_logits(load_model(directory_.path()), source_, 1e-4);
  fs::remove(directory_ / "config.json");
  expect_logits(load_model(directory_.path(), "softmax"), source_, 1e-4);
  EXPECT_TRUE(load_notes(directory_ / "nothing").empty());
}

TEST_F(ReleaseTest, TextsBeginWithBos) {
  const fs::path folder = kFolders / "2mamba-squared";
  const Model model = Model::load(folder);
  EXPECT_EQ(model.arch(), "2mamba");
  EXPECT_EQ(model.parts().tokenizer->bos(), 1);
  EXPECT_EQ(model.parts().start, 1);
  // Also weights without a configuration, and after saving in our format.
  use("2mamba-squared");
  fs::remove(directory_ / "config.json");
  LoadOptions options;
  options.tokenizer = folder.string();
  options.arch = "2mamba";
  EXPECT_EQ(Model::load(directory_.path(), options).parts().start, 1);
  options.heads = 4;
  expect_error([&] { Model::load(directory_.path(), options); }, {"2 heads, not 4"});
  save_model(directory_.path(), load_model(folder));
  options.heads = 0;
  EXPECT_EQ(Model::load(directory_.path(), options).parts().start, 1);
  // A model in our format begins with eos unless bos is requested.
  Json json = config();
  json.erase("bos");
  write(json);
  EXPECT_EQ(Model::load(directory_.path(), options).parts().start, 2);
  options.bos = true;
  EXPECT_EQ(Model::load(directory_.path(), options).parts().start, 1);
}

// Any text either loads or is an Error.
TEST_F(ReleaseTest, FuzzedAttentionTypes) {
  Random random(1);
  std::vector<std::string> tokens = {"softmax", "mamba", "linear", "squared", "exp", "sm_norm", "output_norm", "", "_"};
  for (const auto& [type, arch] : kTypes) tokens.push_back(type.substr(type.rfind("__") + 1));
  int understood = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string type = random.pick(tokens);
    for (int64_t n = random.integer(0, 4); n > 0; --n) type += "__" + random.pick(tokens);
    if (random.integer(0, 3) == 0 && !type.empty())
      type[random.integer(0, static_cast<int64_t>(type.size()) - 1)] = static_cast<char>(random.integer(1, 127));
    try {
      release_architecture(type, "test");
      ++understood;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(understood, 20);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace furious
