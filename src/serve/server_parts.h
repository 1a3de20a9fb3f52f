// The inside of the server: routes (server.cpp), completions (generation.cpp) and named states (states.cpp).
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>

#include "serve/openai.h"
#include "serve/server.h"
#include "serve/workers.h"

namespace furious::serve {

using Exchange = std::shared_ptr<HttpExchange>;

// What finished responses have read and written, so that a state can be made of one later. The oldest are forgotten.
class FinishedResponses {
 public:
  void expect(const std::string& id);  // add() or forget() follows
  void add(const std::string& id, Prompt prompt);
  void forget(const std::string& id);
  Prompt find(const std::string& id);  // an ApiError where it is not known; waits for one that is expected

 private:
  static constexpr size_t kMostIds = 4 << 20, kMostResponses = 4096;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::string> expected_;
  std::map<std::string, Prompt> prompts_;
  std::list<std::string> order_;
  size_t ids_ = 0;
};

class Server::Parts {
 public:
  Parts(const Model& model, ServerOptions options);
  ~Parts();

  void drain();
  uint16_t port() const { return http_->port(); }
  const SchedulerCounters& counters() const { return scheduler_->counters(); }

 private:
  class Answer;

  HttpOptions http_options();
  bool refuse(const HttpRequest& head, HttpAnswer& answer) const;
  void handle(const Exchange& exchange);
  void on_worker(const Exchange& exchange, void (Parts::*work)(const Exchange&));
  void respond(const Exchange& exchange, HttpAnswer answer);
  void respond_error(const Exchange& exchange, const ApiError& error);
  void log(const HttpRequest& request, int status, const Json& more = Json::object()) const;
  void wait_for_thread();

  std::string models_json() const;
  Json model_json() const;
  std::string metrics_text() const;

  void generate(const Exchange& exchange);
  void submit(const std::shared_ptr<Answer>& answer);
  Job job_of(const GenerationRequest& request) const;
  std::vector<Prompt> prompts_of(const GenerationRequest& request) const;
  Prompt prompt_of(const PromptText& text, Prompt before) const;
  Prompt chat_prompt(const std::vector<ChatMessage>& messages, const std::string& state) const;
  Prompt prompt_of_state(const std::string& name) const;
  Prompt whole_of(const Answer& answer, size_t choice) const;
  void settle(const std::shared_ptr<Answer>& answer);

  void create_state(const Exchange& exchange);
  void list_states(const Exchange& exchange);
  void one_state(const Exchange& exchange);
  void state_data(const Exchange& exchange);
  std::shared_ptr<const void> reserve_download(uint64_t bytes);

  const Model model_;
  ServerOptions options_;
  const int64_t created_;
  Workers workers_{2};
  Workers settling_{1};  // what the others may wait for
  StateStore store_;
  FinishedResponses responses_;
  // Shared with answers on their way, which end after the server.
  const std::shared_ptr<std::atomic<uint64_t>> downloads_ = std::make_shared<std::atomic<uint64_t>>(0);
  std::atomic<int64_t> requests_{0}, errors_{0};
  std::atomic<bool> stopped_{false};
  mutable std::mutex random_mutex_;
  mutable std::mt19937_64 random_{std::random_device()()};
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<Scheduler> scheduler_;
};

// In a catch block: the current exception as an answer.
ApiError api_error();

}  // namespace furious::serve
