// An HTTP/1.1 server: connections, limits and streamed answers. It knows nothing of models.
//
// Connections are served by one thread, which never waits: handlers run on it and hand long work to other threads.
// Whatever a client sends or fails to send, others are served: headers, bodies, numbers of connections, unsent output
// and waiting times have limits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace furious::serve {

inline constexpr uint64_t kSmallBody = 64 << 10;

struct HttpLimits {
  uint64_t header_bytes = 16 << 10;
  uint64_t body_bytes = 16 << 20;
  // Of all bodies that are received or wait for a handler to take them; small ones (kSmallBody) come in any case, and
  // one that is alone.
  uint64_t all_bodies_bytes = 256 << 20;
  uint64_t unsent_bytes = 4 << 20;  // of a stream that its client does not read; then it is closed
  int64_t connections = 16384;
  int request_seconds = 30;  // for the head of a request to arrive, from its first byte, and for each part of its body
  uint64_t least_rate = 4 << 10;  // that comes at so many bytes per second: a long body may take long, but goes on
  int idle_seconds = 75;          // between requests
  int send_seconds = 60;          // without any progress
};

struct HttpRequest {
  std::string method;  // "GET"
  std::string path;    // of the target, without the query, not decoded
  std::string authorization, content_type;
  std::string body;
};

struct HttpAnswer {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::shared_ptr<const void> held = {};  // let go when all was sent, or the client has gone away
};

// One request and its answer, which is either respond() or start_stream(), write()…, finish(). All functions may be
// called from any thread; after the client has gone away they do nothing.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual const HttpRequest& request() const = 0;
  virtual std::string take_body() = 0;  // of the request, which then has none: long ones should not wait for answers
  virtual void respond(HttpAnswer answer) = 0;
  virtual void start_stream(std::string content_type) = 0;
  virtual void write(std::string bytes) = 0;
  virtual void finish() = 0;
  // Called once, on the server's thread, when the client goes away before the answer is complete.
  virtual void on_gone(std::function<void()> gone) = 0;
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8080;  // 0: any free one
  HttpLimits limits = {};
  // Looks at a request before its body: the largest body that it may have, or an answer that refuses it.
  std::function<uint64_t(const HttpRequest& head)> body_limit = {};  // empty: limits.body_bytes
  std::function<bool(const HttpRequest& head, HttpAnswer& refusal)> refuse = {};
  std::function<void(std::shared_ptr<HttpExchange>)> handle;
  // The bodies of answers to what is no valid request (400, 408, 413, 431) or not served now (429, 503).
  std::function<std::string(int status, std::string_view message)> error_body;
};

class HttpServer {
 public:
  explicit HttpServer(HttpOptions options);  // listens; an Error where it cannot
  ~HttpServer();                             // closes all connections
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  void start();                           // the thread
  void post(std::function<void()> task);  // runs it there, in order
  void stop_listening();                  // connections go on, each until its answer is complete
  int64_t connections() const;            // open now

 private:
  class Listener;
  std::unique_ptr<Listener> listener_;
};

}  // namespace furious::serve
