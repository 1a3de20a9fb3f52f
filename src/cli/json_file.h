// The file of an option --json: opened before the work begins, so that a place that cannot be written is said first.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/file.h"

namespace furious::cli {

class JsonFile {
 public:
  explicit JsonFile(const std::string& path) {  // empty: no file is asked for
    if (!path.empty()) file_.emplace(path);
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
