// Ablations: runs that differ in one option each, with the same batches, seeds and budget, in one folder,
//
//   OUT/runs/ROW/seed-123/     a run of `furious train`
//
// A second call resumes after an interruption.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "paper/suites.h"
#include "train/log.h"

namespace furious {

// The length in tokens at which the cache memory of rows is compared: the longest of the paper.
inline constexpr int64_t kStateTokens = 8192;

struct Curve {
  std::vector<double> x, y;  // x: steps
};

// A row, trained with one seed. Losses are NaN where there is none.
struct RowRun {
  uint64_t seed = 0;
  int64_t steps = 0;             // done
  bool finished = false;         // or diverged
  double train_loss = 0;         // mean of the last twentieth of the steps: single batches differ more than models do
  double test_loss = 0;          // the last
  double tokens_per_second = 0;  // median of the steps
  std::string diverged;          // the reason; empty if it did not
  Curve training, test;
  Curve values;  // the largest of the layers' value_rms
};

struct RowResult {
  std::string name, label;
  std::optional<PaperRow> paper;
  std::map<std::string, std::string> options;  // those of training, by name
  int64_t parameters = 0;
  int64_t state_bytes = 0;  // of one sequence after kStateTokens tokens
  std::vector<RowRun> runs;
};

struct Ablation {
  std::vector<std::string> words;  // of the command line, with --grid
  std::vector<RowResult> rows;
  bool stopped = false;

  bool finished() const;
  bool is_sweep() const;  // over a grid
};

// The results of a run of so many steps, from its log.
RowRun row_run(uint64_t seed, const RunLog& log, int64_t steps);

struct AblationOptions {
  std::vector<std::string> words;
  TrainOptions base;  // for all rows; its seed is the first, `out` the folder of the whole
  int64_t seeds = 1;
  std::vector<GridAxis> grid = {};  // `seed` in it lists the seeds instead

  std::vector<uint64_t> all_seeds() const;
};

// A run that is not finished, and the bytes that training it takes on its device.
struct AblationJob {
  std::string row;  // its name
  TrainOptions options;
  int64_t bytes = 0;
};

struct AblationObserver {
  std::function<void(const Ablation& so_far)> begin;  // all is checked, nothing is trained yet
  // May train some or all of these in its own way, as `furious train` would; what it leaves is trained afterwards.
  std::function<void(const std::vector<AblationJob>& jobs)> train;
  std::function<void(const RowResult& row, uint64_t seed, const TrainStep& step)> step;
  std::function<void(const Ablation& so_far, const RowResult& row, const RowRun& run)> run;  // one has ended
  std::function<bool()> stop;
};

Ablation run_ablation(const AblationOptions& options, const AblationObserver& observer = {});

}  // namespace furious
