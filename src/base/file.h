// Files: reading by mapping, and writing that never costs the last good file.
//
// What is written appears under its name only when it is complete and on the disk. Until then it lies beside its place
// as NAME.tmp-furious-…, locked by its writer; a temporary that nobody locks was left by a crash, and the next writer
// of the same name removes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace furious {

// A whole file, mapped read-only. The file must not be cut short while it is mapped; AtomicFile never does that to it.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  size_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The contents of a regular file, which may be empty; more than max_bytes are refused.
std::string read_text(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 30);
// The same for what a user names as input: also a pipe, which is waited for.
std::string read_input(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 30);

// Writes all of a file or nothing. Without commit(), and after any error, the file that was there before is untouched
// and no temporary stays behind. A link stays one: the file it points to is written. What is there and is no regular
// file (a device, a pipe) is refused.
class AtomicFile {
 public:
  // expected_bytes, when known, lets the message on a full disk say how much room the whole file needs.
  explicit AtomicFile(const std::filesystem::path& path, uint64_t expected_bytes = 0);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void overwrite(uint64_t offset, std::span<const std::byte> bytes);  // within what was written
  void commit();                                                      // on the disk and under its name when it returns

 private:
  [[noreturn]] void failed(int error, uint64_t pending_bytes);
  void discard();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  uint64_t expected_bytes_ = 0;
  uint64_t written_ = 0;
  int file_ = -1;
};

void write_text(const std::filesystem::path& path, std::string_view text);  // through AtomicFile

// A directory that one process at a time works in; an Error says that another one does. Ends with the process, however
// that ends.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int descriptor_;
};

// Makes a directory whole or not at all: build(temporary) fills an empty directory beside `path`; it is synced and
// takes the place of `path` in one step. A crash at any point leaves the old or the new directory there. What `build`
// throws leaves the old one untouched; an Error says so.
void replace_directory(const std::filesystem::path& path,
                       const std::function<void(const std::filesystem::path& temporary)>& build);

// Call before reading a directory that replace_directory writes. Some file systems (NFS) cannot exchange two
// directories in one step; a crash between the two steps leaves the old one under another name, and this puts it back.
void recover_directory(const std::filesystem::path& path);

// Removes every temporary in a directory that a crash left there, also of names that nobody writes again.
void remove_leftovers(const std::filesystem::path& directory);

namespace file_detail {
// How replace_directory exchanges `temporary` and an existing `path` on such a file system.
void replace_in_two_steps(const std::filesystem::path& temporary, const std::filesystem::path& path);
// Where the old directory lies between the two steps.
std::filesystem::path set_aside_name(const std::filesystem::path& path);
}  // namespace file_detail

}  // namespace furious
