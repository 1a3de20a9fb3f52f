// Models written for other programs, read back by our own loader; tests/interop reads them with those programs.
#include "model/export.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "model/checkpoint.h"
#include "model/little.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;
using Json = nlohmann::json;
namespace fs = std::filesystem;

class Export : public ::testing::Test {
 protected:
  LanguageModel made(const ModelConfig& config) {
    return {config, [&](const std::string& name, const Tensor& out) {
              copy(out, random_.normal_tensor(out.shape(), 0.3));
              if (name.ends_with("norm.weight") || name.ends_with(".A_log")) fill(out, 0.7f);
            }};
  }
  // Heads of one group get the same gate, and channels of one head the same D, as loading a published model gives them.
  static void share(const LanguageModel& model, const std::string& ending, int64_t groups) {
    for (const Parameter& parameter : model.parameters()) {
      if (!parameter.name.ends_with(ending)) continue;
      const Tensor& value = parameter.value.value();
      const bool channels = ending == "self_attn.D";
      const int64_t rows = channels ? value.elements() : value.size(0), each = rows / groups;
      const Tensor from = value.view({groups, each, value.elements() / rows});
      for (int64_t i = 1; i < each; ++i) copy(from.select(1, i), from.select(1, 0));
    }
  }
  Exported written(const LanguageModel& model, const ExportOptions& options = {}) {
    fs::remove_all(out_);
    fs::create_directories(out_);
    return export_model(out_, model, options);
  }
  Tensor tokens(const ModelConfig& config) { return random_tokens(random_, {1, 13}, config.vocabulary); }
  void expect_same_bits(const LanguageModel& model) {
    const LanguageModel again = load_model(out_, "", {}, 0, {}, WeightDType::as_stored);
    const Tensor ids = tokens(model.config());
    const Tensor wanted = model.logits(ids), got = again.logits(ids);
    ASSERT_EQ(wanted.shape(), got.shape());
    EXPECT_EQ(std::memcmp(wanted.raw(), got.raw(), wanted.bytes()), 0);
  }
  Json config() const { return Json::parse(read_text(out_ / "config.json")); }

  Random random_{5};
  TemporaryDirectory directory_;
  fs::path out_ = directory_ / "out";
};

ModelConfig little_mamba2() {
  ModelConfig config = little(preset("mamba2-paper"));
  config.block.conv_window = 4;
  config.block.conv_bias = true;
  config.mlp = Mlp::none;
  config.intermediate = config.branch = 0;
  config.v_heads = 6;
  config.q_heads = config.k_heads = 1;
  config.head_dim = 8;
  config.qk_dim = 16;
  config.norm_eps = config.block.out_norm_eps;
  return config;
}

ModelConfig little_brumby() {
  ModelConfig config = little(preset("softmax-qk-norm"));
  config.block.score = Score::squared;
  config.block.decay = DecayKind::log_sigmoid;
  config.block.rope_pairing = RopePairing::halves;
  config.q_heads = 6;
  config.k_heads = config.v_heads = config.decay_heads = 3;
  return config;
}

// Every block comes back to the bit: in a format of others where it is one of theirs, in ours otherwise.
TEST_F(Export, EveryPresetComesBack) {
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    ModelConfig config = little(preset);
    config.block.rope_pairing = RopePairing::halves;
    const LanguageModel model = made(config);
    const Exported done = written(model, {.bos = 3, .eos = -1});
    const bool softmax = preset.name == "softmax" || preset.name == "softmax-qk-norm";
    EXPECT_EQ(done.needs_code, !softmax);
    EXPECT_EQ(done.reason.empty(), softmax);
    EXPECT_EQ(fs::exists(out_ / "modeling_furious.py"), !softmax);
    EXPECT_EQ(this->config().contains("auto_map"), !softmax);
    EXPECT_EQ(this->config()["bos_token_id"], 3);
    EXPECT_TRUE(this->config()["eos_token_id"].is_null());
    expect_same_bits(model);
    EXPECT_EQ(written(model, {.kind = ExportKind::own}).model_type, "furious");
    EXPECT_FALSE(fs::exists(out_ / "modeling_furious.py"));
    expect_same_bits(model);
    EXPECT_EQ(load_config(out_), model.config());
  }
}

TEST_F(Export, RandomSwitchesComeBack) {
  for (int round = 0; round < 30; ++round) {
    SCOPED_TRACE(round);
    const LanguageModel model = made(random_config(random_));
    written(model, {.kind = ExportKind::code});
    expect_same_bits(model);
  }
}

TEST_F(Export, Mamba2) {
  for (const bool bias : {false, true})
    for (const bool tied : {false, true}) {
      ModelConfig config = little_mamba2();
      config.block.qkv_bias = config.block.out_bias = config.block.z_gate_bias = bias;
      config.tie_embeddings = tied;
      if (tied) config.block.dt_limit = 0.6, config.block.dt_least = 0.1;
      const LanguageModel model = made(config);
      share(model, "self_attn.D", config.v_heads);
      const Exported done = written(model);
      EXPECT_EQ(done.model_type, "mamba2");
      EXPECT_EQ(done.what, "Mamba2ForCausalLM");
      EXPECT_EQ(this->config()["expand"], 2);
      EXPECT_EQ(this->config().contains("time_step_limit"), tied);
      expect_same_bits(model);
    }
}

