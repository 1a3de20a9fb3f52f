// What of a corpus belongs to the test split.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "data/reader.h"

namespace furious {

struct HoldOut {
  double fraction = 0.001;
  uint64_t seed = 123;
  // A tail that is held out has at least this many bytes, or a tenth of the text if that is less.
  int64_t least_tail = 0;
};

// Whether a document belongs to the test split: a pure function of the seed and its text (the first 64 KiB of it), so
// the order and the number of other documents do not matter, and equal documents stay together.
bool is_held_out(std::string_view text, uint64_t seed, double fraction);

// Files of text are a document each. Where they are so few that is_held_out() would leave a split empty, as with a
// single one, the tail of the longest is held out instead: sets its test_from, to the begin of a paragraph, line or
// word near the fraction of the whole text, at most half of a document among several. A pure function of the files.
// Throws if the text is too short to be divided. Other files are left as they are.
void hold_out_tail(std::vector<InputFile>& files, const ReaderOptions& reader, const HoldOut& options);

}  // namespace furious
