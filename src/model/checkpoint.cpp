#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/names.h"
#include "model/formats/format.h"
#include "model/formats/release.h"
#include "model/safetensors.h"
#include "tensor/arena.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostConfigBytes = 1 << 20;

constexpr const char* kConfigFiles[] = {"config.json", "params.json"};
constexpr int64_t kSomeHeadDim = 64;
constexpr std::string_view kPickles[] = {".pt", ".pth", ".bin", ".pkl"};
constexpr std::string_view kReadPickles = "pytorch_model";  // their tensors alone (pickle.h)
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kFilesKey = "furious.files";  // in the metadata of the weights: "NAME HASH", a line each
constexpr const char* kSmallFiles[] = {"config.json", "tokenizer.model", "tokenizer.json", "tokenizer_config.json"};

// The shape that a parameter has in the file: a convolution there has its one input channel per group.
Shape stored_shape(const std::string& name, const Shape& shape) {
  return name.ends_with("conv1d.weight") ? Shape{shape[0], 1, shape[1]} : shape;
}

// A configuration, and the format it is in where that is another program's.
struct Description {
  ModelConfig config;
  const Format* format = nullptr;
};

// The tensors of the file that make up a parameter, one after the other: queries, keys and values of a Llama lie apart.
std::vector<StoredRange> pieces_of(const SafetensorsReader& reader, const Description& model, const std::string& name,
                                   const Shape& shape) {
  if (model.format && model.format->pieces) {
    std::vector<StoredRange> theirs = model.format->pieces(reader, model.config, name, shape);
    if (!theirs.empty()) return theirs;
  }
  if (std::vector<StoredRange> theirs = release_pieces(reader, model.config, name, shape); !theirs.empty())
    return theirs;
  const std::vector<StoredRange> whole = {{name, stored_shape(name, shape)}};
  const auto mixing = renamed(name, "self_attn.qkv_proj.", "self_attn.");
  if (!mixing || reader.find(name)) return whole;
  const std::vector<StoredRange> apart = separate_qkv(model.config, *mixing, shape);
  const bool are_there = std::ranges::any_of(apart, [&](const StoredRange& piece) { return reader.find(piece.name); });
  return are_there ? apart : whole;
}

// The name of the embedding or of the head in the file.
std::string stored_name(const SafetensorsReader& reader, const Description& model, const char* name) {
  return pieces_of(reader, model, name, {model.config.vocabulary, model.config.hidden}).front().name;
}

// Buffers that some code saves beside the weights.
bool is_stray(const std::string& name) {
  const auto holds = [&](const char* part) { return name.find(part) != std::string::npos; };
  return holds("attn_mask") || holds("rotary_emb") || holds("inv_freq");
}

void check_tensor(const SafetensorsReader& reader, const std::string& name, const Shape& shape) {
  const StoredTensor& tensor = stored_tensor(reader, name, fmt::format(" {}", to_string(shape)));
  require(std::ranges::equal(tensor.shape, shape),
          "{}: tensor \"{}\" has shape [{}], expected {}; configuration and weights must be of the same model",
          tensor.file->path().string(), name, fmt::join(tensor.shape, ", "), to_string(shape));
}

// Some files of tied models hold the embedding under both names.
bool repeats_embedding(const SafetensorsReader& reader, const Description& model) {
  const StoredTensor* const head = reader.find(stored_name(reader, model, kHead));
  const StoredTensor& embedding = stored_tensor(reader, stored_name(reader, model, kEmbedding));
  return head && head->dtype == embedding.dtype && std::ranges::equal(head->bytes, embedding.bytes);
}

