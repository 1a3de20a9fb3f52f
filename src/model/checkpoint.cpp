#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "model/safetensors.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostConfigBytes = 1 << 20;
constexpr int64_t kHeadDimOfThePaper = 64;

constexpr std::string_view kLoadable[] = {"F32", "BF16", "F16", "F64"};
constexpr std::string_view kFused = "qkv_proj.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

// The shape that a parameter has in the file: a convolution there has its one input channel per group.
Shape stored_shape(const std::string& name, const Shape& shape) {
  return name.ends_with("conv1d.weight") ? Shape{shape[0], 1, shape[1]} : shape;
}

struct Piece {
  std::string name;
  Shape shape;
};

// The tensors of the file that make up a parameter, row after row: queries, keys and values of a Llama lie apart.
std::vector<Piece> pieces_of(const SafetensorsReader& reader, const ModelConfig& config, const std::string& name,
                             const Shape& shape) {
  const std::vector<Piece> whole = {{name, stored_shape(name, shape)}};
  if (!name.ends_with(kFused) || reader.find(name)) return whole;
  const std::string mixing = name.substr(0, name.size() - kFused.size());
  const std::vector<Piece> apart = {{mixing + "q_proj.weight", {config.q_heads * config.qk_dim, shape[1]}},
                                    {mixing + "k_proj.weight", {config.k_heads * config.qk_dim, shape[1]}},
                                    {mixing + "v_proj.weight", {config.v_heads * config.head_dim, shape[1]}}};
  const bool are_there = std::ranges::any_of(apart, [&](const Piece& piece) { return reader.find(piece.name); });
  return are_there ? apart : whole;
}

// Buffers that some code saves beside the weights.
bool is_stray(const std::string& name) {
  const auto holds = [&](const char* part) { return name.find(part) != std::string::npos; };
  return holds("attn_mask") || holds("rotary_emb") || holds("inv_freq");
}

// Of a dtype that can be loaded, so that its shape is one of numbers that are there.
const StoredTensor& stored_tensor(const SafetensorsReader& reader, std::string_view name, std::string_view shape = "") {
  const StoredTensor* const tensor = reader.find(name);
  require(tensor != nullptr, "{}: no tensor \"{}\"{}; the file is incomplete, or of another architecture",
          reader.path().string(), name, shape);
  require(std::ranges::count(kLoadable, tensor->dtype) > 0,
          "{}: tensor \"{}\" has dtype {}, expected F32, BF16 or F16; convert it", tensor->file->path().string(), name,
          printable(tensor->dtype));
  return *tensor;
}

int64_t stored_size(const SafetensorsReader& reader, const std::string& name, size_t dim) {
  const StoredTensor& tensor = stored_tensor(reader, name);
  require(dim < tensor.shape.size() && tensor.shape[dim] > 0, "{}: tensor \"{}\" has shape [{}], expected a size at {}",
          tensor.file->path().string(), name, fmt::join(tensor.shape, ", "), dim);
  return tensor.shape[dim];
}

void check_tensor(const SafetensorsReader& reader, const std::string& name, const Shape& shape) {
  const StoredTensor& tensor = stored_tensor(reader, name, fmt::format(" {}", to_string(shape)));
  require(std::ranges::equal(tensor.shape, shape),
          "{}: tensor \"{}\" has shape [{}], expected {}; configuration and weights must be of the same model",
          tensor.file->path().string(), name, fmt::join(tensor.shape, ", "), to_string(shape));
}

// Some files of tied models hold the embedding under both names.
bool repeats_embedding(const SafetensorsReader& reader) {
  const StoredTensor* const head = reader.find(kHead);
  const StoredTensor& embedding = stored_tensor(reader, kEmbedding);
  return head && head->dtype == embedding.dtype && std::ranges::equal(head->bytes, embedding.bytes);
}

// Every tensor that the model needs, of the right shape, and no other. Allocates nothing that the file does not hold.
void check_tensors(const SafetensorsReader& reader, const ModelConfig& config) {
  std::set<std::string> used;
  LanguageModel::visit_parameters(config, [&](const std::string& name, const Shape& shape) {
    for (const Piece& piece : pieces_of(reader, config, name, shape)) {
      check_tensor(reader, piece.name, piece.shape);
      used.insert(piece.name);
    }
  });
  if (config.tie_embeddings && repeats_embedding(reader)) used.insert(kHead);
  std::vector<std::string> unused;
  for (const StoredTensor& tensor : reader.tensors())
    if (!used.contains(tensor.name) && !is_stray(tensor.name)) unused.push_back(printable(tensor.name));
  if (unused.empty()) return;
  const size_t shown = std::min<size_t>(unused.size(), 3);
  fail("{}: a model {} of {} layers has no place for {} of the tensors: {}{}; its configuration or --arch is another's",
       reader.path().string(), printable(config.arch), config.layers, unused.size(),
       fmt::join(unused.begin(), unused.begin() + shown, ", "), shown < unused.size() ? ", …" : "");
}

