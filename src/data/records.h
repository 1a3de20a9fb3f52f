// Some fields of every record of a file: a .jsonl (also .gz or .zst), or a .parquet where the build has Apache Arrow.
#pragma once

#include <string>
#include <vector>

namespace furious {

// For each record the texts of the fields, in the order asked for; numbers become text. A field that a record lacks,
// and a file that is damaged, is an error that names the place.
std::vector<std::vector<std::string>> read_records(const std::string& path, const std::vector<std::string>& fields);

}  // namespace furious
