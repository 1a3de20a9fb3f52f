// The corpus of the fuzzers: each file through its target. FURIOUS_WRITE_CORPUS=DIR writes the good files of today
// there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/file.h"
#include "fuzz/targets.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

TEST(FuzzCorpus, IsReadWithoutACrash) {
  for (const fuzz::Target& target : fuzz::kTargets) {
    int files = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(fs::path(FURIOUS_FUZZ_CORPUS) / target.name)) {
      SCOPED_TRACE(entry.path().string());
      target.run(read_text(entry.path()));
      ++files;
    }
    EXPECT_GT(files, 0) << target.name;
  }
}

TEST(FuzzCorpus, AcceptsGoodFilesAndRefusesTheirPrefixes) {
  const char* const write_to = std::getenv("FURIOUS_WRITE_CORPUS");
  int number = 0;
  for (const auto& [name, bytes] : fuzz::good_files()) {
    SCOPED_TRACE(name);
    const auto target = std::ranges::find_if(fuzz::kTargets, [&](const fuzz::Target& one) { return one.name == name; });
    ASSERT_NE(target, std::end(fuzz::kTargets));
    EXPECT_TRUE(target->run(bytes));
    for (size_t part = 0; part < 8; ++part) EXPECT_FALSE(target->run(bytes.substr(0, bytes.size() * part / 8)));
    if (write_to == nullptr) continue;
    fs::create_directories(fs::path(write_to) / name);
    write_text(fs::path(write_to) / name / ("good-" + std::to_string(number++)), bytes);
  }
}

}  // namespace
}  // namespace furious