TEST_F(Export, Brumby) {
  for (const bool bias : {false, true}) {
    ModelConfig config = little_brumby();
    config.block.qkv_bias = config.block.out_bias = config.block.decay_bias = bias;
    const LanguageModel model = made(config);
    const Exported done = written(model);
    EXPECT_EQ(done.model_type, "brumby");
    EXPECT_NE(done.reason.find("no Brumby"), std::string::npos);
    EXPECT_FALSE(done.needs_code);
    const SafetensorsReader reader(out_);
    EXPECT_EQ(reader.find("model.layers.0.self_attn.g_proj.weight")->shape, (std::vector<int64_t>{3, 24}));
    expect_same_bits(model);
    EXPECT_TRUE(written(model, {.kind = ExportKind::code}).needs_code);
    expect_same_bits(model);
  }
}

// A block that differs in one switch from one of theirs is written with code, and the reason names the switch.
TEST_F(Export, SaysWhatDiffers) {
  struct Case {
    ModelConfig config;
    std::function<void(ModelConfig&)> change;
    const char* reason;
  };
  const ModelConfig softmax = little(preset("softmax")), mamba2 = little_mamba2(), brumby = little_brumby();
  const Case cases[] = {
      {softmax, [](ModelConfig& c) { c.block.decay = DecayKind::log_sigmoid; }, "a decay"},
      {softmax, [](ModelConfig& c) { c.block.conv_window = 2; }, "a convolution"},
      {softmax, [](ModelConfig& c) { c.block.rope = false; }, "no rotary positions"},
      {softmax, [](ModelConfig& c) { c.block.scale = 0.5f; }, "a scale"},
      {softmax, [](ModelConfig& c) { c.layer_norm = true; }, "norm of another kind"},
      {softmax, [](ModelConfig& c) { c.block.out_bias = true; }, "a bias of the output alone"},
      {mamba2, [](ModelConfig&) {}, "a D that differs within a head"},
      {mamba2, [](ModelConfig& c) { c.q_heads = c.k_heads = c.block.out_norm_groups = 2; }, "several groups"},
      {mamba2, [](ModelConfig& c) { c.norm_eps = 1e-3f; }, "different eps"},
      {mamba2, [](ModelConfig& c) { c.block.scale = 0; }, "a scale of Q and K"},
      {mamba2, [](ModelConfig& c) { c.mlp = Mlp::gelu, c.intermediate = 16; }, "an MLP"},
      {brumby, [](ModelConfig& c) { c.decay_heads = 0; }, "gates that differ between heads"},
      {brumby, [](ModelConfig& c) { c.block.qk_norm = false; }, "no norm of Q and K"},
      {brumby, [](ModelConfig& c) { c.block.square_mask = true; }, "no log-sigmoid decay"},
      {brumby, [](ModelConfig& c) { c.block.out_bias = true; }, "biases of some"}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.reason);
    ModelConfig config = c.config;
    c.change(config);
    const LanguageModel model = made(config);
    const Exported done = written(model);
    EXPECT_TRUE(done.needs_code);
    EXPECT_NE(done.reason.find(c.reason), std::string::npos) << done.reason;
    expect_same_bits(model);
  }
  // A switch that only the configuration's way back shows: a least time step without a largest.
  ModelConfig config = little_mamba2();
  config.block.dt_least = 0.1;
  const LanguageModel model = made(config);
  share(model, "self_attn.D", config.v_heads);
  EXPECT_NE(written(model).reason.find("a switch without a key"), std::string::npos);
}

TEST_F(Export, OtherDTypes) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    SCOPED_TRACE(name_of(dtype));
    for (ModelConfig config : {little(preset("2mamba")), little(preset("softmax")), little_mamba2()}) {
      config.block.rope_pairing = RopePairing::halves;
      const LanguageModel whole = made(config);
      share(whole, "self_attn.D", config.v_heads);
      const LanguageModel model = with_matrices(whole, dtype);
      const Tensor ids = tokens(config);
      EXPECT_LE(relative_error(model.logits(ids), whole.logits(ids)), dtype == DType::f32 ? 0 : 5e-2);
      for (const ExportKind kind : {ExportKind::automatic, ExportKind::own}) {
        written(model, {.kind = kind});
        const char* const name = dtype == DType::bf16 ? "bfloat16" : dtype == DType::f16 ? "float16" : "float32";
        EXPECT_EQ(this->config()["torch_dtype"], name);
        EXPECT_EQ(stored_matrices(SafetensorsReader(out_)), dtype);
        expect_same_bits(model);
      }
    }
  }
}

TEST_F(Export, F16HoldsNoLargeWeights) {
  const ModelConfig config = little(preset("2mamba"));
  const LanguageModel model = made(config);
  const Tensor& head = model.output_matrix();
  head.data<float>()[7] = 70000;
  expect_error([&] { with_matrices(model, DType::f16); }, {"lm_head.weight", "65504", "bf16"});
  EXPECT_EQ(with_matrices(model, DType::bf16).config(), config);
}

}  // namespace
}  // namespace furious
