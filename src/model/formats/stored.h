// Tensors of a checkpoint by their names in the file, with errors that name file and tensor.
#pragma once

#include <string>
#include <string_view>

#include "model/safetensors.h"

namespace furious {

// A run of elements of a stored tensor, of which `shape` is expected. A parameter is made of one or several.
struct StoredRange {
  std::string name;
  Shape shape;
  int64_t first = 0;
  int64_t count = -1;  // -1: all that follow

  int64_t elements() const { return count < 0 ? shape.elements() - first : count; }
};

// Of a dtype that can be loaded, so that its shape is one of numbers that are there. `shape` is for the message.
const StoredTensor& stored_tensor(const SafetensorsReader& reader, std::string_view name, std::string_view shape = "");
int64_t stored_size(const SafetensorsReader& reader, const std::string& name, size_t dim);

}  // namespace furious
