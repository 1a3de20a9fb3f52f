#include "decode/state_file.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <span>

#include "base/error.h"
#include "base/hash.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "ops/sampling/sampling.h"
#include "tensor/check.h"

namespace furious {
namespace {

constexpr std::string_view kFormat = "furious state";
constexpr std::string_view kVersion = "2";

std::string count_text(int64_t count) {
  return fmt::format("{:020}", count);
}

uint64_t hash_of_numbers(const Tensor& tensor) {
  return hash_of_large({static_cast<const std::byte*>(tensor.raw()), tensor.bytes()});
}

// The last tokens, padded at the front with −1.
Tensor history_tensor(const std::vector<int32_t>& history) {
  Tensor tensor = Tensor::empty({kRepetitionWindow}, DType::i32);
  int32_t* const out =
      std::fill_n(tensor.data<int32_t>(), kRepetitionWindow - static_cast<int64_t>(history.size()), -1);
  std::ranges::copy(history, out);
  return tensor;
}

constexpr std::string_view kIds = "ids";
constexpr std::string_view kText = "text";
constexpr std::string_view kPasses = "passes";

// Bytes as numbers, padded with zeros.
Tensor words_of(const void* bytes, size_t count) {
  const size_t words = (count + sizeof(int32_t) - 1) / sizeof(int32_t);
  Tensor tensor = Tensor::empty({static_cast<int64_t>(words)}, DType::i32);
  if (words == 0) return tensor;
  tensor.data<int32_t>()[words - 1] = 0;
  std::memcpy(tensor.raw(), bytes, count);
  return tensor;
}

std::string count_key(std::string_view what, size_t sequence) {
  return fmt::format("{}.{}", sequence, what);
}

// SlotContents::tokens and pending of every sequence.
using Counts = std::vector<std::pair<int64_t, int64_t>>;

std::string checksum(const std::map<std::string, Tensor>& tensors, const Counts& counts) {
  std::string hashes;
  for (const auto& [tokens, pending] : counts) hashes += fmt::format("{} {} ", tokens, pending);
  for (const auto& [name, tensor] : tensors)
    hashes += fmt::format(" {} {} {:x}", name, to_string(tensor.shape()), hash_of_numbers(tensor));
  return hash_text(hash_of(hashes));
}

// The metadata of a state file; a missing value is an Error.
class Metadata {
 public:
  explicit Metadata(const SafetensorsReader& reader) : reader_(reader) {
    require(is_state_file(reader), "{}: not a state file; create one with --save-state", origin());
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
  uint64_t hash(const std::string& key) const {
    const std::string& digits = text(key);
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (error != std::errc() || end != digits.data() + digits.size()) damaged(fmt::format("\"{}\" is not a hash", key));
    return value;
  }
  [[noreturn]] void damaged(std::string_view what) const {
    fail("{}: {}; the state file is damaged: read the text again and save a new one", origin(), what);
  }

 private:
  const SafetensorsReader& reader_;
};

Counts counts_of(const Metadata& metadata) {
  constexpr int64_t kMostSequences = 1 << 20;
  const int64_t sequences = metadata.count("sequences");
  if (sequences < 1 || sequences > kMostSequences) metadata.damaged(fmt::format("\"sequences\" is {}", sequences));
  Counts counts;
  for (size_t i = 0; i < static_cast<size_t>(sequences); ++i)
    counts.emplace_back(metadata.count(count_key("tokens", i)), metadata.count(count_key("pending", i)));
  return counts;
}

std::map<std::string, Tensor> checked_tensors(const SafetensorsReader& reader, const Metadata& metadata) {
  std::map<std::string, Tensor> tensors;
  for (const StoredTensor& stored : reader.tensors()) tensors[stored.name] = reader.load(stored.name);
  if (checksum(tensors, counts_of(metadata)) != metadata.text("checksum")) metadata.damaged("its checksum is wrong");
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

namespace {

struct StateFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

StateFile state_file_of(const std::vector<SlotContents>& sequences, const ModelConfig& config,
                        const std::string& model_fingerprint, const std::vector<ReadTokens>& read) {
  require(read.empty() || read.size() == sequences.size(), "state file: tokens of {} sequences, expected {}",
          read.size(), sequences.size());
  StateFile file;
  auto& [tensors, metadata] = file;
  metadata = {{"format", std::string(kFormat)},
              {"version", std::string(kVersion)},
              {"model", model_fingerprint},
              {"config", config_to_json(config)},
              {"sequences", count_text(static_cast<int64_t>(sequences.size()))}};
  Counts counts;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SlotContents& contents = sequences[i];
    for (const auto& [name, tensor] : contents.tensors) tensors[fmt::format("{}.{}", i, name)] = tensor;
    tensors[fmt::format("{}.logits", i)] = contents.logits;
    tensors[fmt::format("{}.history", i)] = history_tensor(contents.sampling.history);
    if (!read.empty()) {
      tensors[fmt::format("{}.{}", i, kIds)] = words_of(read[i].ids.data(), read[i].ids.size() * sizeof(int32_t));
      tensors[fmt::format("{}.{}", i, kText)] = words_of(read[i].text.data(), read[i].text.size());
      metadata[count_key(kText, i)] = count_text(static_cast<int64_t>(read[i].text.size()));
      metadata[count_key(kPasses, i)] = hash_text(read[i].passes);
    }
    counts.emplace_back(contents.tokens, contents.pending);
    metadata[count_key("tokens", i)] = count_text(contents.tokens);
    metadata[count_key("pending", i)] = count_text(contents.pending);
  }
  metadata["checksum"] = checksum(tensors, counts);
  return file;
}

std::vector<SlotContents> contents_of(const SafetensorsReader& reader, const ModelConfig& config,
                                      const std::string& model_fingerprint) {
  const Metadata metadata(reader);
  require(metadata.text("version") == kVersion,
          "{}: state file of version {}, expected {}; save it again with this version of furious", metadata.origin(),
          metadata.text("version"), kVersion);
  const ModelConfig theirs = config_from_json(metadata.text("config"), metadata.origin());
  const auto described = [](const ModelConfig& c) {
    return fmt::format("{} with {} layers of width {} and {} token ids", c.arch, c.layers, c.hidden, c.vocabulary);
  };
  require(theirs == config, "{}: the state of another model, {}; this model is {}", metadata.origin(),
          described(theirs), described(config));
  require(metadata.text("model") == model_fingerprint,
          "{}: the state of another model, with the same shape but other weights or another tokenizer; load that model",
          metadata.origin());

  const Counts counts = counts_of(metadata);
  std::vector<SlotContents> sequences(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    sequences[i].tokens = counts[i].first;
    sequences[i].sampling.position = static_cast<uint64_t>(counts[i].first);
    sequences[i].pending = counts[i].second;
  }
  for (auto& [name, tensor] : checked_tensors(reader, metadata)) {
    const size_t dot = std::min(name.find('.'), name.size());
    size_t sequence = counts.size();
    std::from_chars(name.data(), name.data() + dot, sequence);
    if (sequence >= counts.size() || dot == name.size())
      metadata.damaged(fmt::format("tensor \"{}\" belongs to no sequence", name));
    sequences[sequence].tensors[name.substr(dot + 1)] = tensor;
  }
  const ArgumentCheck check("state file");
  for (SlotContents& contents : sequences) {
    const auto take = [&](const std::string& name) {
      const auto found = contents.tensors.find(name);
      if (found == contents.tensors.end()) metadata.damaged(fmt::format("tensor \"{}\" is missing", name));
      const Tensor tensor = found->second;
      contents.tensors.erase(found);
      return tensor;
    };
    contents.tensors.erase(std::string(kIds));  // read_tokens
    contents.tensors.erase(std::string(kText));
    contents.logits = take("logits");
    const Tensor history = take("history");
    check.dense("logits", contents.logits, DType::f32, {config.vocabulary});
    check.dense("history", history, DType::i32, {kRepetitionWindow});
    const std::span<const int32_t> recent(history.data<int32_t>(), kRepetitionWindow);
    std::ranges::copy_if(recent, std::back_inserter(contents.sampling.history), [](int32_t id) { return id >= 0; });
  }
  return sequences;
}

}  // namespace

std::optional<ReadTokens> read_tokens(const SafetensorsReader& reader) {
  const Metadata metadata(reader);
  if (reader.find(fmt::format("0.{}", kIds)) == nullptr) return std::nullopt;
  const auto load = [&](std::string_view name) {
    const Tensor tensor = reader.load(fmt::format("0.{}", name));
    if (tensor.dtype() != DType::i32 || tensor.rank() != 1)
      metadata.damaged(fmt::format("tensor \"{}\" is not a list of i32", name));
    return tensor;
  };
  const Tensor ids = load(kIds), text = load(kText);
  const int64_t bytes = metadata.count(count_key(kText, 0));
  if (ids.elements() != metadata.count(count_key("tokens", 0)))
    metadata.damaged(fmt::format("{} ids do not fit the number of tokens", ids.elements()));
  if (text.elements() != bytes / 4 + (bytes % 4 != 0)) metadata.damaged("the length of its text is wrong");
  ReadTokens read;
  read.ids.assign(ids.data<int32_t>(), ids.data<int32_t>() + ids.elements());
  if (bytes > 0) read.text.assign(static_cast<const char*>(text.raw()), static_cast<size_t>(bytes));
  const auto passes = reader.metadata().find(count_key(kPasses, 0));
  if (passes != reader.metadata().end()) read.passes = metadata.hash(count_key(kPasses, 0));
  return read;
}

void save_state(const std::filesystem::path& file, const std::vector<SlotContents>& sequences,
                const ModelConfig& config, const std::string& model_fingerprint, const std::vector<ReadTokens>& read) {
  const StateFile contents = state_file_of(sequences, config, model_fingerprint, read);
  write_safetensors(file, contents.tensors, contents.metadata);
}

std::vector<SlotContents> load_state(const std::filesystem::path& file, const ModelConfig& config,
                                     const std::string& model_fingerprint) {
  return contents_of(SafetensorsReader(file), config, model_fingerprint);
}

std::vector<std::byte> state_bytes(const std::vector<SlotContents>& sequences, const ModelConfig& config,
                                   const std::string& model_fingerprint, const std::vector<ReadTokens>& read) {
  const StateFile contents = state_file_of(sequences, config, model_fingerprint, read);
  return safetensors_bytes(contents.tensors, contents.metadata);
}

std::vector<SlotContents> load_state(std::span<const std::byte> bytes, const ModelConfig& config,
                                     const std::string& model_fingerprint) {
  return contents_of(SafetensorsReader("state in memory", bytes), config, model_fingerprint);
}

}  // namespace furious
