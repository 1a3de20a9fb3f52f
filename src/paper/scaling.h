// Loss against parameters, training tokens and floating-point operations of runs, with power laws fitted to them.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "paper/power_law.h"
#include "report/chart.h"
#include "report/table.h"

namespace furious {

struct ScalingRun {
  std::string name, arch;
  double parameters = 0, tokens = 0, flops = 0;  // of the whole run
  double loss = 0;
};

struct ScalingOptions {
  bool training_loss = false;      // the mean of the last twentieth of the steps, instead of the last test loss
  bool without_embedding = false;  // count parameters without embedding and output matrix
};

// A finished run from its folder: log.jsonl, run.toml and config.json of its newest checkpoint; weights are not needed.
// A run that is not finished, has diverged or has no such loss is an Error that says so.
ScalingRun scaling_run(const std::filesystem::path& folder, const ScalingOptions& options = {});

// Of the runs of one architecture with equal parameters and tokens, as a sweep of learning rates gives them, the one
// with the lowest loss.
std::vector<ScalingRun> best_runs(const std::vector<ScalingRun>& runs);

enum class ScalingAxis : uint8_t { parameters, tokens, flops };
inline constexpr ScalingAxis kScalingAxes[] = {ScalingAxis::parameters, ScalingAxis::tokens, ScalingAxis::flops};
std::string name_of(ScalingAxis axis);

// Runs of one architecture that differ along one axis: of one number of tokens along the axis of parameters, of one
// number of parameters along that of tokens; along that of operations those that no other run beats with fewer. Runs
// that all lie at one place make no curve.
struct ScalingCurve {
  ScalingAxis axis = ScalingAxis::parameters;
  std::string name;
  std::vector<double> x, y;     // x ascending
  std::optional<PowerLaw> law;  // where there are enough different x
};

struct Scaling {
  std::vector<ScalingRun> runs;
  std::vector<ScalingCurve> curves;
};

// Throws where no curve has enough points for a fit.
Scaling scaling_of(std::vector<ScalingRun> runs);

Table runs_table(const Scaling& scaling);
Table laws_table(const Scaling& scaling);
// Points and fitted lines of the curves along an axis; none where there are none.
std::optional<Chart> scaling_chart(const Scaling& scaling, ScalingAxis axis, const std::string& loss);
nlohmann::ordered_json to_json(const Scaling& scaling);

}  // namespace furious
