// `furious bench`: speed of the mixers, beside the floor that the measured matrix rate of this machine sets.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/parallel.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/train_flags.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/mixer/cost.h"
#include "ops/mixer/mixer.h"
#include "ops/mixer/recurrent.h"
#include "ops/random.h"

namespace furious::cli {
namespace {

// One warm-up run, then runs until both `least_runs` and `least_seconds` are reached; the median of the runs.
double median_seconds(const std::function<void()>& work, int least_runs, double least_seconds) {
  work();
  std::vector<double> times;
  for (double total = 0; static_cast<int>(times.size()) < least_runs || total < least_seconds; total += times.back())
    times.push_back(seconds_of(work));
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

Tensor random_tensor(const Shape& shape, float stddev, DType dtype, uint64_t stream) {
  Tensor values = Tensor::empty(shape, DType::f32);
  fill_normal(values, 0, stddev, 1, stream);
  return dtype == DType::f32 ? values : to_dtype(values, dtype);
}

// In the order of their enumerations.
const std::vector<std::string> kScoreNames{"linear", "squared", "exponential", "power", "series"};
const std::vector<std::string> kNormNames{"none", "sum"};
const std::vector<std::string> kDecayNames{"off", "on"};

struct MixerBench {
  std::string preset = "2mamba";
  std::vector<std::string> forms{"auto"};
  std::vector<int64_t> lengths{512, 2048};
  int64_t batch = 1, heads = 16, dim = 64, chunk = 0;
  int64_t qk_dim = 0, v_dim = 0;  // 0: dim
  std::string dtype = "f32", device = "auto", precision = "auto";
  std::string score, norm, decay;
  int degree = 0;             // 0: the preset's, or the smallest
  double mean_decay = 0.001;  // weak: no tile is skipped below 87,000 tokens
  bool backward = false;
  int threads = 0;
  double least_seconds = 1.0;  // per row
  std::string json;

  MixerSpec spec() const;
  void run() const;
  nlohmann::json measure(const MixerSpec& spec, int64_t length, Form form, bool with_backward, double rate) const;
};

MixerSpec MixerBench::spec() const {
  MixerSpec spec = mixer_spec(preset);
  const auto index_of = [](const std::string& name, const std::vector<std::string>& known) {
    return std::find(known.begin(), known.end(), name) - known.begin();
  };
  if (!score.empty()) {
    spec.score = static_cast<Score>(index_of(score, kScoreNames));
    spec.degree = 0;
  }
  if (!norm.empty()) spec.norm = static_cast<Norm>(index_of(norm, kNormNames));
  if (!decay.empty()) spec.decay = index_of(decay, kDecayNames) == 1;
  if (spec.degree == 0) spec.degree = spec.score == Score::power ? 3 : spec.score == Score::series ? 1 : 0;
  if (degree > 0) spec.degree = degree;
  return spec;
}

nlohmann::json MixerBench::measure(const MixerSpec& spec, int64_t length, Form form, bool with_backward,
                                   double rate) const {
  const DType type = dtype_from_name(dtype);
  // As in a model: q, k and v are slices of one projection.
  const Device where = usable_device(device);
  const auto on_device = [&](const Tensor& tensor) {
    if (where.is_cpu()) return tensor;
    const Tensor copy = Tensor::empty(tensor.shape(), tensor.dtype(), where);
    copy_between(copy, tensor);
    return copy;
  };
  const int64_t qk = qk_dim > 0 ? qk_dim : dim, v = v_dim > 0 ? v_dim : dim;
  const Tensor qkv = on_device(random_tensor({batch, length, heads * (2 * qk + v)}, 1, type, 3));
  const auto part = [&](int64_t first, int64_t own) {
    return qkv.slice(2, heads * first, heads * own).split_dim(2, heads, own);
  };
  MixerInputs inputs{part(0, qk), part(qk, qk), part(2 * qk, v), {}, {}, {}};
  if (spec.decay) {
    inputs.log_decay = Tensor::empty({batch, length, heads}, DType::f32);
    fill_uniform(inputs.log_decay, static_cast<float>(-2 * mean_decay), 0, 1, 4);
    inputs.log_decay = on_device(inputs.log_decay);
  }
  const Tensor gradient = on_device(random_tensor({batch, length, heads, v}, 1, type, 5));
  const MixerOptions options{form, chunk, false, mixer_precision_from_name(precision)};
  MixerResult result;
  const double seconds = median_seconds(
      [&] {
        result = mixer_forward(spec, inputs, options);
        if (with_backward) mixer_backward(spec, inputs, result, gradient, {}, options);
        synchronize(where);
      },
      3, least_seconds);

  const MixerShape shape = check_mixer("bench", spec, inputs, result.form);
  const std::vector<Segment> segments = segments_of("bench", {}, batch, length);
  const int64_t chunk_used = chunk > 0 ? chunk : default_chunk(spec, qk, v, where, inputs.q.dtype());
  const auto flops_of = [&](Pass pass) {
    return result.form == Form::chunked ? chunked_flops(shape, segments, chunk_used, pass)
                                        : parallel_flops(shape, segments, pass);
  };
  const double flops = flops_of(Pass::forward) + (with_backward ? flops_of(Pass::backward) : 0);
  const double floor_ms = flops / rate * 1e3;
  return {{"preset", preset},
          {"spec", to_string(spec)},
          {"form", name_of(form)},
          {"ran", name_of(result.form)},
          {"kernel", result.kernel},
          {"precision", precision},
          {"length", length},
          {"batch", batch},
          {"heads", heads},
          {"dim", dim},
          {"qk_dim", qk},
          {"v_dim", v},
          {"dtype", dtype},
          {"device", device},
          {"threads", furious::threads()},
          {"pass", with_backward ? "forward+backward" : "forward"},
          {"ms", seconds * 1e3},
          {"gflops", flops / seconds / 1e9},
          {"matrix_gflops", rate / 1e9},
          {"floor_ms", floor_ms},
          {"ratio", seconds * 1e3 / floor_ms}};
}

void MixerBench::run() const {
  JsonFile file(json);
  const MixerSpec mixer = spec();
  const int64_t qk = qk_dim > 0 ? qk_dim : dim, v = v_dim > 0 ? v_dim : dim;
  std::vector<Form> wanted;
  for (const std::string& form : forms) {
    wanted.push_back(form_from_name(form));
    require(wanted.back() != Form::chunked || state_rows(mixer, qk) > 0,
            "bench mixer: {} with heads of {} has no chunked form; use --form parallel", to_string(mixer), qk);
  }
  const ThreadLimit limit(threads);
  const Device where = usable_device(device);
  // On a GPU products have the rate of their precision; mixers on the CPU compute in f32 whatever the dtype.
  const MixerPrecision chosen = mixer_precision_from_name(precision);
  const bool bf16 = chosen == MixerPrecision::bf16 || (chosen == MixerPrecision::automatic && dtype == "bf16");
  const bool tf32 = chosen == MixerPrecision::tf32 || chosen == MixerPrecision::tf32x3;
  double rate = matmul_rate(where.is_cpu() ? MatmulPrecision::f32
                            : bf16         ? MatmulPrecision::bf16
                            : tf32         ? MatmulPrecision::tf32
                                           : MatmulPrecision::f32,
                            where);
  if (chosen == MixerPrecision::tf32x3) rate /= 3;
  fmt::print("mixer {} ({}), batch {}, {} heads of {}, {}, products in {}, {}; floor at {:.0f} GFLOP/s ({})\n\n",
             preset, to_string(mixer), batch, heads, qk == v ? fmt::format("{}", v) : fmt::format("{} and {}", qk, v),
             dtype, precision, where.is_cpu() ? fmt::format("{} threads", furious::threads()) : device, rate / 1e9,
             matmul_library(where));
  fmt::print("{:>9}  {:<10} {:<12} {:<17} {:>10} {:>10} {:>10} {:>7} {:>12}\n", "length", "form", "kernel", "pass",
             "ms", "GFLOP/s", "floor ms", "ratio", "us/token");
  nlohmann::json rows = nlohmann::json::array();
  for (int64_t length : lengths) {
    for (Form form : wanted) {
      for (int with_backward = 0; with_backward <= (backward ? 1 : 0); ++with_backward) {
        const nlohmann::json row = measure(mixer, length, form, with_backward == 1, rate);
        const std::string ran = row["ran"];
        fmt::print("{:>9}  {:<10} {:<12} {:<17} {:>10.2f} {:>10.1f} {:>10.2f} {:>7.2f} {:>12.3f}\n", length,
                   form == Form::automatic ? "auto:" + ran.substr(0, 5) : ran, std::string(row["kernel"]),
                   std::string(row["pass"]), double(row["ms"]), double(row["gflops"]), double(row["floor_ms"]),
                   double(row["ratio"]), double(row["ms"]) * 1e3 / static_cast<double>(batch * length));
        std::fflush(stdout);
        rows.push_back(row);
      }
    }
  }
  file.write(rows);
}

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
             batch, heads, dim, dtype, where.is_cpu() ? fmt::format("{} threads", furious::threads()) : device,
             rate / 1e9);
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
      const double parallel = bench.measure(spec, length, Form::parallel, backward, 1)["ms"];
      const double chunked = bench.measure(spec, length, Form::chunked, backward, 1)["ms"];
      const std::string chosen = bench.measure(spec, length, Form::automatic, false, 1)["ran"];
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

void add_preset(CLI::App& command, std::string& preset) {
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
  command->callback([options] { options->run(); });
}

void add_mixer_switches(CLI::App& command, MixerBench& options) {
  command
      .add_option("--score", options.score,
                  fmt::format("Score, instead of the preset's: {}", fmt::join(kScoreNames, ", ")))
      ->check(CLI::IsMember(kScoreNames));
  command.add_option("--decay", options.decay, "Decay, instead of the preset's: on, off")
      ->check(CLI::IsMember(kDecayNames));
  command.add_option("--norm", options.norm, "Norm, instead of the preset's: none, sum")
      ->check(CLI::IsMember(kNormNames));
  command.add_option("--degree", options.degree, "Degree of the scores power (3, 4) and series (1 to 4)")
      ->check(CLI::Range(1, kLargestDegree));
}

void add_bench_mixer(CLI::App& bench) {
  auto options = std::make_shared<MixerBench>();
  CLI::App* command = bench.add_subcommand("mixer", "Measure one mixer, forward and backward");
  add_preset(*command, options->preset);
  add_mixer_switches(*command, *options);
  with_commas(command->add_option("--form", options->forms, "Forms, with commas: auto, parallel, chunked, reference"))
      ->check(parsed_by(form_from_name))
      ->capture_default_str();
  with_commas(command->add_option("--length", options->lengths, "Sequence lengths in tokens, with commas"))
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  add_sizes(*command, *options);
  command->add_option("--qk-dim", options->qk_dim, "Dimension of queries and keys; default: --dim")
      ->check(CLI::Range(8, 256));
  command->add_option("--v-dim", options->v_dim, "Dimension of values; default: --dim")->check(CLI::Range(8, 256));
  command
      ->add_option("--mixer-precision", options->precision,
                   fmt::format("Precision of the products inside the mixer, on a GPU: {}",
                               fmt::join(mixer_precision_names(), ", ")))
      ->check(parsed_by(mixer_precision_from_name))
      ->capture_default_str();
  command->add_option("--chunk", options->chunk, "Number of tokens in a chunk; 0: chosen by the dimension")
      ->check(at_least(0))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "Dtype of q, k and v: f32, bf16, f16")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  add_device(*command, options->device);
  command->add_option("--mean-decay", options->mean_decay, "Mean x of the log-decays, which are uniform in [-2x, 0]")
      ->check(at_least(0))
      ->capture_default_str();
  command->add_flag("--backward", options->backward, "Also measure forward and backward together");
  add_threads(*command, options->threads);
  add_json(*command, options->json, "Write the rows to this JSON file");
  command->footer("Example: furious bench mixer --preset 2mamba --length 512,2048 --form auto,parallel --backward");
  command->callback([options] { options->run(); });
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed, beside the floor of this machine");
  bench->require_subcommand(1);
  bench->footer(kGlossaryPage);
  add_bench_step(*bench);
  add_bench_decode(*bench);
  add_bench_sampling(*bench);
  add_bench_auto(*bench);
  add_bench_recurrent(*bench);
  add_bench_mixer(*bench);
}

}  // namespace furious::cli
