#include "ops/mixer/cost.h"

#include "ops/mixer/mixer_case.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

MixerInputs zeros_of(int64_t batch, int64_t length, int64_t heads, int64_t dim, float decay) {
  const Tensor qkv = Tensor::zeros({batch, length, 3 * heads * dim}, DType::f32);
  const auto part = [&](int64_t i) { return qkv.slice(2, i * heads * dim, heads * dim).split_dim(2, heads, dim); };
  MixerInputs in{part(0), part(1), part(2), Tensor::empty({batch, length, heads}, DType::f32), {}, {}};
  fill(in.log_decay, decay);
  return in;
}

Form chosen(const MixerSpec& spec, const MixerInputs& in) {
  const MixerShape shape = check_mixer("test", spec, in, Form::automatic);
  return choose_form(spec, shape, in, segments_of("test", in.boundaries, shape.batch, shape.length),
                     default_chunk(spec, shape.qk_dim, shape.v_dim));
}

TEST(MixerCost, StatesStoredOnAGpu) {
  const MixerSpec squared{.score = Score::squared, .norm = Norm::sum},
      linear{.score = Score::linear, .norm = Norm::none}, exponential{.score = Score::exponential, .norm = Norm::sum};
  const Device gpu{DeviceKind::cuda, 0};
  const auto kept = [&](const MixerSpec& spec, int64_t qk_dim, int64_t v_dim, int64_t length = 8192) {
    const StateBytes bytes = state_bytes(spec, qk_dim, v_dim, length, gpu, DType::bf16);
    EXPECT_EQ(bytes.working, (spec.score == Score::linear ? 4 : 1) * bytes.kept);
    return bytes.kept;
  };
  EXPECT_EQ(kept(squared, 64, 64), 16 * 37 * 8192);  // chunks, tiles, bytes of a tile
  EXPECT_EQ(kept(squared, 24, 40), 16 * 11 * 8192);
  EXPECT_EQ(kept(squared, 24, 36), 0);
  EXPECT_EQ(kept(squared, 64, 128), 0);
  EXPECT_EQ(kept(linear, 64, 64), 0);  // a walk
  EXPECT_EQ(kept(linear, 64, 128), 32 * 2 * 8192);
  EXPECT_EQ(kept({.score = Score::linear, .norm = Norm::sum}, 64, 128), 0);
  EXPECT_EQ(kept(linear, 64, 160), 32 * 3 * 8192);
  EXPECT_EQ(kept(linear, 192, 40), 32 * 3 * 8192);
  EXPECT_EQ(kept(linear, 64, 264), 0);
  EXPECT_EQ(kept(exponential, 64, 64), 0);
  EXPECT_EQ(kept(mixer_spec("2mamba-4"), 64, 64), 0);
  EXPECT_EQ(kept({Score::squared, true, Norm::sum, 0, 0, true}, 64, 64), 0);
  EXPECT_EQ(kept(squared, 64, 64, 4096), 0);    // in the parallel form
  EXPECT_EQ(kept(squared, 128, 128, 8192), 0);  // too
  // Not kept: the states and their gradients are in memory together.
  const StateBytes wide = state_bytes(squared, 128, 96, 32768, gpu, DType::bf16);
  EXPECT_EQ(wide.kept, 0);
  EXPECT_EQ(wide.working, 2 * 32 * (4 + 2 * 136) * 8192);
  EXPECT_EQ(state_bytes(squared, 16, 16, 8192, gpu, DType::bf16).kept, 0);
  EXPECT_GT(state_bytes(squared, 16, 16, 8192, gpu, DType::bf16).working, 0);
  EXPECT_EQ(state_bytes(squared, 64, 64, 8192, gpu, DType::f32).working, 0);
  EXPECT_EQ(state_bytes(squared, 64, 64, 8192, {}, DType::bf16).working, 0);
}

TEST(MixerCost, CountsTheFlopsOfThePaper) {
  MixerShape shape;
  shape.batch = 1;
  shape.length = 2048;
  shape.heads = 16;
  shape.qk_dim = shape.v_dim = 64;
  shape.state_rows = 2080;
  shape.state_columns = 65;
  const std::vector<Segment> one{{0, 0, 2048}};
  const double forward = 16.0 * 2048 * 2049 / 2 * 4 * 64;
  EXPECT_DOUBLE_EQ(parallel_flops(shape, one, Pass::forward), forward);
  EXPECT_DOUBLE_EQ(parallel_flops(shape, one, Pass::backward), 2.5 * forward);
  // Two chunks: the second reads the state that the first made.
  const double inner = 16.0 * 2 * 1024 * 1025 / 2 * 4 * 64;
  EXPECT_DOUBLE_EQ(chunked_flops(shape, one, 1024, Pass::forward), inner + 16.0 * 1024 * 4 * 2080 * 65);
}

