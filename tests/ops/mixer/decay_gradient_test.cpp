// The gradient of log-decays, a sum over all later tokens in which almost everything cancels. A parameter that all
// tokens share, A_log of a_t = −exp(A_log)·dt_t, sums it once more: Σ_t a_t·da_t.
#include "cuda.h"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/mixer_case.h"

namespace furious {
namespace {

using namespace furious::testing;

// Log-decays as Mamba-2 starts them: rates of 1 to 16, times steps around 0.001 to 0.1.
MixerCase case_of(Random& random, const MixerSpec& spec, int64_t length, int64_t dim) {
  constexpr int64_t kHeads = 3;
  MixerCase c;
  c.spec = spec;
  c.heads = kHeads;
  for (Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.out_gradient})
    *x = random.normal_tensor({1, length, kHeads, dim});
  c.inputs.log_decay = Tensor::empty({1, length, kHeads}, DType::f32);
  for (int64_t h = 0; h < kHeads; ++h) {
    const double rate = random.uniform(1, 16), step = std::exp(random.uniform(std::log(0.001), std::log(0.1)));
    for (int64_t t = 0; t < length; ++t)
      c.inputs.log_decay.data<float>()[t * kHeads + h] =
          static_cast<float>(-rate * step * std::exp(0.3 * random.normal()));
  }
  return c;
}

// Σ_t a_t·da_t of each head.
std::vector<double> shared_gradient(const Tensor& log_decay, const Tensor& gradient) {
  const std::vector<double> a = to_doubles(log_decay), da = to_doubles(gradient);
  std::vector<double> sums(static_cast<size_t>(log_decay.size(2)));
  for (size_t i = 0; i < a.size(); ++i) sums[i % sums.size()] += a[i] * da[i];
  return sums;
}

void expect_precise(const MixerCase& c, const Tensor& actual, const Tensor& expected, double tolerance) {
  const Tensor& a = c.inputs.log_decay;
  EXPECT_LE(relative_error(shared_gradient(a, actual), shared_gradient(a, expected)), tolerance);
}

// The rounding error does not grow with the length: in the parallel form every pair cancels to the last bit.
TEST(DecayGradient, KeepsItsPrecisionOverManyTokens) {
  for (const char* name : {"2mamba", "mamba2", "2mamba-e"})
    for (const int64_t length : {41, 600, 2400}) {
      SCOPED_TRACE(fmt::format("{}, {} tokens", name, length));
      Random random(static_cast<uint64_t>(length));
      const MixerCase c = case_of(random, mixer_spec(name), length, length > 1000 ? 8 : 16);
      const Tensor expected = run_oracle(c).gradients.log_decay;
      expect_precise(c, run(c, {.form = Form::parallel}).gradients.log_decay, expected, 8e-7);
      if (has_state(c) && length > 192)
        expect_precise(c, run(c, {.form = Form::chunked}).gradients.log_decay, expected, 2e-5);
    }
}

#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
// In f32, by the kernels that sum over pairs.
TEST(DecayGradientCuda, KeepsItsPrecisionOverManyTokens) {
  SKIP_WITHOUT_GPU();
  for (const char* name : {"2mamba", "mamba2", "2mamba-e"})
    for (const int64_t length : {41, 600, 2400}) {
      Random random(static_cast<uint64_t>(length));
      const MixerCase c = case_of(random, mixer_spec(name), length, length > 1000 ? 8 : 16);
      const Tensor expected = run_oracle(c).gradients.log_decay;
      MixerCase there = c;
      for (Tensor* x :
           {&there.inputs.q, &there.inputs.k, &there.inputs.v, &there.inputs.log_decay, &there.out_gradient})
        *x = to_gpu(*x);
      const auto check = [&](const MixerOptions& options, double tolerance) {
        const MixerResult result = mixer_forward(c.spec, there.inputs, options);
        EXPECT_EQ(result.form, options.form);
        const MixerGradients gradients = mixer_backward(c.spec, there.inputs, result, there.out_gradient, {}, options);
        expect_precise(c, to_cpu(gradients.log_decay), expected, tolerance);
      };
      for (const char* kernel : {"tiles", "simple"}) {
        SCOPED_TRACE(fmt::format("{}, {} tokens, {}", name, length, kernel));
        const cuda::KernelScope scope(kernel);
        check({.form = Form::parallel}, 2e-5);
        if (has_state(c)) check({.form = Form::chunked, .chunk = 128}, 1e-4);
      }
    }
}
#endif

}  // namespace
}  // namespace furious
