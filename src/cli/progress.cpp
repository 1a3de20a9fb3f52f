#include "cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace furious::cli {
namespace {

volatile std::sig_atomic_t requested = 0;
std::atomic<int64_t> step_in_progress = 0;                 // 0: signals are not announced
static_assert(std::atomic<int64_t>::is_always_lock_free);  // a signal handler reads it

// In a signal handler: without allocation and formatting libraries.
void write_stop_message() {
  constexpr std::string_view kBegin = "\nfinishing step ", kEnd = ", then saving; Ctrl-C again ends without saving\n";
  std::array<char, 128> text;
  char* end = std::ranges::copy(kBegin, text.begin()).out;
  end = std::to_chars(end, text.end(), step_in_progress.load()).ptr;
  end = std::ranges::copy(kEnd, end).out;
  if (::write(STDERR_FILENO, text.data(), static_cast<size_t>(end - text.data())) < 0) return;  // nobody reads it
}

}  // namespace

ProgressLine::ProgressLine(std::string name)
    : name_(std::move(name)),
      terminal_(::isatty(STDERR_FILENO) != 0),
      plain_(terminal_ ? nullptr : stderr),
      every_(10) {}

ProgressLine::ProgressLine(std::string name, std::chrono::seconds every) : ProgressLine(std::move(name)) {
  if (::isatty(STDOUT_FILENO) != 0) return;
  plain_ = stdout;
  every_ = every;
}

bool ProgressLine::due() const {
  return (terminal_ && Clock::now() - drawn_at_ >= std::chrono::milliseconds(200)) || due_plain();
}

bool ProgressLine::due_plain() const {
  return plain_ != nullptr && Clock::now() - written_at_ >= every_;
}

// Writing does not throw: work continues when the reading end is closed.
void ProgressLine::show(const std::string& line) {
  if (due_plain()) {
    written_at_ = Clock::now();
    std::fputs((plain_ == stderr ? name_ + ": " + line + "\n" : line + "\n").c_str(), plain_);
    std::fflush(plain_);
  }
  if (!terminal_) return;
  drawn_at_ = Clock::now();
  drawn_ = true;
  std::fputs(("\r\033[K" + line.substr(0, static_cast<size_t>(terminal_size(STDERR_FILENO).columns - 1))).c_str(),
             stderr);
  std::fflush(stderr);
}

void ProgressLine::print(const std::string& text) {
  clear();
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void ProgressLine::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

double ProgressLine::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

std::string clock_text(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string counted(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

TerminalSize terminal_size(int descriptor) {
  struct winsize size = {};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return {};
  return {size.ws_col, size.ws_row};
}

bool draws_on_terminal() {
  const char* type = std::getenv("TERM");
  return ::isatty(STDOUT_FILENO) != 0 && type != nullptr && std::string_view(type) != "dumb";
}

bool shows_colours() {
  return ::isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
}

void announce_stops(int64_t step) {
  step_in_progress = step;
}

void stop_on_signals() {
  struct sigaction action = {};
  action.sa_handler = [](int) {
    const int error = errno;
    if (step_in_progress.load() > 0 && requested == 0) write_stop_message();
    errno = error;
    requested = 1;
  };
  action.sa_flags = SA_RESETHAND;
  for (const int signal : {SIGINT, SIGTERM}) ::sigaction(signal, &action, nullptr);
}

bool stop_requested() {
  return requested != 0;
}

}  // namespace furious::cli
