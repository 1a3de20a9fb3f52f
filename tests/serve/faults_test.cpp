// What clients do wrong, and what must not trouble others.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "serve/served_model.h"

namespace furious {
namespace {

using namespace furious::testing;
using nlohmann::json;

const json kShort{{"prompt", "a prompt"}, {"max_tokens", 4}};
const json kEndless{{"prompt", "a prompt"}, {"max_tokens", 100000}, {"stream", true}, {"logit_bias", {{"257", -100}}}};

serve::ServerOptions long_answers(int64_t slots) {
  serve::ServerOptions options = test_options(slots);
  options.most_tokens = 1000000;
  return options;
}

void wait_until(const std::function<bool()>& condition) {
  for (int i = 0; i < 20000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(condition());
}

TEST(ServerFaults, RequestsThatAreRefused) {
  serve::ServerOptions options = test_options();
  options.most_tokens = 100;
  options.most_context = 1000;
  const Served served(served_model("2mamba"), options);
  struct Case {
    const char *method, *path, *body;
    int status;
    const char* words;
  };
  const std::string chats = "/v1/chat/completions";
  const Case cases[] = {
      {"POST", "/v1/completions", "{\"prompt\": ", 400, "not JSON"},
      {"POST", "/v1/completions", "[1, 2]", 400, "expected an object"},
      {"POST", "/v1/completions", "{\"prompt\": \"\xC3\x28\"}", 400, "not JSON"},
      {"POST", "/v1/completions", "{\"prompt\": {}}", 400, "expected a string"},
      {"POST", "/v1/completions", "{\"prompt\": [99999]}", 400, "token 99999"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"max_tokens\": -1}", 400, "max_tokens"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"max_tokens\": 101}", 400, "allows 100"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"temperature\": 9}", 400, "temperature"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"n\": 5}", 400, "4 slots"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"model\": \"gpt\"}", 404, "this server has \\\"little\\\""},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"echo\": true}", 400, "echo"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"stop\": \"\"}", 400, "stop"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"state\": \"../../etc/passwd\"}", 400, "not a name"},
      {"POST", "/v1/completions", "{\"prompt\": \"a\", \"state\": \"nothing\"}", 404, "nothing"},
      {"POST", "/v1/chat/completions", "{\"messages\": []}", 400, "at least one message"},
      {"POST", "/v1/chat/completions", "{\"messages\": [{\"role\": \"king\", \"content\": \"x\"}]}", 400, "king"},
      {"POST", "/v1/chat/completions", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"tools\": [{}]}",
       400, "tools"},
      {"POST", "/v1/states", "{\"name\": \"../x\", \"text\": \"a\"}", 400, "not a name"},
      {"POST", "/v1/states", "{\"name\": \"x\"}", 400, "exactly one"},
      {"GET", "/v1/states/..%2Fx", "", 400, "not a name"},
      {"GET", "/v1/states/../../etc/passwd", "", 400, "not a name"},
      {"GET", "/v1/completions", "", 405, "accepts POST"},
      {"GET", "/nothing", "", 404, "there is no"},
      {"BREW", "/health", "", 405, "accepts GET"},
  };
  for (const auto& [method, path, body, status, words] : cases) {
    const Response response = Client(served.port()).request(method, path, body);
    EXPECT_EQ(response.status, status) << method << " " << path << " " << body << "\n" << response.body;
    EXPECT_NE(response.body.find(words), std::string::npos) << body << "\n" << response.body;
    const json error = response.json()["error"];
    EXPECT_TRUE(error.contains("message") && error.contains("type") && error.contains("code")) << response.body;
  }
  const Response longest = served.post("/v1/completions", {{"prompt", std::string(2000, 'x')}});
  EXPECT_EQ(longest.status, 400);
  EXPECT_EQ(longest.json()["error"]["code"], "context_length_exceeded");
  const std::string deep = std::string(100000, '[');
  EXPECT_EQ(Client(served.port()).request("POST", "/v1/completions", deep).status, 400);
  EXPECT_EQ(served.post("/v1/completions", kShort).status, 200) << "it still serves";
}

TEST(ServerFaults, KeysAndTypes) {
  serve::ServerOptions options = test_options();
  options.api_key = "secret";
  const Served served(served_model("2mamba"), options);
  EXPECT_EQ(served.get("/health").status, 200);
  EXPECT_EQ(served.get("/v1/models").status, 401);
  Client client(served.port());
  EXPECT_EQ(client.request("GET", "/v1/models", "", "Authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(client.request("GET", "/v1/models", "", "Authorization: Bearer secre\r\n").status, 401);
  EXPECT_EQ(served.get("/metrics").status, 401);
  Client form(served.port());
  form.send(
      "POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Type: text/plain\r\n"
      "Content-Length: 2\r\n\r\n{}");
  EXPECT_EQ(form.receive().status, 415);
}

TEST(ServerFaults, LargeBodiesSlowSendersAndNonsense) {
  serve::ServerOptions options = test_options();
  options.limits.body_bytes = 1 << 20;
  options.limits.header_bytes = 4096;
  options.limits.request_seconds = 1;
  const Served served(served_model("2mamba"), options);
  Client large(served.port());
  large.send("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100000000\r\n\r\n");
  for (int i = 0; i < 100 && large.send(std::string(1000000, 'x')); ++i) {
  }
  EXPECT_EQ(large.receive().status, 413);
  Client chunked(served.port());
  chunked.send("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 20 && chunked.send("20000\r\n" + std::string(0x20000, 'x') + "\r\n"); ++i) {
  }
  EXPECT_EQ(chunked.receive().status, 413);
  Client slow(served.port());
  slow.send("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{\"pro");
  Client slower(served.port());
  slower.send("POST /v1/compl");
  EXPECT_EQ(served.post("/v1/completions", kShort).status, 200) << "others are served in the meantime";
  EXPECT_EQ(slow.receive().status, 408);
  EXPECT_EQ(slower.receive().status, 408);
  Client nonsense(served.port());
  nonsense.send("\x16\x03\x01\x02\x00\x01 not HTTP at all\r\n\r\n");
  EXPECT_EQ(nonsense.receive().status, 400);
  EXPECT_TRUE(nonsense.ends());
  Client headers(served.port());
  headers.send("GET /health HTTP/1.1\r\nX-Long: " + std::string(10000, 'x') + "\r\n\r\n");
  EXPECT_EQ(headers.receive().status, 431);
}

TEST(ServerFaults, ConnectionsAreUsedAgain) {
  const Served served(served_model("2mamba"));
  Client client(served.port());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.post("/v1/completions", kShort).status, 200);
  EXPECT_EQ(client.request("HEAD", "/health").body, "");
  client.request("GET", "/health");
  // Two requests at once, and a body after 100 Continue.
  client.send("GET /health HTTP/1.1\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n");
  EXPECT_EQ(client.receive().json()["status"], "ok");
  EXPECT_EQ(client.receive().json()["object"], "list");
  client.send(
      "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
      "Content-Length: " +
      std::to_string(kShort.dump().size()) + "\r\n\r\n");
  EXPECT_EQ(client.receive().status, 100);
  client.send(kShort.dump());
  EXPECT_EQ(client.receive().status, 200);
  Client old(served.port());
  old.send("GET /health HTTP/1.0\r\n\r\n");
  EXPECT_EQ(old.receive().status, 200);
  EXPECT_TRUE(old.ends());
}

TEST(ServerFaults, AClientThatGoesAwayFreesItsSlot) {
  const Served served(served_model("2mamba"), long_answers(1));
  for (const bool stream : {true, false}) {
    json body = kEndless;
    body["stream"] = stream;
    const int64_t before = served.counters().cancelled.load();
    Client gone(served.port());
    gone.send_request("POST", "/v1/completions", body.dump());
    if (stream) gone.wait_for("data: ");
    wait_until([&] { return served.counters().used_slots.load() == 1; });
    gone.close();
    EXPECT_EQ(served.post("/v1/completions", kShort).status, 200) << "the only slot is free again";
    EXPECT_EQ(served.counters().cancelled.load(), before + 1);
  }
  // Also one that waits.
  Client first(served.port()), waiting(served.port());
  first.send_request("POST", "/v1/completions", kEndless.dump());
  wait_until([&] { return served.counters().used_slots.load() == 1; });
  waiting.send_request("POST", "/v1/completions", kEndless.dump());
  wait_until([&] { return served.counters().waiting.load() == 1; });
  waiting.close();
  wait_until([&] { return served.counters().waiting.load() == 0; });
}

TEST(ServerFaults, TooManyRequestsGet429) {
  serve::ServerOptions options = long_answers(1);
  options.scheduler.queue = 3;
  const Served served(served_model("2mamba"), options);
  Client first(served.port());
  first.send_request("POST", "/v1/completions", kEndless.dump());
  first.wait_for("data: ");
  std::vector<Client> clients;
  for (int i = 0; i < 300; ++i) {
    clients.emplace_back(served.port());
    clients.back().send_request("POST", "/v1/completions", kShort.dump());
  }
  wait_until([&] { return served.counters().refused.load() == 297; });
  // Before the body has come, too.
  Client early(served.port());
  early.send("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_EQ(early.receive().status, 429);
  first.close();
  int answered = 0, refused = 0;
  for (Client& client : clients) {
    const Response response = client.receive();
    answered += response.status == 200;
    refused += response.status == 429;
    if (response.status == 429) {
      EXPECT_NE(response.head.find("Retry-After: "), std::string::npos);
      EXPECT_EQ(response.json()["error"]["type"], "rate_limit_error");
    }
  }
  EXPECT_EQ(answered, 3);
  EXPECT_EQ(refused, 297);
}

// Bodies that wait are bounded together; small requests are served all the same.
TEST(ServerFaults, BodiesTogetherAreBounded) {
  serve::ServerOptions options = test_options();
  options.most_context = 3000000;
  options.limits.body_bytes = 1 << 20;
  options.limits.all_bodies_bytes = 1 << 20;
  const Served served(served_model("2mamba"), options);
  const auto head = [](size_t length) {
    return fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                       length);
  };
  Client first(served.port());
  first.send(head(900000) + std::string(800000, ' '));
  Response refused;
  wait_until([&] {  // the first one has arrived
    // A byte more than there is room for beside all that was sent of the first; it holds none itself.
    Client second(served.port());
    second.send(
        fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
                    "Expect: 100-continue\r\n\r\n",
                    (1 << 20) - 800000 + 1));
    refused = second.receive();
    return refused.status == 429;
  });
  EXPECT_NE(refused.head.find("Retry-After: "), std::string::npos);
  EXPECT_EQ(refused.json()["error"]["type"], "rate_limit_error");
  // Without a length it is refused as it grows.
  Client chunked(served.port());
  chunked.send("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 7 && chunked.send("20000\r\n" + std::string(0x20000, ' ') + "\r\n"); ++i) {
  }
  EXPECT_EQ(chunked.receive().status, 429);
  EXPECT_EQ(served.post("/v1/completions", kShort).status, 200);
  const std::string body = kShort.dump();
  first.send(std::string(100000 - body.size(), ' ') + body);
  EXPECT_EQ(first.receive().status, 200);
  Client last(served.port());
  last.send(head(900000) + std::string(900000 - body.size(), ' ') + body);
  EXPECT_EQ(last.receive().status, 200) << "what was taken is free again";
}

// Downloads of states are bounded together; what was sent, and what nobody waits for any more, is free again.
TEST(ServerFaults, DownloadsTogetherAreBounded) {
  serve::ServerOptions options = test_options();
  options.download_bytes = 12 << 20;
  options.scheduler.chunk = 512;
  const Served served(served_model("softmax", 80), options);  // deep, since the time grows with the square of the text
  ASSERT_EQ(served.post("/v1/states", {{"name", "large"}, {"text", std::string(640, 'a')}}).status, 200);
  const uint64_t bytes = served.get("/v1/states/large").json()["bytes"];
  ASSERT_GT(bytes, options.download_bytes / 2) << "two are too many";
  const std::string path = "/v1/states/large/data";
  {
    Client stands_still(served.port());  // more than the buffers of its connection
    stands_still.send_request("GET", path);
    stands_still.wait_for("Content-Length");
    const Response refused = served.get(path);
    EXPECT_EQ(refused.status, 429);
    EXPECT_NE(refused.head.find("Retry-After: "), std::string::npos);
    EXPECT_EQ(served.get("/v1/states/large").status, 200);
  }
  Response first;
  wait_until([&] { return (first = served.get(path)).status == 200; });  // the server sees that its client is gone
  EXPECT_GE(first.body.size(), bytes);
  EXPECT_EQ(served.get(path).body, first.body);
}

// Time-outs are about lack of progress: a slow download goes on, one that stands still does not.
TEST(ServerFaults, SlowReadersAndWritersThatGoOnAreServed) {
  serve::HttpOptions options;
  options.port = 0;
  options.limits.request_seconds = options.limits.send_seconds = 2;
  options.limits.least_rate = 1000;
  options.limits.body_bytes = 64 << 20;
  options.error_body = [](int, std::string_view) { return std::string(); };
  options.handle = [](const std::shared_ptr<serve::HttpExchange>& exchange) {
    exchange->respond({200, "text/plain", std::string(size_t{64} << 20, 'x'), {}});
  };
  serve::HttpServer server(options);
  server.start();
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(400)); };
  Client slow(server.port()), still(server.port());
  still.send_request("GET", "/");
  slow.send("POST / HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 80000\r\n\r\n");
  for (int i = 0; i < 8; ++i) {
    slow.send(std::string(10000, ' '));
    pause();
  }
  for (size_t bytes = 1; bytes <= 8; ++bytes) {
    slow.wait_for_bytes(bytes * (size_t{8} << 20));
    pause();
  }
  EXPECT_EQ(slow.receive().body.size(), size_t{64} << 20);
  EXPECT_TRUE(still.ends()) << "it has read nothing for a long time";
}

