// Snapshots of sequences, found by what they have read: a conversation that goes on, a prompt that begins like an
// earlier one and a document that was read once start from a snapshot and read only the rest.
//
//   StateStore store(config, fingerprint, {.directory = "states", .disk_bytes = 20'000'000'000});
//   store.put(ids, decoder.contents(slot), transcript);         at planned points: end of a prompt, end of an answer
//   if (const auto match = store.find(prompt)) {                the longest prefix that is stored
//     decoder.restore(slot, match->snapshot->restored());
//     decoder.read(slot, std::span(prompt.ids).subspan(match->ids));
//   }
//
// A match is compared id by id, so equal hashes of different texts do no harm. Text that comes back from a client can
// have other ids than those that were generated: without passes to go by, a match is looked for by the transcript at
// message boundaries as well. Both are exact: nothing that was not read is taken for read. A snapshot also knows the
// passes in which its ids were read, since other passes round otherwise (serve/prompt.h).
//
// Snapshots are kept in memory of the host and in files of a directory (serve/state_index.h, serve/state_files.h).
// States in slots of the device (serve/warm_slots.h) do not pass through here. Every snapshot is also
// written to the directory, by a thread of the store; a snapshot that leaves memory is read again from its file when it
// is found. A file that is damaged is removed with a warning. Where the disk is full the store warns and goes on in
// memory.
//
// Named states are never evicted. Without a directory they stay in memory; so does one that could not be written, which
// is tried again when another write has succeeded, in flush() and at the end.
//
// All functions may be called from several threads at once. None waits for a write but flush() and the destructor.
// find(), state() and export_state() may read a file: call them from a thread that may wait for that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decode/decoder.h"
#include "serve/prompt.h"

namespace furious::serve {

struct StateStoreOptions {
  uint64_t host_bytes = uint64_t{4} << 30;
  std::filesystem::path directory = {};  // created where it does not exist; empty: no files
  uint64_t disk_bytes = 20'000'000'000;
  // Keeps states, keys and values in bf16: half the bytes, but a restored sequence goes on with rounded numbers.
  bool bf16 = false;
  // Called with a line of text, from any thread; must not call the store. Empty: lines go to stderr.
  std::function<void(const std::string&)> warn = {};
};

// Where a state was when a prompt started from it.
enum class StateTier { device, host, disk };

// What a sequence has read, and its state after that. Never changes.
struct Snapshot {
  std::vector<int32_t> ids;
  std::string transcript;  // Prompt::transcript up to here; empty: not at a boundary
  uint64_t passes = 0;     // in which the ids were read (after_pass() in serve/prompt.h)
  SlotContents contents;   // states, keys and values in bf16 where StateStoreOptions::bf16 was set

  bool exact() const;             // f32: a sequence goes on to the bit
  uint64_t bytes() const;         // of memory
  SlotContents restored() const;  // for Decoder::restore: all in f32
  Prompt prompt() const;          // what was read, as the beginning of one
};

struct NamedState {
  std::string name;
  int64_t tokens = 0;
  uint64_t bytes = 0;
  bool exact = true;
  bool on_disk = false;  // false: only in memory, not written yet or no directory
  int64_t created = 0;   // seconds since 1970
};

struct StateStoreStatistics {
  int64_t hits = 0, misses = 0;  // of find()
  int64_t hit_tokens = 0;        // that found snapshots had read
  int64_t puts = 0;
  int64_t loads = 0;  // of files
  int64_t host_states = 0, disk_states = 0, named_states = 0;
  uint64_t host_bytes = 0, disk_bytes = 0;
  int64_t host_evictions = 0, disk_evictions = 0;
  int64_t damaged_files = 0, failed_writes = 0, pending_writes = 0;
};

// The message says what is wrong; the type which HTTP status it is.
class UnknownState : public Error {  // 404
 public:
  using Error::Error;
};
class StateExists : public Error {  // 409
 public:
  using Error::Error;
};
class StoreFull : public Error {  // 507: named states alone would exceed the limit
 public:
  using Error::Error;
};

// Letters, digits, '.', '_' and '-', at most 64, the first one a letter or digit. Anything else is an Error.
void check_state_name(std::string_view name);
bool is_state_name(std::string_view name);

class StateStore {
 public:
  // An Error where the directory cannot be made or is in use by another process.
  StateStore(const ModelConfig& config, std::string model_fingerprint, StateStoreOptions options = {});
  ~StateStore();  // writes what is pending
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  // Keeps the state after `ids`, all that the sequence has read (contents.tokens of them). One with the same ids,
  // passes and transcript that is kept already stays and counts as used. `passes`: 0 where they are not known; the
  // state then gets a number of its own. `contents` must not be written to afterwards. Returns the snapshot, whether or
  // not it is kept.
  std::shared_ptr<const Snapshot> put(std::vector<int32_t> ids, SlotContents contents, std::string transcript = {},
                                      uint64_t passes = 0);

  struct Match {
    std::shared_ptr<const Snapshot> snapshot;
    size_t ids = 0;              // of the prompt that it has read: go on with the rest
    bool by_transcript = false;  // its own ids differ from those of the prompt
    StateTier tier = StateTier::host;
  };
  // The snapshot that has read most of the prompt; of equal ones that with the same ids. With `passes` (ascending) only
  // one that ends with one of them, with the same ids read in the same passes; no file of another is read. A prompt
  // that is read whole has logits to sample from, so nothing need be left to read. `known`: ids that a state elsewhere
  // has read; only one that has read more is of use, and none is no miss.
  std::optional<Match> find(const Prompt& prompt, std::span<const PassEnd> passes = {}, size_t known = 0);

  // Named states. An unknown name is UnknownState, a name that is taken is StateExists.
  void create(const std::string& name, std::vector<int32_t> ids, SlotContents contents, std::string transcript = {},
              uint64_t passes = 0);
  void create(const std::string& name, std::shared_ptr<const Snapshot> snapshot);
  // Names the snapshot after exactly these ids, such as the end of a response; UnknownState where it is not kept.
  void create_from(const std::string& name, std::span<const int32_t> ids);
  void fork(const std::string& name, const std::string& copy);
  void remove(const std::string& name);
  bool has(const std::string& name) const;
  std::vector<NamedState> list() const;  // by name
  NamedState describe(const std::string& name) const;
  std::shared_ptr<const Snapshot> state(const std::string& name);
  // A state file in f32, with the ids; `furious generate --load-state` and `furious chat` read it.
  std::vector<std::byte> export_state(const std::string& name);
  // Bytes are not trusted: an Error where they are damaged, belong to another model, or do not tell the ids. That
  // arrays have the shapes of the model is checked by Decoder::restore, which throws an Error.
  void import_state(const std::string& name, std::span<const std::byte> bytes);

  // Tries again what could not be written under its name. Returns when all that was put is written, or could not be.
  void flush();
  StateStoreStatistics statistics() const;
  const StateStoreOptions& options() const;

 private:
  class Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace furious::serve
