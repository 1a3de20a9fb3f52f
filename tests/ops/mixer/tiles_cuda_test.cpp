// The general kernels of the parallel form against the double-precision oracle, row by row: every score, norm, decay,
// precision of the products, dtype and padding of dimensions.
#include <optional>

#include "ops/mixer/gpu_case.h"
#ifdef FURIOUS_CUDA
#include "ops/mixer/gpu/mixer_cuda.h"
#endif

namespace furious {
namespace {

using namespace furious::testing;

constexpr MixerPrecision kPrecisions[] = {MixerPrecision::f32, MixerPrecision::tf32x3, MixerPrecision::tf32,
                                          MixerPrecision::bf16};

// The largest dimension that this device computes in tiles.
int64_t largest_tile_dim() {
#ifdef FURIOUS_CUDA
  return cuda::largest_tile_dim(kGpu);
#else
  return 0;
#endif
}

double tolerance_of(MixerPrecision precision, DType dtype) {
  if (precision == MixerPrecision::bf16) return 3e-2;
  if (dtype == DType::bf16) return 1e-2;
  return precision == MixerPrecision::tf32 ? 4e-3 : precision == MixerPrecision::tf32x3 ? 5e-5 : 2e-5;
}

// In all precisions, with one run of the oracle.
void compare(const MixerCase& c, DType dtype) {
  SCOPED_TRACE(describe(c));
  const MixerRun oracle = run_oracle_without_state(c);
  for (const MixerPrecision precision : kPrecisions) {
    SCOPED_TRACE(fmt::format("{} products of {}", name_of(precision), name_of(dtype)));
    const MixerRun actual = run_on_gpu(c, {.precision = precision});
    EXPECT_EQ(actual.result.form, Form::parallel);
    if (precision == MixerPrecision::bf16 && dtype == DType::bf16) {  // those have dedicated kernels
      EXPECT_TRUE(actual.result.kernel == "hopper" || actual.result.kernel == "tensor cores") << actual.result.kernel;
    } else {
      EXPECT_EQ(actual.result.kernel, "tiles");
    }
    expect_within(errors_of(c, actual, oracle), tolerance_of(precision, dtype));
    if (!oracle.result.normalizer) continue;
    EXPECT_LE(relative_error(actual.result.normalizer, oracle.result.normalizer).worst, tolerance_of(precision, dtype));
    if (!oracle.result.maximum) continue;
    EXPECT_LE(relative_error(actual.result.maximum, oracle.result.maximum).worst, tolerance_of(precision, dtype));
  }
}

TEST(TilesCuda, EverySpec) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  const std::vector<std::pair<int64_t, int64_t>> dims{{64, 64}, {32, 32}, {96, 96}, {128, 64}, {24, 40}};
  const std::vector<int64_t> lengths{1, 63, 64, 65, 130};
  size_t i = 0;
  for (const MixerSpec& spec : gpu_specs())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Sizes sizes{dims[i % 5].first, dims[i % 5].second, lengths[i / 2 % 5]};
      ++i;
      sizes.boundaries = random.coin();
      (random.coin() ? sizes.q_heads : sizes.v_heads) = 2;
      // Strong ones saturate where they have a sign, and erase tiles where they have none.
      sizes.strongest_decay = random.pick<double>({0.02, 0.5, 8});
      compare(make_case(random, spec, sizes, dtype), dtype);
    }
}

TEST(TilesCuda, EveryDimensionAndLength) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const char* name : {"2mamba", "2mamba-e"})
    for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{
             {64, 64}, {32, 32}, {96, 96}, {128, 64}, {24, 40}, {64, 128}, {128, 128}, {8, 8}})
      for (const int64_t length : {1, 63, 64, 65, 200}) {
        const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = length, .boundaries = random.coin()};
        compare(make_case(random, mixer_spec(name), sizes, DType::f32), DType::f32);
      }
}

// Tiles before the queries or behind the keys of a block, where decay is a factor of each token.
TEST(TilesCuda, FarTiles) {
  SKIP_WITHOUT_GPU();
  Random random(16);
  int i = 0;
  for (const MixerSpec& spec :
       {mixer_spec("2mamba"), mixer_spec("mamba2"), MixerSpec{Score::squared, false, Norm::sum},
        MixerSpec{Score::squared, true, Norm::sum, 0, 0, true}, MixerSpec{Score::power, true, Norm::sum, 0, 3},
        MixerSpec{Score::series, true, Norm::none, 0, 2}, mixer_spec("2mamba-e")})
    for (const double strongest : {0.001, 0.3, 30.0})
      for (const bool documents : {false, true}) {
        if (documents && strongest > 0.1) continue;  // decay would hide the end of a document
        const int64_t dim = i++ / 2 % 2 == 0 ? 64 : 96;
        // One that may grow would overflow.
        const Sizes sizes{.qk_dim = dim,
                          .v_dim = dim,
                          .length = 330 + random.integer(0, 60),
                          .strongest_decay = spec.signed_decay ? 0.01 : strongest};
        MixerCase c = make_case(random, spec, sizes, DType::f32);
        if (documents)  // the first one ends within a far tile
          c.inputs.boundaries = int_tensor_of({0, static_cast<int32_t>(random.integer(70, 100))}, {2});
        compare(c, DType::f32);
      }
}

