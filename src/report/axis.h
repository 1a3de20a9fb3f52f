// The axes of a line chart.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "report/chart.h"

namespace furious {

struct Axis {
  bool log = false;
  double low = 0, high = 1;  // of the logarithm on a log axis
  double step = 0;           // between ticks; 0 where they are spaced by factors
  std::vector<double> ticks;

  double place(double value) const { return ((log ? std::log10(value) : value) - low) / (high - low); }  // 0 to 1
};

// False for what is not finite, not positive on a log axis, or at the ends of double's range, so that arithmetic on
// ranges stays inside it.
bool drawable(double value, bool log);
bool has_band(const Series& series, size_t i, bool log);  // at a point

// The axis for the x or y values of a chart, with a part of their span left free at the ends.
Axis make_axis(const Chart& chart, bool log, std::vector<double> Series::*values, double free);

// As many digits as tell one tick from the next; with powers of ten where an axis holds very large or small numbers.
std::string tick_text(const Axis& axis, double value);

}  // namespace furious
