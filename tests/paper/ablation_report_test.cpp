#include "paper/ablation_report.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <regex>

#include "data/corpus.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

RowRun run_of(uint64_t seed, double train_loss, double test_loss) {
  RowRun run;
  run.seed = seed;
  run.steps = 100;
  run.finished = true;
  run.train_loss = train_loss;
  run.test_loss = test_loss;
  run.tokens_per_second = 1000 + static_cast<double>(seed);
  run.training = {{10, 50, 100}, {9, train_loss + 1, train_loss}};
  run.test = {{50, 100}, {test_loss + 1, test_loss}};
  return run;
}

RowResult row_of(const std::string& name, const std::string& label, std::vector<RowRun> runs) {
  RowResult row;
  row.name = name;
  row.label = label;
  row.options = {{"arch", name},    {"size", "tiny"}, {"steps", "100"},  {"batch", "8"},   {"length", "64"},
                 {"data", "a & b"}, {"dtype", "f32"}, {"device", "cpu"}, {"switches", ""}, {"clip", "0"}};
  row.parameters = 1234567;
  row.state_bytes = 84000;
  row.runs = std::move(runs);
  return row;
}

// Two seeds; a row without figures in the paper, one of which has diverged, and one not yet trained.
Ablation small_ablation() {
  Ablation ablation;
  ablation.words = {"conv", "2mamba<b>"};
  ablation.rows = {row_of("outnorm-relu", "ReLU", {run_of(1, 4, 4.5), run_of(2, 4.2, 4.9)}),
                   row_of("2mamba", "2mamba", {run_of(1, 3, 3.5), run_of(2, 9, 9)}), row_of("softmax", "softmax", {})};
  ablation.rows[0].paper = PaperRow{"Table 1", "ReLU", "outnorm-relu", 3.12, 3.06};
  RowRun& diverged = ablation.rows[1].runs[1];
  diverged.diverged = "train: step 41: the loss is not a number";
  diverged.steps = 40;
  diverged.train_loss = kNaN;
  ablation.rows[1].runs[0].values = {{50, 100}, {0.5, 12.25}};
  return ablation;
}

