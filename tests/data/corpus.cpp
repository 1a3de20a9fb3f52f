#include "data/corpus.h"

#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "data/tokenizer.h"

namespace furious::testing {
namespace {

namespace fs = std::filesystem;

class VectorLines final : public LineSource {
 public:
  explicit VectorLines(std::vector<std::string> lines) : lines_(std::move(lines)) {}
  bool next(std::string& line) override {
    if (at_ == lines_.size()) return false;
    line = lines_[at_++];
    return true;
  }

 private:
  std::vector<std::string> lines_;
  size_t at_ = 0;
};

}  // namespace

TemporaryFolder::TemporaryFolder() {
  // In memory if possible: shards are synced often, which is slow on a disk.
  const fs::path parent = ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
  std::string name = (parent / "furious-test-XXXXXX").string();
  require(::mkdtemp(name.data()) != nullptr, "test: no temporary folder");
  root_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  fs::remove_all(root_);
}

std::string TemporaryFolder::write(std::string_view name, std::string_view content) const {
  const std::string file = path(name);
  fs::create_directories(fs::path(file).parent_path());
  std::ofstream(file, std::ios::binary) << content;
  return file;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "test: cannot read {}", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, std::string> read_folder(const std::string& path) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path))
    if (!entry.is_directory()) files[fs::relative(entry.path(), path).string()] = read_file(entry.path().string());
  return files;
}

std::string zstd_of(std::string_view text) {
  std::string result(ZSTD_compressBound(text.size()), '\0');
  result.resize(ZSTD_compress(result.data(), result.size(), text.data(), text.size(), 1));
  return result;
}

std::string gzip_of(std::string_view text) {
  z_stream state = {};
  require(deflateInit2(&state, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "test: zlib");
  std::string result(deflateBound(&state, text.size()) + 64, '\0');
  state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  state.avail_in = static_cast<uInt>(text.size());
  state.next_out = reinterpret_cast<Bytef*>(result.data());
  state.avail_out = static_cast<uInt>(result.size());
  require(deflate(&state, Z_FINISH) == Z_STREAM_END, "test: zlib");
  result.resize(state.total_out);
  deflateEnd(&state);
  return result;
}

std::string random_sentence(Random& random, int64_t words) {
  static const std::vector<std::string> kWords = {
      "the",  "snake", "sleeps", "under", "a",     "warm",    "stone", "while", "rivers",  "carry", "old",   "leaves",
      "down", "to",    "sea",    "and",   "seven", "birds",   "fly",   "over",  "wörld",   "naïve", "café",  "日本語",
      "42",   "1999",  "e.g.",   "don't", "—",     "\"yes\"", "🐍",     "x=y;",  "foo_bar", "UPPER", "MiXed", "..."};
  std::string text;
  for (int64_t i = 0; i < words; ++i) {
    if (i > 0) text += random.integer(0, 15) == 0 ? "\n" : random.integer(0, 15) == 0 ? "  " : " ";
    text += random.pick(kWords);
  }
  return text;
}

std::vector<std::string> random_documents(Random& random, int64_t count) {
  std::vector<std::string> documents;
  for (int64_t i = 0; i < count; ++i)
    documents.push_back(fmt::format("{} {}", i, random_sentence(random, random.integer(1, 60))));
  return documents;
}

std::string json_line(std::string_view text) {
  return nlohmann::json{{"text", text}}.dump() + "\n";
}

std::string json_lines(const std::vector<std::string>& documents) {
  std::string lines;
  for (const std::string& document : documents) lines += json_line(document);
  return lines;
}

ReadResult read_all(const std::vector<std::string>& inputs, const ReaderOptions& options, CorpusPosition start) {
  ReadResult result;
  BlockReader reader(find_inputs(inputs), options, start);
  Block block;
  while (reader.next(block))
    result.replaced += for_each_document_part(block, options, [&](const DocumentPart& part) {
                         if (part.first) {
                           result.documents.emplace_back();
                           result.pieces.push_back(0);
                         }
                         result.documents.back() += part.text;
                         ++result.pieces.back();
                       }).replaced;
  return result;
}

const std::string& small_model() {
  static const std::string model = [] {
    Random random(400);
    std::vector<std::string> lines;
    for (int i = 0; i < 300; ++i) lines.push_back(random_sentence(random, 12));
    VectorLines source(lines);
    return train_sentencepiece(source, {400, 10000, 1});
  }();
  return model;
}

}  // namespace furious::testing
