#include "serve/state_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <system_error>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "base/parallel.h"
#include "decode/state_file.h"
#include "model/safetensors.h"

namespace furious::serve {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".state";
constexpr std::string_view kNamed = "n-", kUnnamed = "s-";

// What follows `prefix` in the name of a file of the store; empty where it is none.
std::string_view middle_of(std::string_view file, std::string_view prefix) {
  if (!file.starts_with(prefix) || !file.ends_with(kSuffix) || file.size() <= prefix.size() + kSuffix.size()) return {};
  return file.substr(prefix.size(), file.size() - prefix.size() - kSuffix.size());
}

bool is_hash(std::string_view text) {
  return text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Snapshot snapshot_of(ReadTokens read, SlotContents contents = {}) {
  return {std::move(read.ids), std::move(read.text), read.passes, std::move(contents)};
}

ReadTokens read_of(const Snapshot& snapshot) {
  return {snapshot.ids, snapshot.transcript, snapshot.passes};
}

}  // namespace

StateFiles::StateFiles(const ModelConfig& config, std::string fingerprint, const fs::path& directory)
    : config_(config), fingerprint_(std::move(fingerprint)) {
  if (directory.empty()) return;
  require(is_state_name(fingerprint_), "state store: \"{}\" is not the fingerprint of a model",
          printable(fingerprint_));
  directory_ = directory / fingerprint_;
  std::error_code error;
  fs::create_directories(directory_, error);
  require(!error, "{}: cannot be made: {}; choose another directory for states", directory_.string(), error.message());
  lock_.emplace(directory_);
  remove_leftovers(directory_);
}

fs::path StateFiles::file_of(const std::string& name, uint64_t number) const {
  if (!enabled()) return {};
  const std::string stem =
      name.empty() ? fmt::format("{}{}", kUnnamed, hash_text(number)) : fmt::format("{}{}", kNamed, name);
  return directory_ / fmt::format("{}{}", stem, kSuffix);
}

uint64_t StateFiles::save(const fs::path& file, const Snapshot& snapshot) const {
  save_state(file, {snapshot.contents}, config_, fingerprint_, {read_of(snapshot)});
  mark_used(file);
  return fs::file_size(file);
}

std::shared_ptr<const Snapshot> StateFiles::load(const fs::path& file) const {
  const ThreadLimit limit(1);  // hashing must not take cores from the engine
  const SafetensorsReader reader(file);
  std::optional<ReadTokens> read = read_tokens(reader);
  require(read.has_value(), "{}: does not tell which tokens were read", file.string());
  std::vector<SlotContents> sequences = load_state(file, config_, fingerprint_);
  require(sequences.size() == 1 && sequences[0].tokens == static_cast<int64_t>(read->ids.size()),
          "{}: holds {} sequences, expected one with all of its ids", file.string(), sequences.size());
  return std::make_shared<Snapshot>(snapshot_of(std::move(*read), std::move(sequences[0])));
}

void StateFiles::remove(const fs::path& file) {
  std::error_code ignored;
  fs::remove(file, ignored);
}

uint64_t StateFiles::free_bytes() const {
  std::error_code error;
  const fs::space_info space = fs::space(directory_, error);
  return error ? UINT64_MAX : space.available;
}

// Times that the system sets are those of its last tick, so that files of one tick would be in no order.
void StateFiles::mark_used(const fs::path& file) {
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[] = {now, now};
  ::utimensat(AT_FDCWD, file.c_str(), times, 0);
}

bool StateFiles::is_closed_to_us(const fs::path& file) {
  std::error_code ignored;
  return fs::exists(file, ignored) && !std::ifstream(file).is_open();
}

std::vector<std::byte> StateFiles::bytes_of(const Snapshot& snapshot) const {
  const ThreadLimit limit(1);
  return state_bytes({snapshot.restored()}, config_, fingerprint_, {read_of(snapshot)});
}

Snapshot StateFiles::from_bytes(std::span<const std::byte> bytes) const {
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
  return snapshot_of(std::move(*read), std::move(sequences[0]));
}

// What a file tells; nothing where it is not one of ours.
std::optional<StateFiles::Found> StateFiles::examined(const fs::path& file,
                                                      const std::function<void(const std::string&)>& warn) const {
  const std::string own = file.filename().string();
  const std::string_view name = middle_of(own, kNamed);
  if (!is_state_name(name) && !is_hash(middle_of(own, kUnnamed))) return std::nullopt;
  const SafetensorsReader reader(file);
  const auto model = reader.metadata().find("model");
  if (is_state_file(reader) && model != reader.metadata().end() && model->second != fingerprint_) {
    warn(fmt::format("{}: the state of another model is not used; remove it", file.string()));
    return std::nullopt;
  }
  std::optional<ReadTokens> read = read_tokens(reader);
  if (!read) {
    warn(fmt::format("{}: does not tell which tokens were read, so it is not used", file.string()));
    return std::nullopt;
  }
  Found found{file, std::string(name), snapshot_of(std::move(*read))};
  for (const StoredTensor& tensor : reader.tensors()) {
    found.bytes += tensor.bytes.size();
    if (tensor.dtype == "BF16") found.exact = false;
  }
  struct stat status = {};
  require(::stat(file.c_str(), &status) == 0, "{}: cannot be read", file.string());
  found.created = static_cast<int64_t>(status.st_mtime);
  found.file_bytes = static_cast<uint64_t>(status.st_size);
  return found;
}

int64_t StateFiles::scan(const std::function<void(const Found&)>& found,
                         const std::function<void(const std::string&)>& warn) const {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (fs::directory_iterator at(directory_, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->is_regular_file(ignored)) files.emplace_back(at->last_write_time(ignored), at->path());
  }
  require(!error, "{}: cannot be listed: {}", directory_.string(), error.message());
  std::ranges::sort(files);  // the oldest first, as they were used
  int64_t damaged = 0;
  for (const auto& [time, file] : files) {
    try {
      if (const std::optional<Found> one = examined(file, warn)) found(*one);
    } catch (const Error& damage) {
      if (is_closed_to_us(file)) {
        warn(fmt::format("a stored state cannot be read: {}", damage.what()));
        continue;
      }
      ++damaged;
      warn(fmt::format("a stored state was dropped: {}", damage.what()));
      remove(file);
    }
  }
  return damaged;
}

}  // namespace furious::serve
