// Better words than CLI11's for flags and arguments that a command does not have.
#pragma once

#include <CLI/CLI.hpp>

namespace furious::cli {

// Throws a UsageError for the first unknown flag among the words: it names the flag that is meant, or says what there
// is instead. Does nothing if all flags are known.
void check_flags(const CLI::App& command, int argc, char** argv);

// Throws a UsageError for arguments that are left over, in their order. Does nothing if there are none.
void check_arguments(const CLI::App& command);

}  // namespace furious::cli
