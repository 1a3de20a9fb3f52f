// What the parts of the emulated CUDA runtime share: runtime.cpp (the device, errors, memory), streams.cpp (streams,
// events, graphs), launch.cpp (kernels) and cublaslt.cpp. All of it is called with the mutex locked, which call() does.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

namespace furious::emulator {

// One for all: the work of a call ends before another thread's call begins. Recursive, because graphs run calls.
std::recursive_mutex& runtime_mutex();

// The status that a function of the runtime returns, and why. Any other exception is an error of a kernel.
class Failure : public std::runtime_error {
 public:
  Failure(cudaError_t error, const std::string& message) : std::runtime_error(message), status(error) {}
  cudaError_t status;
};

// What cudaGetLastError() is told of a failed call. An error of a kernel that the function returns to its caller is not
// left there for the next test to find.
enum class LastError { of_failures, of_all, none };

// Prints the current exception and remembers its message for cudaGetErrorString().
cudaError_t report_exception(LastError remembered);

// Every function of the runtime that may fail is one of these.
template <class Body>
cudaError_t call(const Body& body, LastError remembered = LastError::of_failures) {
  const std::lock_guard lock(runtime_mutex());
  try {
    body();
    return cudaSuccess;
  } catch (...) {
    return report_exception(remembered);
  }
}

// Runs the work, or records it if the stream is being captured. Throws what the work throws.
void enqueue(cudaStream_t stream, std::function<void()> work);

// Throws a Failure if these bytes are not within one allocation that the device can use.
void require_memory(const void* begin, size_t bytes, std::string_view what);

// Whether this thread captures a stream.
bool is_capturing();

// Where the allocation on the device begins that this address lies in; nullptr if there is none.
const void* device_allocation_of(const void* pointer);

inline constexpr int kUnwritten = 0xFF;  // of bytes of new device memory: a NaN in every format of floats

// Of the compute capability that FURIOUS_EMULATED_CAPABILITY names: 8.0, 9.0 (the default) or 12.0; with as many
// multiprocessors as FURIOUS_EMULATED_MULTIPROCESSORS says: few by default, as the grids of persistent kernels grow
// with them.
struct DeviceFacts {
  int major, minor;
  size_t shared_per_block, shared_per_multiprocessor;  // bytes
  int threads_per_multiprocessor;
  int multiprocessors = 4;

  bool has_clusters() const { return major >= 9; }
};
const DeviceFacts& device_facts();

inline constexpr size_t kDefaultSharedMemory = 48 * 1024;
inline constexpr size_t kReservedSharedMemory = 1024;  // of every block
inline constexpr int kMostThreads = 1024;              // of a block
inline constexpr int kWarpSize = 32;

// cuTensorMapEncodeTiled, as cudaGetDriverEntryPointByVersion() returns it.
void* tensor_map_encoder();

}  // namespace furious::emulator
