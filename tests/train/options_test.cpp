#include "train/options.h"

#include <cmath>
#include <functional>
#include <set>

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

TEST(TrainOptions, TextsRoundTrip) {
  TrainOptions options;
  options.lr = 3.0000001e-4;
  options.data = "a \"quoted\\ folder";
  options.seed = ~uint64_t{0};
  options.recompute = true;
  options.schedule_steps = 12345678901;
  TrainOptions copy;
  for (const auto& [name, text] : to_texts(options)) set_train_option(copy, name, text);
  EXPECT_EQ(to_texts(copy), to_texts(options));
  EXPECT_EQ(copy.lr, options.lr);
  EXPECT_EQ(copy.seed, options.seed);
  EXPECT_NE(to_toml(options).find("data = \"a \\\"quoted\\\\ folder\"\n"), std::string::npos);
  std::set<std::string> names;
  for (const TrainOption& option : train_options()) EXPECT_TRUE(names.insert(option.name).second) << option.name;
}

TEST(TrainOptions, RefusesBadValues) {
  TrainOptions options;
  expect_error([&] { set_train_option(options, "stepz", "3"); }, {"unknown option \"stepz\"", "\"steps\""});
  expect_error([&] { set_train_option(options, "steps", "3x"); }, {"steps", "3x", "is not an integer"});
  expect_error([&] { set_train_option(options, "steps", "0"); }, {"steps is 0", "1 or more"});
  expect_error([&] { set_train_option(options, "lr", "fast"); }, {"lr", "fast"});
  expect_error([&] { set_train_option(options, "dtype", "f16"); }, {"unknown dtype \"f16\"", "bf16"});
  expect_error([&] { set_train_option(options, "packing", "pack"); }, {"unknown packing", "packed"});
  expect_error([&] { set_train_option(options, "recompute", "yes"); }, {"recompute", "neither true nor false"});
  options.accumulate = 0;
  expect_error([&] { check_train_options(options); }, {"accumulate is 0", "1 to"});
  options.accumulate = 3;
  expect_error([&] { check_train_options(options); }, {"batch of 8", "3 micro-batches"});
  options.accumulate = 1;
  options.schedule_steps = 50;
  expect_error([&] { check_train_options(options); }, {"schedule-steps is 50", "warmup (100)"});
  options.schedule_steps = 0;
  options.bos = true;
  for (const char* packing : {"packed", "isolated"}) {
    options.packing = packing;
    expect_error([&] { check_train_options(options); }, {"--bos", std::string("packing is ") + packing, "rows"});
  }
  options.packing = "rows";
  check_train_options(options);
  options.eps = 0;  // a parameter without gradients would become 0 / 0
  expect_error([&] { check_train_options(options); }, {"eps is 0", "1e-30 to 1"});
}

TEST(TrainOptions, MixerPrecisionOnACpuIsF32) {
  TrainOptions options;
  options.device = "cpu";
  for (const char* precision : {"bf16", "tf32", "tf32x3"}) {
    set_train_option(options, "mixer-precision", precision);
    expect_error([&] { resolved(options); }, {"mixer-precision", precision, "not supported on a CPU"});
  }
  for (const char* precision : {"auto", "f32"}) {
    set_train_option(options, "mixer-precision", precision);
    EXPECT_EQ(resolved(options).mixer_precision, precision);
  }
}

TEST(TrainOptions, DimensionsReplaceTheSize) {
  TrainOptions options;
  options.hidden = 96;
  options.heads = 6;
  options.layers = 3;
  options.qk_heads = 2;
  const ModelConfig config = model_config(options, 300);
  EXPECT_EQ(config.hidden, 96);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.q_heads, 2);
  EXPECT_EQ(config.v_heads, 6);
  EXPECT_EQ(config.intermediate, 256);
  options.heads = 7;
  expect_error([&] { model_config(options, 300); }, {"width of 96", "7 heads"});
}

TEST(TrainOptions, SwitchesReplaceTheArchitectures) {
  TrainOptions options;
  options.switches = "conv_window=4,norm=none";
  BlockConfig expected = preset("2mamba").block;
  expected.conv_window = 4;
  expected.norm = Norm::none;
  EXPECT_EQ(model_config(options, 300).block, expected);
  options.switches = "conv_window";
  expect_error([&] { model_config(options, 300); }, {"\"conv_window\"", "not KEY=VALUE"});
  options.switches = "score=linear";  // under the sum norm, without ReLU
  expect_error([&] { model_config(options, 300); }, {"linear score", "ReLU"});
}

TEST(TrainOptions, LearningRateWarmsUpAndDecays) {
  TrainOptions options;
  options.lr = 1;
  options.warmup = 4;
  options.steps = 12;
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(options, 4), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 5), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 12), 1.0 / 8);
  options.schedule_steps = 8;
  EXPECT_DOUBLE_EQ(learning_rate(options, 7), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 0);
  EXPECT_DOUBLE_EQ(learning_rate(options, 100), 0);
  options.warmup = 0;
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 1);
  options.warmup = 50;
  options.schedule_steps = 0;  // the run ends within the warm-up
  EXPECT_DOUBLE_EQ(learning_rate(options, 12), 12.0 / 50);
}

