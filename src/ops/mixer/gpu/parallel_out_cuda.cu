// The parallel form on tensor cores: the pass for what a call returns.
#include "ops/mixer/gpu/parallel_passes.cuh"

namespace furious::cuda {

template void run_pass<Target::out>(const MixerCall&, const Parallel&);

}  // namespace furious::cuda
