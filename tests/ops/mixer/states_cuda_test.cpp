// The states of the chunked form on a GPU against sums over pairs of tokens in different chunks, in double.
#ifdef FURIOUS_CUDA  // tests the kernels directly, which needs a build with CUDA
#include "ops/mixer/gpu/states.h"

#include <array>
#include <numeric>
#include <span>
#include <tuple>

#include "gpu/device.h"
#include "ops/mixer/gpu_case.h"

namespace furious {
namespace {

using namespace furious::testing;

#define SKIP_WITHOUT_HOPPER() \
  if (!cuda::on_hopper(kGpu)) GTEST_SKIP() << "these kernels are for Hopper"

struct StatesCase {
  MixerSpec spec;
  int64_t batch, length, heads, q_heads, k_heads, v_heads, chunk;
  bool factors;
  int64_t qk_dim = 64, v_dim = 64;
  bool states = false;  // one comes in, and one goes out
};

// A tensor in bf16 and its values in double, [batch, length, heads, dim].
struct Rounded {
  Tensor there;
  std::vector<double> values;
  int64_t length, own, group, dim;

  Rounded(Random& random, const StatesCase& c, int64_t own_heads, int64_t own_dim)
      : length(c.length), own(own_heads), group(c.heads / own_heads), dim(own_dim) {
    // A slice of a wider tensor, like the outputs of a fused projection.
    const Tensor wide = to_dtype(random.normal_tensor({c.batch, c.length, own * dim + 64}), DType::bf16);
    values = to_doubles(wide.slice(2, 64, own * dim));
    there = to_gpu(wide).slice(2, 64, own * dim).split_dim(2, own, dim);
  }
  std::span<const double> row(int64_t b, int64_t t, int64_t h) const {
    return std::span(values).subspan(static_cast<size_t>(((b * length + t) * own + h / group) * dim),
                                     static_cast<size_t>(dim));
  }
};

double dot(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}
void add(std::vector<double>& to, int64_t at, double factor, std::span<const double> x) {
  for (size_t i = 0; i < x.size(); ++i) to[static_cast<size_t>(at) * x.size() + i] += factor * x[i];
}

// The features of x, in the order of a state's rows.
std::vector<double> features(const MixerShape& shape, std::span<const double> x) {
  std::vector<double> phi(static_cast<size_t>(shape.state_rows));
  for (size_t f = 0; f < phi.size(); ++f) {
    const Feature feature = feature_of(shape.features, static_cast<int>(f));
    phi[f] = feature.factor;
    for (const int16_t at : feature.at)
      if (at >= 0) phi[f] *= x[static_cast<size_t>(at)];
  }
  return phi;
}
// state [rows, columns] += factor · φ [u, last]ᵀ, as far as there are columns.
void add_outer(double* state, const MixerShape& shape, double factor, const std::vector<double>& phi,
               std::span<const double> u, double last) {
  for (const double feature : phi) {
    for (const double x : u) *state++ += factor * feature * x;
    if (shape.state_columns > static_cast<int64_t>(u.size())) *state++ += factor * feature * last;
  }
}

void check(Random& random, const StatesCase& c) {
  SCOPED_TRACE(fmt::format("{} {}, {}; batch {} length {} heads {} ({}, {}, {}) chunk {}{}", to_string(c.spec),
                           c.qk_dim, c.v_dim, c.batch, c.length, c.heads, c.q_heads, c.k_heads, c.v_heads, c.chunk,
                           c.factors ? ", factors" : ""));
  const bool squared = c.spec.score == Score::squared, sum = c.spec.norm == Norm::sum;
  const int64_t chunks = (c.length + c.chunk - 1) / c.chunk, tokens = c.batch * c.heads * c.length;
  const Rounded q(random, c, c.q_heads, c.qk_dim), k(random, c, c.k_heads, c.qk_dim);
  const Rounded v(random, c, c.v_heads, c.v_dim), g(random, c, c.heads, c.v_dim);
  const Tensor in = random.uniform_tensor({c.batch, c.heads, c.length}, 0, 1);
  const Tensor out = random.uniform_tensor({c.batch, c.heads, c.length}, 0, 1);
  const Tensor through = random.uniform_tensor({c.batch, c.heads, chunks}, 0, 1);
  const Tensor delta = random.normal_tensor({c.batch, c.heads, c.length});
  // 1/n, which gradients are multiplied by; 0 where the kernels look whether decay has erased a tile or a chunk.
  const Tensor inverse = random.uniform_tensor({c.batch, c.heads, c.length}, 0.5f, 2);
  const Tensor over_n = Tensor::empty_like(inverse);
  for (int64_t i = 0; i < inverse.elements(); ++i) {
    if (sum && i % c.length % 64 % 63 == 0) inverse.data<float>()[i] = 0;
    over_n.data<float>()[i] = inverse.data<float>()[i] * (c.factors ? in.data<float>()[i] : 1);
  }

  MixerInputs inputs{q.there, k.there, v.there, {}, {}, {}};
  MixerSpec spec = c.spec;
  spec.decay = false;
  const MixerShape shape = check_mixer("test", spec, inputs, Form::parallel);
  // What comes in is the state of as many tokens before the first.
  constexpr int64_t kBefore = 16;
  StatesCase earlier = c;
  earlier.length = kBefore;
  const Rounded k_before(random, earlier, c.k_heads, c.qk_dim), v_before(random, earlier, c.v_heads, c.v_dim);
  const int64_t state_size = shape.state_rows * shape.state_columns;
  std::vector<double> first(static_cast<size_t>(c.states ? c.batch * c.heads * state_size : 0));
  Tensor initial, initial_gradient;
  if (c.states) {
    initial = Tensor::empty({c.batch, c.heads, shape.state_rows, shape.state_columns}, DType::f32);
    for (int64_t head = 0; head < c.batch * c.heads; ++head)
      for (int64_t j = 0; j < kBefore; ++j) {
        const int64_t b = head / c.heads, h = head % c.heads;
        add_outer(first.data() + head * state_size, shape, 1, features(shape, k_before.row(b, j, h)),
                  v_before.row(b, j, h), 1);
      }
    for (size_t i = 0; i < first.size(); ++i) initial.data<float>()[i] = static_cast<float>(first[i]);
    inputs.initial_state = to_gpu(initial);
    initial_gradient = Tensor::empty(initial.shape(), DType::f32, kGpu);
  }
  const std::vector<Segment> segments;
  MixerResult result;
  result.final_state = Tensor::empty({c.batch, c.heads, shape.state_rows, shape.state_columns}, DType::f32, kGpu);
  const MixerCall call{spec, shape, inputs, segments, c.chunk, result};
  ASSERT_TRUE(cuda::states_support(call));
  cuda::ChunkTables factors;
  if (c.factors) {
    factors.in = to_gpu(in);
    factors.out = to_gpu(out);
    factors.through = to_gpu(through);
  }
  factors.chunk = c.chunk;
  factors.chunks = chunks;
  const auto poisoned = [&](int64_t dim) {
    const Tensor x = Tensor::empty({c.batch, c.length, c.heads, dim}, DType::bf16, kGpu);
    fill(x, NAN);
    return x;
  };
  const Tensor past = poisoned(c.v_dim);
  const Tensor past_n = sum ? Tensor::empty({c.batch, c.heads, c.length}, DType::f32, kGpu) : Tensor();
  const cuda::HeadGradients gradients{poisoned(c.qk_dim), poisoned(c.qk_dim), poisoned(c.v_dim), {}, {}};
  const Tensor states = cuda::chunk_states(call, factors);
  cuda::read_states(call, factors, states, past, past_n);
  const Tensor scaled_reach = sum ? to_gpu(over_n) : Tensor();
  cuda::state_gradients(call, factors, states, {g.there, to_gpu(delta), {}, {}, scaled_reach}, gradients,
                        initial_gradient);

  const double scale = squared ? static_cast<double>(shape.scale) * shape.scale : shape.scale;
  std::vector<double> y(tokens * c.v_dim), n(tokens), dq(tokens * c.qk_dim), dk(tokens * c.qk_dim);
  std::vector<double> dv(tokens * c.v_dim), last = first, dfirst(first.size());
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t head = b * c.heads + h;
      const auto at = [&](int64_t t) { return (b * c.length + t) * c.heads + h; };
      for (int64_t i = 0; i < c.length; ++i) {
        double reach = c.factors ? in.data<float>()[head * c.length + i] : 1.0;
        const double given = sum ? inverse.data<float>()[head * c.length + i] : 1.0;
        const double shift = sum ? delta.data<float>()[head * c.length + i] : 0.0;
        for (int64_t block = i / c.chunk - 1; block >= 0; --block) {
          for (int64_t j = block * c.chunk; j < (block + 1) * c.chunk; ++j) {
            const double decay = scale * reach * (c.factors ? out.data<float>()[head * c.length + j] : 1.0);
            const double s = dot(q.row(b, i, h), k.row(b, j, h));
            const double w = decay * (squared ? s * s : s);
            const double d = given * decay * (squared ? 2 * s : 1.0) * (dot(g.row(b, i, h), v.row(b, j, h)) - shift);
            n[head * c.length + i] += w;
            add(y, at(i), w, v.row(b, j, h));
            add(dv, at(j), given * w, g.row(b, i, h));
            add(dq, at(i), d, k.row(b, j, h));
            add(dk, at(j), d, q.row(b, i, h));
          }
          if (c.factors) reach *= through.data<float>()[head * chunks + block];
        }
        for (int64_t j = 0; c.states && j < kBefore; ++j) {
          const double decay = scale * reach, s = dot(q.row(b, i, h), k_before.row(b, j, h));
          const double w = decay * (squared ? s * s : s), dw = dot(g.row(b, i, h), v_before.row(b, j, h)) - shift;
          n[head * c.length + i] += w;
          add(y, at(i), w, v_before.row(b, j, h));
          add(dq, at(i), given * decay * (squared ? 2 * s : 1.0) * dw, k_before.row(b, j, h));
        }
        if (c.states)
          add_outer(dfirst.data() + head * state_size, shape, given * scale * reach, features(shape, q.row(b, i, h)),
                    g.row(b, i, h), -shift);
        if (sum && n[head * c.length + i] > 0)
          for (int64_t e = 0; e < c.v_dim; ++e) y[at(i) * c.v_dim + e] /= n[head * c.length + i];
      }
      for (int64_t j = 0; c.states && j < c.length; ++j) {
        double* const state = last.data() + head * state_size;
        if (j % c.chunk == 0 && c.factors)
          for (int64_t i = 0; i < state_size; ++i) state[i] *= through.data<float>()[head * chunks + j / c.chunk];
        add_outer(state, shape, c.factors ? out.data<float>()[head * c.length + j] : 1.0,
                  features(shape, k.row(b, j, h)), v.row(b, j, h), 1);
      }
    }
  if (c.states) {
    EXPECT_LE(relative_error(to_cpu(result.final_state), last), 1e-2) << "final state";
    EXPECT_LE(relative_error(to_cpu(initial_gradient), dfirst), 1e-2) << "gradient of the initial state";
  }
  EXPECT_LE(relative_error(to_cpu(past), y), 1e-2) << "past";
  if (sum) {
    EXPECT_LE(relative_error(to_cpu(past_n), n), 1e-2) << "normalizer";
  }
  EXPECT_LE(relative_error(to_cpu(gradients.q), dq), 1e-2) << "dq";
  EXPECT_LE(relative_error(to_cpu(gradients.k), dk), 1e-2) << "dk";
  EXPECT_LE(relative_error(to_cpu(gradients.v), dv), 1e-2) << "dv";
}

TEST(StatesCuda, MatchesSumsOverPairsOfTokens) {
  SKIP_WITHOUT_GPU();
  SKIP_WITHOUT_HOPPER();
  Random random(1);
  for (const MixerSpec& spec : {MixerSpec{Score::squared, true, Norm::sum}, MixerSpec{Score::squared, true, Norm::none},
                                MixerSpec{Score::linear, true, Norm::none}}) {
    check(random, {spec, 1, 512, 1, 1, 1, 1, 256, false});
    check(random, {spec, 2, 512 + random.integer(1, 255), 4, 2, 1, 4, 256, true});
    check(random, {spec, 1, 1024 + random.integer(1, 63), 2, 2, 2, 1, 512, true});
  }
}

// Narrower heads are padded, and wider ones have several tiles.
TEST(StatesCuda, EveryDimension) {
  SKIP_WITHOUT_GPU();
  SKIP_WITHOUT_HOPPER();
  Random random(2);
  const auto check_dims = [&](const MixerSpec& spec, int64_t qk_dim, int64_t v_dim) {
    check(random, {spec, 1, 512 + random.integer(1, 255), 2, 1, 2, 1, 256, true, qk_dim, v_dim});
  };
  for (const Norm norm : {Norm::sum, Norm::none})
    for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{
             {8, 8}, {24, 64}, {40, 16}, {56, 40}, {72, 128}, {96, 80}, {112, 64}, {128, 120}})
      check_dims({Score::squared, true, norm}, qk_dim, v_dim);
  for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{
           {16, 8}, {72, 128}, {40, 96}, {128, 72}, {136, 200}, {192, 40}, {72, 160}, {256, 256}})
    check_dims({Score::linear, true, Norm::none}, qk_dim, v_dim);
}

