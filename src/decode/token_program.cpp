#include "decode/token_program.h"

#ifndef FURIOUS_CUDA

namespace furious {

struct TokenProgram::Parts {
  Tensor logits;
};

std::string TokenProgram::missing(Device, const TokenPlan&, const TokenOp&, int64_t) {
  return "a GPU";
}
std::string TokenProgram::missing(Device, int64_t) {
  return "a GPU";
}
std::string TokenProgram::missing(Device, const TokenPlan&, int64_t) {
  return "a GPU";
}
int TokenProgram::resident_blocks(Device, int) {
  return 0;
}
TokenProgram::TokenProgram(Device, const TokenProgramInputs&) {}
TokenProgram::~TokenProgram() = default;
bool TokenProgram::run(const Tensor&) const {
  return false;
}
const Tensor& TokenProgram::logits() const {
  return parts_->logits;
}

}  // namespace furious

#endif
