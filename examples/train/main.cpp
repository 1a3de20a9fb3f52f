// Training a model from a program:
//
//     train DATA OUT        DATA: a folder written by `furious tokenize`, or synthetic:recall
#include <furious/train.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: train DATA OUT\n");
    return 2;
  }
  furious::TrainOptions options;
  options.arch = "2mamba";
  options.size = "tiny";
  options.data = argv[1];
  options.out = argv[2];
  options.resume = true;  // a second call continues the run
  options.steps = 20;
  options.batch = 4;
  options.length = 128;
  options.lr = 1e-3;
  options.warmup = 5;
  options.eval_every = 10;

  furious::TrainObserver observer;
  observer.step = [](const furious::TrainStep& step) {
    std::printf("step %lld  loss %.4f", static_cast<long long>(step.step), step.loss);
    if (step.test_loss) std::printf("  test loss %.4f", *step.test_loss);
    std::printf("\n");
  };
  try {
    const furious::TrainResult result = furious::train(options, observer);
    std::printf("checkpoint: %s\n", result.checkpoint.c_str());
  } catch (const furious::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
