// `furious bench step --profile`: the operations of a training step, beside the floor of each.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/cost.h"
#include "tensor/profiler.h"

namespace furious::cli {

struct StepRates {
  double flops = 0;  // per second, of a large product
  double bytes = 0;  // per second, of a large copy
};

// The floor of an operation is the larger of its floating-point operations and its bytes at these rates.
class StepProfile {
 public:
  // `seconds`: of the whole step. What the rows do not contain is the line "other".
  StepProfile(const std::vector<Profiler::Row>& rows, const std::vector<WorkCost>& costs, double seconds,
              const StepRates& rates);

  double seconds() const { return seconds_; }
  std::string text(double unprofiled_seconds) const;  // a table, and the time of a step that was not profiled
  nlohmann::ordered_json json() const;

 private:
  struct Row {
    Profiler::Row time;
    WorkCost cost;
    double floor = 0;  // seconds
  };
  std::vector<Row> rows_;
  double seconds_, other_;
  StepRates rates_;
};

}  // namespace furious::cli
