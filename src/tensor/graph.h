// Work of a device that is recorded once and then started as a whole (a CUDA graph): hundreds of kernels for the cost
// of one launch.
//
// Memory that the work takes while it is recorded lies in an arena of the graph's own and stays there: no other tensor
// is given it, and the work finds it again each time it runs. What the work reads and writes besides must stay where it
// was. The work must have run before, so that nothing has to be made ready for the first time while it is recorded, and
// may neither wait for the device nor copy from or to the host. What other threads give to the device meanwhile runs at
// once and is no part of the graph. `bytes`, where known, is how much memory the work takes: it is then one piece.
#pragma once

#include <functional>
#include <memory>

#include "tensor/device.h"

namespace furious {

class Graph {
 public:
  Graph(Device device, const std::function<void()>& work, size_t bytes = 0);  // records; nothing runs yet
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void run() const;  // in the order of the device's other work

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace furious
