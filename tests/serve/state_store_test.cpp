#include "serve/state_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/file.h"
#include "decode/state_file.h"
#include "serve/snapshots.h"
#include "temporary_directory.h"

namespace furious::serve {
namespace {

namespace fs = std::filesystem;
using furious::testing::expect_error;
using furious::testing::Random;
using furious::testing::TemporaryDirectory;

const std::string kModel = "0123456789abcdef";

class StateStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<StateStore> memory_store(uint64_t bytes = 1 << 20) {
    return std::make_unique<StateStore>(small_config(), kModel,
                                        StateStoreOptions{.host_bytes = bytes, .warn = warnings.sink()});
  }
  std::unique_ptr<StateStore> disk_store(uint64_t host = 1 << 20, uint64_t disk = 1 << 20,
                                         const std::string& model = kModel) {
    return std::make_unique<StateStore>(
        small_config(), model,
        StateStoreOptions{.host_bytes = host, .directory = folder.path(), .disk_bytes = disk, .warn = warnings.sink()});
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(folder / kModel)) all.push_back(entry.path());
    std::ranges::sort(all);
    return all;
  }
  // Puts states of these ids, which have one length, and returns the bytes of one.
  static uint64_t put(StateStore& store, const std::vector<Ids>& all) {
    for (const Ids& ids : all) store.put(ids, contents_of(ids));
    const auto match = store.find(prompt_of(all.back()));
    return match ? match->snapshot->bytes() : 0;
  }
  static bool keeps(StateStore& store, const Ids& ids) {
    const auto match = store.find(prompt_of(ids));
    if (!match || match->ids != ids.size()) return false;
    expect_equal(match->snapshot->restored(), contents_of(ids));
    return true;
  }

  TemporaryDirectory folder;
  Warnings warnings;
};

