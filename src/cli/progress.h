// Progress of long commands: one line redrawn on a terminal, plain lines from time to time elsewhere; and the
// handling of SIGINT and SIGTERM.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace furious::cli {

class ProgressLine {
 public:
  explicit ProgressLine(std::string name);  // of the command, the prefix of plain lines
  // Of work that may take days and prints permanent lines: where those do not go to a terminal, plain lines are among
  // them, once in this time.
  static constexpr std::chrono::seconds kMinute{60};
  ProgressLine(std::string name, std::chrono::seconds every);
  ~ProgressLine() { clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  bool due() const;                     // whether it is time to redraw
  void show(const std::string& line);   // draws it
  void print(const std::string& text);  // a permanent line above the progress line
  void clear();
  double seconds() const;  // since the beginning

 private:
  using Clock = std::chrono::steady_clock;
  bool due_plain() const;
  std::string name_;
  bool terminal_;
  std::FILE* plain_;  // where plain lines go; null: nowhere
  std::chrono::seconds every_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_at_ = start_, written_at_ = start_;
};

std::string clock_text(double seconds);                     // "1:02:03", "2:03"
std::string counted(int64_t count, std::string_view what);  // "1 step", "2 steps"

struct TerminalSize {
  int64_t columns = 80, rows = 24;
  bool operator==(const TerminalSize&) const = default;
};
TerminalSize terminal_size(int descriptor);  // the default where it is no terminal
bool draws_on_terminal();                    // stdout is one that can place the cursor

bool shows_colours();  // stdout is a terminal, and NO_COLOR is not set

// The first SIGINT or SIGTERM requests a clean stop; a second one ends the process at once.
void stop_on_signals();
bool stop_requested();
// The signal is answered at once with the name of this step, after which a checkpoint will be saved.
void announce_stops(int64_t step);

}  // namespace furious::cli
