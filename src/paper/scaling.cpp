#include "paper/scaling.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/file.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "model/plan.h"
#include "paper/ablation.h"
#include "train/options.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

double value_on(ScalingAxis axis, const ScalingRun& run) {
  switch (axis) {
    case ScalingAxis::parameters:
      return run.parameters;
    case ScalingAxis::tokens:
      return run.tokens;
    default:
      return run.flops;
  }
}

// 1.23M
std::string short_number(double value) {
  for (const auto& [unit, size] : {std::pair{"T", 1e12}, {"G", 1e9}, {"M", 1e6}, {"k", 1e3}})
    if (value >= size) return fmt::format("{:.3g}{}", value / size, unit);
  return fmt::format("{:.3g}", value);
}

// Runs that no other reaches or beats with fewer operations.
std::vector<ScalingRun> frontier(std::vector<ScalingRun> runs) {
  std::ranges::sort(runs, {}, &ScalingRun::flops);
  std::vector<ScalingRun> kept;
  for (const ScalingRun& run : runs)
    if (kept.empty() || run.loss < kept.back().loss) kept.push_back(run);
  return kept;
}

ScalingCurve curve_of(ScalingAxis axis, const std::string& name, std::vector<ScalingRun> runs) {
  ScalingCurve curve{axis, name, {}, {}, {}};
  if (axis == ScalingAxis::flops) runs = frontier(std::move(runs));
  std::ranges::sort(runs, {}, [&](const ScalingRun& run) { return value_on(axis, run); });
  for (const ScalingRun& run : runs) {
    curve.x.push_back(value_on(axis, run));
    curve.y.push_back(run.loss);
  }
  if (std::set<double>(curve.x.begin(), curve.x.end()).size() >= kFewestPoints)
    curve.law = fit_power_law(curve.x, curve.y);
  return curve;
}

void add_curves(Scaling& scaling, ScalingAxis axis) {
  std::map<std::string, std::map<double, std::vector<ScalingRun>>> groups;  // by architecture and what stays the same
  for (const ScalingRun& run : scaling.runs) {
    const double same = axis == ScalingAxis::parameters ? run.tokens : axis == ScalingAxis::tokens ? run.parameters : 0;
    groups[run.arch][same].push_back(run);
  }
  for (const auto& [arch, by_same] : groups)
    for (const auto& [same, runs] : by_same) {
      const char* unit = axis == ScalingAxis::parameters ? "tokens" : "parameters";
      ScalingCurve curve =
          curve_of(axis, by_same.size() == 1 ? arch : fmt::format("{}, {} {}", arch, short_number(same), unit), runs);
      if (curve.x.front() < curve.x.back()) scaling.curves.push_back(std::move(curve));
    }
}

std::string with_error(double value, double error) {
  return std::isfinite(error) ? fmt::format("{:.3f} ± {:.3f}", value, error) : fmt::format("{:.3f}", value);
}

Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

}  // namespace

ScalingRun scaling_run(const std::filesystem::path& folder, const ScalingOptions& options) {
  const TrainOptions trained = from_toml(read_text(folder / "run.toml"));
  const ModelConfig config = load_config(checkpoint_of(folder));
  const RowRun run = row_run(trained.seed, read_log(folder), trained.steps);
  require(run.diverged.empty(), "{} has diverged: {}", folder.string(), run.diverged);
  require(run.steps >= trained.steps, "{} is at step {} of {}; finish it", folder.string(), run.steps, trained.steps);
  const double loss = options.training_loss ? run.train_loss : run.test_loss;
  require(std::isfinite(loss), "{} has no {} loss; {}", folder.string(), options.training_loss ? "training" : "test",
          options.training_loss ? "train it again" : "use --loss train");
  const auto steps = static_cast<double>(trained.steps);
  ScalingRun point{"", config.arch, static_cast<double>(parameter_count(config)), 0, 0, loss};
  if (options.without_embedding)
    point.parameters -= static_cast<double>(config.vocabulary * config.hidden * (config.tie_embeddings ? 1 : 2));
  point.tokens = steps * static_cast<double>(trained.batch * trained.length);
  point.flops = steps * training_flops(config, trained.batch, trained.length);
  return point;
}

std::vector<ScalingRun> best_runs(const std::vector<ScalingRun>& runs) {
  std::map<std::tuple<std::string, double, double>, ScalingRun> best;
  for (const ScalingRun& run : runs) {
    const auto [place, is_new] = best.try_emplace({run.arch, run.parameters, run.tokens}, run);
    if (!is_new && run.loss < place->second.loss) place->second = run;
  }
  std::vector<ScalingRun> kept;
  for (const auto& [key, run] : best) kept.push_back(run);
  return kept;
}

