#include "serve/state_store.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "serve/state_files.h"
#include "serve/state_index.h"

namespace furious::serve {
namespace {

// Of snapshots that wait to be written, beyond which those without a name are not written.
constexpr uint64_t kLeastPendingBytes = uint64_t{256} << 20;

// Decays are sums over the whole window: rounding them would change weights of old tokens, and they are small.
bool may_be_rounded(std::string_view name) {
  return !name.ends_with("log_decay");
}

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
}

NamedState described(const StateEntry& entry) {
  return {entry.name,   static_cast<int64_t>(entry.tokens), entry.bytes, entry.exact, entry.file_bytes > 0,
          entry.created};
}

}  // namespace

bool is_state_name(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::ranges::all_of(name, is_name_character) &&
         std::string_view("._-").find(name[0]) == std::string_view::npos;
}

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
  prompt.state_ids = ids.size();
  prompt.state_passes = passes;
  return prompt;
}

void check_state_name(std::string_view name) {
  require(is_state_name(name),
          "\"{}\" is not a name for a state; use letters, digits, '.', '_' and '-', at most 64, the first one a letter "
          "or digit",
          printable(name));
}

class StateStore::Parts {
 public:
  Parts(const ModelConfig& config, const std::string& fingerprint, StateStoreOptions options);
  ~Parts();

  std::shared_ptr<const Snapshot> made(Snapshot snapshot) const;
  void put(std::shared_ptr<const Snapshot> snapshot);
  std::optional<Match> find(const Prompt& prompt, std::span<const PassEnd> passes, size_t known);
  void create(const std::string& name, std::shared_ptr<const Snapshot> snapshot);
  std::shared_ptr<const Snapshot> at(std::span<const int32_t> ids);
  std::shared_ptr<const Snapshot> named(const std::string& name);
  void flush();
  StateStoreStatistics statistics() const;

  const StateStoreOptions options;
  StateFiles files;
  mutable std::mutex mutex;
  StateIndex index;  // with the lock held

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Shared = StateIndex::Shared;
  struct Job {
    Shared entry;
    std::shared_ptr<const Snapshot> snapshot;
  };

  void warn(const std::string& line) const;
  void scan();
  Shared new_entry(const Snapshot& snapshot, const std::string& name) const;
  struct Fetched {
    std::shared_ptr<const Snapshot> snapshot;  // nullptr: it is gone, or was damaged
    StateTier tier = StateTier::host;
  };
  // Reads the file where it must.
  Fetched fetch(const Shared& entry);
  void write_pending();
  // With the lock held.
  void enqueue(const Shared& entry, const std::shared_ptr<const Snapshot>& snapshot);
  void enqueue_unwritten();
  void write(Lock& lock, const Job& job);

  std::condition_variable wake_, idle_;
  uint64_t pending_bytes_ = 0;
  std::deque<Job> jobs_;
  bool writing_ = false, stopping_ = false, disk_failed_ = false, skipped_ = false;
  std::thread writer_;
};

StateStore::Parts::Parts(const ModelConfig& config, const std::string& fingerprint, StateStoreOptions own)
    : options(std::move(own)),
      files(config, fingerprint, options.directory),
      index(fingerprint, options.host_bytes, options.disk_bytes) {
  if (!files.enabled()) return;
  scan();
  writer_ = std::thread([this] { write_pending(); });
}

