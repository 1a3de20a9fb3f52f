// What long work shows: one line that is drawn again and again on a terminal, plain lines now and then elsewhere; and
// how a signal ends it.
#pragma once

#include <chrono>
#include <string>

namespace furious::cli {

class ProgressLine {
 public:
  explicit ProgressLine(std::string name);  // of the command, in front of plain lines
  ~ProgressLine() { clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  bool due() const;                     // whether it is time to show something new
  void show(const std::string& line);   // draws it
  void print(const std::string& text);  // a line that stays, above the progress line
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

bool shows_colours();  // what is printed goes to a terminal, and nobody set NO_COLOR

// The first SIGINT or SIGTERM asks for a clean end; a second one ends at once.
void stop_on_signals();
bool stop_requested();

}  // namespace furious::cli
