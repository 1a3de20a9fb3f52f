// `furious presets`: the architectures and ablation rows by name, with their parameters and memory.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "model/config_json.h"
#include "model/plan.h"
#include "report/table.h"

namespace furious::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kShownPreset = "2mamba";
constexpr std::array<int64_t, 3> kLengths = {1 << 10, 8 << 10, 64 << 10};

struct PresetsCommand {
  std::string name;
  std::string given_size;  // empty: all sizes, and the cache memory of the paper's small one
  std::string size = "small";
  int64_t vocabulary = 32000;
  std::string json;

  void run() const;
};

struct Row {
  const Preset& preset;
  std::vector<int64_t> parameters;  // by size
  std::vector<int64_t> bytes;       // of one sequence, by length
};

Row row_of(const Preset& preset, const PresetsCommand& options) {
  Row row{preset, {}, {}};
  for (const Size& size : sizes())
    row.parameters.push_back(parameter_count(model_config(preset.name, size.name, options.vocabulary)));
  const ModelConfig config = model_config(preset.name, options.size, options.vocabulary);
  for (const int64_t length : kLengths)
    row.bytes.push_back(cache_numbers(config, length) * static_cast<int64_t>(sizeof(float)));
  return row;
}

// Four digits or fewer and a unit: 275.3M.
std::string count_text(int64_t count) {
  if (count < 1000) return fmt::format("{}", count);
  std::string_view units = "kMBT";
  double value = static_cast<double>(count) / 1000;
  for (; value >= 999.95 && units.size() > 1; units.remove_prefix(1)) value /= 1000;
  return fmt::format("{:.1f}{}", value, units.front());
}

// The block's switches with the names and values of config.json, which --switches accepts; rare ones only where this
// block uses them.
Json switches_of(const ModelConfig& config) {
  const Json all = Json::parse(config_to_json(config));
  Json switches;
  for (const std::string& key : switch_names())
    if (all.contains(key)) switches[key] = all[key];
  return switches;
}

