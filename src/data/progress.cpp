#include "data/progress.h"

#include <filesystem>
#include <limits>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "data/token_shards_json.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

CorpusPosition position_from(const JsonValue& json, const std::vector<InputFile>& files) {
  CorpusPosition position;
  const auto count = static_cast<int64_t>(files.size());
  position.file = json.at("file").integer(0, count);
  const bool at_end = position.file == count;
  const bool plain = !at_end && files[position.file].is_plain();
  position.offset = json.at("offset").integer(0, at_end ? 0 : plain ? files[position.file].size : kMost);
  position.line = json.at("line").integer(0, position.offset);
  position.inside = json.at("inside").flag();
  if (at_end && position.inside) json.at("inside").unexpected("false: the corpus has ended");
  return position;
}

SplitInfo split_from(const JsonValue& json) {
  SplitInfo info;
  for (const JsonValue& shard : json.at("shards").items()) info.shards.push_back(shard_from_json(shard));
  info.has_current = json.at("has_current").flag();
  info.current = shard_from_json(json.at("current"));
  info.document_tokens = json.at("document_tokens").integer(0, info.has_current ? info.current.tokens : 0);
  return info;
}

void check_size(const std::string& path, int64_t items, int64_t item_bytes) {
  const auto expected = static_cast<uint64_t>(static_cast<int64_t>(sizeof(ShardHeader)) + items * item_bytes);
  std::error_code failed;
  const uint64_t size = fs::file_size(path, failed);
  require(!failed, "cannot continue: \"{}\": {}; delete the folder and start again", path, failed.message());
  require(size == expected, "cannot continue: \"{}\" has {} bytes, {} were written; delete the folder and start again",
          path, size, expected);
}

}  // namespace

std::string to_json_text(const SavedProgress& progress) {
  const CorpusPosition& position = progress.position;
  Json json = {
      {"position",
       {{"file", position.file}, {"offset", position.offset}, {"line", position.line}, {"inside", position.inside}}},
      {"open_split", static_cast<int>(progress.open_split)},
      {"replaced_utf8", progress.counts.replaced},
      {"empty_records", progress.counts.empty}};
  for (const Split split : kSplits) {
    const SplitInfo& info = progress.splits[static_cast<size_t>(split)];
    Json shards = Json::array();
    for (const ShardInfo& shard : info.shards) shards.push_back(to_json(shard));
    json[name_of(split)] = {{"shards", shards},
                            {"has_current", info.has_current},
                            {"current", to_json(info.current)},
                            {"document_tokens", info.document_tokens}};
  }
  return with_checksum(json).dump(1) + "\n";
}

SavedProgress progress_from_json(std::string_view text, const std::string& origin,
                                 const std::vector<InputFile>& files) try {
  const nlohmann::json parsed = parse_json(text, origin);
  const JsonValue json(parsed, origin);
  (void)json.at("checksum");  // it always has one
  check_checksum(json, origin);
  SavedProgress progress;
  progress.position = position_from(json.at("position"), files);
  progress.open_split = json.at("open_split").integer(0, 1) == 0 ? Split::train : Split::test;
  progress.counts.replaced = json.at("replaced_utf8").integer(0, kMost);
  if (json.has("empty_records"))  // of an older version: not counted
    progress.counts.empty = json.at("empty_records").integer(0, kMost);
  for (const Split split : kSplits)
    progress.splits[static_cast<size_t>(split)] = split_from(json.at(name_of(split).c_str()));
  return progress;
} catch (const Error& error) {
  fail("{}; the work done so far is lost; delete the folder and start again", error.what());
}

void check_finished_shards(const std::string& folder, const SavedProgress& progress, int token_bytes) {
  for (const Split split : kSplits) {
    int64_t index = 0;
    for (const ShardInfo& shard : progress.splits[static_cast<size_t>(split)].shards) {
      check_size(folder + "/" + tokens_file(split, index), shard.tokens, token_bytes);
      check_size(folder + "/" + documents_file(split, index), shard.documents, sizeof(uint64_t));
      ++index;
    }
  }
}

}  // namespace furious
