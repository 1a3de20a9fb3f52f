// Keys of zero, for every form and device: where f(0) = 0 no value has a weight and the normalizer is zero, so the
// output is zero and not a division by zero, and every gradient is finite.
#include "cuda.h"
#include "ops/mixer/mixer_case.h"
#include "ops/mixer/recurrent.h"
#ifdef FURIOUS_CUDA
#include "ops/mixer/gpu/mixer_cuda.h"
#endif

namespace furious {
namespace {

using namespace furious::testing;

bool is_zero_at_zero(const MixerSpec& spec) {
  return spec.score != Score::exponential && spec.score != Score::series;
}

void expect_zeros(const char* what, const Tensor& x) {
  for (const double value : to_doubles(x)) ASSERT_EQ(value, 0.0) << what;
}

// dq is a sum of keys. Of f, only a linear one has a slope at 0 through which keys get a gradient; under the sum norm
// the output is the constant 0.
void expect_zeros(const MixerSpec& spec, const MixerRun& run) {
  for (const Tensor& x : {run.result.out, run.gradients.q, run.gradients.k, run.gradients.v})
    ASSERT_TRUE(all_finite(x));
  expect_zeros("dq", run.gradients.q);
  if (!is_zero_at_zero(spec)) return;
  expect_zeros("out", run.result.out);
  expect_zeros("dv", run.gradients.v);
  if (spec.score != Score::linear || spec.norm == Norm::sum) expect_zeros("dk", run.gradients.k);
}

MixerCase zero_keys(Random& random, const MixerSpec& spec, const CaseLimits& given = {}) {
  CaseLimits limits = given;
  limits.states = limits.final_gradient = false;
  MixerCase c = random_case(random, spec, limits);
  fill(c.inputs.k, 0);
  return c;
}

TEST(ZeroKeys, EveryForm) {
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    const MixerCase c = zero_keys(random, spec);
    SCOPED_TRACE(describe(c));
    expect_zeros(spec, run_oracle(c));
    for (const Form form : {Form::parallel, Form::chunked}) {
      if (form == Form::chunked && !has_state(c)) continue;
      const MixerRun actual = run(c, {.form = form, .chunk = 16});
      EXPECT_EQ(actual.result.form, form);
      expect_zeros(spec, actual);
      if (form == Form::chunked && is_zero_at_zero(spec)) expect_zeros("final state", actual.result.final_state);
    }
  }
}

// Before and after the first fold, and in a prefill.
void check_cache(const MixerSpec& spec, Device device) {
  Random random(2);
  const MixerCache::Sizes sizes{2, 2, 2, 2, 8, 8};
  const SlotRows rows = all_slots(2, device);
  MixerCache cache(spec, sizes, device);
  const int64_t length = cache.first_fold() + 70;
  const Tensor k = Tensor::zeros({2, length, 2, 8}, DType::f32, device);
  const auto on_device = [&](const Tensor& x) { return device.is_cpu() ? x : to_gpu(x); };
  const Tensor q = on_device(random.normal_tensor(k.shape())), v = on_device(random.normal_tensor(k.shape()));
  const Tensor decay = spec.decay ? on_device(random.uniform_tensor({2, length, 2}, -0.1, 0)) : Tensor();
  const auto check = [&](const Tensor& x) {
    const Tensor out = device.is_cpu() ? x : to_cpu(x);
    ASSERT_TRUE(all_finite(out));
    if (is_zero_at_zero(spec)) expect_zeros("out", out);
  };
  const auto part = [&](const Tensor& x, int64_t t) { return x ? to_dtype(x.select(1, t), DType::f32) : Tensor(); };
  for (int64_t t = 0; t < length; ++t) check(cache.step(rows, part(q, t), part(k, t), part(v, t), part(decay, t)));
  EXPECT_EQ(cache.has_folded(1), has_state(spec, sizes.qk_dim));
  MixerCache at_once(spec, sizes, device);
  const auto of = [](const Tensor& x, int64_t row) { return x ? x.slice(0, row, 1) : Tensor(); };
  for (const int64_t row : {0, 1})
    check(at_once.prefill(row, {of(q, row), of(k, row), of(v, row), of(decay, row), {}, {}}));
  check(at_once.step(rows, part(q, 0), part(k, 0), part(v, 0), part(decay, 0)));
}

TEST(ZeroKeys, Recurrent) {
  for (const MixerSpec& spec : every_spec()) {
    SCOPED_TRACE(to_string(spec));
    check_cache(spec, {});
  }
}

TEST(ZeroKeysCuda, Recurrent) {
  SKIP_WITHOUT_GPU();
  for (const MixerSpec& spec : every_spec()) {
    SCOPED_TRACE(to_string(spec));
    check_cache(spec, kGpu);
  }
}

MixerRun run_on_gpu(const MixerCase& c, const MixerOptions& options) {
  MixerInputs inputs = c.inputs;
  for (Tensor* x : {&inputs.q, &inputs.k, &inputs.v, &inputs.log_decay})
    if (*x) *x = to_gpu(*x);
  MixerRun run;
  run.result = mixer_forward(c.spec, inputs, options);
  run.gradients = mixer_backward(c.spec, inputs, run.result, to_gpu(c.out_gradient), {}, options);
  for (Tensor* x : {&run.result.out, &run.gradients.q, &run.gradients.k, &run.gradients.v}) *x = to_cpu(*x);
  return run;
}

TEST(ZeroKeysCuda, EveryForm) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const MixerSpec& spec : every_spec())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const MixerCase c = cast(zero_keys(random, spec), dtype);
      SCOPED_TRACE(fmt::format("{}, {}", describe(c), name_of(dtype)));
      for (const Form form : {Form::parallel, Form::chunked}) {
        if (form == Form::chunked && !has_state(c)) continue;
        const MixerRun actual = run_on_gpu(c, {.form = form, .chunk = 16});
        EXPECT_EQ(actual.result.form, form);
        expect_zeros(spec, actual);
      }
    }
}

#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
TEST(ZeroKeysCuda, EverySetOfKernels) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const MixerSpec& spec : all_specs()) {
    if (spec.score == Score::exponential && spec.norm == Norm::none) continue;  // not on the fast kernels
    CaseLimits limits;
    limits.dim = 64;
    limits.shortest = 520;  // several chunks of 256, which have kernels of their own on Hopper
    limits.longest = 700;
    const MixerCase c = cast(zero_keys(random, spec, limits), DType::bf16);
    for (const char* kernel : {"hopper", "tensor cores", "tiles", "simple"}) {
      if (kernel == std::string_view("hopper") && !cuda::on_hopper(kGpu)) continue;
      SCOPED_TRACE(fmt::format("{}; {}", describe(c), kernel));
      const cuda::KernelScope scope(kernel);
      const MixerRun parallel = run_on_gpu(c, {.form = Form::parallel});
      EXPECT_EQ(parallel.result.kernel, kernel);
      expect_zeros(spec, parallel);
      if (!has_state(spec)) continue;
      for (const int64_t chunk : {64, 256}) {
        const MixerRun chunked = run_on_gpu(c, {.form = Form::chunked, .chunk = chunk});
        EXPECT_EQ(chunked.result.form, Form::chunked);
        expect_zeros(spec, chunked);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace furious