void print_one(const Preset& preset, const PresetsCommand& options) {
  const ModelConfig config = model_config(preset.name, options.size, options.vocabulary);
  fmt::print("{}: {}\n\n", preset.name, preset.description);
  fmt::print("At size {}: {} head{} of {} with queries and keys of {}", options.size, config.heads(),
             config.heads() == 1 ? "" : "s", config.head_dim, config.qk_dim);
  if (config.branch > 0) fmt::print(", beside a gated branch of {} channels", config.branch);
  fmt::print("\n\nSwitches, to be changed with --switches KEY=VALUE,…:\n");
  const Json switches = switches_of(config);
  for (const auto& [key, value] : switches.items())
    fmt::print("  {:<14} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
}

// The sizes with their dimensions, and what a 2Mamba of them has.
void print_sizes(const PresetsCommand& options) {
  Table table{{"size", "hidden", "intermediate", "heads", "head dim", "layers", "2mamba", "of it layers"}, {}};
  for (const Size& size : sizes()) {
    if (!options.given_size.empty() && size.name != options.given_size) continue;
    const ModelConfig config = model_config(kShownPreset, size.name, options.vocabulary);
    const int64_t all = parameter_count(config), around = 2 * config.vocabulary * config.hidden;
    table.rows.push_back({size.name, fmt::format("{}", size.hidden), fmt::format("{}", size.intermediate),
                          fmt::format("{}", size.heads), fmt::format("{}", size.hidden / size.heads),
                          fmt::format("{}", size.layers), count_text(all), count_text(all - around)});
  }
  fmt::print("\nSizes, with the parameters of {} for a vocabulary of {}\n\n{}", kShownPreset, options.vocabulary,
             to_text(table));
}

void print(const std::vector<Row>& rows, const PresetsCommand& options) {
  size_t width = 0;
  for (const Row& row : rows) width = std::max(width, row.preset.name.size());
  for (const Row& row : rows) fmt::print("{:<{}}  {}\n", row.preset.name, width, row.preset.description);
  fmt::print(
      "\nParameters with a vocabulary of {}; cache memory of a sequence in MB (f32) at size {}, by length in "
      "tokens\n\n",
      options.vocabulary, options.size);
  Table table{{"preset"}, {}};
  for (const Size& size : sizes()) table.header.push_back(size.name);
  for (const int64_t length : kLengths) table.header.push_back(fmt::format("MB at {}k", length >> 10));
  for (const Row& row : rows) {
    auto& cells = table.rows.emplace_back(1, row.preset.name);
    for (const int64_t count : row.parameters) cells.push_back(count_text(count));
    for (const int64_t bytes : row.bytes) cells.push_back(fmt::format("{:.2f}", static_cast<double>(bytes) / 1e6));
  }
  fmt::print("{}", to_text(table));
  print_sizes(options);
}

Json to_json(const std::vector<Row>& rows, const PresetsCommand& options) {
  Json presets = Json::array();
  for (const Row& row : rows) {
    Json parameters, bytes;
    for (size_t i = 0; i < row.parameters.size(); ++i) parameters[sizes()[i].name] = row.parameters[i];
    for (size_t i = 0; i < row.bytes.size(); ++i) bytes[std::to_string(kLengths[i])] = row.bytes[i];
    const ModelConfig config = model_config(row.preset.name, options.size, options.vocabulary);
    presets.push_back({{"name", row.preset.name},
                       {"description", row.preset.description},
                       {"heads", config.heads()},
                       {"head_dim", config.head_dim},
                       {"qk_dim", config.qk_dim},
                       {"branch", config.branch},
                       {"switches", switches_of(config)},
                       {"parameters", parameters},
                       {"sequence_bytes", bytes}});
  }
  Json dimensions = Json::array();
  for (const Size& size : sizes())
    dimensions.push_back({{"name", size.name},
                          {"hidden", size.hidden},
                          {"intermediate", size.intermediate},
                          {"heads", size.heads},
                          {"layers", size.layers}});
  return {{"vocabulary", options.vocabulary}, {"size", options.size}, {"presets", presets}, {"sizes", dimensions}};
}

void PresetsCommand::run() const {
  JsonFile file(json);
  std::vector<Row> rows;
  for (const Preset& one : presets())
    if (name.empty() || one.name == name) rows.push_back(row_of(one, *this));
  if (name.empty())
    print(rows, *this);
  else
    print_one(preset(name), *this);
  file.write(to_json(rows, *this));
}

std::vector<std::string> size_names() {
  std::vector<std::string> names;
  for (const Size& size : sizes()) names.push_back(size.name);
  return names;
}

void check_size(const std::string& name) {
  const std::vector<std::string> known = size_names();
  if (std::ranges::find(known, name) == known.end()) unknown_name("size", name, known);
}

}  // namespace

void add_presets(CLI::App& app) {
  auto options = std::make_shared<PresetsCommand>();
  CLI::App* command = app.add_subcommand("presets", "List the architectures with their parameters and cache memory");
  command->add_option("--preset", options->name, "Show only this preset, with its switches")
      ->check(parsed_by([](const std::string& name) { preset(name); }));
  command
      ->add_option("--size", options->given_size,
                   fmt::format("Size whose dimensions and cache memory are shown: {}; by default all, and the cache "
                               "memory of small",
                               fmt::join(size_names(), ", ")))
      ->check(parsed_by(check_size));
  command->add_option("--vocab", options->vocabulary, "Vocabulary size of the models")
      ->check(CLI::Range(int64_t{1}, int64_t{std::numeric_limits<int32_t>::max()}))
      ->capture_default_str();
  add_json(*command, options->json, "Write the list to this JSON file");
  command->footer("Example: furious presets --size medium --vocab 8192 --json presets.json");
  command->callback([options] {
    if (!options->given_size.empty()) options->size = options->given_size;
    options->run();
  });
}

}  // namespace furious::cli
