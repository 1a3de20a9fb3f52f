// What decay.cpp calls after all checks.
#pragma once

#include "ops/nn/decay.h"

namespace furious::cpu {

void head_function_forward(const Tensor& y, const Tensor& x, const Tensor& bias, const HeadFunction& function);
void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias,
                            const HeadFunction& function);
void original_decay_forward(const Tensor& a, const Tensor& dt, const Tensor& a_log, float factor);
void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt, const Tensor& a_log,
                             float factor);
void discretize_forward(const Tensor& y, const Tensor& v, const Tensor& dt);
void discretize_backward(const DiscretizeGradients& out, const Tensor& dy, const Tensor& v, const Tensor& dt);
void d_residual_forward(const Tensor& y, const Tensor& o, const Tensor& v, const Tensor& d);
void d_residual_backward(const DResidualGradients& out, const Tensor& dy, const Tensor& v, const Tensor& d);

}  // namespace furious::cpu

namespace furious::cuda {

void head_function_forward(const Tensor& y, const Tensor& x, const Tensor& bias, const HeadFunction& function);
void head_function_backward(const HeadFunctionGradients& out, const Tensor& dy, const Tensor& x, const Tensor& bias,
                            const HeadFunction& function);
void original_decay_forward(const Tensor& a, const Tensor& dt, const Tensor& a_log, float factor);
void original_decay_backward(const OriginalDecayGradients& out, const Tensor& da, const Tensor& dt, const Tensor& a_log,
                             float factor);
void discretize_forward(const Tensor& y, const Tensor& v, const Tensor& dt);
void discretize_backward(const DiscretizeGradients& out, const Tensor& dy, const Tensor& v, const Tensor& dt);
void d_residual_forward(const Tensor& y, const Tensor& o, const Tensor& v, const Tensor& d);
void d_residual_backward(const DResidualGradients& out, const Tensor& dy, const Tensor& v, const Tensor& d);

}  // namespace furious::cuda
