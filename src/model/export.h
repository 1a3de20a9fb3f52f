// A model as a directory that other programs load: as one of the classes of Hugging Face's library where that has the
// block, else with a module of PyTorch beside the weights (formats/modeling_furious.py).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "model/language_model.h"

namespace furious {

enum class ExportKind : uint8_t {
  automatic,  // Llama, Qwen2, Qwen3, Mamba-2 or Brumby where the block is one of theirs, else `code`
  code,       // our own format and modeling_furious.py, which computes every block
  own         // our own format alone
};

struct ExportOptions {
  ExportKind kind = ExportKind::automatic;
  int32_t bos = -1, eos = -1;  // of the tokenizer, for config.json; -1: none
};

struct Exported {
  std::string what;         // for people
  std::string model_type;   // in config.json
  bool needs_code = false;  // a class that no version of the library has, so that `trust_remote_code` is needed
  std::string reason = {};  // why it is no class of the library; empty where it is one
};

// Writes config.json, model.safetensors and what else is needed into an existing directory. Matrices are written in the
// dtype that the model has them in, everything else in f32. Rows of queries and keys are put in the order that the
// library's rotary positions expect.
Exported export_model(const std::filesystem::path& directory, const LanguageModel& model,
                      const ExportOptions& options = {});

// The same model, of a CPU, with its matrices in another dtype, for reading and exporting only. Weights that f16 cannot
// hold are an Error that names the parameter.
LanguageModel with_matrices(const LanguageModel& model, DType dtype);

// The content of modeling_furious.py.
std::string_view modeling_furious();

}  // namespace furious
