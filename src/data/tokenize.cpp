#include "data/tokenize.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/names.h"
#include "base/parallel.h"
#include "data/progress.h"
#include "data/token_shards_json.h"
#include "data/tokenizer.h"
#include "data/utf8.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kNotResumed =
    "stopped; text from standard input cannot be resumed: run the same command to start again";
constexpr auto kCheckpointInterval = std::chrono::seconds(10);

// Consecutive tokens of one document.
struct Run {
  size_t tokens = 0;
  int64_t text_bytes = 0;
  bool first = true;
  bool last = true;
  Split split = Split::train;  // known where the document begins
};

struct EncodedBlock {
  std::vector<int32_t> tokens;
  std::vector<Run> runs;
  BlockCounts counts;
  CorpusPosition end;
  int64_t disk_bytes = 0;
  std::exception_ptr error;
};

class BlockEncoder {
 public:
  // Files from `first_test_file` on belong to the test split.
  BlockEncoder(const Tokenizer& tokenizer, const TokenizeOptions& options, int64_t first_test_file)
      : tokenizer_(tokenizer), options_(options), first_test_file_(first_test_file) {}

  EncodedBlock encode(Block& block) const {
    EncodedBlock result;
    result.counts =
        for_each_document_part(block, options_.reader, [&](const DocumentPart& part) { add(part, block, result); });
    result.end = block.end;
    result.disk_bytes = block.consumed;
    return result;
  }

 private:
  bool belongs_to_test(const DocumentPart& part, const Block& block) const {
    if (block.begin.file >= first_test_file_) return true;
    if (block.file.test_from >= 0) return block.is_held_out();
    return is_held_out(part.text, options_.seed, options_.test_fraction);
  }

  void add(const DocumentPart& part, const Block& block, EncodedBlock& result) const {
    Run run = {result.tokens.size(), static_cast<int64_t>(part.text.size()), part.first, part.last};
    if (part.first && belongs_to_test(part, block)) run.split = Split::test;
    if (part.first && options_.bos) result.tokens.push_back(tokenizer_.bos());
    const std::vector<int32_t> ids =
        part.first ? tokenizer_.encode(part.text) : tokenizer_.encode_continuation(part.text);
    result.tokens.insert(result.tokens.end(), ids.begin(), ids.end());
    if (part.last && tokenizer_.eos() >= 0) result.tokens.push_back(tokenizer_.eos());
    run.tokens = result.tokens.size() - run.tokens;
    result.runs.push_back(run);
  }

  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  const int64_t first_test_file_;
};

// Reads and encodes blocks on several threads, and returns them in the order of the corpus. An error is returned in the
// order of its block, whatever the threads do.
class EncodingPool {
 public:
  EncodingPool(BlockReader& reader, const BlockEncoder& encoder, int threads)
      : reader_(reader), encoder_(encoder), most_in_flight_(2 * int64_t{threads} + 2) {
    threads_.reserve(static_cast<size_t>(threads));
    // Works with fewer threads where the system allows no more; without any, next() encodes by itself.
    try {
      for (int i = 0; i < threads; ++i)
        threads_.emplace_back([this] {
          while (work()) {
          }
        });
    } catch (const std::system_error&) {
    }
  }
  ~EncodingPool() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  EncodingPool(const EncodingPool&) = delete;
  EncodingPool& operator=(const EncodingPool&) = delete;

