// Counters of the server, in the text format of Prometheus.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace furious::serve {

// Seconds, counted in buckets. Any thread may observe and write.
class Histogram {
 public:
  static constexpr std::array<double, 14> kLimits{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                  0.25,  0.5,    1,     2.5,  5,     10,   60};

  void observe(double seconds);
  void write(std::string& out, std::string_view name, std::string_view help) const;

 private:
  std::array<std::atomic<int64_t>, kLimits.size() + 1> counts_{};
  std::atomic<int64_t> nanoseconds_{0};
};

void write_counter(std::string& out, std::string_view name, std::string_view help, int64_t value);
// Counters of one name, told apart by the value of a label.
void write_counters(std::string& out, std::string_view name, std::string_view help, std::string_view label,
                    std::initializer_list<std::pair<std::string_view, int64_t>> values);
void write_gauge(std::string& out, std::string_view name, std::string_view help, double value);

}  // namespace furious::serve
