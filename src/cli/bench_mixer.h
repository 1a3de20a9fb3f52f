// `furious bench mixer`: speed of one mixer, beside the floor that the measured rates of this machine set.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "ops/mixer/mixer.h"

namespace furious::cli {

// What a machine can do at best: of a large product in the precision of the mixer's products, and of a large copy.
struct Rates {
  double flops = 1;  // per second
  double bytes = 0;  // per second; 0: does not bound the mixer, as on a CPU
};

struct MixerBench {
  std::string preset = "2mamba";
  std::vector<std::string> forms{"auto"};
  std::vector<int64_t> lengths{512, 2048};
  int64_t batch = 1, heads = 16, dim = 64, chunk = 0;
  int64_t qk_dim = 0, v_dim = 0;  // 0: dim
  std::string dtype = "f32", device = "auto", precision = "auto";
  std::string score, norm, decay;
  std::string kernel;         // forced on a GPU; empty: the fastest
  int degree = 0;             // 0: the preset's, or the smallest
  double mean_decay = 0.001;  // weak: no tile is skipped below 87,000 tokens
  bool backward = false, sweep = false;
  int threads = 0;
  int least_runs = 3;          // per row
  double least_seconds = 1.0;  // per row
  std::string json;

  MixerSpec spec() const;
  void run() const;
  void run_sweep() const;  // dimensions, scores and forms in one table
  Device where() const { return usable_device(device); }
  Rates rates() const;
  nlohmann::json measure(const MixerSpec& spec, int64_t length, Form form, bool with_backward,
                         const Rates& rates) const;
};

Tensor random_tensor(const Shape& shape, float stddev, DType dtype, uint64_t stream, Device device = {});

inline void add_preset(CLI::App& command, std::string& preset) {
  command.add_option("--preset", preset, fmt::format("Mixer: {}", fmt::join(mixer_names(), ", ")))
      ->check(parsed_by(mixer_spec))
      ->capture_default_str();
}

// The sizes that `bench mixer` and `bench recurrent` share.
template <class Options>
void add_sizes(CLI::App& command, Options& options) {
  command.add_option("--batch", options.batch, "Number of sequences")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--heads", options.heads, "Number of heads")->check(CLI::Range(1, 4096))->capture_default_str();
  command.add_option("--dim", options.dim, "Dimension of a head")->check(CLI::Range(8, 256))->capture_default_str();
}

}  // namespace furious::cli
