#include "decode/state_file.h"

#include <charconv>

#include "base/error.h"
#include "base/hash.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "ops/sampling/sampling.h"
#include "tensor/check.h"

namespace furious {
namespace {

constexpr std::string_view kFormat = "furious state";
constexpr std::string_view kVersion = "1";

std::string count_text(int64_t count) {
  return fmt::format("{:020}", count);
}

uint64_t hash_of_numbers(const Tensor& tensor) {
  return hash_of_large({static_cast<const std::byte*>(tensor.raw()), tensor.bytes()});
}

std::map<std::string, Tensor> tensors_of(const SavedState& state) {
  std::map<std::string, Tensor> tensors = state.cache.tensors;
  tensors["logits"] = state.logits;
  tensors["history"] = state.history;
  return tensors;
}

std::string checksum(const std::map<std::string, Tensor>& tensors, int64_t tokens, int64_t pending) {
  std::string hashes = fmt::format("{} {}", tokens, pending);
  for (const auto& [name, tensor] : tensors)
    hashes += fmt::format(" {} {} {:x}", name, to_string(tensor.shape()), hash_of_numbers(tensor));
  return hash_text(hash_of(hashes));
}

// The metadata of a state file, whose values are all there.
class Metadata {
 public:
  explicit Metadata(const SafetensorsReader& reader) : reader_(reader) {
    require(is_state_file(reader), "{}: not a state file; --save-state writes one", origin());
  }
  std::string origin() const { return reader_.path().string(); }
  const std::string& text(const std::string& key) const {
    const auto found = reader_.metadata().find(key);
    if (found == reader_.metadata().end()) damaged(fmt::format("\"{}\" is missing", key));
    return found->second;
  }
  int64_t count(const std::string& key) const {
    const std::string& digits = text(key);
    int64_t value = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 0)
      damaged(fmt::format("\"{}\" is not a number", key));
    return value;
  }
  [[noreturn]] void damaged(std::string_view what) const {
    fail("{}: {}; the state file is damaged: read the text again and save a new one", origin(), what);
  }

 private:
  const SafetensorsReader& reader_;
};

// The checksum is of version 1 of the format; files written since then have those of every safetensors file, too.
std::map<std::string, Tensor> checked_tensors(const SafetensorsReader& reader, const Metadata& metadata) {
  std::map<std::string, Tensor> tensors;
  for (const StoredTensor& stored : reader.tensors()) tensors[stored.name] = reader.load(stored.name);
  if (checksum(tensors, metadata.count("tokens"), metadata.count("pending")) != metadata.text("checksum"))
    metadata.damaged("its checksum is wrong");
  return tensors;
}

}  // namespace

bool is_state_file(const SafetensorsReader& reader) {
  const auto format = reader.metadata().find("format");
  return format != reader.metadata().end() && format->second == kFormat;
}

std::vector<std::string> state_damage(const SafetensorsReader& reader) {
  std::vector<std::string> lines = reader.damage();
  if (!lines.empty()) return lines;
  try {
    checked_tensors(reader, Metadata(reader));
  } catch (const Error& error) {
    lines.emplace_back(error.what());
  }
  return lines;
}

std::string fingerprint(const LanguageModel& model, const std::string& tokenizer_fingerprint) {
  std::string hashes = config_to_json(model.config()) + tokenizer_fingerprint;
  for (const Parameter& parameter : model.parameters())
    hashes += hash_text(hash_of_numbers(to_device(parameter.value.value(), {})));
  return hash_text(hash_of(hashes));
}

void save_state(const std::filesystem::path& file, const SavedState& state, const ModelConfig& config,
                const std::string& model_fingerprint) {
  const std::map<std::string, Tensor> tensors = tensors_of(state);
  const auto& [tokens, pending, ignored] = state.cache;
  write_safetensors(file, tensors,
                    {{"format", std::string(kFormat)},
                     {"version", std::string(kVersion)},
                     {"model", model_fingerprint},
                     {"config", config_to_json(config)},
                     {"tokens", count_text(tokens)},
                     {"pending", count_text(pending)},
                     {"checksum", checksum(tensors, tokens, pending)}});
}

SavedState load_state(const std::filesystem::path& file, const ModelConfig& config,
                      const std::string& model_fingerprint) {
  const SafetensorsReader reader(file);
  const Metadata metadata(reader);
  require(metadata.text("version") == kVersion,
          "{}: a state file of version {}, expected {}; save it again with this "
          "version of furious",
          metadata.origin(), metadata.text("version"), kVersion);
  const ModelConfig theirs = config_from_json(metadata.text("config"), metadata.origin());
  const auto described = [](const ModelConfig& c) {
    return fmt::format("{} with {} layers of width {} and {} token ids", c.arch, c.layers, c.hidden, c.vocabulary);
  };
  require(theirs == config, "{}: the state of another model: {}; this one is {}", metadata.origin(), described(theirs),
          described(config));
  require(metadata.text("model") == model_fingerprint,
          "{}: the state of another model: of the same shape, but with other weights or another tokenizer",
          metadata.origin());

  SavedState state;
  state.cache.tokens = metadata.count("tokens");
  state.cache.pending = metadata.count("pending");
  state.cache.tensors = checked_tensors(reader, metadata);
  const auto take = [&](const std::string& name) {
    const auto found = state.cache.tensors.find(name);
    if (found == state.cache.tensors.end()) metadata.damaged(fmt::format("tensor \"{}\" is missing", name));
    Tensor tensor = found->second;
    state.cache.tensors.erase(found);
    return tensor;
  };
  state.logits = take("logits");
  state.history = take("history");
  const ArgumentCheck check("state file");
  check.dense("logits", state.logits, DType::f32, {ArgumentCheck::kAny, config.vocabulary});
  check.dense("history", state.history, DType::i32, {state.logits.size(0), kRepetitionWindow});
  return state;
}

}  // namespace furious
