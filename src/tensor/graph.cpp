#include "tensor/graph.h"

#ifndef FURIOUS_CUDA

#include "base/error.h"

namespace furious {

struct Graph::Parts {};

Graph::Graph(Device, const std::function<void()>&, size_t) {
  fail("this furious was built without CUDA; it has no graphs");
}
Graph::~Graph() = default;
void Graph::run() const {}

}  // namespace furious

#endif
