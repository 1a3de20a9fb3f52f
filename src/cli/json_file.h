// The file of an option --json: opened before the work begins, so that a place that cannot be written is said first.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>

#include "base/error.h"
#include "base/file.h"

namespace furious::cli {

class JsonFile {
 public:
  explicit JsonFile(const std::string& path) {  // empty: no file is asked for
    namespace fs = std::filesystem;
    if (path.empty()) return;
    std::error_code ignored;
    const bool there = fs::exists(path, ignored);
    require(!there || fs::is_regular_file(path, ignored), "--json {}: is there, and is not a regular file", path);
    file_.emplace(there ? fs::canonical(path) : fs::path(path));  // a link stays one
  }

  template <class Json>
  void write(const Json& json) {
    if (!file_) return;
    file_->write(json.dump(2) + "\n");
    file_->commit();
  }

 private:
  std::optional<AtomicFile> file_;
};

}  // namespace furious::cli
