#include "base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <set>
#include <thread>

#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::TemporaryDirectory;

void put(const fs::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::set<std::string> names_in(const fs::path& directory) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    names.insert(entry.path().filename().string());
  return names;
}

using Names = std::set<std::string>;

// Limits the size of files during its lifetime, which write() reports like a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

// Runs `body` in a process that is killed, without unwinding, when it returns.
template <class Body>
void run_and_kill(Body&& body) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    body();
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(MappedFile, HoldsTheBytes) {
  const TemporaryDirectory directory;
  put(directory / "a", std::string_view("x\0y", 3));
  const MappedFile file(directory / "a");
  EXPECT_EQ(file.path(), directory / "a");
  ASSERT_EQ(file.size(), 3u);
  EXPECT_EQ(file.bytes()[0], std::byte{'x'});
  EXPECT_EQ(file.bytes()[1], std::byte{0});
  EXPECT_EQ(file.bytes()[2], std::byte{'y'});
}

TEST(MappedFile, StaysValidAfterTheFileIsRemoved) {
  const TemporaryDirectory directory;
  put(directory / "a", "old");
  const MappedFile file(directory / "a");
  write_text(directory / "a", "newer");
  EXPECT_EQ(file.bytes()[0], std::byte{'o'});
  EXPECT_EQ(MappedFile(directory / "a").size(), 5u);
}

TEST(MappedFile, ErrorsNameTheProblem) {
  const TemporaryDirectory directory;
  expect_error([&] { MappedFile(directory / "missing"); }, {"missing", "no such file"});
  expect_error([&] { MappedFile(directory.path()); }, {directory.path().string(), "is a directory"});
  put(directory / "empty", "");
  expect_error([&] { MappedFile(directory / "empty"); }, {"/empty: is empty"});
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  expect_error([&] { MappedFile(directory / "pipe"); }, {"/pipe: is not a regular file"});
  put(directory / "file", "x");
  expect_error([&] { MappedFile(directory / "file/below"); }, {"/file/below: cannot be read: Not a directory"});
}

TEST(MappedFile, UnreadableFile) {
  if (::geteuid() == 0) GTEST_SKIP() << "root reads every file";
  const TemporaryDirectory directory;
  put(directory / "secret", "x");
  fs::permissions(directory / "secret", fs::perms::none);
  expect_error([&] { MappedFile(directory / "secret"); }, {"secret: cannot be read: Permission denied"});
}

