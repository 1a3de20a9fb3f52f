#include "tensor/feed.h"

#include "tensor/device_cuda.h"

namespace furious {

// Pinned memory, which the copy reads while the CPU goes on, and memory of the device that waits for its turn: the
// place itself may still be in use.
struct Feed::Way {
  Way(int index, size_t bytes) : handle(open_way_cuda(index, bytes)) {}
  ~Way() { close_way_cuda(handle); }
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;

  void* handle;
};

Feed::Feed(const Tensor& place) : place_(place) {
  const Device device = place.device();
  if (device.is_cpu()) {
    here_ = Tensor::empty_like(place);
    return;
  }
  way_ = std::make_unique<Way>(device.index, place.bytes());
  here_ = Tensor::wrap(way_memory_cuda(way_->handle), place.shape(), place.dtype());
}

Feed::~Feed() = default;

const Tensor& Feed::next() const {
  if (way_) wait_for_way_cuda(way_->handle);
  return here_;
}

void Feed::send() {
  if (way_) send_cuda(way_->handle);
}

void Feed::arrive() {
  if (way_)
    arrive_cuda(way_->handle, place_.raw());
  else
    copy_between(place_, here_);
}

}  // namespace furious
