// `furious serve`: a model behind OpenAI's API, with states that can be named, copied and kept (docs/serving.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "furious/model.h"
#include "serve/chat_template.h"
#include "serve/http.h"
#include "serve/scheduler.h"
#include "serve/state_store.h"

namespace furious::serve {

struct ServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8080;  // 0: any free one
  std::string model_name = "model";
  std::string api_key = {};  // empty: none is needed
  ChatTemplate chat = ChatTemplate::named("plain");
  HttpLimits limits = {};
  SchedulerOptions scheduler = {};
  StateStoreOptions store = {};
  uint64_t download_bytes = 256 << 20;      // of states that are sent at a time; one that is alone may be larger
  int64_t most_tokens = 4096;               // of an answer
  int64_t most_context = int64_t{1} << 20;  // of prompt and answer
  int request_seconds = 600;                // for an answer, waiting included
  int drain_seconds = 30;                   // for running answers at the end
  bool json_log = false;
  std::function<void(const std::string& line)> log = {};  // a line for each request; empty: none
};

class Server {
 public:
  Server(const Model& model, ServerOptions options);  // listens and serves
  ~Server();                                          // ends what runs
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  uint16_t port() const;
  // Accepts no more requests, lets running answers end within drain_seconds, and writes states to their files.
  void drain();
  const SchedulerCounters& counters() const;

 private:
  class Parts;
  std::unique_ptr<Parts> parts_;
};

// Bytes that a sequence of so many tokens takes at most, and those of a KV cache of the same layers and heads in bf16.
int64_t slot_bytes(const Model& model, int64_t tokens);
int64_t kv_bytes_per_token(const Model& model);

}  // namespace furious::serve
