#include <algorithm>
#include <utility>

#include "model/pickle.h"
#include "model/safetensors_format.h"

namespace furious::safetensors {
namespace {

namespace fs = std::filesystem;

// {"weight_map": {tensor: file, …}, …}; what else the index holds is passed over.
class IndexEvents final : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  std::map<std::string, std::string> files;  // by tensor
  bool seen_map = false;

  bool start_object(size_t) override {
    ++depth_;
    if (depth_ == 2 && name_ == "weight_map") {
      if (std::exchange(seen_map, true)) refuse("\"weight_map\" appears twice");
      in_map_ = true;
    } else if (depth_ > 2) {
      pass("an object");
    }
    return true;
  }
  bool end_object() override {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(size_t) override {
    pass("a list");
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(std::string& text) override {
    name_ = text;
    return true;
  }
  bool string(std::string& text) override {
    if (!in_map_) return pass("a string");
    if (!files.try_emplace(name_, text).second)
      refuse(fmt::format("tensor {} appears twice in \"weight_map\"", shown(name_)));
    return true;
  }
  bool number_unsigned(uint64_t) override { return pass("a number"); }
  bool number_integer(int64_t) override { return pass("a number"); }
  bool number_float(double, const std::string&) override { return pass("a number"); }
  bool boolean(bool) override { return pass("true or false"); }
  bool null() override { return pass("null"); }

 private:
  bool pass(std::string_view what) const {
    if (in_map_ || depth_ == 0 || (depth_ == 1 && name_ == "weight_map")) unexpected(what);
    return true;
  }

  std::string complaint(std::string_view what) const override {
    if (depth_ == 0) return fmt::format("the index is {}, expected an object", what);
    if (!in_map_) return fmt::format("\"weight_map\" is {}, expected an object", what);
    return fmt::format("tensor {} in \"weight_map\" is {}, expected the name of a file", shown(name_), what);
  }

  size_t depth_ = 0;
  bool in_map_ = false;
  std::string name_;
};

std::vector<StoredTensor> tensors_of(const fs::path& file) {
  if (file.extension() == ".bin") return read_pickled_tensors(file);
  return open_file(std::make_shared<const MappedFile>(file)).tensors;
}

}  // namespace

// The index says which file holds which tensor; what the files hold beyond that is left alone. Files lie beside the
// index: a name that leads elsewhere is refused.
std::vector<StoredTensor> open_index(const fs::path& path) {
  const std::string text = read_text(path, kMaxHeaderBytes);
  IndexEvents events(path);
  events.parse(text);
  if (!events.seen_map) damaged(path, "the index has no \"weight_map\"");

  std::map<std::string, std::vector<StoredTensor>> opened;
  std::vector<StoredTensor> tensors;
  for (const auto& [name, file] : events.files) {
    if (file.empty() || file == "." || file == ".." || file.find_first_of(std::string_view("/\\\0", 3)) != file.npos)
      fail("{}: tensor {} is said to lie in {}; expected the name of a file in the same directory", path.string(),
           shown(name), shown(file));
    if (!opened.contains(file)) {
      const fs::path shard = path.parent_path() / file;
      std::error_code ignored;
      require(fs::exists(shard, ignored), "{}: tensor {} is said to lie in {}, which is missing; copy or download it",
              path.string(), shown(name), shown(file));
      opened.emplace(file, tensors_of(shard));
    }
    const StoredTensor* const found = find_by_name(opened.at(file), name);
    if (!found) damaged(path, fmt::format("tensor {} is not in {}, where the index has it", shown(name), shown(file)));
    tensors.push_back(*found);
  }
  return tensors;
}

}  // namespace furious::safetensors
