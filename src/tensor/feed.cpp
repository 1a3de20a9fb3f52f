#include "tensor/feed.h"

#include "tensor/device_cuda.h"

namespace furious {

// A pinned host buffer, so that the copy is asynchronous, and a device buffer, since the destination may still be in
// use when the copy runs.
struct Feed::Staging {
  Staging(int index, size_t bytes) : handle(open_staging_cuda(index, bytes)) {}
  ~Staging() { close_staging_cuda(handle); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void* handle;
};

Feed::Feed(const Tensor& place) : place_(place) {
  const Device device = place.device();
  if (device.is_cpu()) {
    here_ = Tensor::empty_like(place);
    return;
  }
  staging_ = std::make_unique<Staging>(device.index, place.bytes());
  here_ = Tensor::wrap(staging_memory_cuda(staging_->handle), place.shape(), place.dtype());
}

Feed::~Feed() = default;

const Tensor& Feed::next() const {
  if (staging_) wait_for_staging_cuda(staging_->handle);
  return here_;
}

void Feed::send() {
  if (staging_) send_cuda(staging_->handle);
}

void Feed::arrive() {
  if (staging_)
    arrive_cuda(staging_->handle, place_.raw());
  else
    copy_between(place_, here_);
}

}  // namespace furious
