#include "tensor/feed.h"

#include "tensor/device_cuda.h"

namespace furious {

// Pinned memory, which the copy reads while the CPU goes on, and memory of the device that waits for its turn: the
// place itself may still be in use.
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
