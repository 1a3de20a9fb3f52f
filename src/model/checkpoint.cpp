#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "model/safetensors.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostConfigBytes = 1 << 20;

// The shape that a parameter has in the file: a convolution there has its one input channel per group.
Shape stored_shape(const std::string& name, const Shape& shape) {
  return name.ends_with("conv1d.weight") ? Shape{shape[0], 1, shape[1]} : shape;
}

// Buffers that some code saves beside the weights.
bool is_stray(const std::string& name) {
  const auto holds = [&](const char* part) { return name.find(part) != std::string::npos; };
  return holds("attn_mask") || holds("rotary_emb") || holds("inv_freq");
}

// Of a dtype that can be loaded, so that its shape is one of numbers that are there.
const StoredTensor& stored_tensor(const SafetensorsReader& reader, const std::string& name) {
  const StoredTensor* const tensor = reader.find(name);
  require(tensor != nullptr, "{}: no tensor \"{}\"; the file is incomplete, or of another architecture",
          reader.path().string(), name);
  const bool loads =
      std::ranges::count(std::initializer_list<std::string_view>{"F32", "BF16", "F16", "F64"}, tensor->dtype) > 0;
  require(loads, "{}: tensor \"{}\" has dtype {}, expected F32, BF16 or F16; convert it", tensor->file->path().string(),
          name, tensor->dtype);
  return *tensor;
}

void check_tensor(const SafetensorsReader& reader, const std::string& name, const Shape& shape) {
  const StoredTensor& tensor = stored_tensor(reader, name);
  require(std::ranges::equal(tensor.shape, shape),
          "{}: tensor \"{}\" has shape [{}], expected {}; configuration and weights must be of the same model",
          tensor.file->path().string(), name, fmt::join(tensor.shape, ", "), to_string(shape));
}

// Every tensor that the model needs, of the right shape, and no other. Allocates nothing that the file does not hold.
void check_tensors(const SafetensorsReader& reader, const ModelConfig& config) {
  std::set<std::string> used;
  LanguageModel::visit_parameters(config, [&](const std::string& name, const Shape& shape) {
    check_tensor(reader, name, stored_shape(name, shape));
    used.insert(name);
  });
  std::vector<std::string> unused;
  for (const StoredTensor& tensor : reader.tensors())
    if (!used.contains(tensor.name) && !is_stray(tensor.name)) unused.push_back(tensor.name);
  if (unused.empty()) return;
  const size_t shown = std::min<size_t>(unused.size(), 3);
  fail("{}: {} tensors have no place in a model {} of {} layers: {}{}; its configuration or --arch is another model's",
       reader.path().string(), unused.size(), config.arch, config.layers,
       fmt::join(unused.begin(), unused.begin() + shown, ", "), shown < unused.size() ? ", …" : "");
}

fs::path config_path(const fs::path& path) {
  std::error_code ignored;
  return (fs::is_directory(path, ignored) ? path : path.parent_path()) / "config.json";
}

}  // namespace

ModelConfig load_config(const fs::path& path, const std::string& arch) {
  recover_directory(path);
  const fs::path file = config_path(path);
  ModelConfig config = config_from_json(read_text(file, kMostConfigBytes), file.string());
  require(arch.empty() || arch == config.arch, "{}: the architecture is {}, not {}; leave --arch out", file.string(),
          config.arch, arch);
  return config;
}

LanguageModel load_model(const fs::path& path, const std::string& arch) {
  const ModelConfig config = load_config(path, arch);
  const SafetensorsReader reader(path);
  check_tensors(reader, config);
  return LanguageModel(config, [&](const std::string& name, const Tensor& out) {
    reader.load_into(name, out.view(stored_shape(name, out.shape())));
  });
}

void save_model(const fs::path& directory, const LanguageModel& model) {
  std::map<std::string, Tensor> tensors;
  for (const Parameter& parameter : model.parameters()) {
    const Tensor& value = parameter.value.value();
    tensors[parameter.name] = value.view(stored_shape(parameter.name, value.shape()));
  }
  write_safetensors(directory / "model.safetensors", tensors, {{"format", "pt"}});  // as Hugging Face's library asks
  write_text(directory / "config.json", config_to_json(model.config()));
}

}  // namespace furious
