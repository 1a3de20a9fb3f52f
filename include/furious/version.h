// The version of the library that a program runs with.
#pragma once

#include <string>

#include "furious/export.h"

namespace furious {

FURIOUS_API std::string version();  // "0.1.0"

}  // namespace furious
