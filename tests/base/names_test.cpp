#include "base/names.h"

#include "support.h"

namespace furious {
namespace {

const std::vector<std::string> kKnown = {"softmax", "linear", "mamba2", "2mamba", "2mamba-e"};

TEST(Names, NearestHasTheSmallestEditDistance) {
  EXPECT_EQ(nearest_name("softmx", kKnown), "softmax");
  EXPECT_EQ(nearest_name("Linear", kKnown), "linear");
  EXPECT_EQ(nearest_name("2mamba-f", kKnown), "2mamba-e");
  EXPECT_EQ(nearest_name("2mamba", kKnown), "2mamba");
  EXPECT_EQ(nearest_name("mamba-2", kKnown), "mamba2");
}

TEST(Names, NothingNearMeansNone) {
  EXPECT_EQ(nearest_name("zzzzzzzz", kKnown), "");
  EXPECT_EQ(nearest_name("", kKnown), "");
  EXPECT_EQ(nearest_name("softmax", {}), "");
}

TEST(Names, UnknownNameIsAnsweredWithTheNearestAndTheList) {
  testing::expect_error([] { unknown_name("mixer", "softmx", kKnown); },
                        {"unknown mixer \"softmx\"", "did you mean \"softmax\"?", "softmax, linear, mamba2"});
}

TEST(Names, UnknownNameFarFromAllHasNoHint) {
  try {
    unknown_name("mixer", "zzzzzzzz", kKnown);
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("did you mean"), std::string::npos) << error.what();
    return;
  }
  FAIL() << "no error was thrown";
}

TEST(Names, PathsGetDistinguishingNames) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(
      distinguishing_names({"abl/runs/2mamba/seed-123", "abl/runs/mamba2/seed-123", "abl/runs/softmax/seed-123/"}),
      (Names{"2mamba", "mamba2", "softmax"}));
  EXPECT_EQ(distinguishing_names({"a/x/seed-1", "a/x/seed-2", "./a/y/seed-1"}),
            (Names{"x/seed-1", "x/seed-2", "y/seed-1"}));
  EXPECT_EQ(distinguishing_names({"a/b/s", "b/s"}), (Names{"a/b", "b"}));
  EXPECT_EQ(distinguishing_names({"/r/s/s", "/r/s"}), (Names{"s/s", "s"}));
  EXPECT_EQ(distinguishing_names({"runs/one/"}), (Names{"one"}));
  EXPECT_EQ(distinguishing_names({}), (Names{}));
}

}  // namespace
}  // namespace furious
