#include "paper/ablation.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "model/cost.h"
#include "model/plan.h"
#include "tensor/arena.h"
#include "train/divergence.h"
#include "train/memory_plan.h"
#include "train/options.h"
#include "train/train_data.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kCurvePoints = 200;
constexpr const char* kSeed = "seed";
constexpr const char* kGridWord = "--grid ";

double mean_loss(std::span<const TrainStep> steps) {
  double sum = 0;
  for (const TrainStep& step : steps) sum += step.loss;
  return sum / static_cast<double>(steps.size());
}

double median_rate(const std::vector<TrainStep>& steps) {
  std::vector<double> rates;
  for (const TrainStep& step : steps) rates.push_back(step.tokens_per_second);
  std::ranges::nth_element(rates, rates.begin() + static_cast<int64_t>(rates.size() / 2));
  return rates[rates.size() / 2];
}

// Options that may change when a run is resumed.
bool may_change(const std::string& option) {
  static const std::set<std::string> names = {"accumulate", "device",     "threads", "recompute",     "out",
                                              "resume",     "save-every", "keep",    "sample-tokens", "log"};
  return names.contains(option);
}

// Refuses a folder with rows of another experiment. An option that an older run.toml does not name had its present
// default, except for the initialization, whose default has changed.
void check_same(const fs::path& run, const TrainOptions& options) {
  if (!fs::exists(run / "run.toml")) return;
  std::set<std::string> found;
  std::istringstream file(read_text(run / "run.toml"));
  for (std::string line; std::getline(file, line);) found.insert(line);
  const auto line_of = [&](const std::string& name) {
    const auto line = found.lower_bound(name + " = ");
    return line != found.end() && line->starts_with(name + " = ") ? *line : "";
  };
  std::istringstream defaults(to_toml({}));
  for (std::string line; std::getline(defaults, line);)
    if (const std::string name = line.substr(0, line.find(' ')); name != "initialization" && line_of(name).empty())
      found.insert(line);
  std::istringstream expected(to_toml(resolved(options)));
  for (std::string line; std::getline(expected, line);) {
    const std::string name = line.substr(0, line.find(' '));
    if (found.contains(line) || may_change(name)) continue;
    fail("ablate: {} was trained with {}, not with {}; use the same options, or choose another --out", run.string(),
         line_of(name).empty() ? "another " + name : line_of(name), line);
  }
}

class AblationRunner {
 public:
  AblationRunner(const AblationOptions& options, const AblationObserver& observer)
      : options_(options), observer_(observer) {}

  Ablation run();

 private:
  fs::path folder_of(const AblationRow& row, uint64_t seed) const {
    return fs::path(options_.base.out) / "runs" / row.folder() / fmt::format("seed-{}", seed);
  }
  TrainOptions options_of(const AblationRow& row, uint64_t seed) const;
  RowResult empty_result(const AblationRow& row) const;
  bool is_done(const TrainOptions& options, const RowRun& run) const;
  std::vector<AblationJob> jobs(const std::vector<AblationRow>& rows, const std::vector<uint64_t>& seeds) const;
  // Trains or resumes it. False if it was stopped, or is not done and all has been stopped.
  bool train_row(const AblationRow& row, uint64_t seed, RowResult& result);

  const AblationOptions& options_;
  const AblationObserver& observer_;
  Ablation ablation_;
};

TrainOptions AblationRunner::options_of(const AblationRow& row, uint64_t seed) const {
  TrainOptions options = row.options;
  options.seed = seed;
  options.out = folder_of(row, seed).string();
  options.resume = true;
  options.sample_every = 0;
  return options;
}

RowResult AblationRunner::empty_result(const AblationRow& row) const try {
  const ModelConfig config = model_config(row.options, TrainData::open(row.options).batches->vocabulary_size());
  std::map<std::string, std::string> texts = to_texts(resolved(row.options));
  for (const char* of_a_run : {"seed", "out", "resume"}) texts.erase(of_a_run);
  return {row.name,
          row.label,
          row.paper,
          std::move(texts),
          parameter_count(config),
          cache_numbers(config, kStateTokens) * static_cast<int64_t>(sizeof(float)),
          {}};
} catch (const Error& error) {
  fail("ablate: row {}: {}", row.name, error.what());
}

// A run killed after its last step may lack the checkpoint of it.
bool AblationRunner::is_done(const TrainOptions& options, const RowRun& run) const {
  return run.finished &&
         (!run.diverged.empty() || fs::exists(fs::path(options.out) / fmt::format("step-{:08}", options.steps)));
}

std::vector<AblationJob> AblationRunner::jobs(const std::vector<AblationRow>& rows,
                                              const std::vector<uint64_t>& seeds) const {
  std::vector<AblationJob> all;
  for (const uint64_t seed : seeds)
    for (const AblationRow& row : rows) {
      const TrainOptions options = options_of(row, seed), exact = resolved(options);
      if (is_done(options, row_run(seed, read_log(options.out), options.steps))) continue;
      const ModelConfig config = model_config(options, TrainData::open(options).batches->vocabulary_size());
      all.push_back({row.name, options, needed_memory(exact, config, {}).total()});
    }
  return all;
}

