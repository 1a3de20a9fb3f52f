// The persistent decode kernel on its own: every token of a sequence goes through it, from the first on, so before the
// first fold, through folds and after them, and its logits are compared with those of a full pass on the CPU.
#include "decode/token_program.h"

#include <map>

#include "cuda.h"
#include "model/config_json.h"
#include "model/language_model.h"
#include "model/little.h"

namespace furious {
namespace {

using namespace furious::testing;

#define SKIP_WITHOUT_KERNEL()                                                       \
  SKIP_WITHOUT_GPU();                                                               \
  if (const std::string missing = TokenProgram::missing(kGpu, 1); !missing.empty()) \
  GTEST_SKIP() << "the kernel needs " << missing

LanguageModel rounded_on_gpu(const ModelConfig& config) {
  LanguageModel model(config, 1, kGpu, Initialization::pytorch);
  model.set_compute(compute_in(DType::bf16, kGpu));
  model.round_weights();
  return model;
}

// Slots that are stepped by programs alone: one for each number of rows, made once.
class Programs {
 public:
  Programs(const LanguageModel& model, int64_t slots) : model_(model), plan_(plan_tokens(model.plan())) {
    const ModelConfig& config = model.config();
    for (int64_t i = 0; i < config.layers; ++i) {
      mixers_.emplace_back(
          config.block.mixer(),
          MixerCache::Sizes{slots, config.q_heads, config.k_heads, config.v_heads, config.qk_dim, config.head_dim},
          kGpu);
      conv_.push_back(config.block.conv_window > 0
                          ? Tensor::zeros({slots, config.block.conv_window - 1, config.qkv_width()}, DType::f32, kGpu)
                          : Tensor());
    }
  }

  // The next token of each of these slots; logits [rows, vocabulary] on the CPU.
  Tensor step(const std::vector<int32_t>& slots, const std::vector<int32_t>& ids) {
    const auto rows = static_cast<int64_t>(slots.size());
    auto [entry, is_new] = made_.try_emplace(rows);
    Made& made = entry->second;
    if (is_new) made.rows = slot_rows(slots, kGpu);
    made.rows.slots = slots;
    copy_between(made.rows.table, int_tensor_of(slots, {rows}));
    for (MixerCache& mixer : mixers_) mixer.prepare(made.rows, DType::bf16);
    if (is_new) made.program = std::make_unique<TokenProgram>(kGpu, inputs(made.rows));
    made.program->run(to_gpu(int_tensor_of(ids, {rows, 1})));
    for (MixerCache& mixer : mixers_) mixer.advance(made.rows);
    return to_cpu(made.program->logits());
  }
  MixerCache& mixer() { return mixers_.front(); }

 private:
  struct Made {
    SlotRows rows;
    std::unique_ptr<TokenProgram> program;
  };

  TokenProgramInputs inputs(const SlotRows& rows) const {
    TokenProgramInputs inputs;
    inputs.plan = &plan_;
    for (const std::vector<Variable>& weights : model_.layers()) {
      inputs.weights.emplace_back();
      for (const Variable& weight : weights) inputs.weights.back().push_back(weight.value());
    }
    inputs.embedding = model_.embedding_table();
    inputs.norm = model_.final_norm();
    inputs.norm_eps = model_.config().norm_eps;
    inputs.head = model_.output_matrix();
    inputs.conv = conv_;
    for (const MixerCache& mixer : mixers_) inputs.mixers.push_back(&mixer);
    inputs.rows = rows;
    return inputs;
  }