// Connections that wait for their next request, and streams that wait for their first token.
TEST(ServerFaults, AThousandIdleConnectionsAndStreams) {
  struct rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  const int count = std::min<int>(1000, static_cast<int>(std::min<rlim_t>(limit.rlim_max, 4096) - 200) / 2);
  serve::ServerOptions options = long_answers(2);
  options.scheduler.queue = count;
  const Served served(served_model("2mamba"), options);
  std::vector<Client> running, others;
  for (int i = 0; i < 2; ++i) {
    running.emplace_back(served.port());
    running.back().send_request("POST", "/v1/completions", kEndless.dump());
    running.back().wait_for("data: ");
  }
  for (int i = 0; i < count; ++i) {
    others.emplace_back(served.port());
    ASSERT_TRUE(others.back().connected()) << i;
    if (i % 5 == 0) others.back().send_request("POST", "/v1/completions", kShort.dump());
  }
  wait_until([&] { return served.counters().waiting.load() == (count + 4) / 5; });
  EXPECT_EQ(served.get("/health").status, 200);
  const int64_t written = served.counters().written_tokens.load();
  wait_until([&] { return served.counters().written_tokens.load() > written + 10; });
  running.clear();
  for (int i = 0; i < count; ++i) {
    if (i % 5 != 0) others[i].send_request("GET", "/health");
    EXPECT_EQ(others[i].receive().status, 200);
  }
  others.clear();
  limit.rlim_cur = before;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(ServerFaults, TimeLimits) {
  serve::ServerOptions options = long_answers(1);
  options.request_seconds = 1;
  const Served served(served_model("2mamba"), options);
  json body = kEndless;
  body["stream"] = false;
  const Response response = served.post("/v1/completions", body);
  EXPECT_EQ(response.status, 408);
  EXPECT_EQ(response.json()["error"]["code"], "timeout");
}

TEST(ServerFaults, DrainingEndsRunningAnswers) {
  const TemporaryDirectory folder;
  const Model model = served_model("2mamba");
  serve::ServerOptions options = long_answers(2);
  options.store.directory = folder.path();
  const json body{{"prompt", "a prompt"}, {"max_tokens", 500}, {"stream", true}, {"logit_bias", {{"257", -100}}}};
  {
    Served served(model, options);
    Client client(served.port());
    client.send_request("POST", "/v1/completions", body.dump());
    client.wait_for("data: ");
    served.server().drain();
    const std::vector<json> events = client.receive().events();
    EXPECT_EQ(events.back()["choices"][0]["finish_reason"], "length") << "it was finished";
    Client late(served.port());
    EXPECT_FALSE(late.connected());
  }
  options.drain_seconds = 0;  // it is cut off
  options.scheduler.slots = 2;
  Served served(model, options);
  json whole = kEndless;
  whole["stream"] = false;
  Client client(served.port()), other(served.port()), waiting(served.port());
  client.send_request("POST", "/v1/completions", kEndless.dump());
  client.wait_for("data: ");
  other.send_request("POST", "/v1/completions", whole.dump());
  wait_until([&] { return served.counters().used_slots.load() == 2; });
  waiting.send_request("POST", "/v1/completions", whole.dump());
  wait_until([&] { return served.counters().waiting.load() == 1; });
  served.server().drain();
  EXPECT_EQ(client.receive().events().back()["error"]["code"], "shutting_down");
  for (Client* one : {&other, &waiting}) {
    const Response response = one->receive();
    EXPECT_EQ(response.status, 503);
    EXPECT_EQ(response.json()["error"]["code"], "shutting_down");
  }
}

TEST(ServerFaults, DamagedStateFilesAreRead) {
  const TemporaryDirectory folder;
  const Model model = served_model("2mamba");
  serve::ServerOptions options = test_options();
  options.store.directory = folder.path();
  std::string text;
  const json body{{"prompt", "some text to remember"}, {"max_tokens", 5}, {"temperature", 0}};
  {
    Served served(model, options);
    text = served.post("/v1/completions", body).json()["choices"][0]["text"];
    served.server().drain();
  }
  int damaged = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (!file.is_regular_file() || file.path().extension() != ".state") continue;
    std::filesystem::resize_file(file.path(), file.file_size() - 100);
    ++damaged;
  }
  EXPECT_GT(damaged, 0);
  const Served served(model, options);
  const Response response = served.post("/v1/completions", body);
  EXPECT_EQ(response.json()["choices"][0]["text"], text);
  EXPECT_EQ(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

}  // namespace
}  // namespace furious
