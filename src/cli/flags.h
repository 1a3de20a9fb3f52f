// Flags that several commands have, with one help text and one check each.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

#include "furious/error.h"
#include "tensor/device.h"

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

// Refuses what `parse` throws an Error for, with its message.
template <class Parse>
CLI::Validator parsed_by(Parse parse) {
  const auto check = [parse](std::string& text) {
    try {
      parse(text);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  return CLI::Validator(check, "");
}

// A list: several values with commas, so that the word after a space is not part of it.
inline CLI::Option* with_commas(CLI::Option* option) {
  return option->delimiter(',')->allow_extra_args(false);
}

inline void add_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "Number of CPU threads; 0: all cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

inline void add_device(CLI::App& command, std::string& device) {
  const auto parse = [](const std::string& name) {
    if (name != "auto") device_from_name(name);
  };
  command.add_option("--device", device, "Device: cpu, cuda or cuda:N; auto: a GPU if there is one")
      ->check(parsed_by(parse))
      ->capture_default_str();
}

// Of a model that is loaded or built for inference.
inline void add_dtype(CLI::App& command, std::string& dtype) {
  command
      .add_option("--dtype", dtype,
                  "Dtype of matrix products, on a GPU also of activations: f32 or bf16; auto: bf16 on a GPU, f32 on a "
                  "CPU")
      ->check(CLI::IsMember({"auto", "f32", "bf16"}))
      ->capture_default_str();
}

inline void add_vocabulary(CLI::App& command, int64_t& vocabulary) {
  command.add_option("--vocab", vocabulary, "Vocabulary size of the model")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 30))
      ->capture_default_str();
}

inline CLI::Option* add_json(CLI::App& command, std::string& path, const std::string& help) {
  return command.add_option("--json", path, help);
}

}  // namespace furious::cli
