// The experiments of the paper as lists of rows: what each row is trained with, and what the paper found.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "furious/train.h"

namespace furious {

struct PaperRow {
  std::string table;  // "Table 1"
  std::string label;
  std::string preset;
  double train_loss = 0, test_loss = 0;
};
const std::vector<PaperRow>& paper_rows();  // of all tables of losses

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

// The rows that words of the command line stand for, each once. A word is a suite, or a preset with changes of one's
// own (PRESET:key=value,key=value), where a key is a switch of the block or an option of training. Every row sees as
// many tokens in a step: one that changes the length and not the batch gets the batch that keeps their product.
std::vector<AblationRow> ablation_rows(const std::vector<std::string>& words, const TrainOptions& base);

}  // namespace furious
