// The public mixer on a GPU: memory and streams of the caller.
#include "api/convert.h"
#include "api/convert_mixer.h"
#include "cuda.h"
#include "furious/mixer.h"
#include "ops/mixer/mixer_case.h"

#ifdef FURIOUS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <chrono>
#include <thread>

namespace furious {
namespace {

using namespace furious::testing;
using ops::external;
using ops::internal;

constexpr ops::Device kCuda{ops::DeviceKind::cuda, 0};

// Memory of the caller on the GPU whose rows lie `gap` elements further apart than they are long.
ops::Tensor with_gap(const Shape& shape, DType dtype, int64_t gap) {
  std::vector<int64_t> sizes(shape.begin(), shape.end()), strides(sizes.size());
  int64_t next = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = next;
    next = next * sizes[i] + (i + 1 == sizes.size() ? gap : 0);
  }
  auto memory = std::make_shared<Tensor>(Tensor::zeros({next + gap}, dtype, kGpu));
  auto* const first = static_cast<std::byte*>(memory->raw()) + static_cast<size_t>(gap) * size_of(dtype);
  return ops::Tensor::view(first, sizes, external(dtype), kCuda, strides, memory);
}

TEST(PublicMixerCuda, WritesMemoryOfTheCallerWhateverItsAlignment) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const MixerSpec& spec : all_specs())
      for (const int64_t gap : {1, 8}) {
        const MixerCase c = random_case(random, spec, {.shortest = 70, .longest = 130, .dim = 64, .boundaries = false});
        SCOPED_TRACE(describe(c));
        const MixerCase there = cast(c, dtype);
        const bool state = has_state(c);
        const auto gpu = [&](const Tensor& x) {
          if (!x) return ops::Tensor();
          const ops::Tensor out = with_gap(x.shape(), x.dtype(), gap);
          out.copy_from(external(to_gpu(x)));
          return out;
        };
        const ops::MixerInputs inputs{gpu(there.inputs.q), gpu(there.inputs.k), gpu(there.inputs.v),
                                      gpu(there.inputs.log_decay), gpu(there.inputs.initial_state)};
        const ops::MixerOptions options{.final_state = state};
        const ops::MixerResult into{.out = with_gap(c.out_gradient.shape(), dtype, gap)};
        const ops::MixerResult result = ops::mixer_forward(external(spec), inputs, options, into);
        EXPECT_EQ(result.out.raw(), into.out.raw());
        const ops::MixerGradients gradients = ops::mixer_backward(
            external(spec), inputs, result, gpu(there.out_gradient), gpu(there.final_state_gradient), options,
            {.q = with_gap(c.inputs.q.shape(), dtype, gap), .v = with_gap(c.inputs.v.shape(), dtype, gap)});
        MixerRun actual;
        const auto cpu = [](const ops::Tensor& x) { return x ? to_cpu(internal(x)) : Tensor(); };
        actual.result.out = cpu(result.out);
        actual.result.final_state = cpu(result.final_state);
        actual.gradients = {cpu(gradients.q), cpu(gradients.k), cpu(gradients.v), cpu(gradients.log_decay),
                            cpu(gradients.initial_state)};
        expect_close(actual, run_oracle(cast(there, DType::f32)),
                     dtype == DType::bf16  ? 3e-2
                     : dtype == DType::f16 ? 1e-2
                                           : 2e-3);
      }
}

