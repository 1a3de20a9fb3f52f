#include "serve/http.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <csignal>
#include <optional>
#include <set>
#include <thread>

#include "base/error.h"

namespace furious::serve {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr size_t kReadBytes = 16 << 10;
constexpr int kLingerSeconds = 5;

class Connection;

// What connections share.
struct Shared {
  HttpOptions options;
  asio::io_context io{1};
  std::set<std::shared_ptr<Connection>> connections = {};  // of the thread
  std::atomic<int64_t> count{0};
  std::atomic<uint64_t> held{0};  // bytes of bodies
  bool closing = false;           // connections end after their answer
};

// The bytes of one body, from its first until a handler takes it, in the count of all.
class HeldBytes {
 public:
  explicit HeldBytes(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  ~HeldBytes() { set(0); }
  HeldBytes(HeldBytes&& other) noexcept : shared_(other.shared_), bytes_(std::exchange(other.bytes_, 0)) {}
  HeldBytes& operator=(HeldBytes&&) = delete;

  void set(uint64_t bytes) { shared_->held.fetch_add(bytes - std::exchange(bytes_, bytes)); }
  // Whether there is no room for so many, beside those of others.
  bool exceeds(uint64_t bytes) const {
    const uint64_t others = shared_->held.load() - bytes_;
    return bytes > kSmallBody && others > kSmallBody && others + bytes > shared_->options.limits.all_bodies_bytes;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<Shared> shared_;
  uint64_t bytes_ = 0;
};

// Everything runs on the server's thread.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<Shared> shared, tcp::socket socket);

  void serve();                    // requests, until the client or a limit ends it
  void refuse(HttpAnswer answer);  // the whole connection
  void refuse_body();              // for now
  void close();
  void stop();  // after the answer that is being written

  // Of the exchange with this number; others are over.
  void respond(uint64_t number, HttpAnswer answer);
  void start_stream(uint64_t number, const std::string& content_type);
  void write(uint64_t number, const std::string& bytes);
  void finish(uint64_t number);

 private:
  class Exchange;
  enum class Phase { idle, receiving, answering, lingering, closed };

  void read_more();
  void on_bytes(error_code error, size_t count);
  void parse();
  bool accept_head();
  void handle();
  void send(std::string bytes);
  void send_more();
  void on_sent(error_code error, size_t count);
  void complete();
  void linger();
  void limit_time(int seconds);
  void on_time_over();
  HttpRequest head() const;
  std::string head_of(const HttpAnswer& answer, bool with_length) const;

  std::shared_ptr<Shared> shared_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  Phase phase_ = Phase::idle;
  bool reading_ = false;
  std::array<char, kReadBytes> incoming_;  // of the read that runs
  std::string input_;                      // not parsed yet
  std::optional<http::request_parser<http::string_body>> parser_;
  bool head_accepted_ = false;
  HeldBytes held_;         // of the body that is received
  uint64_t progress_ = 0;  // bytes of it when its time was last set anew

  std::shared_ptr<Exchange> exchange_;  // the request that is answered
  uint64_t number_ = 0;                 // of the last exchange
  bool keep_alive_ = true, is_head_ = false, is_http_1_0_ = false;
  bool streaming_ = false, completed_ = false;
  std::string unsent_, sending_;
  size_t sent_ = 0;                          // of sending_
  std::shared_ptr<const void> answer_held_;  // HttpAnswer::held
};

class Connection::Exchange : public HttpExchange, public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(const std::shared_ptr<Connection>& connection, uint64_t number, HttpRequest request, HeldBytes held)
      : connection_(connection),
        shared_(connection->shared_),
        number_(number),
        request_(std::move(request)),
        held_(std::move(held)) {}

  const HttpRequest& request() const override { return request_; }
  std::string take_body() override {
    held_.set(0);
    return std::exchange(request_.body, {});
  }
  void respond(HttpAnswer answer) override {
    with_connection(
        [answer = std::move(answer), n = number_](Connection& own) mutable { own.respond(n, std::move(answer)); });
  }
  void start_stream(std::string type) override {
    with_connection([type = std::move(type), n = number_](Connection& own) { own.start_stream(n, type); });
  }
  void write(std::string bytes) override {
    with_connection([bytes = std::move(bytes), n = number_](Connection& own) { own.write(n, bytes); });
  }
  void finish() override {
    with_connection([n = number_](Connection& own) { own.finish(n); });
  }
  void on_gone(std::function<void()> gone) override {
    asio::dispatch(shared_->io, [self = shared_from_this(), gone = std::move(gone)]() mutable {
      if (self->is_gone_) return gone();
      if (!self->is_complete_) self->gone_ = std::move(gone);
    });
  }