// How many heads the first layer has, by the first tensor that has a row for each; 0 where none has.
int64_t heads_of(const SafetensorsReader& reader, const std::string& mixing) {
  for (const char* name : {"A_mask_proj.weight", "A_log", "dt_proj.weight", "D"})
    if (reader.find(mixing + name)) return stored_size(reader, mixing + name, 0);
  return 0;
}

// The authors' release says nothing of itself: dimensions follow from the first layer's tensors, switches from the
// preset, but for the two of which the authors ran variants under one name.
ModelConfig release_config(const SafetensorsReader& reader, const Preset& preset) {
  const std::string layer = "model.layers.0.";
  const std::string mixing = layer + "self_attn.";
  ModelConfig config;
  config.arch = preset.name;
  config.block = preset.block;
  config.vocabulary = stored_size(reader, kEmbedding, 0);
  config.hidden = stored_size(reader, kEmbedding, 1);
  config.intermediate = stored_size(reader, layer + "mlp.gate_proj.weight", 0);
  while (reader.find(fmt::format("model.layers.{}.input_layernorm.weight", config.layers))) ++config.layers;
  config.tie_embeddings = !reader.find(kHead);

  const int64_t width = stored_size(reader, mixing + "o_proj.weight", 1);
  int64_t heads = heads_of(reader, mixing);
  require(heads > 0 || width % kHeadDimOfThePaper == 0,
          "{}: no tensor tells the number of heads, and {} dimensions are not heads of {} as in the paper; put a "
          "config.json with heads and head_dim beside the file",
          reader.path().string(), width, kHeadDimOfThePaper);
  if (heads == 0) heads = width / kHeadDimOfThePaper;
  require(width % heads == 0, "{}: {} heads do not divide {} dimensions; the file is not of the authors' release",
          reader.path().string(), heads, width);
  config.q_heads = config.k_heads = config.v_heads = heads;
  config.head_dim = config.qk_dim = width / heads;

  const std::string conv = mixing + "conv1d.weight";
  if (preset.block.conv_window > 0 && reader.find(conv)) config.block.conv_window = stored_size(reader, conv, 2);
  if (preset.block.has_dt()) config.block.dt_bias = reader.find(mixing + "dt_proj.bias") != nullptr;
  return checked_config(config, reader.path().string());
}

std::vector<std::string> fitting_presets(const SafetensorsReader& reader) {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) {
    try {
      const ModelConfig config = release_config(reader, preset);
      check_tensors(reader, config);
      if (config.block.conv_window == preset.block.conv_window) names.push_back(preset.name);
    } catch (const Error&) {  // it does not fit
    }
  }
  return names;
}

ModelConfig release_config(const SafetensorsReader& reader, const std::string& arch) {
  if (!arch.empty()) return release_config(reader, preset(arch));
  const std::vector<std::string> names = fitting_presets(reader);
  fail("{}: there is no config.json beside it, so the architecture must be named: give --arch{}",
       reader.path().string(),
       names.empty() ? "" : fmt::format("; its tensors are those of {}", fmt::join(names, ", ")));
}

ModelConfig saved_config(const fs::path& file, const std::string& arch) {
  ModelConfig config = config_from_json(read_text(file, kMostConfigBytes), file.string());
  require(arch.empty() || arch == config.arch, "{}: the architecture is {}, not {}; leave --arch out", file.string(),
          printable(config.arch), arch);
  return config;
}

}  // namespace

fs::path checkpoint_of(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path / "latest", ignored) ? path / "latest" : path;
}

ModelConfig load_config(const fs::path& given, const std::string& arch) {
  const fs::path path = checkpoint_of(given);
  recover_directory(path);
  std::error_code ignored;
  require(fs::exists(path, ignored), "{}: does not exist; expected a model's directory or .safetensors file",
          path.string());
  const fs::path file = (fs::is_directory(path, ignored) ? path : path.parent_path()) / "config.json";
  return fs::exists(file, ignored) ? saved_config(file, arch) : release_config(SafetensorsReader(path), arch);
}

LanguageModel load_model(const fs::path& given, const std::string& arch, Device device) {
  const fs::path path = checkpoint_of(given);
  const ModelConfig config = load_config(path, arch);
  const SafetensorsReader reader(path);
  check_tensors(reader, config);
  const auto fill = [&](const std::string& name, const Tensor& out) {
    int64_t row = 0;
    for (const Piece& piece : pieces_of(reader, config, name, out.shape())) {
      reader.load_into(piece.name, out.slice(0, row, piece.shape[0]).view(piece.shape));
      row += piece.shape[0];
    }
  };
  return LanguageModel(config, fill, device);
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
