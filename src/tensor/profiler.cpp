#include "tensor/profiler.h"

#include <algorithm>

namespace furious {

#ifndef FURIOUS_CUDA
std::shared_ptr<void> record_event_cuda(int) {
  return nullptr;
}
double seconds_between_cuda(void*, void*) {
  return 0;
}
#endif

std::string_view name_of(StepPass pass) {
  constexpr std::string_view kNames[] = {"forward", "backward", "update"};
  return kNames[static_cast<size_t>(pass)];
}

Profiler::Profiler(Device device) : device_(device) {}

void Profiler::mark(int row) {
  current_ = row;
  if (device_.is_cpu())
    marks_.push_back({row, std::chrono::steady_clock::now(), nullptr});
  else
    marks_.push_back({row, {}, record_event_cuda(device_.index)});
}

Profiler::Scope::Scope(Profiler* profiler, const WorkLabel& label, StepPass pass)
    : profiler_(label.role.empty() ? nullptr : profiler) {
  if (profiler_ == nullptr) return;
  std::vector<Row>& rows = profiler_->rows_;
  auto row = std::ranges::find_if(rows, [&](const Row& each) { return each.label == label && each.pass == pass; });
  if (row == rows.end()) row = rows.insert(rows.end(), {label, pass});
  ++row->calls;
  before_ = profiler_->current_;
  profiler_->mark(static_cast<int>(row - rows.begin()));
}

Profiler::Scope::~Scope() {
  if (profiler_ == nullptr) return;
  try {
    profiler_->mark(before_);
  } catch (const Error&) {  // of the device: the next operation on it reports the same
  }
}

std::vector<Profiler::Row> Profiler::rows() const {
  std::vector<Row> rows = rows_;
  for (size_t i = 0; i + 1 < marks_.size(); ++i) {
    const Mark &from = marks_[i], &to = marks_[i + 1];
    if (from.row < 0) continue;
    rows[static_cast<size_t>(from.row)].seconds += from.event
                                                       ? seconds_between_cuda(from.event.get(), to.event.get())
                                                       : std::chrono::duration<double>(to.time - from.time).count();
  }
  return rows;
}

}  // namespace furious