  // False at the end of the corpus.
  bool next(EncodedBlock& block) {
    if (threads_.empty()) work();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ready_.contains(given_) || given_ == end_; });
    if (given_ == end_) return false;
    block = std::move(ready_.extract(given_++).mapped());
    lock.unlock();
    changed_.notify_all();
    if (block.error) std::rethrow_exception(block.error);
    return true;
  }

 private:
  // One block; false at the end of the corpus.
  bool work() {
    Block block;
    int64_t number = 0;
    if (!take(block, number)) return false;
    EncodedBlock result;
    try {
      result = encoder_.encode(block);
    } catch (...) {
      result.error = std::current_exception();
    }
    put(number, std::move(result));
    return true;
  }

  bool take(Block& block, int64_t& number) {
    const std::lock_guard reading(reading_);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || taken_ - given_ < most_in_flight_; });
      if (stopped_ || end_ >= 0) return false;
      number = taken_++;
    }
    EncodedBlock failed;
    try {
      if (reader_.next(block)) return true;
    } catch (...) {
      failed.error = std::current_exception();
    }
    const bool error = failed.error != nullptr;
    if (error) put(number, std::move(failed));
    const std::lock_guard lock(mutex_);
    end_ = error ? number + 1 : number;
    changed_.notify_all();
    return false;
  }

  void put(int64_t number, EncodedBlock result) {
    {
      const std::lock_guard lock(mutex_);
      ready_.emplace(number, std::move(result));
    }
    changed_.notify_all();
  }

  BlockReader& reader_;
  const BlockEncoder& encoder_;
  const int64_t most_in_flight_;
  std::mutex reading_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<int64_t, EncodedBlock> ready_;
  int64_t taken_ = 0;
  int64_t given_ = 0;
  int64_t end_ = -1;  // number of blocks, once it is known
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

// The shards of both splits that are being written, and the position in the corpus.
class Corpus {
 public:
  Corpus(const TokenizeOptions& options, const std::vector<InputFile>& files, int token_bytes) : folder_(options.out) {
    SavedProgress saved;
    if (fs::exists(progress_path())) saved = progress_from_json(read_text(progress_path()), progress_path(), files);
    check_finished_shards(folder_, saved, token_bytes);
    position_ = saved.position;
    split_ = saved.open_split;
    counts_ = saved.counts;
    for (const Split split : kSplits)
      writers_.emplace_back(folder_, split, token_bytes, options.shard_tokens,
                            std::move(saved.splits[static_cast<size_t>(split)]));
    last_checkpoint_ = Clock::now();
  }

  void write(const EncodedBlock& block) {
    std::span<const int32_t> tokens = block.tokens;
    for (const Run& run : block.runs) {
      if (run.first) split_ = run.split;
      SplitWriter& writer = writers_[static_cast<size_t>(split_)];
      writer.append(tokens.first(run.tokens), run.text_bytes);
      if (run.last) writer.end_document();
      tokens = tokens.subspan(run.tokens);
    }
    position_ = block.end;
    counts_.replaced += block.counts.replaced;
    counts_.empty += block.counts.empty;
    if (finished_shards() > checkpointed_shards_ || Clock::now() - last_checkpoint_ > kCheckpointInterval) checkpoint();
  }

  void checkpoint() {
    for (SplitWriter& writer : writers_) writer.checkpoint();
    write_text(progress_path(), to_json_text({position_, split_, counts_, {info(Split::train), info(Split::test)}}));
    last_checkpoint_ = Clock::now();
    checkpointed_shards_ = finished_shards();
  }

  void finish() {
    for (SplitWriter& writer : writers_) writer.finish();
  }

  const CorpusPosition& position() const { return position_; }
  const BlockCounts& counts() const { return counts_; }
  const SplitInfo& info(Split split) const { return writers_[static_cast<size_t>(split)].info(); }

 private:
  std::string progress_path() const { return folder_ + "/progress.json"; }
  size_t finished_shards() const { return info(Split::train).shards.size() + info(Split::test).shards.size(); }

  std::string folder_;
  CorpusPosition position_;
  Split split_ = Split::train;  // of the document that is open
  BlockCounts counts_;
  std::vector<SplitWriter> writers_;
  size_t checkpointed_shards_ = 0;
  Clock::time_point last_checkpoint_;
};

TokenizerInfo describe(const Tokenizer& tokenizer) {
  return {tokenizer.kind(), tokenizer.fingerprint(), tokenizer.vocabulary_size(), tokenizer.bos(), tokenizer.eos()};
}

