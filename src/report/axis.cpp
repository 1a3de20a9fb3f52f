#include "report/axis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace furious {
namespace {

int exponent_of(double value) {
  return static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-9));
}

// 1, 2 or 5 times a power of ten, at least an eighth of the span.
double nice_step(double span) {
  const double power = std::pow(10, std::floor(std::log10(span / 8)));
  const double rest = span / 8 / power;
  return power * (rest <= 1 ? 1 : rest <= 2 ? 2 : rest <= 5 ? 5 : 10);
}

void add_even_ticks(Axis& axis, double low, double high) {
  axis.step = nice_step(high - low);
  axis.ticks.clear();
  for (double i = std::ceil(low / axis.step - 1e-9); i <= high / axis.step + 1e-9; ++i)
    axis.ticks.push_back(i * axis.step + 0.0);  // no negative zero
}

// Powers of ten; where those are fewer than three, also 2 and 5 times them; where those are too, even steps.
void add_log_ticks(Axis& axis) {
  const int first = static_cast<int>(std::ceil(axis.low - 1e-9));
  const int last = static_cast<int>(std::floor(axis.high + 1e-9));
  const int stride = (last - first) / 8 + 1;
  const std::vector<double> factors = last - first < 2 ? std::vector<double>{1, 2, 5} : std::vector<double>{1};
  for (int exponent = first - 1; exponent <= last; ++exponent)
    for (const double factor : factors) {
      const double place = exponent + std::log10(factor);
      if ((exponent - first) % stride == 0 && place >= axis.low - 1e-9 && place <= axis.high + 1e-9)
        axis.ticks.push_back(factor * std::pow(10, exponent));
    }
  if (axis.ticks.size() < 3) add_even_ticks(axis, std::pow(10, axis.low), std::pow(10, axis.high));
}

// For values between low and high.
Axis axis_between(bool log, double low, double high, double free) {
  Axis axis;
  axis.log = log;
  if (low > high) {  // no values
    low = log ? 1 : 0;
    high = log ? 10 : 1;
  }
  const double size = std::max(std::abs(low), std::abs(high));
  if (log) {
    low = std::log10(low);
    high = std::log10(high);
    if (high - low < 1e-9) {
      low -= 0.5;
      high += 0.5;
    }
  } else if (high - low <= std::max(1e-12 * size, 1e-290)) {  // one value, up to rounding
    const double around = size > 1e-280 ? 0.1 * size : 1;
    low -= around;
    high += around;
  } else if (low > 0 && low < 0.1 * high) {
    low = 0;
  }
  const double span = high - low;
  axis.low = low == 0 && !log ? low : low - free * span;
  axis.high = high + free * span;
  if (log)
    add_log_ticks(axis);
  else
    add_even_ticks(axis, axis.low, axis.high);
  return axis;
}

std::string superscript(int number) {
  static constexpr std::array kDigits = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string text;
  for (const char c : std::to_string(number)) text += c == '-' ? "⁻" : kDigits[c - '0'];
  return text;
}

}  // namespace

bool drawable(double value, bool log) {
  return std::abs(value) <= 1e300 && (!log || value >= 1e-300);
}

bool has_band(const Series& series, size_t i, bool log) {
  return !series.low.empty() && drawable(series.low[i], log) && drawable(series.high[i], log);
}

Axis make_axis(const Chart& chart, bool log, std::vector<double> Series::*values, double free) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const Series& series : chart.series)
    for (size_t i = 0; i < series.x.size(); ++i) {
      if (!drawable(series.x[i], chart.log_x) || !drawable(series.y[i], chart.log_y)) continue;
      const auto cover = [&](double value) {
        low = std::min(low, value);
        high = std::max(high, value);
      };
      cover((series.*values)[i]);
      if (values == &Series::x || !has_band(series, i, chart.log_y)) continue;
      cover(series.low[i]);
      cover(series.high[i]);
    }
  return axis_between(log, low, high, free);
}

std::string tick_text(const Axis& axis, double value) {
  const auto [low, high] = std::minmax({std::abs(axis.ticks.front()), std::abs(axis.ticks.back())});
  const double smallest = axis.step > 0 ? high : low;  // even ticks count in units of the largest
  const int exponent = value == 0 ? 0 : exponent_of(value);
  const int last_digit = axis.step > 0 ? exponent_of(axis.step) : exponent;
  const bool plain = smallest > 0.999e-3 && high < 0.999e6;
  if (plain || value == 0 || (axis.step == 0 && (exponent == 0 || exponent == 1)))
    return fmt::format("{:.{}f}", value, plain ? std::max(0, -last_digit) : 0);
  const std::string factor =
      fmt::format("{:.{}g}", value / std::pow(10, exponent), std::max(1, exponent - last_digit + 1));
  const std::string power = "10" + superscript(exponent);
  return factor == "1" ? power : factor == "-1" ? "-" + power : factor + "×" + power;
}

}  // namespace furious
