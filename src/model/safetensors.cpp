#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/names.h"
#include "model/pickle.h"
#include "model/safetensors_format.h"
#include "ops/elementwise.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using namespace safetensors;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

// The training runs in a folder, or in that of `furious ablate`.
std::vector<std::string> runs_in(const fs::path& folder) {
  std::vector<std::string> runs;
  std::error_code ignored;
  for (const fs::path& place : {folder, folder / "runs"})
    for (const auto& entry : fs::directory_iterator(place, ignored))
      if (fs::is_directory(entry.path() / "latest", ignored)) runs.push_back(printable(entry.path().string()));
  std::ranges::sort(runs);
  return runs;
}

fs::path file_to_open(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "consolidated.safetensors",
                           "pytorch_model.bin", "pytorch_model.bin.index.json"})
    if (fs::exists(path / name, ignored)) return path / name;
  const std::vector<std::string> runs = runs_in(path);
  require(runs.empty(), "{}: is a folder that contains runs, not a model; name one of them, such as {}", path.string(),
          runs.front());
  fail("{}: is not a model; it holds neither model.safetensors nor model.safetensors.index.json", path.string());
}

std::string label(const StoredTensor& stored) {
  return fmt::format("{}: tensor {}", stored.file->path().string(), shown(stored.name));
}

// Names the tensor if it cannot be loaded at all: another dtype than ours, too many dimensions.
DType loadable_dtype(const StoredTensor& stored) {
  const StoredType* const type = find_type(stored.dtype);
  require(type && type->loads_as, "{} has dtype {}, which cannot be loaded; convert it to F32, BF16 or F16",
          label(stored), shown(stored.dtype));
  return *type->loads_as;
}

Shape loadable_shape(const StoredTensor& stored) {
  require(stored.shape.size() <= Shape::kMaxRank, "{} has {} dimensions, more than {}", label(stored),
          stored.shape.size(), Shape::kMaxRank);
  return Shape(std::span<const int64_t>(stored.shape));
}

void check_convertible(const StoredTensor& stored, DType to) {
  const DType from = loadable_dtype(stored);
  require((from == DType::i32) == (to == DType::i32), "{} has dtype {}, which is not converted to {}", label(stored),
          stored.dtype, name_of(to));
}

bool usable_in_place(const StoredTensor& stored, DType dtype) {
  return stored.dtype == stored_name_of(dtype) &&
         reinterpret_cast<uintptr_t>(stored.bytes.data()) % size_of(dtype) == 0;
}

// The mapping itself as a tensor. Tensors know no const; whoever gets this one only reads it.
Tensor in_place(const StoredTensor& stored, DType dtype) {
  return Tensor::wrap(const_cast<std::byte*>(stored.bytes.data()), loadable_shape(stored), dtype, {}, stored.file);
}

Tensor narrowed_to_i32(const StoredTensor& stored) {
  Tensor out = Tensor::empty(loadable_shape(stored), DType::i32);
  int32_t* const to = out.data<int32_t>();
  for (int64_t i = 0; i < out.elements(); ++i) {
    int64_t value = 0;
    std::memcpy(&value, stored.bytes.data() + i * 8, 8);
    require(std::in_range<int32_t>(value), "{} holds {} at position {}, which does not fit 32 bits", label(stored),
            value, i);
    to[i] = static_cast<int32_t>(value);
  }
  return out;
}

// What is wrong with the bytes of a tensor; empty if nothing is known to be.
std::string difference(const StoredTensor& stored) {
  if (!stored.checksum || hash_of_large(stored.bytes) == *stored.checksum) return {};
  const auto begin = static_cast<size_t>(stored.bytes.data() - stored.file->bytes().data());
  return fmt::format("tensor {} (bytes {} to {}) differs from its checksum", shown(stored.name), begin,
                     begin + stored.bytes.size());
}

void check_bytes(const StoredTensor& stored) {
  if (const std::string found = difference(stored); !found.empty()) damaged(stored.file->path(), found);
}

// On the CPU in the dtype it is stored in, aligned; a copy only where the file's bytes do not serve as they are.
Tensor readable(const StoredTensor& stored) {
  const DType dtype = loadable_dtype(stored);
  check_bytes(stored);
  if (stored.dtype == "I64") return narrowed_to_i32(stored);
  if (usable_in_place(stored, dtype)) return in_place(stored, dtype);
  Tensor out = Tensor::empty(loadable_shape(stored), dtype);
  std::memcpy(out.raw(), stored.bytes.data(), stored.bytes.size());
  return out;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const fs::path& path) : path_(file_to_open(path)) {
  if (path_.filename().string().ends_with(kIndexEnding)) {
    tensors_ = open_index(path_);
    return;
  }
  if (path_.extension() == ".bin") {
    tensors_ = read_pickled_tensors(path_);
    return;
  }
  open(std::make_shared<const MappedFile>(path_));
}

SafetensorsReader::SafetensorsReader(const fs::path& name, std::span<const std::byte> bytes) : path_(name) {
  open(std::make_shared<const MappedFile>(name, bytes));
}

void SafetensorsReader::open(std::shared_ptr<const MappedFile> file) {
  OpenedFile opened = open_file(file);
  tensors_ = std::move(opened.tensors);
  metadata_ = std::move(opened.metadata);
  checksum_ = opened.checksum;
}

std::vector<std::string> SafetensorsReader::damage() const {
  std::vector<std::string> lines;
  for (const StoredTensor& tensor : tensors_)
    if (const std::string found = difference(tensor); !found.empty())
      lines.push_back(fmt::format("{}: {}", tensor.file->path().string(), found));
  return lines;
}

const StoredTensor* SafetensorsReader::find(std::string_view name) const {
  return find_by_name(tensors_, name);
}

const StoredTensor& SafetensorsReader::stored(std::string_view name) const {
  const StoredTensor* const found = find(name);
  if (found) return *found;
  std::vector<std::string> known;
  known.reserve(tensors_.size());
  for (const StoredTensor& tensor : tensors_) known.push_back(tensor.name);
  const std::string nearest = nearest_name(name, known);
  fail("{}: holds no tensor {}{}", path_.string(), shown(name),
       nearest.empty() ? "" : fmt::format("; the nearest name there is {}", shown(nearest)));
}

Tensor SafetensorsReader::load(std::string_view name) const {
  return load(name, loadable_dtype(stored(name)));
}

Tensor SafetensorsReader::load(std::string_view name, DType dtype) const {
  const StoredTensor& tensor = stored(name);
  check_convertible(tensor, dtype);
  const Tensor in = readable(tensor);
  const bool shares_the_file = in.raw() == tensor.bytes.data();
  return in.dtype() == dtype && !shares_the_file ? in : to_dtype(in, dtype);
}

void SafetensorsReader::load_into(std::string_view name, const Tensor& out) const {
  const StoredTensor& tensor = stored(name);
  check_convertible(tensor, out.dtype());
  require(loadable_shape(tensor) == out.shape(), "{} has shape {}, expected {}; the file belongs to another model",
          label(tensor), to_string(loadable_shape(tensor)), to_string(out.shape()));
  if (out.device().is_cpu())
    copy(out, readable(tensor));
  else
    copy_between(out, view(name, out.dtype()));
}

Tensor SafetensorsReader::view(std::string_view name) const {
  return view(name, loadable_dtype(stored(name)));
}

Tensor SafetensorsReader::view(std::string_view name, DType dtype) const {
  const StoredTensor& tensor = stored(name);
  if (!usable_in_place(tensor, dtype)) return load(name, dtype);
  check_bytes(tensor);
  return in_place(tensor, dtype);
}

}  // namespace furious
