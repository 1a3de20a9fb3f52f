// Looking a name up in a list of known ones; an unknown name is answered with the nearest. Names in messages.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace furious {

// The known name with the smallest edit distance to `name`; empty when none is near.
std::string nearest_name(std::string_view name, std::span<const std::string> known);

// Throws: unknown <kind> "name"; did you mean "…"? known: …
[[noreturn]] void unknown_name(std::string_view kind, std::string_view name, std::span<const std::string> known);

// A name out of a file, fit for a terminal: short and without control characters.
std::string printable(std::string_view name);

// What tells paths apart: each without the parts at its beginning and its end that all have in common. Of a single path
// its last part.
std::vector<std::string> distinguishing_names(const std::vector<std::filesystem::path>& paths);

}  // namespace furious
