#include "base/names.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace furious {
namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view name, std::span<const std::string> known) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 2) + 1;
  for (const std::string& candidate : known) {
    const size_t distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

void unknown_name(std::string_view kind, std::string_view name, std::span<const std::string> known) {
  const std::string nearest = nearest_name(name, known);
  const std::string hint = nearest.empty() ? "" : fmt::format("; did you mean \"{}\"?", nearest);
  fail("unknown {} \"{}\"{} (known: {})", kind, name, hint, fmt::join(known, ", "));
}

std::string printable(std::string_view name) {
  constexpr size_t kShown = 120;
  std::string text;
  for (const char c : name.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7F ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return text + (name.size() > kShown ? "…" : "");
}

std::vector<std::string> distinguishing_names(const std::vector<std::filesystem::path>& paths) {
  std::vector<std::vector<std::string>> parts;
  for (const std::filesystem::path& path : paths) {
    auto& own = parts.emplace_back();
    for (const std::filesystem::path& part : std::filesystem::absolute(path).lexically_normal())
      if (!part.empty()) own.push_back(part.string());  // a trailing slash gives an empty component
  }
  size_t first = 0, last = 0;  // number of common components; at least one of each path remains
  const auto all_have = [&](auto&& part_of) {
    return !parts.empty() && std::ranges::all_of(parts, [&](const std::vector<std::string>& own) {
      return first + last + 1 < own.size() && part_of(own) == part_of(parts.front());
    });
  };
  while (all_have([&](const auto& own) { return own[first]; })) ++first;
  while (all_have([&](const auto& own) { return own[own.size() - 1 - last]; })) ++last;
  std::vector<std::string> names;
  for (const auto& own : parts) {
    std::string name;
    for (size_t i = first; i + last < own.size(); ++i) name += (name.empty() ? "" : "/") + own[i];
    names.push_back(name);
  }
  return names;
}

}  // namespace furious
