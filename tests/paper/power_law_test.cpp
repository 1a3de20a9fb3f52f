#include "paper/power_law.h"

#include <array>

#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<double> sizes(int count, double factor = 2) {
  std::vector<double> x;
  for (int i = 0; i < count; ++i) x.push_back(1e5 * std::pow(factor, i));
  return x;
}

std::vector<double> values(const std::vector<double>& x, double e, double a, double alpha) {
  std::vector<double> y;
  for (const double one : x) y.push_back(e + a * std::pow(one, -alpha));
  return y;
}

TEST(PowerLaw, FindsTheParametersOfExactPoints) {
  for (const auto& [e, a, alpha] :
       std::vector<std::array<double, 3>>{{1.69, 406.4, 0.34}, {1.7, 20, 0.1}, {0.5, 3e6, 1.2}, {3, 1e4, 0.7}})
    for (const int count : {4, 6, 12}) {
      const std::vector<double> x = sizes(count);
      const PowerLaw law = fit_power_law(x, values(x, e, a, alpha));
      EXPECT_NEAR(law.alpha, alpha, 1e-4 * alpha);
      EXPECT_NEAR(law.e, e, 1e-4 * e);
      EXPECT_NEAR(law.a, a, 2e-3 * a);
      EXPECT_LT(law.residual, 1e-6);
      EXPECT_TRUE(law.problem.empty()) << law.problem;
      EXPECT_NEAR(law.at(3e6), e + a * std::pow(3e6, -alpha), 1e-5);
    }
}

TEST(PowerLaw, WithoutAnOffset) {
  const std::vector<double> x = sizes(6);
  const PowerLaw law = fit_power_law(x, values(x, 0, 50, 0.2));
  EXPECT_NEAR(law.alpha, 0.2, 1e-3);
  EXPECT_NEAR(law.e, 0, 0.02);
}

// The errors cover what noise does: over many draws, about two thirds lie within one.
TEST(PowerLaw, StandardErrorsCoverTheNoise) {
  Random random(5);
  const std::vector<double> x = sizes(10, 3);
  int inside_alpha = 0, inside_e = 0;
  constexpr int kDraws = 300;
  for (int i = 0; i < kDraws; ++i) {
    std::vector<double> y = values(x, 1.7, 400, 0.3);
    for (double& value : y) value += 0.005 * random.normal();
    const PowerLaw law = fit_power_law(x, y);
    inside_alpha += std::abs(law.alpha - 0.3) < law.alpha_error;
    inside_e += std::abs(law.e - 1.7) < law.e_error;
  }
  for (const int inside : {inside_alpha, inside_e}) {
    EXPECT_GT(inside, 0.5 * kDraws);
    EXPECT_LT(inside, 0.8 * kDraws);
  }
}

TEST(PowerLaw, SaysWhatItCannotDetermine) {
  const std::vector<double> x = sizes(5);
  EXPECT_NE(fit_power_law(x, std::vector<double>{1, 2, 3, 4, 5}).problem.find("does not fall"), std::string::npos);
  EXPECT_FALSE(fit_power_law(x, std::vector<double>{3, 2, 2, 2, 2}).problem.empty());  // a step is no power law
  expect_error(
      [] {
        fit_power_law(std::vector<double>{1, 2, 3}, std::vector<double>{3, 2, 1});
      },
      {"3 different x", "4 or more"});
  expect_error(
      [] {
        fit_power_law(std::vector<double>{1, 2, 3, 3}, std::vector<double>{3, 2, 1, 1});
      },
      {"3 different x"});
  expect_error([] { fit_power_law(std::vector<double>{1, 2, 3, 0}, std::vector<double>{3, 2, 1, 1}); }, {"positive"});
  expect_error([] { fit_power_law(std::vector<double>{1, 2, 3, 4}, std::vector<double>{3, 2, 1, NAN}); }, {"finite"});
}

}  // namespace
}  // namespace furious
