// A format of other programs that models are written in. formats/format.h reads them.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "model/language_model.h"

namespace furious {

using TensorsByName = std::map<std::string, Tensor>;

struct ExportFormat {
  std::string_view name;  // for people
  bool in_library;        // whether Hugging Face's library has the class
  // What the model has and no model of this format; empty: nothing.
  std::string (*difference)(const LanguageModel& model);
  nlohmann::ordered_json (*config)(const ModelConfig& config);
  TensorsByName (*tensors)(const LanguageModel& model);
};

// Each has a file of its own.
extern const ExportFormat kLlamaExport, kBrumbyExport, kMamba2Export;

// As short as a float needs: 1e-05, not the digits of the double next to it.
double short_number(float value);

// One row of every `rows.size(0) / groups` neighbours; nothing where these differ.
std::optional<Tensor> shared_rows(const Tensor& rows, int64_t groups);

// The parts one behind the other in the first dimension; of one dtype.
Tensor joined_rows(const std::vector<Tensor>& parts);

}  // namespace furious
