#include <mutex>

#include "tensor/arena.h"
#include "tensor/cuda.cuh"
#include "tensor/device_cuda.h"
#include "tensor/graph.h"

namespace furious {

struct Graph::Parts {
  Device device;
  Arena arena{device};
  cudaGraphExec_t graph = nullptr;

  ~Parts() {
    if (graph != nullptr) (void)cudaGraphExecDestroy(graph);
  }
};

Graph::Graph(Device device, const std::function<void()>& work, size_t bytes) : parts_(new Parts{device}) {
  parts_->arena.keep_segments();
  if (bytes > 0) parts_->arena.reserve(bytes);
  const Arena::Scope scope(parts_->arena);
  // Other threads continue to launch on the device's stream. Relaxed mode: the arena may call cudaMalloc.
  const CaptureStream own(device.index);
  const cudaStream_t stream = cuda::stream(device);
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "graph");
  cudaGraph_t recorded = nullptr;
  try {
    work();
  } catch (...) {
    (void)cudaStreamEndCapture(stream, &recorded);
    if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
    (void)cudaGetLastError();
    throw;
  }
  cuda::check(cudaStreamEndCapture(stream, &recorded), "graph");
  const cudaError_t status = cudaGraphInstantiate(&parts_->graph, recorded, 0);
  (void)cudaGraphDestroy(recorded);
  cuda::check(status, "graph");
}

Graph::~Graph() {
  // The last run may not have finished; its memory must not be released before.
  if (parts_) synchronize(parts_->device);
}

void Graph::run() const {
  const cudaStream_t stream = cuda::stream(parts_->device);
  const std::lock_guard lock(cuda::launch_mutex(parts_->device));
  cuda::check(cudaGraphLaunch(parts_->graph, stream), "graph");
}

}  // namespace furious
