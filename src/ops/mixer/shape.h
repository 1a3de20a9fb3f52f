// The sizes of one mixer call, taken from its checked inputs.
#pragma once

#include "ops/boundaries.h"
#include "ops/mixer/features.h"
#include "ops/mixer/mixer.h"

namespace furious {

// Below this log-decay a factor is no normal f32 and counts as zero.
inline constexpr double kErased = -87.0;

struct MixerShape {
  int64_t batch = 0, length = 0, heads = 0;
  int64_t first_query = 0;
  int64_t q_heads = 0, k_heads = 0, v_heads = 0;
  int64_t decay_heads = 0;  // that log_decay has; heads without decay
  int64_t state_heads = 0;  // of a MixerCache: those with k, v and decay of their own
  int64_t qk_dim = 0, v_dim = 0;
  FeatureMap features;  // degree 0 without state
  int64_t state_rows = 0, state_columns = 0;
  float scale = 0;

  int64_t queries() const { return length - first_query; }
};

// Throw an Error that names the argument if anything about the spec, or the inputs too, is wrong.
void check_spec(std::string_view operation, const MixerSpec& spec);
MixerShape check_mixer(std::string_view operation, const MixerSpec& spec, const MixerInputs& inputs, Form form);

}  // namespace furious
