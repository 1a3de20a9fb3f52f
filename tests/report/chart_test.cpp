#include "report/chart.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::Random;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Element {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;  // as it stands in the file

  double number(const std::string& attribute) const { return std::stod(attributes.at(attribute)); }
  bool has_class(const std::string& name_of_class) const {
    const auto found = attributes.find("class");
    return found != attributes.end() &&
           (" " + found->second + " ").find(" " + name_of_class + " ") != std::string::npos;
  }
};

// Reads the XML that charts are made of and throws Error where it is not well-formed.
class Parser {
 public:
  explicit Parser(std::string_view xml) : rest_(xml) {}

  std::vector<Element> parse() {
    element();
    take("\n");
    require(rest_.empty(), "text after the root element");
    return elements_;
  }

 private:
  void element() {
    take("<");
    const size_t index = elements_.size();
    elements_.push_back({until(" />"), {}, ""});
    while (!rest_.starts_with("/>") && !rest_.starts_with(">")) {
      take(" ");
      const std::string attribute = until("=");
      take("=\"");
      const std::string value = until("\"<&");
      take("\"");
      require(elements_[index].attributes.emplace(attribute, value).second, "attribute {} twice", attribute);
    }
    if (rest_.starts_with("/>")) return take("/>");
    take(">");
    while (!rest_.starts_with("</")) {
      if (rest_.starts_with("<"))
        element();
      else
        elements_[index].text += characters();
    }
    take("</" + elements_[index].name + ">");
  }

  std::string characters() {
    std::string text = until("<");
    for (const char c : text) require(c == '\n' || static_cast<unsigned char>(c) >= 0x20, "a control character");
    for (size_t at = text.find('&'); at != text.npos; at = text.find('&', at + 1)) {
      const std::string entity = text.substr(at, text.find(';', at) - at + 1);
      require(entity == "&amp;" || entity == "&lt;" || entity == "&gt;" || entity == "&quot;", "bad entity {}", entity);
    }
    return text;
  }
  std::string until(std::string_view ends) {
    const size_t end = rest_.find_first_of(ends);
    require(end != rest_.npos, "the end is missing");
    const std::string text(rest_.substr(0, end));
    rest_.remove_prefix(end);
    return text;
  }
  void take(std::string_view expected) {
    require(rest_.starts_with(expected), "expected {} at {}", expected, rest_.substr(0, 40));
    rest_.remove_prefix(expected.size());
  }

  std::string_view rest_;
  std::vector<Element> elements_;
};

std::vector<Element> drawn(const Chart& chart) {
  const std::string svg = to_svg(chart);
  for (const char* bad : {"nan", "inf", "-0.0\""}) EXPECT_EQ(svg.find(bad), std::string::npos) << bad << " in " << svg;
  return Parser(svg).parse();
}

std::vector<Element> of_class(const std::vector<Element>& elements, const std::string& name) {
  std::vector<Element> found;
  std::copy_if(elements.begin(), elements.end(), std::back_inserter(found),
               [&](const Element& element) { return element.has_class(name); });
  return found;
}

Chart chart_of(std::vector<Series> series) {
  return {"title", "step", "loss", false, false, std::move(series)};
}

std::vector<std::string> texts(const std::vector<Element>& elements, const std::string& anchor) {
  std::vector<std::string> found;
  for (const Element& element : elements)
    if (element.name == "text" && element.attributes.contains("text-anchor") &&
        element.attributes.at("text-anchor") == anchor)
      found.push_back(element.text);
  return found;
}

std::vector<std::string> y_ticks(const std::vector<Element>& elements) {
  return texts(elements, "end");
}

TEST(Chart, HasALineAndANamePerSeries) {
  const auto elements =
      drawn(chart_of({{"first", {1, 2, 3}, {9, 6, 5}}, {"second", {1, 2, 3}, {8, 7, 4}}, {"third", {1, 3}, {9, 8}}}));
  EXPECT_EQ(elements[0].name, "svg");
  EXPECT_EQ(elements[0].attributes.at("role"), "img");
  EXPECT_EQ(elements[1].name, "title");
  EXPECT_EQ(elements[1].text, "title");
  EXPECT_EQ(elements[2].name, "desc");
  EXPECT_EQ(elements[2].text, "Line chart of loss over step: first, second, third");
  EXPECT_EQ(of_class(elements, "line").size(), 3u);
  const auto names = of_class(elements, "name");
  ASSERT_EQ(names.size(), 3u);
  EXPECT_EQ(names[0].text, "third");  // the highest end
  EXPECT_TRUE(names[0].has_class("s2"));
}

