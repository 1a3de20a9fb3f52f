#include "data/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
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

class Handle {
 public:
  Handle(const std::string& path, int flags) : path_(path), handle_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (handle_ < 0) fail_errno(flags & O_CREAT ? "create" : "open", path);
  }
  ~Handle() {
    if (handle_ >= 0) ::close(handle_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  int get() const { return handle_; }
  int release() { return std::exchange(handle_, -1); }
  size_t size() const {
    struct stat info = {};
    if (::fstat(handle_, &info) != 0) fail_errno("examine", path_);
    require(S_ISREG(info.st_mode), "\"{}\" is not a file", path_);
    return static_cast<size_t>(info.st_size);
  }

 private:
  std::string path_;
  int handle_;
};

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

}  // namespace

MappedShard::MappedShard(const std::string& path) {
  const Handle file(path, O_RDONLY);
  size_ = file.size();
  if (size_ == 0) return;
  data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    fail_errno("map", path);
  }
}

MappedShard::~MappedShard() {
  if (data_) ::munmap(data_, size_);
}

MappedShard::MappedShard(MappedShard&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedShard& MappedShard::operator=(MappedShard&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

std::string read_whole_file(const std::string& path) {
  const Handle file(path, O_RDONLY);
  std::string content(file.size(), '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = ::read(file.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_errno("read", path);
    require(got > 0, "\"{}\" became shorter while it was read", path);
    done += static_cast<size_t>(got);
  }
  return content;
}

void write_whole_file(const std::string& path, std::string_view content) {
  const std::string temporary = path + ".tmp";
  try {
    const Handle file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    write_all(file.get(), temporary, content.data(), content.size());
    if (::fsync(file.get()) != 0) fail_errno("write", temporary);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) fail_errno("replace", path);
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const Handle directory(folder.empty() ? "." : folder, O_RDONLY | O_DIRECTORY);
  if (::fsync(directory.get()) != 0) fail_errno("write", folder);
}

AppendFile::AppendFile(const std::string& path, size_t skip)
    : path_(path), skip_(skip), handle_(Handle(path, O_WRONLY | O_CREAT | O_TRUNC).release()) {}

AppendFile::AppendFile(const std::string& path, size_t skip, int64_t length, uint32_t crc)
    : path_(path), skip_(skip), length_(length), crc_(crc) {
  Handle file(path, O_WRONLY);
  require(static_cast<int64_t>(file.size()) >= length,
          "cannot continue: \"{}\" has {} bytes, {} were written before; delete the folder and begin anew", path,
          file.size(), length);
  if (::ftruncate(file.get(), length) != 0 || ::lseek(file.get(), length, SEEK_SET) < 0) fail_errno("continue", path);
  handle_ = file.release();
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

uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

uint32_t crc32_of(std::span<const std::byte> bytes) {
  return extend_crc(0, bytes.data(), bytes.size());
}

}  // namespace furious
