#include "report/heat_map.h"

#include <cstdlib>

#include "base/file.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

HeatMap small_map(const std::string& title) {
  return {
      title, "tokens", "depth", {"8", "16", "32"}, {"0%", "100%"}, {{0, 4}, {1, 300}, {2, 4}, {299, 300}, {4, 4}, {}}};
}

// Everything but the style.
std::string structure_of(std::string svg) {
  const size_t begin = svg.find("<style>"), end = svg.find("</style>\n");
  EXPECT_NE(begin, svg.npos);
  return svg.erase(begin, end + 9 - begin);
}

// The golden files were inspected when they were written; FURIOUS_UPDATE_GOLDEN=1 rewrites them.
void expect_golden_file(const std::string& name, const std::string& actual) {
  const std::string path = std::string(FURIOUS_GOLDEN) + "/" + name;
  if (std::getenv("FURIOUS_UPDATE_GOLDEN") != nullptr) write_text(path, actual);
  EXPECT_EQ(read_text(path), actual) << path;
}

TEST(HeatMap, StructureOfTheSvg) {
  const std::string svg = to_svg("Found <&> in percent", {small_map("2mamba"), small_map("a \"b\" <c>")});
  expect_golden_file("heat_map.svg", structure_of(svg));
  EXPECT_NE(svg.find("prefers-color-scheme:dark"), svg.npos);
}

TEST(HeatMap, TextInATerminalAndElsewhere) {
  const std::string plain = to_text(small_map("2mamba"), false);
  EXPECT_EQ(plain,
            "2mamba\n"
            "depth            8           16           32   tokens\n"
            "   0%       0% 0/4     1% 1/300      50% 2/4\n"
            " 100%  99% 299/300     100% 4/4            -\n");
}

TEST(HeatMap, ProportionsWithoutCounts) {
  HeatMap map{"t", "tokens", "model", {"8", "16", "32"}, {"ours", "theirs"}, {{1, 4}, {4, 4}, {}}};
  for (const double proportion : {0.027, 1.0, 0.0}) map.cells.push_back({0, 0, proportion});
  EXPECT_EQ(to_text(map, false),
            "t\n"
            " model         8        16        32   tokens\n"
            "  ours   25% 1/4  100% 4/4         -\n"
            "theirs      2.7%      100%        0%\n");
  EXPECT_NE(to_svg("t", {map}).find("tokens 8, model theirs: 2.7%</title>"), std::string::npos);
  EXPECT_NE(to_svg("t", {map}).find(">2.7</text>"), std::string::npos);
  EXPECT_NE(to_text(map, true).find("\033["), std::string::npos);
  map.cells.back().proportion = 1.1;
  expect_error([&] { to_text(map, false); }, {"proportion of 1.1"});
}

TEST(HeatMap, ColoursChangeNothingElse) {
  std::string coloured = to_text(small_map("2mamba"), true), bare;
  for (size_t i = 0; i < coloured.size(); ++i)
    if (coloured[i] == '\033')
      i = coloured.find('m', i);
    else
      bare += coloured[i];
  EXPECT_NE(bare, coloured);
  EXPECT_EQ(bare, to_text(small_map("2mamba"), false));
}

TEST(HeatMap, CellsMustFit) {
  HeatMap map = small_map("odd");
  map.cells.pop_back();
  expect_error([&] { to_svg("t", {map}); }, {"odd", "5 cells", "2 rows", "3 columns"});
  map = small_map("odd");
  map.cells[0] = {5, 4};
  expect_error([&] { to_text(map, false); }, {"odd", "5 of 4"});
  EXPECT_NE(to_svg("nothing", {}).find("</svg>"), std::string::npos);
}

}  // namespace
}  // namespace furious
