#include "fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "data/html.h"
#include "data/progress.h"
#include "data/reader.h"
#include "data/token_shards_json.h"
#include "data/tokenizer.h"
#include "data/tokenizer_json.h"
#include "decode/state_file.h"
#include "fuzz/sentencepiece_files.h"
#include "model/config_json.h"
#include "model/pickle.h"
#include "model/safetensors.h"
#include "model/torch_file.h"
#include "ops/sampling/sampling.h"
#include "serve/openai.h"

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

std::string good_pickle() {
  const Tensor a = Tensor::empty({2, 3}, DType::f32), b = Tensor::empty({4}, DType::f32);
  std::fill_n(a.data<float>(), 6, 1.5f);
  std::fill_n(b.data<float>(), 4, 2.5f);
  return testing::TorchFile().bytes({{"a.weight", a}, {"b", b}});
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

void use(const Tokenizer& tokenizer) {
  for (const std::string_view text : kSampleTexts) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    tokenizer.encode_continuation(text);
    tokenizer.decode(ids);
    for (const int32_t id : ids) tokenizer.first_piece(id);
  }
  for (int32_t id = 0; id < std::min(tokenizer.vocabulary_size(), 64); ++id) tokenizer.piece(id);
}

std::string good_progress() {
  return to_json_text({{1, 5000, 40, true}, Split::test, {2, 0}, {good_split(), good_split()}});
}

constexpr std::string_view kLlama = R"({"model_type": "llama", "vocab_size": 32, "hidden_size": 16,
 "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-05,
 "rope_scaling": {"rope_type": "default"}, "max": Infinity, "eos_token_id": ["a\"b", null, true, -1.5e3]})";

constexpr std::string_view kRelease = R"({"model_type": "llama", "attention_type": "softmax", "vocab_size": 32,
 "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2})";

constexpr std::string_view kMamba = R"({"d_model": 16, "n_layer": 1, "vocab_size": 19, "pad_vocab_size_multiple": 8,
 "ssm_cfg": {"layer": "Mamba2", "headdim": 8, "d_state": 16, "d_ssm": 16, "dt_limit": [0.1, 0.9]}})";

constexpr std::string_view kBrumby = R"({"model_type": "brumby", "vocab_size": 32, "hidden_size": 16, "head_dim": 8,
 "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "p": 2,
 "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, "low_freq_factor": 1,
 "high_freq_factor": 4, "original_max_position_embeddings": 64}})";

constexpr std::string_view kByteLevel = R"({"version": "1.0", "added_tokens": [
 {"id": 5, "content": "<e>", "single_word": false, "lstrip": true, "rstrip": true, "normalized": false, "special": true},
 {"id": 6, "content": "world", "single_word": true, "lstrip": false, "rstrip": false, "normalized": true, "special": false}],
 "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split",
 "pattern": {"Regex": "(?i:'s)|[^\\r\\n\\p{L}]?\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)|\\s+"}, "behavior": "Isolated", "invert": false},
 {"type": "Digits", "individual_digits": true},
 {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
 "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<e>", "type_id": 0}}]},
 "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
 "byte_fallback": false, "ignore_merges": true, "vocab": {"a": 0, "l": 1, "ll": 2, "\u0120": 3, "\u0120a": 4},
 "merges": ["l l", ["\u0120", "a"]]}})";

constexpr std::string_view kByteFallback = R"({"normalizer": {"type": "Sequence", "normalizers": [
 {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
 "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
 {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
 "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": {"<unk>": 0,
 "<0x0A>": 1, "\u2581": 2, "a": 3, "\u2581a": 4, "o": 5}, "merges": ["\u2581 a"]}})";

constexpr std::string_view kMetaspace = R"({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",
 "prepend_scheme": "first", "split": true}, "decoder": {"type": "Metaspace", "replacement": "\u2581",
 "prepend_scheme": "always", "split": true}, "model": {"type": "BPE", "vocab": {"a": 0, "\u2581": 1, "\u2581a": 2},
 "merges": [["\u2581", "a"]]}})";

constexpr std::string_view kCompletionRequest =
    R"({"model": "m", "prompt": ["text", [1, 2, 3]], "n": 2, "max_tokens": 5,
 "temperature": 0.5, "top_p": 0.9, "seed": -3, "stop": ["x", "\u00e9"], "stream": true, "stream_options":
 {"include_usage": true}, "logprobs": 4, "logit_bias": {"7": -100}, "presence_penalty": 1, "state": "name"})";

