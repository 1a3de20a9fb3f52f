#include "cli/bench_mixer.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/mixer/cost.h"
#include "ops/random.h"
#include "tensor/arena.h"
#ifdef FURIOUS_CUDA
#include "ops/mixer/gpu/mixer_cuda.h"
#endif

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

// In the order of their enumerations.
const std::vector<std::string> kScoreNames{"linear", "squared", "exponential", "power", "series"};
const std::vector<std::string> kNormNames{"none", "sum"};
const std::vector<std::string> kDecayNames{"off", "on"};

// What is measured in one row of a sweep.
struct SweepRow {
  const char* preset;
  int64_t qk_dim, v_dim;
};

std::vector<SweepRow> sweep_rows() {
  std::vector<SweepRow> rows;
  for (const char* preset : {"2mamba", "mamba2s", "2mamba-e"}) {
    for (const int64_t dim : {16, 32, 48, 64, 80, 96, 128, 160, 192, 256}) rows.push_back({preset, dim, dim});
    rows.push_back({preset, 128, 64});
  }
  return rows;
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

std::string text_of(const Rates& rates, Device device) {
  return fmt::format("{:.0f} GFLOP/s ({}){}", rates.flops / 1e9, matmul_library(device),
                     rates.bytes > 0 ? fmt::format(" and {:.0f} GB/s", rates.bytes / 1e9) : "");
}

// Of the options that were not given.
void set_sweep_defaults(MixerBench& options, const CLI::App& command) {
  const bool gpu = !options.where().is_cpu();
  const auto missing = [&](const char* name) { return command.count(name) == 0; };
  constexpr int64_t kTokens = 65536;
  if (missing("--form")) options.forms = {"parallel", "chunked"};
  if (missing("--length")) options.lengths = {gpu ? 8192 : 256};
  if (missing("--batch")) options.batch = gpu ? std::max<int64_t>(1, kTokens / options.lengths.front()) : 1;
  if (missing("--heads")) options.heads = gpu ? 16 : 2;
  if (missing("--dtype")) options.dtype = gpu ? "bf16" : "f32";
  options.least_runs = 1;
  options.least_seconds = gpu ? 0.05 : 0.01;
}

}  // namespace

Tensor random_tensor(const Shape& shape, float stddev, DType dtype, uint64_t stream, Device device) {
  Tensor values = Tensor::empty(shape, DType::f32, device);
  fill_normal(values, 0, stddev, 1, stream);
  return dtype == DType::f32 ? values : to_dtype(values, dtype);
}

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
                                   const Rates& rates) const {
#ifdef FURIOUS_CUDA
  std::optional<cuda::KernelScope> forced;
  if (!kernel.empty()) forced.emplace(kernel);
#endif
  const DType type = dtype_from_name(dtype);
  // As in a model: q, k and v are slices of one projection.
  const Device where = this->where();
  const int64_t qk = qk_dim > 0 ? qk_dim : dim, v = v_dim > 0 ? v_dim : dim;
  const Tensor qkv = random_tensor({batch, length, heads * (2 * qk + v)}, 1, type, 3, where);
  const auto part = [&](int64_t first, int64_t own) {
    return qkv.slice(2, heads * first, heads * own).split_dim(2, heads, own);
  };
  MixerInputs inputs{part(0, qk), part(qk, qk), part(2 * qk, v), {}, {}, {}};
  if (spec.decay) {
    inputs.log_decay = Tensor::empty({batch, length, heads}, DType::f32, where);
    fill_uniform(inputs.log_decay, static_cast<float>(-2 * mean_decay), 0, 1, 4);
  }
  const Tensor gradient = random_tensor({batch, length, heads, v}, 1, type, 5, where);
  const MixerOptions options{form, chunk, false, mixer_precision_from_name(precision)};
  MixerResult result;
  const double seconds = median_seconds(
      [&] {
        result = mixer_forward(spec, inputs, options);
        if (with_backward) mixer_backward(spec, inputs, result, gradient, {}, options);
        synchronize(where);
      },
      least_runs, least_seconds);

  const MixerShape shape = check_mixer("bench", spec, inputs, result.form);
  const std::vector<Segment> segments = segments_of("bench", {}, batch, length);
  const int64_t chunk_used = chunk > 0 ? chunk : default_chunk(spec, qk, v, where, inputs.q.dtype());
  const auto flops_of = [&](Pass pass) {
    return result.form == Form::chunked ? chunked_flops(shape, segments, chunk_used, pass)
                                        : parallel_flops(shape, segments, pass);
  };
  const double flops = flops_of(Pass::forward) + (with_backward ? flops_of(Pass::backward) : 0);
  // Forward q, k and v are read and the output is written; backward they and its gradient are read and theirs written.
  const auto bytes = static_cast<double>(qkv.bytes()) * (with_backward ? 3 : 1) +
                     static_cast<double>(gradient.bytes()) * (with_backward ? 2 : 1);
  const double floor_ms = std::max(flops / rates.flops, rates.bytes > 0 ? bytes / rates.bytes : 0) * 1e3;
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
          {"matrix_gflops", rates.flops / 1e9},
          {"copy_gbytes", rates.bytes / 1e9},
          {"floor_ms", floor_ms},
          {"ratio", seconds * 1e3 / floor_ms}};
}

