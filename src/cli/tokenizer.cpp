// `furious tokenizer`: train a tokenizer, or show one.
#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "base/file.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/reader_flags.h"
#include "data/corpus_lines.h"
#include "data/tokenizer.h"

namespace furious::cli {
namespace {

struct TrainCommand {
  std::vector<std::string> inputs;
  std::string out;
  ReaderOptions reader;
  std::optional<TextFormat> format;
  TokenizerTraining training;
  int threads = 0;

  void run() const {
    const auto start = std::chrono::steady_clock::now();
    TokenizerTraining settings = training;
    settings.threads = threads > 0 ? threads : furious::threads();
    CorpusLines lines(inputs, reader, format);
    const std::string model = train_sentencepiece(lines, settings);
    const auto tokenizer = make_sentencepiece(model, out);
    write_text(out, model);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print("{}: vocabulary of {} from {:.1f} MB of text in {:.1f} s\n", out, tokenizer->vocabulary_size(),
               static_cast<double>(lines.bytes()) / 1e6, seconds);
  }
};

// Readable on one line.
std::string quoted(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F || (byte >= 0x80 && bytes.size() == 1))
      text += fmt::format("\\x{:02x}", byte);
    else
      text += c;
  }
  return "\"" + text + "\"";
}

void show(const std::string& name, const std::string& text) {
  const auto tokenizer = load_tokenizer(name);
  fmt::print("kind         {}\nids          {}\nbos          {}\neos          {}\nfingerprint  {}\n", tokenizer->kind(),
             tokenizer->vocabulary_size(), tokenizer->bos(), tokenizer->eos(), tokenizer->fingerprint());
  if (text.empty()) return;
  const std::vector<int32_t> ids = tokenizer->encode(text);
  fmt::print("\n");
  for (const int32_t id : ids) fmt::print("{:>7}  {}\n", id, quoted(tokenizer->piece(id)));
  fmt::print("\n{} tokens for {} bytes; decoded: {}\n", ids.size(), text.size(), tokenizer->decode(ids));
}

void add_tokenizer_train(CLI::App& tokenizer) {
  auto options = std::make_shared<TrainCommand>();
  CLI::App* command = tokenizer.add_subcommand("train", "Train a SentencePiece tokenizer on text");
  command->add_option("input", options->inputs, "Input files, as for `furious tokenize`")->required();
  command->add_option("--vocab", options->training.vocabulary_size, "Vocabulary size")
      ->check(CLI::Range(260, 1 << 20))
      ->capture_default_str();
  command->add_option("--out", options->out, "Model file to write")->required();
  add_reader_flags(*command, options->reader, options->format);
  command
      ->add_option("--sentences", options->training.sentences,
                   "Largest number of lines to train on; longer input is sampled")
      ->check(CLI::Range(int64_t{1000}, int64_t{1} << 40))
      ->capture_default_str();
  add_threads(*command, options->threads);
  command->footer("Example: furious tokenizer train corpus/ --vocab 8192 --out tokenizer.model");
  command->callback([options] { options->run(); });
}

void add_tokenizer_show(CLI::App& tokenizer) {
  auto name = std::make_shared<std::string>();
  auto text = std::make_shared<std::string>();
  CLI::App* command = tokenizer.add_subcommand("show", "Show the properties of a tokenizer, and the tokens of a text");
  command
      ->add_option("tokenizer", *name,
                   "Tokenizer: a SentencePiece model, a tokenizer.json, a folder with one, or \"byte\"")
      ->required();
  command->add_option("--text", *text, "Text to encode");
  command->footer("Example: furious tokenizer show tokenizer.model --text \"Two mambas met.\"");
  command->callback([name, text] { show(*name, *text); });
}

}  // namespace

void add_tokenizer(CLI::App& app) {
  CLI::App* tokenizer = app.add_subcommand("tokenizer", "Train or show a tokenizer");
  tokenizer->require_subcommand(1);
  tokenizer->footer("Example: furious tokenizer train corpus/ --vocab 8192 --out tokenizer.model");
  add_tokenizer_train(*tokenizer);
  add_tokenizer_show(*tokenizer);
}

}  // namespace furious::cli
