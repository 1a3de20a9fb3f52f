#include "cuda.h"
#include "model/checkpoint.h"
#include "model/config_json.h"
#include "model/little.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

LanguageModel copied(const LanguageModel& model) {
  size_t next = 0;
  return LanguageModel(
      model.config(),
      [&](const std::string&, const Tensor& out) { copy_between(out, model.parameters()[next++].value.value()); },
      kGpu);
}

// Weights large enough that every parameter matters.
LanguageModel lively(const ModelConfig& config, Random& random) {
  LanguageModel model(config, 7);
  for (const Parameter& parameter : model.parameters())
    add_into(parameter.value.value(), random.normal_tensor(parameter.value.value().shape(), 0.2));
  return model;
}

double loss_and_gradients(const LanguageModel& model, const Tensor& tokens, const Tensor& targets,
                          const Tensor& boundaries) {
  for (const Parameter& parameter : model.parameters()) parameter.value.clear_gradient();
  Tape tape;
  const Variable loss = model.loss(tape, tokens, targets, boundaries);
  tape.backward(loss);
  return to_doubles(to_cpu(loss.value()))[0];
}

std::vector<double> all_gradients(const LanguageModel& model) {
  std::vector<double> all;
  for (const Parameter& parameter : model.parameters())
    for (const double x : to_doubles(to_cpu(parameter.value.gradient()))) all.push_back(x);
  return all;
}

std::vector<ModelConfig> presets_and_random_switches() {
  std::vector<ModelConfig> configs;
  for (const Preset& preset : presets()) configs.push_back(little(preset));
  for (const DecayKind kind : {DecayKind::softplus2, DecayKind::silu}) {
    configs.push_back(little(preset("2mamba")));
    configs.back().block.decay = kind;
  }
  Random random(20);
  for (int i = 0; i < 12; ++i) configs.push_back(random_config(random));
  return configs;
}

TEST(LanguageModelCuda, EveryModelAgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  for (const ModelConfig& config : presets_and_random_switches()) {
    SCOPED_TRACE(config_to_json(config));
    Random random(1);
    const LanguageModel here = lively(config, random);
    LanguageModel there = copied(here);
    const Tensor tokens = random_tokens(random, {3, 70}, here.config().vocabulary);
    const Tensor targets = random_tokens(random, {3, 70}, here.config().vocabulary);
    targets.data<int32_t>()[5] = -1;
    const Tensor boundaries = random.coin() ? int_tensor_of({17, 71, 100}, {3}) : Tensor();
    const double expected = loss_and_gradients(here, tokens, targets, boundaries);
    for (const bool recompute : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Compute compute = compute_in(dtype, kGpu);
        compute.recompute = recompute;
        there.set_compute(compute);
        // Rounding of bf16 grows through layers whose weights are large enough to matter; operations are tested alone.
        // In heads of 8, squares that happen to be small leave a normalizer, or an output before its norm, of little
        // more than rounding.
        const double limit = dtype == DType::f32 ? 1e-3 : 0.2;
        const bool small_sums = config.block.score == Score::squared;
        EXPECT_NEAR(loss_and_gradients(there, tokens, targets, boundaries) / expected, 1, limit) << name_of(dtype);
        EXPECT_LT(relative_error(all_gradients(there), all_gradients(here)),
                  dtype == DType::bf16 && small_sums ? 1.0 : limit)
            << name_of(dtype);
        if (dtype == DType::bf16) continue;
        for (size_t i = 0; i < here.parameters().size(); ++i)  // few numbers, some of which cancel
          EXPECT_LT(relative_error(to_cpu(there.parameters()[i].value.gradient()),
                                   here.parameters()[i].value.gradient(), 1e-6),
                    3 * limit)
              << here.parameters()[i].name;
      }
    }
    there.set_compute(compute_in(DType::f32, kGpu));
    EXPECT_LT(relative_error(there.logits(tokens, boundaries), here.logits(tokens, boundaries)), 1e-3);
    EXPECT_EQ(there.first_not_finite(tokens, boundaries), "");
  }
}

TEST(LanguageModelCuda, NewWeightsHaveTheBitsOfTheCpu) {
  SKIP_WITHOUT_GPU();
  for (const Preset& preset : presets())
    for (const Initialization kind : {Initialization::furious, Initialization::pytorch, Initialization::identity}) {
      const LanguageModel here(little(preset), 11, {}, kind), there(little(preset), 11, kGpu, kind);
      ASSERT_EQ(here.parameters().size(), there.parameters().size());
      for (size_t i = 0; i < here.parameters().size(); ++i)
        EXPECT_TRUE(same_bits(here.parameters()[i].value.value(), to_cpu(there.parameters()[i].value.value())))
            << here.parameters()[i].name;
    }
}

TEST(LanguageModelCuda, CheckpointsAreIndependentOfTheDevice) {
  SKIP_WITHOUT_GPU();
  const TemporaryDirectory folder;
  const LanguageModel there(little(preset("mamba2")), 5, kGpu);
  save_model(folder.path(), there);
  const LanguageModel here = load_model(folder.path()), back = load_model(folder.path(), "", kGpu);
  for (size_t i = 0; i < there.parameters().size(); ++i) {
    const Tensor expected = to_cpu(there.parameters()[i].value.value());
    EXPECT_TRUE(same_bits(here.parameters()[i].value.value(), expected));
    EXPECT_TRUE(same_bits(to_cpu(back.parameters()[i].value.value()), expected));
  }
}

TEST(LanguageModelCuda, FindsTheFirstModuleThatIsNotFinite) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  LanguageModel model(little(preset("2mamba")), 5, kGpu);
  const Tensor tokens = random_tokens(random, {1, 9}, model.config().vocabulary);
  for (const Parameter& parameter : model.parameters())
    if (parameter.name == "model.layers.1.mlp.down_proj.weight") fill(parameter.value.value(), std::nanf(""));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    model.set_compute(compute_in(dtype, kGpu));
    EXPECT_EQ(model.first_not_finite(tokens), "model.layers.1.mlp");
  }
}

TEST(LanguageModelCuda, BadInput) {
  SKIP_WITHOUT_GPU();
  const LanguageModel model(little(preset("softmax")), 5, kGpu);
  const Tensor good = int_tensor_of({1, 2, 3}, {1, 3});
  expect_error([&] { model.logits(int_tensor_of({1, 99, 3}, {1, 3})); }, {"\"tokens\"", "holds 99"});
  expect_error([&] { model.loss(Tape::off(), good, int_tensor_of({1, 2, -2}, {1, 3})); }, {"\"targets\"", "holds -2"});
}

}  // namespace
}  // namespace furious
