// What the model tests share: a model small enough to try everything with, and tokens for it.
#pragma once

#include "model/config.h"
#include "support.h"

namespace furious::testing {

inline ModelConfig little(const Preset& preset) {
  ModelConfig config;
  config.arch = preset.name;
  config.block = preset.block;
  config.vocabulary = 23;
  config.hidden = 24;
  config.intermediate = 32;
  config.layers = 2;
  config.q_heads = config.k_heads = config.v_heads = 3;
  config.head_dim = 8;
  return config;
}

inline Tensor random_tokens(Random& random, const Shape& shape, int64_t vocabulary) {
  std::vector<int32_t> tokens(shape.elements());
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.integer(0, vocabulary - 1));
  return int_tensor_of(tokens, shape);
}

}  // namespace furious::testing
