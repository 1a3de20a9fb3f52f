#include "ops/mixer/mixer.h"

#include "base/parallel.h"
#include "ops/mixer/mixer_case.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

constexpr double kTolerance = 1e-4;

TEST(Mixer, ParallelAgreesWithOracle) {
  Random random(1);
  for (const MixerSpec& spec : all_specs()) {
    for (int i = 0; i < 6; ++i) {
      const MixerCase c = random_case(random, spec);
      SCOPED_TRACE(describe(c));
      expect_close(run(c, {Form::parallel}), run_oracle(c), kTolerance);
    }
  }
}

TEST(Mixer, ChunkedAgreesWithOracle) {
  Random random(2);
  for (const MixerSpec& spec : all_specs()) {
    if (!spec.has_state()) continue;
    for (int i = 0; i < 6; ++i) {
      const MixerCase c = random_case(random, spec);
      const int64_t chunk = random.integer(1, 40);
      SCOPED_TRACE(describe(c) + fmt::format(", chunk {}", chunk));
      expect_close(run(c, {Form::chunked, chunk}), run_oracle(c), kTolerance);
    }
  }
}

}  // namespace
}  // namespace furious
