#include "model/formats/stored.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "base/names.h"

namespace furious {

const StoredTensor& stored_tensor(const SafetensorsReader& reader, std::string_view name, std::string_view shape) {
  constexpr std::string_view kLoadable[] = {"F32", "BF16", "F16", "F64"};
  const StoredTensor* const tensor = reader.find(name);
  require(tensor != nullptr, "{}: no tensor \"{}\"{}; the file is incomplete, or of another architecture",
          reader.path().string(), name, shape);
  require(std::ranges::count(kLoadable, tensor->dtype) > 0,
          "{}: tensor \"{}\" has dtype {}, expected F32, BF16 or F16; convert it", tensor->file->path().string(), name,
          printable(tensor->dtype));
  return *tensor;
}

int64_t stored_size(const SafetensorsReader& reader, const std::string& name, size_t dim) {
  const StoredTensor& tensor = stored_tensor(reader, name);
  require(dim < tensor.shape.size() && tensor.shape[dim] > 0, "{}: tensor \"{}\" has shape [{}], expected a size at {}",
          tensor.file->path().string(), name, fmt::join(tensor.shape, ", "), dim);
  return tensor.shape[dim];
}

}  // namespace furious
