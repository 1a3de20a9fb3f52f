// A grid of parts of a whole, each cell coloured by its value: for browsers and print as a self-contained SVG, for
// terminals as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace furious {

struct HeatMap {
  struct Cell {
    int64_t part = 0, whole = 0;            // drawn as part / whole; a whole of 0: an empty cell
    std::optional<double> proportion = {};  // instead of these, where somebody states no more than that
  };

  std::string title, x_label, y_label;
  std::vector<std::string> columns, rows;  // their names
  std::vector<Cell> cells;                 // row by row, as many as rows × columns
};

// Several maps stand side by side, under one title.
std::string to_svg(const std::string& title, const std::vector<HeatMap>& maps);

// Every cell as "97% 31/32", a proportion as "97%"; coloured for a terminal that shows 256 colours.
std::string to_text(const HeatMap& map, bool coloured);

}  // namespace furious
