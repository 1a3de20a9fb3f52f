// furious::Trainer on a GPU: the same as a run on the same batches, and near to what the CPU computes.
#include "cuda.h"
#include "train/trainer_run.h"

namespace furious {
namespace {

using namespace furious::testing;

TEST(TrainerCuda, EqualsARunOnTheSameBatches) {
  SKIP_WITHOUT_GPU();
  for (const char* dtype : {"f32", "bf16"}) {
    const TemporaryFolder folder;
    TrainOptions options = small_options(small_data(folder), folder.path("run"));
    options.device = "cuda";
    options.dtype = dtype;
    expect_trainer_equals_run(options, folder.path("own"));
  }
}

// Gradients of a batch with documents and weights of the caller, against the CPU in f32.
TEST(TrainerCuda, GradientsAreThoseOfTheCpu) {
  SKIP_WITHOUT_GPU();
  const TrainerSetup setup{.vocabulary = 40};
  TrainOptions options = small_options("", "");
  options.dtype = "f32";
  Trainer cpu(options, setup);
  options.device = "cuda";
  Trainer gpu(options, setup);
  for (const std::string& name : cpu.parameter_names()) gpu.set_parameter(name, cpu.parameter(name).values);
  Random random(3);
  TokenBatch batch{2, 24, {}};
  batch.documents = {5, 24, 31};
  for (int64_t i = 0; i < 48; ++i) {
    batch.ids.push_back(static_cast<int32_t>(random.integer(0, setup.vocabulary - 1)));
    batch.weights.push_back(static_cast<float>(random.uniform(0, 2)));
  }
  const double expected = cpu.backward(batch).loss;
  EXPECT_NEAR(gpu.backward(batch).loss, expected, 1e-4 * expected);
  for (const std::string& name : cpu.parameter_names()) {
    const std::vector<float> one = cpu.gradient(name).values, other = gpu.gradient(name).values;
    EXPECT_LE(
        relative_error(std::vector<double>(other.begin(), other.end()), std::vector<double>(one.begin(), one.end())),
        1e-3)
        << name;
  }
}

}  // namespace
}  // namespace furious
