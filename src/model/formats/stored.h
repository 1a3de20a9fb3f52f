// Tensors of a checkpoint by their names in the file, with errors that name file and tensor.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"

namespace furious {

// A run of elements of a stored tensor, of which `shape` is expected. A parameter is made of one or several, one behind
// the other.
struct StoredRange {
  std::string name;
  Shape shape;
  int64_t first = 0;
  int64_t count = -1;            // -1: all that follow
  int64_t unit = 1, repeat = 1;  // each `unit` elements are repeated: what heads share there, each has here
  bool adds = false;             // is added to the range before it

  int64_t stored() const { return count < 0 ? shape.elements() - first : count; }
  int64_t elements() const { return stored() * repeat; }
};

// Of a dtype that can be loaded, so that its shape is one of numbers that are there. `shape` is for the message.
const StoredTensor& stored_tensor(const SafetensorsReader& reader, std::string_view name, std::string_view shape = "");
int64_t stored_size(const SafetensorsReader& reader, const std::string& name, size_t dim);

// The elements of a parameter on the CPU, in this dtype.
Tensor stored_elements(const SafetensorsReader& reader, const std::vector<StoredRange>& pieces, DType dtype);

// The name with `theirs` instead of its part `ours`; nothing if it has no such part.
std::optional<std::string> renamed(const std::string& name, std::string_view ours, std::string_view theirs);

// Queries, keys and values that lie apart: "….attn.weight" is "….attn.q_proj.weight" and so on.
std::vector<StoredRange> separate_qkv(const ModelConfig& config, const std::string& name, const Shape& shape);

}  // namespace furious
