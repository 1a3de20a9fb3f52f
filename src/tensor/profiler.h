// Where the time of a training step goes, by operation.
//
//   Profiler profiler(device);
//   { Profiler::Scope scope(&profiler, {"mixer", "mixer"}, StepPass::forward);  ... work ... }
//   for (const Profiler::Row& row : profiler.rows()) ...
//
// Scopes nest: work counts for the innermost. On a GPU an event is recorded where a scope begins and where it ends, and
// nothing waits for the device before rows(). Without a profiler a scope costs one comparison. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tensor/device.h"

namespace furious {

enum class StepPass : uint8_t { forward, backward, update };
std::string_view name_of(StepPass pass);

// The part of a model that some work serves, and the operation; both are literals.
struct WorkLabel {
  std::string_view role, operation;

  bool operator==(const WorkLabel&) const = default;
};

class Profiler {
 public:
  explicit Profiler(Device device);
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  class Scope {
   public:
    // No effect without a profiler or with an empty label.
    Scope(Profiler* profiler, const WorkLabel& label, StepPass pass);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Profiler* profiler_;
    int before_ = -1;
  };

  struct Row {
    WorkLabel label;
    StepPass pass;
    int64_t calls = 0;
    double seconds = 0;
  };
  std::vector<Row> rows() const;  // in the order of their first scope; waits for the device

 private:
  void mark(int row);

  struct Mark {
    int row;  // what the time after the mark counts for; -1: for nothing
    std::chrono::steady_clock::time_point time;
    std::shared_ptr<void> event;  // on a GPU instead of the time
  };
  Device device_;
  int current_ = -1;
  std::vector<Row> rows_;
  std::vector<Mark> marks_;
};

// Events with the time of a device's stream.
std::shared_ptr<void> record_event_cuda(int index);
double seconds_between_cuda(void* from, void* to);  // waits for the later one

}  // namespace furious
