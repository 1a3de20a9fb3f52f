// `furious train`: train a model on token shards.
#include <fmt/format.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include "base/boundary.h"
#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/dry_run.h"
#include "cli/progress.h"
#include "cli/train_flags.h"
#include "data/utf8.h"
#include "dist/communicator.h"
#include "train/run.h"

namespace furious::cli {
namespace {

constexpr int64_t kSettled = 3;  // steps after which a step takes its usual time

struct TrainCommand {
  explicit TrainCommand(CLI::App& command) : flags(command, {}), recipe(command), dry_run(command) {
    command.add_option("--config", config, "Read options from this TOML file; flags override it");
  }
  TrainFlags flags;
  RecipeFlag recipe;
  DryRun dry_run;
  std::string config;

  TrainOptions resolve() const;
  void run() const;
};

void apply_config(TrainOptions& options, const std::string& path) {
  std::istringstream file(read_input(path));
  try {
    for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(file)) {
      if (item.name == "++" || item.name == "--") continue;  // the markers of a section
      require(item.parents.empty() && item.inputs.size() == 1, "\"{}\" is not a single value at the top level",
              item.fullname());
      set_train_option(options, item.name, bytes_of_utf8(item.inputs.front()));
    }
  } catch (const std::exception&) {
    fail("train: {}: {}", path, words_of(std::current_exception()));
  }
}

// A folder without a run that was to be resumed: an Error where nothing says what to start instead.
void check_name_of_run(const TrainOptions& options) {
  const std::filesystem::path folder(options.out);
  if (std::filesystem::exists(folder)) return;
  const std::vector<std::string> beside = runs_beside(folder);
  const std::string name = folder.filename().string();
  if (options.data.empty()) unknown_name("run", name, beside);
  if (const std::string near = nearest_name(name, beside); !near.empty())
    fmt::print("{} does not exist; did you mean {}?\n", options.out, near);
}

// Precedence: flags, the file, the recipe, the options the run was started with.
TrainOptions TrainCommand::resolve() const {
  TrainOptions chosen;
  const auto apply = [&](TrainOptions& options) {
    recipe.apply(options, [&](TrainOptions& given) {
      if (!config.empty()) apply_config(given, config);
      flags.apply(given);
    });
  };
  apply(chosen);
  if (!chosen.resume || chosen.out.empty()) return chosen;
  std::optional<TrainOptions> saved = options_of_run(chosen.out, chosen.resume_previous);
  if (!saved) {
    check_name_of_run(chosen);
    return chosen;
  }
  apply(*saved);
  return *saved;
}

std::string step_text(const TrainStep& step, int64_t steps, double seconds_left) {
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  MFU {:.0f} %  {} left", step.step, steps, step.loss,
                     step.tokens_per_second, 100 * step.mfu, clock_text(seconds_left));
}

// After the first steps: how long the rest will take.
std::string time_text(int64_t left, double seconds_per_step) {
  return fmt::format("{} for {} more steps of {:.3g} s, without test losses and checkpoints",
                     clock_text(seconds_per_step * static_cast<double>(left)), left, seconds_per_step);
}

void TrainCommand::run() const {
  const TrainOptions options = resolve();
  if (options.data.empty()) throw CLI::RequiredError("--data");
  if (dry_run) return dry_run.run(options);
  if (options.out.empty()) throw CLI::RequiredError("--out");
  std::signal(SIGPIPE,
              SIG_IGN);  // Ctrl-C also ends a `tee` at the other end of the pipe, before the checkpoint is saved
  ProgressLine line("train");
  int64_t first = 0;
  TrainObserver observer;
  observer.message = [&](const std::string& text) { line.print(text); };
  // Signals are handled from the first call by this thread on, after a step: until then there is nothing to save, and
  // they end the program at once, also while a large model is initialized.
  observer.stop = [thread = std::this_thread::get_id(), catching = false]() mutable {
    if (std::this_thread::get_id() == thread && !std::exchange(catching, true)) stop_on_signals();
    return stop_requested();
  };
  observer.step = [&](const TrainStep& step) {
    if (first == 0) first = step.step;
    announce_stops(step.step + 1);
    const double per_step = line.seconds() / static_cast<double>(step.step - first + 1);
    const auto computed = static_cast<double>(options.batch * options.length) / step.tokens_per_second;
    if (step.step == first + kSettled && step.step < options.steps)
      line.print(time_text(options.steps - step.step, computed));
    if (step.test_loss)
      line.print(fmt::format("step {:>6}  loss {:.4f}  test loss {:.4f}  lr {:.2e}  {:.0f} tokens/s", step.step,
                             step.loss, *step.test_loss, step.lr, step.tokens_per_second));
    if (!step.sample.empty()) line.print(fmt::format("step {:>6}  sample:\n{}\n", step.step, step.sample));
    if (line.due())
      line.show(step_text(step, options.steps, per_step * static_cast<double>(options.steps - step.step)));
  };
  const TrainResult result = train(options, observer);
  if (!Communicator::world().leads()) return;
  line.clear();
  fmt::print("{} after {} steps in {}; checkpoint {}\n", result.stopped ? "stopped" : "done", result.steps,
             clock_text(line.seconds()), result.checkpoint);
  if (result.stopped) fmt::print("resume with: furious train --out {} --resume\n", options.out);
}

}  // namespace

void add_train(CLI::App& app) {
  CLI::App* train = app.add_subcommand("train", "Train a model");
  auto command = std::make_shared<TrainCommand>(*train);
  const std::string text =
      "Ctrl-C saves a checkpoint and stops; --resume continues from it. Processes started with mpirun or srun, each\n"
      "with its own GPU or share of the cores, train data-parallel: mpirun -n 4 furious train ...\n"
      "Example: furious train --arch 2mamba --size tiny --data shards --out run --steps 2000 --lr 1e-3\n"
      "The paper's 2Mamba: furious train --paper --arch 2mamba-dt --data fineweb --out run\n";
  train->footer(fmt::format("{}{}\n{}", text, kGlossaryPage, kPaperPage));
  train->callback([command] { command->run(); });
}

}  // namespace furious::cli
