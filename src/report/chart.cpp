#include "report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "base/error.h"
#include "data/utf8.h"
#include "report/axis.h"
#include "report/markup.h"

namespace furious {
namespace {

// Pixels.
constexpr double kPlotWidth = 640;
constexpr double kPlotHeight = 340;
constexpr double kMargin = 14;
constexpr double kLabelHeight = 17;  // from one line of text to the next
constexpr double kCharacter = 7.8;   // of the 13 px font; viewers choose the font, so this is on the wide side

// Told apart by colour-blind readers, and dark (or light) enough for text on a white (or black) ground. More series
// begin again, dashed, and again, dotted.
constexpr std::array kOnLight = {"#0063a6", "#cc5500", "#00805e", "#b0408c", "#8a7000", "#505050"};
constexpr std::array kOnDark = {"#56b4e9", "#ff9a52", "#35c79a", "#e48cc8", "#e6c229", "#bdbdbd"};

std::string style() {
  std::string light, dark;
  for (size_t i = 0; i < kOnLight.size(); ++i) {
    light += fmt::format(".chart .s{}{{color:{}}}\n", i, kOnLight[i]);
    dark += fmt::format(".chart .s{}{{color:{}}}\n", i, kOnDark[i]);
  }
  return "<style>\n"
         ".chart text{font:13px system-ui,sans-serif;fill:#333}\n"
         ".chart .title{font-size:16px;font-weight:600}\n"
         ".chart .name{fill:currentColor;font-weight:500}\n"
         ".chart .ground{fill:#fff}\n"
         ".chart .grid{stroke:#ddd}\n"
         ".chart .axis{stroke:#777}\n"
         ".chart .mark{stroke:#777;stroke-dasharray:2 3}\n"
         ".chart .line{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}\n"
         ".chart .dashed{stroke-dasharray:6 4}\n"
         ".chart .dotted{stroke-dasharray:1 4}\n"
         ".chart .faint{stroke-width:1;stroke-opacity:.45}\n"
         ".chart .band{fill:currentColor;fill-opacity:.16}\n"
         ".chart .point{fill:currentColor}\n"
         ".chart .leader{stroke:currentColor;stroke-width:.8;stroke-opacity:.6}\n" +
         light +
         "@media (prefers-color-scheme:dark){\n"
         ".chart text{fill:#ccc}\n"
         ".chart .name{fill:currentColor}\n"
         ".chart .ground{fill:#15181c}\n"
         ".chart .grid{stroke:#33383e}\n"
         ".chart .axis{stroke:#888}\n" +
         dark + "}\n</style>\n";
}

double width_of(std::string_view text) {
  return kCharacter * static_cast<double>(utf8_length(text));
}

// Moves sorted places apart by at least `gap`, half up and half down, within [low, high] if they fit.
std::vector<double> push_apart(const std::vector<double>& places, double gap, double low, double high) {
  const auto push_down = [&](std::vector<double> moved, double from) {
    for (double& place : moved) {
      place = std::max(place, from);
      from = place + gap;
    }
    return moved;
  };
  const auto push_up = [&](std::vector<double> moved, double from) {
    for (size_t i = moved.size(); i-- > 0;) {
      moved[i] = std::min(moved[i], from);
      from = moved[i] - gap;
    }
    return moved;
  };
  const std::vector<double> down = push_down(places, low);
  std::vector<double> moved = push_up(places, high);
  for (size_t i = 0; i < moved.size(); ++i) moved[i] = (moved[i] + down[i]) / 2;
  return push_up(push_down(moved, low), high);
}

struct Point {
  double x, y;
};

struct Frame {
  Axis x, y;
  double height;

