// A few threads for work that would delay the server's own thread: parsing, tokenizing, files.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace furious::serve {

class Workers {
 public:
  explicit Workers(int threads);
  ~Workers();  // runs what was posted
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void post(std::function<void()> task);  // tasks start in order; they must not throw
  void wait_until_idle();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::function<void()>> tasks_;
  int running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace furious::serve