// Everything that determines the shards, by the names of the options.
Json plan_of(const TokenizeOptions& options, const Tokenizer& tokenizer, const std::vector<InputFile>& files,
             int64_t train_files) {
  Json inputs = Json::array();
  for (const InputFile& file : files) {
    inputs.push_back({{"path", utf8_of_bytes(file.modified != 0 ? file.path : kStandardInput)},
                      {"size", file.size},
                      {"modified", file.modified}});
    if (static_cast<int64_t>(inputs.size()) > train_files) inputs.back()["test"] = true;
    if (file.test_from >= 0) inputs.back()["test_from"] = file.test_from;
    if (options.format) inputs.back()["format"] = name_of(file.format);
  }
  return {{"tokenizer", to_json(describe(tokenizer))},
          {"options",
           {{"field", utf8_of_bytes(options.reader.field)},
            {"split-on-blank-line", options.reader.split_on_blank_line},
            {"test-fraction", options.test_fraction},
            {"seed", options.seed},
            {"shard-tokens", options.shard_tokens},
            {"bos", options.bos}}},
          {"inputs", inputs}};
}

template <class Inputs>
Inputs without_times(Inputs inputs) {
  for (auto& input : inputs) input.erase("modified");
  return inputs;
}

std::string input_difference(const std::vector<JsonValue>& before, const nlohmann::json& now) {
  if (before.size() != now.size()) return fmt::format("{} input files were given, now {}", before.size(), now.size());
  for (size_t i = 0; i < now.size(); ++i) {
    if (before[i].json() == now[i]) continue;
    const std::string path = now[i].at("path"), old_path = before[i].at("path").text();
    const auto differs = [&](const char* key) {
      return before[i].json().value(key, nlohmann::json()) != now[i].value(key, nlohmann::json());
    };
    if (path == old_path && differs("format")) return fmt::format("input \"{}\" was read with another --format", path);
    if (path == old_path && !differs("size") && !differs("modified") && differs("test_from"))
      return fmt::format("another part of input \"{}\" was held out for the test split", path);
    if (path == old_path) return fmt::format("input \"{}\" has changed", path);
    return fmt::format("input {} was \"{}\", now \"{}\"", i + 1, printable(old_path), path);
  }
  return {};
}

// How the options or inputs `now` differ from those `before`; empty if they do not.
std::string difference(const JsonValue& before, const nlohmann::json& now) {
  const std::string old_tokenizer = before.at("tokenizer").at("fingerprint").text();
  const std::string new_tokenizer = now.at("tokenizer").at("fingerprint");
  if (old_tokenizer != new_tokenizer)
    return fmt::format("--tokenizer was {}, now {}", printable(old_tokenizer), new_tokenizer);
  for (const auto& [name, value] : now.at("options").items()) {
    const JsonValue old = before.at("options").at(name.c_str());
    if (old.json() != value)
      return fmt::format("--{} was {}, now {}", name, printable(old.json().dump()), value.dump());
  }
  const std::vector<JsonValue> old_inputs = before.at("inputs").items();
  const bool timed = !old_inputs.empty() && old_inputs[0].has("modified");
  return input_difference(old_inputs, timed ? now.at("inputs") : without_times(now.at("inputs")));
}

void require_same(const std::string& path, const Json& now, const std::string& folder, std::string_view state) {
  std::string reason;
  try {
    const nlohmann::json before = read_json(path);
    reason = difference(JsonValue(before, path), nlohmann::json(now));
  } catch (const Error& error) {
    fail("{}; delete the folder and start again", error.what());
  }
  require(reason.empty(), "\"{}\" holds {} of other options: {}; use the same options, another --out, or delete it",
          folder, state, reason);
}

Json manifest_of(const Json& plan, const Corpus& corpus, int token_bytes) {
  Json json = {{"format", "furious-tokens"},
               {"version", 1},
               {"tokenizer", plan.at("tokenizer")},
               {"token_bytes", token_bytes},
               {"replaced_utf8", corpus.counts().replaced}};
  for (const Split split : kSplits) json[name_of(split)] = to_json(corpus.info(split), split);
  json["options"] = plan.at("options");
  json["inputs"] = without_times(plan.at("inputs"));
  return with_checksum(json);
}

