// `furious train`: a model from token shards.
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include "base/boundary.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "cli/train_flags.h"
#include "data/utf8.h"
#include "dist/communicator.h"

namespace furious::cli {
namespace {

struct TrainCommand {
  explicit TrainCommand(CLI::App& command) : flags(command, {}), recipe(command) {
    command.add_option("--config", config, "TOML file with these options; flags win over it");
  }
  TrainFlags flags;
  RecipeFlag recipe;
  std::string config;

  TrainOptions resolve() const;
  void run() const;
};

void apply_config(TrainOptions& options, const std::string& path) {
  std::istringstream file(read_input(path));
  try {
    for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(file)) {
      if (item.name == "++" || item.name == "--") continue;  // where a section begins and ends
      require(item.parents.empty() && item.inputs.size() == 1, "\"{}\" is not one value at the top of the file",
              item.fullname());
      set_train_option(options, item.name, bytes_of_utf8(item.inputs.front()));
    }
  } catch (const std::exception&) {
    fail("train: {}: {}", path, words_of(std::current_exception()));
  }
}

// Flags over the file over the recipe over what the run began with.
TrainOptions TrainCommand::resolve() const {
  TrainOptions asked;
  const auto apply = [&](TrainOptions& options) {
    recipe.apply(options, [&](TrainOptions& given) {
      if (!config.empty()) apply_config(given, config);
      flags.apply(given);
    });
  };
  apply(asked);
  if (!asked.resume || asked.out.empty()) return asked;
  std::optional<TrainOptions> saved = options_of_run(asked.out, asked.resume_previous);
  if (!saved) return asked;
  apply(*saved);
  return *saved;
}

std::string step_text(const TrainStep& step, int64_t steps, double seconds_left) {
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  MFU {:.0f} %  {} left", step.step, steps, step.loss,
                     step.tokens_per_second, 100 * step.mfu, clock_text(seconds_left));
}

void TrainCommand::run() const {
  const TrainOptions options = resolve();
  if (options.data.empty()) throw CLI::RequiredError("--data");
  if (options.out.empty()) throw CLI::RequiredError("--out");
  std::signal(SIGPIPE, SIG_IGN);  // Ctrl-C also ends the `tee` that reads along, before the checkpoint is saved
  ProgressLine line("train");
  int64_t first = 0;
  TrainObserver observer;
  observer.message = [&](const std::string& text) { line.print(text); };
  // Signals are caught from the first time that this thread asks, after a step: until then there is nothing to save,
  // and they end the program at once, however large the model that is being built.
  observer.stop = [thread = std::this_thread::get_id(), catching = false]() mutable {
    if (std::this_thread::get_id() == thread && !std::exchange(catching, true)) stop_on_signals();
    return stop_requested();
  };
  observer.step = [&](const TrainStep& step) {
    if (first == 0) first = step.step;
    const double per_step = line.seconds() / static_cast<double>(step.step - first + 1);
    if (step.test_loss)
      line.print(fmt::format("step {:>6}  loss {:.4f}  test loss {:.4f}  lr {:.2e}  {:.0f} tokens/s", step.step,
                             step.loss, *step.test_loss, step.lr, step.tokens_per_second));
    if (!step.sample.empty()) line.print(fmt::format("step {:>6}  writes:\n{}\n", step.step, step.sample));
    if (line.due())
      line.show(step_text(step, options.steps, per_step * static_cast<double>(options.steps - step.step)));
  };
  const TrainResult result = train(options, observer);
  if (!Communicator::world().leads()) return;
  line.clear();
  fmt::print("{} after {} steps in {}; checkpoint {}\n", result.stopped ? "stopped" : "done", result.steps,
             clock_text(line.seconds()), result.checkpoint);
  if (result.stopped) fmt::print("go on with: furious train --out {} --resume\n", options.out);
}

}  // namespace

void add_train(CLI::App& app) {
  CLI::App* train = app.add_subcommand("train", "Train a model");
  auto command = std::make_shared<TrainCommand>(*train);
  const std::string text =
      "Ctrl-C saves a checkpoint and ends; --resume goes on from there. Several processes, each with a GPU of its own "
      "or\n"
      "a part of the cores, share every batch when mpirun or srun starts them: mpirun -n 4 furious train ...\n"
      "Example: furious train --arch 2mamba --size tiny --data shards --out run --steps 2000 --lr 1e-3\n"
      "The paper's 2Mamba: furious train --paper --arch 2mamba-dt --data fineweb --out run\n";
  train->footer(text + kPaperPage);
  train->callback([command] { command->run(); });
}

}  // namespace furious::cli
