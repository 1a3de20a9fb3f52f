#include "cli/dry_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/number.h"
#include "base/parallel.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "model/plan.h"
#include "report/table.h"
#include "tensor/arena.h"
#include "train/memory_plan.h"
#include "train/options.h"
#include "train/run.h"
#include "train/training.h"
#include "train/training_checkpoint.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kMeasuredSteps = 3;

std::string grouped(int64_t count) {
  std::string digits = std::to_string(count);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string memory_text(const TrainOptions& options, const ModelConfig& config, int64_t available) {
  const TrainingMemory memory = needed_memory(options, config, {});
  return fmt::format(
      "{} ({} for weights, gradients and optimizer, {} for activations) of {}: {}", gib(memory.total()),
      gib(memory.parameters), gib(memory.activations), gib(available),
      memory.total() <= available ? "fits" : "does not fit; " + memory_advice(options, config, available, {}));
}

// The options on a GPU that need not be here.
TrainOptions on_gpu(TrainOptions options) {
  options.device = "cuda:0";
  if (options.dtype == "f32") options.dtype = "bf16";  // what auto would have chosen there
  return options;
}

double median_step_seconds(Training& training) {
  const TrainOptions& options = training.options();
  training.step();                                           // allocates
  if (!training.model().device().is_cpu()) training.step();  // captured in a graph
  std::vector<double> seconds;
  for (int i = 0; i < kMeasuredSteps; ++i)
    seconds.push_back(static_cast<double>(options.batch * options.length) / training.step().tokens_per_second);
  std::ranges::sort(seconds);
  return seconds[kMeasuredSteps / 2];
}

}  // namespace

int64_t parse_bytes(const std::string& text) {
  static const std::map<std::string, double> units = {{"GB", 1e9}, {"GiB", 1 << 30}, {"G", 1e9},
                                                      {"MB", 1e6}, {"MiB", 1 << 20}, {"TB", 1e12}};
  const size_t unit = text.find_first_not_of("0123456789.");
  const auto number = parse_number<double>(text.substr(0, unit));
  const size_t letters = unit == std::string::npos ? unit : text.find_first_not_of(' ', unit);
  const auto found = units.find(letters == std::string::npos ? "" : text.substr(letters));
  require(number && *number > 0 && found != units.end() && *number * found->second < 0x1p62,
          "\"{}\" is not a size of memory; give a number and a unit, such as 80GB or 24GiB", text);
  return static_cast<int64_t>(*number * found->second);
}

DryRun::DryRun(CLI::App& command) {
  CLI::Option* const dry =
      command.add_flag("--dry-run", wanted_,
                       "Print parameters, memory, steps of an epoch and the time at a measured rate; write nothing");
  command.add_option("--assume-gpu", assumed_, "With --dry-run: whether it fits on a GPU with so much memory: 80GB")
      ->check(parsed_by([](const std::string& text) { parse_bytes(text); }))
      ->needs(dry);
}

void DryRun::run(const TrainOptions& given) const {
  check_train_options(given);
  const TrainOptions options = resolved(given);
  const ThreadLimit limit(threads_for(options));
  TrainData data = TrainData::open(options);
  const ModelConfig config = config_of(options, data);
  const Device device = device_from_name(options.device);
  const int64_t available = memory::available(device);
  const fs::path checkpoint = options.resume && !options.out.empty() ? resumed_checkpoint(options) : fs::path();
  const int64_t left = std::max<int64_t>(0, options.steps - (checkpoint.empty() ? 0 : step_of_checkpoint(checkpoint)));
  const bool fits = needed_memory(options, config, {}).total() <= available;
  Table table{{"dry run", ""}, {}};
  const auto row = [&](const std::string& name, const std::string& text) { table.rows.push_back({name, text}); };
  row("model", fmt::format("{}, {} layers of width {}, {} heads of {}, vocabulary {}", config.arch, config.layers,
                           config.hidden, config.heads(), config.head_dim, config.vocabulary));
  row("parameters", grouped(parameter_count(config)));
  row("optimizer", fmt::format("{}, {} schedule, rate {:.3g} to {:.3g}", options.optimizer, options.schedule,
                               options.lr, learning_rate(options, options.steps)));
  row("batch",
      fmt::format("{} x {} = {} tokens", options.batch, options.length, grouped(options.batch * options.length)));
  if (data.epoch_steps > 0)
    row("epoch",
        fmt::format("{} step{}; {} step{} {:.2f} epochs", grouped(data.epoch_steps), data.epoch_steps == 1 ? "" : "s",
                    grouped(options.steps), options.steps == 1 ? " is" : "s are",
                    static_cast<double>(options.steps) / static_cast<double>(data.epoch_steps)));
  if (!checkpoint.empty())
    row("resume",
        fmt::format("from {}, {} of {} steps are left", checkpoint.string(), grouped(left), grouped(options.steps)));
  row("memory on " + options.device, memory_text(options, config, available));
  if (!assumed_.empty())
    row(fmt::format("memory on a GPU of {}", assumed_), memory_text(on_gpu(options), config, parse_bytes(assumed_)));
  if (fits) {
    Training training(options, std::move(data));
    const double seconds = median_step_seconds(training);
    row("step",
        fmt::format("{:.3g} s, {:.0f} tokens/s on {}, median of {} steps", seconds,
                    static_cast<double>(options.batch * options.length) / seconds, options.device, kMeasuredSteps));
    row("time", fmt::format("{} for {} step{} on {}, without test losses, samples and checkpoints",
                            clock_text(seconds * static_cast<double>(left)), grouped(left), left == 1 ? "" : "s",
                            options.device));
  } else {
    row("time", fmt::format("not measured: it does not fit on {}", options.device));
  }
  fmt::print("{}", to_text(table));
}

}  // namespace furious::cli