TEST(Chart, InvalidPointsLeaveGaps) {
  Chart chart = chart_of({{"a", {0, 1, 2, 3, 4, 5, 6, 7}, {1, 2, kNaN, 3, -1, 4, 5, kInfinity}}});
  auto elements = drawn(chart);
  EXPECT_EQ(of_class(elements, "line").size(), 2u);
  chart.log_y = true;
  elements = drawn(chart);
  EXPECT_EQ(of_class(elements, "line").size(), 2u);
  EXPECT_EQ(of_class(elements, "point").size(), 1u);  // 3, alone between its neighbours
  chart.log_x = true;
  elements = drawn(chart);
  EXPECT_EQ(of_class(elements, "line").size(), 1u);
  EXPECT_EQ(of_class(elements, "point").size(), 2u);
}

TEST(Chart, OnePointNoPointsAndNoSeries) {
  auto elements = drawn(chart_of({{"dot", {3}, {4}}, {"empty", {}, {}}, {"broken", {1, 2}, {kNaN, kNaN}}}));
  EXPECT_EQ(of_class(elements, "point").size(), 1u);
  EXPECT_EQ(of_class(elements, "line").size(), 0u);
  EXPECT_EQ(of_class(elements, "name").size(), 1u);
  elements = drawn(chart_of({}));
  const auto middle = texts(elements, "middle");
  EXPECT_EQ(std::count(middle.begin(), middle.end(), "no values"), 1);
  Chart log = chart_of({});
  log.log_x = log.log_y = true;
  EXPECT_GE(y_ticks(drawn(log)).size(), 2u);
}

TEST(Chart, NamesDoNotOverlapAndStayInside) {
  Random random(31);
  for (const int count : {2, 7, 40}) {
    Chart chart = chart_of({});
    for (int i = 0; i < count; ++i)
      chart.series.push_back({fmt::format("run {}", i), {0, 1}, {9, random.coin() ? 4 : random.uniform(4, 4.2)}});
    const auto elements = drawn(chart);
    const auto names = of_class(elements, "name");
    ASSERT_EQ(names.size(), static_cast<size_t>(count));
    for (size_t i = 1; i < names.size(); ++i) EXPECT_GE(names[i].number("y"), names[i - 1].number("y") + 16.8);
    EXPECT_GE(names.front().number("y"), 0);
    EXPECT_LE(names.back().number("y"), elements[0].number("height"));
  }
}

TEST(Chart, FewTicksAllDifferentAndInside) {
  const std::vector<std::pair<double, double>> ranges = {
      {0, 1},      {4, 9.1},     {-3, 7},         {1e9, 1e9 + 1}, {1e-9, 3e-9},  {-1e300, 1e300}, {1e-300, 2e-300},
      {0, 5e-324}, {1e-5, 1e12}, {1e-280, 1e280}, {5, 5},         {0, 0},        {-2, -2},        {1, 1 + 1e-15},
      {0.3, 0.6},  {17, 17.001}, {99999, 1e6},    {1e-3, 1},      {-1e-7, 1e-7}, {2.5e9, 7e9},    {1, 10}};
  for (const auto& [low, high] : ranges)
    for (const bool log : {false, true}) {
      SCOPED_TRACE(fmt::format("{} to {}{}", low, high, log ? ", log" : ""));
      Chart chart = chart_of({{"a", {low, high}, {low, high}}});
      chart.log_x = chart.log_y = log;
      const auto elements = drawn(chart);
      const auto ticks = y_ticks(elements);
      EXPECT_GE(ticks.size(), 2u);
      EXPECT_LE(ticks.size(), 11u);
      EXPECT_EQ(std::set(ticks.begin(), ticks.end()).size(), ticks.size()) << fmt::format("{}", fmt::join(ticks, " "));
      for (const Element& line : of_class(elements, "axis")) {
        EXPECT_GE(line.number("x1"), 0);
        EXPECT_LE(line.number("x1"), 640);
      }
      for (const Element& line : of_class(elements, "grid")) {
        EXPECT_GE(line.number("y1"), 0);
        EXPECT_LE(line.number("y1"), 340);
      }
    }
}

