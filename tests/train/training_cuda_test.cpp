#include <map>

#include "cuda.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"
#include "tensor/arena.h"
#include "train/small_run.h"
#include "train/training.h"

namespace furious {
namespace {

using namespace furious::testing;

class TrainingCuda : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::string data = small_data(folder);

  TrainOptions options_for(const std::string& out) {
    TrainOptions options = small_options(data, folder.path(out));
    options.device = "cuda";
    options.sample_every = 0;
    return options;
  }
};

// The mean loss of the last steps, in which single batches do not matter much.
double learned(const TrainOptions& options) {
  Training trainer(options);
  double sum = 0;
  for (int64_t i = 0; i < options.steps; ++i) {
    const double loss = trainer.step().loss;
    if (i >= options.steps - 20) sum += loss / 20;
  }
  return sum;
}

TEST_F(TrainingCuda, EveryPresetLearnsWhatTheCpuLearns) {
  SKIP_WITHOUT_GPU();
  for (const Preset& preset : presets()) {
    TrainOptions options = options_for("run");
    options.arch = preset.name;
    options.hidden = options.intermediate = 64;
    options.heads = 1;  // of 64: tensor cores
    options.steps = 200;
    options.length = 64;
    options.lr = 1e-3;  // small: rounding of the last bit alone moves the result by up to 0.03
    options.clip = 1;
    options.device = "cpu";
    const double expected = learned(options);
    EXPECT_LT(expected, 3.5) << preset.name;
    options.device = "cuda";
    // On a CPU, a learning rate larger by 1e-4 changes those with an output norm by up to 0.06, products in bf16
    // by up to 0.1; others by 0.01.
    const double noise = preset.block.norm == Norm::none ? 0.3 : 0.1;
    for (const char* dtype : {"f32", "tf32", "bf16"}) {
      options.dtype = dtype;
      EXPECT_NEAR(learned(options), expected, noise) << preset.name << " " << dtype;
    }
  }
}

std::string bits_of(const Training& trainer) {
  std::string bits;
  for (const Parameter& parameter : trainer.model().parameters()) {
    const Tensor here = to_cpu(parameter.value.value());
    bits.append(static_cast<const char*>(here.raw()), here.bytes());
  }
  return bits;
}

// Two trainers alternate, so that each sometimes finds its memory in use by the other.
TEST_F(TrainingCuda, Fp8LearnsWhatBf16Learns) {
  SKIP_WITHOUT_GPU();
  if (!matmul_supports(MatmulPrecision::fp8, kGpu)) GTEST_SKIP() << "no 8-bit floats on this GPU";
  for (const char* arch : {"2mamba", "softmax", "mamba2"}) {
    TrainOptions options = options_for("run");
    options.arch = arch;
    options.hidden = options.intermediate = 64;
    options.heads = 1;
    options.steps = 200;
    options.length = 64;
    options.lr = 1e-3;
    options.clip = 1;
    options.dtype = "bf16";
    const double expected = learned(options);
    options.dtype = "fp8";
    const double got = learned(options);
    EXPECT_NEAR(got, expected, 0.15) << arch;
    EXPECT_NE(got, expected) << arch;
    EXPECT_EQ(learned(options), got) << arch;  // same bits again
  }
}

TEST_F(TrainingCuda, ACapturedStepHasTheBitsOfOneLaunchedKernelByKernel) {
  SKIP_WITHOUT_GPU();
  for (const char* arch : {"2mamba", "mamba2", "softmax"})
    for (const int64_t accumulate : {1, 2}) {
      TrainOptions options = options_for("run");
      options.arch = arch;
      options.accumulate = accumulate;
      options.recompute = accumulate > 1;
      options.packing = accumulate > 1 ? "rows" : "packed";
      options.clip = 0.5;
      options.optimizer = accumulate > 1 ? "muon" : "adamw";
      options.decay_on = accumulate > 1 ? "layers" : "all";
      options.z_loss = accumulate > 1 ? 1e-4 : 0;
      options.ema = accumulate > 1 ? 0.9 : 0;
      Training captured(options), plain(options);
      plain.disable_graph();
      for (int i = 0; i < 6; ++i) {
        const TrainStep a = captured.step(), b = plain.step();
        EXPECT_EQ(a.loss, b.loss) << arch;
        EXPECT_EQ(a.gradient_norm, b.gradient_norm) << arch;
        if (i == 3) captured.test_loss();
      }
      EXPECT_TRUE(bits_of(captured) == bits_of(plain)) << arch << ", " << accumulate << " parts";
    }
}

// A profiled step leaves the graph, and the next one captures it again.
TEST_F(TrainingCuda, AProfiledStepGivesTheBitsOfTheGraph) {
  SKIP_WITHOUT_GPU();
  Training captured(options_for("a")), profiled(options_for("b"));
  for (int i = 0; i < 6; ++i) {
    Profiler profiler(kGpu);
    const TrainStep a = captured.step(), b = profiled.step(i == 3 ? &profiler : nullptr);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(profiler.rows().empty(), i != 3);
    for (const Profiler::Row& row : profiler.rows()) {
      if (row.label.role != "mixer") continue;  // too short, or views
      EXPECT_GT(row.seconds, 0);
    }
  }
  EXPECT_TRUE(bits_of(captured) == bits_of(profiled));
}

TEST_F(TrainingCuda, OutOfMemoryInAStepSaysWhatWouldFit) {
  SKIP_WITHOUT_GPU();
  TrainOptions options = options_for("run");
  Training(options_for("before")).step();  // what the libraries keep for the process lies in the device's arena
  options.length = 512;
  options.batch = 1024;
  Arena arena(kGpu);  // its own: that of the device holds what earlier tests have left
  const Arena::Scope scope(arena);
  Training trainer(options);
  arena.trim();
  arena.set_limit(arena.usage().reserved + (size_t{8} << 20));
  expect_error([&] { trainer.step(); },
               {"step 1", "out of memory on cuda:0", "MiB requested", "are free", "--recompute"});
  arena.set_limit(0);
  EXPECT_EQ(trainer.step().step, 1);  // and continues with more memory
}

TEST_F(TrainingCuda, MicroBatchesAddUp) {
  SKIP_WITHOUT_GPU();
  TrainOptions options = options_for("run");
  options.dtype = "f32";
  for (const char* packing : {"packed", "isolated", "rows"}) {
    options.packing = packing;
    options.accumulate = 1;
    Training whole(options);
    options.accumulate = 4;
    options.recompute = true;
    Training parts(options);
    for (int i = 0; i < 3; ++i) {
      const TrainStep a = whole.step(), b = parts.step();
      EXPECT_NEAR(a.loss, b.loss, 1e-4) << packing;
      EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 1e-3 * a.gradient_norm) << packing;
    }
  }
}