TEST(MixerCost, ChoosesByLength) {
  const MixerSpec spec = mixer_spec("2mamba");
  EXPECT_EQ(chosen(spec, zeros_of(1, 2048, 2, 64, 0)), Form::parallel);
  EXPECT_EQ(chosen(spec, zeros_of(1, 8192, 2, 64, 0)), Form::chunked);
  EXPECT_EQ(chosen(mixer_spec("2mamba-e"), zeros_of(1, 8192, 2, 64, 0)), Form::parallel);
  EXPECT_EQ(chosen(mixer_spec("2mamba-3"), zeros_of(1, 8192, 2, 64, 0)), Form::parallel);
  EXPECT_EQ(chosen(mixer_spec("2mamba-series-4"), zeros_of(1, 8192, 2, 64, 0)), Form::parallel);
  EXPECT_EQ(chosen({Score::squared, true, Norm::sum, 0, 0, true}, zeros_of(1, 8192, 2, 64, 0)), Form::parallel);
  EXPECT_EQ(chosen(mixer_spec("mamba2"), zeros_of(1, 2048, 2, 64, 0)), Form::chunked);
}

TEST(MixerCost, AccountsForDecay) {
  EXPECT_EQ(chosen(mixer_spec("2mamba"), zeros_of(1, 8192, 2, 64, -1)), Form::parallel);
}

TEST(MixerCost, AccountsForShortDocuments) {
  MixerInputs in = zeros_of(1, 8192, 2, 64, 0);
  std::vector<int32_t> starts;
  for (int32_t t = 0; t < 8192; t += 512) starts.push_back(t);
  in.boundaries = int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
  EXPECT_EQ(chosen(mixer_spec("2mamba"), in), Form::parallel);
}

TEST(MixerCost, AutomaticAgreesWithTheOracle) {
  Random random(1);
  for (const MixerSpec& spec : every_spec()) {
    CaseLimits limits;
    limits.longest = 600;
    const MixerCase c = random_case(random, spec, limits);
    SCOPED_TRACE(describe(c));
    const MixerRun automatic = run(c, {});
    if (has_state(spec))
      EXPECT_TRUE(automatic.result.form == Form::parallel || automatic.result.form == Form::chunked);
    else
      EXPECT_EQ(automatic.result.form, Form::parallel);
    EXPECT_LE(relative_error(automatic.result.out, run_oracle(c).result.out), 2e-5);
  }
}

// The far cheaper form is chosen, and the reported form ran: the two round differently.
TEST(MixerCost, AutomaticChoosesTheFasterForm) {
  Random random(2);
  const auto check = [&](const MixerSpec& spec, int64_t length, int64_t dim, double decay, Form expected) {
    MixerCase c;
    c.spec = spec;
    for (Tensor* x : {&c.inputs.q, &c.inputs.k, &c.inputs.v}) *x = random.uniform_tensor({1, length, 1, dim}, 0, 1);
    if (spec.decay) c.inputs.log_decay = random.uniform_tensor({1, length, 1}, -2 * decay, 0);
    SCOPED_TRACE(fmt::format("{}, decay {}", describe(c), decay));
    const MixerResult automatic = mixer_forward(spec, c.inputs);
    EXPECT_EQ(automatic.form, expected);
    const Tensor parallel = mixer_forward(spec, c.inputs, {Form::parallel}).out;
    const Tensor chunked = mixer_forward(spec, c.inputs, {Form::chunked}).out;
    EXPECT_FALSE(same_bits(parallel, chunked));
    EXPECT_TRUE(same_bits(automatic.out, expected == Form::parallel ? parallel : chunked));
  };
  const MixerSpec linear{Score::linear, false, Norm::none}, squared{Score::squared, true, Norm::sum};
  check(linear, 8000, 8, 0, Form::chunked);         // a state of 64 numbers
  check(squared, 8000, 16, 0.0001, Form::chunked);  // of 2,312, and pairs of all tokens
  check(squared, 400, 64, 0.0001, Form::parallel);  // of 135,200, for few tokens
  check(squared, 8000, 16, 20, Form::parallel);     // pairs of near tokens only: the others have decayed
}

}  // namespace
}  // namespace furious
