#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryMark = ".tmp-furious-";

std::string reason(int error) {
  return std::generic_category().message(error);
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }

  bool valid() const { return number_ >= 0; }
  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

Descriptor open_to_read(const fs::path& path, int more_flags = 0) {
  return Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | more_flags));
}

Descriptor open_existing(const fs::path& path, int more_flags) {
  Descriptor file = open_to_read(path, more_flags);
  const int error = errno;
  require(file.valid() || error != ENOENT, "{}: no such file; check the path", path.string());
  require(file.valid(), "{}: cannot be read: {}", path.string(), reason(error));
  return file;
}

struct stat status_of(int file, const fs::path& path) {
  struct stat status {};
  if (::fstat(file, &status) != 0) fail("{}: cannot be read: {}", path.string(), reason(errno));
  require(!S_ISDIR(status.st_mode), "{}: is a directory, expected a file", path.string());
  return status;
}

fs::path without_trailing_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

fs::path directory_of(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

fs::path random_sibling(const fs::path& path) {
  fs::path sibling = path;
  sibling += fmt::format("{}{:08x}", kTemporaryMark, std::random_device{}());
  return sibling;
}

// A temporary that exists and is locked by this process. Between its creation and the lock, remove_orphans of another
// process may have unlinked it; another one is then created.
struct Temporary {
  fs::path path;
  Descriptor descriptor;
};

template <class Create>
Temporary make_temporary(const fs::path& target, Create&& create) {
  for (;;) {
    const fs::path path = random_sibling(target);
    Descriptor descriptor(create(path));
    if (!descriptor.valid() && errno == EEXIST) continue;
    require(descriptor.valid(), "{}: cannot be written: {} in {}; choose a writable directory", target.string(),
            reason(errno), directory_of(target).string());
    ::flock(descriptor.number(), LOCK_EX);  // where locks are unsupported, no other process gets one either
    struct stat status {};
    if (::fstat(descriptor.number(), &status) == 0 && status.st_nlink > 0) return {path, std::move(descriptor)};
  }
}

int create_file(const fs::path& path) {
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

int create_directory(const fs::path& path) {
  if (::mkdir(path.c_str(), 0777) != 0) return -1;
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

// Removes unlocked temporaries whose name starts with `prefix`: their writers were killed.
void remove_orphans(const fs::path& directory, const std::string& prefix) {
  std::error_code ignored;
  std::vector<fs::path> candidates;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.find(kTemporaryMark) != name.npos) candidates.push_back(entry.path());
  }
  for (const fs::path& candidate : candidates) {
    const Descriptor descriptor = open_to_read(candidate, O_NOFOLLOW | O_NONBLOCK);
    if (descriptor.valid() && ::flock(descriptor.number(), LOCK_EX | LOCK_NB) == 0) fs::remove_all(candidate, ignored);
  }
}

void remove_orphans_of(const fs::path& target) {
  remove_orphans(directory_of(target), target.filename().string() + std::string(kTemporaryMark));
}

// Returns 0 or an errno. EINVAL is success: some file systems do not support, or need, syncing a directory.
int sync_path(const fs::path& path) {
  const Descriptor descriptor = open_to_read(path, O_NONBLOCK);
  if (!descriptor.valid()) return errno;
  return ::fsync(descriptor.number()) == 0 || errno == EINVAL ? 0 : errno;
}

void sync_name(const fs::path& path) {
  const int error = sync_path(directory_of(path));
  require(error == 0,
          "{}: was written, but its directory could not be synced: {}; a power failure may restore the previous "
          "version",
          path.string(), reason(error));
}

void sync_tree(const fs::path& directory) {
  const auto sync = [](const fs::path& path) {
    const int error = sync_path(path);
    require(error == 0, "{}: cannot be synced: {}", path.string(), reason(error));
  };
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_directory() || entry.is_regular_file()) sync(entry.path());
  sync(directory);
}

std::string free_bytes(const fs::path& directory) {
  struct statvfs status {};
  if (::statvfs(directory.c_str(), &status) != 0) return "an unknown number of";
  return fmt::format("{}", uint64_t{status.f_bavail} * status.f_frsize);
}

std::string advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; free some space or write to another disk";
    case EFBIG:
      return "; raise the limit on file sizes (ulimit -f) or write to another disk";
    default:
      return "";
  }
}

// No exceptions: a path that cannot be examined fails with a reason when it is opened.
bool path_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

