// Compiler, CPU and instruction set, for `furious --version` and bug reports.
#pragma once

#include <string>

#include "furious/version.h"

namespace furious {

std::string compiler();  // "g++ 12.2.0"
std::string cpu_name();  // "AMD EPYC", from /proc/cpuinfo
// The instruction set in use and those in the binary: "AVX-512 (built for AVX-512, AVX2, SSE2)".
std::string simd_target();

}  // namespace furious
