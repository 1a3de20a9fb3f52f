// `furious eval`: loss and perplexity of a model on token shards.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/load_flags.h"
#include "cli/progress.h"
#include "eval/test_loss.h"
#include "model/checkpoint.h"
#include "train/training_checkpoint.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

struct EvalCommand {
  std::string model, data, json, device = "auto", dtype = "auto";
  LoadOptions load;
  std::string packing, split = "test";
  int64_t length = 0, batch = 8, max_batches = 0;
  int threads = 0;

  BatchOptions batches_for(const ModelConfig& config) const;
  void run() const;
};

// The packing and length of training; the defaults of training where they are unknown. A model that expects bos gets
// one document per row, unless --packing is given.
BatchOptions EvalCommand::batches_for(const ModelConfig& config) const {
  const bool is_known = fs::exists(fs::path(model) / "training.safetensors");
  const TrainOptions trained = is_known ? saved_options(model) : TrainOptions();
  const bool bos = load.bos || (is_known ? trained.bos : config.bos);
  BatchOptions options;
  options.batch = batch;
  options.length = length > 0 ? length : trained.length;
  options.packing = packing_from_name(!packing.empty() ? packing : bos ? name_of(Packing::rows) : trained.packing);
  options.bos = bos && options.packing == Packing::rows;
  options.order = Order::once;
  require(!load.bos || options.bos, "eval: --bos needs one document per row; use --packing rows");
  return options;
}

void EvalCommand::run() const {
  const Device where = usable_device(device);
  const bool bf16 = dtype == "bf16" || (dtype == "auto" && !where.is_cpu());
  JsonFile file(json);
  const ThreadLimit limit(threads);
  const Dataset dataset(data);
  dataset.check_tokenizer_of(model);
  show_notes(model);
  const ModelConfig config = load_config(model, load.arch, load.heads);
  const BatchOptions options = batches_for(config);
  const Split part = split == name_of(Split::test) ? Split::test : Split::train;
  const DatasetBatches batches(dataset, part, options);
  const int64_t steps = max_batches > 0 ? std::min(max_batches, batches.steps()) : batches.steps();
  ProgressLine loading("eval");
  LanguageModel language_model = load_model(model, load.arch, where, load.heads, show_loading(loading));
  loading.clear();
  language_model.set_compute(compute_in(bf16 ? DType::bf16 : DType::f32, where));

  stop_on_signals();
  ProgressLine line("eval");
  int64_t done = 0;
  const TestLoss loss =
      test_loss(language_model, batches, steps, dataset.tokenizer().get(), [&](int64_t count, const TestLoss& so_far) {
        done = count;
        if (line.due())
          line.show(fmt::format(
              "batch {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", count, steps, so_far.mean(),
              static_cast<double>(so_far.tokens) / line.seconds(),
              clock_text(line.seconds() * static_cast<double>(steps - count) / static_cast<double>(count))));
        return !stop_requested();
      });
  const double seconds = line.seconds();
  line.clear();
  require(loss.tokens > 0, "eval: {} has no token to predict; give data with at least two tokens",
          dataset.tokens(part).name());
  fmt::print("loss            {:.5f} per token\nperplexity      {:.4f}\n", loss.mean(), loss.perplexity());
  fmt::print("loss            {:.5f} per byte of text\nbits            {:.5f} per byte of text\n", loss.per_byte(),
             loss.bits_per_byte());
  fmt::print("predicted       {} tokens, {} bytes of text; {} of {} batches of {} x {} ({}, {}{})\n", loss.tokens,
             loss.text_bytes, done, batches.steps(), batch, options.length, split, name_of(options.packing),
             options.bos ? ", bos" : "");
  fmt::print("time            {:.1f} s, {:.0f} tokens/s\n", seconds, static_cast<double>(loss.tokens) / seconds);
  file.write(nlohmann::ordered_json{{"loss", loss.mean()},
                                    {"perplexity", loss.perplexity()},
                                    {"loss_per_byte", loss.per_byte()},
                                    {"bits_per_byte", loss.bits_per_byte()},
                                    {"tokens", loss.tokens},
                                    {"text_bytes", loss.text_bytes},
                                    {"batches", done},
                                    {"batch", batch},
                                    {"length", options.length},
                                    {"packing", name_of(options.packing)},
                                    {"bos", options.bos},
                                    {"split", split},
                                    {"seconds", seconds}});
}

}  // namespace

void add_eval(CLI::App& app) {
  auto options = std::make_shared<EvalCommand>();
  CLI::App* command = app.add_subcommand("eval", "Compute the loss and perplexity of a model on token shards");
  add_model(*command, options->model);
  command->add_option("--data", options->data, "Folder of token shards, written by `furious tokenize`")->required();
  command->add_option("--split", options->split, "Split of the data: test or train")
      ->check(CLI::IsMember({"test", "train"}))
      ->capture_default_str();
  command
      ->add_option("--length", options->length,
                   "Number of tokens in a row; default: as in training, or 512 where that is unknown")
      ->check(CLI::Range(1, 1 << 26));
  command->add_option("--batch", options->batch, "Number of rows in a batch")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--packing", options->packing,
                   "packed: windows over the concatenated documents; isolated: the same, with attention limited to "
                   "the document; rows: one document per row. Default: as in training; where that is unknown, rows for "
                   "models that expect bos, and packed for others")
      ->check(CLI::IsMember({"packed", "isolated", "rows"}));
  command->add_option("--max-batches", options->max_batches, "Stop after this number of batches; 0: all batches")
      ->check(at_least(0))
      ->capture_default_str();
  add_load_flags(*command, options->load);
  add_threads(*command, options->threads);
  add_device(*command, options->device);
  add_dtype(*command, options->dtype);
  add_json(*command, options->json, "Write the results to this JSON file");
  command->footer("Example: furious eval runs/stories --data data/stories --json loss.json");
  command->callback([options] {
    options->model = checkpoint_of(options->model).string();
    options->run();
  });
}

}  // namespace furious::cli
