#include "cli/small_model_flags.h"

#include <fmt/format.h>

#include "cli/progress.h"

namespace furious::cli {
namespace {

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

std::vector<LanguageModel> train_with_progress(const std::string& command, const std::string& out,
                                               const std::vector<SmallModel>& models) {
  ProgressLine line(command);
  int64_t all_made = 0;  // steps of this process
  double began = 0;
  SmallModelsObserver observer;
  observer.stop = stop_requested;
  observer.step = [&](const SmallModel& model, const TrainStep& step, int64_t left) {
    ++all_made;
    if (!line.due()) return;
    const double per_step = line.seconds() / static_cast<double>(all_made);
    line.show(fmt::format("{}  step {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", model.name, step.step,
                          model.options.steps, step.loss, step.tokens_per_second,
                          clock_text(per_step * static_cast<double>(left))));
  };
  observer.ended = [&](const SmallModel& model, const TrainResult& result, int64_t made) {
    if (result.stopped)
      line.print(fmt::format("stopped in {}; run the same command to resume", model.name));
    else if (made == 0)
      line.print(fmt::format("{:<10} is already trained: {}", model.name, model.options.out));
    else
      line.print(fmt::format("{:<10} {} in {}, loss {:.4f}", model.name, counted(result.steps, "step"),
                             clock_text(line.seconds() - began), result.last.loss));
    began = line.seconds();
  };
  return train_small_models(out, models, observer);
}

}  // namespace furious::cli
