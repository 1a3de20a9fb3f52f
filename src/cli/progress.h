// Progress of long commands: one line redrawn on a terminal, plain lines every few seconds elsewhere; and the
// handling of SIGINT and SIGTERM.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace furious::cli {

class ProgressLine {
 public:
  explicit ProgressLine(std::string name);  // of the command, the prefix of plain lines
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
  std::string name_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point shown_ = start_;
};

std::string clock_text(double seconds);  // "1:02:03", "2:03"

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
