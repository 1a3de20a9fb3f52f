// The CUDA side of device.h; device.cpp answers for it in a build without CUDA.
#pragma once

#include <cstddef>

namespace furious {

void synchronize_cuda(int index);

namespace memory {

void* allocate_cuda(int index, size_t bytes);
void release_cuda(int index, void* pointer);
void copy_cuda(int index, void* to, const void* from, size_t bytes);  // in the order of that device's work; either end
                                                                      // on any device; done when it returns
void clear_cuda(int index, void* pointer, size_t bytes);

}  // namespace memory
}  // namespace furious