void check(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  require(options.test_fraction >= 0 && options.test_fraction < 1,
          "tokenize: --test-fraction {}, expected at least 0 and less than 1", options.test_fraction);
  require(options.shard_tokens >= 1, "tokenize: --shard-tokens {}, expected 1 or more", options.shard_tokens);
  require(!options.bos || tokenizer.bos() >= 0,
          "tokenize: --bos is set, but the tokenizer has no bos; leave --bos out, or use another tokenizer");
}

bool has_standard_input(const TokenizeOptions& options) {
  return std::ranges::count(options.inputs, kStandardInput) + std::ranges::count(options.test_inputs, kStandardInput) >
         0;
}

void remove_state(const std::string& folder) {
  fs::remove(folder + "/progress.json");
  fs::remove(folder + "/plan.json");
}

// Nothing was checkpointed, so the next command on this folder may have other options.
void forget_attempt(const std::string& folder) {
  remove_state(folder);
  for (const char* name : kTokenizerFiles) fs::remove(folder + "/" + name);
  for (const Split split : kSplits)
    for (int64_t shard = 0; fs::remove(folder + "/" + tokens_file(split, shard)); ++shard)
      for (const std::string& file : {documents_file(split, shard), checks_file(split, shard)})
        fs::remove(folder + "/" + file);
}

// The text of standard input in the folder while it is needed: its size must be known, and it is read more than once.
class StandardInput {
 public:
  StandardInput(std::vector<InputFile>& files, const std::string& folder, const TokenizeHooks& hooks)
      : path_(folder + "/standard-input") {
    for (InputFile& file : files) {
      if (file.path != kStandardInput) continue;
      try {
        copy(hooks);
      } catch (...) {
        remove();
        throw;
      }
      file.path = path_;
      file.size = static_cast<int64_t>(fs::file_size(path_));
    }
  }
  ~StandardInput() { remove(); }
  StandardInput(const StandardInput&) = delete;
  StandardInput& operator=(const StandardInput&) = delete;

 private:
  void remove() const {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  void copy(const TokenizeHooks& hooks) const {
    constexpr int kMilliseconds = 200;
    AppendFile file(path_, 0);
    std::vector<char> buffer(1 << 20);
    while (true) {
      if (hooks.stop && hooks.stop()) throw Stopped(std::string(kNotResumed));
      pollfd input = {STDIN_FILENO, POLLIN, 0};
      if (::poll(&input, 1, kMilliseconds) <= 0) continue;
      const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      require(got >= 0, "cannot read standard input: {}", std::strerror(errno));
      if (got == 0) break;
      file.append(buffer.data(), static_cast<size_t>(got));
    }
    file.close();
  }

  std::string path_;
};

void check_splits(const TokenizeOptions& options, const Corpus& corpus, size_t files, int64_t disk_bytes) {
  const auto documents = [&](Split split) { return corpus.info(split).total().documents; };
  const int64_t train = documents(Split::train), test = documents(Split::test);
  const double fraction = options.test_fraction;
  require(train + test > 0, "tokenize: the input has no text ({} files, {} bytes)", files, disk_bytes);
  require(train > 0,
          "tokenize: {} to the test split, none is left for training; use a --test-fraction below {}, more text, or "
          "--split-on-blank-line",
          test == 1 ? "the only document belongs" : fmt::format("all {} documents belong", test), fraction);
  require(test > 0 || options.test_inputs.empty(), "tokenize: the files of --test have no text");
  if (test > 0 || fraction == 0) return;
  const double larger = std::clamp(10.0 / static_cast<double>(train), 0.01, 0.5);
  fail(
      "tokenize: of {} document{} none belongs to the test split with --test-fraction {}; use {}files of your own with "
      "--test, or --test-fraction 0 for no test split",
      train, train == 1 ? "" : "s", fraction,
      train > 1 && fraction < larger ? fmt::format("--test-fraction {:.2}, ", larger) : "");
}

void write_corpus(const TokenizeOptions& options, const Tokenizer& tokenizer, const std::vector<InputFile>& files,
                  int64_t train_files, Corpus& corpus, const TokenizeHooks& hooks, TokenizeProgress& progress) {
  BlockReader reader(files, options.reader, corpus.position());
  const BlockEncoder encoder(tokenizer, options, train_files);
  EncodingPool pool(reader, encoder, options.threads > 0 ? options.threads : threads());
  EncodedBlock block;
  bool continued = corpus.position() != CorpusPosition();
  while (pool.next(block)) {
    corpus.write(block);
    if (std::exchange(continued, false)) progress.disk_bytes_start = block.disk_bytes;
    progress.disk_bytes = block.disk_bytes;
    progress.tokens += static_cast<int64_t>(block.tokens.size());
    for (const Run& run : block.runs) progress.text_bytes += run.text_bytes;
    if (hooks.progress) hooks.progress(progress);
    if (hooks.stop && hooks.stop()) {
      if (has_standard_input(options)) throw Stopped(std::string(kNotResumed));
      corpus.checkpoint();
      throw Stopped(fmt::format("stopped; run the same command to resume \"{}\"", options.out));
    }
  }
}

}  // namespace

