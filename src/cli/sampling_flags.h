// Flags of every command that writes text: how the next token is chosen.
#pragma once

#include "cli/flags.h"
#include "furious/model.h"

namespace furious::cli {

void add_sampling(CLI::App& command, Sampling& sampling);

}  // namespace furious::cli
