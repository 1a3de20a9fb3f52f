#include "tensor/cuda.cuh"
#include "tensor/profiler.h"

namespace furious {

std::shared_ptr<void> record_event_cuda(int index) {
  const cudaStream_t stream = cuda::stream({DeviceKind::cuda, index});
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreate(&event), "profiler");
  std::shared_ptr<void> owner(event, [](void* pointer) { (void)cudaEventDestroy(static_cast<cudaEvent_t>(pointer)); });
  cuda::check(cudaEventRecord(event, stream), "profiler");
  return owner;
}

double seconds_between_cuda(void* from, void* to) {
  cuda::check(cudaEventSynchronize(static_cast<cudaEvent_t>(to)), "profiler");
  float milliseconds = 0;
  cuda::check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to)),
              "profiler");
  return static_cast<double>(milliseconds) / 1e3;
}

}  // namespace furious
