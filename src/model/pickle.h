// The tensors of a pytorch_model.bin: a ZIP archive, stored without compression, of a pickle and the bytes of storages.
//
// A pickle is a program. This reads the few instructions that a dictionary of tensors needs and knows four globals:
// collections.OrderedDict, torch._utils._rebuild_tensor_v2, and torch's storages of floating-point numbers by their
// dtype. Anything else is refused with its name: nothing in the file is ever called.
#pragma once

#include <filesystem>
#include <vector>

#include "model/safetensors.h"

namespace furious {

// Sorted by name. A file that breaks the format in any way is an Error.
std::vector<StoredTensor> read_pickled_tensors(const std::filesystem::path& path);

}  // namespace furious