// The golden files were inspected when they were written; FURIOUS_UPDATE_GOLDEN=1 rewrites them.
void expect_golden(const std::string& name, const std::string& actual) {
  const std::string path = std::string(FURIOUS_GOLDEN) + "/" + name;
  if (std::getenv("FURIOUS_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << actual;
  EXPECT_EQ(actual, read_file(path)) << path;
}

// The elements in order, without style and coordinates.
std::string structure_of(const std::string& svg) {
  std::string lines = std::regex_replace(svg, std::regex("<style>[^]*?</style>\n"), "");
  return std::regex_replace(lines, std::regex(" (x|y|x1|x2|y1|y2|points|width|height|viewBox|transform)=\"[^\"]*\""),
                            "");
}

TEST(AblationReport, Table) {
  expect_golden("ablation.txt", to_text(ablation_table(small_ablation())) + "\n" + ablation_notes(small_ablation()));
}

TEST(AblationReport, OmitsEmptyColumns) {
  Ablation ablation = small_ablation();
  ablation.rows = {row_of("2mamba", "2mamba", {run_of(1, 3, 3.5)})};
  EXPECT_EQ(to_text(ablation_table(ablation)),
            "row     train loss  test loss  parameters  tokens/s  KB at 8k\n"
            "2mamba       3.000      3.500       1.23M      1001        84\n");
  EXPECT_EQ(ablation_notes(ablation).find("Paper"), std::string::npos);
  EXPECT_EQ(ablation_notes(ablation).find("Not all"), std::string::npos);
}

TEST(AblationReport, CountsPairsInTheOrderOfThePaper) {
  Ablation ablation;
  ablation.words = {"conv"};
  const auto add = [&](double paper, std::vector<RowRun> runs) {
    ablation.rows.push_back(row_of("row", "row", std::move(runs)));
    if (paper > 0) ablation.rows.back().paper = PaperRow{"Table 1", "row", "row", 3, paper};
  };
  add(2.9, {run_of(1, 4, 4.0)});
  EXPECT_EQ(ablation_notes(ablation).find("pairs"), std::string::npos);
  add(2.9, {run_of(1, 4, 4.2)});  // the paper has no order for these two
  add(3.0, {run_of(1, 4, 4.1)});
  add(3.1, {run_of(1, 4, 4.5)});
  add(0, {run_of(1, 4, 1)});  // not in the paper
  add(3.2, {});               // not trained yet
  EXPECT_NE(ablation_notes(ablation).find("Of 5 pairs of rows whose test losses differ in the paper, 4 have the "),
            std::string::npos)
      << ablation_notes(ablation);
}

// Rows with losses of several models of the paper: only rows of one model are ordered, and the note names it.
TEST(AblationReport, SeparatesSettingsOfThePaper) {
  Ablation ablation;
  ablation.words = {"lengths"};
  const auto add = [&](const char* length, PaperRow paper, double loss) {
    ablation.rows.push_back(row_of("2mamba", fmt::format("2mamba:length={}", length), {run_of(1, 4, loss)}));
    ablation.rows.back().options["size"] = "medium";
    ablation.rows.back().options["length"] = length;
    ablation.rows.back().paper = paper;
  };
  add("2048", {"Figure 6", "2Mamba", "2mamba", 2.58, 2.62, "medium", 2048}, 3);
  add("4096", {"Figure 6", "2Mamba", "2mamba", 2.71, 2.63, "medium", 4096}, 4);
  add("2048", {"Table 3", "Mamba-2S", "mamba2s", 2.7, 2.76}, 5);
  add("4096", {"Figure 6", "Softmax", "softmax", 2.59, 2.62, "medium", 4096}, 3);
  const Table table = ablation_table(ablation);
  std::vector<std::string> cells;
  for (const auto& row : table.rows) cells.push_back(row[4]);
  EXPECT_EQ(cells, (std::vector<std::string>{"2.62", "2.63", "2.76 (small 2048)", "2.62"}));
  const std::string notes = ablation_notes(ablation);
  for (const char* part :
       {"100 steps of 8 sequences, size medium",
        "Paper: Table 3 (300 M parameters, FineWeb, 32 x 2048 tokens, after 90,000 of 100,000 steps); Figure 6 (700 M "
        "parameters, FineWeb, 32 x 2048 tokens, after 90,000 of 100,000 steps); Figure 6 (700 M parameters, FineWeb, "
        "32 x 4096 tokens, after 90,000 of 100,000 steps). Compare",
        "Of 1 pair of rows whose test losses differ in the paper, 1 has the same order here."})
    EXPECT_NE(notes.find(part), std::string::npos) << part << "\n" << notes;
  const std::string json = ablation_to_json(ablation);
  EXPECT_EQ(ablation_to_json(ablation_from_json(json, "test")), json);
  const PaperRow long_run{"Figure 9", "2Mamba", "2mamba", 2.3, 2.34, "medium", 8192};
  EXPECT_EQ(long_run.setting(), "700 M parameters, FineWeb, 64 x 8192 tokens, 400,000 steps");
  const PaperRow pile{"the Pile (appendix)", "2Mamba", "2mamba", 2.29, 2.5, "medium", 2048};
  EXPECT_EQ(pile.setting(), "700 M parameters, the Pile, 32 x 2048 tokens, after 90,000 of 100,000 steps");
}

// Results of a version that knew only the small model's tables.
TEST(AblationReport, OldResultsLoad) {
  const std::string json = ablation_to_json(small_ablation());
  std::string old = std::regex_replace(json, std::regex("\"size\":\"small\",\"length\":2048,"), "");
  EXPECT_NE(old, json);
  EXPECT_EQ(ablation_to_json(ablation_from_json(old, "old")), json);
}

TEST(AblationReport, Charts) {
  const std::vector<NamedChart> charts = ablation_charts(small_ablation());
  std::string structure;
  for (const NamedChart& chart : charts) structure += chart.name + "\n" + structure_of(to_svg(chart.chart));
  expect_golden("ablation-charts.txt", structure);
  const Series& first = charts[0].chart.series[0];  // the mean of two seeds, with their range
  EXPECT_EQ(first.x, (std::vector<double>{50, 100}));
  EXPECT_EQ(first.y, (std::vector<double>{(5.5 + 5.9) / 2, 4.7}));
  EXPECT_EQ(first.low, (std::vector<double>{5.5, 4.5}));
  EXPECT_EQ(first.high, (std::vector<double>{5.9, 4.9}));
}

TEST(AblationReport, DrawsLengthsIfTheyDiffer) {
  Ablation ablation = small_ablation();
  ablation.rows = {row_of("softmax", "softmax:length=64", {run_of(1, 3, 3.5)}),
                   row_of("softmax", "softmax:length=128", {run_of(1, 3, 3.25)})};
  ablation.rows[1].options["length"] = "128";
  const std::vector<NamedChart> charts = ablation_charts(ablation);
  ASSERT_EQ(charts.back().name, "lengths");
  ASSERT_EQ(charts.back().chart.series.size(), 1u);
  EXPECT_EQ(charts.back().chart.series[0].x, (std::vector<double>{64, 128}));
  EXPECT_EQ(charts.back().chart.series[0].y, (std::vector<double>{3.5, 3.25}));
}

TEST(AblationReport, JsonRoundTrips) {
  const Ablation ablation = small_ablation();
  const std::string json = ablation_to_json(ablation);
  const Ablation again = ablation_from_json(json, "test");
  EXPECT_EQ(ablation_to_json(again), json);
  EXPECT_EQ(ablation_page(again), ablation_page(ablation));
  EXPECT_TRUE(std::isnan(again.rows[1].runs[1].train_loss));
  expect_error([] { ablation_from_json("{}", "some.json"); },
               {"some.json", "expected the results.json of an ablation"});
  expect_error([] { ablation_from_json("nonsense", "some.json"); }, {"some.json"});
  expect_error([] { ablation_from_json(R"({"words": [], "finished": true, "rows": []})", "x"); }, {"x", "no rows"});
  expect_error([&] { ablation_from_json(json.substr(0, json.size() / 2), "half"); }, {"half"});
}

TEST(AblationReport, HtmlLoadsNoExternalResources) {
  const std::string page = ablation_page(small_ablation());
  for (const char* tag : {"<link", "<img", "src=", "href=", "url(", "@import"})
    EXPECT_EQ(page.find(tag), std::string::npos) << tag;
  EXPECT_NE(page.find("<title>furious ablate conv 2mamba&lt;b&gt;</title>"), std::string::npos);
  EXPECT_NE(page.find("<td>a &amp; b</td>"), std::string::npos);
  EXPECT_NE(page.find("<td class=\"number\">3.12</td>"), std::string::npos);
  EXPECT_NE(page.find("the loss is not a number"), std::string::npos);
  // Every element that is opened is closed.
  for (const std::string tag : {"html", "body", "table", "tr", "td", "svg", "details", "figure", "p"}) {
    const auto count = [&](const std::string& text) {
      size_t found = 0;
      for (size_t at = page.find(text); at != page.npos; at = page.find(text, at + 1)) ++found;
      return found;
    };
    EXPECT_EQ(count("<" + tag + ">") + count("<" + tag + " "), count("</" + tag + ">")) << tag;
  }
}

TEST(AblationReport, Files) {
  const TemporaryFolder folder;
  write_ablation_report(folder.path(""), small_ablation());
  for (const char* name :
       {"report.html", "results.json", "table.md", "test-loss.svg", "training-loss.svg", "values.svg"})
    EXPECT_TRUE(std::filesystem::exists(folder.path(name))) << name;
  expect_golden("ablation.md", read_file(folder.path("table.md")));
}

}  // namespace
}  // namespace furious