// Parts of results begin at addresses of any alignment.
TEST(PublicMixerCuda, PackedSequencesWithStatesAgreeWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const int64_t dim : {9, 64})
    for (const MixerSpec& spec : all_specs()) {
      if (!has_state(spec, dim)) continue;
      MixerCase c = random_case(
          random, spec,
          {.shortest = 61, .longest = 61, .dim = dim, .states = false, .final_gradient = false, .boundaries = false});
      SCOPED_TRACE(describe(c));
      for (Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.log_decay, &c.out_gradient})
        if (*x) *x = to_dtype(x->slice(0, 0, 1), DType::f32);
      const std::vector<int64_t> starts{0, 1, 8, 15, 40, 61};
      const Shape states{5, c.heads, state_rows(spec, dim), state_columns(spec, dim)};
      c.inputs.initial_state = random.uniform_tensor(states, 0.5, 1);
      c.final_state_gradient = random.normal_tensor(states, 0.1);
      const auto run_on = [&](ops::Device device) {
        const auto there = [&](const Tensor& x) { return x ? external(x).to(device) : ops::Tensor(); };
        const ops::MixerInputs inputs{there(c.inputs.q),
                                      there(c.inputs.k),
                                      there(c.inputs.v),
                                      there(c.inputs.log_decay),
                                      there(c.inputs.initial_state),
                                      starts};
        const ops::MixerOptions options{.final_state = true};
        const ops::MixerResult result = ops::mixer_forward(external(spec), inputs, options);
        const ops::MixerGradients gradients = ops::mixer_backward(external(spec), inputs, result, there(c.out_gradient),
                                                                  there(c.final_state_gradient), options);
        const auto here = [](const ops::Tensor& x) { return x ? internal(x.to({})) : Tensor(); };
        MixerRun all;
        all.result.out = here(result.out);
        all.result.final_state = here(result.final_state);
        all.gradients = {here(gradients.q), here(gradients.k), here(gradients.v), here(gradients.log_decay),
                         here(gradients.initial_state)};
        return all;
      };
      expect_close(run_on(kCuda), run_on({}), 2e-3);
    }
}

TEST(PublicMixerCuda, CacheAgreesWithTheForwardPass) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const MixerSpec& spec : all_specs()) {
    const MixerCase c = random_case(
        random, spec,
        {.shortest = 100, .longest = 100, .dim = 16, .states = false, .final_gradient = false, .boundaries = false});
    SCOPED_TRACE(describe(c));
    MixerInputs inputs = c.inputs;  // one head of queries and keys
    inputs.q = inputs.k = inputs.k.slice(2, 0, 1);
    const int64_t heads = inputs.v.size(2), batch = inputs.v.size(0);
    if (inputs.log_decay) inputs.log_decay = inputs.log_decay.slice(2, 0, heads);
    const Tensor expected = mixer_forward(spec, inputs, {Form::parallel}).out;
    ops::MixerCache cache(external(spec), {.batch = batch, .heads = heads, .qk_dim = 16, .v_dim = 16, .device = kCuda});
    const auto tokens = [&](const Tensor& x, int64_t first, int64_t count) {
      return x ? external(to_gpu(x.slice(1, first, count))) : ops::Tensor();
    };
    const Tensor out = Tensor::empty(expected.shape(), DType::f32);
    copy(out.slice(1, 0, 40), internal(cache
                                           .prefill({tokens(inputs.q, 0, 40), tokens(inputs.k, 0, 40),
                                                     tokens(inputs.v, 0, 40), tokens(inputs.log_decay, 0, 40)})
                                           .to({})));
    for (int64_t t = 40; t < 100; ++t) {
      const auto token = [&](const Tensor& x) { return x ? external(to_gpu(x.select(1, t))) : ops::Tensor(); };
      copy(out.select(1, t),
           internal(cache.step(token(inputs.q), token(inputs.k), token(inputs.v), token(inputs.log_decay)).to({})));
    }
    EXPECT_LE(relative_error(out, expected, 0.1), 2e-3);
  }
}

TEST(PublicMixerCuda, RefusesTensorsOnTwoDevices) {
  SKIP_WITHOUT_GPU();
  const auto zeros = [](int64_t heads, ops::Device device) {
    return ops::Tensor::zeros({1, 4, heads, 16}, ops::DType::f32, device);
  };
  const ops::MixerSpec spec{.decay = false};
  expect_error(
      [&] {
        ops::mixer_forward(spec, {zeros(1, kCuda), zeros(1, {}), zeros(1, kCuda)});
      },
      {"\"k\"", "on cpu", "cuda:0"});
  const ops::Tensor x = zeros(1, kCuda);
  expect_error([&] { ops::mixer_forward(spec, {x, x, x}, {}, {.out = zeros(1, {})}); }, {"into.out", "on cpu"});
}