  Point place(double at_x, double at_y) const { return {kPlotWidth * x.place(at_x), height * (1 - y.place(at_y))}; }
};

// The drawable points of a series in pixels, in runs between the gaps.
std::vector<std::vector<Point>> runs_of(const Series& series, const Frame& frame) {
  std::vector<std::vector<Point>> runs;
  bool open = false;
  for (size_t i = 0; i < series.x.size(); ++i) {
    const bool here = drawable(series.x[i], frame.x.log) && drawable(series.y[i], frame.y.log);
    if (here && !open) runs.emplace_back();
    if (here) runs.back().push_back(frame.place(series.x[i], series.y[i]));
    open = here;
  }
  return runs;
}

std::string points_text(const std::vector<Point>& points) {
  std::string text;
  for (const Point& point : points) text += fmt::format("{}{:.1f},{:.1f}", text.empty() ? "" : " ", point.x, point.y);
  return text;
}

// Along the upper edge and back along the lower one.
std::string draw_band(const Series& series, const Frame& frame, size_t colour) {
  std::vector<Point> upper, lower;
  for (size_t i = 0; i < series.x.size(); ++i) {
    if (!drawable(series.x[i], frame.x.log) || !has_band(series, i, frame.y.log)) continue;
    upper.push_back(frame.place(series.x[i], series.high[i]));
    lower.push_back(frame.place(series.x[i], series.low[i]));
  }
  if (upper.size() < 2) return {};
  upper.insert(upper.end(), lower.rbegin(), lower.rend());
  return fmt::format("<polygon class=\"band s{}\" points=\"{}\"/>\n", colour, points_text(upper));
}

std::string text_at(double x, double y, std::string_view attributes, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\"{}>{}</text>\n", x, y, attributes, escape_markup(text));
}

std::string line_between(Point from, Point to, std::string_view style_class) {
  return fmt::format("<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", style_class,
                     from.x, from.y, to.x, to.y);
}

std::string draw_run(const std::vector<Point>& run, size_t colour, std::string_view stroke) {
  if (run.size() == 1)
    return fmt::format("<circle class=\"point s{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>\n", colour, run[0].x,
                       run[0].y);
  return fmt::format("<polyline class=\"line s{}{}\" points=\"{}\"/>\n", colour, stroke, points_text(run));
}

size_t own_colour(const Chart& chart, size_t series) {
  const int chosen = chart.series[series].colour;
  return chosen < 0 ? series : static_cast<size_t>(chosen);
}

struct End {  // of a line
  std::string name;
  size_t colour;
  std::string stroke;
  Point point;
};

std::string draw_names(std::vector<End> ends, double height) {
  std::stable_sort(ends.begin(), ends.end(), [](const End& a, const End& b) { return a.point.y < b.point.y; });
  std::vector<double> places;
  for (const End& end : ends) places.push_back(end.point.y);
  places = push_apart(places, kLabelHeight, 0, height);
  std::string svg;
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto& [name, colour, stroke, point] = ends[i];
    const Point label{kPlotWidth + 22, places[i]};
    svg += line_between({point.x + 4, point.y}, {label.x - 4, label.y}, fmt::format("leader s{}{}", colour, stroke));
    svg += text_at(label.x, label.y + 4.5, fmt::format(" class=\"name s{}\"", colour), name);
  }
  return svg;
}

std::string draw_axes(const Chart& chart, const Frame& frame) {
  const auto& [x, y, height] = frame;
  std::string svg;
  for (const double tick : y.ticks) {
    const double at = height * (1 - y.place(tick));
    svg += line_between({0, at}, {kPlotWidth, at}, "grid");
    svg += text_at(-8, at + 4.5, " text-anchor=\"end\"", tick_text(y, tick));
  }
  for (const double tick : x.ticks) {
    const double at = kPlotWidth * x.place(tick);
    svg += line_between({at, height}, {at, height + 5}, "axis");
    svg += text_at(at, height + 20, " text-anchor=\"middle\"", tick_text(x, tick));
  }
  svg += line_between({0, height}, {kPlotWidth, height}, "axis");
  svg += text_at(kPlotWidth / 2, height + 42, " text-anchor=\"middle\"", chart.x_label);
  return svg;
}

// Names are beside their lines, at the top, on the side with more space.
std::string draw_marks(const std::vector<Mark>& marks, const Axis& x, double height) {
  std::string svg;
  for (const Mark& mark : marks) {
    const double at = drawable(mark.x, x.log) ? kPlotWidth * x.place(mark.x) : -1;
    if (at < 0 || at > kPlotWidth) continue;
    const bool left = at > kPlotWidth / 2;
    svg += line_between({at, 0}, {at, height}, "mark");
    svg += text_at(at + (left ? -6 : 6), 12, left ? " text-anchor=\"end\"" : "", mark.name);
  }
  return svg;
}

}  // namespace

