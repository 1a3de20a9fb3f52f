// `furious verify`: compare files with their checksums.
#include <fmt/format.h>

#include <memory>

#include "base/error.h"
#include "cli/commands.h"
#include "data/dataset.h"
#include "decode/state_file.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "train/run.h"
#include "train/training_checkpoint.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

class Verifier {
 public:
  void verify(const fs::path& path);
  int64_t damaged() const { return damaged_; }

 private:
  // `find` returns what the thing is, and adds what is wrong with it.
  template <class Find>
  void report(const fs::path& path, Find&& find);
  void verify_run(const fs::path& folder);
  void verify_checkpoint(const fs::path& folder);
  void verify_shards(const fs::path& folder, const std::string& file);
  void verify_tensors(const fs::path& path);

  int64_t damaged_ = 0;
};

template <class Find>
void Verifier::report(const fs::path& path, Find&& find) {
  Lines damage;
  std::string what;
  try {
    what = find(damage);
  } catch (const Error& error) {
    damage.emplace_back(error.what());
  }
  if (damage.empty()) fmt::print("ok       {}: {}\n", path.string(), what);
  for (const std::string& line : damage) fmt::print("damaged  {}: {}\n", path.string(), line);
  std::fflush(stdout);
  damaged_ += damage.empty() ? 0 : 1;
}

bool path_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string checked_by(const SafetensorsReader& reader) {
  for (const StoredTensor& tensor : reader.tensors())
    if (!tensor.checksum) return " without checksums: only the structure was checked";
  return "";
}

void Verifier::verify_checkpoint(const fs::path& folder) {
  report(folder, [&](Lines& damage) {
    damage = checkpoint_damage(folder);
    return damage.empty() ? "checkpoint" + checked_by(SafetensorsReader(folder)) : "";
  });
}

void Verifier::verify_run(const fs::path& folder) {
  const std::vector<fs::path> checkpoints = checkpoints_in(folder);
  for (const fs::path& checkpoint : checkpoints) verify_checkpoint(checkpoint);
  if (!path_exists(folder / "run.toml")) return;
  report(folder / "run.toml", [&](Lines& damage) {
    if (const std::string line = run_toml_damage(folder, saved_options(checkpoints.back())); !line.empty())
      damage.push_back(line);
    return "agrees with the newest checkpoint";
  });
}

// A folder of shards, or one file of it.
void Verifier::verify_shards(const fs::path& folder, const std::string& file) {
  report(file.empty() ? folder : folder / file, [&](Lines& damage) {
    const Dataset data(folder.string());
    for (const std::string& line : data.damage())
      if (line.find(file) != std::string::npos) damage.push_back(line);
    int64_t shards = 0;
    for (const Split split : kSplits) shards += static_cast<int64_t>(data.manifest()[split].shards.size());
    return file.empty() ? fmt::format("{} shards of tokens", shards) : "part of a shard of tokens";
  });
}

void Verifier::verify_tensors(const fs::path& path) {
  report(path, [&](Lines& damage) {
    const SafetensorsReader reader(path);
    const bool is_state = is_state_file(reader);
    damage = is_state ? state_damage(reader) : reader.damage();
    if (fs::is_directory(path))
      for (const std::string& line : changed_files(reader)) damage.push_back(line);
    return is_state ? "state of a session" : fmt::format("{} tensors{}", reader.tensors().size(), checked_by(reader));
  });
}

void Verifier::verify(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    const std::string ending = path.extension().string();
    if (ending == ".tokens" || ending == ".documents" || ending == ".checks")
      return verify_shards(path.has_parent_path() ? path.parent_path() : ".", path.filename().string());
    return verify_tensors(path);
  }
  if (path_exists(path / "training.safetensors")) return verify_checkpoint(path);
  if (!checkpoints_in(path).empty()) return verify_run(path);
  if (path_exists(path / "model.safetensors") || path_exists(path / "model.safetensors.index.json"))
    return verify_tensors(path);
  verify_shards(path, "");
}

}  // namespace

void add_verify(CLI::App& app) {
  auto paths = std::make_shared<std::vector<std::string>>();
  CLI::App* command = app.add_subcommand("verify", "Compare files with their checksums");
  command
      ->add_option(
          "path", *paths,
          "Runs (all of their checkpoints), checkpoints, models, .safetensors files, folders of token shards or "
          "saved states")
      ->required();
  command->footer(
      "Prints a line for each: ok, or what is damaged. The exit code is 1 if anything is damaged.\n"
      "Example: furious verify run shards chapter.state");
  command->callback([paths] {
    Verifier verifier;
    for (const std::string& path : *paths) verifier.verify(path);
    require(verifier.damaged() == 0,
            "verify: {} damaged; restore them from a copy, or resume from an undamaged checkpoint", verifier.damaged());
  });
}

}  // namespace furious::cli
