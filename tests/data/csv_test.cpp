#include "data/csv.h"

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;
using Fields = std::vector<std::string>;

TEST(Csv, Fields) {
  EXPECT_EQ(csv_fields("a,b,c\n", ',', "x"), (Fields{"a", "b", "c"}));
  EXPECT_EQ(csv_fields("a,b,c\r\n", ',', "x"), (Fields{"a", "b", "c"}));
  EXPECT_EQ(csv_fields(",,", ',', "x"), (Fields{"", "", ""}));
  EXPECT_EQ(csv_fields("", ',', "x"), (Fields{""}));
  EXPECT_EQ(csv_fields("\"a,b\",\"c\"\"d\",\"\",\"e\nf\"\n", ',', "x"), (Fields{"a,b", "c\"d", "", "e\nf"}));
  EXPECT_EQ(csv_fields("5\" pipe, a\"b", ',', "x"), (Fields{"5\" pipe", " a\"b"}));
  EXPECT_EQ(csv_fields("a,b\tc", '\t', "x"), (Fields{"a,b", "c"}));
  expect_error([] { csv_fields("\"a", ',', "here"); }, {"here", "does not close"});
  expect_error([] { csv_fields("\"a\"b,c", ',', "here"); }, {"here", "closing quote"});
}

TEST(Csv, OneField) {
  const CsvField field = csv_field("a,\"b\"\"\",c\n", ',', 1, "x");
  EXPECT_EQ(field.text, "b\"");
  EXPECT_EQ(field.fields, 3u);
}

TEST(Csv, EndsOfRecords) {
  const std::string text = "a,\"b\n\"\"\n\"\nc\n\"d\n";
  const size_t first = csv_record_end(text, 0, ',');
  EXPECT_EQ(text.substr(0, first), "a,\"b\n\"\"\n\"\n");
  const size_t second = csv_record_end(text, first, ',');
  EXPECT_EQ(text.substr(first, second - first), "c\n");
  EXPECT_EQ(csv_record_end(text, second, ','), std::string::npos);
  EXPECT_EQ(csv_record_end("a,\"b\"", 0, ','), std::string::npos);  // the quote may be the first of two
  EXPECT_EQ(csv_record_end("", 0, ','), std::string::npos);
}

}  // namespace
}  // namespace furious
