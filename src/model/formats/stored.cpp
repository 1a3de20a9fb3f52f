#include "model/formats/stored.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "base/names.h"
#include "ops/elementwise.h"

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

Tensor stored_elements(const SafetensorsReader& reader, const std::vector<StoredRange>& pieces, DType dtype) {
  const auto converted = [&](const Tensor& x) { return x.dtype() == dtype ? x : to_dtype(x, dtype); };
  const auto elements_of = [&](const StoredRange& piece) {
    return converted(reader.view(piece.name).view({piece.shape.elements()}).slice(0, piece.first, piece.stored()));
  };
  if (pieces.size() == 1 && pieces[0].repeat == 1) return elements_of(pieces[0]);
  int64_t count = 0;
  for (const StoredRange& piece : pieces) count += piece.adds ? 0 : piece.elements();
  const Tensor all = Tensor::empty({count}, dtype);
  int64_t done = 0;
  for (const StoredRange& piece : pieces) {
    const Tensor own = elements_of(piece);
    if (piece.adds) {
      add_into(all.slice(0, done - piece.elements(), piece.elements()), own);
      continue;
    }
    const Tensor to =
        all.slice(0, done, piece.elements()).view({piece.stored() / piece.unit, piece.repeat, piece.unit});
    for (int64_t i = 0; i < piece.repeat; ++i) copy(to.select(1, i), own.view({to.size(0), piece.unit}));
    done += piece.elements();
  }
  return all;
}

std::optional<std::string> renamed(const std::string& name, std::string_view ours, std::string_view theirs) {
  const size_t at = name.find(ours);
  if (at == std::string::npos) return std::nullopt;
  return name.substr(0, at) + std::string(theirs) + name.substr(at + ours.size());
}

std::vector<StoredRange> separate_qkv(const ModelConfig& config, const std::string& name, const Shape& shape) {
  const size_t dot = name.rfind('.') + 1;
  const auto part = [&](const char* projection, int64_t rows) {
    const Shape own = shape.rank() == 1 ? Shape{rows} : Shape{rows, shape[1]};
    return StoredRange{name.substr(0, dot) + projection + name.substr(dot - 1), own};
  };
  return {part("q_proj", config.q_heads * config.qk_dim), part("k_proj", config.k_heads * config.qk_dim),
          part("v_proj", config.v_heads * config.head_dim)};
}

}  // namespace furious
