// The parallel form on tensor cores: the pass for the gradient of values.
#include "ops/mixer/gpu/parallel_passes.cuh"

namespace furious::cuda {

template void run_pass<Target::dv>(const MixerCall&, const Parallel&);

}  // namespace furious::cuda
