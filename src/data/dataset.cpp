#include "data/dataset.h"

#include <algorithm>
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
  ShardFile(std::string path, const std::array<char, 8>& magic, int item_bytes, int64_t items, const ShardInfo& info,
            uint32_t crc)
      : path_(std::move(path)), crc_(crc), file_(std::make_unique<MappedFile>(path_)) {
    const size_t size = file_->size();
    require(items >= 0 && static_cast<uint64_t>(items) <= (uint64_t{1} << 60) / static_cast<uint64_t>(item_bytes),
            "shard \"{}\" is damaged: the manifest gives it {} items", path_, items);
    const size_t expected = sizeof(ShardHeader) + static_cast<size_t>(items) * static_cast<size_t>(item_bytes);
    require(size >= expected, "shard \"{}\" is truncated: {} bytes, expected {}", path_, size, expected);
    require(size == expected, "shard \"{}\" is damaged: {} bytes, expected {}", path_, size, expected);
    ShardHeader header = {};
    std::memcpy(&header, file_->bytes().data(), sizeof(header));
    require(header.magic == magic && header.version == 1, "shard \"{}\" is damaged: its header is not one of ours",
            path_);
    require(header.item_bytes == static_cast<uint32_t>(item_bytes) &&
                header.tokens == static_cast<uint64_t>(info.tokens) &&
                header.documents == static_cast<uint64_t>(info.documents),
            "shard \"{}\" is damaged, or of another corpus: its header differs from the manifest", path_);
  }

  const std::byte* items() const { return file_->bytes().data() + sizeof(ShardHeader); }
  const std::string& path() const { return path_; }
  void verify() const {
    const uint32_t found = crc32_of(file_->bytes().subspan(sizeof(ShardHeader)));
    require(found == crc_, "shard \"{}\" is damaged: CRC-32 {:08x}, expected {:08x}", path_, found, crc_);
  }

 private:
  std::string path_;
  uint32_t crc_;
  std::unique_ptr<const MappedFile> file_;
};

struct Shard {
  ShardInfo info;
  int64_t first_token = 0;  // in the split
  int64_t first_document = 0;
  ShardFile tokens;
  ShardFile ends;

  // The index after the last token of document `index`, within the shard; −1 stands for the start.
  int64_t end_of(int64_t index) const {
    if (index < 0) return 0;
    uint64_t end = 0;
    std::memcpy(&end, ends.items() + index * static_cast<int64_t>(sizeof(end)), sizeof(end));
    require(end <= static_cast<uint64_t>(info.tokens), "shard \"{}\" is damaged: document {} ends at token {} of {}",
            ends.path(), index, end, info.tokens);
    return static_cast<int64_t>(end);
  }
};

template <class Id>
void copy_ids(const Shard& shard, int64_t begin, int64_t count, int32_t vocabulary, int32_t* out) {
  const std::byte* start = shard.tokens.items() + begin * static_cast<int64_t>(sizeof(Id));
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    Id id = 0;
    std::memcpy(&id, start + i * static_cast<int64_t>(sizeof(Id)), sizeof(Id));
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
  require(begin >= 0 && count >= 0 && begin + count <= size(), "{}: tokens {}..{} asked for, it has {}", name(), begin,
          begin + count, size());
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
  require(index >= 0 && index < documents(), "{}: document {} asked for, it has {}", name(), index, documents());
  const Shard& shard = mapping_->shard_of_document(index);
  const int64_t within = index - shard.first_document;
  const DocumentRange range = {shard.first_token + shard.end_of(within - 1), shard.first_token + shard.end_of(within)};
  require(range.length() > 0, "shard \"{}\" is damaged: document {} has {} tokens", shard.ends.path(), within,
          range.length());
  return range;
}

int64_t TokenView::document_at(int64_t token) const {
  require(token >= 0 && token < size(), "{}: token {} asked for, it has {}", name(), token, size());
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
  tokenizer_ = load_tokenizer(info.kind == "byte" ? "byte" : folder + "/tokenizer.model");
  require(tokenizer_->fingerprint() == info.fingerprint && tokenizer_->vocabulary_size() == info.vocabulary_size,
          "data \"{}\": tokenizer.model is not the one it was made with ({}, expected {})", folder,
          tokenizer_->fingerprint(), info.fingerprint);
  require(manifest_.token_bytes == token_bytes_for(info.vocabulary_size),
          "\"{}/manifest.json\" is damaged: token_bytes {}", folder, manifest_.token_bytes);
  for (const Split split : kSplits) {
    auto mapping = std::make_shared<TokenView::Mapping>();
    mapping->name = fmt::format("data \"{}\" ({} part)", folder, furious::name_of(split));
    mapping->token_bytes = manifest_.token_bytes;
    mapping->vocabulary = info.vocabulary_size;
    for (const ShardInfo& shard : manifest_[split].shards) {
      require(shard.tokens > 0 && shard.documents > 0 && shard.documents <= shard.tokens,
              "\"{}/manifest.json\" is damaged: a shard of {} tokens in {} documents", folder, shard.tokens,
              shard.documents);
      const auto index = static_cast<int64_t>(mapping->shards.size());
      mapping->shards.push_back({shard, mapping->total.tokens, mapping->total.documents,
                                 ShardFile(folder + "/" + tokens_file(split, index), kTokensMagic,
                                           manifest_.token_bytes, shard.tokens, shard, shard.tokens_crc),
                                 ShardFile(folder + "/" + documents_file(split, index), kDocumentsMagic,
                                           sizeof(uint64_t), shard.documents, shard, shard.documents_crc)});
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

void Dataset::verify() const {
  for (const TokenView& view : views_)
    for (const Shard& shard : view.mapping_->shards) {
      shard.tokens.verify();
      shard.ends.verify();
    }
}

}  // namespace furious