constexpr std::string_view kChatRequest =
    R"({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content":
 [{"type": "text", "text": "b"}]}], "logprobs": true, "top_logprobs": 2, "max_completion_tokens": 9, "top_k": 5})";

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

bool pickle(std::string_view bytes) {
  const MemoryFile file(bytes);
  return accepted([&] {
    size_t sum = 0;
    for (const StoredTensor& tensor : read_pickled_tensors(file.path()))
      for (const std::byte byte : tensor.bytes) sum += static_cast<size_t>(byte);
    if (sum == static_cast<size_t>(-1)) std::abort();  // every byte is read
  });
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
  return accepted([&] { use(*make_sentencepiece(std::string(bytes), "tokenizer.model")); });
}

bool tokenizer_json(std::string_view bytes) {
  return accepted([&] { use(*make_tokenizer_json(std::string(bytes), "", "tokenizer.json")); });
}

bool request(std::string_view bytes) {
  const auto parsed = [&](auto parse) {
    try {
      parse(bytes);
      return true;
    } catch (const serve::ApiError& error) {
      if (error.status != 400) std::abort();
      return false;
    }
  };
  const bool completion = parsed(serve::parse_completion), chat = parsed(serve::parse_chat);
  return parsed(serve::parse_state_request) || completion || chat;
}

namespace {

// The documents of a file for two sizes of blocks; they are the same.
bool read_corpus(std::string_view bytes, TextFormat format) {
  const MemoryFile file(bytes);
  return accepted([&] {
    std::vector<std::string> all;
    for (const size_t block : {64, 1 << 20}) {
      ReaderOptions options;
      options.block_bytes = block;
      BlockReader reader({{file.path().string(), format, static_cast<int64_t>(bytes.size()), 1}}, options);
      std::string text;
      for (Block one; reader.next(one);)
        for_each_document_part(one, options, [&](const DocumentPart& part) {
          text += part.text;
          if (part.last) text += '\n';
        });
      all.push_back(text);
    }
    if (all[0] != all[1]) std::abort();
    require(!all[0].empty(), "no documents");
  });
}

}  // namespace

bool csv(std::string_view bytes) {
  read_corpus(bytes, TextFormat::tsv);
  return read_corpus(bytes, TextFormat::csv);
}

bool json_records(std::string_view bytes) {
  return read_corpus(bytes, TextFormat::json);
}

bool html(std::string_view bytes) {
  const std::string text = html_to_text(bytes);
  std::string pieces;
  HtmlText reader;
  for (size_t at = 0; at < bytes.size(); at += 7) reader.feed(bytes.substr(at, 7), pieces);
  reader.finish(pieces);
  if (pieces != text) std::abort();
  return !text.empty();
}

std::vector<std::pair<std::string, std::string>> good_files() {
  return {{"safetensors", good_safetensors()},
          {"pickle", good_pickle()},
          {"config", config_to_json(small_config())},
          {"config", std::string(kLlama)},
          {"config", std::string(kRelease)},
          {"config", std::string(kMamba)},
          {"config", std::string(kBrumby)},
          {"state", good_state()},
          {"manifest", good_manifest()},
          {"progress", good_progress()},
          {"tokenizer", sentencepiece_file({.type = kUnigram})},
          {"tokenizer", sentencepiece_file({.type = kBytePair})},
          {"tokenizer", sentencepiece_file({.type = kUnigram, .rules = sample_rules()})},
          {"tokenizer_json", std::string(kByteLevel)},
          {"tokenizer_json", std::string(kByteFallback)},
          {"tokenizer_json", std::string(kMetaspace)},
          {"request", std::string(kCompletionRequest)},
          {"request", std::string(kChatRequest)},
          {"request", R"({"name": "a", "messages": [{"role": "user", "content": "x"}], "state": "b"})"},
          {"csv", "id,kind,text\n1,\"a,\"\"b\"\"\",\"the\nend\"\n"},
          {"json_records", R"([{"id": [1, {"text": 2}], "text": "a\u00e9\n"}, "only a string", {"text": "\ud83d"}])"},
          {"html", "<!-- comment --><script>x < y</script><p class='a > b'>&#65;"}};
}

}  // namespace furious::fuzz
