// What numbers on the command line may be.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace furious::cli {

// CLI::NonNegativeNumber and CLI::PositiveNumber name the largest double, with all its 309 digits.
inline CLI::Validator at_least(double least) {
  const auto check = [least](std::string& text) {
    double value = 0;
    const bool fits = CLI::detail::lexical_cast(text, value) && value >= least;
    return fits ? std::string() : fmt::format("{} is not a number of {} or more", text, least);
  };
  return CLI::Validator(check, fmt::format(">={}", least));
}

inline void add_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "0: all")->check(CLI::Range(0, 4096))->capture_default_str();
}

}  // namespace furious::cli
