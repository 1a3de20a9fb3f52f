// The CUDA side of device.h; device.cpp answers for it in a build without CUDA.
#pragma once

#include <cstddef>

namespace furious::memory {

void* allocate_cuda(int index, size_t bytes);
void release_cuda(int index, void* pointer);
void copy_cuda(void* to, const void* from, size_t bytes);  // each end on any device

}  // namespace furious::memory
