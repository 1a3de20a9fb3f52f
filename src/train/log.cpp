#include "train/log.h"

#include <cmath>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;
using Parsed = nlohmann::json;

std::string dumped(const Json& line) {
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// JSON has no numbers that are not finite: they are null.
double number(const Parsed& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : std::nan("");
}

TrainStep step_of(const Parsed& line) {
  TrainStep step;
  step.step = line["step"];
  step.loss = number(line, "loss");
  step.lr = number(line, "lr");
  step.gradient_norm = number(line, "gradient_norm");
  step.tokens_per_second = number(line, "tokens_per_second");
  step.mfu = number(line, "mfu");
  if (line.contains("test_loss")) step.test_loss = number(line, "test_loss");
  if (const auto values = line.find("value_rms"); values != line.end() && values->is_array())
    for (const Parsed& value : *values)
      step.value_rms.push_back(value.is_number() ? value.get<double>() : std::nan(""));
  if (const auto sample = line.find("sample"); sample != line.end() && sample->is_string()) step.sample = *sample;
  if (const auto ranks = line.find("ranks"); ranks != line.end() && ranks->is_object()) {
    const auto integer = [&](const char* key) {
      const auto found = ranks->find(key);
      return found != ranks->end() && found->is_number_integer() ? found->get<int64_t>() : 0;
    };
    step.ranks = {integer("count"),
                  integer("slowest"),
                  integer("fastest"),
                  number(*ranks, "slowest_seconds"),
                  number(*ranks, "fastest_seconds"),
                  number(*ranks, "waiting_seconds")};
  }
  return step;
}

}  // namespace

std::string to_line(const TrainStep& step) {
  Json line{{"step", step.step},
            {"loss", step.loss},
            {"lr", step.lr},
            {"gradient_norm", step.gradient_norm},
            {"tokens_per_second", step.tokens_per_second},
            {"mfu", step.mfu}};
  if (step.test_loss) line["test_loss"] = *step.test_loss;
  if (!step.value_rms.empty()) line["value_rms"] = step.value_rms;
  if (!step.sample.empty()) line["sample"] = step.sample;
  if (step.ranks)
    line["ranks"] = {{"count", step.ranks->ranks},
                     {"slowest", step.ranks->slowest},
                     {"slowest_seconds", step.ranks->slowest_seconds},
                     {"fastest", step.ranks->fastest},
                     {"fastest_seconds", step.ranks->fastest_seconds},
                     {"waiting_seconds", step.ranks->waiting_seconds}};
  return dumped(line);
}

std::string diverged_line(int64_t step, const std::string& why) {
  return dumped({{"step", step}, {"diverged", why}});
}

RunLog read_log(const std::filesystem::path& run) {
  RunLog log;
  if (!std::filesystem::exists(run / kLogFile)) return log;
  std::istringstream text(read_text(run / kLogFile));
  for (std::string line; std::getline(text, line);) {
    Parsed parsed;
    try {
      parsed = parse_json(line, kLogFile);
    } catch (const Error&) {  // an incomplete line of a killed process
      continue;
    }
    if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) continue;
    if (const auto why = parsed.find("diverged"); why != parsed.end() && why->is_string())
      log.diverged = *why;
    else
      log.steps.push_back(step_of(parsed));
  }
  return log;
}

}  // namespace furious
