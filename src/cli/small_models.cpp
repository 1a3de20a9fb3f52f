#include "cli/small_models.h"

#include <fmt/format.h>

#include "cli/progress.h"
#include "model/checkpoint.h"
#include "tensor/device.h"

namespace furious::cli {
namespace {

LanguageModel trained_model(const TrainOptions& options, const std::string& checkpoint) {
  const TrainOptions exact = resolved(options);
  const Device device = device_from_name(exact.device);
  LanguageModel model = load_model(checkpoint, "", device);
  model.set_compute(compute_in(exact.dtype == "bf16" ? DType::bf16 : DType::f32, device));
  return model;
}

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
  options.clip = 1;
  options.eval_every = options.save_every = options.sample_every = 0;
  return options;
}

std::vector<std::string> model_flags(bool heads) {
  std::vector<std::string> names{"steps", "lr", "warmup", "batch", "length", "hidden", "layers"};
  if (heads) names.insert(names.end(), {"heads", "qk-heads"});
  return names;
}

}  // namespace

SmallModelFlags::SmallModelFlags(CLI::App& command, bool heads)
    : any_(command, small_model_options(), {"seed", "device", "dtype", "threads"}),
      of_models_(*command.add_option_group("Training of small models"), small_model_options(), model_flags(heads)) {}

TrainOptions SmallModelFlags::options() const {
  TrainOptions options = small_model_options();
  any_.apply(options);
  of_models_.apply(options);
  return options;
}

std::vector<LanguageModel> train_small_models(const std::string& command, const std::string& out,
                                              std::vector<SmallModel> models) {
  int64_t left = 0, made = 0;  // steps of the unfinished models, and steps done by this process
  for (const SmallModel& model : models) left += model.options.steps;
  ProgressLine line(command);
  std::vector<LanguageModel> trained;
  for (auto& [name, options] : models) {
    options.out = out + "/" + name;
    options.resume = true;
    const int64_t made_before = made;
    TrainObserver observer;
    observer.stop = stop_requested;
    observer.step = [&](const TrainStep& step) {
      ++made;
      if (!line.due()) return;
      const double per_step = line.seconds() / static_cast<double>(made);
      line.show(fmt::format("{}  step {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", name, step.step, options.steps,
                            step.loss, step.tokens_per_second,
                            clock_text(per_step * static_cast<double>(left - step.step))));
    };
    const double began = line.seconds();
    const TrainResult result = train(options, observer);
    if (result.stopped) {
      line.print(fmt::format("stopped in {}; run the same command to resume", name));
      return {};
    }
    line.print(made == made_before ? fmt::format("{:<10} is already trained: {}", name, options.out)
                                   : fmt::format("{:<10} {} steps in {}, loss {:.4f}", name, result.steps,
                                                 clock_text(line.seconds() - began), result.last.loss));
    trained.push_back(trained_model(options, result.checkpoint));
    left -= options.steps;
  }
  return trained;
}

}  // namespace furious::cli
