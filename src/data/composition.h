// Canonical composition of Unicode (NFC).
#pragma once

#include <string>

namespace furious {

// `text` must be valid UTF-8.
std::string canonical_composition(std::string text);

// Characters from U+0300 on that composition leaves as they are, whatever stands beside them: the frequent ones.
bool is_always_composed(unsigned code_point);

}  // namespace furious
