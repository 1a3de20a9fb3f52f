// The strings of one column of a Parquet file, or of an Arrow one (an IPC stream, as datasets.save_to_disk writes), by
// the format of the file and not by its name, some rows at a time; its numbers too, where they are asked for as text.
// Without Apache Arrow, opening one is an error that says how to get it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/inputs.h"

namespace furious {

class ParquetColumn {
 public:
  enum class Numbers : uint8_t { refused, as_text };
  ParquetColumn(const InputFile& file, const std::string& column, Numbers numbers = Numbers::refused);
  ~ParquetColumn();

  // Appends the next rows to `bytes` and the end of each to `ends`; null becomes an empty string. False at the end.
  bool next(std::string& bytes, std::vector<size_t>& ends);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace furious