TEST(TilesCuda, WideHeads) {
  SKIP_WITHOUT_GPU();
  Random random(17);
  if (largest_tile_dim() < 256) GTEST_SKIP() << "too little shared memory";
  const std::vector<MixerSpec> specs{mixer_spec("2mamba"), mixer_spec("mamba2"), mixer_spec("softmax"),
                                     MixerSpec{Score::power, true, Norm::sum, 0, 3}};
  size_t i = 0;
  for (const auto& [qk_dim, v_dim] :
       std::vector<std::pair<int64_t, int64_t>>{{256, 256}, {136, 64}, {16, 192}, {160, 160}, {201, 131}, {250, 8}}) {
    const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 130 + random.integer(0, 20), .strongest_decay = 0.1};
    compare(make_case(random, specs[i++ % specs.size()], sizes, DType::f32), DType::f32);
  }
}

TEST(TilesCuda, DimensionsThatAreNoMultiplesOfEight) {
  SKIP_WITHOUT_GPU();
  Random random(18);
  for (const MixerSpec& spec : {mixer_spec("2mamba"), mixer_spec("softmax"), mixer_spec("mamba2")})
    for (const auto& [qk_dim, v_dim] :
         std::vector<std::pair<int64_t, int64_t>>{{9, 11}, {20, 24}, {24, 20}, {63, 65}, {127, 9}})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 140, .q_heads = 2};
        compare(make_case(random, spec, sizes, dtype), dtype);
      }
}

TEST(TilesCuda, ManyTilesAndSharedHeads) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (const MixerSpec& spec : {mixer_spec("2mamba"), mixer_spec("softmax"), mixer_spec("mamba2")})
    for (const double strongest : {0.01, 2.0}) {
      const Sizes sizes{.qk_dim = 64, .v_dim = 64, .length = 513, .v_heads = 2, .strongest_decay = strongest};
      compare(make_case(random, spec, sizes, DType::f32), DType::f32);
    }
  const Sizes groups{.qk_dim = 40, .v_dim = 72, .length = 100, .batch = 2, .q_heads = 4, .k_heads = 2, .v_heads = 1};
  for (const DType dtype : {DType::f32, DType::bf16})
    compare(make_case(random, mixer_spec("2mamba"), groups, dtype), dtype);
}

// Each precision has the expected error, forward and backward.
TEST(TilesCuda, UsesTheRequestedPrecision) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (const MixerSpec& spec : {mixer_spec("mamba2"), mixer_spec("2mamba"), mixer_spec("softmax")})
    for (const int64_t dim : {64, 128}) {
      const Sizes sizes{.qk_dim = dim, .v_dim = dim, .length = 200};
      const MixerCase c = make_case(random, spec, sizes, DType::f32);
      SCOPED_TRACE(describe(c));
      const MixerRun oracle = run_oracle_without_state(c);
      const auto errors = [&](MixerPrecision precision) {
        return errors_of(c, run_on_gpu(c, {.precision = precision}), oracle);
      };
      const Errors f32 = errors(MixerPrecision::f32), tf32x3 = errors(MixerPrecision::tf32x3);
      const Errors tf32 = errors(MixerPrecision::tf32), bf16 = errors(MixerPrecision::bf16);
      for (double Errors::*which : {&Errors::out, &Errors::q, &Errors::k, &Errors::v}) {
        EXPECT_LT(20 * f32.*which, tf32.*which);
        EXPECT_LT(20 * tf32x3.*which, tf32.*which);
        EXPECT_LT(2 * tf32.*which, bf16.*which);
      }
      // Automatic is tf32x3 for f32 inputs.
      const MixerRun automatic = run_on_gpu(c, {.form = Form::parallel});
      const MixerRun three = run_on_gpu(c, {.precision = MixerPrecision::tf32x3});
      EXPECT_EQ(automatic.result.kernel, "tiles");
      EXPECT_TRUE(same_bits(automatic.result.out, three.result.out));
      EXPECT_TRUE(same_bits(automatic.gradients.k, three.gradients.k));
    }
}

