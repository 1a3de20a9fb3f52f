// A power law with an offset, as papers on scaling fit it to losses:
//
//   y = E + A x^−α        E ≥ 0, A > 0, α > 0
//
// For a given α the best E and A are a linear least-squares problem; α is searched on a grid and then refined. So the
// fit needs no first guess and has no local minimum to stop in that the grid does not show.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace furious {

inline constexpr size_t kFewestPoints = 4;  // with different x: three numbers are fitted

struct PowerLaw {
  double e = 0, a = 0, alpha = 0;
  // Standard errors, from the curvature at the best fit and the residuals; NaN where the points do not give them. Of A
  // there is none: it is the value at x = 1, far from all points.
  double e_error = 0, alpha_error = 0;
  double residual = 0;  // root of the mean square of y − fit
  std::string problem;  // why the law is not determined by the points; empty if it is

  double at(double x) const;
};

// Throws where there are fewer than kFewestPoints different x, or a value is not finite and positive.
PowerLaw fit_power_law(std::span<const double> x, std::span<const double> y);

}  // namespace furious
