// `furious export`, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "cli/run.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"
#include "model/export.h"
#include "model/little.h"
#include "model/safetensors.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;
namespace fs = std::filesystem;

class ExportCommand : public ::testing::Test {
 protected:
  void save(const char* arch) const {
    ModelConfig config = little(preset(arch));
    config.vocabulary = 258;
    fs::create_directories(model_);
    save_model(model_, LanguageModel(config, 1));
  }
  std::string command(const std::string& more = "") const {
    return fmt::format("export {} --out {} {}", model_.string(), out_.string(), more);
  }
  nlohmann::json json(const char* file) const { return nlohmann::json::parse(read_text(out_ / file)); }

  TemporaryDirectory directory_;
  fs::path model_ = directory_ / "model", out_ = directory_ / "out";
};

TEST_F(ExportCommand, WritesModelAndTokenizer) {
  save("softmax");
  save_tokenizer(model_, *load_tokenizer("byte"));
  write_text(model_ / "generation_config.json", "{}");
  write_text(model_ / "notes.txt", "not copied");
  expect_run(command("--to hf"), 0, {out_.string(), "LlamaForCausalLM"});
  EXPECT_EQ(json("config.json")["model_type"], "llama");
  EXPECT_EQ(json("config.json")["eos_token_id"], 257);
  EXPECT_EQ(load_tokenizer(out_.string())->kind(), "byte");
  EXPECT_TRUE(fs::exists(out_ / "generation_config.json"));
  EXPECT_FALSE(fs::exists(out_ / "notes.txt"));
  const Tensor tokens = int_tensor_of({1, 2, 3, 4, 5}, {1, 5});
  EXPECT_LE(relative_error(load_model(out_).logits(tokens), load_model(model_).logits(tokens)), 1e-5);
  expect_run(command("--to hf"), 1, {"exists already", "--out"});
}

// A tokenizer of ours whose files are those of an older version is written anew; the template of a chat is kept.
TEST_F(ExportCommand, RewritesOwnTokenizersAndCopiesOthers) {
  save("2mamba");
  write_text(model_ / "tokenizer_config.json", R"({"tokenizer_class": "byte", "chat_template": "{{ 1 }}"})");
  expect_run(command(), 0, {"modeling_furious.py", "trust_remote_code=True", "a mixer that is not softmax"});
  EXPECT_EQ(read_text(out_ / "modeling_furious.py"), modeling_furious());
  EXPECT_EQ(json("tokenizer_config.json")["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(json("tokenizer_config.json")["chat_template"], "{{ 1 }}");
  EXPECT_TRUE(fs::exists(out_ / "tokenizer.json"));
  // As another program would have saved it.
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    fs::copy_file(out_ / name, model_ / name, fs::copy_options::overwrite_existing);
  write_text(model_ / "tokenizer_config.json",
             R"({"tokenizer_class": "LlamaTokenizer", "eos_token": "<|eos|>", "model_max_length": 9})");
  write_text(model_ / "special_tokens_map.json", R"({"eos_token": "<|eos|>"})");
  fs::remove_all(out_);
  expect_run(command(), 0, {});
  EXPECT_EQ(json("tokenizer_config.json")["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(json("tokenizer_config.json")["model_max_length"], 9);
  EXPECT_TRUE(fs::exists(out_ / "special_tokens_map.json"));
  EXPECT_EQ(json("config.json")["eos_token_id"], 257);
}

TEST_F(ExportCommand, OtherDTypes) {
  save("2mamba");
  for (const auto& [to, dtype] : {std::pair{"--to bf16", DType::bf16},
                                  {"--to f16", DType::f16},
                                  {"--to safetensors", DType::f32},
                                  {"--to hf --dtype bf16", DType::bf16}}) {
    SCOPED_TRACE(to);
    expect_run(command(to), 0, {"no tokenizer"});
    EXPECT_EQ(stored_matrices(SafetensorsReader(out_)), dtype);
    EXPECT_EQ(fs::exists(out_ / "modeling_furious.py"), std::string_view(to).starts_with("--to hf"));
    EXPECT_EQ(load_config(out_), load_config(model_));
    fs::remove_all(out_);
  }
  expect_run(command("--to bf16 --dtype f16"), 1, {"--dtype", "--to hf"});
  expect_run(command("--to gguf"), 2, {"gguf"});
  EXPECT_FALSE(fs::exists(out_));
}

TEST_F(ExportCommand, LeavesNothingBehind) {
  save("2mamba");
  const RunResult limited = run(command(), "trap '' XFSZ; ulimit -f 60;");
  EXPECT_EQ(limited.code, 1);
  EXPECT_NE(limited.output.find("model.safetensors"), std::string::npos) << limited.output;
  EXPECT_FALSE(fs::exists(out_));
  expect_run(fmt::format("export {} --out {}", (directory_ / "none").string(), out_.string()), 1, {"does not exist"});
  expect_run(command(), 0, {});
}

}  // namespace
}  // namespace furious
