#include "data/token_shards.h"

#include <filesystem>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "data/token_shards_json.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kChecksumKey = "checksum";
// Tokens are converted through a buffer of this many.
constexpr size_t kConverted = 4096;

template <class Id>
void append_as(AppendFile& file, std::span<const int32_t> tokens) {
  std::array<Id, kConverted> ids;
  while (!tokens.empty()) {
    const size_t count = std::min(tokens.size(), kConverted);
    for (size_t i = 0; i < count; ++i) ids[i] = static_cast<Id>(tokens[i]);
    file.append(ids.data(), count * sizeof(Id));
    tokens = tokens.subspan(count);
  }
}

std::string file_name(Split split, int64_t shard, std::string_view ending) {
  return fmt::format("{}-{:05}.{}", name_of(split), shard, ending);
}

SplitInfo split_from_json(const JsonValue& json) {
  SplitInfo info;
  for (const JsonValue& shard : json.at("shards").items()) info.shards.push_back(shard_from_json(shard));
  return info;
}

}  // namespace

std::string name_of(Split split) {
  return split == Split::train ? "train" : "test";
}

std::string tokens_file(Split split, int64_t shard) {
  return file_name(split, shard, "tokens");
}

std::string documents_file(Split split, int64_t shard) {
  return file_name(split, shard, "documents");
}

std::string checks_file(Split split, int64_t shard) {
  return file_name(split, shard, "checks");
}

int token_bytes_for(int32_t vocabulary_size) {
  return vocabulary_size <= 65536 ? 2 : 4;
}

ShardInfo SplitInfo::total() const {
  ShardInfo sum;
  for (const ShardInfo& shard : shards) {
    sum.tokens += shard.tokens;
    sum.documents += shard.documents;
    sum.bytes += shard.bytes;
  }
  return sum;
}

SplitWriter::SplitWriter(std::string folder, Split split, int token_bytes, int64_t shard_tokens, SplitInfo start)
    : folder_(std::move(folder)),
      split_(split),
      token_bytes_(token_bytes),
      shard_tokens_(shard_tokens),
      info_(std::move(start)) {
  if (!info_.has_current) return;
  const auto index = static_cast<int64_t>(info_.shards.size());
  const ShardInfo& shard = info_.current;
  constexpr auto kHeader = static_cast<int64_t>(sizeof(ShardHeader));
  tokens_ = AppendFile(folder_ + "/" + tokens_file(split_, index), sizeof(ShardHeader),
                       kHeader + shard.tokens * token_bytes_, shard.tokens_crc);
  documents_ = AppendFile(folder_ + "/" + documents_file(split_, index), sizeof(ShardHeader),
                          kHeader + shard.documents * static_cast<int64_t>(sizeof(uint64_t)), shard.documents_crc);
}

void SplitWriter::open_shard() {
  const auto index = static_cast<int64_t>(info_.shards.size());
  const ShardHeader empty = {};
  tokens_ = AppendFile(folder_ + "/" + tokens_file(split_, index), sizeof(ShardHeader));
  tokens_.append(&empty, sizeof(empty));
  documents_ = AppendFile(folder_ + "/" + documents_file(split_, index), sizeof(ShardHeader));
  documents_.append(&empty, sizeof(empty));
  info_.current = {};
  info_.has_current = true;
}

void SplitWriter::append(std::span<const int32_t> tokens, int64_t text_bytes) {
  if (!info_.has_current) open_shard();
  if (token_bytes_ == 2)
    append_as<uint16_t>(tokens_, tokens);
  else
    append_as<uint32_t>(tokens_, tokens);
  info_.current.tokens += static_cast<int64_t>(tokens.size());
  info_.current.bytes += text_bytes;
  info_.document_tokens += static_cast<int64_t>(tokens.size());
}

void SplitWriter::end_document() {
  if (std::exchange(info_.document_tokens, 0) == 0) return;
  const auto end = static_cast<uint64_t>(info_.current.tokens);
  documents_.append(&end, sizeof(end));
  ++info_.current.documents;
  if (info_.current.tokens >= shard_tokens_) close_shard();
}

void SplitWriter::update_crcs() {
  info_.current.tokens_crc = tokens_.crc();
  info_.current.documents_crc = documents_.crc();
}

void SplitWriter::checkpoint() {
  if (!info_.has_current) return;
  tokens_.sync();
  documents_.sync();
  update_crcs();
}

void SplitWriter::close_shard() {
  update_crcs();
  const ShardInfo& shard = info_.current;
  ShardHeader header = {kTokensMagic, 1, static_cast<uint32_t>(token_bytes_), static_cast<uint64_t>(shard.tokens),
                        static_cast<uint64_t>(shard.documents)};
  tokens_.overwrite_start(&header, sizeof(header));
  tokens_.close();
  header.magic = kDocumentsMagic;
  header.item_bytes = sizeof(uint64_t);
  documents_.overwrite_start(&header, sizeof(header));
  documents_.close();
  write_checks();
  info_.shards.push_back(shard);
  info_.has_current = false;
}

