#include "train/log_writer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "train/event_file.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

void append(const fs::path& path, const std::string& bytes, std::ios::openmode mode = std::ios::app) {
  std::ofstream file(path, std::ios::binary | mode);
  file << bytes;
  file.flush();
  require(file.good(), "cannot write {}; is the disk full?", path.string());
}

std::string csv_header() {
  std::string line = "step";
  for (const LogNumber& each : log_numbers()) line += "," + each.name;
  return line + "\n";
}

// What is not known or not finite is an empty cell.
std::string csv_line(const TrainStep& step) {
  std::string line = fmt::format("{}", step.step);
  for (const LogNumber& each : log_numbers()) {
    const nlohmann::ordered_json value = each.get(step);
    line += "," + (value.is_number() && std::isfinite(value.get<double>()) ? value.dump() : "");
  }
  return line + "\n";
}

std::string events_of(const TrainStep& step) {
  EventValues values;
  for (const LogNumber& each : log_numbers())
    if (const nlohmann::ordered_json value = each.get(step); !each.tag.empty() && value.is_number())
      values.add_number(each.tag, value.get<double>());
  for (size_t layer = 0; layer < step.value_rms.size(); ++layer)
    values.add_number(fmt::format("value_rms/layer_{:02}", layer), step.value_rms[layer]);
  if (!step.sample.empty()) values.add_text("sample", step.sample);
  return event_record(step.time, step.step, values);
}

int64_t microseconds_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

// Programs that follow a folder read its files in the order of their names.
std::string event_file_name(int64_t microseconds) {
  return fmt::format("{}{:010}.{:06}{}", kEventFilePrefix, microseconds / 1'000'000, microseconds % 1'000'000,
                     kEventFileSuffix);
}

// Their points are in the new file, too. A program that follows the folder goes on to the new file from the one that it
// was reading only if that still exists; so it becomes empty, and is removed the next time.
void empty_old_events(const fs::path& folder, const fs::path& events) {
  std::vector<fs::path> old;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (const std::string name = entry.path().filename().string();
        entry.path() != events && name.starts_with(kEventFilePrefix) && name.ends_with(kEventFileSuffix))
      old.push_back(entry.path());
  for (const fs::path& file : old) {
    if (fs::is_empty(file))
      fs::remove(file);
    else
      fs::resize_file(file, 0);
  }
}

}  // namespace

std::vector<LogFormat> log_formats_from_names(const std::string& names) {
  static const std::vector<std::string> known = {"csv", "tensorboard"};
  std::vector<LogFormat> formats;
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    const std::string name = names.substr(begin, end - begin);
    if (name == known[0])
      formats.push_back(LogFormat::csv);
    else if (name == known[1])
      formats.push_back(LogFormat::tensorboard);
    else
      unknown_name("format of logs", name, known);
    begin = end + 1;
  }
  return formats;
}

LogWriter::LogWriter(const fs::path& folder, const std::vector<LogFormat>& formats, const std::vector<TrainStep>& kept)
    : log_(folder / kLogFile) {
  std::string lines;
  for (const TrainStep& step : kept) lines += to_line(step) + "\n";
  write_text(log_, lines);
  for (const LogFormat format : formats) {
    if (format == LogFormat::csv) {
      csv_ = folder / "log.csv";
      lines = csv_header();
      for (const TrainStep& step : kept) lines += csv_line(step);
      write_text(csv_, lines);
      continue;
    }
    // Not through a temporary, whose name a running TensorBoard would take for that of another event file.
    const int64_t now = microseconds_now();
    events_ = folder / event_file_name(now);
    lines = event_file_start(kept.empty() ? static_cast<double>(now) / 1e6 : kept.front().time);
    for (const TrainStep& step : kept) lines += events_of(step);
    append(events_, lines, std::ios::trunc);
    empty_old_events(folder, events_);
  }
}

void LogWriter::add(const TrainStep& step) {
  append(log_, to_line(step) + "\n");
  if (!csv_.empty()) append(csv_, csv_line(step));
  if (!events_.empty()) append(events_, events_of(step));
}

void LogWriter::add_divergence(int64_t step, const std::string& why) {
  append(log_, diverged_line(step, why) + "\n");
}

}  // namespace furious
