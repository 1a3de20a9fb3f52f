// Small models behind a server, for its tests.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "decode/model_parts.h"
#include "model/little.h"
#include "serve/client.h"
#include "serve/server.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious::testing {

// Bytes as tokens. Weights are large enough that what it writes depends on what it has read.
inline Model served_model(const std::string& arch, int64_t layers = 2) {
  Random random(1);
  ModelConfig config = little(preset(arch));
  config.vocabulary = 300;
  config.layers = layers;
  const auto fill = [&](const std::string&, const Tensor& out) {
    copy_between(out, random.normal_tensor(out.shape(), 0.3));
  };
  return Model(std::make_shared<const Model::Parts>(LanguageModel(config, fill, {}), load_tokenizer("byte"), false));
}

inline serve::ServerOptions test_options(int64_t slots = 4) {
  serve::ServerOptions options;
  options.port = 0;
  options.model_name = "little";
  options.scheduler.slots = slots;
  options.scheduler.chunk = 16;
  options.scheduler.least_tokens = 1;
  options.store.warn = [](const std::string&) {};
  options.drain_seconds = 20;
  return options;
}

class Served {
 public:
  explicit Served(const Model& model, const serve::ServerOptions& options = test_options())
      : server_(std::make_unique<serve::Server>(model, options)) {}

  serve::Server& server() { return *server_; }
  uint16_t port() const { return server_->port(); }
  Response post(const std::string& path, const nlohmann::json& body) const { return Client(port()).post(path, body); }
  Response get(const std::string& path) const { return Client(port()).request("GET", path); }
  // Until so many jobs have ended, those in the background (an answer that is read once more) included.
  void wait_for_jobs(int64_t count) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (counters().finished.load() < count) {
      require(std::chrono::steady_clock::now() < end, "{} of {} jobs ended", counters().finished.load(), count);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  const serve::SchedulerCounters& counters() const { return server_->counters(); }

 private:
  std::unique_ptr<serve::Server> server_;
};

}  // namespace furious::testing
