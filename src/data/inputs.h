// The files of a corpus: their formats, and the paths, folders and globs that name them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace furious {

enum class TextFormat { text, jsonl, parquet, json, csv, tsv, html, arrow };

std::string name_of(TextFormat format);  // "text", "jsonl", …
TextFormat text_format_from_name(const std::string& name);
const std::vector<std::string>& text_format_names();  // those that can be chosen for any file

inline constexpr const char* kStandardInput = "-";

struct InputFile {
  std::string path;
  TextFormat format = TextFormat::text;
  int64_t size = 0;        // on disk
  int64_t modified = 0;    // nanoseconds, as the file system counts them; 0: standard input
  int64_t test_from = -1;  // the text from this byte on is a document of the test split; −1: there is none

  // A file of text is one document, unless it is split on blank lines.
  bool is_text() const { return format == TextFormat::text || format == TextFormat::html; }
  // Rows of a table with binary columns: positions count rows.
  bool is_columnar() const { return format == TextFormat::parquet || format == TextFormat::arrow; }
  // Whether the bytes of the file are those of its text.
  bool is_plain() const;
};

// The files that `inputs` name: files, folders (all known files below them, sorted), globs, and "-" for standard input,
// in the order given. The format of a file follows from its name; `format` is that of all files given by name, and of
// standard input, which is text otherwise. A README.md in a folder does not count; in a folder with .parquet or .arrow
// files only those, .txt and .jsonl count: the rest describes them. Throws if an input names none, or a folder holds
// several splits of a dataset.
std::vector<InputFile> find_inputs(const std::vector<std::string>& inputs, std::optional<TextFormat> format = {});

}  // namespace furious
