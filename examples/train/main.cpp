// A training loop of your own: batches, weights of the loss and learning rates come from the program.
//
//     cmake -S . -B build -DCMAKE_PREFIX_PATH=<where furious was installed> && cmake --build build
//     build/train DATA OUT    DATA: a folder written by `furious tokenize`, or synthetic:recall; a second call goes on
//
// A run as the command line does it, with a folder, a log and checkpoints, is one call: furious::train(options).
#include <furious/train.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <numbers>
#include <string>

namespace {

constexpr int64_t kSteps = 20;

furious::Trainer trainer_for(const std::string& data, const std::string& out) {
  if (std::filesystem::exists(out)) return furious::Trainer::resume(out);
  furious::TrainOptions options;
  options.arch = "2mamba";
  options.size = "tiny";
  options.data = data;
  options.batch = 4;
  options.length = 128;
  options.clip = 1;
  return furious::Trainer(options);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: train DATA OUT\n");
    return 2;
  }
  try {
    furious::Trainer trainer = trainer_for(argv[1], argv[2]);
    const int64_t last = trainer.steps_done() + kSteps;
    while (trainer.steps_done() < last) {
      const int64_t step = trainer.steps_done() + 1;
      furious::TokenBatch batch = trainer.data_batch(step);  // or any ids of your own

      // The first tokens of a row have little context: they count for less.
      batch.weights.assign(batch.ids.size(), 1.0f);
      for (int64_t row = 0; row < batch.rows; ++row)
        for (int64_t t = 0; t < 16; ++t) batch.weights[static_cast<size_t>(row * batch.length + t)] = 0.25f;

      const double done = static_cast<double>(step % kSteps) / kSteps;
      trainer.set_learning_rate(5e-4 * (1 + std::cos(std::numbers::pi * done)));
      const furious::TrainStep result = trainer.step(batch);
      std::printf("step %lld  loss %.4f  gradient %.3f  %lld tokens\n", static_cast<long long>(result.step),
                  result.loss, result.gradient_norm, static_cast<long long>(result.tokens));
    }
    if (const auto loss = trainer.test_loss()) std::printf("test loss %.4f\n", *loss);
    trainer.save(argv[2]);
    std::printf("checkpoint: %s\n", argv[2]);
  } catch (const furious::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
