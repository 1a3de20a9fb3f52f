// `furious bench decode`: a whole model with random weights reads a prompt and then writes one token after another,
// always the most probable one, beside the time that reading its weights and its memory once takes.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/parallel.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/progress.h"
#include "decode/decoder.h"
#include "model/checkpoint.h"
#include "model/config_json.h"

namespace furious::cli {
namespace {

constexpr int64_t kWarmUp = 3;  // tokens: the second is recorded, the third runs the record

struct DecodeBench {
  std::string preset = "2mamba", size = "mini", config_file;
  std::vector<int64_t> batches;
  int64_t context = 2048, tokens = 128, vocabulary = 32000;
  std::string device = "auto", dtype;
  int threads = 0;
  bool graph = false, random_lengths = false;
  Sampling sampling{.temperature = 0, .top_p = 1};
  std::string json;

  void run() const;
};

// Ids without meaning: as much work as any others.
std::vector<int32_t> some_tokens(int64_t sequence, int64_t length, int64_t vocabulary) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < length; ++i)
    tokens.push_back(static_cast<int32_t>((sequence * length + i) * 7919 % vocabulary));
  return tokens;
}

void DecodeBench::run() const {
  JsonFile file(json);
  const ThreadLimit limit(threads);
  const Device where = usable_device(device);
  const DType type = !dtype.empty() ? dtype_from_name(dtype) : where.is_cpu() ? DType::f32 : DType::bf16;
  const ModelConfig config = config_file.empty() ? model_config(preset, size, vocabulary)
                                                 : config_from_json(read_text(config_file, 1 << 20), config_file);
  const std::string name = config_file.empty() ? fmt::format("{} {}", preset, size) : config_file;
  check_weight_memory(name, config, type, where);
  LanguageModel model(config, 1, where, Initialization::furious, {}, type);
  Compute compute = compute_in(type, where);
  compute.token_program = !graph;
  model.set_compute(compute);
  const double rate = copy_rate(where);
  fmt::print("decode {}: {:.1f} M parameters, {}, {}, after {} tokens; copy rate {:.1f} GB/s\n\n", name,
             static_cast<double>(parameter_count(config)) / 1e6, name_of(type),
             where.is_cpu() ? counted(furious::threads(), "thread") : device, context, rate / 1e9);
  fmt::print("{:>6} {:>12} {:>10} {:>10} {:>12} {:>12} {:>12} {:>9}  {}\n", "batch", "prompt t/s", "tokens/s",
             "ms/step", "weights MB", "cache MB", "floor ms", "of floor", "ran as");
  nlohmann::json rows = nlohmann::json::array();
  for (int64_t batch : !batches.empty() ? batches
                       : where.is_cpu() ? std::vector<int64_t>{1}
                                        : std::vector<int64_t>{1, 64}) {
    Decoder decoder(model, batch);
    std::vector<int32_t> slots;
    std::vector<std::vector<int32_t>> texts;
    int64_t prompt_tokens = 0;
    for (int64_t i = 0; i < batch; ++i) {
      slots.push_back(decoder.start());
      // Lengths between half of the context and all of it, spread evenly in no order.
      const int64_t length = random_lengths ? context - context / 2 * (i * 37 % batch) / batch : context;
      texts.push_back(some_tokens(i, length, config.vocabulary));
      prompt_tokens += length;
      Sampling own = sampling;
      own.seed += static_cast<uint64_t>(i);
      decoder.set_sampling(slots.back(), own);
    }
    std::vector<Decoder::Prompt> prompts;
    for (size_t i = 0; i < slots.size(); ++i) prompts.push_back({slots[i], texts[i]});
    if (!where.is_cpu()) {  // a first call loads kernels and takes memory
      decoder.read(slots.back(), texts.back());
      decoder.stop(slots.back());
      (void)decoder.start();  // the same slot, the only free one
      decoder.set_sampling(slots.back(), sampling);
    }
    const double read_seconds = seconds_of([&] { decoder.read(prompts); }, where);
    // The ids come to the host one token late, while the device is at the next.
    const auto write = [&](int64_t count) {
      std::optional<ChosenTokens> last;
      for (int64_t i = 0; i < count; ++i) {
        ChosenTokens chosen = decoder.step(slots);
        if (last) last->wait();
        last.emplace(std::move(chosen));
      }
    };
    write(kWarmUp);
    const double seconds = seconds_of([&] { write(tokens); }, where) / static_cast<double>(tokens);
    const int64_t weights = model.bytes_per_token(), held = decoder.bytes();
    const double floor = static_cast<double>(weights + held) / rate;
    const double read_rate = static_cast<double>(prompt_tokens) / read_seconds;
    fmt::print("{:>6} {:>12.1f} {:>10.1f} {:>10.3f} {:>12.1f} {:>12.1f} {:>12.3f} {:>7.0f} %  {}\n", batch, read_rate,
               static_cast<double>(batch) / seconds, seconds * 1e3, static_cast<double>(weights) / 1e6,
               static_cast<double>(held) / 1e6, floor * 1e3, 100 * floor / seconds, decoder.ran_as());
    std::fflush(stdout);
    rows.push_back({{"preset", config_file.empty() ? preset : config_file},
                    {"size", config_file.empty() ? size : ""},
                    {"parameters", parameter_count(config)},
                    {"prompt_tokens_per_second", read_rate},
                    {"batch", batch},
                    {"context", context},
                    {"dtype", name_of(type)},
                    {"device", device},
                    {"tokens_per_second", static_cast<double>(batch) / seconds},
                    {"weight_bytes", weights},
                    {"cache_bytes", held},
                    {"copy_rate", rate},
                    {"ran_as", decoder.ran_as()},
                    {"temperature", sampling.temperature},
                    {"of_floor", floor / seconds}});
  }
  file.write(rows);
}

}  // namespace

