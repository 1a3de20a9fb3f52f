#include "decode/token_linear.h"

#include <vector>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/nn/conv.h"
#include "ops/nn/decay.h"
#include "ops/nn/linear.h"
#include "ops/nn/rms_norm.h"
#include "ops/nn/swiglu.h"
#include "tensor/check.h"

namespace furious {
namespace {

void check_input(const ArgumentCheck& check, const TokenInput& in, const Tensor& weight) {
  check.rank("x", in.x, 2);
  check.rows("x", in.x);
  check.rank("weight", weight, 2);
  check.shape("x", in.x, {ArgumentCheck::kAny, weight.size(1)});
  if (in.gate) check.rows("gate", in.gate, in.x);
  if (in.norm) check.dense("norm", in.norm, DType::f32, {weight.size(1)}, in.x.device());
}

// Whether one kernel does it.
bool fits(const TokenInput& in, const Tensor& weight, TokenPart::Kind kind) {
#ifdef FURIOUS_CUDA
  const auto aligned = [](const Tensor& x) {  // for accesses of 16 bytes
    return x.dtype() == DType::bf16 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0 && x.stride(0) % 8 == 0;
  };
  return !in.x.device().is_cpu() && cuda::token_linear_fits(in.x.device(), in.x.size(0), in.x.size(1), kind) &&
         aligned(in.x) && (!in.gate || aligned(in.gate)) && aligned(weight) && weight.is_contiguous();
#else
  (void)in, (void)weight, (void)kind;
  return false;
#endif
}

void run(const TokenInput& in, std::span<const TokenPart> parts) {
#ifdef FURIOUS_CUDA
  cuda::token_linear(in, parts);
#else
  (void)in, (void)parts;
#endif
}

Tensor rows_for(const TokenInput& in, const Tensor& weight, DType dtype) {
  return Tensor::empty({in.x.size(0), weight.size(0)}, dtype, in.x.device());
}

}  // namespace

Tensor prepared(const TokenInput& in) {
  if (in.norm) return rms_norm_forward(in.x, in.norm, in.eps, in.gate).y;
  return in.gate ? swiglu_forward(in.gate, in.x) : in.x;
}

Tensor logits_forward(const Tensor& h, const Tensor& weight) {
  if (h.device().is_cpu() || weight.dtype() == DType::f32)
    return linear_forward(h.dtype() == DType::f32 && h.is_contiguous() ? h : to_dtype(h, DType::f32), weight);
  Shape shape = h.shape();
  shape[h.rank() - 1] = weight.size(0);
  const Tensor logits = Tensor::empty(shape, DType::f32, h.device());
  matmul(logits.as_matrix(), to_dtype(h, DType::bf16).as_matrix(), weight,
         {.transpose_b = true, .precision = MatmulPrecision::bf16});
  return logits;
}

void token_add(const Tensor& to, const TokenInput& in, const Tensor& weight, MatmulPrecision precision) {
  const ArgumentCheck check("token_add");
  check_input(check, in, weight);
  check.dense("to", to, in.x.dtype(), {in.x.size(0), weight.size(0)}, in.x.device());
  if (!fits(in, weight, TokenPart::Kind::add)) {
    if (to.device().is_cpu()) return add_into(to, linear_forward(prepared(in), weight, {}, precision));
    return matmul(to, prepared(in), weight,
                  {.transpose_b = true,
                   .accumulate = true,
                   .precision = to.dtype() == DType::bf16 ? MatmulPrecision::bf16 : precision});
  }
  TokenPart part{.kind = TokenPart::Kind::add, .weight = weight, .out = to};
  run(in, {&part, 1});
}

Tensor token_swiglu(const TokenInput& in, const Tensor& gate, const Tensor& up, MatmulPrecision precision) {
  const ArgumentCheck check("token_swiglu");
  check_input(check, in, gate);
  check.dense("up", up, gate.dtype(), {gate.size(0), gate.size(1)}, gate.device());
  if (!fits(in, gate, TokenPart::Kind::swiglu)) {
    const Tensor h = prepared(in);
    return swiglu_forward(linear_forward(h, gate, {}, precision), linear_forward(h, up, {}, precision));
  }
  TokenPart part{.kind = TokenPart::Kind::swiglu, .weight = gate, .second = up, .out = rows_for(in, gate, DType::bf16)};
  run(in, {&part, 1});
  return part.out;
}

Tensor token_logits(const TokenInput& in, const Tensor& weight) {
  check_input(ArgumentCheck("token_logits"), in, weight);
  if (!fits(in, weight, TokenPart::Kind::value)) return logits_forward(prepared(in), weight);
  TokenPart part{.weight = weight, .out = rows_for(in, weight, DType::f32)};
  run(in, {&part, 1});
  return part.out;
}

namespace {

TokenMixed plain_mixing(const TokenInput& in, const TokenMixing& w, const Tensor& conv_state, const SlotRows& rows,
                        MatmulPrecision precision) {
  const Tensor h = prepared(in);
  TokenMixed out;
  out.qkv = linear_forward(h, w.qkv, {}, precision);
  if (w.conv_weight) out.qkv = conv_step(conv_state, rows, out.qkv, w.conv_weight, w.conv_bias, w.after_conv);
  if (w.qk_activation != Activation::none) {
    const Tensor qk = out.qkv.slice(1, 0, w.qk_width);
    copy(qk, activation_forward(qk, w.qk_activation));
  }
  const auto per_head = [&](const Tensor& weight) {
    return linear_forward(h, weight, {}, precision).view({h.size(0), 1, weight.size(0)});
  };
  const auto without_length = [](const Tensor& x) { return x.view({x.size(0), x.size(2)}); };
  if (w.dt) {
    const Tensor dt = head_function_forward(per_head(w.dt), w.dt_bias, w.time_step);
    if (w.a_log) out.log_decay = without_length(original_decay_forward(dt, w.a_log, w.original_factor));
    out.dt = without_length(dt);
  }
  if (w.a_mask) {
    Tensor a = head_function_forward(per_head(w.a_mask), w.a_mask_bias, w.decay);
    if (w.decay_times_dt) {
      const int64_t batch = a.size(0), heads = a.size(2);
      a = discretize_forward(a.view({batch, 1, heads, 1}), out.dt.view({batch, 1, heads})).view({batch, 1, heads});
    }
    out.log_decay = without_length(a);
  }
  if (w.z_gate) out.z = linear_forward(h, w.z_gate, w.z_gate_bias, precision);
  return out;
}

}  // namespace

bool knows_functions(const TokenMixing& w) {
  const HeadFunction softplus;
  return (!w.dt || w.time_step == softplus) && (!w.a_log || w.original_factor == 1) && !w.decay_times_dt &&
         (!w.a_mask || (w.decay.f == softplus.f && w.decay.limit == softplus.limit));
}

TokenMixed token_mixing(const TokenInput& in, const TokenMixing& w, const Tensor& conv_state, const SlotRows& rows,
                        MatmulPrecision precision) {
  const ArgumentCheck check("token_mixing");
  check_input(check, in, w.qkv);
  if (w.conv_weight) {
    check.dense("conv_state", conv_state, DType::f32, {ArgumentCheck::kAny, w.conv_weight.size(1) - 1, w.qkv.size(0)},
                in.x.device());
    check_slots(check, rows, in.x.size(0), conv_state.size(0), in.x.device());
  }
  if (!knows_functions(w) || !fits(in, w.qkv, TokenPart::Kind::value))
    return plain_mixing(in, w, conv_state, rows, precision);
  using Kind = TokenPart::Kind;
  TokenMixed out;
  std::vector<TokenPart> parts;
  out.qkv = rows_for(in, w.qkv, DType::bf16);
  parts.push_back({.kind = Kind::value,
                   .weight = w.qkv,
                   .out = out.qkv,
                   .bias = w.conv_bias,
                   .conv_weight = w.conv_weight,
                   .conv_state = conv_state,
                   .slots = rows.table,
                   .after_conv = w.after_conv,
                   .qk_activation = w.qk_activation,
                   .qk_width = w.qk_width});
  if (w.z_gate) {
    out.z = rows_for(in, w.z_gate, DType::bf16);
    parts.push_back({.weight = w.z_gate, .out = out.z, .bias = w.z_gate_bias});
  }
  if (w.dt) {
    out.dt = rows_for(in, w.dt, DType::f32);
    if (w.a_log) out.log_decay = rows_for(in, w.dt, DType::f32);
    parts.push_back({.kind = Kind::softplus,
                     .weight = w.dt,
                     .out = out.dt,
                     .bias = w.dt_bias,
                     .a_log = w.a_log,
                     .decay = out.log_decay});
  }
  if (w.a_mask) {
    out.log_decay = rows_for(in, w.a_mask, DType::f32);
    parts.push_back({.kind = Kind::softplus,
                     .weight = w.a_mask,
                     .out = out.log_decay,
                     .bias = w.a_mask_bias,
                     .sign = w.decay.factor});
  }
  run(in, parts);
  return out;
}

}  // namespace furious
