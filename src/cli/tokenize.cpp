// `furious tokenize`: encode a corpus into token shards.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "cli/reader_flags.h"
#include "data/tokenize.h"

namespace furious::cli {
namespace {

constexpr int64_t kLeastTail = 256 << 10;  // bytes: a loss on less is noise

std::string progress_text(const TokenizeProgress& progress, double seconds) {
  const auto done = static_cast<double>(progress.disk_bytes - progress.disk_bytes_start);
  const auto left = static_cast<double>(progress.disk_bytes_total - progress.disk_bytes);
  return fmt::format("{:3.0f} %  {:.1f} MB/s  {:.2f} M tokens  {} left",
                     100.0 * static_cast<double>(progress.disk_bytes) /
                         static_cast<double>(std::max<int64_t>(1, progress.disk_bytes_total)),
                     static_cast<double>(progress.text_bytes) / 1e6 / seconds,
                     static_cast<double>(progress.tokens) / 1e6, done > 0 ? clock_text(seconds * left / done) : "?");
}

void print_result(const TokenizeOptions& options, const TokenizeResult& result, double seconds) {
  const Manifest& manifest = result.manifest;
  for (const Split split : kSplits) {
    const ShardInfo total = manifest[split].total();
    fmt::print("{:<6} {:>12} documents {:>15} tokens {:>15} bytes {:>6} shards\n", name_of(split), total.documents,
               total.tokens, total.bytes, manifest[split].shards.size());
  }
  if (manifest.replaced > 0) fmt::print("{} broken UTF-8 sequences were replaced by U+FFFD\n", manifest.replaced);
  if (result.empty > 0)
    fmt::print("{} empty: records without text in \"{}\" are no documents\n", result.empty, options.reader.field);
  if (!result.divided.path.empty())
    fmt::print("the test split is the end of \"{}\", from byte {} of its text\n", result.divided.path,
               result.divided.test_from);
  if (result.was_complete)
    fmt::print("{} is already complete; nothing was done\n", options.out);
  else
    fmt::print("{} in {:.1f} s, {:.1f} MB/s of text\n", options.out, seconds,
               static_cast<double>(result.progress.text_bytes) / 1e6 / std::max(seconds, 1e-9));
}

void run(const TokenizeOptions& options) {
  stop_on_signals();
  ProgressLine line("tokenize");
  TokenizeHooks hooks;
  hooks.stop = stop_requested;
  hooks.progress = [&](const TokenizeProgress& progress) {
    if (line.due()) line.show(progress_text(progress, line.seconds()));
  };
  const TokenizeResult result = tokenize_corpus(options, hooks);
  line.clear();
  print_result(options, result, line.seconds());
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand("tokenize", "Encode text into token shards for training");
  command
      ->add_option("input", options->inputs,
                   "Input: .txt, .md, .html, .jsonl, .json, .csv and .tsv files (also .gz, .zst), .parquet and .arrow "
                   "files, folders, globs; -: standard input")
      ->required();
  command
      ->add_option("--tokenizer", options->tokenizer,
                   "Tokenizer: a SentencePiece model, a tokenizer.json, a folder with one, or \"byte\"")
      ->required();
  command->add_option("--out", options->out, "Folder of the shards to write")->required();
  add_reader_flags(*command, options->reader, options->format);
  command->add_flag("--split-on-blank-line", options->reader.split_on_blank_line,
                    "End documents of text files at blank lines instead of the end of the file");
  CLI::Option* fraction =
      command
          ->add_option("--test-fraction", options->test_fraction,
                       "Fraction of the documents for the test split; of a single one, its end; 0: no test split")
          ->check(CLI::Range(0.0, 0.999999))
          ->capture_default_str();
  command->add_option(
      "--test", options->test_inputs,
      "Input files of the test split; other files then are for training only, unless --test-fraction is "
      "given");
  command->add_option("--seed", options->seed, "Seed of the random choice of test documents")->capture_default_str();
  command->add_option("--shard-tokens", options->shard_tokens, "Number of tokens after which a new shard begins")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_flag("--bos", options->bos, "Begin every document with bos; all documents end with eos");
  add_threads(*command, options->threads);
  command->footer(
      "After an interruption the same command resumes.\n"
      "Example: furious tokenize corpus/ more-*.jsonl.zst --tokenizer tokenizer.model --out data");
  command->callback([options, fraction] {
    if (fraction->count() == 0) options->least_tail = kLeastTail;
    if (!options->test_inputs.empty() && fraction->count() == 0) options->test_fraction = 0;
    run(*options);
  });
}

}  // namespace furious::cli
