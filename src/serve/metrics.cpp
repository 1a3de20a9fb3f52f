#include "serve/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace furious::serve {

void Histogram::observe(double seconds) {
  const size_t bucket = std::ranges::lower_bound(kLimits, seconds) - kLimits.begin();
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  nanoseconds_.fetch_add(static_cast<int64_t>(seconds * 1e9), std::memory_order_relaxed);
}

void Histogram::write(std::string& out, std::string_view name, std::string_view help) const {
  auto to = std::back_inserter(out);
  fmt::format_to(to, "# HELP {0} {1}\n# TYPE {0} histogram\n", name, help);
  int64_t sum = 0;
  for (size_t i = 0; i < kLimits.size(); ++i) {
    sum += counts_[i].load(std::memory_order_relaxed);
    fmt::format_to(to, "{}_bucket{{le=\"{}\"}} {}\n", name, kLimits[i], sum);
  }
  sum += counts_.back().load(std::memory_order_relaxed);
  fmt::format_to(to, "{0}_bucket{{le=\"+Inf\"}} {1}\n{0}_sum {2}\n{0}_count {1}\n", name, sum,
                 static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9);
}

void write_counter(std::string& out, std::string_view name, std::string_view help, int64_t value) {
  fmt::format_to(std::back_inserter(out), "# HELP {0} {1}\n# TYPE {0} counter\n{0} {2}\n", name, help, value);
}

void write_counters(std::string& out, std::string_view name, std::string_view help, std::string_view label,
                    std::initializer_list<std::pair<std::string_view, int64_t>> values) {
  auto to = std::back_inserter(out);
  fmt::format_to(to, "# HELP {0} {1}\n# TYPE {0} counter\n", name, help);
  for (const auto& [which, value] : values) fmt::format_to(to, "{}{{{}=\"{}\"}} {}\n", name, label, which, value);
}

void write_gauge(std::string& out, std::string_view name, std::string_view help, double value) {
  fmt::format_to(std::back_inserter(out), "# HELP {0} {1}\n# TYPE {0} gauge\n{0} {2}\n", name, help, value);
}

}  // namespace furious::serve