TEST(StatesCuda, InitialAndFinalStates) {
  SKIP_WITHOUT_GPU();
  SKIP_WITHOUT_HOPPER();
  Random random(6);
  const auto check_dims = [&](const MixerSpec& spec, int64_t qk_dim, int64_t v_dim) {
    check(random, {spec, 1, 256 + random.integer(1, 63), 2, 1, 2, 1, 256, true, qk_dim, v_dim, true});
  };
  for (const auto& [qk_dim, v_dim] :
       std::vector<std::pair<int64_t, int64_t>>{{16, 8}, {32, 64}, {40, 24}, {64, 64}, {72, 40}, {96, 72}, {128, 128}})
    check_dims({Score::squared, true, qk_dim % 64 == 0 ? Norm::sum : random.pick<Norm>({Norm::sum, Norm::none})},
               qk_dim, v_dim);
  check_dims({Score::linear, true, Norm::none}, 72, 136);
  // More tiles of tokens in a chunk than a warp looks up.
  check(random, {{Score::squared, true, Norm::sum}, 1, 2400, 1, 1, 1, 1, 2304, true, 24, 24, true});
}

// Where there are many, a block computes several pieces of work one after the other, some of which decay has erased,
// and owns more tiles of a state.
TEST(StatesCuda, ManyHeadsHaveTheBitsOfFew) {
  SKIP_WITHOUT_GPU();
  SKIP_WITHOUT_HOPPER();
  Random random(4);
  constexpr int64_t kChunks = 3, kHeads = 8;
  for (const auto& [norm, qk_dim, v_dim, chunk] :
       {std::tuple{Norm::sum, 64, 64, 512}, {Norm::none, 48, 40, 256}, {Norm::sum, 128, 72, 256}}) {
    const MixerOptions options{.form = Form::chunked, .chunk = chunk};
    Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = kChunks * chunk - 100, .q_heads = kHeads, .v_heads = 2};
    sizes.batch = 4 * cuda::multiprocessors() / (kChunks * kHeads) + 2;
    MixerCase c = make_case(random, {Score::squared, true, norm}, sizes, DType::bf16);
    float* const decays = c.inputs.log_decay.data<float>();
    for (int64_t i = 0; i < c.inputs.log_decay.elements(); ++i)
      decays[i] *= std::array{0.002f, 0.5f, 2.0f}[static_cast<size_t>(i % kHeads % 3)];
    const MixerCase there = on_gpu(c);
    const MixerRun all = run_there(there, options, options);
    EXPECT_EQ(all.result.kernel, "states");
    for (int64_t b = 0; b < sizes.batch; ++b) {
      const auto row = [&](const Tensor& x) { return x.slice(0, b, 1); };
      MixerCase one = there;
      for (Tensor* x : {&one.inputs.q, &one.inputs.k, &one.inputs.v, &one.inputs.log_decay, &one.out_gradient})
        *x = row(*x);
      MixerRun expected;
      expected.result.out = row(all.result.out);
      expected.gradients.q = row(all.gradients.q);
      expected.gradients.k = row(all.gradients.k);
      expected.gradients.v = row(all.gradients.v);
      expected.gradients.log_decay = row(all.gradients.log_decay);
      expect_same_bits(run_there(one, options, options), expected);
    }
  }
}

