// What this binary is and what it runs on, for `furious --version` and bug reports.
#pragma once

#include <string>

#include "furious/version.h"

namespace furious {

std::string compiler();     // "g++ 12.2.0"
std::string cpu_name();     // "AMD EPYC", as the system names it
std::string simd_target();  // the instruction set chosen on this machine, of those in the binary: "AVX3 (built for
                            // AVX3, AVX2, SCALAR)"

}  // namespace furious