  const LanguageModel& model_;
  TokenPlan plan_;
  std::vector<MixerCache> mixers_;
  std::vector<Tensor> conv_;
  std::map<int64_t, Made> made_;
};

// Steps random ones of `slots` sequences, `rows` of them at a time and sometimes fewer, until all have `length` tokens,
// and compares each row with a full pass in f32. How far rounding to bf16 leads away from that depends on the block: a
// full pass over the same rounded weights, by other kernels, says it.
void compare_with_full_passes(Random& random, const ModelConfig& config, int64_t rows, int64_t slots, int64_t length) {
  SCOPED_TRACE(fmt::format("{} rows of {} slots: {}", rows, slots, config_to_json(config)));
  const LanguageModel cpu(config, 1, {}, Initialization::pytorch), gpu = rounded_on_gpu(config);
  ASSERT_EQ(TokenProgram::missing(kGpu, plan_tokens(gpu.plan()), rows), "");
  const Tensor tokens = random_tokens(random, {slots, length}, config.vocabulary);
  const Tensor expected = cpu.logits(tokens), rounded = gpu.logits(tokens);
  const auto error_of = [&](const Tensor& row, int64_t slot, int64_t token) {
    return relative_error(to_doubles(row), to_doubles(expected.select(0, slot).select(0, token)));
  };
  std::vector<double> rounding(static_cast<size_t>(slots));
  double worst_rounding = 0;
  for (int64_t slot = 0; slot < slots; ++slot)
    for (int64_t token = 0; token < length; ++token) {
      const double error = error_of(rounded.select(0, slot).select(0, token), slot, token);
      rounding[slot] += error;
      worst_rounding = std::max(worst_rounding, error);
    }
  Programs programs(gpu, slots);
  std::vector<int64_t> read(static_cast<size_t>(slots));
  std::vector<double> errors(static_cast<size_t>(slots));
  double worst = 0;
  for (;;) {
    std::vector<int32_t> chosen, ids;
    for (int64_t i = 0; i < slots; ++i)
      if (read[i] < length) chosen.push_back(static_cast<int32_t>(i));
    if (chosen.empty()) break;
    while (static_cast<int64_t>(chosen.size()) > rows)
      chosen.erase(chosen.begin() + random.integer(0, static_cast<int64_t>(chosen.size()) - 1));
    if (random.coin()) std::ranges::reverse(chosen);
    for (const int32_t slot : chosen) ids.push_back(tokens.data<int32_t>()[slot * length + read[slot]]);
    const Tensor logits = programs.step(chosen, ids);
    for (size_t row = 0; row < chosen.size(); ++row) {
      const int32_t slot = chosen[row];
      const double error = error_of(logits.select(0, static_cast<int64_t>(row)), slot, read[slot]);
      worst = std::max(worst, error);
      errors[slot] += error;
      ASSERT_LE(error, 2 * worst_rounding + 1e-2) << "slot " << slot << ", token " << read[slot];
      ++read[slot];
    }
  }
  for (int64_t i = 0; i < slots; ++i) {
    EXPECT_LE(errors[i], 1.5 * rounding[i] + 2e-3 * static_cast<double>(length))
        << "slot " << i << ", worst token " << worst << ", of the full pass " << worst_rounding;
    EXPECT_EQ(programs.mixer().tokens(i), length);
  }
}

TEST(TokenProgramCuda, EveryBlockReadsAsAFullPass) {
  SKIP_WITHOUT_KERNEL();
  Random random(1);
  const std::vector<int64_t> batches = {1, 2, 5, 8};
  size_t i = 0;
  for (const char* arch : {"2mamba", "mamba2s", "mamba2", "softmax", "2mamba-dt", "2mamba-e", "2mamba-series-2",
                           "linear", "outnorm-z", "conv2-a-original", "2mamba-square-mask", "2mamba-outnorm-dt"}) {
    ModelConfig config = little(preset(arch));
    config.hidden = random.pick<int64_t>({24, 64, 136});
    config.intermediate = random.pick<int64_t>({32, 72, 520});
    config.vocabulary = random.pick<int64_t>({23, 300});
    config.head_dim = random.pick<int64_t>({8, 16, 24, 64});
    config.qk_dim = random.coin() ? config.head_dim : random.pick<int64_t>({8, 16, 24});
    config.v_heads = config.q_heads = random.pick<int64_t>({1, 2, 6});
    config.k_heads = random.pick<int64_t>({1, config.v_heads});
    if (config.block.rope && random.coin()) config.block.rope_pairing = RopePairing::halves;
    const int64_t rows = batches[i++ % batches.size()];
    compare_with_full_passes(random, config, rows, rows + random.integer(0, 2), 150);
    if (HasFailure()) break;
  }
}

// The Z gate with a sum in place of the output norm, with and without biases.
TEST(TokenProgramCuda, SwitchesBesideTheBlocks) {
  SKIP_WITHOUT_KERNEL();
  Random random(2);
  for (int i = 0; i < 8 && !HasFailure(); ++i) {
    ModelConfig config = little(preset(random.pick<const char*>({"2mamba", "mamba2", "softmax", "2mamba-dt"})));
    BlockConfig& block = config.block;
    block.z_gate = random.coin();
    block.z_gate_bias = random.coin();
    block.d_residual = random.coin();
    block.conv_window = random.pick<int64_t>({0, 2, 3, 4});
    block.conv_bias = random.coin();
    block.conv_silu = block.conv_window > 0 && random.coin();
    block.decay_bias = block.has_decay_projection() && random.coin();
    block.dt_bias = block.has_dt() && random.coin();
    block.rope = random.coin();
    // Turned features of one sign may sum to almost nothing, of which a norm keeps the rounding.
    if (!block.rope) block.qk_activation = random.pick<Activation>({Activation::none, Activation::silu});
    if (random.coin()) block.scale = 0.5f;
    config.tie_embeddings = random.coin();
    compare_with_full_passes(random, config, random.pick<int64_t>({1, 3, 4}), 4, 120);
  }
}

// A KV cache with many chunks for each block, and 2Mamba's long window before its first fold.
TEST(TokenProgramCuda, LongWindows) {
  SKIP_WITHOUT_KERNEL();
  Random random(3);
  const auto config_of = [&](const char* arch, int64_t heads, int64_t dim) {
    ModelConfig config = little(preset(arch));
    config.layers = 1;
    config.q_heads = config.k_heads = config.v_heads = heads;
    config.head_dim = config.qk_dim = dim;
    config.hidden = 64;
    return config;
  };
  compare_with_full_passes(random, config_of("softmax", 16, 64), 8, 8, 700);   // one block for a head
  compare_with_full_passes(random, config_of("softmax", 1, 128), 1, 1, 1500);  // all blocks for one head
  compare_with_full_passes(random, config_of("2mamba-e", 16, 32), 5, 5, 500);
  compare_with_full_passes(random, config_of("2mamba", 16, 64), 8, 8, 1200);  // folds first after 1056 tokens
  compare_with_full_passes(random, config_of("2mamba", 2, 64), 1, 1, 1200);
}

// What a row gives does not depend on its place in the batch.
TEST(TokenProgramCuda, EqualRowsGiveTheSameBits) {
  SKIP_WITHOUT_KERNEL();
  Random random(4);
  for (const char* arch : {"2mamba", "mamba2", "softmax"}) {
    const ModelConfig config = little(preset(arch));
    const LanguageModel model = rounded_on_gpu(config);
    Programs programs(model, 3), others(model, 3);
    for (int t = 0; t < 150; ++t) {
      const auto id = static_cast<int32_t>(random.integer(0, config.vocabulary - 1));
      const auto other = static_cast<int32_t>(random.integer(0, config.vocabulary - 1));
      const Tensor logits = programs.step({0, 1, 2}, {id, other, id});
      ASSERT_TRUE(same_bits(logits.slice(0, 0, 1), logits.slice(0, 2, 1))) << arch << ", token " << t;
      ASSERT_TRUE(same_bits(logits, others.step({2, 0, 1}, {id, other, id}))) << arch << ", token " << t;
    }
  }
}

TEST(TokenProgramCuda, SaysWhatIsMissing) {
  SKIP_WITHOUT_GPU();
  const auto missing = [](const char* arch, int64_t rows, auto&& change) {
    ModelConfig config = little(preset(arch));
    change(config);
    return TokenProgram::missing(kGpu, plan_tokens(plan_layer(config)), rows);
  };
  const auto unchanged = [](ModelConfig&) {};
  if (TokenProgram::resident_blocks(kGpu, 0) == 0) {
    EXPECT_NE(missing("2mamba", 1, unchanged), "");
    GTEST_SKIP() << "this device has no code for the kernel";
  }
  EXPECT_EQ(TokenProgram::resident_blocks(kGpu, 1 << 20), 0) << "no multiprocessor has so much shared memory";
  for (const char* arch : {"2mamba", "2mamba-outnorm", "2mamba-square-mask", "conv2-a-original", "linear", "outnorm-z",
                           "mamba2", "mamba2s", "2mamba-dt", "2mamba-e", "softmax", "2mamba-series-2"})
    EXPECT_EQ(missing(arch, 1, unchanged), "") << arch;
  EXPECT_EQ(missing("2mamba", 8, [](ModelConfig& c) { c.qk_dim = 16; }), "");
  const auto expect_missing = [&](const char* part, const char* arch, int64_t rows, auto&& change) {
    EXPECT_NE(missing(arch, rows, change).find(part), std::string::npos) << missing(arch, rows, change);
  };
  expect_missing("9 sequences", "2mamba", 9, unchanged);
  expect_missing("0 sequences", "2mamba", 0, unchanged);
  expect_missing("concat", "2mamba", 1, [](ModelConfig& c) { c.branch = 16; });
  expect_missing("head_function", "fox", 1, unchanged);
  expect_missing("discretize", "2mamba", 1, [](ModelConfig& c) { c.block.decay = DecayKind::softplus_dt; });
  expect_missing("activation", "2mamba", 1, [](ModelConfig& c) { c.block.discretize = Discretization::softplus; });
  expect_missing("head_function", "conv2-a-original", 1, [](ModelConfig& c) { c.block.dt_limit = 0.5; });
  expect_missing("degree", "2mamba-3", 1, unchanged);
  expect_missing("1000 heads", "2mamba", 1, [](ModelConfig& c) { c.q_heads = c.k_heads = c.v_heads = 1000; });
  expect_missing("heads of 256", "2mamba", 1, [](ModelConfig& c) { c.head_dim = c.qk_dim = 256; });
  expect_missing("heads of 12", "2mamba", 1, [](ModelConfig& c) { c.qk_dim = 12; });
  expect_missing("65536 numbers", "2mamba", 1, [](ModelConfig& c) { c.intermediate = 1 << 16; });
}

}  // namespace
}  // namespace furious