// Of linear scores, with heads of more than 128: all of the mixer.
TEST(StatesCuda, WideHeads) {
  SKIP_WITHOUT_GPU();
  SKIP_WITHOUT_HOPPER();
  Random random(5);
  const MixerSpec spec{Score::linear, true, Norm::none};
  for (const auto& [qk_dim, v_dim] :
       std::vector<std::pair<int64_t, int64_t>>{{168, 136}, {72, 200}, {200, 40}, {256, 256}})
    for (const bool initial : {false, true}) {
      Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 600 + random.integer(0, 63), .q_heads = 2};
      sizes.strongest_decay = initial ? 0.01 : 1;
      sizes.boundaries = !initial && qk_dim > v_dim;
      MixerCase c = make_case(random, spec, sizes, DType::bf16);
      if (initial)
        c.inputs.initial_state = random.normal_tensor({1, 2, state_rows(spec, qk_dim), state_columns(spec, v_dim)});
      SCOPED_TRACE(describe(c));
      const MixerRun run = run_on_gpu(c, {.form = Form::chunked, .chunk = 256}), expected = run_oracle_without_state(c);
      EXPECT_EQ(run.result.kernel, "states");
      expect_within(errors_of(c, run, expected), 2e-2);
      if (initial) {
        EXPECT_LE(relative_error(run.gradients.initial_state, expected.gradients.initial_state).worst, 2e-2);
      }
    }
}

TEST(StatesCuda, ResultsOfAnyAlignment) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const MixerOptions options{.form = Form::chunked, .chunk = 256};
  for (const auto& [name, kernel] : std::vector<std::pair<const char*, const char*>>{
           {"2mamba", cuda::on_hopper(kGpu) ? "states" : "chunk states"}, {"mamba2s", "walk"}}) {
    const MixerCase c =
        make_case(random, mixer_spec(name), {.qk_dim = 40, .v_dim = 40, .length = 300, .q_heads = 2}, DType::bf16);
    expect_same_bits_in_unaligned_results(on_gpu(c), options, kernel);
  }
}

}  // namespace
}  // namespace furious
#endif