TEST(ReadText, ReadsAll) {
  const TemporaryDirectory directory;
  const std::string text(200'001, 'a');
  put(directory / "a", text);
  EXPECT_EQ(read_text(directory / "a"), text);
  EXPECT_EQ(read_text(directory / "a", 200'001), text);
  put(directory / "empty", "");
  EXPECT_EQ(read_text(directory / "empty"), "");
  EXPECT_NE(read_text("/proc/self/status"), "") << "a file whose size is not known beforehand";
}

TEST(ReadText, ErrorsNameTheProblem) {
  const TemporaryDirectory directory;
  expect_error([&] { read_text(directory / "missing"); }, {"missing", "no such file"});
  expect_error([&] { read_text(directory.path()); }, {"is a directory"});
  put(directory / "a", "12345");
  expect_error([&] { read_text(directory / "a", 4); }, {"larger than 4 bytes"});
}

TEST(ReadText, RefusesAPipeAtOnceAndReadInputReadsIt) {
  const TemporaryDirectory directory;
  const std::string pipe = (directory / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_error([&] { read_text(pipe); }, {"pipe: is not a regular file"});
  const pid_t child = ::fork();
  if (child == 0) {
    put(pipe, "text");
    ::_exit(0);
  }
  EXPECT_EQ(read_input(pipe), "text");
  ::waitpid(child, nullptr, 0);
}

TEST(AtomicFile, FollowsASymbolicLink) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "below");
  fs::create_symlink("below/target", directory / "link");  // dangling at first
  for (const char* text : {"first", "second"}) {
    write_text(directory / "link", text);
    EXPECT_TRUE(fs::is_symlink(directory / "link"));
    EXPECT_EQ(read_text(directory / "below/target"), text);
  }
  fs::create_symlink("circle", directory / "circle");
  expect_error([&] { write_text(directory / "circle", ""); }, {"circle", "cycle of symbolic links"});
}

TEST(AtomicFile, RefusesAnythingButARegularFile) {
  const TemporaryDirectory directory;
  const std::string pipe = (directory / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_error([&] { write_text(pipe, "text"); }, {"pipe: exists and is not a regular file"});
  EXPECT_TRUE(fs::is_fifo(pipe));
  fs::create_symlink("/dev/null", directory / "null");
  expect_error([&] { write_text(directory / "null", "text"); }, {"/dev/null: exists and is not a regular file"});
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

// Writers remove temporaries of killed ones, and must not remove those of active ones.
TEST(AtomicFile, ConcurrentWritersOfOneFileDoNotInterfere) {
  const TemporaryDirectory directory;
  std::vector<pid_t> writers;
  for (int i = 0; i < 8; ++i) {
    writers.push_back(::fork());
    if (writers.back() != 0) continue;
    int failed = 0;
    for (int round = 0; round < 40; ++round) {
      try {
        write_text(directory / "file", std::string(2000, static_cast<char>('a' + i)));
      } catch (const Error&) {
        failed = 1;
      }
    }
    ::_exit(failed);
  }
  for (const pid_t writer : writers) {
    int status = 0;
    ::waitpid(writer, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(read_text(directory / "file").size(), 2000u);
  EXPECT_EQ(names_in(directory.path()), Names{"file"});
}

TEST(AtomicFile, AppearsOnlyWhenComplete) {
  const TemporaryDirectory directory;
  put(directory / "a", "old");
  AtomicFile file(directory / "a");
  file.write("new ");
  file.write("text");
  EXPECT_EQ(read_text(directory / "a"), "old");
  file.commit();
  EXPECT_EQ(read_text(directory / "a"), "new text");
  EXPECT_EQ(names_in(directory.path()), (Names{"a"}));
  expect_error([&] { file.write("more"); }, {"write after commit"});
  expect_error([&] { file.commit(); }, {"twice"});
}

TEST(AtomicFile, HasTheModeOfAnyNewFile) {
  const TemporaryDirectory directory;
  put(directory / "plain", "");
  write_text(directory / "a", "text");
  EXPECT_EQ(fs::status(directory / "a").permissions(), fs::status(directory / "plain").permissions());
}

TEST(AtomicFile, WithoutCommitNothingChanges) {
  const TemporaryDirectory directory;
  put(directory / "a", "old");
  {
    AtomicFile file(directory / "a");
    file.write("new");
    EXPECT_EQ(names_in(directory.path()).size(), 2u);
  }
  EXPECT_EQ(read_text(directory / "a"), "old");
  EXPECT_EQ(names_in(directory.path()), (Names{"a"}));
}

TEST(AtomicFile, WritesIntoTheCurrentDirectory) {
  const TemporaryDirectory directory;
  const fs::path before = fs::current_path();
  fs::current_path(directory.path());
  write_text("a", "text");
  fs::current_path(before);
  EXPECT_EQ(read_text(directory / "a"), "text");
}

TEST(AtomicFile, WritesThroughALinkToADirectory) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "real");
  fs::create_directory_symlink("real", directory / "link");
  write_text(directory / "link/a", "text");
  replace_directory(directory / "link/b", [](const fs::path& path) { write_text(path / "c", "text"); });
  EXPECT_EQ(names_in(directory / "real"), (Names{"a", "b"}));
}

TEST(AtomicFile, FullDiskKeepsThePreviousFile) {
  const TemporaryDirectory directory;
  put(directory / "a", "old");
  const std::string text(3000, 'x');
  {
    const FileSizeLimit limit(1000);
    expect_error([&] { write_text(directory / "a", text); },
                 {(directory / "a").string() + ": cannot be written: File too large", "3000 bytes are needed",
                  "bytes are free", "the previous file is untouched", "ulimit -f"});
    expect_error([&] { write_text(directory / "b", text); }, {"no file of that name was created"});
    expect_error(
        [&] {
          AtomicFile file(directory / "a", 123456);
          file.write(text);
        },
        {"123456 bytes are needed"});
  }
  EXPECT_EQ(read_text(directory / "a"), "old");
  EXPECT_EQ(names_in(directory.path()), (Names{"a"}));
}

// A file system of 64 KiB.
class SmallDisk {
 public:
  SmallDisk() : mounted_(::mount("furious", directory_.path().c_str(), "tmpfs", 0, "size=64k") == 0) {}
  ~SmallDisk() {
    if (mounted_) ::umount(directory_.path().c_str());
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool mounted() const { return mounted_; }
  const TemporaryDirectory& directory() const { return directory_; }

 private:
  TemporaryDirectory directory_;
  bool mounted_;
};

TEST(AtomicFile, FullFileSystem) {
  const SmallDisk disk;
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount a file system";
  const TemporaryDirectory& directory = disk.directory();
  write_text(directory / "a", "old");
  expect_error(
      [&] { write_text(directory / "a", std::string(100'000, 'x')); },
      {"No space left on device", "100000 bytes are needed", "the previous file is untouched", "free some space"});
  EXPECT_EQ(read_text(directory / "a"), "old");
  EXPECT_EQ(names_in(directory.path()), (Names{"a"}));
}

TEST(AtomicFile, RefusesAnInvalidPath) {
  const TemporaryDirectory directory;
  expect_error([&] { AtomicFile file(directory.path()); }, {"is a directory"});
  expect_error([&] { AtomicFile file(""); }, {"is a directory"});
  expect_error([&] { AtomicFile file(directory / "missing/a"); },
               {"missing/a: cannot be written: No such file or directory in", "choose a writable directory"});
}

TEST(AtomicFile, RemovesTemporariesOfKilledWriters) {
  const TemporaryDirectory directory;
  run_and_kill([&] {
    AtomicFile file(directory / "a");
    file.write("half");
    ::kill(::getpid(), SIGKILL);
  });
  ASSERT_EQ(names_in(directory.path()).size(), 1u);
  put(directory / "a.tmp-mine", "a name that is not ours");
  write_text(directory / "a", "whole");
  EXPECT_EQ(names_in(directory.path()), (Names{"a", "a.tmp-mine"}));
}

TEST(AtomicFile, KeepsTheTemporaryOfAnActiveWriter) {
  const TemporaryDirectory directory;
  AtomicFile slow(directory / "a");
  slow.write("slow");
  write_text(directory / "a", "fast");
  EXPECT_EQ(read_text(directory / "a"), "fast");
  slow.commit();
  EXPECT_EQ(read_text(directory / "a"), "slow");
}

void build_checkpoint(const fs::path& directory, std::string_view text) {
  write_text(directory / "weights", text);
  fs::create_directory(directory / "more");
  put(directory / "more" / "config", text);
}

TEST(ReplaceDirectory, CreatesAndReplaces) {
  const TemporaryDirectory directory;
  for (const std::string text : {"first", "second"}) {
    replace_directory(directory / "checkpoint", [&](const fs::path& path) {
      EXPECT_TRUE(fs::is_empty(path));
      build_checkpoint(path, text);
    });
    EXPECT_EQ(read_text(directory / "checkpoint/weights"), text);
    EXPECT_EQ(read_text(directory / "checkpoint/more/config"), text);
    EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint"}));
  }
}

TEST(ReplaceDirectory, TrailingSlash) {
  const TemporaryDirectory directory;
  replace_directory(directory / "checkpoint/", [](const fs::path& path) { build_checkpoint(path, "text"); });
  EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint"}));
}

TEST(ReplaceDirectory, AnErrorKeepsTheOldDirectory) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "checkpoint";
  const auto failing = [](const fs::path& temporary) {
    const FileSizeLimit limit(1000);
    write_text(temporary / "weights", std::string(3000, 'x'));
  };
  expect_error([&] { replace_directory(path, failing); },
               {"3000 bytes are needed", path.string() + ": no directory of that name was created"});
  EXPECT_EQ(names_in(directory.path()), Names{});
  replace_directory(path, [](const fs::path& temporary) { build_checkpoint(temporary, "old"); });
  expect_error([&] { replace_directory(path, failing); },
               {"3000 bytes are needed", path.string() + ": the previous directory is untouched"});
  EXPECT_THROW(replace_directory(path, [](const fs::path&) { throw std::bad_alloc(); }), std::bad_alloc);
  EXPECT_EQ(read_text(path / "weights"), "old");
  EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint"}));
}

TEST(ReplaceDirectory, RefusesAFile) {
  const TemporaryDirectory directory;
  put(directory / "a", "text");
  expect_error([&] { replace_directory(directory / "a", [](const fs::path&) {}); }, {"/a: is a file"});
  EXPECT_EQ(read_text(directory / "a"), "text");
}

TEST(ReplaceDirectory, AKilledWriterKeepsTheOldDirectory) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "checkpoint";
  replace_directory(path, [](const fs::path& temporary) { build_checkpoint(temporary, "old"); });
  run_and_kill([&] {
    replace_directory(path, [](const fs::path& temporary) {
      build_checkpoint(temporary, "half");
      ::kill(::getpid(), SIGKILL);
    });
  });
  EXPECT_EQ(read_text(path / "weights"), "old");
  EXPECT_EQ(names_in(directory.path()).size(), 2u);
  replace_directory(path, [](const fs::path& temporary) { build_checkpoint(temporary, "new"); });
  EXPECT_EQ(read_text(path / "weights"), "new");
  EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint"}));
}

TEST(ReplaceDirectory, KeepsTheTemporaryOfAnActiveWriter) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "checkpoint";
  replace_directory(path, [&](const fs::path& slow) {
    build_checkpoint(slow, "slow");
    replace_directory(path, [](const fs::path& fast) { build_checkpoint(fast, "fast"); });
    EXPECT_EQ(read_text(path / "weights"), "fast");
  });
  EXPECT_EQ(read_text(path / "weights"), "slow");
  EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint"}));
}

TEST(ReplaceDirectory, TwoStepsExchange) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "new");
  fs::create_directory(directory / "checkpoint");
  build_checkpoint(directory / "new", "new");
  build_checkpoint(directory / "checkpoint", "old");
  fs::create_directory(file_detail::set_aside_name(directory / "checkpoint"));
  build_checkpoint(file_detail::set_aside_name(directory / "checkpoint"), "older");
  file_detail::replace_in_two_steps(directory / "new", directory / "checkpoint");
  EXPECT_EQ(read_text(directory / "checkpoint/weights"), "new");
  EXPECT_EQ(read_text(directory / "new/weights"), "old");
  EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint", "new"}));
  expect_error([&] { file_detail::replace_in_two_steps(directory / "missing", directory / "checkpoint"); },
               {"cannot be put in place"});
  EXPECT_EQ(read_text(directory / "checkpoint/weights"), "new");
}

TEST(DirectoryLock, ExcludesASecondHolder) {
  const TemporaryDirectory directory;
  {
    const DirectoryLock lock(directory.path());
    expect_error([&] { DirectoryLock{directory.path()}; }, {"another process"});
  }
  const DirectoryLock again(directory.path());
  expect_error([&] { DirectoryLock{directory / "none"}; }, {"none", "cannot be opened"});
}

TEST(RecoverDirectory, RestoresTheOldDirectory) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "checkpoint";
  const fs::path aside = file_detail::set_aside_name(path);
  recover_directory(path);
  EXPECT_EQ(names_in(directory.path()), Names{});
  fs::create_directory(aside);
  build_checkpoint(aside, "old");
  recover_directory(directory / "checkpoint/");
  EXPECT_EQ(read_text(path / "weights"), "old");
  EXPECT_EQ(names_in(directory.path()), (Names{"checkpoint"}));
}

TEST(RecoverDirectory, KeepsANewerDirectoryAndAnActiveWriter) {
  const TemporaryDirectory directory;
  const fs::path path = directory / "checkpoint";
  const fs::path aside = file_detail::set_aside_name(path);
  fs::create_directory(aside);
  const int writer = ::open(aside.c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(writer, LOCK_EX), 0);
  recover_directory(path);
  EXPECT_FALSE(fs::exists(path));
  ::close(writer);
  fs::create_directory(path);
  build_checkpoint(path, "new");
  recover_directory(path);
  EXPECT_EQ(read_text(path / "weights"), "new");
}

TEST(DirectoryToFill, RemovesWhatItMadeAndLeftEmpty) {
  const TemporaryDirectory folder;
  fs::create_directories(folder / "old");
  { const DirectoryToFill made(folder / "old/a/b"); }
  EXPECT_FALSE(fs::exists(folder / "old/a"));
  { const DirectoryToFill made(folder / "old"); }
  EXPECT_TRUE(fs::exists(folder / "old")) << "it was there before";
  {
    const DirectoryToFill made(folder / "old/a/b");
    put(folder / "old/a/b/file", "x");
  }
  EXPECT_TRUE(fs::exists(folder / "old/a/b/file"));
  expect_error([&] { DirectoryToFill(folder / "old/a/b/file/c"); }, {"cannot create folder", "file/c"});
}

// It is there with all of its files or not at all, whenever another process looks.
TEST(File, ADirectoryIsRemovedAtOnce) {
  const TemporaryDirectory directory;
  const fs::path path = directory.path() / "checkpoint";
  constexpr size_t kFiles = 3000;
  fs::create_directory(path);
  for (size_t i = 0; i < kFiles; ++i) put(path / std::to_string(i), "x");
  std::thread remover([&] { remove_directory(path); });
  while (fs::exists(path)) {
    size_t count = 0;
    std::error_code ignored;  // it may end meanwhile
    for (fs::directory_iterator entry(path, ignored), end; !ignored && entry != end; entry.increment(ignored)) ++count;
    if (fs::exists(path)) {
      EXPECT_EQ(count, kFiles);
    }
  }
  remover.join();
  EXPECT_EQ(names_in(directory.path()), std::set<std::string>());
  remove_directory(path);  // nothing is there
}

}  // namespace
}  // namespace furious
