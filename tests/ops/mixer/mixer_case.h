// Random mixer calls for the tests: spec, shape, strides, head groups, boundaries, states.
#pragma once

#include "ops/mixer/mixer.h"
#include "support.h"

namespace furious::testing {

struct MixerCase {
  MixerSpec spec;
  MixerInputs inputs;
  Tensor out_gradient;
  Tensor final_state_gradient;  // only where there is a state
  int64_t heads = 0;
};

struct CaseLimits {
  int64_t shortest = 1, longest = 90;
  int64_t largest_dim = 24;
  int64_t dim = 0;               // of queries, keys and values; 0: any up to the largest
  bool states = true;            // may have initial states
  bool final_gradient = true;    // has a gradient of the final state
  bool boundaries = true;        // may have packed documents
  double strongest_decay = 1.0;  // and the strongest growth, if the decay is signed
};

// The scores of the paper's models: linear, squared and exponential, with and without decay and normalizer.
std::vector<MixerSpec> all_specs();
// The scores power and series of every degree, and a signed decay with every score.
std::vector<MixerSpec> further_specs();
// Both.
std::vector<MixerSpec> every_spec();
bool has_state(const MixerSpec& spec, int64_t qk_dim = 64);
bool has_state(const MixerCase& c);
MixerCase random_case(Random& random, const MixerSpec& spec, const CaseLimits& limits = {});
std::string describe(const MixerCase& c);

// The same call in another dtype (f64 for the oracle). States and decays go to f64 with f64, else to f32.
MixerCase cast(const MixerCase& c, DType dtype);

struct MixerRun {
  MixerResult result;
  MixerGradients gradients;
};
MixerRun run(const MixerCase& c, const MixerOptions& options);
// The double-precision oracle for a case.
MixerRun run_oracle(const MixerCase& c);

// The largest relative error of a row along the last dimension. Rows that are smaller than `floor` count as that large.
double worst_row(const Tensor& actual, const Tensor& expected, double floor);

// Expects every output and gradient of `actual` within `tolerance` of `expected` in relative norm.
void expect_close(const MixerRun& actual, const MixerRun& expected, double tolerance);

// MixerResult::kernel of the chunked form on tensor cores: the states of powers, series and signed decays are in
// memory.
inline const char* kernel_of_states(const MixerSpec& spec) {
  return spec.degree == 0 && !spec.signed_decay ? "chunk states" : "tensor cores";
}

}  // namespace furious::testing
