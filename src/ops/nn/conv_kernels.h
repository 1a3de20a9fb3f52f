#pragma once

#include <span>

#include "ops/boundaries.h"
#include "ops/nn/conv.h"

namespace furious::cpu {

void conv_forward(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
                  std::span<const Segment> segments, const Tensor& state);
void conv_step(const Tensor& y, const Tensor& state, const Tensor& slots, const Tensor& x, const Tensor& weight,
               const Tensor& bias, Activation activation);
void conv_backward(const ConvGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& bias, Activation activation, std::span<const Segment> segments);

}  // namespace furious::cpu

namespace furious::cuda {

void conv_forward(const Tensor& y, const Tensor& x, const Tensor& weight, const Tensor& bias, Activation activation,
                  std::span<const Segment> segments, const Tensor& state);
void conv_step(const Tensor& y, const Tensor& state, const Tensor& slots, const Tensor& x, const Tensor& weight,
               const Tensor& bias, Activation activation);
void conv_backward(const ConvGradients& out, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& bias, Activation activation, std::span<const Segment> segments);

}  // namespace furious::cuda
