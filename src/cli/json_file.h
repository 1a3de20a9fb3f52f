// The file of a --json option, opened before the work begins, so that an unwritable path is reported first.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/file.h"

namespace furious::cli {

class JsonFile {
 public:
  explicit JsonFile(const std::string& path) {  // empty: no file
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
