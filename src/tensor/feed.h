// Asynchronous upload of the inputs of the next step: written to pinned host memory, copied to the device while the
// current step runs, and moved to their destination in stream order.
#pragma once

#include <memory>

#include "tensor/tensor.h"

namespace furious {

class Feed {
 public:
  explicit Feed(const Tensor& place);  // the destination: contiguous, on any device
  ~Feed();

  // Host memory of the destination's shape and dtype, to be filled. Waits until the last send() has read it.
  const Tensor& next() const;
  void send();    // starts the copy to the device, on a separate stream
  void arrive();  // copies to the destination, in stream order

 private:
  struct Staging;  // GPU only
  Tensor place_, here_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace furious
