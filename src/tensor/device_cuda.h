// The CUDA side of device.h; device.cpp answers for it in a build without CUDA.
#pragma once

#include <cstddef>

namespace furious::memory {

void* allocate_cuda(int index, size_t bytes);
void release_cuda(int index, void* pointer);

}  // namespace furious::memory
