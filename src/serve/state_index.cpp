#include "serve/state_index.h"

#include <algorithm>
#include <ctime>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "serve/state_files.h"

namespace furious::serve {
namespace {

// The chain of hashes over ids: one multiplication chain per id, so that prefixes of any length come for free.
uint64_t chained(uint64_t hash, int32_t id) {
  hash = (hash ^ static_cast<uint32_t>(id)) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

// The same over the bytes of a transcript.
class TranscriptHash {
 public:
  explicit TranscriptHash(uint64_t root) : hash_(root) {}
  uint64_t up_to(std::string_view text, size_t end) {
    for (; at_ < end; ++at_) hash_ = (hash_ ^ static_cast<unsigned char>(text[at_])) * 0x100000001b3u;
    return hash_;
  }

 private:
  uint64_t hash_;
  size_t at_ = 0;
};

}  // namespace

StateIndex::StateIndex(const std::string& fingerprint, uint64_t host_bytes, uint64_t disk_bytes)
    : root_(hash_of(fingerprint)), host_bytes_(host_bytes), disk_bytes_(disk_bytes) {}

uint64_t StateIndex::key_of(std::span<const int32_t> ids) const {
  uint64_t key = root_;
  for (const int32_t id : ids) key = chained(key, id);
  return key;
}

StateIndex::Shared StateIndex::new_entry(const Snapshot& snapshot, const std::string& name) const {
  auto entry = std::make_shared<StateEntry>();
  entry->key = key_of(snapshot.ids);
  if (!snapshot.transcript.empty())
    entry->transcript_key = TranscriptHash(root_).up_to(snapshot.transcript, snapshot.transcript.size());
  entry->passes = snapshot.passes;
  entry->tokens = snapshot.ids.size();
  entry->name = name;
  entry->bytes = snapshot.bytes();
  entry->exact = snapshot.exact();
  entry->created = static_cast<int64_t>(std::time(nullptr));
  return entry;
}

void StateIndex::insert(const Shared& entry) {
  by_key_.emplace(entry->key, entry);
  if (entry->transcript_key != 0) by_transcript_.emplace(entry->transcript_key, entry);
  if (!entry->name.empty()) {
    names_[entry->name] = entry;
    named_bytes_ += entry->bytes;
  }
  ++lengths_[entry->tokens];
  entry->used = ++clock_;
  order(entry);
}

void StateIndex::erase(const Shared& entry) {
  if (entry->gone) return;
  unorder(entry);
  drop_host(entry);
  drop_file(entry);
  entry->gone = true;
  const auto erase_from = [&](auto& table, uint64_t key) {
    const auto [begin, end] = table.equal_range(key);
    for (auto at = begin; at != end; ++at)
      if (at->second == entry) return (void)table.erase(at);
  };
  erase_from(by_key_, entry->key);
  erase_from(by_transcript_, entry->transcript_key);
  if (!entry->name.empty()) {
    names_.erase(entry->name);
    named_bytes_ -= entry->bytes;
  }
  const auto length = lengths_.find(entry->tokens);
  if (--length->second == 0) lengths_.erase(length);
}

void StateIndex::order(const Shared& entry) {
  const bool named = !entry->name.empty();
  if (entry->host && (!named || entry->file_bytes > 0)) host_order_[entry->used] = entry;
  if (entry->file_bytes > 0 && !named) disk_order_[entry->used] = entry;
}

void StateIndex::unorder(const Shared& entry) {
  host_order_.erase(entry->used);
  disk_order_.erase(entry->used);
}

void StateIndex::touch(const Shared& entry) {
  if (entry->gone) return;
  unorder(entry);
  entry->used = ++clock_;
  order(entry);
  // Of a named one the time of the file says when it was made.
  if (entry->file_bytes > 0 && entry->name.empty()) StateFiles::mark_used(entry->file);
}

void StateIndex::set_host(const Shared& entry, std::shared_ptr<const Snapshot> snapshot) {
  if (entry->gone || entry->host) return;
  entry->alive = snapshot;
  entry->host = std::move(snapshot);
  ++statistics.host_states;
  statistics.host_bytes += entry->bytes;
  order(entry);
}

void StateIndex::drop_host(const Shared& entry) {
  if (!entry->host) return;
  entry->host.reset();
  --statistics.host_states;
  statistics.host_bytes -= entry->bytes;
  host_order_.erase(entry->used);
}

void StateIndex::set_file(const Shared& entry, uint64_t bytes) {
  entry->file_bytes = bytes;
  ++statistics.disk_states;
  statistics.disk_bytes += bytes;
  order(entry);
}

void StateIndex::drop_file(const Shared& entry) {
  if (entry->file_bytes == 0) return;
  StateFiles::remove(entry->file);
  --statistics.disk_states;
  statistics.disk_bytes -= entry->file_bytes;
  entry->file_bytes = 0;
  disk_order_.erase(entry->used);
}

void StateIndex::evict_host() {
  while (statistics.host_bytes > host_bytes_ && !host_order_.empty()) {
    const Shared entry = host_order_.begin()->second;
    drop_host(entry);
    ++statistics.host_evictions;
    if (entry->file_bytes == 0 && !entry->queued) erase(entry);
  }
}

void StateIndex::evict_files(uint64_t coming) {
  while (statistics.disk_bytes + coming > disk_bytes_ && !disk_order_.empty()) {
    const Shared entry = disk_order_.begin()->second;
    drop_file(entry);
    ++statistics.disk_evictions;
    if (!entry->host) erase(entry);
  }
}

std::vector<StateIndex::Candidate> StateIndex::candidates(const Prompt& prompt, std::span<const PassEnd> passes) const {
  const auto fits = [&](const StateEntry& entry) {
    if (passes.empty()) return true;
    const auto pass = std::ranges::lower_bound(passes, entry.tokens, {}, &PassEnd::ids);
    return pass != passes.end() && pass->ids == entry.tokens && pass->passes == entry.passes;
  };
  std::vector<Candidate> found;
  uint64_t key = root_;
  size_t at = 0;
  for (const auto& [length, count] : lengths_) {
    if (length > prompt.ids.size()) break;
    for (; at < length; ++at) key = chained(key, prompt.ids[at]);
    const auto [begin, end] = by_key_.equal_range(key);
    for (auto entry = begin; entry != end; ++entry)
      if (entry->second->tokens == length && fits(*entry->second)) found.push_back({entry->second, length, false});
  }
  TranscriptHash transcript(root_);
  for (const Prompt::Boundary& boundary : prompt.boundaries) {
    if (!passes.empty() || boundary.ids > prompt.ids.size() || boundary.transcript > prompt.transcript.size()) break;
    if (boundary.transcript == 0) continue;
    const auto [begin, end] = by_transcript_.equal_range(transcript.up_to(prompt.transcript, boundary.transcript));
    for (auto entry = begin; entry != end; ++entry) found.push_back({entry->second, boundary.ids, true});
  }
  std::ranges::stable_sort(found, [](const Candidate& a, const Candidate& b) {
    return a.ids != b.ids ? a.ids > b.ids : a.by_transcript < b.by_transcript;
  });
  return found;
}

std::vector<StateIndex::Shared> StateIndex::with_ids(std::span<const int32_t> ids) const {
  std::vector<Shared> found;
  const auto [begin, end] = by_key_.equal_range(key_of(ids));
  for (auto entry = begin; entry != end; ++entry) found.push_back(entry->second);
  return found;
}

StateIndex::Shared StateIndex::same_as(const StateEntry& entry) const {
  const auto [begin, end] = by_key_.equal_range(entry.key);
  for (auto at = begin; at != end; ++at) {
    const StateEntry& known = *at->second;
    if (known.name.empty() && known.tokens == entry.tokens && known.passes == entry.passes) return at->second;
  }
  return nullptr;
}

StateIndex::Shared StateIndex::named(const std::string& name) const {
  const auto found = names_.find(name);
  if (found != names_.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [other, entry] : names_) known.push_back(other);
  const std::string nearest = nearest_name(name, known);
  throw UnknownState(nearest.empty()
                         ? fmt::format("unknown state \"{}\"; create it first", printable(name))
                         : fmt::format("unknown state \"{}\"; did you mean \"{}\"?", printable(name), nearest));
}

}  // namespace furious::serve