void add_bench_decode(CLI::App& bench) {
  auto options = std::make_shared<DecodeBench>();
  CLI::App* command =
      bench.add_subcommand("decode", "Measure decoding, beside the time to read weights and cache once");
  CLI::Option* const arch =
      command->add_option("--preset,--arch", options->preset, "Architecture; `furious presets` lists them")
          ->capture_default_str();
  CLI::Option* const size =
      command->add_option("--size", options->size, "Model size; `furious presets` lists them")->capture_default_str();
  CLI::Option* const vocabulary = command->add_option("--vocab", options->vocabulary, "Vocabulary size of the model")
                                      ->check(CLI::Range(2, 1 << 30))
                                      ->capture_default_str();
  command
      ->add_option("--config", options->config_file,
                   "A config.json of a published model or of ours, instead of a preset and size")
      ->check(CLI::ExistingFile)
      ->excludes(arch)
      ->excludes(size)
      ->excludes(vocabulary);
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
  add_device(*command, options->device);
  add_dtype(*command, options->dtype);
  command
      ->add_option("--temperature", options->sampling.temperature,
                   "Temperature of sampling; 0: the most probable token")
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "Sample from the k most probable tokens; 0: from all")
      ->capture_default_str();
  command->add_option("--top-p", options->sampling.top_p, "Sample from the tokens that together have this probability")
      ->capture_default_str();
  command->add_flag("--random-lengths", options->random_lengths,
                    "Sequences of different lengths, between half of the context and all of it");
  command->add_flag("--graph", options->graph,
                    "Use the CUDA graph of separate kernels even where the persistent kernel supports the model");
  add_threads(*command, options->threads);
  command->add_option("--json", options->json, "Write the rows to this JSON file");
  command->footer("Example: furious bench decode --preset 2mamba --size small --batch 1,64 --device cuda");
  command->callback([options] { with_memory_advice("use a smaller --batch or --context", [&] { options->run(); }); });
}

}  // namespace furious::cli
