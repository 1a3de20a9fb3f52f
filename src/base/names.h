// Errors for unknown names, which suggest the nearest known one, and names in messages.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace furious {

// The known name with the smallest edit distance to `name`; empty if none is close.
std::string nearest_name(std::string_view name, std::span<const std::string> known);

// Throws: unknown <kind> "name"; did you mean "…"? known: …
[[noreturn]] void unknown_name(std::string_view kind, std::string_view name, std::span<const std::string> known);

// A name from a file, made safe for a terminal: truncated, with control characters escaped.
std::string printable(std::string_view name);

// Short names for paths: each without the leading and trailing components that all have in common. For a single path,
// its last component.
std::vector<std::string> distinguishing_names(const std::vector<std::filesystem::path>& paths);

}  // namespace furious
