// DIR/progress.json: the state of tokenizing a corpus, to resume after an interruption.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/reader.h"
#include "data/token_shards.h"

namespace furious {

struct SavedProgress {
  CorpusPosition position;
  Split open_split = Split::train;  // of the document that is open
  BlockCounts counts;
  std::array<SplitInfo, 2> splits;
};

// With a checksum over all of it.
std::string to_json_text(const SavedProgress& progress);

// Throws unless the checksum is right and every number can be true for these input files; errors begin with `origin`.
SavedProgress progress_from_json(std::string_view text, const std::string& origin, const std::vector<InputFile>& files);

// The finished shards of `folder` are there, with the sizes that were written.
void check_finished_shards(const std::string& folder, const SavedProgress& progress, int token_bytes);

}  // namespace furious