  // On the server's thread.
  void complete() {
    is_complete_ = true;
    gone_ = {};
  }
  void leave() {
    is_gone_ = true;
    if (const std::function<void()> gone = std::exchange(gone_, {})) gone();
  }

 private:
  template <class Action>
  void with_connection(Action action) {
    asio::dispatch(shared_->io, [connection = connection_, action = std::move(action)]() mutable {
      if (const std::shared_ptr<Connection> own = connection.lock()) action(*own);
    });
  }

  const std::weak_ptr<Connection> connection_;
  const std::shared_ptr<Shared> shared_;
  const uint64_t number_;
  HttpRequest request_;
  HeldBytes held_;
  std::function<void()> gone_;
  bool is_gone_ = false, is_complete_ = false;
};

Connection::Connection(std::shared_ptr<Shared> shared, tcp::socket socket)
    : shared_(std::move(shared)), socket_(std::move(socket)), timer_(shared_->io), held_(shared_) {}

void Connection::serve() {
  phase_ = Phase::idle;
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(shared_->options.limits.header_bytes));
  parser_->body_limit(UINT64_MAX);  // accept_head sets it
  head_accepted_ = false;
  progress_ = 0;
  if (input_.size() > 0) return parse();  // the client did not wait for the answer
  limit_time(shared_->options.limits.idle_seconds);
  read_more();
}

void Connection::read_more() {
  if (reading_ || phase_ == Phase::closed) return;
  reading_ = true;
  socket_.async_read_some(asio::buffer(incoming_), [self = shared_from_this()](error_code error, size_t count) {
    self->on_bytes(error, count);
  });
}

void Connection::on_bytes(error_code error, size_t count) {
  reading_ = false;
  if (error || phase_ == Phase::closed) return close();
  if (phase_ == Phase::lingering) return read_more();  // discarded
  input_.append(incoming_.data(), count);
  if (phase_ != Phase::answering) return parse();
  // A request that did not wait for the answer to this one stays in the buffer.
  if (input_.size() < kReadBytes) read_more();
}

void Connection::parse() {
  if (phase_ == Phase::idle) {
    phase_ = Phase::receiving;
    limit_time(shared_->options.limits.request_seconds);
  }
  const HttpLimits& limits = shared_->options.limits;
  const auto answer_error = [&](int status, std::string_view message) {
    refuse({status, "application/json", shared_->options.error_body(status, message), {}});
  };
  while (input_.size() > 0 && !parser_->is_done()) {
    error_code error;
    try {
      input_.erase(0, parser_->put(asio::buffer(input_), error));
    } catch (const std::bad_alloc&) {  // memory for a body is reserved at its start
      return answer_error(413, "the body is larger than the memory that the server has left");
    }
    held_.set(parser_->get().body().size());
    if (error == http::error::need_more) break;
    if (error == http::error::body_limit) return answer_error(413, "the body is larger than the server allows");
    if (error == http::error::header_limit) return answer_error(431, "the headers are larger than the server allows");
    if (error) return answer_error(400, fmt::format("this is not a valid HTTP request: {}", error.message()));
    if (parser_->is_header_done() && !head_accepted_ && !accept_head()) return;
    if (held_.exceeds(held_.bytes())) return refuse_body();
  }
  if (parser_->is_header_done() && !head_accepted_ && !accept_head()) return;
  if (parser_->is_done()) return handle();
  if (held_.bytes() >= progress_ + static_cast<uint64_t>(limits.request_seconds) * limits.least_rate) {
    progress_ = held_.bytes();
    limit_time(limits.request_seconds);
  }
  read_more();
}

HttpRequest Connection::head() const {
  const auto& message = parser_->get();
  const auto text = [](auto view) { return std::string(view.data(), view.size()); };
  HttpRequest request{text(message.method_string()),
                      text(message.target()),
                      text(message[http::field::authorization]),
                      text(message[http::field::content_type]),
                      {}};
  request.path.resize(std::min(request.path.find('?'), request.path.size()));
  return request;
}

// Looks at a request before its body is read. false: it was refused.
bool Connection::accept_head() {
  head_accepted_ = true;
  const HttpOptions& options = shared_->options;
  const HttpRequest request = head();
  is_head_ = request.method == "HEAD";
  is_http_1_0_ = parser_->get().version() == 10;
  keep_alive_ = parser_->get().keep_alive();
  HttpAnswer refusal;
  if (options.refuse && options.refuse(request, refusal)) {
    refuse(std::move(refusal));
    return false;
  }
  const uint64_t limit = options.body_limit ? options.body_limit(request) : options.limits.body_bytes;
  if (const auto claimed = parser_->content_length(); claimed && *claimed > limit) {
    refuse({413,
            "application/json",
            options.error_body(413, fmt::format("the body has {} bytes, the server allows {}", *claimed, limit)),
            {}});
    return false;
  }
  if (held_.exceeds(parser_->content_length().value_or(0))) {
    refuse_body();
    return false;
  }
  parser_->body_limit(limit);
  parser_->eager(true);
  limit_time(options.limits.request_seconds);
  const auto expect = parser_->get()[http::field::expect];
  if (beast::iequals(expect, "100-continue") && !parser_->is_done()) send("HTTP/1.1 100 Continue\r\n\r\n");
  return true;
}

