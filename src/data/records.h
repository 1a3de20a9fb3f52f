// Some fields of every record of a file: a .jsonl (also .gz or .zst), or a .parquet where the build has Apache Arrow.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace furious {

// Of a record that `wanted` accepts by its number, from 0 on, `visit` gets the texts of the fields, in the order asked
// for; numbers become text. Several files (a folder, or a glob) are counted through. Of a .jsonl file one line at a
// time is in memory. A field that a wanted record lacks, a line that cannot be one of a table, and a file that is
// damaged are errors that name the place.
struct RecordVisitor {
  std::function<void(int64_t number, std::vector<std::string>& texts)> visit;
  std::function<bool(int64_t number)> wanted = [](int64_t) { return true; };
};
// Returns how many records there are.
int64_t for_each_record(const std::string& path, const std::vector<std::string>& fields, const RecordVisitor& visitor);

// Every line of a .jsonl file (also .gz or .zst) that is not blank, with its place for messages: "a.jsonl", line 3.
using LineVisitor = std::function<void(const std::string& line, const std::string& place)>;
void for_each_line(const std::string& path, const LineVisitor& visit);

}  // namespace furious
