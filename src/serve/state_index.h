// The entries of a state store: found by what was read and by name, and evicted where space is short. Two tiers, each
// with a limit in bytes and an order of last use: memory of the host, and files. It is not synchronized.
//
// The key of a state is the chain of hashes over its ids, with the model's fingerprint at the root, so that all
// prefixes of a prompt are looked up in one walk over it. Who uses an entry compares the ids themselves.
#pragma once

#include <map>
#include <unordered_map>

#include "serve/state_store.h"

namespace furious::serve {

struct StateEntry {
  uint64_t key = 0, transcript_key = 0;  // 0: no transcript
  uint64_t passes = 0;
  size_t tokens = 0;
  std::string name;    // empty: may be evicted
  uint64_t bytes = 0;  // of the snapshot
  bool exact = true;
  int64_t created = 0;
  std::shared_ptr<const Snapshot> host;
  std::weak_ptr<const Snapshot> alive;  // also while it is written, or used by a caller
  std::filesystem::path file;           // where it is or will be written
  uint64_t file_bytes = 0;              // 0: not on disk
  bool queued = false;                  // for writing
  bool unwritten = false;               // it has a name, and its write failed
  bool gone = false;                    // no longer in the index
  uint64_t used = 0;                    // in the order of use

  // Without a name: states of the same ids that were read in other passes have files of their own.
  uint64_t number() const { return key ^ passes; }
};

class StateIndex {
 public:
  using Shared = std::shared_ptr<StateEntry>;

  StateIndex(const std::string& fingerprint, uint64_t host_bytes, uint64_t disk_bytes);

  Shared new_entry(const Snapshot& snapshot, const std::string& name) const;  // not in the index yet
  void insert(const Shared& entry);
  void erase(const Shared& entry);  // also its file
  void touch(const Shared& entry);  // counts as used
  void set_host(const Shared& entry, std::shared_ptr<const Snapshot> snapshot);
  void set_file(const Shared& entry, uint64_t bytes);  // that was written
  void evict_host();
  void evict_files(uint64_t coming);  // frees space for a file that is about to be written

  struct Candidate {
    Shared entry;
    size_t ids = 0;
    bool by_transcript = false;
  };
  // What may have read a prefix of the prompt, in the order in which it should be tried. With `passes` only states that
  // end with one of them and have read their ids so.
  std::vector<Candidate> candidates(const Prompt& prompt, std::span<const PassEnd> passes) const;
  std::vector<Shared> with_ids(std::span<const int32_t> ids) const;
  Shared same_as(const StateEntry& entry) const;  // one without a name of the same ids and passes; nullptr: none

  Shared named(const std::string& name) const;  // UnknownState where there is none
  const std::map<std::string, Shared>& names() const { return names_; }
  uint64_t named_bytes() const { return named_bytes_; }

  StateStoreStatistics statistics;

 private:
  uint64_t key_of(std::span<const int32_t> ids) const;
  void order(const Shared& entry);    // where eviction looks for it
  void unorder(const Shared& entry);  // eviction does not see it
  void drop_host(const Shared& entry);
  void drop_file(const Shared& entry);

  const uint64_t root_, host_bytes_, disk_bytes_;
  std::unordered_multimap<uint64_t, Shared> by_key_, by_transcript_;
  std::map<std::string, Shared> names_;
  std::map<size_t, int64_t> lengths_;                   // how many entries have so many tokens
  std::map<uint64_t, Shared> host_order_, disk_order_;  // by StateEntry::used: what may be evicted, oldest first
  uint64_t clock_ = 0;
  uint64_t named_bytes_ = 0;
};

}  // namespace furious::serve