TokenizeResult tokenize_corpus(const TokenizeOptions& options, const TokenizeHooks& hooks) {
  const auto tokenizer = load_tokenizer(options.tokenizer);
  check(options, *tokenizer);
  std::vector<InputFile> files = find_inputs(options.inputs, options.format);
  const auto train_files = static_cast<int64_t>(files.size());
  if (!options.test_inputs.empty()) {
    for (const InputFile& file : find_inputs(options.test_inputs, options.format)) {
      require(std::ranges::none_of(files, [&](const InputFile& other) { return other.path == file.path; }),
              "tokenize: \"{}\" is given twice, or for training and for --test; give each file once", file.path);
      files.push_back(file);
    }
  }
  const std::string& folder = options.out;
  const DirectoryToFill filled(folder);
  const DirectoryLock lock(folder);
  const bool from_pipe = has_standard_input(options);
  if (from_pipe) {
    require(!fs::exists(folder + "/manifest.json"),
            "\"{}\" holds a finished result, which standard input cannot be compared with; use another --out, or "
            "delete it",
            folder);
    forget_attempt(folder);
  }
  const StandardInput standard_input(files, folder, hooks);
  if (options.test_inputs.empty())
    hold_out_tail(files, options.reader, {options.test_fraction, options.seed, options.least_tail});
  const Json plan = plan_of(options, *tokenizer, files, train_files);

  TokenizeResult result;
  for (const InputFile& file : files) {
    result.progress.disk_bytes_total += file.size;
    if (file.test_from >= 0) result.divided = file;
  }
  if (fs::exists(folder + "/manifest.json")) {
    require_same(folder + "/manifest.json", plan, folder, "the result");
    remove_state(folder);
    result.manifest = read_manifest(folder);
    result.was_complete = true;
    return result;
  }
  if (fs::exists(folder + "/plan.json")) {
    require_same(folder + "/plan.json", plan, folder, "unfinished work");
  } else {
    fs::remove(folder + "/progress.json");
    write_text(folder + "/plan.json", plan.dump(1) + "\n");
  }
  bool useless = from_pipe;  // what an attempt that fails leaves
  try {
    if (tokenizer->kind() != "byte") save_tokenizer(folder, *tokenizer, options.bos);
    const int token_bytes = token_bytes_for(tokenizer->vocabulary_size());
    Corpus corpus(options, files, token_bytes);
    write_corpus(options, *tokenizer, files, train_files, corpus, hooks, result.progress);
    corpus.finish();
    useless = true;
    result.empty = corpus.counts().empty;
    check_splits(options, corpus, files.size(), result.progress.disk_bytes_total);
    useless = from_pipe;
    write_text(folder + "/manifest.json", manifest_of(plan, corpus, token_bytes).dump(1) + "\n");
  } catch (...) {
    if (useless || !fs::exists(folder + "/progress.json")) forget_attempt(folder);
    throw;
  }
  remove_state(folder);
  result.manifest = read_manifest(folder);
  return result;
}

}  // namespace furious
