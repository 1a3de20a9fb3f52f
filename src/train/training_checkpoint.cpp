#include "train/training_checkpoint.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "data/utf8.h"
#include "model/checkpoint.h"
#include "train/options.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTrainingFile = "training.safetensors";
constexpr const char* kStepPrefix = "step-";

std::string checksum_text(const SafetensorsReader& file) {
  return file.checksum() ? hash_text(*file.checksum()) : "";
}

void write_model(const fs::path& directory, const LanguageModel& model, const TrainData& data) {
  if (data.tokenizer) save_tokenizer(directory, *data.tokenizer, model.config().bos);
  save_model(directory, model);
}

}  // namespace

SafetensorsReader open_training_file(const fs::path& checkpoint) {
  return SafetensorsReader(checkpoint / kTrainingFile);
}

TrainingState training_state(const SafetensorsReader& file) {
  const auto found = file.metadata().find("furious");
  require(found != file.metadata().end(), "{}: was not written by furious train", file.path().string());
  const std::string origin = fmt::format("{}: its metadata is damaged", file.path().string());
  const nlohmann::json parsed = parse_json(found->second, origin);
  const JsonValue saved(parsed, origin);
  return {saved.at("step").integer(0, std::numeric_limits<int64_t>::max()), saved.at("data").text(),
          saved.has("model") ? saved.at("model").text() : "", saved.at("options").texts()};
}

TrainOptions saved_options(const fs::path& checkpoint) {
  TrainOptions options;
  for (const auto& [name, text] : training_state(open_training_file(checkpoint)).options)
    set_train_option(options, name, bytes_of_utf8(text));
  return options;
}

void write_checkpoint(const fs::path& directory, const LanguageModel& model,
                      const std::map<std::string, Tensor>& states, int64_t step, const TrainData& data,
                      const TrainOptions& options) {
  write_model(directory, model, data);
  const nlohmann::json saved{{"step", step},
                             {"data", data.fingerprint},
                             {"model", checksum_text(SafetensorsReader(directory))},
                             {"options", to_texts(options)}};
  write_safetensors(directory / kTrainingFile, states, {{"furious", saved.dump()}});
}

void write_average(const fs::path& directory, const LanguageModel& average, const TrainData& data) {
  fs::create_directory(directory / kAverageFolder);
  write_model(directory / kAverageFolder, average, data);
}

std::vector<std::string> checkpoint_mismatches(const fs::path& checkpoint) {
  const SafetensorsReader file = open_training_file(checkpoint), weights(checkpoint);
  const TrainingState saved = training_state(file);
  std::vector<std::string> lines = changed_files(weights);
  const std::string folder = checkpoint.filename().string();
  if (is_checkpoint_name(folder) && folder != checkpoint_name(saved.step))
    lines.push_back(fmt::format("{}: is of step {} by its name, but of step {} by its {}", checkpoint.string(),
                                folder.substr(std::string(kStepPrefix).size()), saved.step, kTrainingFile));
  if (!saved.model.empty() && saved.model != checksum_text(weights))
    lines.push_back(fmt::format("{}: was not saved together with {}", weights.path().string(), kTrainingFile));
  return lines;
}

std::vector<std::string> checkpoint_damage(const fs::path& checkpoint) {
  std::vector<std::string> lines;
  const auto add = [&](const auto& find) {
    try {
      for (const std::string& line : find()) lines.push_back(line);
    } catch (const Error& error) {
      if (std::ranges::count(lines, error.what()) == 0) lines.emplace_back(error.what());
    }
  };
  add([&] { return SafetensorsReader(checkpoint).damage(); });
  if (fs::exists(checkpoint / kAverageFolder))
    add([&] { return SafetensorsReader(checkpoint / kAverageFolder).damage(); });
  add([&] { return open_training_file(checkpoint).damage(); });
  add([&] { return checkpoint_mismatches(checkpoint); });
  return lines;
}

bool is_checkpoint_name(const std::string& name) {
  return name.starts_with(kStepPrefix) && name.size() >= checkpoint_name(0).size() &&
         std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

int64_t step_of_checkpoint(const fs::path& checkpoint) {
  return std::stoll(checkpoint.filename().string().substr(std::string(kStepPrefix).size()));
}

std::string checkpoint_name(int64_t step) {
  return fmt::format("{}{:08}", kStepPrefix, step);
}

}  // namespace furious
