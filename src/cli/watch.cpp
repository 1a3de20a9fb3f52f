// `furious watch`: runs in training, drawn again every few seconds.
#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "cli/runs.h"
#include "data/utf8.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRecentSteps = 50;   // of which the pace is measured
constexpr int64_t kChartRows = 20;     // without a terminal
constexpr double kPatience = 30;       // seconds without a step that need no mention
constexpr int64_t kLeastChart = 7;     // rows below which there is none
constexpr int64_t kLeastColumns = 24;  // likewise

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Seconds for one step, with its share of test losses and checkpoints; 0: not known.
double pace(const std::vector<TrainStep>& steps) {
  if (steps.size() < 2) return 0;
  const TrainStep& last = steps.back();
  const TrainStep& first = steps[steps.size() > kRecentSteps ? steps.size() - kRecentSteps : 0];
  if (first.seconds <= 0 || last.step <= first.step) return 0;
  return std::max(0.0, last.seconds - first.seconds) / static_cast<double>(last.step - first.step);
}

class WatchCommand {
 public:
  explicit WatchCommand(CLI::App& command) : curves_(command) {
    command.add_option("runs", places_, kRunsHelp)->required();
    command.add_option("--every", every_, "Seconds between refreshes")
        ->check(CLI::Range(0.1, 86400.0))
        ->capture_default_str();
    command.add_flag("--once", once_, "Print the current state and exit, as without a terminal");
    command.add_flag("--ascii", ascii_, "Draw with letters, for terminals without braille characters");
  }

  void run();

 private:
  struct Watched {
    explicit Watched(const fs::path& folder) : follower(folder) {}
    std::string name;
    LogFollower follower;
    int64_t steps = 0;  // that it is to do; 0: not known
    bool ended() const {
      const RunLog& log = follower.log();
      return !log.diverged.empty() || (steps > 0 && !log.steps.empty() && log.steps.back().step >= steps);
    }
  };

  void update();
  bool all_ended() const;
  std::string status(const Watched& run, int64_t columns) const;
  std::string frame(const TerminalSize& size, bool fills) const;
  void follow();

  CurveFlags curves_;
  std::vector<std::string> places_;
  double every_ = 2;
  bool once_ = false, ascii_ = false;
  std::map<fs::path, Watched> known_;
  std::vector<Watched*> runs_;        // in the order of the command line
  std::vector<std::string> waiting_;  // places without a run yet
  bool are_runs_ = false;             // each place is a run, not a folder in which more may begin
};

// Runs appear while `furious ablate` works.
void WatchCommand::update() {
  std::vector<fs::path> folders;
  waiting_.clear();
  are_runs_ = true;
  for (const std::string& place : places_) {
    const std::vector<fs::path> found = runs_below(place);
    if (found != std::vector{run_folder(place)}) are_runs_ = false;
    if (found.empty()) waiting_.push_back(place);
    for (const fs::path& run : found)
      if (std::ranges::find(folders, run) == folders.end()) folders.push_back(run);
  }
  const std::vector<std::string> names = distinguishing_names(folders);
  runs_.clear();
  for (size_t i = 0; i < folders.size(); ++i) {
    Watched& run = known_.try_emplace(folders[i], folders[i]).first->second;
    run.name = names[i];
    run.follower.update();
    if (const std::optional<TrainOptions> options = options_of(folders[i])) run.steps = options->steps;
    runs_.push_back(&run);
  }
}

// Between two runs of `furious ablate` all that exist have ended.
bool WatchCommand::all_ended() const {
  if (!waiting_.empty() || !std::ranges::all_of(runs_, &Watched::ended)) return false;
  if (are_runs_) return true;
  double newest = 0;
  for (const Watched* run : runs_)
    if (const auto& steps = run->follower.log().steps; !steps.empty()) newest = std::max(newest, steps.back().time);
  return now() - newest > kPatience;
}

// What fits, the most important first.
std::string fitting(const std::vector<std::string>& parts, int64_t columns) {
  std::string line;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    const std::string next = line.empty() ? part : line + "  " + part;
    if (static_cast<int64_t>(utf8_length(next)) <= columns)
      line = next;
    else if (line.empty())
      line = part.substr(0, static_cast<size_t>(columns));
  }
  return line;
}

