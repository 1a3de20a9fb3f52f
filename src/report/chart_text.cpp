// Line charts in a terminal.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "data/utf8.h"
#include "report/axis.h"

namespace furious {
namespace {

constexpr int64_t kDotsAcross = 2, kDotsDown = 4;  // of a braille character
constexpr int64_t kLeastColumns = 10, kLeastRows = 3;

// Colours of terminals that differ on light and dark grounds.
constexpr std::array kColours = {34, 33, 32, 35, 36, 31};

class Canvas {
 public:
  Canvas(int64_t columns, int64_t rows, const TerminalStyle& style)
      : columns_(columns), rows_(rows), style_(style), cells_(static_cast<size_t>(columns * rows)) {}

  // Places are 0 to 1, from the lower left corner.
  void line(double x0, double y0, double x1, double y1, int colour, bool faint) {
    const int64_t from_x = dot_x(x0), from_y = dot_y(y0), across = dot_x(x1) - from_x, down = dot_y(y1) - from_y;
    const int64_t length = std::max({std::abs(across), std::abs(down), int64_t{1}});
    for (int64_t i = 0; i <= length; ++i)
      dot(from_x + (across * i + (across < 0 ? -length : length) / 2) / length,
          from_y + (down * i + (down < 0 ? -length : length) / 2) / length, colour, faint);
  }
  void letter(double x, double y, int colour) {
    Cell& cell = at(dot_x(x) / kDotsAcross, dot_y(y) / kDotsDown);
    cell.colour = colour;
    cell.letter = true;
  }
  std::string row(int64_t row) const {
    std::string text;
    for (int64_t column = 0; column < columns_; ++column) {
      const Cell& cell = cells_[static_cast<size_t>(row * columns_ + column)];
      const std::string glyph = glyph_of(cell);
      text += style_.colours && glyph != " " ? (cell.faint ? "\033[2m" : "") + in_colour(glyph, cell.colour) : glyph;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  }

 private:
  struct Cell {
    uint8_t dots = 0;
    int colour = 0;
    bool faint = false, letter = false;
  };

  int64_t dot_x(double x) const {
    return std::clamp<int64_t>(static_cast<int64_t>(x * static_cast<double>(columns_ * kDotsAcross)), 0,
                               columns_ * kDotsAcross - 1);
  }
  int64_t dot_y(double y) const {
    return std::clamp<int64_t>(static_cast<int64_t>((1 - y) * static_cast<double>(rows_ * kDotsDown)), 0,
                               rows_ * kDotsDown - 1);
  }
  Cell& at(int64_t column, int64_t row) { return cells_[static_cast<size_t>(row * columns_ + column)]; }
  void dot(int64_t x, int64_t y, int colour, bool faint) {
    static constexpr std::array<std::array<uint8_t, 4>, 2> kBits = {
        {{0x01, 0x02, 0x04, 0x40}, {0x08, 0x10, 0x20, 0x80}}};
    Cell& cell = at(x / kDotsAcross, y / kDotsDown);
    cell.dots |= kBits[static_cast<size_t>(x % kDotsAcross)][static_cast<size_t>(y % kDotsDown)];
    cell.colour = colour;
    cell.faint = faint;
  }
  std::string glyph_of(const Cell& cell) const {
    if (cell.letter || (cell.dots != 0 && style_.ascii && !cell.faint))
      return std::string(1, colour_letter(cell.colour));
    if (cell.dots == 0) return " ";
    if (style_.ascii) return ".";
    const uint32_t point = 0x2800u + cell.dots;  // U+2800 is the empty braille pattern
    return {static_cast<char>(0xE0 | (point >> 12)), static_cast<char>(0x80 | (point >> 6 & 0x3F)),
            static_cast<char>(0x80 | (point & 0x3F))};
  }

  int64_t columns_, rows_;
  TerminalStyle style_;
  std::vector<Cell> cells_;
};

void draw(Canvas& canvas, const Series& series, int colour, bool lettered, const Axis& x, const Axis& y) {
  bool before = false, any = false;
  double from_x = 0, from_y = 0;
  for (size_t i = 0; i < series.x.size(); ++i) {
    const bool here = drawable(series.x[i], x.log) && drawable(series.y[i], y.log);
    if (here) {
      const double to_x = x.place(series.x[i]), to_y = y.place(series.y[i]);
      canvas.line(before ? from_x : to_x, before ? from_y : to_y, to_x, to_y, colour, series.faint);
      from_x = to_x;
      from_y = to_y;
      any = true;
    }
    before = here;
  }
  if (any && lettered && !series.name.empty()) canvas.letter(from_x, from_y, colour);
}

// Labels centred at their places, without those that would touch the label before.
std::string label_row(const Axis& axis, int64_t columns) {
  std::string row;
  int64_t used = 0;  // columns
  for (const double tick : axis.ticks) {
    const std::string text = tick_text(axis, tick);
    const auto width = static_cast<int64_t>(utf8_length(text));
    const auto centre = static_cast<int64_t>(axis.place(tick) * static_cast<double>(columns));
    const int64_t begin = std::clamp<int64_t>(centre - width / 2, 0, std::max<int64_t>(0, columns - width));
    if (begin < used + (used > 0 ? 2 : 0) || begin + width > columns) continue;
    row += std::string(static_cast<size_t>(begin - used), ' ') + text;
    used = begin + width;
  }
  return row;
}

}  // namespace

char colour_letter(int colour) {
  return static_cast<char>('a' + colour % 26);
}

std::string in_colour(const std::string& text, int colour) {
  return fmt::format("\033[{}m{}\033[0m", kColours[static_cast<size_t>(colour) % kColours.size()], text);
}

std::string to_text(const Chart& chart, const TerminalStyle& style) {
  const Axis x = make_axis(chart, chart.log_x, &Series::x, 0), y = make_axis(chart, chart.log_y, &Series::y, 0.04);
  size_t label = 0;
  for (const double tick : y.ticks) label = std::max(label, utf8_length(tick_text(y, tick)));
  const int64_t rows = std::max(kLeastRows, style.rows - 3);
  const int64_t columns = std::max(kLeastColumns, style.columns - static_cast<int64_t>(label) - 2);
  Canvas canvas(columns, rows, style);
  std::set<int> colours;
  const auto colour_of = [&](size_t i) {
    return chart.series[i].colour < 0 ? static_cast<int>(i) : chart.series[i].colour;
  };
  for (size_t i = 0; i < chart.series.size(); ++i) colours.insert(colour_of(i));
  for (const bool faint : {true, false})
    for (size_t i = 0; i < chart.series.size(); ++i)
      if (chart.series[i].faint == faint) draw(canvas, chart.series[i], colour_of(i), colours.size() > 1, x, y);

  std::vector<std::string> labels(static_cast<size_t>(rows));
  for (const double tick : y.ticks) {
    const auto row = static_cast<size_t>(
        std::clamp<int64_t>(static_cast<int64_t>((1 - y.place(tick)) * static_cast<double>(rows)), 0, rows - 1));
    const bool crowded = row + 1 < labels.size() && !labels[row + 1].empty();  // ticks go upwards
    if (labels[row].empty() && !crowded) labels[row] = tick_text(y, tick);
  }
  const std::string side = style.ascii ? "|" : "│", corner = style.ascii ? "+" : "└", bottom = style.ascii ? "-" : "─";
  const auto padded = [&](const std::string& text) { return std::string(label - utf8_length(text), ' ') + text + " "; };
  std::string text;
  for (int64_t row = 0; row < rows; ++row)
    text += padded(labels[static_cast<size_t>(row)]) + side + canvas.row(row) + "\n";
  text += padded("") + corner;
  for (int64_t column = 0; column < columns; ++column) text += bottom;
  const std::string below(label + 2, ' ');
  const auto name = static_cast<int64_t>(utf8_length(chart.x_label));
  text += "\n" + below + label_row(x, columns) + "\n";
  return text + below + std::string(static_cast<size_t>(std::max<int64_t>(0, (columns - name) / 2)), ' ') +
         chart.x_label + "\n";
}

}  // namespace furious
