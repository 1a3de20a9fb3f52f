#include "decode/token_linear.h"

#include <algorithm>

#include "tensor/check.h"

namespace furious {

#ifdef FURIOUS_CUDA

namespace {

// The kernel loads 16 bytes at a time.
bool is_aligned(const Tensor& x) {
  return x.dtype() == DType::bf16 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && x.stride(0) % 8 == 0;
}

bool fits(const TokenInput& in, const TokenPart& part) {
  const int64_t k = in.x.size(1);
  return cuda::token_linear_fits(in.x.device(), in.x.size(0), k, part.kind) && is_aligned(part.weight) &&
         part.weight.is_contiguous() && (!part.second || (is_aligned(part.second) && part.second.is_contiguous()));
}

}  // namespace

bool has_token_linear(const TokenInput& in, std::span<const TokenPart> parts) {
  return !in.x.device().is_cpu() && is_aligned(in.x) && (!in.gate || is_aligned(in.gate)) &&
         std::ranges::all_of(parts, [&](const TokenPart& part) { return fits(in, part); });
}

bool token_linear(const TokenInput& in, std::span<const TokenPart> parts) {
  if (!has_token_linear(in, parts)) return false;
  const ArgumentCheck check("token_linear");
  check.rank("x", in.x, 2);
  if (in.gate) check.rows("gate", in.gate, in.x);
  if (in.norm) check.dense("norm", in.norm, DType::f32, {in.x.size(1)}, in.x.device());
  for (const TokenPart& part : parts) {
    check.shape("weight", part.weight, {ArgumentCheck::kAny, in.x.size(1)});
    check.shape("out", part.out, {in.x.size(0), part.weight.size(0)});
    if (part.conv_weight) {
      check.dense("conv_state", part.conv_state, DType::f32,
                  {ArgumentCheck::kAny, part.conv_weight.size(1) - 1, part.weight.size(0)}, in.x.device());
      check.dense("slots", part.slots, DType::i32, {in.x.size(0)}, in.x.device());
    }
  }
  cuda::token_linear(in, parts);
  return true;
}

#else

bool has_token_linear(const TokenInput&, std::span<const TokenPart>) {
  return false;
}

bool token_linear(const TokenInput&, std::span<const TokenPart>) {
  return false;
}

#endif

}  // namespace furious
