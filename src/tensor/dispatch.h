// Selects the kernels of a device. Each operation has a namespace cpu and, in a build with CUDA, a namespace cuda with
// functions of the same names. Without CUDA every tensor is on the CPU.
#pragma once

#include "tensor/device.h"

#ifdef FURIOUS_CUDA
#define FURIOUS_DISPATCH(device, ...) ((device).is_cpu() ? cpu::__VA_ARGS__ : cuda::__VA_ARGS__)
#else
#define FURIOUS_DISPATCH(device, ...) ((void)(device), cpu::__VA_ARGS__)
#endif
