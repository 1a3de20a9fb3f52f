#include "train/suites.h"

#include <algorithm>
#include <functional>
#include <set>

#include "base/error.h"
#include "base/names.h"
#include "model/config_json.h"
#include "ops/matmul.h"
#include "train/options.h"

namespace furious {
namespace {

using Words = std::vector<std::string>;

const std::string kConv = "Table 1", kIsolated = "Table 2", kBuildup = "Table 3";

// What a row may change beside the switches: the rest is the same for all, or they could not be compared.
const Words kRowOptions = {"size",  "hidden", "intermediate", "heads", "layers",   "qk-heads",       "tie-embeddings",
                           "batch", "length", "accumulate",   "lr",    "warmup",   "schedule-steps", "clip",
                           "beta1", "beta2",  "weight-decay", "dtype", "recompute"};

struct SuiteRows {
  Suite suite;
  std::string table;  // of the paper, that its rows are labelled by
  std::function<Words(const TrainOptions& base)> words;
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

const Words kCompared = {"softmax", "mamba2", "mamba2s", "2mamba", "2mamba-dt"};

// The paper's lengths are one, two and four times its shortest.
Words at_lengths(const TrainOptions& base) {
  Words words;
  for (const int64_t times : {1, 2, 4})
    for (const std::string& preset : kCompared)
      words.push_back(fmt::format("{}:length={}", preset, times * base.length));
  return words;
}

// Discretization in every precision that the device has, and without it in the lowest.
Words in_every_precision(const TrainOptions& base) {
  const Device device = usable_device(base.device);
  Words words, dtypes;
  if (matmul_supports(MatmulPrecision::bf16, device)) dtypes.push_back("bf16");
  if (!device.is_cpu()) dtypes.push_back("tf32");
  dtypes.push_back("f32");
  for (const std::string& dtype : dtypes) words.push_back("2mamba-dt:dtype=" + dtype);
  words.push_back("2mamba:dtype=" + dtypes.front());
  return words;
}

const std::vector<SuiteRows>& suite_rows() {
  static const std::vector<SuiteRows> all = {
      {{"base", "linear attention, Mamba-2 and softmax attention"}, "", always({"linear", "mamba2", "softmax"})},
      {{"norm", "the norm of linear attention, softmax or output"},
       kIsolated,
       always({"linear", "linear-outnorm", "outnorm-relu"})},
      {{"conv", "Table 1: a convolution on linear attention"}, kConv, always(presets_of(kConv))},
      {{"isolated", "Table 2: each component of Mamba-2 alone, on linear attention"},
       kIsolated,
       always(presets_of(kIsolated))},
      {{"buildup", "Table 3: from linear attention to Mamba-2S"}, kBuildup, always(presets_of(kBuildup))},
      {{"compare", "softmax attention, Mamba-2, Mamba-2S and 2Mamba"}, "", always(kCompared)},
      {{"exp", "2Mamba-E: the exponential score"}, "", always({"softmax", "mamba2", "2mamba", "2mamba-e"})},
      {{"lengths", "compare at one, two and four times the length"}, "", at_lengths},
      {{"stability", "2Mamba with discretization in several precisions"}, "", in_every_precision, true},
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

AblationRow row_of(const std::string& word, const TrainOptions& base) {
  AblationRow row{word, word, base, {}};
  const size_t colon = std::min(word.find(':'), word.size());
  row.options.arch = preset(word.substr(0, colon)).name;
  bool own_batch = false;
  for (const auto& [key, value] : key_values(colon < word.size() ? word.substr(colon + 1) : "")) {
    change(row.options, key, value);
    own_batch = own_batch || key == "batch";
  }
  const int64_t tokens = base.batch * base.length;
  if (!own_batch && tokens % row.options.length == 0) row.options.batch = tokens / row.options.length;
  require(row.options.batch * row.options.length == tokens,
          "ablate: {} has {} x {} tokens in a step, the others {} x {}: every row must see as many; choose its length, "
          "or --batch and --length, so that they come out even",
          word, row.options.batch, row.options.length, base.batch, base.length);
  check_train_options(row.options);
  return row;
}

// What the paper says of a row that is one of its own; by the suite's table where several have it.
std::optional<PaperRow> paper_row(const AblationRow& row, const std::string& table) {
  if (row.name != row.options.arch || !row.options.switches.empty()) return {};
  std::optional<PaperRow> found;
  for (const PaperRow& candidate : paper_rows())
    if (candidate.preset == row.name && (!found || candidate.table == table)) found = candidate;
  return found;
}

}  // namespace

const std::vector<PaperRow>& paper_rows() {
  static const std::vector<PaperRow> all = {
      {kConv, "ReLU", "outnorm-relu", 3.12, 3.06},
      {kConv, "Conv (w=2)", "outnorm-conv2", 2.87, 2.93},
      {kConv, "Conv (w=3)", "outnorm-conv3", 2.94, 2.91},
      {kConv, "Conv (w=4)", "outnorm-conv4", 2.84, 2.9},
      {kConv, "Conv (w=2) + SiLU", "outnorm-conv2-silu", 2.95, 2.9},
      {kConv, "Conv (w=3) + SiLU", "outnorm-conv3-silu", 2.95, 2.89},
      {kConv, "Conv (w=4) + SiLU", "outnorm-conv4-silu", 2.9, 2.89},

      {kIsolated, "SM Norm + ReLU", "linear", 3.0, 3.03},
      {kIsolated, "Out Norm", "linear-outnorm", 3.19, 3.13},
      {kIsolated, "Out Norm + ReLU", "outnorm-relu", 3.12, 3.06},
      {kIsolated, "Out Norm + Conv (w=2)", "outnorm-conv2", 2.87, 2.93},
      {kIsolated, "Out Norm + Conv (w=3)", "outnorm-conv3", 2.94, 2.91},
      {kIsolated, "Out Norm + Conv (w=2) + SiLU", "outnorm-conv2-silu", 2.95, 2.9},
      {kIsolated, "Out Norm + D res", "outnorm-d", 3.18, 3.11},
      {kIsolated, "Out Norm + Z gate", "outnorm-z", 3.2, 3.13},
      {kIsolated, "Out Norm + value discretize", "outnorm-dt", 3.06, 3.06},
      {kIsolated, "Out Norm + A-mask original", "outnorm-a-original", 2.94, 2.98},
      {kIsolated, "Out Norm + A-mask softplus", "outnorm-a-softplus", 2.85, 2.88},

      {kBuildup, "Plain Linear", "linear-outnorm", 3.19, 3.13},
      {kBuildup, "Conv (w=2)", "outnorm-conv2", 2.87, 2.93},
      {kBuildup, "Conv (w=2) + A-mask original", "conv2-a-original", 2.81, 2.8},
      {kBuildup, "Conv (w=2) + A-mask softplus", "conv2-a-softplus", 2.67, 2.77},
      {kBuildup, "Conv (w=2) + A-mask softplus + value discretize", "mamba2s", 2.7, 2.76},
      {kBuildup, "Conv (w=2) + A-mask softplus + value discretize + SiLU", "mamba2s-silu", 2.73, 2.76},
      {kBuildup, "Conv (w=2) + A-mask softplus + value discretize + D res", "mamba2s-d", 2.79, 2.76},
      {kBuildup, "Conv (w=2) + A-mask softplus + value discretize + Z gate", "mamba2s-z", 2.72, 2.78},
  };
  return all;
}

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

std::vector<AblationRow> ablation_rows(const std::vector<std::string>& words, const TrainOptions& base) {
  std::vector<AblationRow> rows;
  std::set<std::string> names;
  const auto add = [&](AblationRow row, const std::string& table) {
    if (!names.insert(row.name).second) return;
    row.paper = paper_row(row, table);
    if (!table.empty() && row.paper) row.label = row.paper->label;
    if (base.data.starts_with("synthetic:")) row.paper.reset();  // the paper's losses are of text
    rows.push_back(std::move(row));
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
              "ablate: {}: a suite takes no changes of its own; options for all its rows are flags (--lr, --switches)",
              word);
      add(row_of(word, base), "");
      continue;
    }
    TrainOptions options = base;
    options.log_values = options.log_values || suite->log_values;
    for (const std::string& row : suite->words(options)) add(row_of(row, options), suite->table);
  }
  require(!rows.empty(), "ablate: nothing to train; name a suite or presets");
  return rows;
}

}  // namespace furious