bool is_a_directory(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

// For messages: the state of `path` after a failed write.
std::string untouched(const fs::path& path, std::string_view what) {
  return path_exists(path) ? fmt::format("the previous {} is untouched", what)
                           : fmt::format("no {} of that name was created", what);
}

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const fs::path& target) : temporary_(make_temporary(target, create_directory)) {}
  ~TemporaryDirectory() {
    std::error_code ignored;
    fs::remove_all(temporary_.path, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const fs::path& path() const { return temporary_.path; }

 private:
  Temporary temporary_;
};

void rename_or_fail(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    fail("{}: cannot be renamed to {}: {}", from.string(), to.string(), reason(errno));
}

// False if the file system cannot exchange two names atomically.
bool exchange(const fs::path& a, const fs::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

void put_in_place(const fs::path& temporary, const fs::path& target) {
  if (!path_exists(target))
    rename_or_fail(temporary, target);
  else if (!exchange(temporary, target))
    file_detail::replace_in_two_steps(temporary, target);
}

}  // namespace

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  const Descriptor file = open_existing(path, O_NONBLOCK);  // opening a pipe must not wait for a writer
  const struct stat status = status_of(file.number(), path);
  require(S_ISREG(status.st_mode), "{}: is not a regular file, so it cannot be mapped", path.string());
  require(status.st_size > 0, "{}: is empty; it was not written completely or is the wrong file", path.string());
  size_ = static_cast<size_t>(status.st_size);
  void* const data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number(), 0);
  require(data != MAP_FAILED, "{}: cannot be mapped ({} bytes): {}", path.string(), size_, reason(errno));
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::MappedFile(const fs::path& name, std::span<const std::byte> bytes)
    : path_(name), data_(bytes.data()), size_(bytes.size()), mapped_(false) {}

MappedFile::~MappedFile() {
  if (mapped_) ::munmap(const_cast<std::byte*>(data_), size_);
}

