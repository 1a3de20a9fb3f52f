// Multi-query associative recall: small models read key-value pairs and then all keys again, each of which asks for its
// value. Right answers are counted by architecture, size of the state and number of pairs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/accuracy.h"
#include "paper/small_models.h"
#include "report/heat_map.h"

namespace furious {

struct RecallStudy {
  std::vector<std::string> archs{kCompared};
  std::vector<int64_t> dims{16, 32, 64};      // of a head; they determine the size of the state
  std::vector<int64_t> pairs{4, 8, 16, 32};   // key-value pairs in a text
  int64_t rows = 64;                          // texts for each number of pairs
  TrainOptions base = small_model_options();  // of all models
};

// Architecture by architecture, dimension by dimension. Invalid options of the study are an Error, before any training.
std::vector<SmallModel> recall_models(const RecallStudy& study);

struct RecallCell {
  std::string arch;
  int64_t head_dim = 0;
  int64_t sequence_bytes = 0;  // cache memory of a sequence after the longest text
  int64_t pairs = 0;
  Accuracy found;
};

// Evaluates the trained models of recall_models: a cell for each model and number of pairs.
std::vector<RecallCell> recall_cells(const RecallStudy& study, const std::vector<LanguageModel>& trained);

// One map per architecture, with a row per dimension and a column per number of pairs.
std::vector<HeatMap> recall_maps(const RecallStudy& study, const std::vector<RecallCell>& cells);
nlohmann::ordered_json recall_json(const RecallStudy& study, const std::vector<RecallCell>& cells);

}  // namespace furious
