#include "paper/suites.h"

#include <algorithm>
#include <functional>
#include <tuple>

#include "base/error.h"
#include "base/names.h"
#include "base/number.h"
#include "model/config_json.h"
#include "ops/matmul.h"
#include "train/options.h"
#include "train/recipe.h"

namespace furious {
namespace {

using Words = std::vector<std::string>;

// Options that a row may change beside the switches; all others are common, so that rows can be compared.
const Words kRowOptions = {
    "size",           "hidden",          "intermediate", "heads",       "layers", "qk-heads",  "qk-dim",
    "tie-embeddings", "batch",           "length",       "accumulate",  "lr",     "warmup",    "clip",
    "schedule-steps", "initialization",  "beta1",        "beta2",       "eps",    "dtype",     "weight-decay",
    "recompute",      "mixer-precision", "schedule",     "decay-steps", "min-lr", "optimizer", "decay-on",
    "muon-momentum",  "z-loss",          "steps"};
// Those of them that keep a row comparable with the paper, which has several sizes and lengths; the division of a batch
// does not affect the loss.
const Words kNeutralOptions = {"size", "length", "batch", "accumulate", "recompute"};

struct SuiteRows {
  Suite suite;
  std::string table;  // of the paper, that has its rows
  std::function<Words(const TrainOptions& base)> words;
  enum class Labels : uint8_t { names, paper } labels = Labels::names;
  enum class Step : uint8_t { same_tokens, same_batch } step = Step::same_tokens;
  bool own_figure = false;  // its losses rather than the small model's, for sizes that the paper does not have
  bool log_values = false;
};

Words presets_of(const std::string& table) {
  Words words;
  for (const PaperRow& row : paper_rows())
    if (row.table == table) words.push_back(row.preset);
  return words;
}

auto always(Words words) {
  return [words](const TrainOptions&) { return words; };
}

const Words kCompared = {"softmax", "mamba2", "mamba2-paper", "mamba2s", "2mamba", "2mamba-dt"};
const Words kLargeRuns = {"softmax", "mamba2-paper", "2mamba"};

// The paper's lengths are one, two and four times its shortest.
Words at_lengths(const TrainOptions& base) {
  Words words, archs = kCompared;
  archs.emplace_back("2mamba-e");
  for (const int64_t times : {1, 2, 4})
    for (const std::string& preset : archs) words.push_back(fmt::format("{}:length={}", preset, times * base.length));
  return words;
}

// Discretization in every precision of the device, and without it in the lowest. On a GPU the precision is that of the
// products inside the mixer, as in the paper's study; on a CPU that of all products, since its mixer has only f32.
Words in_every_precision(const TrainOptions& base) {
  const Device device = usable_device(base.device);
  std::string key = "mixer-precision";
  Words precisions = {"bf16", "tf32", "tf32x3", "f32"}, words;
  if (device.is_cpu()) {
    key = "dtype";
    precisions = {"f32"};
    if (matmul_supports(MatmulPrecision::bf16, device)) precisions.insert(precisions.begin(), "bf16");
  }
  for (const std::string& precision : precisions) words.push_back(fmt::format("2mamba-dt:{}={}", key, precision));
  words.push_back(fmt::format("2mamba:{}={}", key, precisions.front()));
  return words;
}

const std::vector<SuiteRows>& suite_rows() {
  using enum SuiteRows::Labels;
  using enum SuiteRows::Step;
  static const std::vector<SuiteRows> all = {
      {{"base", "Figure 1: linear attention, the authors' Mamba-2 and softmax attention"},
       "Figure 1",
       always({"linear", "mamba2-paper", "softmax"})},
      {{"norm", "Figure 2: the norm of linear attention, softmax or output"},
       "Table 2",
       always({"linear", "linear-outnorm", "outnorm-relu"}),
       paper},
      {{"conv", "Table 1: a convolution on linear attention"}, "Table 1", always(presets_of("Table 1")), paper},
      {{"isolated", "Table 2: each component of Mamba-2 alone, on linear attention"},
       "Table 2",
       always(presets_of("Table 2")),
       paper},
      {{"buildup", "Table 3: from linear attention to Mamba-2S"}, "Table 3", always(presets_of("Table 3")), paper},
      {{"compare", "Figures 5a and 6: softmax attention, Mamba-2, Mamba-2S and 2Mamba"},
       "Figure 5a",
       always(kCompared)},
      {{"lengths", "Figures 6 and 10: compare and 2Mamba-E at one, two and four times the length"},
       "Figure 6",
       at_lengths,
       names,
       same_batch},
      {{"exp", "Figure 10: 2Mamba-E, the exponential score"},
       "Figure 10",
       always({"softmax", "mamba2-paper", "2mamba", "2mamba-e"}),
       names,
       same_tokens,
       true},
      {{"stability", "Figure 5b: 2Mamba with discretization in several precisions"},
       "Figure 5b",
       in_every_precision,
       names,
       same_tokens,
       false,
       true},
      {{"long", "Figure 9: the long run (--recipe paper-long)"},
       kLongRun,
       always(kLargeRuns),
       names,
       same_tokens,
       true},
      {{"pile", "the appendix: the Pile"}, kPile, always(kLargeRuns), names, same_tokens, true},
      {{"slimpajama", "the appendix: SlimPajama"}, kSlimPajama, always(kLargeRuns), names, same_tokens, true},
      {{"orders", "from linear over higher powers and sums of powers to the exponential score"},
       "",
       always({"conv2-a-softplus", "2mamba-outnorm", "2mamba-3", "2mamba", "2mamba-4", "2mamba-series-2",
               "2mamba-series-4", "2mamba-e"})},
      {{"variants", "the authors' other masks and discretizations, and the Forgetting Transformer"},
       "",
       always({"2mamba", "2mamba-square-mask", "2mamba:decay=softplus_dt", "2mamba:decay=softplus2",
               "2mamba:decay=silu", "2mamba:decay=log_sigmoid", "2mamba-dt", "2mamba-dt:dt_limit=10",
               "2mamba:discretize=sigmoid", "2mamba:discretize=silu", "2mamba:discretize=softplus",
               "2mamba:discretize=softplus2", "fox"})},
  };
  return all;
}

void change(TrainOptions& options, const std::string& key, const std::string& value) {
  if (std::ranges::find(switch_names(), key) != switch_names().end()) {
    options.switches += (options.switches.empty() ? "" : ",") + key + "=" + value;
    return;
  }
  if (std::ranges::find(kRowOptions, key) == kRowOptions.end()) {
    Words known = switch_names();
    known.insert(known.end(), kRowOptions.begin(), kRowOptions.end());
    unknown_name("key", key, known);
  }
  set_train_option(options, key, value);
}

bool is_the_papers(const KeyValue& change) {
  if (std::ranges::find(kNeutralOptions, change.key) != kNeutralOptions.end()) return true;
  const std::vector<KeyValue>& options = recipe(kPaperRecipe).options;
  const auto found = std::ranges::find(options, change.key, &KeyValue::key);
  return found != options.end() && found->value == change.value;
}

// The paper's result for a row, if it has one.
std::optional<PaperRow> paper_row(const TrainOptions& options, const std::vector<KeyValue>& changes,
                                  const SuiteRows* suite) {
  if (!options.switches.empty() || !std::ranges::all_of(changes, is_the_papers)) return {};
  if (options.qk_dim + options.qk_heads > 0) return {};
  const bool own_length = std::ranges::find(changes, "length", &KeyValue::key) != changes.end();
  const bool own_size = options.hidden + options.intermediate + options.heads + options.layers > 0;
  const auto apart = [](const std::string& table) {
    return table == kLongRun || table == kPile || table == kSlimPajama;
  };
  const std::string table = suite == nullptr ? "" : suite->table;
  std::optional<PaperRow> found;
  auto best = std::tuple(0, false, false);
  for (const PaperRow& row : paper_rows()) {
    const bool same_table = row.table == table, same_length = row.length == options.length;
    if (row.preset != options.arch || (apart(table) || apart(row.table) ? !same_table : false)) continue;
    if (!same_length && (own_length || (row.length != 2048 && !apart(table)))) continue;
    const int size = !own_size && row.size == options.size ? 3
                     : same_table && suite->own_figure     ? 2
                     : row.size == "small"                 ? 1
                                                           : 0;
    if (const auto rank = std::tuple(same_length ? size : std::min(size, 2), same_length, same_table);
        size > 0 && rank > best) {
      best = rank;
      found = row;
    }
  }
  return found;
}

// Every combination of the grid's values, as changes of a row.
Words with_grid(const std::string& word, const std::vector<GridAxis>& grid) {
  constexpr size_t kMostRows = 10000;
  Words words{word};
  for (const auto& [key, values] : grid) {
    require(words.size() * values.size() <= kMostRows, "ablate: the grid has more than {} rows; use fewer values",
            kMostRows);
    Words longer;
    for (const std::string& shorter : words)
      for (const std::string& value : values)
        longer.push_back(fmt::format("{}{}{}={}", shorter, shorter.find(':') == shorter.npos ? ":" : ",", key, value));
    words = std::move(longer);
  }
  return words;
}

AblationRow row_of(const std::string& word, const TrainOptions& base, const SuiteRows* suite) try {
  AblationRow row{word, word, base, {}};
  const size_t colon = std::min(word.find(':'), word.size());
  row.options.arch = preset(word.substr(0, colon)).name;
  const std::vector<KeyValue> changes = key_values(colon < word.size() ? word.substr(colon + 1) : "");
  for (const auto& [key, value] : changes) change(row.options, key, value);
  if (suite == nullptr || suite->step == SuiteRows::Step::same_tokens) {
    const int64_t tokens = base.batch * base.length;
    const bool own_batch = std::ranges::find(changes, "batch", &KeyValue::key) != changes.end();
    if (!own_batch && tokens % row.options.length == 0) row.options.batch = tokens / row.options.length;
    require(row.options.batch * row.options.length == tokens,
            "{} x {} tokens in a step, the others have {} x {}; all rows need the same number: choose its length, or "
            "--batch and --length, accordingly",
            row.options.batch, row.options.length, base.batch, base.length);
  }
  check_train_options(row.options);
  row.paper = paper_row(row.options, changes, suite);
  if (row.paper && suite != nullptr && suite->labels == SuiteRows::Labels::paper) row.label = row.paper->label;
  if (base.data.starts_with("synthetic:")) row.paper.reset();  // the paper's losses are of text
  return row;
} catch (const Error& error) {
  fail("ablate: row {}: {}", word, error.what());
}

}  // namespace

const std::vector<Suite>& suites() {
  static const std::vector<Suite> all = [] {
    std::vector<Suite> list;
    for (const SuiteRows& rows : suite_rows()) list.push_back(rows.suite);
    return list;
  }();
  return all;
}

std::string AblationRow::folder() const {
  std::string fit = name;
  for (char& c : fit)
    if (c == ':' || c == ',') c = '-';
  return fit;
}

GridAxis grid_axis(const std::string& text) {
  constexpr int64_t kMostValues = 1000;
  const size_t equal = text.find('=');
  require(equal != text.npos && equal > 0 && equal + 1 < text.size(),
          "grid: \"{}\" is not KEY=VALUE,VALUE or KEY=FIRST..LAST, such as lr=1e-3,3e-3 or seed=1..3", text);
  GridAxis axis{text.substr(0, equal), {}};
  for (size_t begin = equal + 1; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string value = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t dots = value.find("..");
    if (dots == value.npos) {
      require(!value.empty(), "grid: \"{}\" has an empty value", text);
      axis.values.push_back(value);
      continue;
    }
    const auto first = parse_number<int64_t>(value.substr(0, dots)),
               last = parse_number<int64_t>(value.substr(dots + 2));
    require(first && last && *first >= 0 && *first <= *last && *last - *first < kMostValues,
            "grid: \"{}\" is not a range of integers such as 1..3, of at most {} values", value, kMostValues);
    for (int64_t i = *first; i <= *last; ++i) axis.values.push_back(fmt::format("{}", i));
  }
  for (const std::string& value : axis.values)
    require(std::ranges::count(axis.values, value) == 1, "grid: \"{}\" has the value {} twice", text, value);
  return axis;
}

std::vector<AblationRow> ablation_rows(const std::vector<std::string>& words, const TrainOptions& base,
                                       const std::vector<GridAxis>& grid) {
  for (const GridAxis& axis : grid)
    require(std::ranges::count(grid, axis.key, &GridAxis::key) == 1, "ablate: two grids of {}; join their values",
            axis.key);
  std::vector<AblationRow> rows;
  const auto add = [&](AblationRow row) {
    const auto same = std::ranges::find(rows, row.name, &AblationRow::name);
    if (same == rows.end()) {
      rows.push_back(std::move(row));
      return;
    }
    require(same->options.batch == row.options.batch,
            "ablate: {} is given twice, with batches of {} and {}; leave one of them out", row.name,
            same->options.batch, row.options.batch);
    if (!same->paper) same->paper = row.paper;  // the figure of another suite has it
  };
  Words known;
  for (const SuiteRows& rows_of : suite_rows()) known.push_back(rows_of.suite.name);
  for (const Preset& candidate : presets()) known.push_back(candidate.name);
  for (const std::string& word : words) {
    const std::string name = word.substr(0, word.find(':'));
    if (std::ranges::find(known, name) == known.end()) unknown_name("suite or preset", name, known);
    const auto suite =
        std::ranges::find(suite_rows(), word, [](const SuiteRows& rows_of) { return rows_of.suite.name; });
    if (suite == suite_rows().end()) {
      require(std::ranges::none_of(suites(), [&](const Suite& one) { return one.name == name; }),
              "ablate: {}: changes apply to presets, not to suites; use flags for all rows (--lr, --switches)", word);
      for (const std::string& row : with_grid(word, grid)) add(row_of(row, base, nullptr));
      continue;
    }
    TrainOptions options = base;
    options.log_values = options.log_values || suite->log_values;
    for (const std::string& own : suite->words(options))
      for (const std::string& row : with_grid(own, grid)) add(row_of(row, options, &*suite));
  }
  require(!rows.empty(), "ablate: nothing to train; give a suite or presets");
  return rows;
}

}  // namespace furious
