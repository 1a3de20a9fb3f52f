// Flags for the text of input files.
#pragma once

#include <optional>

#include "cli/flags.h"
#include "data/reader.h"

namespace furious::cli {

inline void add_reader_flags(CLI::App& command, ReaderOptions& reader, std::optional<TextFormat>& format) {
  command
      .add_option("--field,--column", reader.field,
                  "Field of JSON records, or column of .csv, .tsv, .parquet and .arrow files, that holds the text")
      ->capture_default_str();
  command
      .add_option_function<std::string>(
          "--format", [&format](const std::string& name) { format = text_format_from_name(name); },
          "Format of the files given by name and of standard input; default: by the name, text for standard input")
      ->check(CLI::IsMember(text_format_names()));
}

}  // namespace furious::cli
