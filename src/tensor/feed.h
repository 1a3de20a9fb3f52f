// Data on its way to a device: written into memory of the CPU, copied while the device works on what came before, and
// put in its place when its turn comes.
#pragma once

#include <memory>

#include "tensor/tensor.h"

namespace furious {

class Feed {
 public:
  explicit Feed(const Tensor& place);  // contiguous, on any device
  ~Feed();

  // Memory of the CPU like the place, to be written; it is free again, once what was sent from it has left.
  const Tensor& next() const;
  void send();    // to the device, on a stream of its own
  void arrive();  // into its place, in the order of the device's work

 private:
  struct Staging;  // to a GPU
  Tensor place_, here_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace furious
