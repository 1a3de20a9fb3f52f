// The files of a state store: directory/FINGERPRINT/*.state, state files of decode/state_file.h. Files appear when they
// are complete and carry checksums. There is no index file: scan() reads the ids in each file.
#pragma once

#include <functional>
#include <optional>

#include "base/file.h"
#include "serve/state_store.h"

namespace furious::serve {

class StateFiles {
 public:
  // An Error where the directory cannot be made or is in use by another process; empty: there are no files.
  StateFiles(const ModelConfig& config, std::string fingerprint, const std::filesystem::path& directory);

  bool enabled() const { return !directory_.empty(); }
  // Where a state is kept: by its name, or without one by a number that stands for what was read.
  std::filesystem::path file_of(const std::string& name, uint64_t number) const;

  uint64_t save(const std::filesystem::path& file, const Snapshot& snapshot) const;  // returns the bytes of the file
  std::shared_ptr<const Snapshot> load(const std::filesystem::path& file) const;
  static void remove(const std::filesystem::path& file);
  uint64_t free_bytes() const;  // of the file system; where it does not tell, as many as there are numbers
  // The order of use survives a restart as the times of the files.
  static void mark_used(const std::filesystem::path& file);
  // A file that exists and cannot be opened, since no descriptor is left or its rights changed: it may be whole.
  static bool is_closed_to_us(const std::filesystem::path& file);

  // A file of the directory, with what it tells without its tensors.
  struct Found {
    std::filesystem::path file;
    std::string name;     // empty: it has none
    Snapshot snapshot;    // without contents
    uint64_t bytes = 0;   // of tensors
    bool exact = true;    // no tensor is bf16
    int64_t created = 0;  // seconds since 1970
    uint64_t file_bytes = 0;
  };
  // Calls `found` for each state file, in the order of use, and `warn` with a line for each that is not used. One that
  // is damaged, or for which `found` throws an Error, is removed. Files of other programs and of other models stay
  // where they are. Returns the number of damaged files.
  int64_t scan(const std::function<void(const Found&)>& found,
               const std::function<void(const std::string&)>& warn) const;

  // In memory, in f32, and back from bytes that are not trusted.
  std::vector<std::byte> bytes_of(const Snapshot& snapshot) const;
  Snapshot from_bytes(std::span<const std::byte> bytes) const;

 private:
  std::optional<Found> examined(const std::filesystem::path& file,
                                const std::function<void(const std::string&)>& warn) const;

  const ModelConfig config_;
  const std::string fingerprint_;
  std::filesystem::path directory_;  // of this model
  std::optional<DirectoryLock> lock_;
};

}  // namespace furious::serve
