// `furious bench step`: training steps, beside the floor that the matrix rate of this machine sets.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"
#include "cli/bench_profile.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "cli/train_flags.h"
#include "data/batch_rows.h"
#include "model/cost.h"
#include "model/mean_decay.h"
#include "model/plan.h"
#include "ops/matmul.h"
#include "tensor/arena.h"
#include "train/training.h"

namespace furious::cli {
namespace {

// Random token ids.
class RandomBatches final : public BatchSource {
 public:
  RandomBatches(int64_t batch, int64_t length, int32_t vocabulary)
      : batch_(batch), length_(length), vocabulary_(vocabulary) {}
  int64_t batch() const override { return batch_; }
  int64_t length() const override { return length_; }
  int32_t vocabulary_size() const override { return vocabulary_; }
  Batch at(int64_t step, RowRange range) const override {
    BatchRows rows(batch_, length_, range, 0);
    const auto token = [&](uint64_t place) {
      const uint32_t bits = random_bits(1, static_cast<uint64_t>(step), place).word[0];
      return static_cast<int32_t>(bits % static_cast<uint32_t>(vocabulary_));
    };
    for (int64_t row = 0; row < rows.count(); ++row) {
      for (int64_t t = 0; t < length_; ++t) {
        const auto place = static_cast<uint64_t>((rows.first() + row) * (length_ + 1) + t);
        rows.inputs(row)[t] = token(place);
        rows.targets(row)[t] = token(place + 1);
      }
    }
    return rows.finish();
  }

 private:
  int64_t batch_, length_;
  int32_t vocabulary_;
};

// 19 M parameters with a vocabulary of 32,000.
TrainOptions default_options() {
  TrainOptions options;
  options.hidden = 256;
  options.intermediate = 512;
  options.heads = 4;
  options.layers = 4;
  options.batch = 4;
  return options;
}

struct StepBench {
  explicit StepBench(CLI::App& command)
      : flags(command, default_options(),
              {"size", "hidden", "intermediate", "heads", "layers", "qk-heads", "tie-embeddings", "batch", "length",
               "accumulate", "device", "dtype", "threads", "recompute", "reduce", "timeout", "optimizer"}) {}

  TrainFlags flags;
  std::string preset = "2mamba";
  int32_t vocabulary = 32000;
  int64_t steps = 5;
  bool no_graph = false, profile = false;
  std::optional<double> mean_decay;
  std::string json;

  TrainOptions resolve() const;
  struct Measured {
    TrainStep median;
    int64_t peak = 0;  // bytes, of the first step
  };
  std::unique_ptr<Training> make_trainer(const TrainOptions& options, const DataParallel& parallel = {}) const;
  Measured measure(Training& trainer) const;
  StepProfile profiled(Training& trainer, const TrainOptions& options, double rate) const;
  void run() const;
  void run(const DataParallel& parallel) const;
};

// The size's name, or hidden/intermediate/heads/layers.
std::string size_text(const TrainOptions& options, const ModelConfig& config) {
  if (options.hidden + options.intermediate + options.heads + options.layers == 0) return options.size;
  return fmt::format("{}/{}/{}/{}", config.hidden, config.intermediate, config.heads(), config.layers);
}

TrainOptions StepBench::resolve() const {
  TrainOptions named, options = default_options();
  named.size.clear();
  flags.apply(named);
  if (!named.size.empty()) options.hidden = options.intermediate = options.heads = options.layers = 0;
  flags.apply(options);
  options.arch = preset;
  check_train_options(options);
  return options;
}

StepBench::Measured StepBench::measure(Training& trainer) const {
  if (no_graph) trainer.disable_graph();
  Arena& arena = Arena::of(trainer.model().device());
  arena.reset_peak();
  trainer.step();  // allocates
  const auto peak = static_cast<int64_t>(arena.usage().peak);
  trainer.step();  // on a GPU captured in a graph
  std::vector<TrainStep> done;
  for (int64_t i = 0; i < steps; ++i) done.push_back(trainer.step());
  const auto faster = [](const TrainStep& a, const TrainStep& b) { return a.tokens_per_second > b.tokens_per_second; };
  std::nth_element(done.begin(), done.begin() + steps / 2, done.end(), faster);
  return {done[static_cast<size_t>(steps / 2)], peak};
}

// The step with the median time. On a GPU the first one allocates what the graph had.
StepProfile StepBench::profiled(Training& trainer, const TrainOptions& options, double rate) const {
  const Device device = trainer.model().device();
  const auto ranks = static_cast<int64_t>(Communicator::world().size());
  const std::vector<WorkCost> costs = training_costs(trainer.model().config(), options.batch / ranks, options.length,
                                                     device, trainer.model().compute().activations);
  const StepRates rates{rate, copy_rate(device)};
  std::vector<StepProfile> done;
  for (int64_t i = 0; i <= steps; ++i) {
    Profiler profiler(device);
    const double tokens_per_second = trainer.step(&profiler).tokens_per_second;
    const double seconds = static_cast<double>(options.batch * options.length) / tokens_per_second;
    if (i > 0) done.emplace_back(profiler.rows(), costs, seconds, rates);
  }
  std::ranges::nth_element(done, done.begin() + steps / 2, {}, &StepProfile::seconds);
  return done[static_cast<size_t>(steps / 2)];
}

TrainData random_data(const TrainOptions& options, int32_t vocabulary) {
  TrainData data;
  data.batches = std::make_unique<RandomBatches>(options.batch, options.length, vocabulary);
  return data;
}

// One row of a batch, at most this long: enough for the mean of the decays.
Tensor some_tokens(const Training& trainer) {
  constexpr int64_t kMost = 512;
  const Tensor row = trainer.data().batches->at(0, {0, 1}).inputs;
  return row.slice(1, 0, std::min(kMost, row.size(1)));
}

std::unique_ptr<Training> StepBench::make_trainer(const TrainOptions& options, const DataParallel& parallel) const {
  TrainData data = random_data(options, vocabulary);
  if (!mean_decay) return std::make_unique<Training>(options, std::move(data), parallel);
  const ModelConfig config = with_settable_decay(model_config(options, vocabulary));
  auto trainer = std::make_unique<Training>(options, config, std::move(data), parallel);
  set_mean_log_decay(trainer->model(), some_tokens(*trainer), *mean_decay);
  return trainer;
}

// Speed of several ranks together, beside the speed of each with its own rows and without communication, all at the
// same time.
struct Scaling {
  std::vector<double> alone, together;  // tokens/s of each rank
  double efficiency = 1;                // of the slowest
  RankTimes times;

