// The records of a .json file as lines: the elements of an array, or values that follow one another, each on a line of
// its own, however they were laid out. Only the structure between records is checked; a line is parsed by its reader.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace furious {

class JsonRecords {
 public:
  explicit JsonRecords(std::string path) : path_(std::move(path)) {}

  void feed(std::string_view bytes, std::string& out);  // appends lines, the last perhaps incomplete
  void finish(std::string& out);                        // the end of the file

 private:
  enum class Expected : uint8_t { value, value_or_end, separator, nothing };

  void outside_string(char c, std::string& out);
  void begin_record(char c, std::string& out);
  void end_record(std::string& out);
  [[noreturn]] void broken(std::string_view reason) const;

  std::string path_;
  int64_t record_ = 1;  // the current one, or the next
  int64_t line_ = 1;
  int64_t depth_ = 0;  // of brackets inside the record
  bool in_record_ = false;
  bool in_string_ = false;
  bool escaped_ = false;
  bool started_ = false;  // whether the file is an array is known
  bool array_ = false;
  Expected expected_ = Expected::value_or_end;
};

}  // namespace furious
