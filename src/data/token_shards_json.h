// The JSON forms of what is in a folder of shards; only for the files that read and write it.
#pragma once

#include "base/json.h"
#include "data/token_shards.h"

namespace furious {

nlohmann::ordered_json to_json(const TokenizerInfo& tokenizer);
nlohmann::ordered_json to_json(const ShardInfo& shard);
ShardInfo shard_from_json(const JsonValue& json);

// A split as the manifest has it: totals, then the shards with their file names.
nlohmann::ordered_json to_json(const SplitInfo& info, Split split);

// An object with a checksum of the rest of it as its last entry, and the check of that, where there is one. The order
// of entries does not count.
std::string checksum_of(nlohmann::json json);  // without its own
nlohmann::ordered_json with_checksum(nlohmann::ordered_json json);
void check_checksum(const JsonValue& json, const std::string& origin);

}  // namespace furious
