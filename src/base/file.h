// Files: memory-mapped reading, and atomic writing that never damages the previous version of a file.
//
// A file appears under its name only when it is complete and synced to disk. Until then it is NAME.tmp-furious-… in the
// same directory, locked by its writer. A temporary without a lock was left by a crash; the next writer of the same
// name removes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace furious {

// A whole file, mapped read-only. The file must not be truncated while it is mapped; AtomicFile never truncates one.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  // Bytes in memory in the place of a file; they must outlive it. Messages call them `name`.
  MappedFile(const std::filesystem::path& name, std::span<const std::byte> bytes);
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
  bool mapped_ = true;
};

// The contents of a regular file, which may be empty. A file larger than max_bytes is an Error.
std::string read_text(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 30);
// The same for a path given by the user: also reads pipes, blocking until the writer closes.
std::string read_input(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 30);

// Writes all of a file or nothing. Without commit(), and after any error, the previous file is untouched and the
// temporary is removed. A symbolic link is followed: the file it points to is replaced. An existing path that is not a
// regular file (a device, a pipe) is an Error.
class AtomicFile {
 public:
  // expected_bytes, if known, is reported as the required space when the disk is full.
  explicit AtomicFile(const std::filesystem::path& path, uint64_t expected_bytes = 0);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void overwrite(uint64_t offset, std::span<const std::byte> bytes);  // within what was written
  void commit();                                                      // syncs, then renames to the final name

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

// An exclusive lock on a directory; an Error if another process holds it. The system releases it when the process ends,
// also after a crash.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int descriptor_;
};

// Makes a directory, and those above it that are missing. Of these the destructor removes the ones that are still
// empty: work that failed before it left anything leaves no directory either.
class DirectoryToFill {
 public:
  explicit DirectoryToFill(const std::filesystem::path& directory);
  ~DirectoryToFill();
  DirectoryToFill(const DirectoryToFill&) = delete;
  DirectoryToFill& operator=(const DirectoryToFill&) = delete;

 private:
  std::vector<std::filesystem::path> made_;  // the innermost first
};

// Writes a directory atomically: build(temporary) fills an empty directory next to `path`, which is then synced and
// replaces `path` in one step. A crash at any point leaves either the old or the new directory. If `build` throws, the
// old directory is untouched; the message of an Error says so.
void replace_directory(const std::filesystem::path& path,
                       const std::function<void(const std::filesystem::path& temporary)>& build);

// Removes a directory, which is first renamed to a temporary: a crash does not leave a part of it under its name. What
// cannot be removed stays.
void remove_directory(const std::filesystem::path& path);

// Call before reading a directory that replace_directory writes. Some file systems (NFS) cannot exchange two
// directories in one step; a crash between the two steps leaves the old one under another name. This renames it back.
void recover_directory(const std::filesystem::path& path);

// Removes all temporaries that crashes left in a directory, including those whose target is never written again.
void remove_leftovers(const std::filesystem::path& directory);

namespace file_detail {
// Replaces an existing `path` by `temporary` where the file system cannot exchange names atomically.
void replace_in_two_steps(const std::filesystem::path& temporary, const std::filesystem::path& path);
// The name of the old directory between the two steps.
std::filesystem::path set_aside_name(const std::filesystem::path& path);
}  // namespace file_detail

}  // namespace furious