// Reads the shard once more, for the checksums of its blocks; and since most of it may have been written by a process
// that was killed, verifies what was written.
void SplitWriter::write_checks() {
  const auto index = static_cast<int64_t>(info_.shards.size());
  ShardInfo& shard = info_.current;
  AppendFile checks(folder_ + "/" + checks_file(split_, index), sizeof(ShardHeader));
  const ShardHeader header = {kChecksMagic, 1, sizeof(uint32_t), static_cast<uint64_t>(shard.tokens),
                              static_cast<uint64_t>(shard.documents)};
  checks.append(&header, sizeof(header));
  for (const auto& [name, crc] : {std::pair{tokens_file(split_, index), shard.tokens_crc},
                                  {documents_file(split_, index), shard.documents_crc}}) {
    const MappedFile file(folder_ + "/" + name);
    const BlockCrcs found = crc32_of_blocks(file.bytes().subspan(sizeof(ShardHeader)), kBlockBytes);
    require(found.all == crc,
            "shard \"{}\" is damaged: it differs from what was written; delete the folder and start again",
            file.path().string());
    checks.append(found.blocks.data(), found.blocks.size() * sizeof(uint32_t));
  }
  shard.checks_crc = checks.crc();
  checks.close();
}

void SplitWriter::finish() {
  if (info_.has_current) close_shard();
}

Json to_json(const TokenizerInfo& tokenizer) {
  return {{"kind", tokenizer.kind},
          {"fingerprint", tokenizer.fingerprint},
          {"vocabulary_size", tokenizer.vocabulary_size},
          {"bos", tokenizer.bos},
          {"eos", tokenizer.eos}};
}

Json to_json(const ShardInfo& shard) {
  Json json = {{"tokens", shard.tokens},
               {"documents", shard.documents},
               {"bytes", shard.bytes},
               {"tokens_crc32", shard.tokens_crc},
               {"documents_crc32", shard.documents_crc}};
  if (shard.checks_crc >= 0) json["checks_crc32"] = shard.checks_crc;
  return json;
}

ShardInfo shard_from_json(const JsonValue& json) {
  constexpr int64_t kMost = int64_t{1} << 50;  // the bytes of a file, and sums over shards, fit 64 bits
  const auto crc = [&](const char* key) { return static_cast<uint32_t>(json.at(key).integer(0, 0xFFFFFFFF)); };
  ShardInfo shard;
  shard.tokens = json.at("tokens").integer(0, kMost);
  shard.documents = json.at("documents").integer(0, shard.tokens);  // an empty one is dropped
  shard.bytes = json.at("bytes").integer(0, kMost);
  shard.tokens_crc = crc("tokens_crc32");
  shard.documents_crc = crc("documents_crc32");
  if (json.has("checks_crc32")) shard.checks_crc = json.at("checks_crc32").integer(0, 0xFFFFFFFF);
  return shard;
}

Json to_json(const SplitInfo& info, Split split) {
  const ShardInfo total = info.total();
  Json json = {{"tokens", total.tokens}, {"documents", total.documents}, {"bytes", total.bytes}};
  json["shards"] = Json::array();
  for (const ShardInfo& shard : info.shards) {
    const auto index = static_cast<int64_t>(json["shards"].size());
    Json row = {{"tokens_file", tokens_file(split, index)}, {"documents_file", documents_file(split, index)}};
    row.update(to_json(shard));
    json["shards"].push_back(row);
  }
  return json;
}

std::string checksum_of(nlohmann::json json) {
  json.erase(kChecksumKey);
  return hash_text(hash_of(json.dump()));
}

Json with_checksum(Json json) {
  json[kChecksumKey] = checksum_of(json);
  return json;
}

void check_checksum(const JsonValue& json, const std::string& origin) {
  if (json.has(kChecksumKey))
    require(json.at(kChecksumKey).text() == checksum_of(json.json()),
            "{}: is damaged: it differs from its checksum; copy it again", origin);
}

Manifest read_manifest(const std::string& folder) {
  namespace fs = std::filesystem;
  require(fs::exists(folder), "data \"{}\" does not exist; give a folder written by `furious tokenize`", folder);
  const std::string path = folder + "/manifest.json";
  if (!fs::exists(path)) {
    require(!fs::exists(folder + "/plan.json"), "data \"{}\" is unfinished; run the same `furious tokenize` again",
            folder);
    fail("\"{}\" is not a tokenized corpus: it has no manifest.json; create one with `furious tokenize`", folder);
  }
  return manifest_from_json(read_text(path), path);
}

Manifest manifest_from_json(std::string_view text, const std::string& origin) {
  constexpr int64_t kMostIds = std::numeric_limits<int32_t>::max();
  const nlohmann::json parsed = parse_json(text, origin);
  const JsonValue json(parsed, origin);
  check_checksum(json, origin);
  require(json.at("format").text() == "furious-tokens" && json.at("version").integer(0, kMostIds) == 1,
          "{}: unsupported format or version, expected furious-tokens 1", origin);
  const JsonValue tokenizer = json.at("tokenizer");
  Manifest manifest;
  manifest.tokenizer.kind = tokenizer.at("kind").text();
  manifest.tokenizer.fingerprint = tokenizer.at("fingerprint").text();
  const int64_t ids = tokenizer.at("vocabulary_size").integer(1, kMostIds);
  manifest.tokenizer.vocabulary_size = static_cast<int32_t>(ids);
  manifest.tokenizer.bos = static_cast<int32_t>(tokenizer.at("bos").integer(-1, ids - 1));
  manifest.tokenizer.eos = static_cast<int32_t>(tokenizer.at("eos").integer(-1, ids - 1));
  const int expected = token_bytes_for(manifest.tokenizer.vocabulary_size);
  manifest.token_bytes = static_cast<int>(json.at("token_bytes").integer(expected, expected));
  manifest.replaced = json.at("replaced_utf8").integer(0, std::numeric_limits<int64_t>::max());
  for (const Split split : kSplits)
    manifest.splits[static_cast<size_t>(split)] = split_from_json(json.at(name_of(split).c_str()));
  return manifest;
}

}  // namespace furious
