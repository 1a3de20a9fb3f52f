#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "data/utf8.h"
#include "report/chart.h"

namespace furious {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

Chart chart_of(std::vector<Series> series) {
  return {"title", "step", "loss", false, false, std::move(series)};
}

TEST(ChartText, ALineFromCornerToCorner) {
  const std::string text = to_text(chart_of({{"a", {0, 1}, {1, 0}}}), {12, 8, false, true});
  EXPECT_EQ(text,
            "1.0 |aa\n"
            "    |  aa\n"
            "0.6 |    aa\n"
            "    |      aa\n"
            "0.0 |        aa\n"
            "    +----------\n"
            "     0.0  0.6\n"
            "        step\n")
      << text;
}

TEST(ChartText, FitsAndNamesTheEnds) {
  Chart chart = chart_of({{"", {1, 50, 100}, {9, 4, 3}, {}, {}, 0, true},
                          {"one", {50, 100}, {4.5, 3.5}, {}, {}, 0},
                          {"two", {1, 100}, {8, std::nan("")}, {}, {}, 1}});
  for (const bool log : {false, true})
    for (const int64_t columns : {24, 60, 200})
      for (const int64_t rows : {7, 20}) {
        chart.log_x = chart.log_y = log;
        const std::string text = to_text(chart, {columns, rows, false, false});
        const std::vector<std::string> lines = lines_of(text);
        EXPECT_EQ(static_cast<int64_t>(lines.size()), rows);
        for (const std::string& line : lines) EXPECT_LE(static_cast<int64_t>(utf8_length(line)), columns) << text;
        EXPECT_NE(text.find('a'), std::string::npos) << text;
        EXPECT_NE(text.find('b'), std::string::npos) << text;
        EXPECT_EQ(text.find('\033'), std::string::npos);
      }
  EXPECT_NE(to_text(chart, {60, 20, true, false}).find("\033[2m\033[34m"), std::string::npos);
}

TEST(ChartText, NoValues) {
  for (const Chart& chart : {chart_of({}), chart_of({{"a", {1}, {std::nan("")}}})})
    EXPECT_EQ(lines_of(to_text(chart, {40, 10, false, true})).size(), 10u);
}

}  // namespace
}  // namespace furious