void Connection::handle() {
  HttpRequest request = head();
  request.body = std::move(parser_->get().body());
  parser_.reset();
  phase_ = Phase::answering;
  timer_.cancel();
  streaming_ = completed_ = false;
  exchange_ = std::make_shared<Exchange>(shared_from_this(), ++number_, std::move(request), std::move(held_));
  read_more();  // to notice when the client goes away
  shared_->options.handle(exchange_);
}

std::string Connection::head_of(const HttpAnswer& answer, bool with_length) const {
  const auto reason = http::obsolete_reason(static_cast<http::status>(answer.status));
  std::string head = fmt::format("HTTP/1.1 {} {}\r\nServer: furious\r\nContent-Type: {}\r\n", answer.status,
                                 std::string_view(reason.data(), reason.size()), answer.content_type);
  for (const auto& [name, value] : answer.headers) head += fmt::format("{}: {}\r\n", name, value);
  if (with_length)
    head += fmt::format("Content-Length: {}\r\n", answer.body.size());
  else if (!is_http_1_0_)
    head += "Transfer-Encoding: chunked\r\nCache-Control: no-cache\r\n";
  return head + (keep_alive_ ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n");
}

void Connection::respond(uint64_t number, HttpAnswer answer) {
  if (!exchange_ || number != number_ || streaming_ || completed_) return;
  keep_alive_ = keep_alive_ && !shared_->closing;
  completed_ = true;
  answer_held_ = std::move(answer.held);
  std::string head = head_of(answer, true);
  if (is_head_) return send(std::move(head));
  if (answer.body.size() <= kSmallBody) return send(head + answer.body);  // in one packet, if it fits
  send(std::move(head));
  send(std::move(answer.body));
}

void Connection::start_stream(uint64_t number, const std::string& content_type) {
  if (!exchange_ || number != number_ || streaming_ || completed_) return;
  keep_alive_ = keep_alive_ && !is_http_1_0_ && !shared_->closing;  // there the end of the answer is that of the stream
  streaming_ = true;
  send(head_of({200, content_type, {}, {}}, false));
}

void Connection::write(uint64_t number, const std::string& bytes) {
  if (!exchange_ || number != number_ || !streaming_ || completed_ || bytes.empty()) return;
  send(is_http_1_0_ ? bytes : fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes));
}

void Connection::finish(uint64_t number) {
  if (!exchange_ || number != number_ || !streaming_ || completed_) return;
  completed_ = true;
  send(is_http_1_0_ ? "" : "0\r\n\r\n");
}

void Connection::send(std::string bytes) {
  if (phase_ == Phase::closed) return;
  if (unsent_.empty())
    unsent_ = std::move(bytes);
  else
    unsent_ += bytes;
  if (streaming_ && unsent_.size() > shared_->options.limits.unsent_bytes) return close();
  if (sending_.empty()) send_more();
}

// The rest of a piece, or after it the next one: all that has come since.
void Connection::send_more() {
  if (sent_ == sending_.size()) {
    sent_ = 0;
    sending_ = std::exchange(unsent_, {});
  }
  if (sending_.empty()) {
    if (phase_ == Phase::answering) timer_.cancel();
    if (completed_) complete();
    return;
  }
  if (phase_ == Phase::answering) limit_time(shared_->options.limits.send_seconds);
  socket_.async_write_some(asio::buffer(sending_) + sent_, [self = shared_from_this()](error_code error, size_t count) {
    self->on_sent(error, count);
  });
}

void Connection::on_sent(error_code error, size_t count) {
  if (error || phase_ == Phase::closed) return close();
  sent_ += count;
  send_more();
}

void Connection::complete() {
  completed_ = streaming_ = false;
  if (sending_.capacity() > kSmallBody) std::string().swap(sending_);  // an idle connection keeps no memory
  answer_held_.reset();
  if (const std::shared_ptr<Exchange> exchange = std::exchange(exchange_, nullptr)) exchange->complete();
  if (!keep_alive_ || shared_->closing) return linger();
  serve();
}

void Connection::refuse(HttpAnswer answer) {
  phase_ = Phase::answering;
  parser_.reset();  // with what has come of a body
  held_.set(0);
  keep_alive_ = false;
  completed_ = true;
  send(head_of(answer, true) + (is_head_ ? "" : answer.body));
}

