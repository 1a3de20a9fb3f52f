// A signal handler of the program that is called constantly.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace furious::testing {

// During its lifetime, a handler that uses kilobytes of stack runs on this thread several times per millisecond.
class ManySignals {
 public:
  ManySignals() : thread_(::pthread_self()) {
    struct sigaction action = {};
    action.sa_handler = [](int) {
      volatile char frame[4096];
      for (volatile char& byte : frame) byte = 0x55;
      handled_.fetch_add(1);
    };
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGUSR1, &action, nullptr);
    sender_ = std::thread([this] {
      while (!stop_) {
        ::pthread_kill(thread_, SIGUSR1);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  ~ManySignals() {
    stop_ = true;
    sender_.join();
  }
  ManySignals(const ManySignals&) = delete;
  ManySignals& operator=(const ManySignals&) = delete;

  static int64_t handled() { return handled_; }

 private:
  static inline std::atomic<int64_t> handled_ = 0;
  pthread_t thread_;
  std::atomic<bool> stop_ = false;
  std::thread sender_;
};

}  // namespace furious::testing
