#include "data/dataset.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/file.h"
#include "data/files.h"

namespace furious {
namespace {

// One mapped file of a shard: the header, then items.
class ShardFile {
 public:
  ShardFile(std::string path, const std::array<char, 8>& magic, int item_bytes, int64_t items, const ShardInfo& info)
      : path_(std::move(path)), file_(std::make_unique<MappedFile>(path_)) {
    const size_t size = file_->size();
    require(items >= 0 && static_cast<uint64_t>(items) <= (uint64_t{1} << 60) / static_cast<uint64_t>(item_bytes),
            "shard \"{}\" is damaged: the manifest gives it {} items", path_, items);
    const size_t expected = sizeof(ShardHeader) + static_cast<size_t>(items) * static_cast<size_t>(item_bytes);
    require(size >= expected, "shard \"{}\" is truncated: {} bytes, expected {}", path_, size, expected);
    require(size == expected, "shard \"{}\" is damaged: {} bytes, expected {}", path_, size, expected);
    ShardHeader header = {};
    std::memcpy(&header, file_->bytes().data(), sizeof(header));
    require(header.magic == magic && header.version == 1 && header.zero == ShardHeader().zero,
            "shard \"{}\" is damaged: its header is not that of a shard", path_);
    require(header.item_bytes == static_cast<uint32_t>(item_bytes) &&
                header.tokens == static_cast<uint64_t>(info.tokens) &&
                header.documents == static_cast<uint64_t>(info.documents),
            "shard \"{}\" is damaged, or of another corpus: its header differs from the manifest", path_);
  }

  const std::byte* items() const { return file_->bytes().data() + sizeof(ShardHeader); }
  std::span<const std::byte> item_bytes() const { return file_->bytes().subspan(sizeof(ShardHeader)); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::unique_ptr<const MappedFile> file_;
};

// A file of a shard whose blocks are checked when they are first read.
class CheckedFile {
 public:
  CheckedFile(ShardFile file, size_t block_bytes, std::vector<uint32_t> crcs)
      : file_(std::move(file)),
        block_bytes_(block_bytes),
        crcs_(std::move(crcs)),
        good_(std::make_unique<std::atomic<bool>[]>(crcs_.size())) {}

  const std::string& path() const { return file_.path(); }
  // `count` bytes of items.
  const std::byte* read(int64_t begin, int64_t count) const {
    const size_t end = static_cast<size_t>(begin + count);
    for (size_t block = static_cast<size_t>(begin) / block_bytes_; block * block_bytes_ < end; ++block)
      if (!good_[block].load(std::memory_order_relaxed)) check(block);  // by two threads at once: the same result
    return file_.items() + begin;
  }
  std::vector<std::string> damage() const {
    std::vector<std::string> lines;
    for (size_t block = 0; block < crcs_.size(); ++block) {
      const size_t first = block;
      while (block < crcs_.size() && crc32_of(bytes_of(block)) != crcs_[block]) ++block;
      if (block > first) lines.push_back(damage_of(first, block));
    }
    return lines;
  }

 private:
  std::span<const std::byte> bytes_of(size_t block) const {
    const std::span<const std::byte> all = file_.item_bytes();
    return all.subspan(block * block_bytes_, std::min(block_bytes_, all.size() - block * block_bytes_));
  }
  std::string damage_of(size_t first, size_t end) const {
    return fmt::format(
        "shard \"{}\" is damaged: bytes {} to {} differ from their CRC-32", path(),
        sizeof(ShardHeader) + first * block_bytes_,
        std::min(sizeof(ShardHeader) + end * block_bytes_, sizeof(ShardHeader) + file_.item_bytes().size()));
  }
  void check(size_t block) const {
    require(crc32_of(bytes_of(block)) == crcs_[block], "{}; copy it again, or tokenize the text again",
            damage_of(block, block + 1));
    good_[block].store(true, std::memory_order_relaxed);
  }

  ShardFile file_;
  size_t block_bytes_;
  std::vector<uint32_t> crcs_;                 // of the blocks
  std::unique_ptr<std::atomic<bool>[]> good_;  // blocks
};

struct Shard {
  ShardInfo info;
  int64_t first_token = 0;  // in the split
  int64_t first_document = 0;
  CheckedFile tokens;
  CheckedFile ends;

