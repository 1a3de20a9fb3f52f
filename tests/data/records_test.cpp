#include "data/records.h"

#include "data/corpus.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::gzip_of;
using testing::TemporaryFolder;

// Lines across the borders of read blocks, with and without a final line break, with blank lines between.
TEST(Records, LinesOfEveryLength) {
  const TemporaryFolder folder;
  std::vector<size_t> sizes{0, 5, (1 << 20) - 10, 1 << 20, 3 << 20, 1, 7};
  std::string text;
  for (const size_t size : sizes) text += "{\"a\": \"" + std::string(size, 'x') + "\", \"b\": 1.5}\n\n \r\n";
  for (const std::string& end : {std::string(), std::string("{\"a\": \"\", \"b\": 1.5}")}) {
    std::vector<size_t> seen;
    RecordVisitor visitor;
    visitor.visit = [&](int64_t number, const std::vector<std::string>& texts) {
      EXPECT_EQ(number, static_cast<int64_t>(seen.size()));
      EXPECT_EQ(texts[0], "1.5");
      seen.push_back(texts[1].size());
    };
    EXPECT_EQ(for_each_record(folder.write("a.jsonl", text + end), {"b", "a"}, visitor),
              static_cast<int64_t>(sizes.size() + !end.empty()));
    if (!end.empty()) sizes.push_back(0);
    EXPECT_EQ(seen, sizes);
  }
}

// Skipped records are not parsed.
TEST(Records, OnlyWantedOnes) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.jsonl", "{\"a\": 0}\nbroken\n{\"a\": 2}\n");
  std::vector<int64_t> seen;
  RecordVisitor visitor;
  visitor.visit = [&](int64_t number, const std::vector<std::string>&) { seen.push_back(number); };
  visitor.wanted = [](int64_t number) { return number != 1; };
  EXPECT_EQ(for_each_record(path, {"a"}, visitor), 3);
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 2}));
  visitor.wanted = [](int64_t) { return true; };
  expect_error([&] { for_each_record(path, {"a"}, visitor); }, {"line 2", "damaged"});
}

// Records are visited before the rest is read, and an endless line is not read to its end.
TEST(Records, HoldOneLineAtATime) {
  const TemporaryFolder folder;
  int64_t seen = 0;
  RecordVisitor visitor;
  visitor.visit = [&](int64_t, const std::vector<std::string>&) { ++seen; };
  std::string lines;
  for (int i = 0; i < 200000; ++i) lines += fmt::format("{{\"a\": {}}}\n", i * 7919 % 100003);
  const std::string bytes = gzip_of(lines);
  const std::string cut = folder.write("cut.jsonl.gz", bytes.substr(0, bytes.size() - 100));
  expect_error([&] { for_each_record(cut, {"a"}, visitor); }, {"cut.jsonl.gz", "truncated"});
  EXPECT_GT(seen, 50000);
  const std::string endless = folder.write("endless.jsonl.gz", gzip_of("{}\n" + std::string(70 << 20, ' ')));
  visitor.wanted = [](int64_t) { return false; };
  expect_error([&] { for_each_record(endless, {"a"}, visitor); },
               {"endless.jsonl.gz", "line 2", "longer than 67108864 bytes"});
}

}  // namespace
}  // namespace furious
