#include "paper/small_models.h"

#include "model/checkpoint.h"
#include "tensor/device.h"
#include "train/options.h"

namespace furious {
namespace {

LanguageModel trained_model(const TrainOptions& options, const std::string& checkpoint) {
  const TrainOptions exact = resolved(options);
  const Device device = device_from_name(exact.device);
  LanguageModel model = load_model(checkpoint, "", device);
  model.set_compute(compute_in(exact.dtype == "bf16" ? DType::bf16 : DType::f32, device));
  return model;
}

}  // namespace

TrainOptions small_model_options() {
  TrainOptions options;
  options.data = "synthetic:lookup";
  options.hidden = 64;
  options.intermediate = 128;
  options.heads = 1;  // softmax attention learns the task quickly only with one large head
  options.layers = 2;
  options.batch = 32;
  options.length = 132;
  options.steps = 400;
  options.lr = 3e-3;
  options.warmup = 50;
  options.beta2 = 0.95;
  options.eval_every = options.save_every = options.sample_every = 0;
  return options;
}

std::vector<LanguageModel> train_small_models(const std::string& out, std::vector<SmallModel> models,
                                              const SmallModelsObserver& observer) {
  int64_t left = 0;  // steps of the unfinished models
  for (const SmallModel& model : models) left += model.options.steps;
  std::vector<LanguageModel> trained;
  for (SmallModel& model : models) {
    model.options.out = out + "/" + model.name;
    model.options.resume = true;
    int64_t made = 0;
    TrainObserver training;
    training.stop = observer.stop;
    training.step = [&](const TrainStep& step) {
      ++made;
      if (observer.step) observer.step(model, step, left - step.step);
    };
    const TrainResult result = train(model.options, training);
    if (observer.ended) observer.ended(model, result, made);
    if (result.stopped) return {};
    trained.push_back(trained_model(model.options, result.checkpoint));
    left -= model.options.steps;
  }
  return trained;
}

}  // namespace furious
