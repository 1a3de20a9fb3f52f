#include "serve/state_store.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/names.h"
#include "base/parallel.h"
#include "decode/state_file.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"

namespace furious::serve {
namespace {

namespace fs = std::filesystem;

// Of snapshots that wait to be written, beyond which those without a name are not written.
constexpr uint64_t kLeastPendingBytes = uint64_t{256} << 20;
constexpr std::string_view kSuffix = ".state";
constexpr std::string_view kNamed = "n-", kUnnamed = "s-";

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

// A file that exists and cannot be opened, since no descriptor is left or its rights changed: it may be whole.
bool is_closed_to_us(const fs::path& file) {
  std::error_code ignored;
  return fs::exists(file, ignored) && !std::ifstream(file).is_open();
}

// The order of use survives a restart as the times of the files. Times that the system sets are those of its last tick,
// so that files of one tick would be in no order.
void set_used_now(const fs::path& file) {
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[] = {now, now};
  ::utimensat(AT_FDCWD, file.c_str(), times, 0);
}

// Decays are sums over the whole window: rounding them would change weights of old tokens, and they are small.
bool may_be_rounded(std::string_view name) {
  return !name.ends_with("log_decay");
}

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
}

bool is_state_name(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::ranges::all_of(name, is_name_character) &&
         std::string_view("._-").find(name[0]) == std::string_view::npos;
}

// What follows `prefix` in the name of a file of the store; empty where it is none.
std::string_view middle_of(std::string_view file, std::string_view prefix) {
  if (!file.starts_with(prefix) || !file.ends_with(kSuffix) || file.size() <= prefix.size() + kSuffix.size()) return {};
  return file.substr(prefix.size(), file.size() - prefix.size() - kSuffix.size());
}

bool is_hash(std::string_view text) {
  return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

bool Snapshot::exact() const {
  return std::ranges::all_of(contents.tensors, [](const auto& named) { return named.second.dtype() == DType::f32; });
}

uint64_t Snapshot::bytes() const {
  uint64_t sum = ids.size() * sizeof(int32_t) + transcript.size();
  for (const auto& [name, tensor] : contents.tensors) sum += tensor.bytes();
  return sum + (contents.logits ? contents.logits.bytes() : 0);
}

SlotContents Snapshot::restored() const {
  SlotContents out = contents;
  for (auto& [name, tensor] : out.tensors)
    if (tensor.dtype() != DType::f32) tensor = to_dtype(tensor, DType::f32);
  return out;
}

Prompt Snapshot::prompt() const {
  Prompt prompt;
  if (transcript.empty())
    prompt.append_ids(ids);
  else
    prompt = {ids, transcript, {{ids.size(), transcript.size()}}};
  return prompt;
}

void check_state_name(std::string_view name) {
  require(is_state_name(name),
          "\"{}\" is not a name for a state; use letters, digits, '.', '_' and '-', at most 64, the first one a letter "
          "or digit",
          printable(name));
}

class StateStore::Shelf {
 public:
  Shelf(const ModelConfig& config, std::string fingerprint, StateStoreOptions options);
  ~Shelf();

  void put(std::shared_ptr<const Snapshot> snapshot);
  std::optional<Match> find(const Prompt& prompt, size_t limit);
  void create(const std::string& name, std::shared_ptr<const Snapshot> snapshot);
  std::shared_ptr<const Snapshot> at(std::span<const int32_t> ids);
  std::shared_ptr<const Snapshot> named(const std::string& name);
  void remove(const std::string& name);
  bool has(const std::string& name) const;
  std::vector<NamedState> list() const;
  NamedState describe(const std::string& name) const;
  std::vector<std::byte> exported(const Snapshot& snapshot) const;
  std::shared_ptr<const Snapshot> imported(std::span<const std::byte> bytes) const;
  std::shared_ptr<const Snapshot> made(std::vector<int32_t> ids, SlotContents contents, std::string transcript) const;
  void flush();
  StateStoreStatistics statistics() const;
  const StateStoreOptions& options() const { return options_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Entry {
    uint64_t key = 0, transcript_key = 0;  // 0: no transcript
    size_t tokens = 0;
    std::string name;    // empty: may be evicted
    uint64_t bytes = 0;  // of the snapshot
    bool exact = true;
    int64_t created = 0;
    std::shared_ptr<const Snapshot> host;
    std::weak_ptr<const Snapshot> alive;  // also while it is written, or used by a caller
    fs::path file;                        // where it is or will be written
    uint64_t file_bytes = 0;              // 0: not on disk
    bool queued = false;                  // for writing
    bool gone = false;                    // no longer in the tables
    uint64_t used = 0;                    // in the order of use
  };
  using Shared = std::shared_ptr<Entry>;
  struct Candidate {
    Shared entry;
    size_t ids = 0;
    bool by_transcript = false;
  };
  struct Job {
    Shared entry;
    std::shared_ptr<const Snapshot> snapshot;
  };

  bool has_directory() const { return !directory_.empty(); }
  uint64_t key_of(std::span<const int32_t> ids) const;
  Shared entry_of(const Snapshot& snapshot, const std::string& name) const;
  void warn(const std::string& line) const;

  // All of these with the lock held.
  void insert(const Shared& entry);
  void erase(const Shared& entry);
  void touch(const Shared& entry);
  void order(const Shared& entry);    // where eviction looks for it
  void unorder(const Shared& entry);  // eviction does not see it
  void set_host(const Shared& entry, std::shared_ptr<const Snapshot> snapshot);
  void drop_host(const Shared& entry);
  void drop_file(const Shared& entry);
  void enqueue(const Shared& entry, const std::shared_ptr<const Snapshot>& snapshot);
  void evict_host();
  void evict_files(uint64_t coming);
  Shared named_entry(const std::string& name) const;
  std::vector<Candidate> candidates(const Prompt& prompt, size_t limit) const;

  // Without: reads the file where it must. nullptr: it is gone, or was damaged.
  std::shared_ptr<const Snapshot> snapshot_of(const Shared& entry);
  std::shared_ptr<const Snapshot> load(const fs::path& file) const;
  void scan();
  void scan_file(const fs::path& file);
  void write_pending();
  void write(Lock& lock, const Job& job);

  const ModelConfig config_;
  const std::string fingerprint_;
  const uint64_t root_;
  const StateStoreOptions options_;
  fs::path directory_;  // of this model
  std::optional<DirectoryLock> directory_lock_;

  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::unordered_multimap<uint64_t, Shared> by_key_, by_transcript_;
  std::map<std::string, Shared> names_;
  std::map<size_t, int64_t> lengths_;                   // how many entries have so many tokens
  std::map<uint64_t, Shared> host_order_, disk_order_;  // by Entry::used: what may be evicted, oldest first
  uint64_t clock_ = 0;
  uint64_t named_bytes_ = 0, pending_bytes_ = 0;
  std::deque<Job> jobs_;
  bool writing_ = false, stopping_ = false, disk_failed_ = false, skipped_ = false;
  StateStoreStatistics statistics_;
  std::thread writer_;
};

StateStore::Shelf::Shelf(const ModelConfig& config, std::string fingerprint, StateStoreOptions options)
    : config_(config),
      fingerprint_(std::move(fingerprint)),
      root_(hash_of(fingerprint_)),
      options_(std::move(options)) {
  if (options_.directory.empty()) return;
  require(is_state_name(fingerprint_), "state store: \"{}\" is not the fingerprint of a model",
          printable(fingerprint_));
  directory_ = options_.directory / fingerprint_;
  std::error_code error;
  fs::create_directories(directory_, error);
  require(!error, "{}: cannot be made: {}; choose another directory for states", directory_.string(), error.message());
  directory_lock_.emplace(directory_);
  remove_leftovers(directory_);
  scan();
  writer_ = std::thread([this] { write_pending(); });
}

StateStore::Shelf::~Shelf() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
}

void StateStore::Shelf::warn(const std::string& line) const {
  if (options_.warn)
    options_.warn(line);
  else
    fmt::print(stderr, "warning: {}\n", line);
}

uint64_t StateStore::Shelf::key_of(std::span<const int32_t> ids) const {
  uint64_t key = root_;
  for (const int32_t id : ids) key = chained(key, id);
  return key;
}

StateStore::Shelf::Shared StateStore::Shelf::entry_of(const Snapshot& snapshot, const std::string& name) const {
  auto entry = std::make_shared<Entry>();
  entry->key = key_of(snapshot.ids);
  if (!snapshot.transcript.empty())
    entry->transcript_key = TranscriptHash(root_).up_to(snapshot.transcript, snapshot.transcript.size());
  entry->tokens = snapshot.ids.size();
  entry->name = name;
  entry->bytes = snapshot.bytes();
  entry->exact = snapshot.exact();
  entry->created = static_cast<int64_t>(std::time(nullptr));
  if (has_directory()) {
    const std::string stem =
        name.empty() ? fmt::format("{}{}", kUnnamed, hash_text(entry->key)) : fmt::format("{}{}", kNamed, name);
    entry->file = directory_ / fmt::format("{}{}", stem, kSuffix);
  }
  return entry;
}

void StateStore::Shelf::insert(const Shared& entry) {
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

void StateStore::Shelf::erase(const Shared& entry) {
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

void StateStore::Shelf::order(const Shared& entry) {
  const bool named = !entry->name.empty();
  if (entry->host && (!named || entry->file_bytes > 0)) host_order_[entry->used] = entry;
  if (entry->file_bytes > 0 && !named) disk_order_[entry->used] = entry;
}

void StateStore::Shelf::unorder(const Shared& entry) {
  host_order_.erase(entry->used);
  disk_order_.erase(entry->used);
}

void StateStore::Shelf::touch(const Shared& entry) {
  if (entry->gone) return;
  unorder(entry);
  entry->used = ++clock_;
  order(entry);
  if (entry->file_bytes > 0 && entry->name.empty()) set_used_now(entry->file);  // a named one: when it was made
}

void StateStore::Shelf::set_host(const Shared& entry, std::shared_ptr<const Snapshot> snapshot) {
  if (entry->gone || entry->host) return;
  entry->alive = snapshot;
  entry->host = std::move(snapshot);
  ++statistics_.host_states;
  statistics_.host_bytes += entry->bytes;
  order(entry);
}

void StateStore::Shelf::drop_host(const Shared& entry) {
  if (!entry->host) return;
  entry->host.reset();
  --statistics_.host_states;
  statistics_.host_bytes -= entry->bytes;
  host_order_.erase(entry->used);
}

void StateStore::Shelf::drop_file(const Shared& entry) {
  if (entry->file_bytes == 0) return;
  std::error_code ignored;
  fs::remove(entry->file, ignored);
  --statistics_.disk_states;
  statistics_.disk_bytes -= entry->file_bytes;
  entry->file_bytes = 0;
  disk_order_.erase(entry->used);
}

void StateStore::Shelf::evict_host() {
  while (statistics_.host_bytes > options_.host_bytes && !host_order_.empty()) {
    const Shared entry = host_order_.begin()->second;
    drop_host(entry);
    ++statistics_.host_evictions;
    if (entry->file_bytes == 0 && !entry->queued) erase(entry);
  }
}

// Frees space for a file that is about to be written.
void StateStore::Shelf::evict_files(uint64_t coming) {
  while (statistics_.disk_bytes + coming > options_.disk_bytes && !disk_order_.empty()) {
    const Shared entry = disk_order_.begin()->second;
    drop_file(entry);
    ++statistics_.disk_evictions;
    if (!entry->host) erase(entry);
  }
}

void StateStore::Shelf::enqueue(const Shared& entry, const std::shared_ptr<const Snapshot>& snapshot) {
  if (!has_directory()) return;
  // A disk that is slower than the snapshots come: those without a name are kept in memory alone.
  if (entry->name.empty() && pending_bytes_ + entry->bytes > std::max(options_.host_bytes, kLeastPendingBytes)) {
    if (!skipped_) warn("the disk of the state store is slower than the states come; some are kept in memory alone");
    skipped_ = true;
    return;
  }
  entry->queued = true;
  pending_bytes_ += entry->bytes;
  jobs_.push_back({entry, snapshot});
  wake_.notify_all();
}

std::shared_ptr<const Snapshot> StateStore::Shelf::made(std::vector<int32_t> ids, SlotContents contents,
                                                        std::string transcript) const {
  require(!ids.empty() && contents.logits && contents.tokens == static_cast<int64_t>(ids.size()),
          "state store: a state of {} tokens with {} ids; give all ids that the sequence has read", contents.tokens,
          ids.size());
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->ids = std::move(ids);
  snapshot->transcript = std::move(transcript);
  snapshot->contents = std::move(contents);
  if (options_.bf16)
    for (auto& [name, tensor] : snapshot->contents.tensors)
      if (may_be_rounded(name)) tensor = to_dtype(tensor, DType::bf16);
  return snapshot;
}

void StateStore::Shelf::put(std::shared_ptr<const Snapshot> snapshot) {
  const Shared entry = entry_of(*snapshot, {});
  const Lock lock(mutex_);
  ++statistics_.puts;
  const auto [begin, end] = by_key_.equal_range(entry->key);
  for (auto at = begin; at != end; ++at) {
    const Shared known = at->second;
    if (!known->name.empty() || known->tokens != entry->tokens) continue;
    if (known->transcript_key == entry->transcript_key) {
      set_host(known, std::move(snapshot));
      touch(known);
      evict_host();
      return;
    }
    erase(known);
    break;
  }
  insert(entry);
  set_host(entry, snapshot);
  enqueue(entry, snapshot);
  evict_host();
}

// In the order in which they should be tried.
std::vector<StateStore::Shelf::Candidate> StateStore::Shelf::candidates(const Prompt& prompt, size_t limit) const {
  std::vector<Candidate> found;
  uint64_t key = root_;
  size_t at = 0;
  for (const auto& [length, count] : lengths_) {
    if (length > std::min(prompt.ids.size(), limit)) break;
    for (; at < length; ++at) key = chained(key, prompt.ids[at]);
    const auto [begin, end] = by_key_.equal_range(key);
    for (auto entry = begin; entry != end; ++entry)
      if (entry->second->tokens == length) found.push_back({entry->second, length, false});
  }
  TranscriptHash transcript(root_);
  for (const Prompt::Boundary& boundary : prompt.boundaries) {
    if (boundary.ids > std::min(prompt.ids.size(), limit) || boundary.transcript > prompt.transcript.size()) break;
    if (boundary.transcript == 0) continue;
    const auto [begin, end] = by_transcript_.equal_range(transcript.up_to(prompt.transcript, boundary.transcript));
    for (auto entry = begin; entry != end; ++entry) found.push_back({entry->second, boundary.ids, true});
  }
  std::ranges::stable_sort(found, [](const Candidate& a, const Candidate& b) {
    return a.ids != b.ids ? a.ids > b.ids : a.by_transcript < b.by_transcript;
  });
  return found;
}

std::optional<StateStore::Match> StateStore::Shelf::find(const Prompt& prompt, size_t limit) {
  std::vector<Candidate> found;
  {
    const Lock lock(mutex_);
    found = candidates(prompt, limit);
  }
  const auto is_boundary = [&](const Snapshot& snapshot, size_t ids) {
    return std::ranges::any_of(prompt.boundaries, [&](const Prompt::Boundary& boundary) {
      return boundary.ids == ids && boundary.transcript == snapshot.transcript.size() &&
             prompt.transcript.compare(0, boundary.transcript, snapshot.transcript) == 0;
    });
  };
  for (const Candidate& candidate : found) {
    std::shared_ptr<const Snapshot> snapshot = snapshot_of(candidate.entry);
    if (!snapshot) continue;
    const bool same_ids = snapshot->ids.size() <= prompt.ids.size() && snapshot->ids.size() == candidate.ids &&
                          std::equal(snapshot->ids.begin(), snapshot->ids.end(), prompt.ids.begin());
    if (!same_ids && !(candidate.by_transcript && is_boundary(*snapshot, candidate.ids))) continue;
    const Lock lock(mutex_);
    touch(candidate.entry);
    ++statistics_.hits;
    statistics_.hit_tokens += static_cast<int64_t>(candidate.ids);
    return Match{std::move(snapshot), candidate.ids, !same_ids};
  }
  const Lock lock(mutex_);
  ++statistics_.misses;
  return std::nullopt;
}

std::shared_ptr<const Snapshot> StateStore::Shelf::load(const fs::path& file) const {
  const ThreadLimit limit(1);  // hashing must not take cores from the engine
  const SafetensorsReader reader(file);
  std::optional<ReadTokens> read = read_tokens(reader);
  require(read.has_value(), "{}: does not tell which tokens were read", file.string());
  std::vector<SlotContents> sequences = load_state(file, config_, fingerprint_);
  require(sequences.size() == 1 && sequences[0].tokens == static_cast<int64_t>(read->ids.size()),
          "{}: holds {} sequences, expected one with all of its ids", file.string(), sequences.size());
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->ids = std::move(read->ids);
  snapshot->transcript = std::move(read->text);
  snapshot->contents = std::move(sequences[0]);
  return snapshot;
}

std::shared_ptr<const Snapshot> StateStore::Shelf::snapshot_of(const Shared& entry) {
  fs::path file;
  {
    const Lock lock(mutex_);
    if (entry->host) return entry->host;
    if (auto alive = entry->alive.lock()) return alive;
    if (entry->gone || entry->file_bytes == 0) return nullptr;
    file = entry->file;
  }
  std::string reason;
  try {
    auto snapshot = load(file);
    const Lock lock(mutex_);
    set_host(entry, snapshot);
    evict_host();
    return snapshot;
  } catch (const Error& error) {
    reason = error.what();
  }
  const Lock lock(mutex_);
  if (entry->gone || entry->file_bytes == 0) return nullptr;  // evicted in the meantime
  if (is_closed_to_us(file)) {
    warn(fmt::format("a stored state cannot be read now: {}", reason));
    return nullptr;
  }
  ++statistics_.damaged_files;
  erase(entry);
  warn(fmt::format("a stored state was dropped: {}", reason));
  return nullptr;
}

void StateStore::Shelf::create(const std::string& name, std::shared_ptr<const Snapshot> snapshot) {
  check_state_name(name);
  const Shared entry = entry_of(*snapshot, name);
  const Lock lock(mutex_);
  if (names_.contains(name))
    throw StateExists(fmt::format("a state \"{}\" exists already; delete it first, or choose another name", name));
  const uint64_t most = has_directory() ? options_.disk_bytes : options_.host_bytes;
  if (named_bytes_ + entry->bytes > most)
    throw StoreFull(
        fmt::format("named states would need {} bytes, more than the limit of {}; delete some, or raise the limit",
                    named_bytes_ + entry->bytes, most));
  insert(entry);
  set_host(entry, snapshot);
  enqueue(entry, snapshot);
  evict_host();
}

std::shared_ptr<const Snapshot> StateStore::Shelf::at(std::span<const int32_t> ids) {
  std::vector<Shared> found;
  {
    const Lock lock(mutex_);
    const auto [begin, end] = by_key_.equal_range(key_of(ids));
    for (auto entry = begin; entry != end; ++entry) found.push_back(entry->second);
  }
  for (const Shared& entry : found) {
    const auto snapshot = snapshot_of(entry);
    if (snapshot && std::ranges::equal(snapshot->ids, ids)) return snapshot;
  }
  throw UnknownState("the state is no longer kept; send the request again and name it at once");
}

StateStore::Shelf::Shared StateStore::Shelf::named_entry(const std::string& name) const {
  const auto found = names_.find(name);
  if (found != names_.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [other, entry] : names_) known.push_back(other);
  const std::string nearest = nearest_name(name, known);
  throw UnknownState(nearest.empty()
                         ? fmt::format("unknown state \"{}\"; create it first", printable(name))
                         : fmt::format("unknown state \"{}\"; did you mean \"{}\"?", printable(name), nearest));
}

std::shared_ptr<const Snapshot> StateStore::Shelf::named(const std::string& name) {
  Shared entry;
  {
    const Lock lock(mutex_);
    entry = named_entry(name);
    touch(entry);
  }
  auto snapshot = snapshot_of(entry);
  if (!snapshot) throw UnknownState(fmt::format("the file of state \"{}\" was damaged; create it again", name));
  return snapshot;
}

void StateStore::Shelf::remove(const std::string& name) {
  const Lock lock(mutex_);
  erase(named_entry(name));
}

bool StateStore::Shelf::has(const std::string& name) const {
  const Lock lock(mutex_);
  return names_.contains(name);
}

NamedState StateStore::Shelf::describe(const std::string& name) const {
  const Lock lock(mutex_);
  const Entry& entry = *named_entry(name);
  return {entry.name,   static_cast<int64_t>(entry.tokens), entry.bytes, entry.exact, entry.file_bytes > 0,
          entry.created};
}

std::vector<NamedState> StateStore::Shelf::list() const {
  const Lock lock(mutex_);
  std::vector<NamedState> states;
  for (const auto& [name, entry] : names_)
    states.push_back(
        {name, static_cast<int64_t>(entry->tokens), entry->bytes, entry->exact, entry->file_bytes > 0, entry->created});
  return states;
}

std::vector<std::byte> StateStore::Shelf::exported(const Snapshot& snapshot) const {
  const ThreadLimit limit(1);
  return state_bytes({snapshot.restored()}, config_, fingerprint_, {{snapshot.ids, snapshot.transcript}});
}

std::shared_ptr<const Snapshot> StateStore::Shelf::imported(std::span<const std::byte> bytes) const {
  const ThreadLimit limit(1);
  const SafetensorsReader reader("state", bytes);
  std::optional<ReadTokens> read = read_tokens(reader);
  require(read.has_value(),
          "state: it does not tell which tokens were read; upload one that was downloaded from here or saved by "
          "`furious chat`");
  for (const int32_t id : read->ids)
    require(id >= 0 && id < config_.vocabulary, "state: token {}, expected 0 to {}; it is damaged", id,
            config_.vocabulary - 1);
  std::vector<SlotContents> sequences = load_state(bytes, config_, fingerprint_);
  require(sequences.size() == 1, "state: it holds {} sequences, expected one", sequences.size());
  return made(std::move(read->ids), std::move(sequences[0]), std::move(read->text));
}

// Files of other programs and of other models stay where they are.
void StateStore::Shelf::scan_file(const fs::path& file) {
  const std::string own = file.filename().string();
  const std::string_view name = middle_of(own, kNamed), key = middle_of(own, kUnnamed);
  if (!is_state_name(name) && !is_hash(key)) return;
  const SafetensorsReader reader(file);
  const auto model = reader.metadata().find("model");
  if (is_state_file(reader) && model != reader.metadata().end() && model->second != fingerprint_)
    return warn(fmt::format("{}: the state of another model is not used; remove it", file.string()));
  const std::optional<ReadTokens> read = read_tokens(reader);
  if (!read) return warn(fmt::format("{}: does not tell which tokens were read, so it is not used", file.string()));
  Snapshot snapshot;
  snapshot.ids = read->ids;
  snapshot.transcript = read->text;
  const Shared entry = entry_of(snapshot, std::string(name));
  if (name.empty() && file != entry->file)
    fail("{}: its name does not fit its tokens; it was renamed or damaged", file.string());
  for (const StoredTensor& tensor : reader.tensors()) {
    entry->bytes += tensor.bytes.size();
    if (tensor.dtype == "BF16") entry->exact = false;
  }
  struct stat status = {};
  require(::stat(file.c_str(), &status) == 0, "{}: cannot be read", file.string());
  entry->created = static_cast<int64_t>(status.st_mtime);
  entry->file_bytes = static_cast<uint64_t>(status.st_size);
  insert(entry);
  ++statistics_.disk_states;
  statistics_.disk_bytes += entry->file_bytes;
}

void StateStore::Shelf::scan() {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (fs::directory_iterator at(directory_, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->is_regular_file(ignored)) files.emplace_back(at->last_write_time(ignored), at->path());
  }
  require(!error, "{}: cannot be listed: {}", directory_.string(), error.message());
  std::ranges::sort(files);  // the oldest first, as they were used
  for (const auto& [time, file] : files) {
    try {
      scan_file(file);
    } catch (const Error& damage) {
      if (is_closed_to_us(file)) {
        warn(fmt::format("a stored state cannot be read: {}", damage.what()));
        continue;
      }
      ++statistics_.damaged_files;
      warn(fmt::format("a stored state was dropped: {}", damage.what()));
      std::error_code ignored;
      fs::remove(file, ignored);
    }
  }
  evict_files(0);
}

void StateStore::Shelf::write_pending() {
  const ThreadLimit limit(1);  // hashing must not take cores from the engine
  Lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) break;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    writing_ = true;
    write(lock, job);
    pending_bytes_ -= job.entry->bytes;
    writing_ = false;
    if (jobs_.empty()) idle_.notify_all();
  }
}

void StateStore::Shelf::write(Lock& lock, const Job& job) {
  const Shared& entry = job.entry;
  std::string problem;
  uint64_t written = 0;
  if (!entry->gone) {
    evict_files(entry->bytes);
    const bool fits = statistics_.disk_bytes + entry->bytes <= options_.disk_bytes;
    lock.unlock();
    try {
      require(fits, "{}: named states leave no space for it within the limit of {} bytes", entry->file.string(),
              options_.disk_bytes);
      save_state(entry->file, {job.snapshot->contents}, config_, fingerprint_,
                 {{job.snapshot->ids, job.snapshot->transcript}});
      set_used_now(entry->file);
      written = fs::file_size(entry->file);
    } catch (const std::exception& error) {  // an Error, or no memory for the bytes
      problem = error.what();
    }
    lock.lock();
  }
  entry->queued = false;
  if (!problem.empty()) {
    ++statistics_.failed_writes;
    if (!disk_failed_) warn(fmt::format("a state could not be written and is kept in memory alone: {}", problem));
    disk_failed_ = true;  // one line until a write succeeds
    if (!entry->gone && !entry->host) erase(entry);
    return;
  }
  if (written == 0) return;
  disk_failed_ = false;
  if (entry->gone) {  // while it was written
    std::error_code ignored;
    fs::remove(entry->file, ignored);
    return;
  }
  entry->file_bytes = written;
  ++statistics_.disk_states;
  statistics_.disk_bytes += written;
  order(entry);
  evict_files(0);
  evict_host();
}

void StateStore::Shelf::flush() {
  if (!has_directory()) return;
  Lock lock(mutex_);
  idle_.wait(lock, [&] { return jobs_.empty() && !writing_; });
}

StateStoreStatistics StateStore::Shelf::statistics() const {
  const Lock lock(mutex_);
  StateStoreStatistics now = statistics_;
  now.named_states = static_cast<int64_t>(names_.size());
  now.pending_writes = static_cast<int64_t>(jobs_.size()) + (writing_ ? 1 : 0);
  return now;
}

StateStore::StateStore(const ModelConfig& config, std::string model_fingerprint, StateStoreOptions options)
    : shelf_(std::make_unique<Shelf>(config, std::move(model_fingerprint), std::move(options))) {}

StateStore::~StateStore() = default;

std::shared_ptr<const Snapshot> StateStore::put(std::vector<int32_t> ids, SlotContents contents,
                                                std::string transcript) {
  auto snapshot = shelf_->made(std::move(ids), std::move(contents), std::move(transcript));
  shelf_->put(snapshot);
  return snapshot;
}

std::optional<StateStore::Match> StateStore::find(const Prompt& prompt, size_t limit) {
  return shelf_->find(prompt, limit);
}

void StateStore::create(const std::string& name, std::vector<int32_t> ids, SlotContents contents,
                        std::string transcript) {
  check_state_name(name);
  shelf_->create(name, shelf_->made(std::move(ids), std::move(contents), std::move(transcript)));
}

void StateStore::create(const std::string& name, std::shared_ptr<const Snapshot> snapshot) {
  shelf_->create(name, std::move(snapshot));
}

void StateStore::create_from(const std::string& name, std::span<const int32_t> ids) {
  check_state_name(name);
  shelf_->create(name, shelf_->at(ids));
}

void StateStore::fork(const std::string& name, const std::string& copy) {
  check_state_name(copy);
  shelf_->create(copy, shelf_->named(name));
}

void StateStore::remove(const std::string& name) {
  shelf_->remove(name);
}

bool StateStore::has(const std::string& name) const {
  return shelf_->has(name);
}

std::vector<NamedState> StateStore::list() const {
  return shelf_->list();
}

NamedState StateStore::describe(const std::string& name) const {
  return shelf_->describe(name);
}

std::shared_ptr<const Snapshot> StateStore::state(const std::string& name) {
  return shelf_->named(name);
}

std::vector<std::byte> StateStore::export_state(const std::string& name) {
  return shelf_->exported(*shelf_->named(name));
}

void StateStore::import_state(const std::string& name, std::span<const std::byte> bytes) {
  check_state_name(name);
  shelf_->create(name, shelf_->imported(bytes));
}

void StateStore::flush() {
  shelf_->flush();
}

StateStoreStatistics StateStore::statistics() const {
  return shelf_->statistics();
}

const StateStoreOptions& StateStore::options() const {
  return shelf_->options();
}

}  // namespace furious::serve