namespace {

std::string read_all(const Descriptor& file, const fs::path& path, uint64_t max_bytes) {
  std::string text;
  std::vector<char> buffer(size_t{1} << 16);
  for (;;) {
    const ssize_t count = ::read(file.number(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    require(count >= 0, "{}: cannot be read: {}", path.string(), reason(errno));
    if (count == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(count));
    require(text.size() <= max_bytes, "{}: is larger than {} bytes, the limit for this kind of file; check the path",
            path.string(), max_bytes);
  }
}

// The target of a chain of symbolic links. It need not exist.
fs::path behind_links(fs::path path) {
  std::error_code ignored;
  for (int links = 0; fs::is_symlink(path, ignored); ++links) {
    require(links < 40, "{}: is a cycle of symbolic links; remove it", path.string());
    const fs::path target = fs::read_symlink(path, ignored);
    path = target.is_absolute() ? target : directory_of(path) / target;
  }
  return path;
}

}  // namespace

std::string read_text(const fs::path& path, uint64_t max_bytes) {
  const Descriptor file = open_existing(path, O_NONBLOCK);  // opening a pipe must not wait for a writer
  require(S_ISREG(status_of(file.number(), path).st_mode), "{}: is not a regular file, expected one", path.string());
  return read_all(file, path, max_bytes);
}

std::string read_input(const fs::path& path, uint64_t max_bytes) {
  const Descriptor file = open_existing(path, 0);
  status_of(file.number(), path);
  return read_all(file, path, max_bytes);
}

AtomicFile::AtomicFile(const fs::path& path, uint64_t expected_bytes)
    : path_(behind_links(path)), expected_bytes_(expected_bytes) {
  require(path.has_filename() && !is_a_directory(path), "{}: is a directory, expected the name of a file to write",
          path.string());
  std::error_code ignored;
  require(!fs::exists(path_, ignored) || fs::is_regular_file(path_, ignored),
          "{}: exists and is not a regular file; choose another name", path_.string());
  remove_orphans_of(path_);
  Temporary temporary = make_temporary(path_, create_file);
  temporary_ = temporary.path;
  file_ = temporary.descriptor.release();
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::discard() {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

void AtomicFile::failed(int error, uint64_t pending_bytes) {
  const uint64_t needed = std::max(expected_bytes_, written_ + pending_bytes);
  discard();  // before counting the free bytes, which then include those of the temporary
  fail("{}: cannot be written: {}; {} bytes are needed and {} bytes are free; {}{}", path_.string(), reason(error),
       needed, free_bytes(directory_of(path_)), untouched(path_, "file"), advice(error));
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  require(file_ >= 0, "{}: write after commit", path_.string());
  while (!bytes.empty()) {
    const ssize_t count = ::write(file_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) failed(errno, bytes.size());
    written_ += static_cast<uint64_t>(count);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void AtomicFile::overwrite(uint64_t offset, std::span<const std::byte> bytes) {
  require(file_ >= 0 && offset <= written_ && bytes.size() <= written_ - offset,
          "{}: overwrite of {} bytes at {} exceeds the {} bytes written", path_.string(), bytes.size(), offset,
          written_);
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) failed(errno, 0);
    offset += static_cast<uint64_t>(count);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void AtomicFile::commit() {
  require(file_ >= 0, "{}: commit called twice", path_.string());
  if (::fsync(file_) != 0) failed(errno, 0);
  // Keep the lock until after the rename: otherwise another writer would remove the file as an orphan.
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) failed(errno, 0);
  temporary_.clear();
  ::close(std::exchange(file_, -1));  // fsync has already reported any write error
  sync_name(path_);
}

void write_text(const fs::path& path, std::string_view text) {
  AtomicFile file(path, text.size());
  file.write(text);
  file.commit();
}

DirectoryLock::DirectoryLock(const fs::path& directory) {
  Descriptor descriptor = open_to_read(directory, O_DIRECTORY);
  require(descriptor.valid(), "{}: cannot be opened: {}", directory.string(), reason(errno));
  // Errors other than EWOULDBLOCK mean that locks are unsupported. Retry: a killed process may not have exited yet.
  for (int tries = 20; ::flock(descriptor.number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; --tries) {
    require(tries > 0, "{}: in use by another process; wait for it to finish, or choose another directory",
            directory.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  descriptor_ = descriptor.release();
}

DirectoryLock::~DirectoryLock() {
  ::close(descriptor_);
}

DirectoryToFill::DirectoryToFill(const fs::path& directory) {
  std::error_code problem;
  for (fs::path path = directory; !path.empty() && !fs::exists(path, problem); path = path.parent_path())
    made_.push_back(path);
  fs::create_directories(directory, problem);
  if (!problem) return;
  made_.clear();
  fail("cannot create folder \"{}\": {}", directory.string(), problem.message());
}

DirectoryToFill::~DirectoryToFill() {
  std::error_code ignored;
  for (const fs::path& path : made_) fs::remove(path, ignored);  // fails for one that is not empty
}

fs::path file_detail::set_aside_name(const fs::path& path) {
  fs::path name = path;
  name += ".old-furious";
  return name;
}

void file_detail::replace_in_two_steps(const fs::path& temporary, const fs::path& path) {
  const fs::path aside = set_aside_name(path);
  fs::remove_all(aside);  // left by a writer that was killed after its second step
  const Descriptor old = open_to_read(path);
  ::flock(old.number(), LOCK_EX);  // prevents recover_directory from renaming it back between the steps
  rename_or_fail(path, aside);
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    rename_or_fail(aside, path);
    fail("{}: cannot be put in place: {}", path.string(), reason(error));
  }
  rename_or_fail(aside, temporary);
}

void remove_directory(const fs::path& path) {
  const fs::path target = without_trailing_slash(path), aside = random_sibling(target);
  std::error_code problem;
  fs::rename(target, aside, problem);
  if (!problem) fs::remove_all(aside, problem);
}

void recover_directory(const fs::path& path) {
  const fs::path target = without_trailing_slash(path);
  const fs::path aside = file_detail::set_aside_name(target);
  const Descriptor old = open_to_read(aside, O_DIRECTORY);
  if (!old.valid() || ::flock(old.number(), LOCK_EX | LOCK_NB) != 0) return;
  if (!path_exists(target)) rename_or_fail(aside, target);
}

void remove_leftovers(const fs::path& directory) {
  remove_orphans(directory, "");
}

void replace_directory(const fs::path& path, const std::function<void(const fs::path&)>& build) {
  const fs::path target = without_trailing_slash(path);
  require(!path_exists(target) || is_a_directory(target), "{}: is a file, expected the name of a directory to write",
          target.string());
  recover_directory(target);
  remove_orphans_of(target);
  const TemporaryDirectory temporary(target);  // after the exchange it holds the old directory, and removes it
  try {
    build(temporary.path());
    sync_tree(temporary.path());
    put_in_place(temporary.path(), target);
  } catch (const Error& error) {
    fail("{}; {}: {}", error.what(), target.string(), untouched(target, "directory"));
  } catch (const fs::filesystem_error& error) {
    fail("{}: cannot be written: {}: {}; {}", target.string(), error.path1().string(), error.code().message(),
         untouched(target, "directory"));
  }
  sync_name(target);
}

}  // namespace furious
