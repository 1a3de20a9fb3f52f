// A small HTTP client for the tests of the server: one connection over loopback, with blocking calls.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace furious::testing {

struct Response {
  int status = 0;
  std::string head;  // the status line and the headers
  std::string body;

  nlohmann::json json() const { return nlohmann::json::parse(body); }
  // Of server-sent events, without [DONE], which must be the last.
  std::vector<nlohmann::json> events() const {
    std::vector<nlohmann::json> all;
    bool done = false;
    for (size_t at = 0; (at = body.find("data: ", at)) != std::string::npos;) {
      require(!done, "an event after [DONE]");
      const size_t end = body.find("\n\n", at);
      const std::string data = body.substr(at + 6, end - at - 6);
      done = data == "[DONE]";
      if (!done) all.push_back(nlohmann::json::parse(data));
      at = end;
    }
    require(done, "no [DONE] at the end: {}", body);
    return all;
  }
};

class Client {
 public:
  explicit Client(uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    timeval limit{30, 0};  // a test that waits for nothing fails instead of hanging
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept
      : socket_(std::exchange(other.socket_, -1)), connected_(other.connected_), input_(std::move(other.input_)) {}
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool connected() const { return connected_; }
  void close() {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  }
  // Whether all was sent.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  void send_request(const std::string& method, const std::string& path, const std::string& body = "",
                    const std::string& headers = "") {
    send(fmt::format("{} {} HTTP/1.1\r\nHost: test\r\n{}{}Content-Length: {}\r\n\r\n{}", method, path, headers,
                     body.empty() ? "" : "Content-Type: application/json\r\n", body.size(), body));
  }
  Response receive() {
    Response response;
    const size_t end = wait_for("\r\n\r\n");
    response.head = input_.substr(0, end);
    input_.erase(0, end + 4);
    response.status = std::stoi(response.head.substr(9, 3));
    if (response.head.find("Transfer-Encoding: chunked") != std::string::npos) {
      while (true) {
        const size_t line = wait_for("\r\n");
        const size_t count = std::stoul(input_.substr(0, line), nullptr, 16);
        need(line + 2 + count + 2);
        response.body += input_.substr(line + 2, count);
        input_.erase(0, line + 2 + count + 2);
        if (count == 0) return response;
      }
    }
    const std::string name = "Content-Length: ";
    const size_t length = response.head.find(name);
    if (length == std::string::npos) return response;
    const size_t count = std::stoul(response.head.substr(length + name.size()));
    if (head_only_) return response;
    need(count);
    response.body = input_.substr(0, count);
    input_.erase(0, count);
    return response;
  }
  Response request(const std::string& method, const std::string& path, const std::string& body = "",
                   const std::string& headers = "") {
    head_only_ = method == "HEAD";
    send_request(method, path, body, headers);
    return receive();
  }
  Response post(const std::string& path, const nlohmann::json& body) { return request("POST", path, body.dump()); }
  // Waits until so much of the answer has come.
  size_t wait_for(std::string_view text) {
    size_t found;
    while ((found = input_.find(text)) == std::string::npos) require(more(), "the connection ended: {}", input_);
    return found;
  }
  void wait_for_bytes(size_t count) { need(count); }
  bool ends() {  // the server closes the connection
    while (more()) {
    }
    return ended_;
  }

 private:
  bool more() {
    char buffer[65536];
    const ssize_t count = ::recv(socket_, buffer, sizeof(buffer), 0);
    if (count > 0) input_.append(buffer, static_cast<size_t>(count));
    ended_ = count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK);  // not: it took too long
    return count > 0;
  }
  void need(size_t bytes) {
    while (input_.size() < bytes) require(more(), "the connection ended after {} of {} bytes", input_.size(), bytes);
  }

  int socket_;
  bool connected_ = false, head_only_ = false, ended_ = false;
  std::string input_;
};

}  // namespace furious::testing
