#include <map>
#include <mutex>
#include <vector>

#include "tensor/cuda.cuh"
#include "tensor/host_copy.h"

namespace furious::memory {
namespace {

// Pinning memory is slow: released buffers are kept and reused for copies of the same size.
struct Pool {
  std::mutex mutex;
  std::multimap<size_t, void*> places;
};
Pool& pool() {
  static Pool& only = *new Pool;  // never destroyed: tensors with static lifetime may be released during exit
  return only;
}

// Copies use a separate stream, so that later launches do not wait for them.
cudaStream_t copy_stream(int index) {
  static std::mutex mutex;
  static std::map<int, cudaStream_t> streams;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = streams.try_emplace(index);
  if (is_new) cuda::check(cudaStreamCreateWithFlags(&entry->second, cudaStreamNonBlocking), "stream of copies");
  return entry->second;
}

}  // namespace

std::shared_ptr<void> pinned_cuda(size_t bytes) {
  void* place = nullptr;
  {
    const std::lock_guard lock(pool().mutex);
    if (const auto found = pool().places.find(bytes); found != pool().places.end()) {
      place = found->second;
      pool().places.erase(found);
    }
  }
  if (place == nullptr) cuda::check(cudaMallocHost(&place, std::max<size_t>(bytes, 1)), "pinned memory");
  return {place, [bytes](void* pointer) {
            const std::lock_guard lock(pool().mutex);
            pool().places.emplace(bytes, pointer);
          }};
}

std::shared_ptr<void> copy_later_cuda(int index, void* to, const void* from, size_t bytes) {
  const cudaStream_t stream = cuda::stream({DeviceKind::cuda, index});
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  const std::shared_ptr<void> done(event, [](void* pointer) {
    // The destination may be reused for another copy after this.
    (void)cudaEventSynchronize(static_cast<cudaEvent_t>(pointer));
    (void)cudaEventDestroy(static_cast<cudaEvent_t>(pointer));
  });
  const cudaStream_t copies = copy_stream(index);
  cuda::check(cudaEventRecord(event, stream), "event");
  cuda::check(cudaStreamWaitEvent(copies, event), "event");
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, copies), "copy to the host");
  cuda::check(cudaEventRecord(event, copies), "event");
  return done;
}

void wait_cuda(void* copy) {
  cuda::check(cudaEventSynchronize(static_cast<cudaEvent_t>(copy)), "copy to the host");
}

}  // namespace furious::memory