// Every tensor that the model needs, of the right shape, and no other. Allocates nothing that the file does not hold.
void check_tensors(const SafetensorsReader& reader, const Description& model) {
  const ModelConfig& config = model.config;
  std::set<std::string> used;
  LanguageModel::visit_parameters(config, [&](const std::string& name, const Shape& shape) {
    for (const StoredRange& piece : pieces_of(reader, model, name, shape)) {
      check_tensor(reader, piece.name, piece.shape);
      used.insert(piece.name);
    }
  });
  if (config.tie_embeddings && repeats_embedding(reader, model)) used.insert(stored_name(reader, model, kHead));
  std::vector<std::string> unused;
  for (const StoredTensor& tensor : reader.tensors())
    if (!used.contains(tensor.name) && !is_stray(tensor.name)) unused.push_back(printable(tensor.name));
  if (unused.empty()) return;
  const size_t shown = std::min<size_t>(unused.size(), 3);
  fail("{}: a model {} of {} layers has no place for {} of the tensors: {}{}; its configuration or --arch is another's",
       reader.path().string(), printable(config.arch), config.layers, unused.size(),
       fmt::join(unused.begin(), unused.begin() + shown, ", "), shown < unused.size() ? ", …" : "");
}

// Presets that have just these tensors. Where no tensor tells the heads, any that divide the width will do.
std::vector<std::string> fitting_presets(const SafetensorsReader& reader) {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) {
    const BlockConfig& block = preset.block;  // of those that an attention_type can name
    if (block.score_degree > 0 || block.square_mask || block.decay == DecayKind::log_sigmoid) continue;
    try {
      int64_t heads = 0;
      if (told_heads(reader) == 0) {
        const int64_t width = stored_size(reader, "model.layers.0.self_attn.o_proj.weight", 1);
        heads = width / std::gcd(width, kSomeHeadDim);
      }
      const ModelConfig config = release_config(reader, preset.name, heads);
      check_tensors(reader, {config});
      if (config.block.conv_window == preset.block.conv_window) names.push_back(preset.name);
    } catch (const Error&) {  // it does not fit
    }
  }
  return names;
}

ModelConfig bare_config(const SafetensorsReader& reader, const std::string& arch, int64_t heads) {
  if (!arch.empty()) return release_config(reader, arch, heads);
  const std::vector<std::string> names = fitting_presets(reader);
  fail("{}: there is no config.json beside it, so the architecture must be named: give --arch{}",
       reader.path().string(),
       names.empty() ? "" : fmt::format("; its tensors are those of {}", fmt::join(names, ", ")));
}

fs::path folder_of(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored) ? path : path.parent_path();
}

Description saved_description(const fs::path& file, const fs::path& weights, const std::string& arch, int64_t heads) {
  const std::string text = read_text(file, kMostConfigBytes);
  Description model{config_from_json(text, file.string()), config_format(text, file.string())};
  ModelConfig& config = model.config;
  require(arch.empty() || arch == config.arch || named_architecture(arch).name == config.arch,
          "{}: the architecture is {}, not {}; leave --arch out", file.string(), printable(config.arch), arch);
  if (model.format) {
    const SafetensorsReader reader(weights);
    if (!reader.find(stored_name(reader, model, kHead))) config.tie_embeddings = true;
    if (model.format->follow_tensors) model.format->follow_tensors(config, reader);
  } else if (config.bos) {  // perhaps the authors'
    follow_tensors(config, SafetensorsReader(weights));
    config = checked_config(config, weights.string());
  }
  // Beside a branch there is one head of as many as the width would have.
  const int64_t own = config.heads() + config.branch / config.head_dim;
  require(heads == 0 || heads == own, "{}: the model has {} heads, not {}; leave --heads out", file.string(), own,
          heads);
  return model;
}

Description describe(const fs::path& path, const std::string& arch, int64_t heads) {
  recover_directory(path);
  std::error_code ignored;
  require(fs::exists(path, ignored), "{}: does not exist; expected a model's directory or .safetensors file",
          path.string());
  for (const char* name : kConfigFiles)
    if (const fs::path file = folder_of(path) / name; fs::exists(file, ignored))
      return saved_description(file, path, arch, heads);
  return {bare_config(SafetensorsReader(path), arch, heads)};
}