TEST_F(StateStoreTest, FindsTheLongestPrefix) {
  const auto store = memory_store();
  EXPECT_FALSE(store->find(prompt_of({1, 2, 3})));
  for (const Ids& ids : {Ids{1, 2}, Ids{1, 2, 3, 4}, Ids{1, 2, 9}, Ids{7}}) store->put(ids, contents_of(ids));
  const auto found = [&](const Ids& ids) {
    const auto match = store->find(prompt_of(ids));
    if (!match) return Ids{};
    EXPECT_EQ(match->ids, match->snapshot->ids.size());
    EXPECT_FALSE(match->by_transcript);
    expect_equal(match->snapshot->restored(), contents_of(match->snapshot->ids));
    return match->snapshot->ids;
  };
  EXPECT_EQ(found({1, 2, 3, 4, 5}), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(found({1, 2, 3, 4}), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(found({1, 2, 3, 9}), (Ids{1, 2}));
  EXPECT_EQ(found({1, 2, 9, 3}), (Ids{1, 2, 9}));
  EXPECT_EQ(found({7, 1}), (Ids{7}));
  EXPECT_EQ(found({1}), Ids{});
  EXPECT_EQ(found({2, 1}), Ids{});
  EXPECT_EQ(found({}), Ids{});
  const StateStoreStatistics statistics = store->statistics();
  EXPECT_EQ(statistics.hits, 5);
  EXPECT_EQ(statistics.misses, 4);
  EXPECT_EQ(statistics.hit_tokens, 4 + 4 + 2 + 3 + 1);
  EXPECT_EQ(statistics.host_states, 4);
}

TEST_F(StateStoreTest, FindsRandomPrefixesLikeASearch) {
  Random random(3);
  const auto store = memory_store();
  std::vector<Ids> all;
  const auto random_ids = [&](int64_t longest) {
    Ids ids(static_cast<size_t>(random.integer(1, longest)));
    for (int32_t& id : ids) id = static_cast<int32_t>(random.integer(0, 1));
    return ids;
  };
  for (int i = 0; i < 60; ++i) {
    all.push_back(random_ids(12));
    store->put(all.back(), contents_of(all.back()));
  }
  int found = 0;
  for (int i = 0; i < 300; ++i) {
    const Ids ids = random_ids(16);
    size_t longest = 0;
    for (const Ids& one : all)
      if (one.size() <= ids.size() && std::equal(one.begin(), one.end(), ids.begin()))
        longest = std::max(longest, one.size());
    const auto match = store->find(prompt_of(ids));
    ASSERT_EQ(match ? match->ids : 0, longest);
    found += match.has_value();
  }
  EXPECT_GT(found, 100);
}

// A client sends back text: its ids may differ from those that were generated.
TEST_F(StateStoreTest, FindsByTranscriptAtBoundaries) {
  const auto store = disk_store();
  store->put({1, 2, 3}, contents_of({1, 2, 3}), "question;");
  store->put({1, 2, 3, 4, 5}, contents_of({1, 2, 3, 4, 5}), "question;answer;");
  store->put({1, 2, 3, 8, 8}, contents_of({1, 2, 3, 8, 8}), "question;another;");
  Prompt prompt{{1, 2, 3, 45, 6, 7}, "question;answer;more", {{3, 9}, {4, 16}, {6, 20}}};
  auto match = store->find(prompt);
  ASSERT_TRUE(match);
  EXPECT_TRUE(match->by_transcript);
  EXPECT_EQ(match->ids, 4u);
  EXPECT_EQ(match->snapshot->ids, (Ids{1, 2, 3, 4, 5}));

  prompt.boundaries = {{3, 9}, {6, 20}};  // no boundary after the answer
  match = store->find(prompt);
  ASSERT_TRUE(match);
  EXPECT_EQ(match->ids, 3u);

  prompt = {{1, 2, 3, 45, 6, 7}, "question;answers;mor", {{3, 9}, {4, 17}, {6, 20}}};
  EXPECT_EQ(store->find(prompt)->ids, 3u);

  prompt = {{1, 2, 3, 4, 5, 6}, "question;answer;more", {{3, 9}, {5, 16}, {6, 20}}};  // equal both ways
  match = store->find(prompt);
  EXPECT_EQ(match->ids, 5u);
  EXPECT_FALSE(match->by_transcript);
}

TEST_F(StateStoreTest, KeepsAStateThatComesAgain) {
  const auto store = disk_store();
  for (int i = 0; i < 3; ++i) store->put({1, 2}, contents_of({1, 2}), "text");
  EXPECT_EQ(store->statistics().host_states, 1);
  store->put({1, 2}, contents_of({1, 2}), "another transcript");
  store->flush();
  EXPECT_EQ(store->statistics().host_states, 1);
  EXPECT_EQ(files().size(), 1u);
  EXPECT_EQ(store->find(prompt_of({1, 2}))->snapshot->transcript, "another transcript");
}

TEST_F(StateStoreTest, ForgetsTheLeastRecentlyUsed) {
  const uint64_t one = put(*memory_store(), {{1}});
  const auto store = memory_store(3 * one);
  put(*store, {{1}, {2}, {3}});
  EXPECT_TRUE(keeps(*store, {1}));
  put(*store, {{4}});
  EXPECT_FALSE(keeps(*store, {2}));
  EXPECT_TRUE(keeps(*store, {1}));
  EXPECT_TRUE(keeps(*store, {3}));
  EXPECT_TRUE(keeps(*store, {4}));
  put(*store, {{5}, {6}});
  EXPECT_FALSE(keeps(*store, {1}));
  EXPECT_FALSE(keeps(*store, {3}));
  EXPECT_TRUE(keeps(*store, {4}));
  const StateStoreStatistics statistics = store->statistics();
  EXPECT_EQ(statistics.host_evictions, 3);
  EXPECT_EQ(statistics.host_states, 3);
  EXPECT_EQ(statistics.host_bytes, 3 * one);
  const auto none = memory_store(one - 1);
  put(*none, {{1}});
  EXPECT_EQ(none->statistics().host_bytes, 0u);
}

TEST_F(StateStoreTest, ReadsFromTheDiskWhatLeftTheMemory) {
  const auto store = disk_store(0);
  put(*store, {{1, 2}, {3, 4}});
  store->flush();
  EXPECT_EQ(store->statistics().host_states, 0);
  EXPECT_EQ(store->statistics().disk_states, 2);
  EXPECT_TRUE(keeps(*store, {1, 2}));
  EXPECT_TRUE(keeps(*store, {3, 4}));
  EXPECT_TRUE(warnings.lines().empty());
}

TEST_F(StateStoreTest, LimitsTheBytesOfFiles) {
  put(*disk_store(), {{1}});
  const uint64_t one = fs::file_size(files().at(0));
  fs::remove(files().at(0));
  const auto store = disk_store(0, 3 * one + one / 2);
  for (const int32_t id : {1, 2, 3}) put(*store, {{id}}), store->flush();
  EXPECT_TRUE(keeps(*store, {1}));
  put(*store, {{4}});
  store->flush();
  EXPECT_EQ(files().size(), 3u);
  EXPECT_FALSE(keeps(*store, {2}));
  EXPECT_TRUE(keeps(*store, {1}));
  EXPECT_EQ(store->statistics().disk_evictions, 1);
  EXPECT_LE(store->statistics().disk_bytes, 3 * one + one / 2);
}

TEST_F(StateStoreTest, SurvivesARestart) {
  const Ids document = {5, 6, 7, 8};
  {
    const auto store = disk_store();
    for (const int32_t id : {1, 2, 3}) {
      put(*store, {{id, id}});
      store->flush();
    }
    EXPECT_TRUE(keeps(*store, {1, 1}));
    store->put({1, 1, 4}, contents_of({1, 1, 4}), "chat");
    store->create("document", document, contents_of(document), "text");
  }  // writes what is pending
  const auto store = disk_store();
  EXPECT_EQ(store->statistics().disk_states, 5);
  EXPECT_TRUE(keeps(*store, {2, 2}));
  EXPECT_TRUE(keeps(*store, document));
  EXPECT_EQ(store->find({{9, 9, 9}, "chat;", {{2, 4}, {3, 5}}})->snapshot->ids, (Ids{1, 1, 4}));
  const NamedState named = store->describe("document");
  EXPECT_EQ(named.tokens, 4);
  EXPECT_TRUE(named.on_disk);
  EXPECT_TRUE(named.exact);
  EXPECT_GT(named.created, 1'600'000'000);
  expect_equal(store->state("document")->restored(), contents_of(document));
  EXPECT_EQ(store->state("document")->transcript, "text");
  EXPECT_TRUE(warnings.lines().empty());
}

// The order of use is that of before the restart.
TEST_F(StateStoreTest, RestartsWithLessSpace) {
  {
    const auto store = disk_store();
    for (const int32_t id : {1, 2, 3}) {
      put(*store, {{id}});
      store->flush();
    }
    EXPECT_TRUE(keeps(*store, {1}));
    store->create("name", {2, 2}, contents_of({2, 2}));
  }
  const uint64_t one = fs::file_size(files().at(0));
  const auto store = disk_store(1 << 20, 2 * one + one / 2);
  EXPECT_FALSE(keeps(*store, {2}));
  EXPECT_FALSE(keeps(*store, {3}));
  EXPECT_TRUE(keeps(*store, {1}));
  EXPECT_TRUE(store->has("name"));
}

TEST_F(StateStoreTest, BelongsToOneModelAndOneProcess) {
  const auto store = disk_store();
  put(*store, {{1}});
  store->flush();
  EXPECT_FALSE(keeps(*disk_store(1 << 20, 1 << 20, "fedcba9876543210"), {1}));
  expect_error([&] { disk_store(); }, {"in use by another process"});
  expect_error([&] { disk_store(1, 1, "../up"); }, {"not the fingerprint"});
}

TEST_F(StateStoreTest, NamedStates) {
  const auto store = disk_store();
  store->create("b.2", {1, 2}, contents_of({1, 2}), "t");
  store->create("a", {3}, contents_of({3}));
  store->fork("b.2", "copy-1");
  EXPECT_TRUE(keeps(*store, {1, 2}));
  std::vector<std::string> names;
  for (const NamedState& state : store->list()) names.push_back(state.name);
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b.2", "copy-1"}));
  EXPECT_THROW(store->create("a", {4}, contents_of({4})), StateExists);
  EXPECT_THROW(store->fork("a", "b.2"), StateExists);
  EXPECT_THROW(store->fork("c", "d"), UnknownState);
  EXPECT_THROW(store->state("c"), UnknownState);
  EXPECT_THROW(store->remove("c"), UnknownState);
  EXPECT_THROW(store->describe("c"), UnknownState);
  EXPECT_THROW(store->export_state("c"), UnknownState);
  expect_error([&] { store->state("copy-2"); }, {"did you mean \"copy-1\""});
  store->remove("b.2");
  EXPECT_FALSE(store->has("b.2"));
  EXPECT_EQ(store->state("copy-1")->ids, (Ids{1, 2}));
  store->create("b.2", {9}, contents_of({9}));
  store->flush();
  EXPECT_EQ(store->state("b.2")->ids, (Ids{9}));
  EXPECT_EQ(files().size(), 3u);
  store->put({4, 4}, contents_of({4, 4}));
  store->create_from("end", Ids{4, 4});
  expect_equal(store->state("end")->restored(), contents_of({4, 4}));
  EXPECT_THROW(store->create_from("no", Ids{4}), UnknownState);
  EXPECT_EQ(store->statistics().named_states, 4);
}

TEST_F(StateStoreTest, RefusesNamesThatAreNone) {
  const auto store = disk_store();
  for (const std::string& name :
       {std::string(), std::string("../x"), std::string("a/b"), std::string(".."), std::string(".hidden"),
        std::string("-option"), std::string("a b"), std::string("a\0b", 3), std::string("ä"), std::string(65, 'a'),
        std::string("a\\b"), std::string("a\nb"), std::string("/etc/passwd"), std::string("%2e%2e")}) {
    expect_error([&] { store->create(name, {1}, contents_of({1})); }, {"is not a name for a state"});
    expect_error([&] { store->import_state(name, {}); }, {"is not a name for a state"});
    store->put({1}, contents_of({1}));
    expect_error([&] { store->create_from(name, Ids{1}); }, {"is not a name for a state"});
  }
  EXPECT_TRUE(store->list().empty());
  store->create(std::string(64, 'a'), {1}, contents_of({1}));
  store->create("0._-Z", {1}, contents_of({1}));
}

TEST_F(StateStoreTest, NeverEvictsNamedStates) {
  const uint64_t one = put(*memory_store(), {{1}});
  const auto memory = memory_store(2 * one);
  memory->create("kept", {1}, contents_of({1}));
  for (int32_t id = 2; id < 9; ++id) put(*memory, {{id}});
  EXPECT_TRUE(keeps(*memory, {1}));
  EXPECT_TRUE(keeps(*memory, {8}));
  EXPECT_FALSE(keeps(*memory, {7}));
  memory->create("more", {2}, contents_of({2}));
  EXPECT_THROW(memory->create("most", {3}, contents_of({3})), StoreFull);
  EXPECT_FALSE(memory->has("most"));

  const auto disk = disk_store(0, 8 << 10);
  disk->create("kept", {1}, contents_of({1}));
  for (int32_t id = 2; id < 20; ++id) put(*disk, {{id}});
  disk->flush();
  EXPECT_GT(disk->statistics().disk_evictions, 0);
  EXPECT_TRUE(keeps(*disk, {1}));
  EXPECT_TRUE(disk->describe("kept").on_disk);
}

TEST_F(StateStoreTest, ExportsAndImports) {
  const Ids ids = {1, 2, 3};
  const auto store = disk_store();
  store->create("a", ids, contents_of(ids), "\xFFtranscript");
  const std::vector<std::byte> bytes = store->export_state("a");
  const auto other = memory_store();
  other->import_state("b", bytes);
  expect_equal(other->state("b")->restored(), contents_of(ids));
  EXPECT_EQ(other->state("b")->ids, ids);
  EXPECT_EQ(other->state("b")->transcript, "\xFFtranscript");
  EXPECT_THROW(other->import_state("b", bytes), StateExists);
  EXPECT_EQ(load_state(bytes, small_config(), kModel).size(), 1u);  // what --load-state reads

  Random random(4);
  for (int i = 0; i < 100; ++i) {  // not one byte may change
    std::vector<std::byte> damaged = bytes;
    if (i % 2 == 0)
      damaged.resize(static_cast<size_t>(random.integer(0, static_cast<int64_t>(bytes.size()) - 1)));
    else
      damaged[static_cast<size_t>(random.integer(0, static_cast<int64_t>(bytes.size()) - 1))] ^= std::byte{4};
    EXPECT_THROW(other->import_state("damaged", damaged), Error);
  }
  EXPECT_FALSE(other->has("damaged"));
  expect_error([&] { other->import_state("c", state_bytes({contents_of(ids)}, small_config(), kModel)); },
               {"does not tell which tokens were read"});
  expect_error(
      [&] {
        other->import_state("c", state_bytes({contents_of(ids)}, small_config(), "another", {{ids, ""}}));
      },
      {"another model"});
  expect_error(
      [&] {
        other->import_state("c", state_bytes({contents_of(ids)}, small_config(), kModel, {{{1, 2, 999}, ""}}));
      },
      {"token 999"});
  expect_error([&] { other->put({1}, contents_of(ids)); }, {"a state of 3 tokens with 1 ids"});
  expect_error([&] { other->put({}, SlotContents()); }, {"0 ids"});
}

TEST_F(StateStoreTest, RoundsOnlyWhereAsked) {
  const StateStoreOptions options{.directory = folder.path(), .bf16 = true, .warn = warnings.sink()};
  const Ids ids = {1, 2, 3};
  const SlotContents given = contents_of(ids);
  for (const bool again : {false, true}) {
    StateStore store(small_config(), kModel, options);
    if (!again) store.create("a", ids, given);
    EXPECT_FALSE(store.describe("a").exact);
    const auto snapshot = store.state("a");
    EXPECT_FALSE(snapshot->exact());
    const SlotContents restored = snapshot->restored();
    const Tensor state = restored.tensors.at("layers.0.state");
    ASSERT_EQ(state.dtype(), DType::f32);
    for (int64_t i = 0; i < state.elements(); ++i)
      EXPECT_EQ(state.data<float>()[i], float(bfloat16(given.tensors.at("layers.0.state").data<float>()[i])));
    EXPECT_TRUE(same_bits(restored.tensors.at("layers.0.log_decay"), given.tensors.at("layers.0.log_decay")));
    EXPECT_TRUE(same_bits(restored.logits, given.logits));
  }
}

TEST_F(StateStoreTest, DropsDamagedFiles) {
  Random random(5);
  for (int i = 0; i < 60; ++i) {
    const Ids good = {1, 2, 3}, bad = {7, 8};
    {
      const auto store = disk_store();
      put(*store, {good});
      store->create("named", bad, contents_of(bad));
    }
    const fs::path file = folder / kModel / "n-named.state";
    std::string bytes = read_text(file);
    const auto at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(bytes.size()) - 1));
    if (i % 3 == 0)
      bytes.resize(at);
    else if (i % 3 == 1)
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.integer(0, 7)));
    else
      bytes.insert(at, "x");
    std::ofstream(file, std::ios::binary) << bytes;
    const size_t before = warnings.lines().size();
    const auto store = disk_store();
    EXPECT_FALSE(keeps(*store, bad)) << "byte " << at;  // found when it is opened, or when it is read
    EXPECT_FALSE(store->has("named"));
    EXPECT_TRUE(keeps(*store, good));
    EXPECT_EQ(store->statistics().damaged_files, 1);
    ASSERT_EQ(warnings.lines().size(), before + 1);
    EXPECT_NE(warnings.lines().back().find("n-named.state"), std::string::npos) << warnings.lines().back();
    EXPECT_FALSE(fs::exists(file));
  }
}

