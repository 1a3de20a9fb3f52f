// Append-only files that can be resumed after a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace furious {

// A file that only grows at its end, with the CRC-32 of what follows the first `skip` bytes. Every failed write is an
// error that names the file.
class AppendFile {
 public:
  AppendFile() = default;
  AppendFile(const std::string& path, size_t skip);  // a new file, or an emptied one
  AppendFile(const std::string& path, size_t skip, int64_t length,
             uint32_t crc);  // cut back to `length`, checked, continued
  ~AppendFile();
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&& other) noexcept;

  void append(const void* data, size_t bytes);
  void overwrite_start(const void* data, size_t bytes);  // within the first `skip` bytes
  void sync();                                           // what was appended is on the disk
  void close();

  bool is_open() const { return handle_ >= 0; }
  int64_t length() const { return length_ + static_cast<int64_t>(buffer_.size()); }
  uint32_t crc() const { return crc_; }  // of all appended bytes after the skipped ones

 private:
  AppendFile(int flags, const std::string& path, size_t skip);
  void flush();

  std::string path_;
  std::string buffer_;
  size_t skip_ = 0;
  int64_t length_ = 0;  // written; the buffer follows
  uint32_t crc_ = 0;
  int handle_ = -1;
};

uint32_t crc32_of(std::span<const std::byte> bytes);

// Of the blocks that data is cut into, the last perhaps shorter, and of all of it.
struct BlockCrcs {
  std::vector<uint32_t> blocks;
  uint32_t all = 0;
};
BlockCrcs crc32_of_blocks(std::span<const std::byte> bytes, size_t block_bytes);

}  // namespace furious
