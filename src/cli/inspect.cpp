// `furious inspect`: what a model is, what it costs in memory, and what of it cannot be computed here.
#include <fmt/format.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "cli/commands.h"
#include "cli/json_file.h"
#include "cli/load_flags.h"
#include "model/config_json.h"
#include "model/formats/format.h"
#include "model/plan.h"
#include "model/safetensors.h"
#include "report/table.h"
#include "tensor/device.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kLengths[] = {1 << 10, 8 << 10, 64 << 10};

struct InspectCommand {
  std::string model, json;
  LoadOptions load;

  void run() const;
};

std::string bytes_text(double bytes) {
  if (bytes < 1e6) return fmt::format("{:.1f} KB", bytes / 1e3);
  return bytes < 1e9 ? fmt::format("{:.1f} MB", bytes / 1e6) : fmt::format("{:.2f} GB", bytes / 1e9);
}
std::string bytes_text(int64_t bytes) {
  return bytes_text(static_cast<double>(bytes));
}

std::string format_text(const fs::path& path) {
  if (const Format* const format = model_format(path)) return std::string(format->description);
  const fs::path folder = fs::is_directory(path) ? path : path.parent_path(), file = folder / "config.json";
  if (!fs::exists(file)) return "the authors' release, weights alone";
  return read_text(file).find("\"attention_type\"") == std::string::npos ? "furious" : "the authors' release";
}

// Switches that are not the usual ones, with the names and values of config.json.
Json switches_of(const ModelConfig& config) {
  const Json all = Json::parse(config_to_json(config));
  Json switches;
  for (const std::string& key : switch_names())
    if (all.contains(key)) switches[key] = all[key];
  for (const char* key : {"decay_heads", "mlp", "mlp_bias", "layer_norm", "branch"})
    if (all.contains(key)) switches[key] = all[key];
  return switches;
}

// Tokens from which on the state is smaller than keys and values; 0: there is no state.
int64_t break_even(const ModelConfig& config) {
  const int64_t state = state_numbers(config);
  const int64_t per_token = config.k_heads * config.qk_dim + config.v_heads * config.head_dim;
  return state == 0 ? 0 : (state + per_token - 1) / per_token;
}

struct Weights {
  int64_t stored = 0, as_stored = 0, bf16 = 0, f32 = 0;
  std::string dtypes;
};

Weights weights_of(const ModelConfig& config, const SafetensorsReader& reader) {
  std::map<std::string, int64_t> by_dtype;
  Weights weights;
  for (const StoredTensor& tensor : reader.tensors()) {
    by_dtype[tensor.dtype] += static_cast<int64_t>(tensor.bytes.size());
    weights.stored += static_cast<int64_t>(tensor.bytes.size());
  }
  for (const auto& [dtype, bytes] : by_dtype)
    weights.dtypes += fmt::format("{}{} {}", weights.dtypes.empty() ? "" : ", ", dtype, bytes_text(bytes));
  weights.bf16 = weight_bytes(config, DType::bf16);
  weights.f32 = weight_bytes(config, DType::f32);
  weights.as_stored = weight_bytes(config, stored_matrices(reader));
  return weights;
}

// What of it exceeds the memory that is free here, on the CPU and on a GPU if there is one.
struct Fit {
  std::string what, device;
  int64_t needed = 0, free = 0;

  bool fits() const { return needed <= free; }
};

std::vector<Fit> fits_of(const ModelConfig& config, const Weights& weights) {
  const int64_t training = 16 * parameter_count(config);
  std::vector<Fit> fits;
  const auto add = [&](const std::string& what, int64_t needed, Device device) {
    fits.push_back({what, name_of(device), needed, memory::available(device)});
  };
  add("inference", weights.as_stored, {});
  add("training", training, {});
  if (describe_cuda_devices().empty()) return fits;
  const Device gpu = usable_device("cuda");
  add("inference in bf16", weight_bytes(config, DType::bf16, gpu), gpu);
  add("inference in f32", weight_bytes(config, DType::f32, gpu), gpu);
  add("training", training, gpu);
  return fits;
}

