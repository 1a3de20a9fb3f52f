#include "tensor/cuda.cuh"
#include "tensor/stream.h"

namespace furious {

StreamScope::StreamScope(Device device, void* stream) : device_(device), stream_(stream) {
  if (device.is_cpu()) return;
  const KeepCurrentDevice keep(device);
  const cudaStream_t own = cuda::stream(device);  // makes the device current
  const auto caller = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(caller, &capture), "stream");
  require(capture == cudaStreamCaptureStatusNone,
          "stream: it is being captured into a CUDA graph, whose runs would use scratch memory that others have by "
          "then; call the library outside of the capture");
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "stream");
  cudaError_t status = cudaEventRecord(event, caller);
  if (status == cudaSuccess) status = cudaStreamWaitEvent(own, event);
  if (status != cudaSuccess) (void)cudaEventDestroy(event);
  cuda::check(status, "stream");
  event_ = event;
}

StreamScope::~StreamScope() {
  if (event_ == nullptr) return;
  const KeepCurrentDevice keep(device_);
  const auto event = static_cast<cudaEvent_t>(event_);
  // Recording again does not change what the device's stream waits for. An error here is one of the device, which the
  // next call reports.
  try {
    (void)cudaEventRecord(event, cuda::stream(device_));
    (void)cudaStreamWaitEvent(static_cast<cudaStream_t>(stream_), event);
  } catch (const Error&) {  // the device cannot be made current
  }
  (void)cudaEventDestroy(event);  // released when it has been reached
}

KeepCurrentDevice::KeepCurrentDevice(Device used) {
  if (used.is_cpu()) return;
  if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
}

KeepCurrentDevice::~KeepCurrentDevice() {
  if (before_ >= 0) (void)cudaSetDevice(before_);
}

}  // namespace furious
