// `furious bench decode`: a whole model writes one token after another, always the most probable one, beside the time
// that reading its weights and its memory once takes.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "model/language_model.h"
#include "ops/sampling/argmax.h"
#include "tensor/host_copy.h"

namespace furious::cli {
namespace {

constexpr int64_t kWarmUp = 3;  // tokens: the second is recorded, the third runs the record

struct DecodeBench {
  std::string preset = "2mamba", size = "mini";
  std::vector<int64_t> batches;
  int64_t context = 2048, tokens = 128, vocabulary = 32000;
  std::string device = "auto", dtype;
  int threads = 0;
  bool graph = false;
  std::string json;

  void run() const;
};

// Ids without meaning: as much work as any others.
Tensor some_tokens(int64_t batch, int64_t length, int64_t vocabulary) {
  const Tensor tokens = Tensor::empty({batch, length}, DType::i32);
  for (int64_t i = 0; i < tokens.elements(); ++i)
    tokens.data<int32_t>()[i] = static_cast<int32_t>(i * 7919 % vocabulary);
  return tokens;
}

void DecodeBench::run() const {
  JsonFile file(json);
  const ThreadLimit limit(threads);
  const Device where = usable_device(device);
  const DType type = !dtype.empty() ? dtype_from_name(dtype) : where.is_cpu() ? DType::f32 : DType::bf16;
  const ModelConfig config = model_config(preset, size, vocabulary);
  LanguageModel model(config, 1, where);
  Compute compute = compute_in(type, where);
  compute.token_program = !graph;
  model.set_compute(compute);
  if (type == DType::bf16) model.round_weights();
  const double rate = copy_rate(where);
  fmt::print("decode {} {}: {:.1f} M parameters, {}, {}, after {} tokens; copy rate {:.1f} GB/s\n\n", preset, size,
             static_cast<double>(parameter_count(config)) / 1e6, name_of(type),
             where.is_cpu() ? fmt::format("{} threads", furious::threads()) : device, context, rate / 1e9);
  fmt::print("{:>6} {:>10} {:>10} {:>12} {:>12} {:>12} {:>9}\n", "batch", "tokens/s", "ms/step", "weights MB",
             "cache MB", "floor ms", "of floor");
  nlohmann::json rows = nlohmann::json::array();
  for (int64_t batch : !batches.empty() ? batches
                       : where.is_cpu() ? std::vector<int64_t>{1}
                                        : std::vector<int64_t>{1, 64}) {
    ModelCache cache(config, batch, where);
    model.read(cache, some_tokens(batch, context, vocabulary));
    Tensor next = to_device(some_tokens(batch, 1, vocabulary), where);
    // The ids come to the host one token late, while the device is at the next.
    const auto write = [&](int64_t count) {
      std::optional<HostCopy> last;
      for (int64_t i = 0; i < count; ++i) {
        const Tensor best = argmax(model.step(cache, next));
        next = best.slice(1, 0, 1);
        if (last) last->wait();
        last.emplace(best);
      }
    };
    write(kWarmUp);
    const double seconds = seconds_of([&] { write(tokens); }, where) / static_cast<double>(tokens);
    const int64_t weights = model.bytes_per_token(), held = cache.bytes();
    const double floor = static_cast<double>(weights + held) / rate;
    fmt::print("{:>6} {:>10.1f} {:>10.3f} {:>12.1f} {:>12.1f} {:>12.3f} {:>7.0f} %\n", batch,
               static_cast<double>(batch) / seconds, seconds * 1e3, static_cast<double>(weights) / 1e6,
               static_cast<double>(held) / 1e6, floor * 1e3, 100 * floor / seconds);
    std::fflush(stdout);
    rows.push_back({{"preset", preset},
                    {"size", size},
                    {"batch", batch},
                    {"context", context},
                    {"dtype", name_of(type)},
                    {"device", device},
                    {"tokens_per_second", static_cast<double>(batch) / seconds},
                    {"weight_bytes", weights},
                    {"cache_bytes", held},
                    {"copy_rate", rate},
                    {"of_floor", floor / seconds}});
  }
  file.write(rows);
}

}  // namespace

void add_bench_decode(CLI::App& bench) {
  auto options = std::make_shared<DecodeBench>();
  CLI::App* command =
      bench.add_subcommand("decode", "Measure decoding, beside the time to read weights and cache once");
  command->add_option("--preset,--arch", options->preset, "Architecture; `furious presets` lists them")
      ->capture_default_str();
  command->add_option("--size", options->size, "Model size; `furious presets` lists them")->capture_default_str();
  command->add_option("--vocab", options->vocabulary, "Vocabulary size of the model")
      ->check(CLI::Range(2, 1 << 30))
      ->capture_default_str();
  command->add_option("--batch", options->batches, "Numbers of sequences, with commas; default: 1, on a GPU 1,64")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--context", options->context, "Length of the prompt in tokens")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--tokens", options->tokens, "Number of decode steps to average over; 64 of them contain one fold")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--device", options->device, "Device: cpu, cuda or cuda:N; auto: a GPU if there is one")
      ->capture_default_str();
  command
      ->add_option(
          "--dtype", options->dtype,
          "Dtype of matrix products, on a GPU also of activations: f32 or bf16; default: bf16 on a GPU, f32 on a CPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_flag("--graph", options->graph,
                    "Use the CUDA graph of separate kernels even where the persistent kernel supports the model");
  add_threads(*command, options->threads);
  command->add_option("--json", options->json, "Write the rows to this JSON file");
  command->footer("Example: furious bench decode --preset 2mamba --size small --batch 1,64 --device cuda");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
