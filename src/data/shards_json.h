// The JSON forms of what is in a folder of shards; only for the files that read and write it.
#pragma once

#include "base/json.h"
#include "data/shards.h"

namespace furious {

nlohmann::ordered_json to_json(const TokenizerInfo& tokenizer);
nlohmann::ordered_json to_json(const ShardInfo& shard);
ShardInfo shard_from_json(const JsonValue& json);

// A split as the manifest has it: totals, then the shards with their file names.
nlohmann::ordered_json to_json(const SplitInfo& info, Split split);

// Over all that a progress.json holds beside its checksum.
std::string progress_checksum(nlohmann::json progress);

}  // namespace furious
