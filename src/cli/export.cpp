// `furious export`: a model as a directory that other programs load.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/load_flags.h"
#include "data/tokenizer.h"
#include "model/export.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

struct ExportCommand {
  std::string model, out, to = "hf", dtype;
  bool with_code = false;
  LoadOptions load;

  void run() const;
  ExportOptions options(const Tokenizer* tokenizer) const;
  LanguageModel load_as(const fs::path& path) const;
};

ExportOptions ExportCommand::options(const Tokenizer* tokenizer) const {
  ExportOptions options;
  if (to != "hf") options.kind = ExportKind::own;
  if (with_code) options.kind = ExportKind::code;
  if (tokenizer) options.bos = tokenizer->bos(), options.eos = tokenizer->eos();
  return options;
}

LanguageModel ExportCommand::load_as(const fs::path& path) const {
  const std::string wanted = to == "bf16" || to == "f16" ? to : dtype;
  LanguageModel loaded = load_model(path, load.arch, {}, load.heads, {}, WeightDType::as_stored);
  if (load.bos) loaded.set_bos(true);
  if (wanted.empty()) return loaded;
  return with_matrices(loaded, wanted == "bf16" ? DType::bf16 : wanted == "f16" ? DType::f16 : DType::f32);
}

// Files that other programs read beside the weights and that nothing here makes.
bool is_companion(const std::string& name) {
  return name == "generation_config.json" || name == "chat_template.jinja" || name == "chat_template.json";
}
bool is_tokenizer_file(const std::string& name) {
  return name.starts_with("tokenizer") || name == "special_tokens_map.json" || name == "vocab.json" ||
         name == "merges.txt" || name == "added_tokens.json";
}

// What AutoTokenizer needs for equal ids, the other files of a published tokenizer.json, and the template of a chat.
void write_tokenizer(const fs::path& from, const fs::path& to, const Tokenizer* tokenizer, bool bos) {
  if (tokenizer) save_tokenizer(to, *tokenizer, bos);
  const bool published = tokenizer && tokenizer->kind() == "tokenizer.json";
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file() && (is_companion(name) || (published && is_tokenizer_file(name))))
      fs::copy_file(entry.path(), to / name, fs::copy_options::skip_existing);
  }
  const fs::path config = from / "tokenizer_config.json";
  if (published || !tokenizer || !fs::exists(config)) return;
  const nlohmann::json theirs = read_json(config, {.python_words = true});
  if (!theirs.is_object() || !theirs.contains("chat_template")) return;
  auto ours = nlohmann::ordered_json::parse(read_text(to / "tokenizer_config.json"));
  ours["chat_template"] = theirs["chat_template"];
  write_text(to / "tokenizer_config.json", ours.dump(2) + "\n");
}

void ExportCommand::run() const {
  const fs::path path = checkpoint_of(model), folder = fs::is_directory(path) ? path : path.parent_path();
  require(!fs::exists(out), "{}: exists already; give another --out", out);
  require(to == "hf" || (!with_code && dtype.empty()), "export: --dtype and --with-code belong to --to hf, not to {}",
          to);
  show_notes(model);
  const std::shared_ptr<const Tokenizer> tokenizer =
      has_tokenizer(folder) ? load_tokenizer(folder.string()) : std::shared_ptr<const Tokenizer>();
  const LanguageModel loaded = load_as(path);
  Exported done;
  replace_directory(out, [&](const fs::path& temporary) {
    write_tokenizer(folder, temporary, tokenizer.get(), loaded.config().bos);
    done = export_model(temporary, loaded, options(tokenizer.get()));
  });
  if (!done.reason.empty()) fmt::print(stderr, "note: {}\n", done.reason);
  if (!tokenizer) fmt::print(stderr, "note: {} has no tokenizer, so {} has none\n", folder.string(), out);
  if (fs::exists(fs::path(out) / "tokenization_furious.py"))
    fmt::print(stderr,
               "note: no tokenizer.json can represent this SentencePiece model; AutoTokenizer needs "
               "trust_remote_code=True and the sentencepiece package\n");
  fmt::print("{}: {}{}\n", out, done.what, done.needs_code ? "; load it with trust_remote_code=True" : "");
}

}  // namespace

void add_export(CLI::App& app) {
  auto options = std::make_shared<ExportCommand>();
  CLI::App* command = app.add_subcommand("export", "Write a model for other programs, or in another dtype");
  add_model(*command, options->model);
  command->add_option("--out", options->out, "Directory to write; it must not exist")->required();
  command
      ->add_option(
          "--to", options->to,
          "hf: for Hugging Face's library, as Llama, Qwen2, Qwen3, Mamba-2 or Brumby where the block is one of "
          "theirs, else with modeling_furious.py; safetensors, bf16, f16: furious' own format, as stored or "
          "with matrices of that dtype")
      ->check(CLI::IsMember({"hf", "safetensors", "bf16", "f16"}))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "Of matrices, with --to hf; as they are stored if not given")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command->add_flag("--with-code", options->with_code, "Write modeling_furious.py whatever the block is");
  add_load_flags(*command, options->load);
  command->footer("Example: furious export run/latest --to hf --out run-hf");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
