#include "cli/train_jobs.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "cli/progress.h"
#include "tensor/device.h"
#include "train/options.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;

// One process of `furious train`, in a process group of its own: a Ctrl-C of the terminal reaches it once, from here.
class TrainProcess {
 public:
  TrainProcess(const AblationJob& job, int64_t threads) : job_(&job) {
    TrainOptions options = job.options;
    if (options.threads == 0) options.threads = threads;
    fs::create_directories(fs::path(options.out).parent_path());
    write_text(config(), to_toml(options));
    const std::string program = fs::read_symlink("/proc/self/exe").string(), settings = config(), text = output();
    std::vector<const char*> words{program.c_str(),     "train",    "--config", settings.c_str(), "--out",
                                   options.out.c_str(), "--resume", nullptr};
    const pid_t parent = ::getpid();
    process_ = ::fork();
    require(process_ >= 0, "ablate: cannot start a process: {}", std::strerror(errno));
    if (process_ > 0) return;
    // Only calls that are safe after fork() in a process with threads.
    for (const int signal : {SIGINT, SIGTERM}) ::signal(signal, SIG_DFL);  // or one before exec is lost
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    const int null = ::open("/dev/null", O_RDONLY);
    const int out = ::open(text.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (null >= 0) ::dup2(null, 0);
    if (out >= 0) {
      ::dup2(out, 1);
      ::dup2(out, 2);
    }
    ::execv(program.c_str(), const_cast<char**>(words.data()));
    ::_exit(127);
  }

  const AblationJob& job() const { return *job_; }
  std::string name() const { return fmt::format("{} seed {}", job_->row, job_->options.seed); }
  void stop() const { ::kill(process_, SIGINT); }

  // Whether it has ended.
  bool ended() {
    int status = 0;
    const pid_t found = ::waitpid(process_, &status, WNOHANG);
    if (found == 0 || (found < 0 && errno == EINTR)) return false;
    std::error_code ignored;
    fs::remove(config(), ignored);
    const bool good = found == process_ && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (good) fs::remove(output(), ignored);
    if (!good && !stop_requested())
      fmt::print(stderr, "\n{}: ended {}; see {}\n", name(),
                 WIFSIGNALED(status) ? fmt::format("by signal {}", WTERMSIG(status))
                                     : fmt::format("with exit code {}", WEXITSTATUS(status)),
                 output());
    return true;
  }

 private:
  std::string config() const { return job_->options.out + ".toml"; }
  std::string output() const { return job_->options.out + ".txt"; }

  const AblationJob* job_;
  pid_t process_ = -1;
};

}  // namespace

void train_in_processes(const std::vector<AblationJob>& jobs, int64_t most, ProgressLine& line) {
  if (jobs.empty()) return;
  const Device device = device_from_name(resolved(jobs.front().options).device);
  const auto available = static_cast<int64_t>(0.9 * static_cast<double>(memory::available(device)));
  const int64_t at_once = std::min(most, static_cast<int64_t>(jobs.size()));
  const int64_t threads = std::max<int64_t>(1, available_cores() / at_once);
  std::vector<TrainProcess> running;
  int64_t bytes = 0;  // of those
  size_t next = 0;
  bool told = false;
  while ((next < jobs.size() && !told) || !running.empty()) {
    if (stop_requested()) {
      if (!told) fmt::print(stderr, "\nstopping; {} runs finish their step and save\n", running.size());
      if (!told)
        for (const TrainProcess& process : running) process.stop();
      told = true;
    }
    while (!told && next < jobs.size() && static_cast<int64_t>(running.size()) < at_once &&
           (running.empty() || bytes + jobs[next].bytes <= available)) {
      running.emplace_back(jobs[next], threads);
      bytes += jobs[next++].bytes;
    }
    std::erase_if(running, [&](TrainProcess& process) {
      if (!process.ended()) return false;
      bytes -= process.job().bytes;
      return true;
    });
    if (line.due() && !running.empty()) {
      std::string names;
      for (const TrainProcess& process : running) names += (names.empty() ? "" : ", ") + process.name();
      line.show(fmt::format("{} of {} runs ended; training {}", next - running.size(), jobs.size(), names));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace furious::cli
