// Elementwise functions, of queries, keys and values and of what surrounds the decay (ops/decay.h):
//
//   relu:         y = max(x, 0)            dx = dy where x > 0, else 0
//   silu:         y = x σ(x)               dx = dy σ(x) (1 + x σ(−x))
//   softplus:     y = ln(1 + e^x)          dx = dy σ(x)
//   softplus2:    y = x ln(1 + e^x)        dx = dy (ln(1 + e^x) + x σ(x))
//   sigmoid:      y = σ(x)                 dx = dy σ(x) σ(−x)
//   log_sigmoid:  y = −ln(1 + e^−x)        dx = dy σ(−x)
//   gelu_tanh:    y = x σ(2u)              dx = dy σ(2u) (1 + 2x u' σ(−2u))      u = √(2/π) (x + 0.044715 x³)
//
// ln(1 + e^x) is computed as max(x, 0) + ln(1 + e^−|x|), which neither overflows nor loses its tail.
//
// x is f32 (on a GPU also bf16) of any shape whose innermost stride is 1 (a view of a fused projection); y is
// contiguous.
#pragma once

#include <type_traits>

#include "ops/tape.h"

namespace furious {

enum class Activation : uint8_t { none, relu, silu, softplus, softplus2, sigmoid, log_sigmoid, gelu_tanh };

// Of gelu_tanh, which is ½x (1 + tanh u): 2u = x (kGeluLinear + kGeluCubic x²).
inline constexpr float kGeluLinear = 1.5957691216057308f, kGeluCubic = 0.07135481282533326f;

// Calls f with the activation as a compile-time constant.
template <class F>
void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::none:
      return f(std::integral_constant<Activation, Activation::none>());
    case Activation::relu:
      return f(std::integral_constant<Activation, Activation::relu>());
    case Activation::silu:
      return f(std::integral_constant<Activation, Activation::silu>());
    case Activation::softplus:
      return f(std::integral_constant<Activation, Activation::softplus>());
    case Activation::softplus2:
      return f(std::integral_constant<Activation, Activation::softplus2>());
    case Activation::sigmoid:
      return f(std::integral_constant<Activation, Activation::sigmoid>());
    case Activation::log_sigmoid:
      return f(std::integral_constant<Activation, Activation::log_sigmoid>());
    case Activation::gelu_tanh:
      return f(std::integral_constant<Activation, Activation::gelu_tanh>());
  }
}

Tensor activation_forward(const Tensor& x, Activation activation);
void activation_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, Activation activation);

// Activation::none gives x itself.
Variable activation(Tape& tape, const Variable& x, Activation activation);

}  // namespace furious