// What a sequence keeps, and where that is smaller than all its keys and values.
std::string sequence_text(const ModelConfig& config, int64_t even) {
  if (config.block.window > 0)
    return fmt::format("it keeps the keys and values of the last {} tokens", config.block.window);
  if (even == 0) return "it has no state of constant size: a sequence is a KV cache";
  const int64_t states = config.states(), heads = config.heads();
  return fmt::format("its state, {} of each layer{}, is smaller than a KV cache from {} tokens on",
                     bytes_text(state_numbers(config) * static_cast<int64_t>(sizeof(float))),
                     states < heads ? fmt::format(" for {} heads that share {}", heads, states) : "", even);
}

void InspectCommand::run() const {
  JsonFile file(json);
  const fs::path path = checkpoint_of(model);
  const ModelConfig config = check_model(path, load.arch, load.heads);
  const SafetensorsReader reader(path);
  const Weights weights = weights_of(config, reader);
  const int64_t even = break_even(config), parameters = parameter_count(config);
  const Json switches = switches_of(config);

  fmt::print("{}: {}, {:.2f} M parameters\n", model, format_text(path), static_cast<double>(parameters) / 1e6);
  fmt::print("{} layers of width {}, {}, vocabulary {}{}\n", config.layers, config.hidden,
             config.mlp == Mlp::none ? "no MLP" : fmt::format("MLP of {}", config.intermediate), config.vocabulary,
             config.tie_embeddings ? ", the embedding is the output matrix" : "");
  fmt::print("heads: {} of Q, {} of K, {} of V; {} numbers in Q and K, {} in V\n\n", config.q_heads, config.k_heads,
             config.v_heads, config.qk_dim, config.head_dim);
  Table table{{"switch", "value"}, {}};
  for (const auto& [key, value] : switches.items())
    table.rows.push_back({key, value.is_string() ? value.get<std::string>() : value.dump()});
  fmt::print("{}\n", to_text(table));
  fmt::print("files: {} ({})\n", bytes_text(weights.stored), weights.dtypes);
  fmt::print("weights in memory: {} for inference on a CPU, {} in bf16, {} in f32; training with AdamW from {}\n",
             bytes_text(weights.as_stored), bytes_text(weights.bf16), bytes_text(weights.f32),
             bytes_text(16.0 * static_cast<double>(parameters)));
  Json fitting = Json::array();
  for (const Fit& fit : fits_of(config, weights)) {
    if (!fit.fits())
      fmt::print("{} does not fit on {}: {} needed, {} free\n", fit.what, fit.device, bytes_text(fit.needed),
                 bytes_text(fit.free));
    fitting.push_back(
        {{"what", fit.what}, {"device", fit.device}, {"needed", fit.needed}, {"free", fit.free}, {"fits", fit.fits()}});
  }
  fmt::print("one sequence, f32:");
  Json sequence;
  for (const int64_t length : kLengths) {
    const int64_t bytes = cache_numbers(config, length) * static_cast<int64_t>(sizeof(float));
    fmt::print(" {} after {} tokens{}", bytes_text(bytes), length, length == kLengths[2] ? "\n" : ",");
    sequence[std::to_string(length)] = bytes;
  }
  fmt::print("{}\n", sequence_text(config, even));
  file.write(Json{{"format", format_text(path)},
                  {"parameters", parameters},
                  {"switches", switches},
                  {"file_bytes", weights.stored},
                  {"weight_bytes", {{"inference", weights.as_stored}, {"bf16", weights.bf16}, {"f32", weights.f32}}},
                  {"memory", fitting},
                  {"sequence_bytes", sequence},
                  {"break_even", even}});
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectCommand>();
  CLI::App* command =
      app.add_subcommand("inspect", "Say what a model is and what memory it needs, or why it is refused");
  add_model(*command, options->model);
  add_load_flags(*command, options->load);
  add_json(*command, options->json, "Write the results to this JSON file");
  command->footer("Example: furious inspect models/Qwen3-0.6B");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
