#include "paper/power_law.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "base/error.h"

namespace furious {
namespace {

constexpr double kSmallestAlpha = 0.005, kLargestAlpha = 5;
constexpr int kGrid = 400;

// The best E and A for one α, with x in units of its geometric mean.
struct Linear {
  double e = 0, a = 0;
  double squares = 0;  // of the residuals
};

class Points {
 public:
  Points(std::span<const double> x, std::span<const double> y) : y_(y.begin(), y.end()) {
    for (const double value : x) unit_ += std::log(value) / static_cast<double>(x.size());
    for (const double value : x) log_x_.push_back(std::log(value) - unit_);
  }

  size_t size() const { return y_.size(); }
  double unit() const { return unit_; }  // logarithm of the geometric mean
  double log_x(size_t i) const { return log_x_[i]; }

  Linear fit(double alpha) const {
    const auto count = static_cast<double>(size());
    double u = 0, uu = 0, v = 0, uv = 0;  // sums of x^−α and y
    for (size_t i = 0; i < size(); ++i) {
      const double power = std::exp(-alpha * log_x_[i]);
      u += power;
      uu += power * power;
      v += y_[i];
      uv += power * y_[i];
    }
    Linear best;
    best.a = (uv - u * v / count) / (uu - u * u / count);
    best.e = (v - best.a * u) / count;
    if (best.e < 0) best = {0, uv / uu};
    for (size_t i = 0; i < size(); ++i) {
      const double off = y_[i] - best.e - best.a * std::exp(-alpha * log_x_[i]);
      best.squares += off * off;
    }
    return best;
  }

 private:
  std::vector<double> log_x_, y_;
  double unit_ = 0;
};

// Between two places around a minimum, by golden section.
double smallest_between(const Points& points, double low, double high) {
  const double ratio = (std::sqrt(5.0) - 1) / 2;
  for (int i = 0; i < 100; ++i) {
    const double left = high - ratio * (high - low), right = low + ratio * (high - low);
    (points.fit(left).squares < points.fit(right).squares ? high : low) =
        points.fit(left).squares < points.fit(right).squares ? right : left;
  }
  return (low + high) / 2;
}

// The diagonal of the inverse of a symmetric 3 × 3 matrix; NaN where it has none.
std::array<double, 3> inverse_diagonal(const std::array<std::array<double, 3>, 3>& m) {
  const auto minor = [&](size_t i, size_t j) {
    const size_t a = (i + 1) % 3, b = (i + 2) % 3, c = (j + 1) % 3, d = (j + 2) % 3;
    return m[a][c] * m[b][d] - m[a][d] * m[b][c];
  };
  const double determinant = m[0][0] * minor(0, 0) + m[0][1] * minor(0, 1) + m[0][2] * minor(0, 2);
  std::array<double, 3> diagonal{};
  for (size_t i = 0; i < 3; ++i) diagonal[i] = minor(i, i) / determinant;
  return diagonal;
}

// Of α and E, from the derivatives of the law with respect to E, A and α. Where E is at its bound it is not fitted.
void set_errors(PowerLaw& law, const Points& points, const Linear& best) {
  const bool fits_e = best.e > 0;
  const double free = static_cast<double>(points.size()) - (fits_e ? 3 : 2);
  std::array<std::array<double, 3>, 3> sums{};
  for (size_t i = 0; i < points.size(); ++i) {
    const double power = std::exp(-law.alpha * points.log_x(i));
    const std::array<double, 3> by{fits_e ? 1.0 : 0.0, power, -best.a * points.log_x(i) * power};
    for (size_t j = 0; j < 3; ++j)
      for (size_t k = 0; k < 3; ++k) sums[j][k] += by[j] * by[k];
  }
  if (!fits_e) sums[0][0] = 1;
  const std::array<double, 3> inverse = inverse_diagonal(sums);
  const double variance = best.squares / free;
  law.e_error = fits_e ? std::sqrt(variance * inverse[0]) : std::nan("");
  law.alpha_error = std::sqrt(variance * inverse[2]);
}

}  // namespace

double PowerLaw::at(double x) const {
  return e + a * std::pow(x, -alpha);
}

PowerLaw fit_power_law(std::span<const double> x, std::span<const double> y) {
  require(x.size() == y.size(), "power law: {} x values and {} y values", x.size(), y.size());
  const size_t different = std::set<double>(x.begin(), x.end()).size();
  require(different >= kFewestPoints, "power law: {} different x values; a fit of three numbers needs {} or more",
          different, kFewestPoints);
  const auto usable = [](double value) { return std::isfinite(value) && value > 0; };
  require(std::ranges::all_of(x, usable) && std::ranges::all_of(y, usable),
          "power law: a value is not finite or not positive");
  const Points points(x, y);
  const auto alpha_at = [](int i) {
    return kSmallestAlpha * std::pow(kLargestAlpha / kSmallestAlpha, static_cast<double>(i) / kGrid);
  };
  int best = 0;
  for (int i = 1; i <= kGrid; ++i)
    if (points.fit(alpha_at(i)).squares < points.fit(alpha_at(best)).squares) best = i;
  PowerLaw law;
  law.alpha = smallest_between(points, alpha_at(std::max(best - 1, 0)), alpha_at(std::min(best + 1, kGrid)));
  const Linear linear = points.fit(law.alpha);
  law.e = linear.e;
  law.a = linear.a * std::exp(law.alpha * points.unit());
  law.residual = std::sqrt(linear.squares / static_cast<double>(points.size()));
  set_errors(law, points, linear);
  if (linear.a <= 0)
    law.problem = "the loss does not fall";
  else if (best == 0 || best == kGrid)
    law.problem = "α is at the end of its range: these points do not determine it";
  return law;
}

}  // namespace furious