StateStore::Parts::~Parts() {
  {
    const Lock lock(mutex);
    enqueue_unwritten();
    stopping_ = true;
    wake_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
}

void StateStore::Parts::warn(const std::string& line) const {
  if (options.warn)
    options.warn(line);
  else
    fmt::print(stderr, "warning: {}\n", line);
}

StateStore::Parts::Shared StateStore::Parts::new_entry(const Snapshot& snapshot, const std::string& name) const {
  Shared entry = index.new_entry(snapshot, name);
  entry->file = files.file_of(name, entry->number());
  return entry;
}

void StateStore::Parts::scan() {
  const auto take = [&](const StateFiles::Found& found) {
    const Shared entry = new_entry(found.snapshot, found.name);
    require(!found.name.empty() || found.file == entry->file,
            "{}: its name does not fit its tokens; it was renamed or damaged", found.file.string());
    entry->bytes += found.bytes;
    entry->exact = found.exact;
    entry->created = found.created;
    index.insert(entry);
    index.set_file(entry, found.file_bytes);
  };
  index.statistics.damaged_files += files.scan(take, [&](const std::string& line) { warn(line); });
  index.evict_files(0);
}

void StateStore::Parts::enqueue(const Shared& entry, const std::shared_ptr<const Snapshot>& snapshot) {
  if (!files.enabled()) return;
  // A disk that is slower than the snapshots come: those without a name are kept in memory alone.
  if (entry->name.empty() && pending_bytes_ + entry->bytes > std::max(options.host_bytes, kLeastPendingBytes)) {
    if (!skipped_) warn("the disk of the state store is slower than the states come; some are kept in memory alone");
    skipped_ = true;
    return;
  }
  entry->queued = true;
  pending_bytes_ += entry->bytes;
  jobs_.push_back({entry, snapshot});
  wake_.notify_all();
}

// Named states whose writes failed, where there is space for them now: a disk that is nearly full is not filled again
// with what does not fit.
void StateStore::Parts::enqueue_unwritten() {
  std::optional<uint64_t> space;
  for (const auto& [name, entry] : index.names()) {
    if (!entry->unwritten || entry->queued) continue;
    if (!space) space = files.free_bytes();
    if (entry->bytes > *space) continue;
    *space -= entry->bytes;
    enqueue(entry, entry->host);
  }
}

std::shared_ptr<const Snapshot> StateStore::Parts::made(Snapshot snapshot) const {
  const SlotContents& contents = snapshot.contents;
  require(!snapshot.ids.empty() && contents.logits && contents.tokens == static_cast<int64_t>(snapshot.ids.size()),
          "state store: a state of {} tokens with {} ids; give all ids that the sequence has read", contents.tokens,
          snapshot.ids.size());
  // What is not known to have been read in the same way is another state, unless it comes to the same.
  if (snapshot.passes == 0)
    snapshot.passes = after_pass(hash_of_large(std::as_bytes(std::span(
                                     contents.logits.data<float>(), static_cast<size_t>(contents.logits.elements())))),
                                 snapshot.ids.size());
  if (options.bf16)
    for (auto& [name, tensor] : snapshot.contents.tensors)
      if (may_be_rounded(name)) tensor = to_dtype(tensor, DType::bf16);
  return std::make_shared<const Snapshot>(std::move(snapshot));
}

void StateStore::Parts::put(std::shared_ptr<const Snapshot> snapshot) {
  const Shared entry = new_entry(*snapshot, {});
  const Lock lock(mutex);
  ++index.statistics.puts;
  if (const Shared known = index.same_as(*entry)) {
    if (known->transcript_key == entry->transcript_key) {
      index.set_host(known, std::move(snapshot));
      index.touch(known);
      index.evict_host();
      return;
    }
    index.erase(known);
  }
  index.insert(entry);
  index.set_host(entry, snapshot);
  enqueue(entry, snapshot);
  index.evict_host();
}

std::optional<StateStore::Match> StateStore::Parts::find(const Prompt& prompt, std::span<const PassEnd> passes,
                                                         size_t known) {
  std::vector<StateIndex::Candidate> found;
  {
    const Lock lock(mutex);
    found = index.candidates(prompt, passes);
  }
  const auto is_boundary = [&](const Snapshot& snapshot, size_t ids) {
    return std::ranges::any_of(prompt.boundaries, [&](const Prompt::Boundary& boundary) {
      return boundary.ids == ids && boundary.transcript == snapshot.transcript.size() &&
             prompt.transcript.compare(0, boundary.transcript, snapshot.transcript) == 0;
    });
  };
  for (const StateIndex::Candidate& candidate : found) {
    if (candidate.ids <= known) return std::nullopt;  // the longest come first
    auto [snapshot, tier] = fetch(candidate.entry);
    if (!snapshot) continue;
    const bool same_ids = snapshot->ids.size() <= prompt.ids.size() && snapshot->ids.size() == candidate.ids &&
                          std::equal(snapshot->ids.begin(), snapshot->ids.end(), prompt.ids.begin());
    if (!same_ids && !(candidate.by_transcript && is_boundary(*snapshot, candidate.ids))) continue;
    const Lock lock(mutex);
    index.touch(candidate.entry);
    ++index.statistics.hits;
    index.statistics.hit_tokens += static_cast<int64_t>(candidate.ids);
    return Match{std::move(snapshot), candidate.ids, !same_ids, tier};
  }
  if (known > 0) return std::nullopt;
  const Lock lock(mutex);
  ++index.statistics.misses;
  return std::nullopt;
}

StateStore::Parts::Fetched StateStore::Parts::fetch(const Shared& entry) {
  std::filesystem::path file;
  {
    const Lock lock(mutex);
    if (entry->host) return {entry->host};
    if (auto alive = entry->alive.lock()) return {alive};
    if (entry->gone || entry->file_bytes == 0) return {};
    file = entry->file;
  }
  std::string reason;
  try {
    auto snapshot = files.load(file);
    const Lock lock(mutex);
    ++index.statistics.loads;
    index.set_host(entry, snapshot);
    index.evict_host();
    return {snapshot, StateTier::disk};
  } catch (const Error& error) {
    reason = error.what();
  }
  const Lock lock(mutex);
  if (entry->gone || entry->file_bytes == 0) return {};  // evicted in the meantime
  if (StateFiles::is_closed_to_us(file)) {
    warn(fmt::format("a stored state cannot be read now: {}", reason));
    return {};
  }
  ++index.statistics.damaged_files;
  index.erase(entry);
  warn(fmt::format("a stored state was dropped: {}", reason));
  return {};
}

void StateStore::Parts::create(const std::string& name, std::shared_ptr<const Snapshot> snapshot) {
  check_state_name(name);
  const Shared entry = new_entry(*snapshot, name);
  const Lock lock(mutex);
  if (index.names().contains(name))
    throw StateExists(fmt::format("a state \"{}\" exists already; delete it first, or choose another name", name));
  const uint64_t most = files.enabled() ? options.disk_bytes : options.host_bytes;
  if (index.named_bytes() + entry->bytes > most)
    throw StoreFull(
        fmt::format("named states would need {} bytes, more than the limit of {}; delete some, or raise the limit",
                    index.named_bytes() + entry->bytes, most));
  index.insert(entry);
  index.set_host(entry, snapshot);
  enqueue(entry, snapshot);
  index.evict_host();
}

std::shared_ptr<const Snapshot> StateStore::Parts::at(std::span<const int32_t> ids) {
  std::vector<Shared> found;
  {
    const Lock lock(mutex);
    found = index.with_ids(ids);
  }
  for (const Shared& entry : found) {
    const auto snapshot = fetch(entry).snapshot;
    if (snapshot && std::ranges::equal(snapshot->ids, ids)) return snapshot;
  }
  throw UnknownState("the state is no longer kept; send the request again and name it at once");
}

std::shared_ptr<const Snapshot> StateStore::Parts::named(const std::string& name) {
  Shared entry;
  {
    const Lock lock(mutex);
    entry = index.named(name);
    index.touch(entry);
  }
  auto snapshot = fetch(entry).snapshot;
  if (!snapshot) throw UnknownState(fmt::format("the file of state \"{}\" was damaged; create it again", name));
  return snapshot;
}

void StateStore::Parts::write_pending() {
  const ThreadLimit limit(1);  // hashing must not take cores from the engine
  Lock lock(mutex);
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

void StateStore::Parts::write(Lock& lock, const Job& job) {
  const Shared& entry = job.entry;
  std::string problem;
  uint64_t written = 0;
  if (!entry->gone) {
    index.evict_files(entry->bytes);
    const bool fits = index.statistics.disk_bytes + entry->bytes <= options.disk_bytes;
    lock.unlock();
    try {
      require(fits, "{}: named states leave no space for it within the limit of {} bytes", entry->file.string(),
              options.disk_bytes);
      written = files.save(entry->file, *job.snapshot);
    } catch (const std::exception& error) {  // an Error, or no memory for the bytes
      problem = error.what();
    }
    lock.lock();
  }
  entry->queued = false;
  if (!problem.empty()) {
    ++index.statistics.failed_writes;
    // One line until a write succeeds, and none for another try.
    if (!disk_failed_ && !entry->unwritten)
      warn(fmt::format("a state could not be written and is kept in memory alone: {}", problem));
    disk_failed_ = true;
    entry->unwritten = !entry->name.empty();
    if (!entry->gone && !entry->host) index.erase(entry);
    return;
  }
  if (written == 0) return;
  disk_failed_ = entry->unwritten = false;
  if (entry->gone) return StateFiles::remove(entry->file);  // while it was written
  index.set_file(entry, written);
  index.evict_files(0);
  index.evict_host();
  enqueue_unwritten();
}

void StateStore::Parts::flush() {
  if (!files.enabled()) return;
  Lock lock(mutex);
  enqueue_unwritten();
  idle_.wait(lock, [&] { return jobs_.empty() && !writing_; });
}

StateStoreStatistics StateStore::Parts::statistics() const {
  const Lock lock(mutex);
  StateStoreStatistics now = index.statistics;
  now.named_states = static_cast<int64_t>(index.names().size());
  now.pending_writes = static_cast<int64_t>(jobs_.size()) + (writing_ ? 1 : 0);
  return now;
}

StateStore::StateStore(const ModelConfig& config, std::string model_fingerprint, StateStoreOptions options)
    : parts_(std::make_unique<Parts>(config, model_fingerprint, std::move(options))) {}

StateStore::~StateStore() = default;

std::shared_ptr<const Snapshot> StateStore::put(std::vector<int32_t> ids, SlotContents contents, std::string transcript,
                                                uint64_t passes) {
  auto snapshot = parts_->made({std::move(ids), std::move(transcript), passes, std::move(contents)});
  parts_->put(snapshot);
  return snapshot;
}

std::optional<StateStore::Match> StateStore::find(const Prompt& prompt, std::span<const PassEnd> passes, size_t known) {
  return parts_->find(prompt, passes, known);
}

void StateStore::create(const std::string& name, std::vector<int32_t> ids, SlotContents contents,
                        std::string transcript, uint64_t passes) {
  check_state_name(name);
  parts_->create(name, parts_->made({std::move(ids), std::move(transcript), passes, std::move(contents)}));
}

void StateStore::create(const std::string& name, std::shared_ptr<const Snapshot> snapshot) {
  parts_->create(name, std::move(snapshot));
}

void StateStore::create_from(const std::string& name, std::span<const int32_t> ids) {
  check_state_name(name);
  parts_->create(name, parts_->at(ids));
}

void StateStore::fork(const std::string& name, const std::string& copy) {
  check_state_name(copy);
  parts_->create(copy, parts_->named(name));
}

void StateStore::remove(const std::string& name) {
  const std::lock_guard lock(parts_->mutex);
  parts_->index.erase(parts_->index.named(name));
}

bool StateStore::has(const std::string& name) const {
  const std::lock_guard lock(parts_->mutex);
  return parts_->index.names().contains(name);
}

std::vector<NamedState> StateStore::list() const {
  const std::lock_guard lock(parts_->mutex);
  std::vector<NamedState> states;
  for (const auto& [name, entry] : parts_->index.names()) states.push_back(described(*entry));
  return states;
}

NamedState StateStore::describe(const std::string& name) const {
  const std::lock_guard lock(parts_->mutex);
  return described(*parts_->index.named(name));
}

std::shared_ptr<const Snapshot> StateStore::state(const std::string& name) {
  return parts_->named(name);
}

std::vector<std::byte> StateStore::export_state(const std::string& name) {
  return parts_->files.bytes_of(*parts_->named(name));
}

void StateStore::import_state(const std::string& name, std::span<const std::byte> bytes) {
  check_state_name(name);
  parts_->create(name, parts_->made(parts_->files.from_bytes(bytes)));
}

void StateStore::flush() {
  parts_->flush();
}

StateStoreStatistics StateStore::statistics() const {
  return parts_->statistics();
}

const StateStoreOptions& StateStore::options() const {
  return parts_->options;
}

}  // namespace furious::serve