  // The index after the last token of document `index`, within the shard; −1 stands for the start.
  int64_t end_of(int64_t index) const {
    if (index < 0) return 0;
    uint64_t end = 0;
    std::memcpy(&end, ends.read(index * static_cast<int64_t>(sizeof(end)), sizeof(end)), sizeof(end));
    require(end <= static_cast<uint64_t>(info.tokens), "shard \"{}\" is damaged: document {} ends at token {} of {}",
            ends.path(), index, end, info.tokens);
    return static_cast<int64_t>(end);
  }
};

// The two files of a shard, with their checksums.
std::pair<CheckedFile, CheckedFile> open_shard(const std::string& folder, Split split, int64_t index, int token_bytes,
                                               const ShardInfo& info) {
  ShardFile tokens(folder + "/" + tokens_file(split, index), kTokensMagic, token_bytes, info.tokens, info);
  ShardFile ends(folder + "/" + documents_file(split, index), kDocumentsMagic, sizeof(uint64_t), info.documents, info);
  const size_t token_size = tokens.item_bytes().size(), ends_size = ends.item_bytes().size();
  if (info.checks_crc < 0)
    return {CheckedFile(std::move(tokens), token_size, {info.tokens_crc}),
            CheckedFile(std::move(ends), ends_size, {info.documents_crc})};
  const auto blocks_in = [](size_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; };
  const size_t in_tokens = blocks_in(token_size), in_ends = blocks_in(ends_size);
  const ShardFile checks(folder + "/" + checks_file(split, index), kChecksMagic, sizeof(uint32_t),
                         static_cast<int64_t>(in_tokens + in_ends), info);
  require(crc32_of(checks.item_bytes()) == info.checks_crc, "shard \"{}\" is damaged: it differs from its CRC-32",
          checks.path());
  std::vector<uint32_t> crcs(in_tokens + in_ends);
  std::memcpy(crcs.data(), checks.items(), crcs.size() * sizeof(uint32_t));
  const auto second = crcs.begin() + static_cast<std::ptrdiff_t>(in_tokens);
  return {CheckedFile(std::move(tokens), kBlockBytes, {crcs.begin(), second}),
          CheckedFile(std::move(ends), kBlockBytes, {second, crcs.end()})};
}

template <class Id>
void copy_ids(const Shard& shard, int64_t begin, int64_t count, int32_t vocabulary, int32_t* out) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(Id));
  const std::byte* start = shard.tokens.read(begin * kSize, count * kSize);
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    Id id = 0;
    std::memcpy(&id, start + i * kSize, sizeof(Id));
    out[i] = static_cast<int32_t>(id);
    largest = std::max<uint32_t>(largest, id);
  }
  require(largest < static_cast<uint32_t>(vocabulary),
          "shard \"{}\" is damaged: id {} among tokens {}..{}, the vocabulary has {}", shard.tokens.path(), largest,
          begin, begin + count - 1, vocabulary);
}

}  // namespace

struct TokenView::Mapping {
  std::string name;
  int token_bytes = 2;
  int32_t vocabulary = 0;
  ShardInfo total;
  std::vector<Shard> shards;

  const Shard& shard_of_token(int64_t token) const {
    const auto after = std::upper_bound(shards.begin(), shards.end(), token,
                                        [](int64_t value, const Shard& shard) { return value < shard.first_token; });
    return *(after - 1);
  }
  const Shard& shard_of_document(int64_t document) const {
    const auto after = std::upper_bound(shards.begin(), shards.end(), document,
                                        [](int64_t value, const Shard& shard) { return value < shard.first_document; });
    return *(after - 1);
  }
};

int64_t TokenView::size() const {
  return mapping_->total.tokens;
}

int64_t TokenView::documents() const {
  return mapping_->total.documents;
}

int64_t TokenView::text_bytes() const {
  return mapping_->total.bytes;
}

const std::string& TokenView::name() const {
  return mapping_->name;
}

void TokenView::copy(int64_t begin, int64_t count, int32_t* out) const {
  require(begin >= 0 && count >= 0 && begin + count <= size(), "{}: tokens {}..{} are out of range; it has {}", name(),
          begin, begin + count, size());
  while (count > 0) {
    const Shard& shard = mapping_->shard_of_token(begin);
    const int64_t within = begin - shard.first_token;
    const int64_t here = std::min(count, shard.info.tokens - within);
    if (mapping_->token_bytes == 2)
      copy_ids<uint16_t>(shard, within, here, mapping_->vocabulary, out);
    else
      copy_ids<uint32_t>(shard, within, here, mapping_->vocabulary, out);
    begin += here;
    count -= here;
    out += here;
  }
}

