// What this binary is and what it runs on, for `furious --version` and bug reports.
#pragma once

#include <string>

#include "furious/version.h"

namespace furious {

std::string compiler();  // "g++ 12.2.0"
std::string cpu_name();  // "AMD EPYC", as the system names it
// The instruction set in use and those in the binary: "AVX-512 (built for AVX-512, AVX2, SSE2)".
std::string simd_target();

}  // namespace furious
