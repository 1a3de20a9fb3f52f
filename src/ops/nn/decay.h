// What surrounds the mixer's decay. Per token and head, [batch, length, heads]:
//
//   head function    y = max(least, min(factor · f(x + bias), limit))      f of ops/activation.h; time steps, decays
//   original decay   a = −factor · exp(A_log) · dt
//
//   dx = dy · factor · f'(x + bias), 0 where a limit cuts       dbias = Σ_tokens dx
//
// and per token, head and dimension, [batch, length, heads, dim]:
//
//   discretization   v' = v ⊙ dt
//   D residual       y  = o + D ⊙ v                  D [heads, dim]; v before discretization
//
// x, o and v may be views with contiguous rows and, on a GPU, bf16; so may the dt of a. Then v', y and the gradients of
// x, o, v and that dt are bf16 too; all else (a, results of head functions and what comes in as their gradient, D, bias
// and A_log [heads]) is f32. Results are contiguous.
#pragma once

#include <limits>

#include "ops/nn/activation.h"
#include "ops/tape.h"

namespace furious {

struct HeadFunction {
  Activation f = Activation::softplus;
  float factor = 1;
  float limit = std::numeric_limits<float>::infinity();
  float least = -std::numeric_limits<float>::infinity();

  bool operator==(const HeadFunction&) const = default;
};

// The bias is optional.
Tensor head_function_forward(const Tensor& x, const Tensor& bias, const HeadFunction& function);
struct HeadFunctionGradients {
  Tensor x;
  Tensor bias;  // only with a bias
};
void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias,
                            const HeadFunction& function);

Tensor original_decay_forward(const Tensor& dt, const Tensor& a_log, float factor);
struct OriginalDecayGradients {
  Tensor dt;
  Tensor a_log;
};
void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt, const Tensor& a_log,
                             float factor);

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

Variable head_function(Tape& tape, const Variable& x, const Variable& bias, const HeadFunction& function);
Variable original_decay(Tape& tape, const Variable& dt, const Variable& a_log, float factor = 1);
Variable discretize(Tape& tape, const Variable& v, const Variable& dt);
Variable d_residual(Tape& tape, const Variable& o, const Variable& v, const Variable& d);

}  // namespace furious
