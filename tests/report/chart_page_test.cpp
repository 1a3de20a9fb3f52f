#include "report/chart_page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>

namespace furious {
namespace {

using Json = nlohmann::json;

TEST(ChartPage, HasTheDataAndADrawingForEveryChoiceOfAxes) {
  Chart chart{"title",
              "step",
              "loss",
              false,
              true,
              {{"a</script>", {1, 2, 4}, {4, std::nan(""), 1.0 / 3}, {3, 3, 0}, {5, 5, 1}, 7},
               {"", {1, 2}, {8, 4}, {}, {}, 7, true}}};
  const std::string html = to_html(chart);
  for (const char* log : {"00", "10", "11"})
    EXPECT_NE(html.find(std::string("data-log=\"") + log + "\" hidden"), std::string::npos) << log;
  EXPECT_NE(html.find("data-log=\"01\">"), std::string::npos);
  EXPECT_NE(html.find("checked> log y"), std::string::npos);
  // The places: the plot's corner and size, and whether an axis is logarithmic, from where to where.
  std::smatch found;
  ASSERT_TRUE(std::regex_search(
      html, found, std::regex("data-plot=\"[0-9.]+ [0-9.]+ 640 340\" data-x=\"0 ([0-9.]+) 4\" data-y=\"0 ")));
  const std::string open = "<script type=\"application/json\">";
  const size_t begin = html.find(open) + open.size();
  const Json data = Json::parse(html.substr(begin, html.find("</script>", begin) - begin));
  EXPECT_EQ(data["x"], "step");
  ASSERT_EQ(data["series"].size(), 2u);
  EXPECT_EQ(data["series"][0]["name"], "a</script>");
  EXPECT_EQ(data["series"][0]["colour"], 1);  // of six
  EXPECT_TRUE(data["series"][0]["y"][1].is_null());
  EXPECT_NEAR(data["series"][0]["y"][2], 1.0 / 3, 1e-6);
  EXPECT_EQ(data["series"][0]["high"], (std::vector<double>{5, 5, 1}));
  EXPECT_EQ(data["series"][1]["name"], "a</script> (faint)");
}

TEST(ChartPage, NeedsNothingFromOutside) {
  const std::string parts = chart_page_head() + chart_page_end();
  for (const char* outside : {" src=", "href", "@import", "url(", "fetch("})
    EXPECT_EQ(parts.find(outside), std::string::npos) << outside;
  EXPECT_NE(parts.find("figure.plot"), std::string::npos);
}

}  // namespace
}  // namespace furious