std::map<std::string, std::string> contents(const std::string& run) {
  std::map<std::string, std::string> all;
  for (const char* file : {"model.safetensors", "training.safetensors"}) {
    const SafetensorsReader reader(run + "/latest/" + file);
    for (const StoredTensor& tensor : reader.tensors())
      all[tensor.name] = std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return all;
}

TEST_F(TrainingCuda, ResumesAnywhereBitForBit) {
  SKIP_WITHOUT_GPU();
  for (const char* arch : {"2mamba", "mamba2", "softmax"}) {
    TrainOptions options = options_for(std::string("whole-") + arch);
    options.arch = arch;
    options.packing = arch == std::string("2mamba") ? "isolated" : "packed";  // kernel by kernel, and as a graph
    train(options);
    const auto expected = contents(options.out);
    options.out = folder.path(std::string("parts-") + arch);
    for (const int64_t stop_at : {2, 7, 12}) {
      int64_t done = 0;
      TrainObserver observer;
      observer.step = [&](const TrainStep& step) { done = step.step; };
      observer.stop = [&] { return done >= stop_at; };
      train(options, observer);
      options.resume = true;
    }
    EXPECT_TRUE(contents(options.out) == expected) << arch;
  }
}

TEST_F(TrainingCuda, CpuResumesFromAGpuCheckpoint) {
  SKIP_WITHOUT_GPU();
  TrainOptions options = options_for("run");
  const TrainResult first = train(options);
  const LanguageModel here = load_model(first.checkpoint);
  for (const Parameter& parameter : here.parameters()) EXPECT_TRUE(all_finite(parameter.value.value()));
  options.device = "cpu";
  options.dtype = "f32";
  options.resume = true;
  options.steps = 14;
  const TrainResult second = train(options);
  EXPECT_EQ(second.steps, 14);
  EXPECT_LT(second.last.loss, first.last.loss + 0.5);
  options.device = "cuda";
  options.dtype = "bf16";
  options.steps = 16;
  EXPECT_EQ(train(options).steps, 16);
}

TEST_F(TrainingCuda, MemoryEstimateAndNoNewMemory) {
  SKIP_WITHOUT_GPU();
  TrainOptions options = options_for("run");
  options.layers = 4;
  options.length = 512;
  options.batch = 8;
  for (const char* dtype : {"f32", "bf16"}) {
    options.dtype = dtype;
    Arena& arena = Arena::of(kGpu);
    Training trainer(options);
    const TrainingMemory memory = trainer.memory();
    const size_t held = arena.usage().live;  // weights and moments: three of the four numbers of a parameter
    arena.reset_peak();
    trainer.step();
    const double ratio = static_cast<double>(arena.usage().peak - held) /
                         static_cast<double>(memory.total() - memory.parameters / 4 * 3);
    EXPECT_GT(ratio, 0.5) << dtype;
    EXPECT_LT(ratio, 1.3) << dtype;
    for (int i = 0; i < 2; ++i) trainer.step();
    const size_t made = arena.usage().segments_made;
    for (int i = 0; i < 5; ++i) trainer.step();
    EXPECT_EQ(arena.usage().segments_made, made);
    EXPECT_GT(trainer.memory().total(), 0);
  }
  options.batch = 1 << 22;
  options.length = 600;
  expect_error([&] { Training{options}; }, {"GiB", "cuda:0", "are free", "--accumulate"});
}

TEST_F(TrainingCuda, SaysWhereItDiverged) {
  SKIP_WITHOUT_GPU();
  for (const auto& [name, place] : {std::pair{"model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp"},
                                    {"lm_head.weight", "output projection"}}) {
    Training trainer(options_for("run"));
    trainer.step();
    for (const Parameter& parameter : trainer.model().parameters())
      if (parameter.name == name) fill(parameter.value.value(), std::nanf(""));
    expect_error([&] { trainer.step(); }, {"step 2", place});
  }
}

}  // namespace
}  // namespace furious
