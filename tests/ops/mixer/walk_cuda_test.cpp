// The walk over chunks with linear scores against the double-precision oracle.
#ifdef FURIOUS_CUDA  // forces a kernel, which needs a build with CUDA
#include "cuda.h"
#include "gpu/device.h"
#include "ops/mixer/gpu/mixer_cuda.h"
#include "ops/mixer/mixer_case.h"

namespace furious {
namespace {

using namespace furious::testing;

MixerSpec linear_spec(bool decay) {
  MixerSpec spec;
  spec.score = Score::linear;
  spec.norm = Norm::none;
  spec.decay = decay;
  return spec;
}

struct WalkCase {
  int64_t qk_dim, v_dim, length, batch = 2, heads = 4, q_heads = 4, k_heads = 4, v_heads = 4;
  bool decay = true, documents = false, states = false;
  double strongest_decay = 0.05;
};

MixerCase make(Random& random, const WalkCase& w) {
  MixerCase c;
  c.spec = linear_spec(w.decay);
  c.heads = w.heads;
  c.inputs.q = random.normal_tensor({w.batch, w.length, w.q_heads, w.qk_dim});
  c.inputs.k = random.normal_tensor({w.batch, w.length, w.k_heads, w.qk_dim});
  c.inputs.v = random.normal_tensor({w.batch, w.length, w.v_heads, w.v_dim});
  if (w.decay) c.inputs.log_decay = random.uniform_tensor({w.batch, w.length, w.heads}, -w.strongest_decay, 0);
  if (w.documents) {
    std::vector<int32_t> starts;
    for (int64_t t = 1; t < w.batch * w.length; ++t)
      if (random.integer(0, 50) == 0) starts.push_back(static_cast<int32_t>(t));
    c.inputs.boundaries = Tensor::empty({std::ssize(starts)}, DType::i32);
    std::ranges::copy(starts, c.inputs.boundaries.data<int32_t>());
  }
  if (w.states) c.inputs.initial_state = random.normal_tensor({w.batch, w.heads, w.qk_dim, w.v_dim});
  c.out_gradient = random.normal_tensor({w.batch, w.length, w.heads, w.v_dim});
  return c;
}

MixerRun run_on_gpu(const MixerCase& c, bool final_state) {
  MixerInputs there = c.inputs;
  for (Tensor* x : {&there.q, &there.k, &there.v, &there.log_decay, &there.initial_state})
    if (*x) *x = to_gpu(*x);
  const MixerOptions options{.form = Form::chunked, .chunk = 64, .final_state = final_state};
  const cuda::KernelScope forced("walk");
  MixerRun run;
  run.result = mixer_forward(c.spec, there, options);
  run.gradients = mixer_backward(c.spec, there, run.result, to_gpu(c.out_gradient), {}, options);
  for (Tensor* x : {&run.result.out, &run.result.final_state, &run.gradients.q, &run.gradients.k, &run.gradients.v,
                    &run.gradients.log_decay, &run.gradients.initial_state})
    if (*x) *x = to_cpu(*x);
  return run;
}

double typical(const Tensor& x) {
  double sum = 0;
  for (const double v : to_doubles(x)) sum += v * v;
  return std::sqrt(sum / static_cast<double>(std::max<int64_t>(1, x.elements() / x.size(x.rank() - 1))));
}

void compare(Random& random, const WalkCase& w) {
  SCOPED_TRACE(fmt::format(
      "{} x {}, {} tokens, batch {}, heads {} ({}, {}, {}), decay {} to {}, documents {}, states {}", w.qk_dim, w.v_dim,
      w.length, w.batch, w.heads, w.q_heads, w.k_heads, w.v_heads, w.decay, w.strongest_decay, w.documents, w.states));
  const MixerCase c = cast(make(random, w), DType::bf16);
  const MixerRun actual = run_on_gpu(c, w.states), expected = run_oracle(c);
  EXPECT_EQ(actual.result.kernel, "walk");
  EXPECT_EQ(actual.result.form, Form::chunked);
  const auto close = [](const char* what, const Tensor& a, const Tensor& e, double tolerance) {
    ASSERT_EQ(a.defined(), e.defined()) << what;
    if (!a) return;
    EXPECT_LE(relative_error(a, e, 1e-30), tolerance) << what;
    EXPECT_LE(worst_row(a, e, 0.3 * typical(e)), 8 * tolerance) << what;  // no row is wrong
  };
  close("out", actual.result.out, expected.result.out, 1e-2);
  close("dq", actual.gradients.q, expected.gradients.q, 1e-2);
  close("dk", actual.gradients.k, expected.gradients.k, 1e-2);
  close("dv", actual.gradients.v, expected.gradients.v, 1e-2);
  if (w.decay) {
    EXPECT_LE(relative_error(actual.gradients.log_decay, expected.gradients.log_decay, 1e-30), 3e-2);
  }
  if (!w.states) return;
  close("d initial state", actual.gradients.initial_state, expected.gradients.initial_state, 1e-2);
  if (expected.result.final_state) close("final state", actual.result.final_state, expected.result.final_state, 1e-2);
}

// Some devices have too little shared memory for wider heads.
bool fits(int64_t qk_dim, int64_t v_dim) {
  return std::max(qk_dim, v_dim) <= 64 || cuda::most_shared_memory() >= 160 << 10;
}

TEST(WalkCuda, EveryDimension) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const auto& [qk, v] :
       {std::pair{64, 64}, {128, 64}, {64, 128}, {128, 128}, {16, 16}, {24, 72}, {96, 40}, {8, 128}, {32, 32}, {24, 8}})
    for (const int64_t length : {200, 65})
      if (fits(qk, v)) compare(random, {.qk_dim = qk, .v_dim = v, .length = length});
}

