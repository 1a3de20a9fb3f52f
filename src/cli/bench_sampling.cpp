// `furious bench sampling`: choosing the next token of a batch from its logits, by option.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "ops/random.h"
#include "ops/sampling/sampling.h"
#include "tensor/graph.h"

namespace furious::cli {
namespace {

constexpr int kCalls = 20;  // in a graph, so that the time is that of the device and not that of launches
constexpr int kRuns = 20;

struct SamplingBench {
  std::vector<int64_t> batches = {1, 64};
  int64_t vocabulary = 32000;
  int blocks = 0;
  double spread = 1;
  std::string device = "auto";

  void run() const;
};

std::vector<std::pair<const char*, Sampling>> bench_cases() {
  Sampling plain;
  plain.temperature = 1;
  plain.top_p = 1;
  std::vector<std::pair<const char*, Sampling>> cases(7, {"temperature 1", plain});
  cases[0].first = "greedy";
  cases[0].second.temperature = 0;
  cases[2].first = "top-k 40";
  cases[2].second.top_k = 40;
  cases[3].first = "top-p 0.95";
  cases[3].second.top_p = 0.95;
  cases[4].first = "top-k 40, top-p 0.95";
  cases[4].second.top_k = 40;
  cases[4].second.top_p = 0.95;
  cases[5].first = "penalties";
  cases[5].second.repetition_penalty = 1.1;
  cases[6].first = "20 log-probabilities";
  cases[6].second.log_probabilities = 20;
  return cases;
}

double seconds_per_call(const std::function<void()>& call, Device device) {
  call();
  std::optional<Graph> graph;
  if (!device.is_cpu())
    graph.emplace(device, [&] {
      for (int i = 0; i < kCalls; ++i) call();
    });
  double best = 1e30;
  for (int i = 0; i < kRuns; ++i)
    best = std::min(best, graph ? seconds_of([&] { graph->run(); }, device) / kCalls : seconds_of(call, device));
  return best;
}

void SamplingBench::run() const {
  const Device where = usable_device(device);
  fmt::print("sampling: a vocabulary of {}, logits of a standard deviation of {}, {}\n\n{:>6}  {:<24} {:>10}\n",
             vocabulary, spread, name_of(where), "batch", "options", "us/call");
  for (const int64_t batch : batches) {
    const Tensor logits = Tensor::empty({batch, vocabulary}, DType::f32, where);
    fill_normal(logits, 0, static_cast<float>(spread), 1, 1);
    const SlotRows rows = all_slots(batch, where);
    Sampler sampler(batch, vocabulary, where);
    sampler.set_blocks_per_row(blocks);
    const auto report = [&](const char* name, const std::function<void()>& call) {
      fmt::print("{:>6}  {:<24} {:>10.2f}\n", batch, name, 1e6 * seconds_per_call(call, where));
    };
    for (const auto& [name, sampling] : bench_cases()) {
      for (int64_t slot = 0; slot < batch; ++slot) sampler.set(slot, sampling);
      report(name, [&] { sampler.choose(logits, rows); });
    }
  }
}

}  // namespace

void add_bench_sampling(CLI::App& bench) {
  auto options = std::make_shared<SamplingBench>();
  CLI::App* command = bench.add_subcommand("sampling", "Choosing the next token of a batch, by option");
  command->add_option("--batch", options->batches, "Sequences; several with commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--vocab", options->vocabulary, "Number of ids")
      ->check(CLI::Range(int64_t{1}, kLargestSampledVocabulary))
      ->capture_default_str();
  command->add_option("--spread", options->spread, "Standard deviation of the logits")
      ->check(at_least(0))
      ->capture_default_str();
  command->add_option("--blocks", options->blocks, "Blocks for a row on a GPU: 1, 2, 4, 8; 0: by the sizes")
      ->check(CLI::IsMember({0, 1, 2, 4, 8}))
      ->capture_default_str();
  command->add_option("--device", options->device, "cpu, cuda")->capture_default_str();
  command->footer("Example: furious bench sampling --batch 1,64 --vocab 32000 --device cuda");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