#ifdef FURIOUS_CUDA

// The inputs arrive on the caller's stream late, and the results are read there: without order both would be wrong.
TEST(PublicMixerCuda, WorksInTheOrderOfTheCallersStream) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const MixerSpec spec = mixer_spec("2mamba");
  const MixerCase c = random_case(
      random, spec,
      {.shortest = 100, .longest = 100, .dim = 64, .states = false, .final_gradient = false, .boundaries = false});
  const MixerRun expected = run(c, {});
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const auto late = [&](const Tensor& x) {
    const Tensor host = to_dtype(x, x.dtype());
    const ops::Tensor there = ops::Tensor::zeros({x.shape().begin(), x.shape().end()}, external(x.dtype()), kCuda);
    ops::synchronize(kCuda);
    EXPECT_EQ(cudaMemcpyAsync(there.raw(), host.raw(), host.bytes(), cudaMemcpyHostToDevice, stream), cudaSuccess);
    return std::pair(there, host);
  };
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
    ASSERT_EQ(cudaLaunchHostFunc(stream, sleep, nullptr), cudaSuccess);
    const auto [q, q_host] = late(c.inputs.q);
    const auto [k, k_host] = late(c.inputs.k);
    const auto [v, v_host] = late(c.inputs.v);
    const auto [a, a_host] = late(c.inputs.log_decay);
    const ops::Tensor out =
        ops::Tensor::zeros({c.out_gradient.shape().begin(), c.out_gradient.shape().end()}, ops::DType::f32, kCuda);
    {
      const ops::StreamScope scope(kCuda, stream);
      ops::mixer_forward(external(spec), {q, k, v, a}, {}, {.out = out});
    }
    const Tensor here = Tensor::zeros(c.out_gradient.shape(), DType::f32);
    ASSERT_EQ(cudaMemcpyAsync(here.raw(), out.raw(), here.bytes(), cudaMemcpyDeviceToHost, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_LE(relative_error(here, expected.result.out), 2e-3);
  }
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(PublicMixerCuda, RefusesAStreamUnderCapture) {
  SKIP_WITHOUT_GPU();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  expect_error([&] { const ops::StreamScope scope(kCuda, stream); }, {"stream", "captured"});
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

#endif

TEST(PublicMixerCuda, CostNamesTheFormThatRuns) {
  SKIP_WITHOUT_GPU();
  for (const auto& [length, dtype] : {std::pair<int64_t, ops::DType>{64, ops::DType::bf16},
                                      {1024, ops::DType::bf16},
                                      {8192, ops::DType::bf16},
                                      {8192, ops::DType::f16},
                                      {8192, ops::DType::f32}}) {
    const ops::MixerSizes sizes{
        .length = length, .heads = 2, .qk_heads = 2, .qk_dim = 64, .v_dim = 64, .dtype = dtype, .device = kCuda};
    const auto zeros = [&](const std::vector<int64_t>& shape, ops::DType its_dtype) {
      return ops::Tensor::zeros(shape, its_dtype, kCuda);
    };
    const ops::Tensor x = zeros({1, length, 2, 64}, dtype);
    const ops::MixerResult result = ops::mixer_forward({}, {x, x, x, zeros({1, length, 2}, ops::DType::f32)});
    EXPECT_EQ(ops::mixer_cost({}, sizes).form, result.form);
    const ops::MixerScratch scratch = ops::mixer_scratch({}, sizes);
    EXPECT_GT(scratch.forward_bytes, 0);
    EXPECT_GT(scratch.backward_bytes, 0);
  }
}

}  // namespace
}  // namespace furious
