#include "fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "data/progress.h"
#include "data/token_shards_json.h"
#include "data/tokenizer.h"
#include "decode/state_file.h"
#include "fuzz/sentencepiece_files.h"
#include "model/config_json.h"
#include "model/safetensors.h"
#include "ops/sampling/sampling.h"

namespace furious::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostElements = 1 << 16;  // that are loaded of a tensor
constexpr const char* kFingerprint = "0123456789abcdef";

template <class Read>
bool accepted(Read&& read) {
  try {
    read();
    return true;
  } catch (const Error&) {
    return false;
  }
}

// A regular file that lies in memory.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes = {}) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    require(descriptor_ >= 0 && ::write(descriptor_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
            "no file in memory");
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  fs::path path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }

 private:
  int descriptor_;
};

// A file with a unique name; removed when the process ends.
class NamedFile {
 public:
  explicit NamedFile(const std::string& ending)
      : path_(fs::temp_directory_path() / fmt::format("furious-fuzz-{}{}", ::getpid(), ending)) {}
  ~NamedFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  NamedFile(const NamedFile&) = delete;
  NamedFile& operator=(const NamedFile&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void load_all(const SafetensorsReader& reader) {
  for (const StoredTensor& stored : reader.tensors()) {
    int64_t elements = 1;
    for (const int64_t size : stored.shape)
      elements = std::min(kMostElements + 1, elements * std::min(size, kMostElements));
    if (elements > kMostElements) continue;
    accepted([&] { reader.load(stored.name); });
    accepted([&] { reader.load(stored.name, DType::f32); });
    accepted([&] { reader.view(stored.name, DType::bf16); });
  }
}

ModelConfig small_config() {
  ModelConfig config;
  config.arch = "2mamba";
  config.block = preset(config.arch).block;
  config.vocabulary = 16;
  config.hidden = 8;
  config.intermediate = 8;
  config.layers = 1;
  config.q_heads = config.k_heads = config.v_heads = 1;
  config.head_dim = config.qk_dim = 8;
  return config;
}

const std::vector<InputFile>& corpus_files() {
  static const std::vector<InputFile> files = {{"a.txt", TextFormat::text, 1000, 1},
                                               {"b.jsonl.gz", TextFormat::jsonl, 200, 2},
                                               {"c.parquet", TextFormat::parquet, 300, 3}};
  return files;
}

std::string good_safetensors() {
  const NamedFile file(".safetensors");
  const Tensor numbers = Tensor::empty({2, 3}, DType::f32), ids = Tensor::empty({2}, DType::i32);
  std::fill_n(numbers.data<float>(), 6, 1.5f);
  std::fill_n(ids.data<int32_t>(), 2, 7);
  write_safetensors(file.path(), {{"numbers", numbers}, {"ids", ids}}, {{"format", "pt"}});
  return read_text(file.path());
}

std::string good_state() {
  const NamedFile file(".state");
  SlotContents sequence;
  sequence.tokens = 3;
  sequence.logits = Tensor::empty({16}, DType::f32);
  std::fill_n(sequence.logits.data<float>(), 16, 0.25f);
  sequence.sampling = {3, {1, 2, 3}};
  sequence.tensors["layers.0.conv"] = Tensor::empty({1, 2}, DType::f32);
  std::fill_n(sequence.tensors["layers.0.conv"].data<float>(), 2, 1.0f);
  save_state(file.path(), {sequence, sequence}, small_config(), kFingerprint);
  return read_text(file.path());
}

SplitInfo good_split() {
  SplitInfo info;
  info.shards = {{100, 4, 300, 1, 2}, {120, 5, 310, 3, 4}};
  info.current = {30, 1, 90, 5, 6};
  info.has_current = true;
  info.document_tokens = 10;
  return info;
}

std::string good_manifest() {
  nlohmann::ordered_json json = {{"format", "furious-tokens"},
                                 {"version", 1},
                                 {"tokenizer", to_json(TokenizerInfo{"byte", "byte", 258, 256, 257})},
                                 {"token_bytes", 2},
                                 {"replaced_utf8", 0}};
  for (const Split split : kSplits) json[name_of(split)] = to_json(good_split(), split);
  return json.dump(1);
}

std::string good_progress() {
  return to_json_text({{1, 5000, 40, true}, Split::test, 2, {good_split(), good_split()}});
}

constexpr std::string_view kLlama = R"({"model_type": "llama", "vocab_size": 32, "hidden_size": 16,
 "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-05,
 "rope_scaling": {"rope_type": "default"}, "max": Infinity, "names": ["a\"b", null, true, -1.5e3]})";

constexpr std::string_view kRelease = R"({"model_type": "llama", "attention_type": "softmax", "vocab_size": 32,
 "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2})";

constexpr std::string_view kIndex = R"({"metadata": {"total_size": 4}, "weight_map": {"a": "one.safetensors"}})";

}  // namespace

bool safetensors(std::string_view bytes) {
  if (!bytes.starts_with('{')) {
    const MemoryFile file(bytes);
    return accepted([&] { load_all(SafetensorsReader(file.path())); });
  }
  const NamedFile index(".safetensors.index.json");
  write_text(index.path(), bytes);
  return accepted([&] { load_all(SafetensorsReader(index.path())); });
}

bool config(std::string_view bytes) {
  return accepted([&] {
    const ModelConfig config = config_from_json(bytes, "config.json");
    if (!(config_from_json(config_to_json(config), "again") == config)) std::abort();
  });
}

bool state(std::string_view bytes) {
  const MemoryFile file(bytes);
  return accepted([&] { load_state(file.path(), small_config(), kFingerprint); });
}

bool manifest(std::string_view bytes) {
  return accepted([&] {
    const Manifest manifest = manifest_from_json(bytes, "manifest.json");
    for (const Split split : kSplits) manifest[split].total();
  });
}

bool progress(std::string_view bytes) {
  accepted([&] { progress_from_json(bytes, "progress.json", corpus_files()); });
  return accepted([&] {
    nlohmann::json json = parse_json(bytes, "progress.json");
    if (json.is_object()) json["checksum"] = checksum_of(json);
    const SavedProgress read = progress_from_json(json.dump(), "progress.json", corpus_files());
    progress_from_json(to_json_text(read), "again", corpus_files());
  });
}

bool tokenizer(std::string_view bytes) {
  return accepted([&] {
    const auto tokenizer = make_sentencepiece(std::string(bytes), "tokenizer.model");
    for (const std::string_view text : kSampleTexts) {
      const std::vector<int32_t> ids = tokenizer->encode(text);
      tokenizer->encode_continuation(text);
      tokenizer->decode(ids);
      for (const int32_t id : ids) tokenizer->first_piece(id);
    }
    for (int32_t id = 0; id < std::min(tokenizer->vocabulary_size(), 64); ++id) tokenizer->piece(id);
  });
}

std::vector<std::pair<std::string, std::string>> good_files() {
  return {{"safetensors", good_safetensors()},
          {"config", config_to_json(small_config())},
          {"config", std::string(kLlama)},
          {"config", std::string(kRelease)},
          {"state", good_state()},
          {"manifest", good_manifest()},
          {"progress", good_progress()},
          {"tokenizer", sentencepiece_file({.type = kUnigram})},
          {"tokenizer", sentencepiece_file({.type = kBytePair})},
          {"tokenizer", sentencepiece_file({.type = kUnigram, .rules = sample_rules()})}};
}

}  // namespace furious::fuzz
