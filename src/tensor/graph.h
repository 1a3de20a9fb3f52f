// A CUDA graph: device work that is captured once and then launched as a whole, hundreds of kernels for the cost of one
// launch.
//
// Tensors allocated during capture come from an arena that belongs to the graph, so no other tensor reuses their memory
// and their addresses stay valid for every run. All other tensors that the work reads or writes must keep their
// addresses. The work must have run once before, so that capture contains no first-time initialization, and must
// neither synchronize with the device nor copy from or to the host. Launches of other threads during capture run
// immediately and are not part of the graph. `bytes`, if known, is the memory to reserve as one segment.
#pragma once

#include <functional>
#include <memory>

#include "tensor/device.h"

namespace furious {

class Graph {
 public:
  Graph(Device device, const std::function<void()>& work, size_t bytes = 0);  // captures; nothing runs yet
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void run() const;  // in stream order

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace furious