TEST_F(StateStoreTest, LeavesForeignFilesAlone) {
  { put(*disk_store(), {{1}}); }
  const fs::path own = files().at(0), directory = folder / kModel;
  write_text(directory / "README", "not a state");
  write_text(directory / "notes.state", "not a state either");
  write_text(directory / "s-xyz.state", "nor this");
  fs::create_directory(directory / "n-folder.state");
  save_state(directory / "n-foreign.state", {contents_of({2})}, small_config(), "another", {{{2}, ""}});
  save_state(directory / "n-old.state", {contents_of({2})}, small_config(), kModel);
  fs::copy_file(own, directory / "s-0000000000000000.state");  // not the name of its tokens
  const auto store = disk_store();
  EXPECT_TRUE(keeps(*store, {1}));
  EXPECT_TRUE(store->list().empty());
  EXPECT_EQ(store->statistics().damaged_files, 1);
  EXPECT_EQ(warnings.lines().size(), 3u);
  EXPECT_EQ(files().size(), 7u);
  EXPECT_FALSE(fs::exists(directory / "s-0000000000000000.state"));
}

// Limits the size of files during its lifetime, which write() reports like a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(StateStoreTest, GoesOnWhereTheDiskIsFull) {
  const auto store = disk_store();
  {
    const FileSizeLimit limit(200);
    put(*store, {{1}, {2}, {3}});
    store->create("named", {4}, contents_of({4}));
    store->flush();
  }
  EXPECT_GE(store->statistics().failed_writes, 4);
  EXPECT_EQ(warnings.lines().size(), 1u);  // not one for each
  EXPECT_NE(warnings.lines().at(0).find("kept in memory alone"), std::string::npos);
  for (const int32_t id : {1, 2, 3, 4}) EXPECT_TRUE(keeps(*store, {id}));
  EXPECT_FALSE(store->describe("named").on_disk);
  EXPECT_TRUE(files().empty());
  // The named one is written after another write has succeeded.
  const auto has_file = [&] {
    const auto statistics = store->statistics();
    return statistics.disk_states == 2 && statistics.pending_writes == 0;
  };
  put(*store, {{5}});
  for (int i = 0; i < 20000 && !has_file(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(store->describe("named").on_disk);
  EXPECT_EQ(files().size(), 2u);
}

TEST_F(StateStoreTest, WritesNamedStatesAgainInTheEnd) {
  for (const bool flushes : {true, false}) {
    const std::string name = flushes ? "flushed" : "ended";
    {
      const auto store = disk_store();
      {
        const FileSizeLimit limit(200);
        store->create(name, {1, 2}, contents_of({1, 2}));
        store->flush();
      }
      EXPECT_FALSE(store->describe(name).on_disk);
      if (flushes) store->flush();
      EXPECT_EQ(store->describe(name).on_disk, flushes);
    }
    EXPECT_TRUE(disk_store()->has(name));
  }
}

// States of the same ids that were read in other passes are not taken for each other, and not read from the disk.
TEST_F(StateStoreTest, FindsStatesOfTheSamePasses) {
  const Ids ids = {1, 2, 3, 4};
  const uint64_t two = after_pass(after_pass(9, 2), 4), one = after_pass(9, 4);
  const std::vector<PassEnd> in_two = {{2, after_pass(9, 2)}, {4, two}, {6, after_pass(two, 6)}};
  const std::vector<PassEnd> in_one = {{4, one}, {6, after_pass(one, 6)}};
  const Prompt prompt = prompt_of({1, 2, 3, 4, 5, 6}, "text");
  for (const bool restarted : {false, true}) {
    const auto store = disk_store(restarted ? 0 : 1 << 20);
    if (!restarted) {
      store->put(ids, contents_of(ids), "", two);
      EXPECT_FALSE(store->find(prompt, in_one));
      store->put(ids, contents_of(ids), "", one);
      store->put({1, 2, 3}, contents_of({1, 2, 3}), "", after_pass(9, 3));
      store->put({1, 2, 3, 4, 5}, contents_of({1, 2, 3, 4, 5}), "");
      store->create("named", {1, 2, 3, 4, 5, 6}, contents_of({1, 2, 3, 4, 5, 6}), "text", 77);
    }
    for (const auto& [passes, expected] : {std::pair{in_one, one}, std::pair{in_two, two}}) {
      const auto match = store->find(prompt, passes);
      ASSERT_TRUE(match);
      EXPECT_EQ(match->ids, 4u);
      EXPECT_EQ(match->snapshot->passes, expected);
    }
    EXPECT_FALSE(store->find(prompt, std::vector<PassEnd>{{3, 1}, {5, after_pass(9, 5)}, {6, 78}}));
    EXPECT_EQ(store->statistics().loads, restarted ? 2 : 0) << "no others";
    EXPECT_EQ(store->find(prompt)->ids, 6u) << "without passes any will do";
    EXPECT_EQ(store->state("named")->prompt().state_passes, 77u);
    EXPECT_NE(store->find(prompt_of({1, 2, 3, 4, 5}))->snapshot->passes, 0u) << "what was not told has a number";
  }
}

TEST_F(StateStoreTest, GoesOnOnAFullFileSystem) {
  if (::mount("furious", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "needs the right to mount a file system";
  {
    const auto store = disk_store();
    for (int32_t id = 1; id <= 5; ++id) store->put({id}, contents_of({id}, 5000));  // 20 KB each
    store->flush();
    EXPECT_GT(store->statistics().failed_writes, 0);
    EXPECT_GT(store->statistics().disk_states, 0);
    for (int32_t id = 1; id <= 5; ++id) EXPECT_TRUE(store->find(prompt_of({id})));
  }
  ::umount(folder.path().c_str());
}

// A named state that did not fit is not tried again after every write, but once there is space.
TEST_F(StateStoreTest, WaitsForSpaceForNamedStates) {
  if (::mount("furious", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "needs the right to mount a file system";
  {
    const auto store = disk_store();
    store->create("large", {1}, contents_of({1}, 50000));  // 200 KB
    store->flush();
    EXPECT_EQ(store->statistics().failed_writes, 1);
    for (int32_t id = 2; id <= 4; ++id) {
      store->put({id}, contents_of({id}));
      store->flush();
    }
    EXPECT_EQ(store->statistics().disk_states, 3);
    EXPECT_EQ(store->statistics().failed_writes, 1) << "not tried again";
    EXPECT_FALSE(store->describe("large").on_disk);
    ASSERT_EQ(::mount("furious", folder.path().c_str(), "tmpfs", MS_REMOUNT, "size=1m"), 0);
    store->flush();
    EXPECT_TRUE(store->describe("large").on_disk);
  }
  ::umount(folder.path().c_str());
}

// Whatever moment a process is killed at: what is there afterwards is complete.
TEST_F(StateStoreTest, SurvivesBeingKilledWhileItWrites) {
  Random random(6);
  constexpr int kLeastRounds = 10, kMostRounds = 400;
  constexpr uint64_t kDiskBytes = uint64_t{1} << 30;  // nothing is evicted
  int64_t states = 0, leftovers = 0;
  // As often as it takes to kill it in the middle of a write.
  for (int round = 0; round < kMostRounds && (round < kLeastRounds || states <= 10 || leftovers == 0); ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto store = disk_store(1 << 24, kDiskBytes);
      for (int32_t id = 0;; ++id) {
        const Ids ids = {round, id};
        store->put(ids, contents_of(ids, 20'000));
        if (id % 5 == 4) store->create(fmt::format("n{}-{}", round, id), ids, contents_of(ids, 20'000));
        if (id % 3 == 2) store->flush();
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.integer(3'000, 40'000)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    for (const fs::path& file : files()) leftovers += file.string().find(".tmp-") != std::string::npos;

    const auto store = disk_store(0, kDiskBytes);
    EXPECT_EQ(store->statistics().damaged_files, 0);
    const int64_t here = store->statistics().disk_states;
    EXPECT_GE(here, states);  // nothing that was written is lost
    states = here;
    for (const NamedState& state : store->list()) {
      const auto snapshot = store->state(state.name);
      expect_equal(snapshot->restored(), contents_of(snapshot->ids, 20'000));
    }
    for (const fs::path& file : files()) EXPECT_EQ(file.extension(), ".state");
  }
  EXPECT_TRUE(warnings.lines().empty());
  EXPECT_GT(states, 10);
  EXPECT_GT(leftovers, 0);  // it was killed in the middle of a write at least once
}

// A sequence that goes on from a snapshot computes what it would have computed.
class StateStoreOfEveryPreset : public ::testing::TestWithParam<Preset> {};

TEST_P(StateStoreOfEveryPreset, GoesOnToTheBit) {
  const TemporaryDirectory folder;
  const ModelConfig config = furious::testing::little(GetParam());
  Random random(7);
  const auto fill = [&](const std::string&, const Tensor& out) {
    copy_between(out, random.normal_tensor(out.shape(), 0.3));
  };
  const LanguageModel model(config, fill, Device{});
  Decoder decoder(model, 2);
  const int32_t slot = decoder.start();
  Ids ids;
  for (int i = 0; i < 150; ++i) ids.push_back(static_cast<int32_t>(random.integer(0, config.vocabulary - 1)));
  decoder.read(slot, ids);
  const StateStoreOptions options{.host_bytes = 0, .directory = folder.path()};
  { StateStore(config, kModel, options).put(ids, decoder.contents(slot), "text"); }
  StateStore store(config, kModel, options);
  const auto match = store.find(prompt_of(ids));
  ASSERT_TRUE(match);
  EXPECT_TRUE(match->snapshot->exact());
  const int32_t other = decoder.start();
  decoder.restore(other, match->snapshot->restored());
  decoder.set_sampling(slot, {.temperature = 1, .seed = 3});
  decoder.set_sampling(other, {.temperature = 1, .seed = 3});
  for (int i = 0; i < 80; ++i) {
    const std::vector<int32_t> slots = {slot, other};
    const std::vector<int32_t> chosen = decoder.step(slots).wait();
    ASSERT_EQ(chosen[0], chosen[1]) << i;
    ASSERT_TRUE(same_bits(decoder.logits(slot), decoder.logits(other))) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, StateStoreOfEveryPreset,
                         ::testing::Values(preset("2mamba"), preset("mamba2"), preset("softmax")),
                         [](const auto& test) {
                           std::string name = test.param.name;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace furious::serve
