// What surrounds the mixer's decay. Per token and head, [batch, length, heads]:
//
//   time step        dt = softplus(x + dt_bias)
//   softplus decay   a  = −softplus(x)
//   original decay   a  = −exp(A_log) · dt
//
// and per token, head and dimension, [batch, length, heads, dim]:
//
//   discretization   v' = v ⊙ dt
//   D residual       y  = o + D ⊙ v                  D [heads, dim]; v before discretization
//
// with softplus(x) = max(x, 0) + ln(1 + e^−|x|), which neither overflows nor loses its tail, and softplus' = σ. So a ≤
// 0 always. x, o and v may be views with contiguous rows and, on a GPU, bf16; so may the dt of a. Then v', y and the
// gradients of x, o, v and that dt are bf16 too; all else (a, dt and what comes in as their gradient, D, dt_bias and
// A_log [heads]) is f32. Results are contiguous.
#pragma once

#include "ops/tape.h"

namespace furious {

// y = sign · softplus(x + bias); the bias is optional.
Tensor softplus_forward(const Tensor& x, const Tensor& bias, float sign);
struct SoftplusGradients {
  Tensor x;
  Tensor bias;  // only with a bias
};
void softplus_backward(const SoftplusGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias, float sign);

Tensor original_decay_forward(const Tensor& dt, const Tensor& a_log);
struct OriginalDecayGradients {
  Tensor dt;
  Tensor a_log;
};
void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt,
                             const Tensor& a_log);

Tensor discretize_forward(const Tensor& v, const Tensor& dt);
struct DiscretizeGradients {
  Tensor v;
  Tensor dt;
};
void discretize_backward(const DiscretizeGradients& out, const Tensor& dy, const Tensor& v, const Tensor& dt);

Tensor d_residual_forward(const Tensor& o, const Tensor& v, const Tensor& d);
struct DResidualGradients {  // that of o is dy
  Tensor v;
  Tensor d;
};
void d_residual_backward(const DResidualGradients& out, const Tensor& dy, const Tensor& v, const Tensor& d);

Variable time_step(Tape& tape, const Variable& x, const Variable& dt_bias = {});
Variable softplus_decay(Tape& tape, const Variable& x);
Variable original_decay(Tape& tape, const Variable& dt, const Variable& a_log);
Variable discretize(Tape& tape, const Variable& v, const Variable& dt);
Variable d_residual(Tape& tape, const Variable& o, const Variable& v, const Variable& d);

}  // namespace furious
