// Available host memory.
#pragma once

#include <cstdint>

namespace furious {

// Bytes that this process can still allocate: the minimum of free system memory and the rest of its cgroup's limit.
int64_t available_memory();

}  // namespace furious
