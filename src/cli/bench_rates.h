// Measurements that the benchmarks share.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "ops/elementwise.h"

namespace furious::cli {

// Including the work of the device.
template <class Work>
double seconds_of(Work&& work, Device device = {}) {
  synchronize(device);
  const auto start = std::chrono::steady_clock::now();
  work();
  synchronize(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes per second of a large copy, reads plus writes: the memory bandwidth that bounds decoding.
inline double copy_rate(Device device) {
  const int64_t floats = device.is_cpu() ? 64 << 20 : 512 << 20;
  const Tensor from = Tensor::empty({floats}, DType::f32, device);
  const Tensor to = Tensor::empty({floats}, DType::f32, device);
  fill(from, 1);
  fill(to, 0);
  double best = 1e30;
  for (int i = 0; i < 5; ++i) best = std::min(best, seconds_of([&] { copy(to, from); }, device));
  return 2.0 * static_cast<double>(from.bytes()) / best;
}

// Runs a benchmark; out of memory is an error that says what to do.
template <class Work>
void with_memory_advice(std::string_view advice, Work&& work) {
  try {
    work();
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(fmt::format("{}; {}", error.what(), advice));
  }
}

}  // namespace furious::cli
