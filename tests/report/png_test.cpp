#include "report/png.h"

#include <cstdlib>
#include <filesystem>

#include "data/corpus.h"

namespace furious {
namespace {

using namespace furious::testing;
namespace fs = std::filesystem;

constexpr const char* kSvg = R"(<svg xmlns="http://www.w3.org/2000/svg" width="10" height="5"/>)";

// Replaces PATH during a test.
class PngTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string path = std::getenv("PATH");

  void TearDown() override { ::setenv("PATH", path.c_str(), 1); }
  void program(const std::string& name, const std::string& script) {
    fs::create_directories(folder.path("bin"));
    fs::permissions(folder.write("bin/" + name, "#!/bin/sh\n" + script), fs::perms::owner_all);
    ::setenv("PATH", folder.path("bin").c_str(), 1);
  }
};

TEST_F(PngTest, WithoutAConverterThePackageIsNamed) {
  ::setenv("PATH", folder.path("empty").c_str(), 1);
  const std::vector<std::string> parts = {"rsvg-convert", "librsvg2-bin", "inkscape", ".svg"};
  expect_error([] { check_png(); }, parts);
  expect_error([&] { write_png(folder.path("x.png"), kSvg); }, parts);
  EXPECT_FALSE(fs::exists(folder.path("x.png")));
}

TEST_F(PngTest, KeepsTheOutputOfTheConverter) {
  for (const char* name : {"inkscape", "rsvg-convert"}) {
    program(name, fmt::format(
                      R"sh(for word; do case "$word" in --output=*|--export-filename=*) out="${{word#*=}}";; esac; done
[ "$(/bin/cat "$word")" = '{}' ] && echo {} > "$out")sh",
                      kSvg, name));
    write_png(folder.path("x.png"), kSvg);
    EXPECT_EQ(read_file(folder.path("x.png")), std::string(name) + "\n");
  }
}

TEST_F(PngTest, AConverterThatFailsLeavesTheOldFile) {
  folder.write("x.png", "old");
  program("rsvg-convert", "exit 3");
  expect_error([&] { write_png(folder.path("x.png"), kSvg); }, {"rsvg-convert", "failed"});
  EXPECT_EQ(read_file(folder.path("x.png")), "old");
  program("rsvg-convert", "exit 0");  // and writes nothing
  expect_error([&] { write_png(folder.path("x.png"), kSvg); }, {"chart.png"});
  EXPECT_EQ(read_file(folder.path("x.png")), "old");
  expect_error([&] { write_png(folder.path("nowhere/x.png"), kSvg); }, {"nowhere"});
}

TEST_F(PngTest, WritesAPng) {
  try {
    check_png();
  } catch (const Error&) {
    GTEST_SKIP() << "no converter is installed";
  }
  write_png(folder.path("x.png"), kSvg);
  EXPECT_EQ(read_file(folder.path("x.png")).substr(0, 4), "\x89PNG");
}

}  // namespace
}  // namespace furious
