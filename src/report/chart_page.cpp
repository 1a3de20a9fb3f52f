#include "report/chart_page.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "data/utf8.h"
#include "report/markup.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

// A few digits more than a screen shows.
Json numbers(const std::vector<double>& values) {
  Json list = Json::array();
  for (const double value : values) {
    if (std::isfinite(value))
      list.push_back(std::stod(fmt::format("{:.7g}", value)));
    else
      list.push_back(nullptr);
  }
  return list;
}

// A series in the background has the name of the one with its colour.
std::string name_of(const Chart& chart, const Series& series) {
  if (!series.name.empty()) return series.name;
  for (const Series& other : chart.series)
    if (series.colour >= 0 && other.colour == series.colour && !other.name.empty()) return other.name + " (faint)";
  return "";
}

std::string data_of(const Chart& chart) {
  Json list = Json::array();
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const Series& series = chart.series[i];
    int64_t replaced = 0;
    Json one{{"name", replace_invalid_utf8(name_of(chart, series), replaced)},
             {"colour", colour_class(chart, i)},
             {"x", numbers(series.x)},
             {"y", numbers(series.y)}};
    if (!series.low.empty()) {
      one["low"] = numbers(series.low);
      one["high"] = numbers(series.high);
    }
    list.push_back(std::move(one));
  }
  std::string text;  // "</script>" in a name must not end the data
  for (const char c : Json{{"x", chart.x_label}, {"series", list}}.dump(-1, ' ', false, Json::error_handler_t::replace))
    text += c == '<' ? "\\u003c" : std::string(1, c);
  return text;
}

}  // namespace

std::string to_html(const Chart& chart) {
  const auto box = [](const std::string& label, bool on) {
    return fmt::format("<label><input type=\"checkbox\"{}> {}</label>\n", on ? " checked" : "", label);
  };
  std::string html = "<figure class=\"plot\">\n<div class=\"axes\" hidden>" + box("log x", chart.log_x) +
                     box("log y", chart.log_y) + "</div>\n";
  for (const bool log_x : {false, true})
    for (const bool log_y : {false, true}) {
      Chart variant = chart;
      variant.log_x = log_x;
      variant.log_y = log_y;
      html += fmt::format("<div class=\"drawing\" data-log=\"{:d}{:d}\"{}>\n{}</div>\n", log_x, log_y,
                          log_x == chart.log_x && log_y == chart.log_y ? "" : " hidden", to_svg(variant, true));
    }
  return html + "<div class=\"tip chart\" hidden></div>\n<script type=\"application/json\">" + data_of(chart) +
         "</script>\n</figure>\n";
}

std::string chart_page_head() {
  return "<style>\n"
         "figure.plot{position:relative;margin:1rem 0}\n"
         ".axes{font-size:14px}\n"
         ".axes label{margin-right:1rem}\n"
         ".drawing svg{touch-action:pan-y}\n"
         ".tip{position:absolute;z-index:1;pointer-events:none;padding:.25rem .6rem;border:1px solid #999;"
         "border-radius:4px;font-size:13px;white-space:nowrap;font-variant-numeric:tabular-nums;background:#fff}\n"
         "@media (prefers-color-scheme:dark){.tip{background:#15181c}}\n"
         "</style>\n";
}

std::string chart_page_end() {
  return fmt::format("<script>\n{}</script>\n", chart_script());
}

}  // namespace furious