DocumentRange TokenView::document(int64_t index) const {
  require(index >= 0 && index < documents(), "{}: document {} is out of range; it has {}", name(), index, documents());
  const Shard& shard = mapping_->shard_of_document(index);
  const int64_t within = index - shard.first_document;
  const DocumentRange range = {shard.first_token + shard.end_of(within - 1), shard.first_token + shard.end_of(within)};
  require(range.length() > 0, "shard \"{}\" is damaged: document {} has {} tokens", shard.ends.path(), within,
          range.length());
  return range;
}

int64_t TokenView::document_at(int64_t token) const {
  require(token >= 0 && token < size(), "{}: token {} is out of range; it has {}", name(), token, size());
  const Shard& shard = mapping_->shard_of_token(token);
  const int64_t within = token - shard.first_token;
  int64_t low = 0;  // the first document that ends after the token
  int64_t high = shard.info.documents - 1;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (shard.end_of(middle) > within)
      high = middle;
    else
      low = middle + 1;
  }
  return shard.first_document + low;
}

Dataset::Dataset(const std::string& folder) : folder_(folder), manifest_(read_manifest(folder)) {
  const TokenizerInfo& info = manifest_.tokenizer;
  tokenizer_ = load_tokenizer(info.kind == "byte" ? "byte" : folder);
  require(tokenizer_->fingerprint() == info.fingerprint && tokenizer_->vocabulary_size() == info.vocabulary_size,
          "data \"{}\": its tokenizer is not the one it was tokenized with ({}, expected {})", folder,
          tokenizer_->fingerprint(), info.fingerprint);
  require(manifest_.token_bytes == token_bytes_for(info.vocabulary_size),
          "\"{}/manifest.json\" is damaged: token_bytes {}", folder, manifest_.token_bytes);
  for (const Split split : kSplits) {
    auto mapping = std::make_shared<TokenView::Mapping>();
    mapping->name = fmt::format("data \"{}\" ({} split)", folder, furious::name_of(split));
    mapping->token_bytes = manifest_.token_bytes;
    mapping->vocabulary = info.vocabulary_size;
    for (const ShardInfo& shard : manifest_[split].shards) {
      require(shard.tokens > 0 && shard.documents > 0 && shard.documents <= shard.tokens,
              "\"{}/manifest.json\" is damaged: a shard of {} tokens in {} documents", folder, shard.tokens,
              shard.documents);
      const auto index = static_cast<int64_t>(mapping->shards.size());
      auto [tokens, ends] = open_shard(folder, split, index, manifest_.token_bytes, shard);
      mapping->shards.push_back(
          {shard, mapping->total.tokens, mapping->total.documents, std::move(tokens), std::move(ends)});
      mapping->total.tokens += shard.tokens;
      mapping->total.documents += shard.documents;
      mapping->total.bytes += shard.bytes;
      const int64_t end = mapping->shards.back().end_of(shard.documents - 1);
      require(end == shard.tokens, "shard \"{}\" is damaged: its last document ends at token {} of {}",
              mapping->shards.back().ends.path(), end, shard.tokens);
    }
    TokenView view;
    view.mapping_ = std::move(mapping);
    views_.push_back(std::move(view));
  }
}

void Dataset::check_tokenizer_of(const std::filesystem::path& model) const {
  namespace fs = std::filesystem;
  const fs::path folder = fs::is_directory(model) ? model : model.parent_path();
  if (!has_tokenizer(folder)) return;
  const std::string own = load_tokenizer(folder.string())->fingerprint();
  require(own == tokenizer_->fingerprint(),
          "{}: the data was tokenized with {}, the model {} was trained with {}; tokenize the text with the model's "
          "tokenizer",
          folder_, tokenizer_->fingerprint(), model.string(), own);
}

std::vector<std::string> Dataset::damage() const {
  std::vector<std::string> lines;
  for (const TokenView& view : views_)
    for (const Shard& shard : view.mapping_->shards)
      for (const CheckedFile* file : {&shard.tokens, &shard.ends})
        for (const std::string& line : file->damage()) lines.push_back(line);
  return lines;
}

}  // namespace furious
