#include "report/heat_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "data/utf8.h"
#include "report/markup.h"

namespace furious {
namespace {

// Pixels.
constexpr double kCellWidth = 52;
constexpr double kCellHeight = 30;
constexpr double kMargin = 14;
constexpr double kCharacter = 7.8;  // of the 13 px font; viewers choose the font, so this is on the wide side

struct Colour {
  double red, green, blue;
};

// From 0 to 1, with increasing lightness, so that the order survives grey print and every kind of colour blindness.
constexpr std::array<Colour, 5> kScale = {{{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}}};
// The nearest of the 256 colours of a terminal.
constexpr std::array kTerminalScale = {53, 60, 30, 77, 220};
constexpr double kLight = 0.6;  // from here on a cell is light, and its text black

Colour colour_of(double value) {
  const double place = std::clamp(value, 0.0, 1.0) * static_cast<double>(kScale.size() - 1);
  const size_t below = std::min(static_cast<size_t>(place), kScale.size() - 2);
  const double part = place - static_cast<double>(below);
  const auto between = [&](double Colour::*channel) {
    return (1 - part) * kScale[below].*channel + part * kScale[below + 1].*channel;
  };
  return {between(&Colour::red), between(&Colour::green), between(&Colour::blue)};
}

bool is_empty(const HeatMap::Cell& cell) {
  return cell.whole == 0 && !cell.proportion;
}

double value_of(const HeatMap::Cell& cell) {
  if (cell.proportion) return *cell.proportion;
  return static_cast<double>(cell.part) / static_cast<double>(cell.whole);
}

// Whole percents; 0 and 100 only where that is exactly so. A stated proportion keeps the digits it is stated with.
std::string percent_of(const HeatMap::Cell& cell) {
  if (cell.proportion) return fmt::format("{:.3g}", 100 * *cell.proportion);
  const int64_t rounded = std::llround(100 * value_of(cell));
  if (cell.part > 0 && rounded == 0) return "1";
  return std::to_string(cell.part < cell.whole && rounded == 100 ? 99 : rounded);
}

void check(const HeatMap& map) {
  require(map.cells.size() == map.rows.size() * map.columns.size(),
          "heat map \"{}\": {} cells for {} rows and {} columns", map.title, map.cells.size(), map.rows.size(),
          map.columns.size());
  for (const HeatMap::Cell& cell : map.cells) {
    require(cell.part >= 0 && cell.part <= cell.whole, "heat map \"{}\": a cell with {} of {}", map.title, cell.part,
            cell.whole);
    require(!cell.proportion || (*cell.proportion >= 0 && *cell.proportion <= 1),
            "heat map \"{}\": a cell with a proportion of {}", map.title, cell.proportion.value_or(0));
  }
}

std::string style() {
  return "<style>\n"
         ".heat text{font:13px system-ui,sans-serif;fill:#333}\n"
         ".heat .title{font-size:16px;font-weight:600}\n"
         ".heat .name{font-weight:600}\n"
         ".heat .ground{fill:#fff}\n"
         ".heat .on-light{fill:#111}\n"
         ".heat .on-dark{fill:#fff}\n"
         ".heat .none{fill:none;stroke:#999;stroke-dasharray:3 3}\n"
         "@media (prefers-color-scheme:dark){\n"
         ".heat text{fill:#ccc}\n"
         ".heat .on-light{fill:#111}\n"
         ".heat .on-dark{fill:#fff}\n"
         ".heat .ground{fill:#15181c}\n"
         "}\n</style>\n";
}

std::string text_at(double x, double y, std::string_view attributes, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\"{}>{}</text>\n", x, y, attributes, escape_markup(text));
}

std::string draw_cell(const HeatMap& map, size_t row, size_t column) {
  const HeatMap::Cell& cell = map.cells[row * map.columns.size() + column];
  const double x = kCellWidth * static_cast<double>(column), y = kCellHeight * static_cast<double>(row);
  const std::string place =
      fmt::format("x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"", x, y, kCellWidth, kCellHeight);
  const std::string where = fmt::format("{} {}, {} {}", map.x_label, map.columns[column], map.y_label, map.rows[row]);
  if (is_empty(cell))
    return fmt::format("<rect class=\"cell none\" {}><title>{}: nothing</title></rect>\n", place, escape_markup(where));
  const Colour colour = colour_of(value_of(cell));
  return fmt::format("<rect class=\"cell\" {} fill=\"#{:02x}{:02x}{:02x}\"><title>{}: {}</title></rect>\n", place,
                     std::lround(colour.red), std::lround(colour.green), std::lround(colour.blue), escape_markup(where),
                     cell.proportion ? percent_of(cell) + "%" : fmt::format("{} of {}", cell.part, cell.whole)) +
         text_at(x + kCellWidth / 2, y + kCellHeight / 2 + 4.5,
                 fmt::format(" class=\"{}\" text-anchor=\"middle\"", value_of(cell) >= kLight ? "on-light" : "on-dark"),
                 percent_of(cell));
}

double width_of(std::string_view text) {
  return kCharacter * static_cast<double>(utf8_length(text));
}

// The labels left of the cells.
double left_of(const HeatMap& map) {
  double widest = 0;
  for (const std::string& row : map.rows) widest = std::max(widest, width_of(row));
  return widest + 8;
}

double width_of(const HeatMap& map) {
  return std::max(left_of(map) + kCellWidth * static_cast<double>(map.columns.size()),
                  std::max(width_of(map.title), width_of(map.y_label)));
}

double height_of(const HeatMap& map) {
  return 44 + kCellHeight * static_cast<double>(map.rows.size()) + 42;
}

std::string draw(const HeatMap& map, double x, double y) {
  const double left = left_of(map);
  const double high = kCellHeight * static_cast<double>(map.rows.size());
  const double wide = kCellWidth * static_cast<double>(map.columns.size());
  std::string svg = fmt::format("<g class=\"map\" transform=\"translate({:.1f} {:.1f})\">\n", x + left, y + 44);
  svg += text_at(-left, -30, " class=\"name\"", map.title) + text_at(-left, -10, "", map.y_label);
  for (size_t row = 0; row < map.rows.size(); ++row) {
    svg += text_at(-8, kCellHeight * (static_cast<double>(row) + 0.5) + 4.5, " text-anchor=\"end\"", map.rows[row]);
    for (size_t column = 0; column < map.columns.size(); ++column) svg += draw_cell(map, row, column);
  }
  for (size_t column = 0; column < map.columns.size(); ++column)
    svg += text_at(kCellWidth * (static_cast<double>(column) + 0.5), high + 18, " text-anchor=\"middle\"",
                   map.columns[column]);
  return svg + text_at(wide / 2, high + 38, " text-anchor=\"middle\"", map.x_label) + "</g>\n";
}

std::string cell_text(const HeatMap::Cell& cell) {
  if (is_empty(cell)) return "-";
  return percent_of(cell) + (cell.proportion ? "%" : fmt::format("% {}/{}", cell.part, cell.whole));
}

std::string paint(const HeatMap::Cell& cell, const std::string& text) {
  if (is_empty(cell)) return text;
  const double place = value_of(cell) * static_cast<double>(kTerminalScale.size() - 1);
  return fmt::format("\033[48;5;{}m\033[38;5;{}m{}\033[0m", kTerminalScale[static_cast<size_t>(std::lround(place))],
                     value_of(cell) >= kLight ? 16 : 231, text);
}

}  // namespace

std::string to_svg(const std::string& title, const std::vector<HeatMap>& maps) {
  constexpr double kGap = 28;
  double x = kMargin, high = 0;
  std::string drawn, names;
  for (const HeatMap& map : maps) {
    check(map);
    drawn += draw(map, x, kMargin + 30);
    x += width_of(map) + kGap;
    high = std::max(high, height_of(map));
    names += (names.empty() ? "" : ", ") + map.title;
  }
  const double wide = std::max(x - kGap, kMargin + 1.3 * width_of(title)) + kMargin;
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"heat\" role=\"img\" width=\"{0:.0f}\" "
             "height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\">\n<title>{2}</title>\n<desc>{3}</desc>\n",
             wide, kMargin + 30 + high + kMargin, escape_markup(title),
             escape_markup(fmt::format("Heat maps in percent: {}", names))) +
         style() + "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n" +
         text_at(kMargin, kMargin + 16, " class=\"title\"", title) + drawn + "</svg>\n";
}

std::string to_text(const HeatMap& map, bool coloured) {
  check(map);
  size_t first = utf8_length(map.y_label), wide = 0;
  for (const std::string& row : map.rows) first = std::max(first, utf8_length(row));
  for (const std::string& column : map.columns) wide = std::max(wide, utf8_length(column));
  for (const HeatMap::Cell& cell : map.cells) wide = std::max(wide, cell_text(cell).size());
  const auto right = [](const std::string& text, size_t width) {
    return std::string(width - utf8_length(text), ' ') + text;
  };
  std::string text = map.title + "\n" + right(map.y_label, first);
  for (const std::string& column : map.columns) text += "  " + right(column, wide);
  text += "   " + map.x_label + "\n";
  for (size_t row = 0; row < map.rows.size(); ++row) {
    text += right(map.rows[row], first);
    for (size_t column = 0; column < map.columns.size(); ++column) {
      const HeatMap::Cell& cell = map.cells[row * map.columns.size() + column];
      const std::string shown = right(cell_text(cell), wide);
      text += coloured ? " " + paint(cell, " " + shown) : "  " + shown;
    }
    text += "\n";
  }
  return text;
}

}  // namespace furious
