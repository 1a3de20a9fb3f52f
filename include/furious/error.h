// What went wrong, said to the user: where, what came, what was expected, what to do.
#pragma once

#include <stdexcept>

#include "furious/export.h"

namespace furious {

class FURIOUS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace furious
