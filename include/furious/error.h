// The exception of the library. Its message is for the user: what is wrong, and what to do.
#pragma once

#include <stdexcept>

#include "furious/export.h"

namespace furious {

class FURIOUS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace furious