// The same in the chunked form, whose products with the states go through memory.
TEST(TilesCuda, ChunksUseTheRequestedPrecision) {
  SKIP_WITHOUT_GPU();
  Random random(14);
  for (const char* name : {"mamba2", "2mamba"}) {
    const Sizes sizes{.qk_dim = 32, .v_dim = 40, .length = 300, .strongest_decay = 0.01};
    const MixerCase c = make_case(random, mixer_spec(name), sizes, DType::f32);
    SCOPED_TRACE(describe(c));
    const MixerRun oracle = run_oracle_without_state(c);
    const auto errors = [&](MixerPrecision precision) {
      const MixerRun run = run_on_gpu(c, {.form = Form::chunked, .chunk = 32, .precision = precision});
      EXPECT_EQ(run.result.form, Form::chunked);
      return errors_of(c, run, oracle);
    };
    const Errors f32 = errors(MixerPrecision::f32), tf32x3 = errors(MixerPrecision::tf32x3);
    const Errors tf32 = errors(MixerPrecision::tf32), automatic = errors(MixerPrecision::automatic);
    for (double Errors::*which : {&Errors::out, &Errors::q, &Errors::k, &Errors::v}) {
      EXPECT_LT(20 * f32.*which, tf32.*which);
      EXPECT_LT(20 * tf32x3.*which, tf32.*which);
      EXPECT_EQ(automatic.*which, tf32x3.*which);
    }
  }
}

// f16 has the errors of TF32, which bf16 would not reach, in either form.
TEST(TilesCuda, Halves) {
  SKIP_WITHOUT_GPU();
  Random random(15);
  for (const char* name : {"2mamba", "mamba2", "softmax"})
    for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{64, 64}, {32, 96}, {20, 20}}) {
      const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 200, .v_heads = 2, .boundaries = true};
      const MixerCase c = make_case(random, mixer_spec(name), sizes, DType::f16);
      SCOPED_TRACE(describe(c));
      const MixerRun oracle = run_oracle_without_state(c);
      for (const Form form : {Form::parallel, Form::chunked}) {
        if (form == Form::chunked && name == std::string_view("softmax")) continue;
        const MixerRun actual = run_on_gpu(c, {.form = form, .chunk = 64});
        EXPECT_EQ(actual.result.form, form);
        EXPECT_EQ(actual.result.kernel, "tiles");
        EXPECT_EQ(actual.result.out.dtype(), DType::f16);
        EXPECT_EQ(actual.gradients.q.dtype(), DType::f16);
        expect_within(errors_of(c, actual, oracle), 5e-3);
      }
      const MixerRun rounded = run_on_gpu(c, {.form = Form::parallel, .precision = MixerPrecision::bf16});
      expect_within(errors_of(c, rounded, oracle), 3e-2);
    }
}

// Rows that cannot be read 16 bytes at a time hold the same numbers.
TEST(TilesCuda, RowsOfAnyAlignment) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const MixerPrecision precision : kPrecisions) {
      if (dtype == DType::bf16 && precision == MixerPrecision::bf16) continue;  // other kernels
      const Sizes sizes{.qk_dim = 40, .v_dim = 72, .length = 100, .q_heads = 2};
      const MixerCase c = on_gpu(make_case(random, mixer_spec("2mamba"), sizes, dtype));
      expect_same_bits_in_wider_rows(c, {.precision = precision}, "tiles");
    }
}

TEST(TilesCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(6);
  for (const MixerSpec& spec : gpu_specs()) {
    const Sizes sizes{.qk_dim = 64, .v_dim = 96, .length = 300, .v_heads = 2};
    const MixerCase c = make_case(random, spec, sizes, DType::f32);
    const MixerOptions options{.precision =
                                   random.pick<MixerPrecision>({std::begin(kPrecisions), std::end(kPrecisions)})};
    const MixerRun a = run_on_gpu(c, options), b = run_on_gpu(c, options);
    expect_same_bits(a, b);
  }
}

// A backward pass can use the results of another family's forward pass.
TEST(TilesCuda, FamiliesMix) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  for (const char* name : {"2mamba", "softmax", "mamba2"}) {
    const Sizes sizes{.qk_dim = 64, .v_dim = 64, .length = 200, .boundaries = true};
    const MixerCase c = make_case(random, mixer_spec(name), sizes, DType::bf16), there = on_gpu(c);
    SCOPED_TRACE(describe(c));
    const MixerRun oracle = run_oracle_without_state(c);
    const MixerOptions fast{.form = Form::parallel}, tiles{.precision = MixerPrecision::tf32};
    const MixerRun a = run_there(there, fast, tiles), b = run_there(there, tiles, fast);
    EXPECT_TRUE(a.result.kernel == "hopper" || a.result.kernel == "tensor cores") << a.result.kernel;
    EXPECT_EQ(b.result.kernel, "tiles");
    expect_within(errors_of(c, a, oracle), 2e-2);
    expect_within(errors_of(c, b, oracle), 2e-2);
  }
}