std::string WatchCommand::status(const Watched& run, int64_t columns) const {
  const RunLog& log = run.follower.log();
  const std::string name = printable(run.name);
  if (log.steps.empty())
    return fitting({name, log.diverged.empty() ? "no step yet" : "diverged in the first step"}, columns);
  const TrainStep& last = log.steps.back();
  const bool done = run.steps > 0 && last.step >= run.steps;
  const double step_seconds = pace(log.steps);
  const double silent = last.time > 0 ? now() - last.time : 0;
  std::string progress = fmt::format("step {}", last.step), left, test;
  if (run.steps > 0)
    progress += fmt::format("/{} ({:.0f} %)", run.steps,
                            std::floor(100 * static_cast<double>(last.step) / static_cast<double>(run.steps)));
  if (!log.diverged.empty())
    left = fmt::format("diverged at step {}", last.step + 1);
  else if (done)
    left = last.seconds > 0 ? "done in " + clock_text(last.seconds) : "done";
  else if (silent > kPatience + 10 * step_seconds)
    left = fmt::format("no step for {}; stopped?", clock_text(silent));
  else if (step_seconds > 0 && run.steps > 0)
    left = clock_text(step_seconds * static_cast<double>(run.steps - last.step)) + " left";
  double best = std::nan("");
  for (const TrainStep& step : log.steps)
    if (step.test_loss) best = std::fmin(best, *step.test_loss);
  const auto tested = std::ranges::find_if(log.steps.rbegin(), log.steps.rend(),
                                           [](const TrainStep& step) { return step.test_loss.has_value(); });
  if (tested != log.steps.rend()) {
    test = fmt::format("test loss {:.4f}", *tested->test_loss);
    if (best < *tested->test_loss) test += fmt::format(" (best {:.4f})", best);
  }
  return fitting({name, progress, fmt::format("loss {:.4f}", last.loss), left, test,
                  fmt::format("{:.0f} tokens/s", last.tokens_per_second), fmt::format("MFU {:.0f} %", 100 * last.mfu)},
                 columns);
}

// Lines of at most `columns` characters; at most `rows` of them if it fills a terminal.
std::string WatchCommand::frame(const TerminalSize& size, bool fills) const {
  const bool colours = shows_colours(), lettered = runs_.size() > 1;
  int64_t lines = 0;
  std::string text;
  const auto most = fills ? std::max<int64_t>(1, size.rows > 2 * kLeastChart ? size.rows / 2 : size.rows) : INT64_MAX;
  const auto all = static_cast<int64_t>(runs_.size() + waiting_.size());
  const auto add = [&](const std::string& line) {
    ++lines;
    if (all > most && lines == most)
      text += fitting({fmt::format("and {} more", all - most + 1)}, size.columns) + "\n";
    else if (lines <= most)
      text += line + "\n";
  };
  for (size_t i = 0; i < runs_.size(); ++i) {
    const int colour = static_cast<int>(i);
    if (!lettered) {
      add(status(*runs_[i], size.columns));
      continue;
    }
    const std::string letter(1, colour_letter(colour));
    add((colours ? in_colour(letter, colour) : letter) + " " +
        status(*runs_[i], std::max<int64_t>(1, size.columns - 2)));
  }
  for (const std::string& place : waiting_) add(fitting({printable(place), "not started"}, size.columns));
  lines = std::min(lines, most);

  const int64_t rows = fills ? size.rows - lines - 1 : kChartRows;
  std::vector<CurveFlags::Run> drawn;
  for (const Watched* run : runs_) drawn.push_back({run->name, run->follower.log()});
  if (rows < kLeastChart || size.columns < kLeastColumns ||
      std::ranges::none_of(drawn, [&](const CurveFlags::Run& run) { return curves_.has_points(run.log); }))
    return text;
  return text + "\n" + to_text(curves_.chart(drawn), {size.columns, rows, colours, ascii_});
}

// In the terminal's second screen, so that what was there before comes back.
class SecondScreen {
 public:
  SecondScreen() { write("\033[?1049h\033[?25l"); }
  ~SecondScreen() { write("\033[?25h\033[?1049l"); }
  SecondScreen(const SecondScreen&) = delete;
  SecondScreen& operator=(const SecondScreen&) = delete;

  void show(const std::string& frame) {
    std::string text = "\033[H";
    for (const char c : frame.substr(0, frame.find_last_not_of('\n') + 1))
      text += c == '\n' ? "\033[K\r\n" : std::string(1, c);
    write(text + "\033[K\033[J");
  }

 private:
  // Not through stdout, to which a signal during a write is an error.
  static void write(std::string_view text) {
    while (!text.empty()) {
      const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
      if (written < 0 && errno != EINTR) return;
      text.remove_prefix(static_cast<size_t>(std::max<ssize_t>(0, written)));
    }
  }
};

void WatchCommand::follow() {
  using Clock = std::chrono::steady_clock;
  stop_on_signals();
  SecondScreen screen;
  while (!stop_requested()) {
    update();
    if (all_ended()) return;
    TerminalSize drawn = terminal_size(STDOUT_FILENO);
    screen.show(frame(drawn, true));
    const auto until = Clock::now() + std::chrono::duration<double>(every_);
    while (!stop_requested() && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (const TerminalSize size = terminal_size(STDOUT_FILENO); size != drawn) {
        drawn = size;
        screen.show(frame(drawn, true));
      }
    }
  }
}

void WatchCommand::run() {
  if (!once_ && draws_on_terminal()) {
    follow();
  } else {
    for (const std::string& place : places_)
      require(fs::exists(place), "watch: {} does not exist; give the folder of a run", place);
    update();
  }
  fmt::print("{}", frame(terminal_size(STDOUT_FILENO), false));
}

}  // namespace

void add_watch(CLI::App& app) {
  CLI::App* command = app.add_subcommand("watch", "Show runs in the terminal while they train");
  auto watch = std::make_shared<WatchCommand>(*command);
  command->footer(
      "Refreshes until the runs are done; Ctrl-C ends it and leaves the runs alone. Without a terminal it prints "
      "once.\n"
      "Example: furious watch run");
  command->callback([watch] { watch->run(); });
}

}  // namespace furious::cli