std::vector<double> smooth(const std::vector<double>& values, int64_t reach) {
  const auto count = static_cast<int64_t>(values.size());
  std::vector<double> sums{0};  // of the values before each place
  std::vector<int64_t> missing{0};
  for (const double value : values) {
    const bool finite = std::isfinite(value);
    sums.push_back(sums.back() + (finite ? value : 0));
    missing.push_back(missing.back() + (finite ? 0 : 1));
  }
  std::vector<double> means;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t here = std::min({i, count - 1 - i, reach});
    const auto begin = static_cast<size_t>(i - here), end = static_cast<size_t>(i + here + 1);
    if (here == 0)
      means.push_back(values[begin]);
    else if (missing[begin] != missing[end])
      means.push_back(std::nan(""));
    else
      means.push_back((sums[end] - sums[begin]) / static_cast<double>(end - begin));
  }
  return means;
}

size_t colour_class(const Chart& chart, size_t series) {
  return own_colour(chart, series) % kOnLight.size();
}

std::string to_svg(const Chart& chart, bool with_places) {
  size_t named = 0;
  for (const Series& series : chart.series) {
    require(series.x.size() == series.y.size(), "chart \"{}\": series \"{}\" has {} x values and {} y values",
            chart.title, series.name, series.x.size(), series.y.size());
    require(series.low.size() == series.high.size() && (series.low.empty() || series.low.size() == series.x.size()),
            "chart \"{}\": series \"{}\" has {} x values and a band of {} and {}", chart.title, series.name,
            series.x.size(), series.low.size(), series.high.size());
    named += !series.name.empty();
  }
  const double height = std::max(kPlotHeight, kLabelHeight * static_cast<double>(named));
  const Frame frame{make_axis(chart, chart.log_x, &Series::x, 0), make_axis(chart, chart.log_y, &Series::y, 0.04),
                    height};

  std::string background, lines, names;
  std::vector<End> ends;
  double names_width = 0;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const Series& series = chart.series[i];
    const auto runs = runs_of(series, frame);
    if (runs.empty()) continue;
    const size_t colour = colour_class(chart, i);
    const std::string stroke = std::array{"", " dashed", " dotted"}[own_colour(chart, i) / kOnLight.size() % 3];
    background += draw_band(series, frame, colour);
    for (const auto& run : runs)
      (series.faint ? background : lines) += draw_run(run, colour, stroke + (series.faint ? " faint" : ""));
    if (series.name.empty()) continue;
    ends.push_back({series.name, colour, stroke, runs.back().back()});
    names += (names.empty() ? "" : ", ") + series.name;
    names_width = std::max(names_width, width_of(series.name));
  }
  if (lines.empty() && background.empty())
    lines = text_at(kPlotWidth / 2, height / 2, " text-anchor=\"middle\"", "no values");

  double left = 0;
  for (const double tick : frame.y.ticks) left = std::max(left, kMargin + width_of(tick_text(frame.y, tick)) + 8);
  const double top = kMargin + 56;
  const double wide = std::max(left + kPlotWidth + 22 + names_width, kMargin + 1.3 * width_of(chart.title)) + kMargin;
  const double high = top + height + 48 + kMargin;
  const auto range = [](const Axis& axis) { return fmt::format("{:d} {} {}", axis.log, axis.low, axis.high); };
  const std::string places = with_places ? fmt::format(" data-plot=\"{:.1f} {:.1f} {} {}\" data-x=\"{}\" data-y=\"{}\"",
                                                       left, top, kPlotWidth, height, range(frame.x), range(frame.y))
                                         : "";
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" role=\"img\" width=\"{0:.0f}\" "
             "height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\"{2}>\n<title>{3}</title>\n<desc>{4}</desc>\n",
             wide, high, places, escape_markup(chart.title),
             escape_markup(fmt::format("Line chart of {} over {}: {}", chart.y_label, chart.x_label, names))) +
         style() + "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n" +
         text_at(kMargin, kMargin + 16, " class=\"title\"", chart.title) +
         fmt::format("<g transform=\"translate({:.1f} {:.1f})\">\n", left, top) +
         text_at(kMargin - left, -14, "", chart.y_label) + draw_axes(chart, frame) +
         draw_marks(chart.marks, frame.x, height) + background + lines + draw_names(std::move(ends), height) +
         "</g>\n</svg>\n";
}

}  // namespace furious