void Connection::refuse_body() {
  refuse({429,
          "application/json",
          shared_->options.error_body(429, "the bodies of other requests take all memory for them; try again later"),
          {{"Retry-After", "1"}}});
}

// Says that nothing follows, and waits for the client to close: closing first could make the client lose the answer,
// if it is still sending.
void Connection::linger() {
  error_code ignored;
  phase_ = Phase::lingering;
  input_.clear();
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  limit_time(kLingerSeconds);
  read_more();
}

void Connection::stop() {
  if (phase_ == Phase::idle || phase_ == Phase::receiving) close();
}

void Connection::close() {
  if (phase_ == Phase::closed) return;
  phase_ = Phase::closed;
  error_code ignored;
  timer_.cancel();
  socket_.close(ignored);
  answer_held_.reset();
  const std::shared_ptr<Connection> self = shared_from_this();
  shared_->count.fetch_sub(static_cast<int64_t>(shared_->connections.erase(self)));
  if (const std::shared_ptr<Exchange> exchange = std::exchange(exchange_, nullptr)) exchange->leave();
}

void Connection::limit_time(int seconds) {
  timer_.expires_after(std::chrono::seconds(seconds));
  timer_.async_wait([weak = weak_from_this()](error_code error) {
    const std::shared_ptr<Connection> self = weak.lock();
    // A timer that was set anew while its handler was waiting is not over.
    if (!error && self && self->timer_.expiry() <= std::chrono::steady_clock::now()) self->on_time_over();
  });
}

void Connection::on_time_over() {
  if (phase_ != Phase::receiving) return close();
  refuse({408, "application/json", shared_->options.error_body(408, "the request did not arrive in time"), {}});
}

}  // namespace

class HttpServer::Listener {
 public:
  explicit Listener(HttpOptions options) : shared_(std::make_shared<Shared>()), acceptor_(shared_->io) {
    shared_->options = std::move(options);
    const std::string& host = shared_->options.host;
    error_code error;
    const asio::ip::address address = asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, error);
    require(!error, "serve: {} is not an address; give one such as 127.0.0.1 or 0.0.0.0", host);
    const tcp::endpoint endpoint(address, shared_->options.port);
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(4096, error);
    require(!error, "serve: cannot listen on {} port {}: {}; choose another --port", host, shared_->options.port,
            error.message());
    port_ = acceptor_.local_endpoint().port();
  }
  ~Listener() {
    asio::post(shared_->io, [this] {
      stop_listening();
      for (const auto& one : std::set(shared_->connections)) one->close();
      work_.reset();
    });
    if (!thread_.joinable()) start();
    thread_.join();
    shared_->io.poll();
  }

  void start() {
    accept();
    thread_ = std::thread([this] {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, nullptr);
      shared_->io.run();
    });
  }
  void stop_listening() {
    error_code ignored;
    acceptor_.close(ignored);
    retry_.cancel();
    shared_->closing = true;
    for (const auto& one : std::set(shared_->connections)) one->stop();
  }

  asio::io_context& io() { return shared_->io; }
  uint16_t port() const { return port_; }
  int64_t connections() const { return shared_->count.load(); }

 private:
  void accept() {
    acceptor_.async_accept([this](error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted || !acceptor_.is_open()) return;
      if (error) {  // no more descriptors: some connections must end first
        retry_.expires_after(std::chrono::milliseconds(50));
        retry_.async_wait([this](error_code stopped) {
          if (!stopped) accept();
        });
        return;
      }
      error_code ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      const auto connection = std::make_shared<Connection>(shared_, std::move(socket));
      shared_->connections.insert(connection);
      shared_->count.fetch_add(1);
      const HttpOptions& options = shared_->options;
      if (shared_->count.load() > options.limits.connections)
        connection->refuse({503,
                            "application/json",
                            options.error_body(503, "the server has too many connections; try again later"),
                            {{"Retry-After", "1"}}});
      else
        connection->serve();
      accept();
    });
  }

  std::shared_ptr<Shared> shared_;
  tcp::acceptor acceptor_;
  asio::steady_timer retry_{shared_->io};
  asio::executor_work_guard<asio::io_context::executor_type> work_{shared_->io.get_executor()};
  uint16_t port_ = 0;
  std::thread thread_;
};

HttpServer::HttpServer(HttpOptions options) : listener_(std::make_unique<Listener>(std::move(options))) {}
HttpServer::~HttpServer() = default;
uint16_t HttpServer::port() const {
  return listener_->port();
}
void HttpServer::start() {
  listener_->start();
}
void HttpServer::post(std::function<void()> task) {
  asio::post(listener_->io(), std::move(task));
}
void HttpServer::stop_listening() {
  asio::post(listener_->io(), [this] { listener_->stop_listening(); });
}
int64_t HttpServer::connections() const {
  return listener_->connections();
}

}  // namespace furious::serve
