// `furious train`: train a model on token shards.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <set>
#include <sstream>

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
#include "model/checkpoint.h"
#include "model/config_json.h"
#include "model/safetensors.h"
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
  void take_model_options(TrainOptions& options, const TrainOptions& from) const;
  void follow_init(TrainOptions& options) const;
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
  require(!options.data.empty() || !beside.empty(), "train: there is no run {} to resume; --data starts a new one",
          options.out);
  if (options.data.empty()) unknown_name("run", name, beside);
  if (const std::string near = nearest_name(name, beside); !near.empty())
    fmt::print("{} does not exist; did you mean {}?\n", options.out, near);
}

// Throws if an option of the command line says something else than the model of --init is.
void check_given(const TrainOptions& options, const ModelConfig& model, const std::set<std::string>& given) {
  const auto check = [&](const char* name, auto asked, auto own) {
    require(!given.contains(name) || asked == own, "train: --{} {}, but --init {} has {}; leave --{} out", name, asked,
            options.init, own, name);
  };
  const auto check_size = [&](const char* name, int64_t asked, int64_t own) {
    if (asked != 0) check(name, asked, own);  // 0: that of --size
  };
  check_size("hidden", options.hidden, model.hidden);
  check_size("intermediate", options.intermediate, model.intermediate);
  check_size("layers", options.layers, model.layers);
  check_size("qk-heads", options.qk_heads, model.k_heads);
  check_size("qk-dim", options.qk_dim, model.qk_dim);
  check("tie-embeddings", options.tie_embeddings, model.tie_embeddings);
  BlockConfig changed = model.block;
  for (const auto& [key, value] : key_values(options.switches)) set_switch(changed, key, value);
  require(!given.contains("switches") || changed == model.block,
          "train: --switches {} would change the model of --init {}; leave --switches out", options.switches,
          options.init);
  const ModelConfig size = model_config("2mamba", options.size, model.vocabulary);
  const auto differs = [&](const char* name, int64_t asked, int64_t own) {
    return !given.contains(name) && asked != own;
  };
  require(!given.contains("size") ||
              !(differs("hidden", size.hidden, model.hidden) || differs("layers", size.layers, model.layers) ||
                differs("intermediate", size.intermediate, model.intermediate)),
          "train: --size {} has {} layers of width {}, but --init {} has {} of width {}; leave --size out",
          options.size, size.layers, size.hidden, options.init, model.layers, model.hidden);
}

// Those that were not given.
void TrainCommand::take_model_options(TrainOptions& options, const TrainOptions& from) const {
  const std::set<std::string> given = flags.given();
  for (const TrainOption& option : train_options())
    if (std::ranges::count(model_option_names(), option.name) > 0 && !given.contains(option.name))
      option.set(options, option.get(from));
}

// A new run from the weights of a model: the options say what that is.
void TrainCommand::follow_init(TrainOptions& options) const {
  if (options.init.empty()) return;
  std::error_code ignored;
  if (std::filesystem::exists(options.init, ignored) && !has_config(options.init)) {
    const SafetensorsReader weights(checkpoint_of(options.init));  // or it is no model
    fail(
        "train: {0} has no config.json beside it, which --init needs; write a model that has one, and start from that: "
        "furious export {0} --arch ARCH --to safetensors --out DIR",
        options.init);
  }
  const std::set<std::string> given = flags.given();
  const ModelConfig model = load_config(options.init, given.contains("arch") ? options.arch : "",
                                        given.contains("heads") ? options.heads : 0);
  check_given(options, model, given);
  take_model_options(options, model_options(model));
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
  std::optional<TrainOptions> saved;
  if (chosen.resume && !chosen.out.empty()) {
    saved = options_of_run(chosen.out, chosen.resume_previous);
    if (!saved) check_name_of_run(chosen);
  }
  if (!saved) {
    follow_init(chosen);
    return chosen;
  }
  if (checkpoints_in(chosen.out).empty() && Communicator::world().leads())
    fmt::print("{} has no checkpoint; options that are not given are those of its run.toml\n", chosen.out);
  TrainOptions resumed = *saved;
  apply(resumed);
  if (!saved->init.empty()) take_model_options(resumed, *saved);  // not those of a file or recipe
  return resumed;
}

std::string step_text(const TrainStep& step, int64_t steps, double seconds_left) {
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  MFU {:.0f} %  {} left  lr {:.2e}", step.step, steps,
                     step.loss, step.tokens_per_second, 100 * step.mfu, clock_text(seconds_left), step.lr);
}

// After the first steps: how long the rest will take.
std::string time_text(int64_t left, double seconds_per_step) {
  return fmt::format("{} for {} of {:.3g} s, without test losses and checkpoints",
                     clock_text(seconds_per_step * static_cast<double>(left)), counted(left, "more step"),
                     seconds_per_step);
}

void TrainCommand::run() const {
  const TrainOptions options = resolve();
  if (options.data.empty()) throw CLI::RequiredError("--data");
  if (dry_run) return dry_run.run(options);
  if (options.out.empty()) throw CLI::RequiredError("--out");
  std::signal(SIGPIPE,
              SIG_IGN);  // Ctrl-C also ends a `tee` at the other end of the pipe, before the checkpoint is saved
  ProgressLine line("train", ProgressLine::kMinute);
  int64_t first = 0;
  TrainObserver observer;
  observer.message = [&](const std::string& text) { line.print(text); };
  // Signals are handled from the first step on: until then there is nothing to save, and they end the program at once,
  // also while a large model is initialized.
  observer.begin = [](int64_t step) {
    if (Communicator::world().leads()) announce_stops(step);
    stop_on_signals();
  };
  observer.stop = stop_requested;
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
  fmt::print("{} after {} in {}; checkpoint {}\n", result.stopped ? "stopped" : "done", counted(result.steps, "step"),
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
