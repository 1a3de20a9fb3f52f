// `furious bench`, and of its commands `recurrent` and `auto`.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "base/parallel.h"
#include "cli/bench_mixer.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "cli/train_flags.h"
#include "ops/elementwise.h"
#include "ops/mixer/recurrent.h"

namespace furious::cli {
namespace {

// The contents of a slot after `length` tokens; the values do not matter for speed.
MixerContents contents_after(const MixerSpec& spec, const MixerCache::Sizes& sizes, int64_t length, Device device) {
  const MixerCache empty(spec, sizes);
  const bool folded = state_rows(spec, sizes.qk_dim) > 0 && length > empty.first_fold();
  const int64_t pages = ((folded ? empty.window() : length) + CachePage::kTokens - 1) / CachePage::kTokens;
  const auto numbers = [&](const Shape& shape) {
    const Tensor x = Tensor::empty(shape, DType::f32, device);
    fill(x, 0.01f);
    return x;
  };
  MixerContents contents{length, folded ? 0 : length, {}, {}, {}, {}};
  contents.k = numbers({1, pages, sizes.k_heads, CachePage::kTokens, sizes.qk_dim});
  contents.v = numbers({1, pages, sizes.v_heads, CachePage::kTokens, sizes.v_dim});
  const int64_t heads = std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads});
  if (spec.decay) {
    contents.log_decay = numbers({1, pages, heads, CachePage::kTokens});
    fill(contents.log_decay, -0.001f);
  }
  if (folded) contents.state = numbers({1, heads, state_rows(spec, sizes.qk_dim), state_columns(spec, sizes.v_dim)});
  return contents;
}

// One token after a context: the time of a step, folds included, beside reading the cache once.
struct RecurrentBench {
  std::string preset = "2mamba";
  std::vector<int64_t> lengths{512, 2048, 16384};
  int64_t batch = 1, heads = 16, dim = 64, layers = 1;
  std::string dtype = "f32", device = "auto";

  void run() const;
};

void RecurrentBench::run() const {
  const MixerSpec spec = mixer_spec(preset);
  const Device where = usable_device(device);
  const double rate = copy_rate(where);
  fmt::print("recurrent {} ({}), batch {}, {} heads of {}, {}, {}; copy rate {:.1f} GB/s\n\n", preset, to_string(spec),
             batch, heads, dim, dtype, where.is_cpu() ? counted(furious::threads(), "thread") : device, rate / 1e9);
  fmt::print("{:>9} {:>12} {:>12} {:>10} {:>12} {:>9}\n", "context", "cache MB", "us/token", "GB/s", "floor us",
             "of floor");
  const MixerCache::Sizes sizes{batch, heads, heads, heads, dim, dim};
  for (int64_t length : lengths) {
    std::vector<MixerCache> caches;
    for (int64_t i = 0; i < layers; ++i) caches.emplace_back(spec, sizes, where);
    const MixerContents contents = contents_after(spec, sizes, length, where);
    for (MixerCache& cache : caches)
      for (int64_t slot = 0; slot < batch; ++slot) cache.restore(slot, contents);
    const SlotRows rows = all_slots(batch, where);
    const Tensor token = to_device(random_tensor({batch, heads, dim}, 1, dtype_from_name(dtype), 5), where);
    Tensor decay;
    if (spec.decay) {
      decay = Tensor::empty({batch, heads}, DType::f32, where);
      fill(decay, -0.001f);
    }
    constexpr int kSteps = 256;
    const auto steps = [&] {
      for (int i = 0; i < kSteps; ++i)
        for (MixerCache& cache : caches) cache.step(rows, token, token, token, decay);
    };
    steps();
    const double per_token = seconds_of(steps, where) / static_cast<double>(kSteps * layers);
    const auto bytes = static_cast<double>(caches[0].bytes());
    fmt::print("{:>9} {:>12.2f} {:>12.1f} {:>10.1f} {:>12.1f} {:>7.0f} %\n", length, bytes / 1e6, per_token * 1e6,
               bytes / per_token / 1e9, bytes / rate * 1e6, 100 * bytes / per_token / rate);
    std::fflush(stdout);
  }
}

