// Specs of the public mixer (furious/mixer.h) as those of the engine, and back.
#pragma once

#include "base/error.h"
#include "furious/mixer.h"
#include "ops/mixer/mixer.h"

namespace furious::ops {

static_assert(static_cast<int>(Score::series) == static_cast<int>(furious::Score::series) &&
              static_cast<int>(Score::exponential) == static_cast<int>(furious::Score::exponential));
static_assert(static_cast<int>(Norm::sum) == static_cast<int>(furious::Norm::sum));
static_assert(static_cast<int>(Form::reference) == static_cast<int>(furious::Form::reference) &&
              static_cast<int>(Form::chunked) == static_cast<int>(furious::Form::chunked));
static_assert(static_cast<int>(Precision::f32) == static_cast<int>(furious::MixerPrecision::f32) &&
              static_cast<int>(Precision::tf32) == static_cast<int>(furious::MixerPrecision::tf32));

// An Error where a switch has no value of its type; check_spec() checks the rest.
inline furious::MixerSpec internal(std::string_view operation, const MixerSpec& spec) {
  require(spec.score <= Score::series, "{}: argument \"score\" is {}, expected a Score", operation,
          static_cast<int>(spec.score));
  require(spec.norm <= Norm::sum, "{}: argument \"norm\" is {}, expected a Norm", operation,
          static_cast<int>(spec.norm));
  return {static_cast<furious::Score>(spec.score),
          spec.decay,
          static_cast<furious::Norm>(spec.norm),
          spec.scale,
          spec.degree,
          spec.signed_decay};
}
inline MixerSpec external(const furious::MixerSpec& spec) {
  return {static_cast<Score>(spec.score),
          spec.decay,
          static_cast<Norm>(spec.norm),
          spec.scale,
          spec.degree,
          spec.signed_decay};
}

}  // namespace furious::ops
