#include "train/event_file.h"

#include <cmath>

#include "support.h"
#include "train/event_reader.h"

namespace furious {
namespace {

using namespace furious::testing;

// From RFC 3720, B.4.
TEST(EventFile, Crc32c) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
}

TEST(EventFile, AnIndependentReaderReadsIt) {
  EventValues values;
  values.add_number("train/loss", 3.25);
  values.add_number("nan", std::nan(""));
  values.add_text("sample", "two\nlines");
  const std::string file = event_file_start(1e9) + event_record(1e9 + 0.5, 300, values) +
                           event_record(1e9 + 1, int64_t{1} << 40, EventValues());
  const std::vector<ReadEvent> events = read_events(file);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_EQ(events[0].time, 1e9);
  EXPECT_TRUE(events[1].starts_session);
  EXPECT_EQ(events[1].step, 0);
  EXPECT_EQ(events[2].time, 1e9 + 0.5);
  EXPECT_EQ(events[2].step, 300);
  EXPECT_EQ(events[2].numbers.at("train/loss"), 3.25f);
  EXPECT_TRUE(std::isnan(events[2].numbers.at("nan")));
  EXPECT_EQ(events[2].texts.at("sample"), "two\nlines");
  EXPECT_EQ(events[3].step, int64_t{1} << 40);
  EXPECT_TRUE(events[3].numbers.empty());
}

}  // namespace
}  // namespace furious