DType matrix_dtype(const SafetensorsReader& reader, WeightDType weights, Device device) {
  if (weights == WeightDType::bf16) return DType::bf16;
  // Products of a CPU widen rounded weights as they read them: the results are those of f32.
  return weights == WeightDType::as_stored && device.is_cpu() ? stored_matrices(reader) : DType::f32;
}

bool is_matrix(const Plan& plan, const std::string& name) {
  if (name == kHead) return true;
  const std::string_view layer = "model.layers.";
  if (!name.starts_with(layer)) return false;
  const Weight weight = plan.weight(std::string_view(name).substr(name.find('.', layer.size()) + 1));
  return weight != kNo && plan.weights[weight].is_matrix();
}

std::string file_hash(const fs::path& file) {
  const std::string text = read_text(file);
  return hash_text(hash_of_large(std::as_bytes(std::span(text))));
}

}  // namespace

fs::path checkpoint_of(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path / "latest", ignored)) return path / "latest";
  // A file of the working directory is in a folder, too, which has its configuration and tokenizer.
  return path.has_parent_path() || !fs::is_regular_file(path, ignored) ? path : "." / path;
}

bool has_config(const fs::path& path) {
  const fs::path folder = folder_of(checkpoint_of(path));
  std::error_code ignored;
  return std::ranges::any_of(kConfigFiles, [&](const char* name) { return fs::exists(folder / name, ignored); });
}

std::vector<std::string> load_notes(const fs::path& given) {
  const fs::path path = checkpoint_of(given);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return {};
  std::vector<std::string> notes;
  try {
    notes = changed_files(SafetensorsReader(path));
  } catch (const Error&) {  // loading will say it
  }
  std::vector<std::string> pickles;
  for (const auto& entry : fs::directory_iterator(folder_of(path), ignored))
    if (std::ranges::count(kPickles, entry.path().extension().string()) > 0 &&
        !entry.path().filename().string().starts_with(kReadPickles))
      pickles.push_back(printable(entry.path().filename().string()));
  if (pickles.empty()) return notes;
  std::ranges::sort(pickles);
  notes.push_back(
      fmt::format("{}: {} {} pickled and not read: a pickle can run any code; config.json or --arch says the "
                  "architecture",
                  folder_of(path).string(), fmt::join(pickles, ", "), pickles.size() == 1 ? "is" : "are"));
  return notes;
}

const Format* model_format(const fs::path& given) {
  std::error_code ignored;
  for (const char* name : kConfigFiles)
    if (const fs::path file = folder_of(checkpoint_of(given)) / name; fs::exists(file, ignored))
      return config_format(read_text(file, kMostConfigBytes), file.string());
  return nullptr;
}

ModelConfig load_config(const fs::path& given, const std::string& arch, int64_t heads) {
  return describe(checkpoint_of(given), arch, heads).config;
}

ModelConfig check_model(const fs::path& given, const std::string& arch, int64_t heads) {
  const fs::path path = checkpoint_of(given);
  const Description model = describe(path, arch, heads);
  check_tensors(SafetensorsReader(path), model);
  return model.config;
}

DType stored_matrices(const SafetensorsReader& weights) {
  const StoredTensor* largest = nullptr;
  for (const StoredTensor& tensor : weights.tensors())
    if (!largest || tensor.bytes.size() > largest->bytes.size()) largest = &tensor;
  if (largest && largest->dtype == "BF16") return DType::bf16;
  return largest && largest->dtype == "F16" ? DType::f16 : DType::f32;
}

int64_t weight_bytes(const ModelConfig& config, DType matrices, Device device) {
  const Plan plan = plan_layer(config);
  int64_t bytes = 0;
  LanguageModel::visit_parameters(config, [&](const std::string& name, const Shape& shape) {
    const bool embedding = name == kEmbedding;
    const bool rounded = embedding ? device.is_cpu() : is_matrix(plan, name);
    bytes += shape.elements() * static_cast<int64_t>(size_of(rounded ? matrices : DType::f32));
    if (embedding && config.tie_embeddings && !device.is_cpu() && matrices != DType::f32)  // a rounded head beside it
      bytes += shape.elements() * static_cast<int64_t>(size_of(matrices));
  });
  return bytes;
}

