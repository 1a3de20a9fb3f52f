// The bytes of a file from its start to its end, decompressed on the way: plain, .gz or .zst by the name. A plain file
// may be empty: it is a text without characters. A compressed file of 0 bytes is damaged, and an error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace furious {

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  virtual size_t read(char* out, size_t bytes) = 0;  // fewer than asked only at the end
  virtual void skip(int64_t bytes);
  virtual int64_t consumed() const = 0;  // bytes of the file itself, for progress
};

// Errors of the stream name the file and the place in it.
std::unique_ptr<ByteStream> open_byte_stream(const std::string& path);

}  // namespace furious