  nlohmann::ordered_json json() const {
    return {{"ranks", times.ranks},
            {"tokens_per_second_of_ranks", together},
            {"tokens_per_second_alone", alone},
            {"efficiency", efficiency},
            {"waiting_seconds", times.waiting_seconds},
            {"slowest", times.slowest},
            {"slowest_seconds", times.slowest_seconds},
            {"fastest", times.fastest},
            {"fastest_seconds", times.fastest_seconds}};
  }
};

void StepBench::run() const {
  Communicator& ranks = Communicator::world();
  run_on_all_ranks(ranks, [&] { run(DataParallel{ranks}); });
}

void StepBench::run(const DataParallel& parallel) const {
  const int ranks = parallel.ranks.size();
  std::optional<JsonFile> file;
  if (parallel.ranks.leads()) file.emplace(json);
  TrainOptions options;
  parallel.ranks.agree([&] {
    options = resolved(resolve(), parallel.ranks);
    check_division(options, ranks);
  });
  check_same_everywhere(options,
                        {{"--vocab", std::to_string(vocabulary)},
                         {"--steps", std::to_string(steps)},
                         {"--no-graph", no_graph ? "true" : "false"},
                         {"--profile", profile ? "true" : "false"},
                         {"--mean-decay", mean_decay ? std::to_string(*mean_decay) : ""}},
                        parallel.ranks);
  parallel.ranks.set_timeout(options.timeout);
  const Device device = usable_device(options.device);
  const ThreadLimit limit(threads_for(options, parallel.ranks));
  Scaling scaling;
  if (ranks > 1) {
    TrainOptions own = options;
    own.batch /= ranks;
    const auto trainer = make_trainer(own);
    scaling.alone = parallel.ranks.all_gather(measure(*trainer).median.tokens_per_second);
  }
  Arena::of(device).trim();
  const auto trainer = make_trainer(options, parallel);
  const auto [median, peak] = measure(*trainer);
  const ModelConfig& config = trainer->model().config();
  const double flops = training_flops(config, options.batch, options.length) / ranks;
  const double tokens = static_cast<double>(options.batch / ranks * options.length);  // of a rank
  const double seconds = tokens / (median.tokens_per_second / ranks);
  const double rate = flops / seconds / median.mfu;
  std::optional<StepProfile> profile_of_step;
  if (profile) profile_of_step = profiled(*trainer, options, rate);
  if (ranks > 1) {
    scaling.together = parallel.ranks.all_gather(median.tokens_per_second / ranks);
    scaling.efficiency = std::ranges::min(scaling.together) / std::ranges::min(scaling.alone);
    scaling.times = *median.ranks;
  }
  if (!parallel.ranks.leads()) return;

  if (const std::string slow = slow_precision(options); !slow.empty()) fmt::print(stderr, "warning: {}\n", slow);
  fmt::print("{}: {:.1f} M parameters, {} layers of width {}, batch {} x {} tokens, {} products, {}\n", config.arch,
             static_cast<double>(parameter_count(config)) / 1e6, config.layers, config.hidden, options.batch,
             options.length, options.dtype, device.is_cpu() ? counted(furious::threads(), "thread") : options.device);
  fmt::print(
      "{:.0f} tokens/s, median of {} steps of {:.2f} ms; {:.1f} MFLOP/token, {:.0f} GFLOP/s, {:.0f} % of the {:.0f} "
      "of a "
      "large product ({}); peak {:.2f} GB (estimated {:.2f})\n",
      median.tokens_per_second, steps, seconds * 1e3, flops / tokens / 1e6, flops / seconds / 1e9, 100 * median.mfu,
      rate / 1e9, matmul_library(device), static_cast<double>(peak) / 1e9,
      static_cast<double>(trainer->memory().total()) / 1e9);
  nlohmann::ordered_json result{{"preset", options.arch},
                                {"size", size_text(options, config)},
                                {"parameters", parameter_count(config)},
                                {"length", options.length},
                                {"batch", options.batch},
                                {"device", options.device},
                                {"dtype", options.dtype},
                                {"threads", threads()},
                                {"tokens_per_second", median.tokens_per_second},
                                {"gflops", flops / seconds / 1e9},
                                {"mfu", median.mfu},
                                {"matrix_gflops", rate / 1e9},
                                {"peak_bytes", peak}};
  if (ranks > 1) {
    fmt::print(
        "{} ranks: {:.0f} tokens/s each; {:.0f} without communication, scaling efficiency {:.1f} %; {:.2f} ms of a "
        "step "
        "in communication; computation needed {:.2f} ms (rank {}) to {:.2f} ms (rank {})\n",
        ranks, fmt::join(scaling.together, ", "), fmt::join(scaling.alone, ", "), 100 * scaling.efficiency,
        1e3 * scaling.times.waiting_seconds, 1e3 * scaling.times.fastest_seconds, scaling.times.fastest,
        1e3 * scaling.times.slowest_seconds, scaling.times.slowest);
    result["scaling"] = scaling.json();
  }
  if (const std::vector<double> decays = mean_log_decays(trainer->model(), some_tokens(*trainer)); !decays.empty()) {
    const auto [strongest, weakest] = std::ranges::minmax(decays);
    const double mean = std::accumulate(decays.begin(), decays.end(), 0.0) / static_cast<double>(decays.size());
    fmt::print("mean log-decay {:.4g} ({}), {:.4g} to {:.4g} in the layers\n", mean,
               mean_decay ? "set by --mean-decay" : "new weights", strongest, weakest);
    result["mean_log_decay"] = mean;
  }
  if (profile_of_step) {
    fmt::print("\n{}\n", profile_of_step->text(seconds));
    result["profile"] = profile_of_step->json();
  }
  file->write(result);
}

}  // namespace

void add_bench_step(CLI::App& bench) {
  CLI::App* step = bench.add_subcommand("step", "Measure training steps");
  auto command = std::make_shared<StepBench>(*step);
  step->add_option("--preset,--arch", command->preset, "Architecture; `furious presets` lists them")
      ->capture_default_str();
  step->add_option("--vocab", command->vocabulary, "Vocabulary size of the model")
      ->check(CLI::Range(2, 1 << 30))
      ->capture_default_str();
  step->add_option("--steps", command->steps, "Number of steps to take the median of")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  step->add_flag("--no-graph", command->no_graph, "On a GPU, launch kernels one by one instead of as a CUDA graph");
  step->add_option(
          "--mean-decay", command->mean_decay,
          "Mean log-decay of every layer, such as -0.001; new weights have strong ones, which erase most of the "
          "past")
      ->check(CLI::Range(-20.0, -1e-6));
  step->add_flag("--profile", command->profile,
                 "Also time the operations of a step one by one, on a GPU without a graph");
  add_json(*step, command->json, "Write the result to this JSON file");
  step->footer(
      "Example: furious bench step --preset softmax --size mini --length 1024 --batch 2\n"
      "Example: furious bench step --preset 2mamba --mean-decay -0.001 --profile");
  step->callback([command] { command->run(); });
}

}  // namespace furious::cli
