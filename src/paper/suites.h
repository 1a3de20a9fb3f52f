// The experiments of the paper as lists of rows: the options of each row, and the losses in the paper.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "furious/train.h"

namespace furious {

struct PaperRow {
  std::string table;  // "Table 1", "Figure 6"
  std::string label;
  std::string preset;
  double train_loss = 0, test_loss = 0;
  std::string size = "small";
  int64_t length = 2048;

  std::string setting() const;  // the model, data and steps, in words; rows of one setting can be compared
};
const std::vector<PaperRow>& paper_rows();  // of all tables and figures of losses

// Experiments with other training than the rest: longer, or on other text.
inline constexpr const char* kLongRun = "Figure 9";
inline constexpr const char* kPile = "the Pile (appendix)";
inline constexpr const char* kSlimPajama = "SlimPajama (appendix)";

struct Suite {
  std::string name;
  std::string about;
};
const std::vector<Suite>& suites();

struct AblationRow {
  std::string name;   // as the command line has it: "2mamba:conv_window=3"
  std::string label;  // as the paper has it, or the name
  TrainOptions options;
  std::optional<PaperRow> paper;

  std::string folder() const;  // the name, fit for a file system
};

// The rows that the words of the command line select, each once. A word is a suite, or a preset with changes
// (PRESET:key=value,key=value), where a key is a switch of the block or an option of training. Such a row has as many
// tokens in a step as the base: one that changes the length and not the batch gets the batch that keeps their product.
// The suite `lengths` keeps the batch instead, as the paper does.
//
// The paper's losses of a row are those of its preset, size and length; where it has none of that size, those of its
// suite's figure or else of the small model; where it has none of that length, and all rows share one, those of 2048.
//
// With a grid every row comes once for each combination of its values, which are further changes of the row. A row that
// is invalid is an Error that names it.
struct GridAxis {
  std::string key;
  std::vector<std::string> values;
};
GridAxis grid_axis(const std::string& text);  // "lr=1e-3,3e-3", "layers=2..4"
std::vector<AblationRow> ablation_rows(const std::vector<std::string>& words, const TrainOptions& base,
                                       const std::vector<GridAxis>& grid = {});

}  // namespace furious