// Every step of every schedule, against the formulas with their ends worked out by hand.
TEST(TrainOptions, SchedulesFollowTheirFormulas) {
  TrainOptions options;
  options.lr = 3e-3;
  options.min_lr = 3e-4;
  options.warmup = 10;
  options.steps = 110;
  const auto expect_rates = [&](const std::function<double(double done)>& after_warmup) {
    for (int64_t step = 1; step <= 150; ++step) {
      const auto done = static_cast<double>(step - 1);
      const double expected = step <= 10 ? 3e-3 * static_cast<double>(step) / 10 : after_warmup(done);
      EXPECT_NEAR(learning_rate(options, step), expected, 1e-15) << options.schedule << " " << step;
    }
  };
  options.schedule = "constant";
  expect_rates([](double) { return 3e-3; });
  options.schedule = "linear";
  expect_rates([](double done) { return 3e-4 + 2.7e-3 * std::max(0.0, (110 - done) / 100); });
  options.schedule = "cosine";
  expect_rates([](double done) {
    return 3e-4 + 2.7e-3 * (1 + std::cos(std::acos(-1.0) * std::min(1.0, (done - 10) / 100))) / 2;
  });
  options.schedule = "wsd";  // a fifth of 110 steps
  expect_rates([](double done) { return 3e-4 + 2.7e-3 * std::clamp((110 - done) / 22, 0.0, 1.0); });
  options.decay_steps = 50;
  expect_rates([](double done) { return 3e-4 + 2.7e-3 * std::clamp((110 - done) / 50, 0.0, 1.0); });
  options.schedule = "linear";  // a shorter decay at the end
  expect_rates([](double done) { return 3e-4 + 2.7e-3 * std::clamp((110 - done) / 50, 0.0, 1.0); });
  options.schedule = "cosine";
  options.schedule_steps = 80;
  expect_rates([](double done) {
    return 3e-4 + 2.7e-3 * (1 + std::cos(std::acos(-1.0) * std::clamp((done - 30) / 50, 0.0, 1.0))) / 2;
  });
  options.decay_steps = 1000;  // no longer than what follows the warm-up
  options.schedule = "wsd";
  expect_rates([](double done) { return 3e-4 + 2.7e-3 * std::max(0.0, (80 - done) / 70); });
}

TEST(TrainOptions, SchedulesAndOptimizersRefuseBadValues) {
  TrainOptions options;
  expect_error([&] { set_train_option(options, "schedule", "cosin"); }, {"schedule", "did you mean \"cosine\""});
  expect_error([&] { set_train_option(options, "optimizer", "sgd"); }, {"optimizer", "muon"});
  expect_error([&] { set_train_option(options, "decay-on", "norms"); }, {"decay-on", "matrices"});
  expect_error([&] { set_train_option(options, "ema", "2"); }, {"ema is 2", "0 to 1"});
  options.min_lr = 1;
  expect_error([&] { check_train_options(options); }, {"min-lr is 1", "at most lr"});
  options.min_lr = 0;
  options.ema = 1;
  expect_error([&] { check_train_options(options); }, {"ema is 1", "0.999"});
  options.ema = 0;
  options.muon_momentum = 1;
  expect_error([&] { check_train_options(options); }, {"muon-momentum is 1"});
  set_train_option(options, "grad-clip", "0.25");  // the other name of clip
  EXPECT_EQ(options.clip, 0.25);
}

TEST(TrainOptions, SlowPrecisionsOfAGpuAreNamed) {
  TrainOptions options;
  const auto warning = [&](const char* device, const char* dtype, const char* mixer = "auto") {
    options.device = device;
    options.dtype = dtype;
    options.mixer_precision = mixer;
    return slow_precision(options);
  };
  EXPECT_EQ(warning("cpu", "f32"), "");
  EXPECT_EQ(warning("cuda:0", "bf16"), "");
  EXPECT_EQ(warning("cuda:0", "bf16", "bf16"), "");
  for (const char* dtype : {"f32", "tf32"}) {
    const std::string text = warning("cuda:0", dtype);
    EXPECT_NE(text.find(std::string("--dtype ") + dtype), std::string::npos) << text;
    EXPECT_NE(text.find("use --dtype bf16"), std::string::npos) << text;
    EXPECT_NE(text.find("times as long"), std::string::npos) << text;
  }
  for (const char* mixer : {"tf32", "tf32x3", "f32"}) {
    const std::string text = warning("cuda:1", "bf16", mixer);
    EXPECT_NE(text.find(std::string("--mixer-precision ") + mixer), std::string::npos) << text;
    EXPECT_NE(text.find("use --mixer-precision auto"), std::string::npos) << text;
  }
}

TEST(TrainOptions, TomlRoundTrips) {
  TrainOptions options;
  options.data = "a \"quoted\\ path";
  options.out = "not \xff UTF-8\n";
  options.lr = 0.1;
  options.recompute = true;
  options.layers = 7;
  options.resume = true;
  const TrainOptions read = from_toml("# a run\n\n" + to_toml(options));
  EXPECT_EQ(read.data, options.data);
  EXPECT_EQ(read.out, options.out);
  EXPECT_EQ(to_texts(read), to_texts(options));
  testing::expect_error([] { from_toml("lr: 3\n"); }, {"\"lr: 3\" is not an option"});
  testing::expect_error([] { from_toml("lrr = 3\n"); }, {"lrr", "lr"});
}

TEST(TrainOptions, ResumeHasThreeValues) {
  TrainOptions options;
  for (const auto& [text, resume, previous] :
       {std::tuple{"previous", true, true}, {"true", true, false}, {"false", false, false}}) {
    set_train_option(options, "resume", text);
    EXPECT_EQ(options.resume, resume);
    EXPECT_EQ(options.resume_previous, previous);
    EXPECT_EQ(to_texts(options)["resume"], text);
  }
  testing::expect_error([&] { set_train_option(options, "resume", "older"); }, {"older", "previous"});
}

}  // namespace
}  // namespace furious
