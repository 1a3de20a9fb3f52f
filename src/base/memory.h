// How much memory there is.
#pragma once

#include <cstdint>

namespace furious {

// Bytes that this process may still take: of the machine's memory, and of its control group where that is limited.
int64_t available_memory();

}  // namespace furious
