// The entry point of libFuzzer; FUZZ_TARGET is the name of a function of targets.h.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "fuzz/targets.h"
#include "ops/mixer/mixer.h"

// Stubs: the source of the configuration also computes the size of a cache, which needs the mixer: minutes to
// compile. No fuzz target calls it.
int64_t furious::state_rows(const MixerSpec&, int64_t) {
  std::abort();
}
int64_t furious::state_columns(const MixerSpec&, int64_t) {
  std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  furious::fuzz::FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
