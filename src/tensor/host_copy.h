// A copy to the host that the device makes when it comes to it, while the host goes on:
//
//   HostCopy copy(tensor);    ... more work for the device ...    copy.wait()
//
// waits for what was given to the device before the copy, not for what came after it. Nor does that wait for the copy:
// nothing may write to the tensor before wait().
#pragma once

#include <memory>

#include "tensor/tensor.h"

namespace furious {

class HostCopy {
 public:
  explicit HostCopy(const Tensor& from);  // contiguous
  HostCopy(HostCopy&&) = default;
  HostCopy& operator=(HostCopy&&) = delete;  // would let go of the tensors before the copy is done
  Tensor wait() const;                       // on the CPU; the tensor itself if it was there

 private:
  Tensor from_, to_;  // both stay until the copy is done
  std::shared_ptr<void> done_;
};

namespace memory {
// Memory of the host that a GPU writes without help, and the copy there; the handle waits for it when it is released.
std::shared_ptr<void> pinned_cuda(size_t bytes);
std::shared_ptr<void> copy_later_cuda(int index, void* to, const void* from, size_t bytes);
void wait_cuda(void* copy);
}  // namespace memory

}  // namespace furious
