// `furious demo`: train three small models on the same batches, from text to a comparison.
#include "paper/demo.h"

#include <fmt/format.h>

#include <memory>

#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/progress.h"

namespace furious::cli {
namespace {

void train(Demo& demo, int64_t steps) {
  ProgressLine line("demo");
  for (int64_t step = 1; step <= steps && !stop_requested(); ++step) {
    demo.step();
    if (!line.due()) continue;
    std::string losses;
    for (const Demo::Model& model : demo.models())
      losses += fmt::format("  {} {:.3f}", model.arch, model.losses.back());
    const double left = line.seconds() / static_cast<double>(step) * static_cast<double>(steps - step);
    line.show(fmt::format("step {}/{}  loss{}  {} left", step, steps, losses, clock_text(left)));
  }
}

void run(const DemoOptions& options) {
  stop_on_signals();
  Demo demo(options);
  const int64_t bytes = demo.train_tokenizer();
  fmt::print("tokenizer  vocabulary {}, from {:.1f} MB of text\n", options.vocabulary,
             static_cast<double>(bytes) / 1e6);
  const Manifest manifest = demo.tokenize(stop_requested);
  fmt::print("shards     {} tokens for training, {} for testing\n", manifest[Split::train].total().tokens,
             manifest[Split::test].total().tokens);
  demo.make_models();
  fmt::print("training   {} of {} x {} tokens, {}\n", counted(options.steps, "step"), Demo::kBatch, Demo::kLength,
             counted(threads(), "thread"));
  std::fflush(stdout);
  train(demo, options.steps);
  demo.evaluate();
  fmt::print("\n{}\nKB: cache memory of one sequence after 1k, 8k and 64k tokens\n", to_text(demo_table(demo)));
  demo.save();
  const std::string& first = demo.models().front().arch;
  fmt::print("\nFour samples of {}:\n\n", first);
  for (const Text& written : demo.samples(4)) fmt::print("{}\n\n", written.text);
  fmt::print("chart: {0}/loss.svg; generate more: furious generate {0}/{1} --prompt \"Mamba\"\n", options.out, first);
}

}  // namespace

void add_demo(CLI::App& app) {
  auto demo = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand("demo", "Train three small models side by side, from text to a comparison");
  command->add_option("text", demo->text,
                      "Text files as for `furious tokenize`; default: the dictionary of the package dict-gcide");
  command->add_option("--out", demo->out, "Folder for tokenizer, shards, models and chart")->capture_default_str();
  with_commas(command->add_option("--arch", demo->archs, "Architectures to train, with commas"))->capture_default_str();
  command->add_option("--steps", demo->steps, "Number of training steps")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--vocab", demo->vocabulary, "Vocabulary size of the tokenizer")
      ->check(CLI::Range(260, 1 << 16))
      ->capture_default_str();
  command->footer("Example: furious demo my-notes.txt --out demo");
  command->callback([demo] { run(*demo); });
}

}  // namespace furious::cli
