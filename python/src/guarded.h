// An object of the library that one thread uses at a time, and not a callback of its own.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "furious/error.h"

namespace furious_python {

template <class Object>
class Guarded {
 public:
  template <class... Arguments>
  explicit Guarded(std::string name, Arguments&&... arguments)
      : name_(std::move(name)), object_(std::in_place, std::forward<Arguments>(arguments)...) {}

  // Without the GIL.
  template <class Work>
  auto with(const Work& work) {
    const std::unique_lock<std::mutex> lock = own();
    const nanobind::gil_scoped_release release;
    return work(*object_);
  }
  void close() {
    if (!object_) return;
    const std::unique_lock<std::mutex> lock = own();
    const nanobind::gil_scoped_release release;
    object_.reset();
  }

 private:
  std::unique_lock<std::mutex> own() {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock())
      throw furious::Error(name_ +
                           ": it is at work in another thread or calls this callback; wait for it, or use one " +
                           name_ + " for each thread");
    if (!object_) throw furious::Error(name_ + ": it is closed; make a new one");
    return lock;
  }

  std::mutex mutex_;
  std::string name_;
  std::optional<Object> object_;  // none: closed
};

}  // namespace furious_python