bool AblationRunner::train_row(const AblationRow& row, uint64_t seed, RowResult& result) {
  const TrainOptions options = options_of(row, seed);
  const auto newest = [&] { return row_run(seed, read_log(options.out), options.steps); };
  RowRun run = newest();
  bool stopped = false;
  if (!is_done(options, run)) {
    if (ablation_.stopped) return false;
    TrainObserver observer;
    observer.stop = observer_.stop;
    observer.step = [&](const TrainStep& step) {
      if (observer_.step) observer_.step(result, seed, step);
    };
    try {
      stopped = train(options, observer).stopped;
    } catch (const Diverged&) {  // a result: the log has the reason
    }
    Arena::of(device_from_name(resolved(options).device)).trim();  // the next row has other sizes
    run = newest();
  }
  result.runs.push_back(run);
  if (observer_.run) observer_.run(ablation_, result, run);
  return !stopped;
}

Ablation AblationRunner::run() {
  const TrainOptions& base = options_.base;
  require(!base.data.empty(),
          "ablate: no data; give --data with a folder written by `furious tokenize`, or synthetic:recall");
  require(!base.out.empty(), "ablate: no folder for the runs; give --out");
  require(options_.seeds >= 1, "ablate: {} seeds, expected 1 or more", options_.seeds);
  check_train_options(base);
  const std::vector<uint64_t> seeds = options_.all_seeds();
  std::vector<GridAxis> grid = options_.grid;
  std::erase_if(grid, [](const GridAxis& axis) { return axis.key == kSeed; });
  const std::vector<AblationRow> rows = ablation_rows(options_.words, base, grid);
  ablation_.words = options_.words;
  for (const GridAxis& axis : options_.grid)
    ablation_.words.push_back(fmt::format("{}{}={}", kGridWord, axis.key, fmt::join(axis.values, ",")));
  for (const AblationRow& row : rows) {
    ablation_.rows.push_back(empty_result(row));
    for (const uint64_t seed : seeds) check_same(folder_of(row, seed), options_of(row, seed));
  }
  std::error_code problem;
  fs::create_directories(base.out, problem);
  require(!problem, "ablate: cannot create the folder {}: {}", base.out, problem.message());
  const DirectoryLock lock(base.out);
  if (observer_.begin) observer_.begin(ablation_);
  if (observer_.train) observer_.train(jobs(rows, seeds));
  // All rows with the first seed first, so that the table is complete early.
  for (const uint64_t seed : seeds)
    for (size_t row = 0; row < rows.size(); ++row) {
      ablation_.stopped = ablation_.stopped || (observer_.stop && observer_.stop());
      if (!train_row(rows[row], seed, ablation_.rows[row])) ablation_.stopped = true;
    }
  return ablation_;
}

}  // namespace

std::vector<uint64_t> AblationOptions::all_seeds() const {
  std::vector<uint64_t> all;
  const auto listed = std::ranges::find(grid, kSeed, &GridAxis::key);
  if (listed == grid.end()) {
    for (int64_t i = 0; i < seeds; ++i) all.push_back(base.seed + static_cast<uint64_t>(i));
    return all;
  }
  for (const std::string& text : listed->values) {
    TrainOptions one;
    set_train_option(one, kSeed, text);
    all.push_back(one.seed);
  }
  return all;
}

bool Ablation::is_sweep() const {
  return std::ranges::any_of(words, [](const std::string& word) { return word.starts_with(kGridWord); });
}

bool Ablation::finished() const {
  return !stopped && std::ranges::all_of(rows, [](const RowResult& row) {
    return !row.runs.empty() && std::ranges::all_of(row.runs, &RowRun::finished);
  });
}

RowRun row_run(uint64_t seed, const RunLog& log, int64_t steps) {
  RowRun run;
  run.seed = seed;
  run.diverged = log.diverged;
  run.train_loss = run.test_loss = run.tokens_per_second = kNaN;
  if (log.steps.empty()) {
    run.finished = !run.diverged.empty();
    return run;
  }
  run.steps = log.steps.back().step;
  run.finished = run.steps >= steps || !run.diverged.empty();
  const auto count = static_cast<int64_t>(log.steps.size());
  const std::span all(log.steps);
  run.train_loss = mean_loss(all.last(static_cast<size_t>(std::min(count, std::max<int64_t>(1, steps / 20)))));
  run.tokens_per_second = median_rate(log.steps);
  const int64_t width = (steps + kCurvePoints - 1) / kCurvePoints;  // steps to a point of the curve
  for (int64_t begin = 0; begin < count; begin += width) {
    const auto part = all.subspan(static_cast<size_t>(begin), static_cast<size_t>(std::min(width, count - begin)));
    run.training.x.push_back(static_cast<double>(part.front().step + part.back().step) / 2);
    run.training.y.push_back(mean_loss(part));
  }
  for (const TrainStep& step : log.steps) {
    if (step.test_loss) {
      run.test_loss = *step.test_loss;
      run.test.x.push_back(static_cast<double>(step.step));
      run.test.y.push_back(*step.test_loss);
    }
    if (!step.value_rms.empty()) {
      run.values.x.push_back(static_cast<double>(step.step));
      run.values.y.push_back(std::ranges::max(step.value_rms));
    }
  }
  return run;
}

Ablation run_ablation(const AblationOptions& options, const AblationObserver& observer) {
  return AblationRunner(options, observer).run();
}

}  // namespace furious