std::string name_of(ScalingAxis axis) {
  return axis == ScalingAxis::parameters ? "parameters" : axis == ScalingAxis::tokens ? "tokens" : "flops";
}

Scaling scaling_of(std::vector<ScalingRun> runs) {
  Scaling scaling{std::move(runs), {}};
  std::ranges::stable_sort(scaling.runs, {}, [](const ScalingRun& run) { return std::pair(run.arch, run.flops); });
  for (const ScalingAxis axis : kScalingAxes) add_curves(scaling, axis);
  require(std::ranges::any_of(scaling.curves, [](const ScalingCurve& curve) { return curve.law.has_value(); }),
          "scaling: no architecture has {0} runs that differ in parameters, tokens or operations alone; train {0} or "
          "more sizes, as `furious ablate 2mamba --grid hidden=32,48,64,96 …` does",
          kFewestPoints);
  return scaling;
}

Table runs_table(const Scaling& scaling) {
  Table table{{"run", "architecture", "parameters", "tokens", "FLOPs", "loss"}, {}};
  for (const ScalingRun& run : scaling.runs)
    table.rows.push_back({run.name, run.arch, short_number(run.parameters), short_number(run.tokens),
                          fmt::format("{:.2e}", run.flops), fmt::format("{:.4f}", run.loss)});
  return table;
}

Table laws_table(const Scaling& scaling) {
  Table table{{"x", "curve", "points", "α", "E", "A", "residual", ""}, {}};
  for (const ScalingCurve& curve : scaling.curves) {
    std::vector<std::string> row{name_of(curve.axis), curve.name, fmt::format("{}", curve.x.size())};
    if (!curve.law) {
      const size_t different = std::set<double>(curve.x.begin(), curve.x.end()).size();
      row.insert(row.end(),
                 {"-", "-", "-", "-", fmt::format("{} different x; a fit needs {}", different, kFewestPoints)});
    } else {
      const PowerLaw& law = *curve.law;
      row.insert(row.end(), {with_error(law.alpha, law.alpha_error), with_error(law.e, law.e_error),
                             fmt::format("{:.3g}", law.a), fmt::format("{:.4f}", law.residual), law.problem});
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::optional<Chart> scaling_chart(const Scaling& scaling, ScalingAxis axis, const std::string& loss) {
  constexpr int kLinePoints = 60;
  Chart chart{"Loss by " + (axis == ScalingAxis::flops ? "training FLOPs" : name_of(axis)),
              axis == ScalingAxis::parameters ? "parameters"
              : axis == ScalingAxis::tokens   ? "training tokens"
                                              : "floating-point operations of training",
              loss,
              true,
              true,
              {},
              {}};
  std::set<double> places;
  int colour = 0;
  for (const ScalingCurve& curve : scaling.curves) {
    if (curve.axis != axis) continue;
    places.insert(curve.x.begin(), curve.x.end());
    const bool fitted = curve.law && curve.law->problem.empty();
    Series line{curve.name, {}, {}, {}, {}, colour};
    if (fitted) {
      line.name += fmt::format(" α {:.2f}", curve.law->alpha);
      for (int i = 0; i <= kLinePoints; ++i) {
        line.x.push_back(curve.x.front() *
                         std::pow(curve.x.back() / curve.x.front(), static_cast<double>(i) / kLinePoints));
        line.y.push_back(curve.law->at(line.x.back()));
      }
    } else {
      line.x = curve.x;
      line.y = curve.y;
      line.faint = true;
    }
    chart.series.push_back(std::move(line));
    for (size_t i = 0; i < curve.x.size(); ++i)
      chart.series.push_back({"", {curve.x[i]}, {curve.y[i]}, {}, {}, colour});
    ++colour;
  }
  if (places.size() < 2) return std::nullopt;
  return chart;
}

Json to_json(const Scaling& scaling) {
  Json runs = Json::array(), curves = Json::array();
  for (const ScalingRun& run : scaling.runs)
    runs.push_back({{"run", run.name},
                    {"arch", run.arch},
                    {"parameters", run.parameters},
                    {"tokens", run.tokens},
                    {"flops", run.flops},
                    {"loss", run.loss}});
  for (const ScalingCurve& curve : scaling.curves) {
    Json json{{"axis", name_of(curve.axis)}, {"name", curve.name}, {"x", curve.x}, {"loss", curve.y}};
    if (curve.law)
      json["law"] = {{"alpha", curve.law->alpha},
                     {"alpha_error", number_or_null(curve.law->alpha_error)},
                     {"e", curve.law->e},
                     {"e_error", number_or_null(curve.law->e_error)},
                     {"a", curve.law->a},
                     {"residual", curve.law->residual},
                     {"problem", curve.law->problem}};
    curves.push_back(std::move(json));
  }
  return {{"runs", runs}, {"curves", curves}};
}

}  // namespace furious
