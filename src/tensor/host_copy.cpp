#include "tensor/host_copy.h"

#include "base/error.h"

namespace furious {

#ifndef FURIOUS_CUDA
namespace memory {
std::shared_ptr<void> pinned_cuda(size_t) {
  fail("this furious was built without CUDA; it has no pinned memory");
}
std::shared_ptr<void> copy_later_cuda(int, void*, const void*, size_t) {
  return nullptr;
}
void wait_cuda(void*) {}
}  // namespace memory
#endif

HostCopy::HostCopy(const Tensor& from) : from_(from), to_(from) {
  if (from.device().is_cpu()) return;
  require(from.is_contiguous(), "copy to the host: the tensor of shape {} is not contiguous", to_string(from.shape()));
  std::shared_ptr<void> place = memory::pinned_cuda(from.bytes());
  void* const data = place.get();
  to_ = Tensor::wrap(data, from.shape(), from.dtype(), {}, std::move(place));
  done_ = memory::copy_later_cuda(from.device().index, data, from.raw(), from.bytes());
}

Tensor HostCopy::wait() const {
  if (done_) memory::wait_cuda(done_.get());
  return to_;
}

}  // namespace furious
