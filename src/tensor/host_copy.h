// An asynchronous copy to the host:
//
//   HostCopy copy(tensor);    ... more launches ...    copy.wait()
//
// wait() blocks until the work launched before the copy, and the copy, are done; it does not wait for later launches.
// Those do not wait for the copy either: nothing may write to the tensor before wait().
#pragma once

#include <memory>

#include "tensor/tensor.h"

namespace furious {

class HostCopy {
 public:
  explicit HostCopy(const Tensor& from);  // contiguous
  HostCopy(HostCopy&&) = default;
  HostCopy& operator=(HostCopy&&) = delete;  // would release the tensors before the copy is done
  Tensor wait() const;                       // the tensor on the CPU; `from` itself if it is there already

 private:
  Tensor from_, to_;  // kept alive until the copy is done
  std::shared_ptr<void> done_;
};

namespace memory {
// Pinned host memory, and an asynchronous copy to it. Releasing the handle of a copy waits for the copy.
std::shared_ptr<void> pinned_cuda(size_t bytes);
std::shared_ptr<void> copy_later_cuda(int index, void* to, const void* from, size_t bytes);
void wait_cuda(void* copy);
}  // namespace memory

}  // namespace furious
