#include "data/inputs.h"

#include <glob.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/names.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKnownFiles =
    ".txt, .md, .html, .jsonl, .json, .csv, .tsv (each also .gz or .zst), .parquet and .arrow";

constexpr std::pair<std::string_view, TextFormat> kEndings[] = {
    {".txt", TextFormat::text},     {".md", TextFormat::text},         {".markdown", TextFormat::text},
    {".html", TextFormat::html},    {".htm", TextFormat::html},        {".jsonl", TextFormat::jsonl},
    {".ndjson", TextFormat::jsonl}, {".json", TextFormat::json},       {".csv", TextFormat::csv},
    {".tsv", TextFormat::tsv},      {".parquet", TextFormat::parquet}, {".arrow", TextFormat::arrow}};

bool is_compressed(std::string_view name) {
  return name.ends_with(".gz") || name.ends_with(".zst");
}

std::optional<TextFormat> format_of(std::string_view name) {
  const bool compressed = is_compressed(name);
  if (compressed) name = name.substr(0, name.rfind('.'));
  for (const auto& [ending, format] : kEndings)
    if (name.ends_with(ending)) {
      const bool columnar = InputFile{"", format}.is_columnar();
      return compressed && columnar ? std::nullopt : std::optional(format);
    }
  return std::nullopt;
}

InputFile describe(const fs::path& path, std::optional<TextFormat> chosen = {}) {
  const auto format = chosen ? chosen : format_of(path.filename().string());
  require(format.has_value(),
          "input \"{}\": unknown file type; supported are {}; --format gives the format of a file with another name",
          path.string(), kKnownFiles);
  return {path.string(), *format, static_cast<int64_t>(fs::file_size(path)),
          static_cast<int64_t>(fs::last_write_time(path).time_since_epoch().count())};
}

// The split that a file of a dataset belongs to by its name, as in "train-00000-of-00002.parquet"; empty: none.
std::string split_of(const fs::path& path) {
  const std::string name = path.filename().string();
  for (const char* split : {"train", "test", "validation"})
    if (name.starts_with(std::string(split) + "-")) return split;
  return {};
}

// A folder of datasets.DatasetDict, or of a dataset's .parquet files, has the test split beside the training split:
// taking all of it would train on the test split.
void check_one_split(const fs::path& folder, const std::vector<InputFile>& files) {
  if (fs::exists(folder / "dataset_dict.json"))
    fail("input \"{0}\" holds several splits of a dataset; give one of its folders, as {0}/train --test {0}/test",
         folder.string());
  std::set<std::string> splits;
  for (const InputFile& file : files)
    if (file.is_columnar()) splits.insert(split_of(file.path));
  splits.erase("");
  if (splits.size() > 1)
    fail("input \"{}\" holds several splits of a dataset ({}); give the files of one, as '{}/train-*' --test '{}/{}-*'",
         folder.string(), fmt::join(splits, ", "), folder.string(), folder.string(), *splits.begin());
}

bool is_read_me(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name == "readme.md";
}

void add_folder(const fs::path& folder, std::vector<InputFile>& files) {
  std::vector<InputFile> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file() && format_of(name) && !is_read_me(name)) found.push_back(describe(entry.path()));
  }
  check_one_split(folder, found);
  // Beside records such files are about the corpus, not text of it.
  const auto has_records = [](const InputFile& file) { return file.is_columnar() || file.format == TextFormat::jsonl; };
  if (std::ranges::any_of(found, has_records))
    std::erase_if(found, [](const InputFile& file) {
      return !file.is_columnar() && file.path.find(".txt") == file.path.npos && file.format != TextFormat::jsonl;
    });
  require(!found.empty(), "input \"{}\": no supported files in this folder; supported are {}", folder.string(),
          kKnownFiles);
  std::ranges::sort(found, {}, [](const InputFile& file) { return fs::path(file.path); });
  files.insert(files.end(), found.begin(), found.end());
}

std::vector<std::string> expand_glob(const std::string& pattern) {
  glob_t found = {};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<std::string> paths;
  if (result == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  return paths;
}

}  // namespace

const std::vector<std::string>& text_format_names() {
  static const std::vector<std::string> names = {"text", "jsonl", "parquet", "json", "csv", "tsv", "html", "arrow"};
  return names;
}

std::string name_of(TextFormat format) {
  return text_format_names()[static_cast<size_t>(format)];
}

TextFormat text_format_from_name(const std::string& name) {
  const auto& names = text_format_names();
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) unknown_name("format", name, names);
  return static_cast<TextFormat>(found - names.begin());
}

bool InputFile::is_plain() const {
  return !is_columnar() && format != TextFormat::html && format != TextFormat::json && !is_compressed(path);
}

std::vector<InputFile> find_inputs(const std::vector<std::string>& inputs, std::optional<TextFormat> format) {
  std::vector<InputFile> files;
  for (const std::string& input : inputs) {
    if (input == kStandardInput) {
      files.push_back({input, format.value_or(TextFormat::text)});
      require(!files.back().is_columnar(), "standard input cannot be {}; give a file", name_of(files.back().format));
      continue;
    }
    const bool exists = fs::exists(input);
    const std::vector<std::string> paths = exists ? std::vector<std::string>{input} : expand_glob(input);
    require(!paths.empty(), "input \"{}\" does not exist", input);
    for (const std::string& path : paths) {
      if (fs::is_directory(path))
        add_folder(path, files);
      else
        files.push_back(describe(path, format));
    }
  }
  require(!files.empty(), "no input files were given");
  return files;
}

}  // namespace furious