TEST(Chart, TicksAreRoundNumbers) {
  const auto ticks = [](double low, double high, bool log) {
    Chart chart = chart_of({{"a", {0, 1}, {low, high}}});
    chart.log_y = log;
    return y_ticks(drawn(chart));
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(ticks(4.02, 9.05, false), (Texts{"4", "5", "6", "7", "8", "9"}));
  EXPECT_EQ(ticks(4.02, 9.05, true), (Texts{"4", "5", "6", "7", "8", "9"}));
  EXPECT_EQ(ticks(0, 1, false), (Texts{"0.0", "0.2", "0.4", "0.6", "0.8", "1.0"}));
  EXPECT_EQ(ticks(-1e9, 2e9, false), (Texts{"-10⁹", "-5×10⁸", "0", "5×10⁸", "10⁹", "1.5×10⁹", "2×10⁹"}));
  EXPECT_EQ(ticks(1, 3000, true), (Texts{"1", "10", "100", "1000"}));
  EXPECT_EQ(ticks(1, 3e6, true), (Texts{"1", "10", "10²", "10³", "10⁴", "10⁵", "10⁶"}));
  EXPECT_EQ(ticks(3, 60, true), (Texts{"5", "10", "20", "50"}));
  EXPECT_EQ(ticks(1e-6, 1e-4, true), (Texts{"10⁻⁶", "10⁻⁵", "10⁻⁴"}));
}

TEST(Chart, BandsFaintLinesAndSharedColours) {
  Chart chart = chart_of({{"mean", {0, 1, 2}, {3, 2, 1}, {2, kNaN, 0.5}, {4, 3, 8}},
                          {"", {0, 2}, {3, 2}, {}, {}, 0, true},
                          {"eighth", {0, 2}, {1, 1}, {}, {}, 7},
                          {"fourteenth", {0, 2}, {1.5, 1.5}, {}, {}, 13}});
  const auto elements = drawn(chart);
  const auto bands = of_class(elements, "band");
  ASSERT_EQ(bands.size(), 1u);
  EXPECT_TRUE(bands[0].has_class("s0"));
  EXPECT_EQ(std::ranges::count(bands[0].attributes.at("points"), ','), 4);  // two ends, above and below
  const auto faint = of_class(elements, "faint");
  ASSERT_EQ(faint.size(), 1u);
  EXPECT_TRUE(faint[0].has_class("s0"));
  EXPECT_EQ(of_class(elements, "name").size(), 3u);  // the faint one has none
  EXPECT_EQ(elements[2].text, "Line chart of loss over step: mean, eighth, fourteenth");
  EXPECT_TRUE(of_class(elements, "dashed").at(0).has_class("s1"));
  EXPECT_TRUE(of_class(elements, "dotted").at(0).has_class("s1"));
  EXPECT_EQ(y_ticks(elements).back(), "8");  // the band is inside the axes
  chart.series[0].high.pop_back();
  expect_error([&] { to_svg(chart); }, {"mean", "3 x values", "band of 3 and 2"});
}

TEST(Chart, Smooth) {
  using Values = std::vector<double>;
  EXPECT_EQ(smooth({1, 2, 6, 4, 5}, 0), (Values{1, 2, 6, 4, 5}));
  EXPECT_EQ(smooth({1, 2, 6, 4, 5}, 1), (Values{1, 3, 4, 5, 5}));
  EXPECT_EQ(smooth({1, 2, 6, 4, 7}, 9), (Values{1, 3, 4, 17.0 / 3, 7}));
  EXPECT_TRUE(smooth({}, 3).empty());
}

TEST(Chart, MarksAreAtTheirCoordinates) {
  Chart chart = chart_of({{"a", {1, 100}, {1, 2}}});
  chart.log_x = true;
  chart.marks = {{"early", 10}, {"late", 50}, {"outside", 1000}, {"nowhere", -1}};
  const auto elements = drawn(chart);
  const auto marks = of_class(elements, "mark");
  ASSERT_EQ(marks.size(), 2u);
  EXPECT_EQ(marks[0].number("x1"), 320);
  EXPECT_EQ(marks[0].number("x2"), 320);
  const auto ends = texts(elements, "end");
  EXPECT_EQ(std::count(ends.begin(), ends.end(), "late"), 1);  // on its left, where there is room
}

TEST(Chart, NamesAreEscaped) {
  Chart chart = chart_of({{"a<b> & \"c\"\x01\xFF", {0, 1}, {0, 1}}});
  chart.title = "</title>";
  chart.x_label = "x & y";
  const auto elements = drawn(chart);
  EXPECT_EQ(elements[1].text, "&lt;/title&gt;");
  EXPECT_EQ(of_class(elements, "name").at(0).text, "a&lt;b&gt; &amp; &quot;c&quot; \uFFFD");
}

TEST(Chart, SeriesOfUnequalLengthsAreRefused) {
  expect_error([] { to_svg(chart_of({{"odd", {1, 2}, {1}}})); }, {"title", "odd", "2 x values", "1 y values"});
}

}  // namespace
}  // namespace furious
