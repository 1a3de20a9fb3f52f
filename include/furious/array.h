// Numbers with a name and a shape: parameters, gradients and states as plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace furious {

struct NamedArray {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;  // row-major
};

}  // namespace furious
