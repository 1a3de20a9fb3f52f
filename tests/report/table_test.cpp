#include "report/table.h"

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

const Table kTable = {{"model", "loss", "parameters", "note"},
                      {{"2mamba", "3.21", "275.8M", "naïve | first"},
                       {"softmax", "13.2", "1,024", ""},
                       {"mamba2", "-", "9 %", "7 of 9"}}};

TEST(Table, Text) {
  EXPECT_EQ(to_text(kTable),
            "model    loss  parameters  note\n"
            "2mamba   3.21      275.8M  naïve | first\n"
            "softmax  13.2       1,024\n"
            "mamba2      -         9 %  7 of 9\n");
}

TEST(Table, Markdown) {
  EXPECT_EQ(to_markdown(kTable),
            "| model | loss | parameters | note |\n"
            "| --- | ---: | ---: | --- |\n"
            "| 2mamba | 3.21 | 275.8M | naïve \\| first |\n"
            "| softmax | 13.2 | 1,024 |  |\n"
            "| mamba2 | - | 9 % | 7 of 9 |\n");
}

TEST(Table, Html) {
  EXPECT_EQ(to_html({{"a<b", "n"}, {{"\"x\"", "3.21 ± 0.04"}}}),
            "<table>\n<thead>\n<tr><th>a&lt;b</th><th class=\"number\">n</th></tr>\n</thead>\n<tbody>\n"
            "<tr><td>&quot;x&quot;</td><td class=\"number\">3.21 ± 0.04</td></tr>\n</tbody>\n</table>\n");
}

TEST(Table, NumbersWithASpread) {
  EXPECT_EQ(to_text({{"a"}, {{"3.21 ± 0.04"}, {"5"}}}), "          a\n3.21 ± 0.04\n          5\n");
  EXPECT_EQ(to_text({{"a"}, {{"3.21 ± much"}, {"5"}}}), "a\n3.21 ± much\n5\n");
}

TEST(Table, WidthsCountCharactersNotBytes) {
  EXPECT_EQ(to_text({{"größe", "x"}, {{"a", "b"}}}), "größe  x\na      b\n");
}

TEST(Table, WithoutRows) {
  EXPECT_EQ(to_text({{"a", "b"}, {}}), "a  b\n");
  EXPECT_EQ(to_markdown({{"a", "b"}, {}}), "| a | b |\n| --- | --- |\n");
}

TEST(Table, RowsOfAnotherLengthAreRefused) {
  expect_error([] { to_text({{"a", "b"}, {{"1"}}}); }, {"1 cells", "header 2"});
}

}  // namespace
}  // namespace furious