Rates MixerBench::rates() const {
  if (where().is_cpu()) return {matmul_rate(MatmulPrecision::f32, where())};  // whatever the dtype
  MixerPrecision chosen = mixer_precision_from_name(precision);
  if (chosen == MixerPrecision::automatic)
    chosen = dtype == "bf16" ? MixerPrecision::bf16 : dtype == "f16" ? MixerPrecision::tf32 : MixerPrecision::tf32x3;
  const double flops = matmul_rate(chosen == MixerPrecision::bf16  ? MatmulPrecision::bf16
                                   : chosen == MixerPrecision::f32 ? MatmulPrecision::f32
                                                                   : MatmulPrecision::tf32,
                                   where());
  return {chosen == MixerPrecision::tf32x3 ? flops / 3 : flops, copy_rate(where())};
}

void MixerBench::run() const {
  require(kernel.empty() || !where().is_cpu(),
          "bench mixer: --kernel {}, but a CPU has one set of kernels; leave it out, or add --device cuda", kernel);
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
  const Device where = this->where();
  const Rates rates = this->rates();
  fmt::print("mixer {} ({}), batch {}, {} heads of {}, {}, products in {}, {}; floor at {}\n\n", preset,
             to_string(mixer), batch, heads, qk == v ? fmt::format("{}", v) : fmt::format("{} and {}", qk, v), dtype,
             precision, where.is_cpu() ? counted(furious::threads(), "thread") : device, text_of(rates, where));
  fmt::print("{:>9}  {:<10} {:<12} {:<17} {:>10} {:>10} {:>10} {:>7} {:>12}\n", "length", "form", "kernel", "pass",
             "ms", "GFLOP/s", "floor ms", "ratio", "us/token");
  nlohmann::json rows = nlohmann::json::array();
  for (int64_t length : lengths) {
    for (Form form : wanted) {
      for (int with_backward = 0; with_backward <= (backward ? 1 : 0); ++with_backward) {
        const nlohmann::json row = measure(mixer, length, form, with_backward == 1, rates);
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

// A row that runs out of memory or is not supported says so.
void MixerBench::run_sweep() const {
  require(kernel.empty(), "bench mixer: --sweep has rows that --kernel {} does not compute; leave one of them out",
          kernel);
  JsonFile file(json);
  const ThreadLimit limit(threads);
  const Rates rates = this->rates();
  fmt::print("mixers, forward and backward, batch {}, {} heads, {}, products in {}, {}; floor at {}\n\n", batch, heads,
             dtype, precision, where().is_cpu() ? counted(furious::threads(), "thread") : device,
             text_of(rates, where()));
  constexpr const char* kRow = "{:<9} {:>4} {:>4} {:>8} {:<9} {:<14} {:>10} {:>10} {:>7}\n";
  fmt::print(kRow, "mixer", "q/k", "v", "length", "form", "kernel", "ms", "floor ms", "ratio");
  nlohmann::json rows = nlohmann::json::array();
  for (const SweepRow& each : sweep_rows()) {
    MixerBench row = *this;
    row.preset = each.preset;
    row.qk_dim = each.qk_dim;
    row.v_dim = each.v_dim;
    const MixerSpec mixer = row.spec();
    for (const int64_t length : lengths) {
      for (const std::string& form : forms) {
        if (form == "chunked" && state_rows(mixer, each.qk_dim) == 0) continue;  // that score has no such form
        nlohmann::json result;
        try {
          result = row.measure(mixer, length, form_from_name(form), true, rates);
        } catch (const Error& error) {
          const bool memory = dynamic_cast<const OutOfMemory*>(&error) != nullptr;
          result = {{"preset", row.preset}, {"form", form},       {"length", length},     {"qk_dim", each.qk_dim},
                    {"v_dim", each.v_dim},  {"dtype", row.dtype}, {"error", error.what()}};
          fmt::print("{:<9} {:>4} {:>4} {:>8} {:<9} {}\n", row.preset, each.qk_dim, each.v_dim, length, form,
                     memory ? "out of memory" : error.what());
        }
        if (!result.contains("error"))
          fmt::print(kRow, row.preset, each.qk_dim, each.v_dim, length, std::string(result["ran"]),
                     std::string(result["kernel"]), fmt::format("{:.2f}", double(result["ms"])),
                     fmt::format("{:.2f}", double(result["floor_ms"])), fmt::format("{:.2f}", double(result["ratio"])));
        std::fflush(stdout);
        Arena::of(where()).trim();
        rows.push_back(std::move(result));
      }
    }
  }
  file.write(rows);
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
  command->add_option(
      "--kernel", options->kernel,
      "Kernels on a GPU instead of the fastest: hopper, tensor cores, tiles, simple, walk, chunk states");
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
  CLI::Option* backward =
      command->add_flag("--backward", options->backward, "Also measure forward and backward together");
  CLI::Option* sweep = command->add_flag("--sweep", options->sweep,
                                         "Measure squared, linear and exponential scores with heads of 16 to 256 in "
                                         "both forms, forward and backward: 65,536 "
                                         "tokens in bf16 on a GPU, fewer on a CPU");
  add_threads(*command, options->threads);
  add_json(*command, options->json, "Write the rows to this JSON file");
  for (const char* fixed : {"--preset", "--score", "--decay", "--norm", "--degree", "--dim", "--qk-dim", "--v-dim"})
    sweep->excludes(command->get_option(fixed));
  sweep->excludes(backward);
  command->footer(
      "Example: furious bench mixer --preset 2mamba --length 512,2048 --form auto,parallel --backward\n"
      "Example: furious bench mixer --sweep --device cuda --length 2048 --json sweep.json");
  command->callback([options, command] {
    if (!options->sweep)
      return with_memory_advice("use a smaller --batch, --length or --heads", [&] { options->run(); });
    set_sweep_defaults(*options, *command);
    options->run_sweep();
  });
}

}  // namespace furious::cli
