// The flags that say what a model is, where its files do not: the same in every command that loads one.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "cli/checks.h"
#include "furious/model.h"
#include "model/checkpoint.h"

namespace furious::cli {

inline void add_load_flags(CLI::App& command, LoadOptions& load) {
  command.add_option("--arch", load.arch,
                     "The architecture, for weights without a config.json: a preset or an attention_type of the "
                     "authors' release");
  command
      .add_option("--heads", load.heads, "The number of heads, for weights without a config.json that do not tell it")
      ->check(CLI::Range(1, 1 << 14));
  command.add_flag("--bos", load.bos, "Texts begin with bos, as those of plain Llamas and of the authors' release do");
}

inline void show_notes(const std::string& model) {
  for (const std::string& note : load_notes(model)) fmt::print(stderr, "note: {}\n", note);
}

}  // namespace furious::cli
