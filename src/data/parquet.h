// The strings of one column of a Parquet file, some rows at a time. Without Apache Arrow, opening one is an error that
// says how to get it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace furious {

class ParquetColumn {
 public:
  ParquetColumn(const std::string& path, const std::string& column);
  ~ParquetColumn();

  // Appends the next rows to `bytes` and the end of each to `ends`; null becomes an empty string. False at the end.
  bool next(std::string& bytes, std::vector<size_t>& ends);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace furious