namespace {

// On its way to a GPU a parameter that is stored in another dtype is converted in the memory of the CPU; one that is
// drawn has a copy in f32 beside it.
int64_t largest_parameter(const ModelConfig& config) {
  int64_t largest = 0;
  LanguageModel::visit_parameters(
      config, [&](const std::string&, const Shape& shape) { largest = std::max(largest, shape.elements()); });
  return largest * static_cast<int64_t>(sizeof(float));
}

}  // namespace

int64_t check_weight_memory(const std::string& origin, const ModelConfig& config, DType matrices, Device device) {
  const auto check = [&](std::string_view what, int64_t bytes, Device where) {
    const int64_t free = usable_memory(where);
    require(bytes <= free,
            "{}: {} {:.2f} GB ({} bytes) of memory on {}, of which {:.2f} GB ({} bytes) are free; use a smaller model, "
            "or dtype bf16",
            origin, what, static_cast<double>(bytes) / 1e9, bytes, name_of(where), static_cast<double>(free) / 1e9,
            free);
  };
  const int64_t needed = weight_bytes(config, matrices, device);
  check("its weights need", needed, device);
  if (!device.is_cpu()) check("its largest tensor needs", largest_parameter(config), {});
  return needed;
}

LanguageModel load_model(const fs::path& given, const std::string& arch, Device device, int64_t heads,
                         const LoadProgress& progress, WeightDType weights) {
  const fs::path path = checkpoint_of(given);
  const Description model = describe(path, arch, heads);
  const SafetensorsReader reader(path);
  check_tensors(reader, model);
  const DType matrices = matrix_dtype(reader, weights, device);
  const int64_t needed = check_weight_memory(reader.path().string(), model.config, matrices, device);
  int64_t done = 0;
  const auto fill = [&](const std::string& name, const Tensor& out) {
    if (progress) progress(done, needed);
    done += static_cast<int64_t>(out.bytes());
    const Tensor from = stored_elements(reader, pieces_of(reader, model, name, out.shape()), out.dtype());
    copy_between(out.view({out.elements()}), from);
  };
  return LanguageModel(model.config, fill, device, matrices);
}

void save_model(const fs::path& directory, const LanguageModel& model) {
  std::map<std::string, Tensor> tensors;
  for (const Parameter& parameter : model.parameters()) {
    const Tensor& value = parameter.value.value();
    tensors[parameter.name] = value.view(stored_shape(parameter.name, value.shape()));
  }
  write_text(directory / "config.json", config_to_json(model.config()));
  std::string files;
  for (const char* name : kSmallFiles)
    if (fs::exists(directory / name)) files += fmt::format("{} {}\n", name, file_hash(directory / name));
  write_safetensors(directory / "model.safetensors", tensors,
                    {{"format", "pt"}, {kFilesKey, files}});  // "pt": as Hugging Face's library asks
}

std::vector<std::string> changed_files(const SafetensorsReader& weights) {
  const auto entry = weights.metadata().find(kFilesKey);
  if (entry == weights.metadata().end()) return {};
  std::vector<std::string> lines;
  const std::string saved = "\n" + entry->second;
  for (const char* name : kSmallFiles) {
    const std::string key = fmt::format("\n{} ", name);
    const size_t at = saved.find(key);
    if (at == std::string::npos) continue;
    const fs::path file = weights.path().parent_path() / name;
    std::error_code ignored;
    if (!fs::exists(file, ignored))
      lines.push_back(fmt::format("{}: is missing; it was saved with the weights", file.string()));
    else if (saved.compare(at + key.size(), 16, file_hash(file)) != 0)
      lines.push_back(fmt::format("{}: is not the file that was saved with the weights; it was edited, or is damaged",
                                  file.string()));
  }
  return lines;
}

}  // namespace furious
