// The device code that nvcc puts into an object file.
#pragma once

#include <optional>
#include <string>

namespace furious::emulator {

struct DeviceCode {
  int architecture = 0;  // 10 * major + minor
  std::string ptx;
};
// The PTX of the largest architecture that a device of this compute capability can use, if there is one. `wrapper`:
// what __cudaRegisterFatBinary is called with. Throws std::runtime_error if the format is not known.
std::optional<DeviceCode> device_code(const void* wrapper, int major, int minor);

}  // namespace furious::emulator
