// A line chart as a self-contained SVG: readable on light and dark screens and in print, with the name of each series
// written beside the end of its line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace furious {

struct Series {
  std::string name;  // empty: none is written
  std::vector<double> x, y;
  std::vector<double> low = {}, high = {};  // of a band around the line, if there is one
  int colour = -1;                          // series with the same one belong together; -1: one of its own
  bool faint = false;                       // in the background of the others
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

// The mean of the values around each place, up to `reach` to either side, and as far to both; NaN beside values that
// are not finite.
std::vector<double> smooth(const std::vector<double>& values, int64_t reach);

// Points that cannot be drawn (not finite, or not positive on a log axis) leave a gap in the line; a series without any
// others is left out.
// `with_places`: with attributes that tell a script where values are (report/chart_page.h).
std::string to_svg(const Chart& chart, bool with_places = false);
size_t colour_class(const Chart& chart, size_t series);  // the N of its class sN

// The same for a terminal: lines of dots (braille characters), without title, names and bands. Where there are several
// colours, the end of each line that has a name is marked with the letter of its colour.
struct TerminalStyle {
  int64_t columns = 80, rows = 20;
  bool colours = false;
  bool ascii = false;  // letters for dots
};
std::string to_text(const Chart& chart, const TerminalStyle& style);
char colour_letter(int colour);                              // a, b, …
std::string in_colour(const std::string& text, int colour);  // with escape sequences

}  // namespace furious
