// The decompressed bytes of a file, from start to end: plain, .gz or .zst by its name; "-" is standard input. A plain
// file may be empty; a compressed file of 0 bytes is damaged, and an error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace furious {

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  virtual size_t read(char* out, size_t bytes) = 0;  // fewer bytes only at the end
  virtual void skip(int64_t bytes);
  virtual int64_t consumed() const = 0;  // bytes of the file itself, for progress
};

// Errors of the stream name the file and the position in it.
std::unique_ptr<ByteStream> open_byte_stream(const std::string& path);

}  // namespace furious
