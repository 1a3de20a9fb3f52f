// A line chart as a self-contained SVG: readable on light and dark screens and in print, with the name of each series
// written beside the end of its line.
#pragma once

#include <string>
#include <vector>

namespace furious {

struct Series {
  std::string name;
  std::vector<double> x, y;
};

// A place on the x axis that has a name: a line from top to bottom.
struct Mark {
  std::string name;
  double x = 0;
};

struct Chart {
  std::string title, x_label, y_label;
  bool log_x = false;
  bool log_y = false;
  std::vector<Series> series;
  std::vector<Mark> marks = {};
};

// Points that cannot be drawn (not finite, or not positive on a log axis) leave a gap in the line; a series without any
// others is left out.
std::string to_svg(const Chart& chart);

}  // namespace furious