TEST(WalkCuda, EveryLength) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const int64_t dim : {64, 32})
    for (const int64_t length : {1, 2, 63, 64, 65, 127, 128, 129, 700})
      compare(random, {.qk_dim = dim, .v_dim = dim, .length = length, .states = true});
}

TEST(WalkCuda, DecaysDocumentsAndSharedHeads) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const int64_t widest = fits(128, 64) ? 128 : 64;
  for (const int64_t dim : {64, 32})
    for (const double strongest : {1e-3, 1.0, 30.0})
      compare(random, {.qk_dim = dim, .v_dim = dim, .length = 300, .strongest_decay = strongest});
  compare(random, {.qk_dim = 64, .v_dim = 64, .length = 300, .decay = false});
  for (const bool decay : {true, false})
    for (const int64_t dim : {widest, int64_t{32}})
      compare(random,
              {.qk_dim = dim, .v_dim = std::min<int64_t>(dim, 64), .length = 500, .decay = decay, .documents = true});
  compare(random, {.qk_dim = widest, .v_dim = 64, .length = 150, .q_heads = 1, .k_heads = 1});
  compare(random, {.qk_dim = 64, .v_dim = 64, .length = 150, .k_heads = 2, .v_heads = 2});
}

// Few heads and a long text: a head is divided into segments.
TEST(WalkCuda, Segments) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const bool documents : {false, true})
    compare(random, {.qk_dim = 64,
                     .v_dim = 64,
                     .length = 4200,
                     .batch = 1,
                     .heads = 1,
                     .q_heads = 1,
                     .k_heads = 1,
                     .v_heads = 1,
                     .documents = documents,
                     .states = !documents,
                     .strongest_decay = 0.01});
}

TEST(WalkCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  const int64_t widest = fits(128, 64) ? 128 : 64;
  const MixerCase c = cast(make(random, {.qk_dim = widest, .v_dim = 64, .length = 3000, .heads = 4}), DType::bf16);
  const MixerRun a = run_on_gpu(c, false), b = run_on_gpu(c, false);
  for (const auto& [x, y] : {std::pair{a.result.out, b.result.out},
                             {a.gradients.q, b.gradients.q},
                             {a.gradients.k, b.gradients.k},
                             {a.gradients.v, b.gradients.v},
                             {a.gradients.log_decay, b.gradients.log_decay}})
    EXPECT_EQ(to_doubles(x), to_doubles(y));
}

// The backward pass computes the states that enter segments anew where those of the forward pass were dropped.
TEST(WalkCuda, SameBitsWithoutKeptStates) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  const MixerCase c = cast(make(random, {.qk_dim = 64, .v_dim = 64, .length = 3000, .heads = 4}), DType::bf16);
  MixerInputs there = c.inputs;
  for (Tensor* x : {&there.q, &there.k, &there.v, &there.log_decay}) *x = to_gpu(*x);
  const Tensor g = to_gpu(c.out_gradient);
  MixerResult result = mixer_forward(c.spec, there);
  EXPECT_EQ(result.kernel, "walk");
  ASSERT_TRUE(result.states);
  const MixerGradients kept = mixer_backward(c.spec, there, result, g);
  result.states = {};
  const MixerGradients dropped = mixer_backward(c.spec, there, result, g);
  for (const auto& [x, y] : {std::pair{kept.q, dropped.q}, {kept.k, dropped.k}, {kept.v, dropped.v}})
    EXPECT_EQ(to_doubles(to_cpu(x)), to_doubles(to_cpu(y)));
}

}  // namespace
}  // namespace furious
#endif