// The automatic choice of form: both forms are timed around the length where they cross.
struct AutoBench {
  int64_t heads = 8;
  double tolerance = 0.15;

  void run() const;
};

void AutoBench::run() const {
  MixerBench bench;
  bench.heads = heads;
  bench.least_seconds = 0.3;
  fmt::print("{:<9} {:>4} {:>7} {:<17} {:>12} {:>12}   {:<9} {:>6}\n", "preset", "dim", "length", "pass", "parallel ms",
             "chunked ms", "chosen", "loss");
  double worst = 0;
  const auto measure = [&](const char* preset, int64_t dim, int64_t length) {
    bench.preset = preset;
    bench.dim = dim;
    const MixerSpec spec = mixer_spec(preset);
    for (const bool backward : {false, true}) {
      const double parallel = bench.measure(spec, length, Form::parallel, backward, {})["ms"];
      const double chunked = bench.measure(spec, length, Form::chunked, backward, {})["ms"];
      const std::string chosen = bench.measure(spec, length, Form::automatic, false, {})["ran"];
      const double loss = (chosen == "parallel" ? parallel : chunked) / std::min(parallel, chunked) - 1;
      worst = std::max(worst, loss);
      fmt::print("{:<9} {:>4} {:>7} {:<17} {:>12.2f} {:>12.2f}   {:<9} {:>5.1f}%\n", preset, dim, length,
                 backward ? "forward+backward" : "forward", parallel, chunked, chosen, 100 * loss);
      std::fflush(stdout);
    }
  };
  for (int64_t length : {1024, 3072, 4096, 5120, 6144, 8192}) measure("2mamba", 64, length);
  for (int64_t length : {512, 1024, 1536, 2048}) measure("2mamba", 32, length);
  for (int64_t length : {128, 256, 512, 1024}) measure("mamba2", 64, length);
  fmt::print("\nlargest loss of the automatic choice: {:.1f}% (tolerance {:.0f}%)\n", 100 * worst, 100 * tolerance);
  require(worst <= tolerance,
          "bench auto: the automatic choice lost {:.1f}%, more than {:.0f}%; adjust ops/mixer/cost.h for this machine",
          100 * worst, 100 * tolerance);
}

void add_bench_auto(CLI::App& bench) {
  auto options = std::make_shared<AutoBench>();
  CLI::App* command = bench.add_subcommand("auto", "Compare the automatic choice between forms with measurements");
  command->add_option("--heads", options->heads, "Number of heads")->check(CLI::Range(1, 4096))->capture_default_str();
  command->footer("Example: furious bench auto");
  command->callback([options] { options->run(); });
}

void add_bench_recurrent(CLI::App& bench) {
  auto options = std::make_shared<RecurrentBench>();
  CLI::App* command = bench.add_subcommand("recurrent", "Measure one decode step of a mixer");
  add_preset(*command, options->preset);
  with_commas(command->add_option("--length", options->lengths, "Context lengths in tokens, with commas"))
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  add_sizes(*command, *options);
  command
      ->add_option("--layers", options->layers, "Number of caches stepped in turn, so that they exceed the L2 of a GPU")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "Dtype of q, k and v: f32, on a GPU also bf16")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  add_device(*command, options->device);
  command->footer(
      "Example: furious bench recurrent --preset softmax --length 1024,8192\n"
      "Example: furious bench recurrent --device cuda --dtype bf16 --batch 64 --layers 4");
  command->callback(
      [options] { with_memory_advice("use a smaller --batch, --length or --layers", [&] { options->run(); }); });
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed, beside the floor of this machine");
  bench->require_subcommand(1);
  bench->footer(kGlossaryPage);
  add_bench_step(*bench);
  add_bench_decode(*bench);
  add_bench_sampling(*bench);
  add_bench_serve(*bench);
  add_bench_auto(*bench);
  add_bench_recurrent(*bench);
  add_bench_mixer(*bench);
}

}  // namespace furious::cli
