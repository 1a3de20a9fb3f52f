#include "data/files.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace furious {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

[[noreturn]] void fail_errno(std::string_view action, const std::string& path) {
  const int code = errno;
  const char* hint = code == ENOSPC || code == EDQUOT ? "; free some space and run it again" : "";
  fail("cannot {} \"{}\": {}{}", action, path, std::strerror(code), hint);
}

void write_all(int handle, const std::string& path, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = ::write(handle, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_errno("write", path);
    data += written;
    bytes -= static_cast<size_t>(written);
  }
}

uint32_t extend_crc(uint32_t crc, const void* data, size_t bytes) {
  return static_cast<uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), bytes));
}

// Of the bytes from `begin` to `end`, which the file has.
uint32_t crc_of_file(const std::string& path, int64_t begin, int64_t end) {
  const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (handle < 0) fail_errno("read", path);
  std::string buffer(kBufferBytes, '\0');
  uint32_t crc = 0;
  ssize_t got = 1;
  for (; begin < end && got > 0; begin += got) {
    got = ::pread(handle, buffer.data(), std::min<size_t>(buffer.size(), static_cast<size_t>(end - begin)), begin);
    if (got > 0) crc = extend_crc(crc, buffer.data(), static_cast<size_t>(got));
  }
  ::close(handle);
  if (got < 0) fail_errno("read", path);
  return crc;
}

}  // namespace

AppendFile::AppendFile(int flags, const std::string& path, size_t skip)
    : path_(path), skip_(skip), handle_(::open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666)) {
  if (handle_ < 0) fail_errno(flags & O_CREAT ? "create" : "open", path);
}

AppendFile::AppendFile(const std::string& path, size_t skip) : AppendFile(O_CREAT | O_TRUNC, path, skip) {}

AppendFile::AppendFile(const std::string& path, size_t skip, int64_t length, uint32_t crc) : AppendFile(0, path, skip) {
  length_ = length;
  crc_ = crc;
  const int64_t found = ::lseek(handle_, 0, SEEK_END);
  if (found < 0) fail_errno("continue", path);
  require(found >= length,
          "cannot continue: \"{}\" has {} bytes, {} were written before; delete the folder and start again", path,
          found, length);
  const uint32_t found_crc = crc_of_file(path, static_cast<int64_t>(skip), length);
  require(found_crc == crc,
          "cannot continue: \"{}\" is damaged: CRC-32 {:08x}, {:08x} was written; delete the folder and start again",
          path, found_crc, crc);
  if (::ftruncate(handle_, length) != 0 || ::lseek(handle_, length, SEEK_SET) < 0) fail_errno("continue", path);
}

AppendFile::~AppendFile() {
  if (is_open()) ::close(handle_);
}

AppendFile::AppendFile(AppendFile&& other) noexcept {
  *this = std::move(other);
}

AppendFile& AppendFile::operator=(AppendFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(buffer_, other.buffer_);
  std::swap(skip_, other.skip_);
  std::swap(length_, other.length_);
  std::swap(crc_, other.crc_);
  std::swap(handle_, other.handle_);
  return *this;
}

void AppendFile::append(const void* data, size_t bytes) {
  const auto* start = static_cast<const char*>(data);
  const size_t skipped = std::min(bytes, skip_ - std::min(skip_, static_cast<size_t>(length())));
  crc_ = extend_crc(crc_, start + skipped, bytes - skipped);
  buffer_.append(start, bytes);
  if (buffer_.size() >= kBufferBytes) flush();
}

void AppendFile::flush() {
  write_all(handle_, path_, buffer_.data(), buffer_.size());
  length_ += static_cast<int64_t>(buffer_.size());
  buffer_.clear();
}

void AppendFile::overwrite_start(const void* data, size_t bytes) {
  flush();
  const ssize_t written = ::pwrite(handle_, data, bytes, 0);
  if (written != static_cast<ssize_t>(bytes)) fail_errno("write", path_);
}

void AppendFile::sync() {
  flush();
  if (::fdatasync(handle_) != 0) fail_errno("write", path_);
}

void AppendFile::close() {
  sync();
  if (::close(std::exchange(handle_, -1)) != 0) fail_errno("write", path_);
}

uint32_t crc32_of(std::span<const std::byte> bytes) {
  return extend_crc(0, bytes.data(), bytes.size());
}

BlockCrcs crc32_of_blocks(std::span<const std::byte> bytes, size_t block_bytes) {
  BlockCrcs crcs;
  for (size_t begin = 0; begin < bytes.size(); begin += block_bytes) {
    const auto block = bytes.subspan(begin, std::min(block_bytes, bytes.size() - begin));
    crcs.blocks.push_back(crc32_of(block));
    crcs.all = static_cast<uint32_t>(::crc32_combine(crcs.all, crcs.blocks.back(), static_cast<z_off_t>(block.size())));
  }
  return crcs;
}

}  // namespace furious
