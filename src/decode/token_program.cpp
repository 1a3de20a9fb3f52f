#include "decode/token_program.h"

#ifndef FURIOUS_CUDA

namespace furious {

struct TokenProgram::Parts {};

bool TokenProgram::fits(Device, const Sizes&) {
  return false;
}
int TokenProgram::resident_blocks(Device, int) {
  return 0;
}
TokenProgram::TokenProgram(Device, const std::function<void()>&) {}
TokenProgram::~TokenProgram() = default;
void TokenProgram::run(const Tensor&) const {}

}  // namespace furious

#endif