// In calls with states: inside the chunks.
TEST(TilesCuda, InsideChunks) {
  SKIP_WITHOUT_GPU();
  Random random(9);
  for (const char* name : {"2mamba", "mamba2"})
    for (const MixerPrecision precision : {MixerPrecision::automatic, MixerPrecision::tf32}) {
      MixerCase c = make_case(random, mixer_spec(name), {.qk_dim = 24, .v_dim = 40, .length = 150}, DType::f32);
      SCOPED_TRACE(fmt::format("{}, {}", describe(c), name_of(precision)));
      c.inputs.initial_state = mixer_forward(c.spec, c.inputs, {Form::reference, 0, true}).final_state;
      const MixerRun actual = run_on_gpu(c, {.form = Form::chunked, .chunk = 48, .precision = precision});
      EXPECT_EQ(actual.result.form, Form::chunked);
      EXPECT_EQ(actual.result.kernel, "tiles");
      const MixerRun oracle = run_oracle_without_state(c);
      const double tolerance = precision == MixerPrecision::tf32 ? 4e-3 : 1e-4;
      expect_within(errors_of(c, actual, oracle), tolerance);
      EXPECT_LE(relative_error(actual.gradients.initial_state, oracle.gradients.initial_state), tolerance);
    }
}

#ifdef FURIOUS_CUDA  // forcing kernels needs a build with CUDA
// The kernels with a warp per token, which some devices need for the widest heads.
TEST(TilesCuda, SimpleKernelsComputeInF32) {
  SKIP_WITHOUT_GPU();
  Random random(10);
  for (const auto& [qk_dim, v_dim] : std::vector<std::pair<int64_t, int64_t>>{{20, 24}, {136, 64}, {16, 136}})
    for (const MixerSpec& spec : {MixerSpec{Score::power, true, Norm::sum, 0, 4, true},
                                  MixerSpec{Score::series, true, Norm::none, 0, 3}, mixer_spec("2mamba-e")}) {
      const Sizes sizes{.qk_dim = qk_dim, .v_dim = v_dim, .length = 70, .strongest_decay = 3};
      const MixerCase c = make_case(random, spec, sizes, DType::f32), there = on_gpu(c);
      SCOPED_TRACE(describe(c));
      const bool forced = std::max(qk_dim, v_dim) <= largest_tile_dim();
      std::optional<cuda::KernelScope> simple;
      if (forced) simple.emplace("simple");
      const MixerRun actual = run_on_gpu(c, {.precision = MixerPrecision::f32});
      EXPECT_EQ(actual.result.kernel, "simple");
      expect_within(errors_of(c, actual, run_oracle_without_state(c)), 2e-5);
      for (const MixerPrecision precision : {MixerPrecision::bf16, MixerPrecision::tf32, MixerPrecision::tf32x3}) {
        const MixerOptions options{.precision = precision};
        expect_error([&] { mixer_forward(spec, there.inputs, options); },
                     {"mixer_forward", std::string(name_of(precision)), "dimensions of at most"});
      }
    }
}
#endif

TEST(TilesCuda, ZeroKeysGiveZerosNotNaN) {
  SKIP_WITHOUT_GPU();
  Random random(11);
  for (const MixerSpec& spec : gpu_specs())
    for (const MixerPrecision precision : kPrecisions) {
      MixerCase c = make_case(random, spec, {.qk_dim = 32, .v_dim = 64, .length = 70}, DType::f32);
      SCOPED_TRACE(fmt::format("{}, {}", describe(c), name_of(precision)));
      fill(c.inputs.k, 0);
      const MixerRun run = run_on_gpu(c, {.precision = precision});
      for (const Tensor& x : {run.result.out, run.gradients.q, run.gradients.k, run.gradients.v})
        EXPECT_TRUE(all_finite(x));
      // f(0) = 0: all normalizers are, and nothing has a gradient.
      const bool vanishes = spec.score != Score::exponential && spec.score != Score::series;
      if (!vanishes || spec.norm != Norm::sum) continue;
      for (const Tensor& x : {run.result.out, run.gradients.q, run.gradients.k, run.gradients.v})
        for (const double value : to_doubles(x)) ASSERT_EQ(value, 0.0);
    }
}

}  // namespace
}  // namespace furious
