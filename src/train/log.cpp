#include "train/log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/error.h"
#include "base/json.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;
using Parsed = nlohmann::json;

std::string dumped(const Json& line) {
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// JSON has no numbers that are not finite: they are null.
double number_of(const Parsed& value) {
  return value.is_number() ? value.get<double>() : std::nan("");
}

double number(const Parsed& line, const std::string& key) {
  const auto found = line.find(key);
  return found != line.end() ? number_of(*found) : std::nan("");
}

LogNumber always(const std::string& name, double TrainStep::*field) {
  return {name, "train/" + name, [field](const TrainStep& step) { return Json(step.*field); },
          [field](TrainStep& step, double value) { step.*field = value; }};
}

// 0 where it is not known, as in logs of earlier versions.
template <class Number>
LogNumber if_known(const std::string& name, Number TrainStep::*field) {
  return {name, "train/" + name,
          [field](const TrainStep& step) { return step.*field > 0 ? Json(step.*field) : Json(); },
          [field](TrainStep& step, double value) {
            if (value > 0 && value < static_cast<double>(std::numeric_limits<Number>::max()))
              step.*field = static_cast<Number>(value);
          }};
}

std::vector<LogNumber> make_numbers() {
  using S = TrainStep;
  std::vector<LogNumber> numbers = {always("loss", &S::loss),
                                    always("lr", &S::lr),
                                    always("gradient_norm", &S::gradient_norm),
                                    always("tokens_per_second", &S::tokens_per_second),
                                    always("mfu", &S::mfu),
                                    if_known("memory", &S::memory),
                                    if_known("seconds", &S::seconds),
                                    if_known("time", &S::time),
                                    if_known("total_tokens", &S::total_tokens),
                                    if_known("total_flops", &S::total_flops)};
  for (LogNumber& each : numbers)
    if (each.name == "seconds" || each.name == "time") each.tag.clear();  // an event has a time of its own
  numbers.push_back({"test_loss", "test/loss",
                     [](const S& step) { return step.test_loss ? Json(*step.test_loss) : Json(); },
                     [](S& step, double value) {
                       if (!std::isnan(value)) step.test_loss = value;
                     }});
  return numbers;
}

TrainStep step_of(const Parsed& line) {
  TrainStep step;
  step.step = line["step"];
  for (const LogNumber& each : log_numbers()) each.set(step, number(line, each.name));
  if (const auto values = line.find("value_rms"); values != line.end() && values->is_array())
    for (const Parsed& value : *values) step.value_rms.push_back(number_of(value));
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

void add_line(RunLog& log, std::string_view line) {
  Parsed parsed;
  try {
    parsed = parse_json(line, kLogFile);
  } catch (const Error&) {  // an incomplete line of a killed process
    return;
  }
  if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) return;
  if (const auto why = parsed.find("diverged"); why != parsed.end() && why->is_string())
    log.diverged = *why;
  else
    log.steps.push_back(step_of(parsed));
}

// Appends the bytes of a file from an offset on.
void read_rest(int file, uint64_t offset, std::string& bytes) {
  std::vector<char> buffer(1 << 16);
  for (;;) {
    const ssize_t got = ::pread(file, buffer.data(), buffer.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    require(got >= 0, "cannot read {}: {}", kLogFile, std::strerror(errno));
    if (got == 0) return;
    bytes.append(buffer.data(), static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
}

}  // namespace

const std::vector<LogNumber>& log_numbers() {
  static const std::vector<LogNumber> numbers = make_numbers();
  return numbers;
}

std::string to_line(const TrainStep& step) {
  Json line{{"step", step.step}};
  for (const LogNumber& each : log_numbers())
    if (Json value = each.get(step); !value.is_null()) line[each.name] = std::move(value);
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
  LogFollower follower(run);
  follower.update();
  return follower.log();
}

void LogFollower::update() {
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found = {};
  if (file < 0 || ::fstat(file, &found) != 0) found = {};
  if (found.st_ino != file_ || static_cast<uint64_t>(found.st_size) < read_) {
    *this = LogFollower(path_.parent_path());
    file_ = found.st_ino;
  }
  if (file < 0) return;
  const size_t before = rest_.size();
  const auto close_file = std::shared_ptr<void>(nullptr, [file](void*) { ::close(file); });
  read_rest(file, read_, rest_);
  read_ += rest_.size() - before;
  size_t begin = 0;
  for (size_t end = 0; (end = rest_.find('\n', begin)) != std::string::npos; begin = end + 1)
    add_line(log_, std::string_view(rest_).substr(begin, end - begin));
  rest_.erase(0, begin);
}

}  // namespace furious
