#include "serve/server.h"

#include <gtest/gtest.h>

#include <array>

#include "base/file.h"
#include "serve/served_model.h"

namespace furious {
namespace {

using namespace furious::testing;
using nlohmann::json;

const std::string kText = "a text of some length, which is longer than one chunk of the prefill";

json completion(const json& more = json::object()) {
  json body{{"prompt", kText}, {"max_tokens", 20}, {"seed", 7}, {"temperature", 1}};
  body.update(more);
  return body;
}

json chat(const std::vector<std::pair<std::string, std::string>>& messages, const json& more = json::object()) {
  json body{{"max_tokens", 20}, {"seed", 7}, {"messages", json::array()}};
  for (const auto& [role, content] : messages) body["messages"].push_back({{"role", role}, {"content", content}});
  body.update(more);
  return body;
}

// Greedy text of the decoder alone, without a server.
TEST(Server, CompletesAsASessionDoes) {
  const Model model = served_model("2mamba");
  serve::ServerOptions options = test_options();
  options.scheduler.chunk = 128;
  const Served served(model, options);
  Session session(model);
  session.read(kText);
  WriteOptions write;
  write.tokens = 20;
  write.sampling.temperature = 0;
  const Text expected = session.write(write)[0];
  const Response response = served.post("/v1/completions", completion({{"temperature", 0}, {"model", "little"}}));
  ASSERT_EQ(response.status, 200) << response.body;
  const json answer = response.json();
  EXPECT_EQ(answer["object"], "text_completion");
  EXPECT_EQ(answer["model"], "little");
  ASSERT_EQ(answer["choices"].size(), 1u);
  EXPECT_EQ(answer["choices"][0]["text"], expected.text);
  EXPECT_EQ(answer["choices"][0]["finish_reason"], expected.ending == Ending::tokens ? "length" : "stop");
  EXPECT_EQ(answer["usage"]["completion_tokens"], expected.tokens);
  EXPECT_EQ(answer["usage"]["prompt_tokens"], static_cast<int64_t>(kText.size()) + 1);  // and the mark before a text
}

TEST(Server, StreamsWhatItAnswersAtOnce) {
  const Served served(served_model("2mamba"));
  const json whole = served.post("/v1/completions", completion({{"n", 3}, {"logprobs", 2}})).json();
  const json body =
      completion({{"n", 3}, {"logprobs", 2}, {"stream", true}, {"stream_options", {{"include_usage", true}}}});
  const Response response = served.post("/v1/completions", body);
  EXPECT_NE(response.head.find("Content-Type: text/event-stream"), std::string::npos);
  const std::vector<json> events = response.events();
  ASSERT_GT(events.size(), 4u);
  for (int choice = 0; choice < 3; ++choice) {
    std::string text, finish;
    json logs = json::array();
    for (const json& event : events) {
      EXPECT_EQ(event["id"], events[0]["id"]);
      for (const json& one : event["choices"]) {
        if (one["index"] != choice) continue;
        text += one["text"].get<std::string>();
        if (!one["finish_reason"].is_null()) finish = one["finish_reason"];
        if (!one["logprobs"].is_null())
          for (const json& log : one["logprobs"]["token_logprobs"]) logs.push_back(log);
      }
    }
    EXPECT_EQ(text, whole["choices"][choice]["text"]);
    EXPECT_EQ(finish, whole["choices"][choice]["finish_reason"]);
    EXPECT_EQ(logs, whole["choices"][choice]["logprobs"]["token_logprobs"]);
  }
  EXPECT_NE(whole["choices"][0]["text"], whole["choices"][1]["text"]) << "choices draw from seeds of their own";
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_EQ(events.back()["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
}

TEST(Server, StopsBeforeStopStrings) {
  const Served served(served_model("2mamba"));
  const std::string text = served.post("/v1/completions", completion()).json()["choices"][0]["text"];
  // A string from the middle of the answer, of whole characters.
  const std::string stop = text.substr(0, text.size() / 2);
  if (stop.empty() || static_cast<signed char>(text[text.size() / 2]) < -64) GTEST_SKIP() << "not at a character";
  const json answer = served.post("/v1/completions", completion({{"stop", json::array({stop})}})).json();
  EXPECT_EQ(answer["choices"][0]["text"], "");
  EXPECT_EQ(answer["choices"][0]["finish_reason"], "stop");
}

TEST(Server, SeveralPromptsAndTokenIds) {
  const Served served(served_model("mamba2"));
  const json one = served.post("/v1/completions", completion({{"prompt", "first"}})).json();
  const json two = served.post("/v1/completions", completion({{"prompt", "second"}})).json();
  const json both = served.post("/v1/completions", completion({{"prompt", {"first", "second"}}})).json();
  ASSERT_EQ(both["choices"].size(), 2u);
  EXPECT_EQ(both["choices"][0]["text"], one["choices"][0]["text"]);
  EXPECT_EQ(both["choices"][1]["text"], two["choices"][0]["text"]);
  const json ids = served.post("/v1/completions", completion({{"prompt", {257, 'f', 'i', 'r', 's', 't'}}})).json();
  EXPECT_EQ(ids["choices"][0]["text"], one["choices"][0]["text"]);
}

TEST(Server, LogitBiasAndLogProbabilitiesOfChats) {
  const Served served(served_model("2mamba"));
  const json body = chat({{"user", "hello"}}, {{"logit_bias", {{"65", 100}}}, {"logprobs", true}, {"top_logprobs", 3}});
  const json answer = served.post("/v1/chat/completions", body).json();
  EXPECT_EQ(answer["choices"][0]["message"]["content"], std::string(20, 'A'));
  const json& tokens = answer["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(tokens.size(), 20u);
  EXPECT_EQ(tokens[0]["token"], "A");
  EXPECT_EQ(tokens[0]["bytes"], json::array({65}));
  ASSERT_EQ(tokens[0]["top_logprobs"].size(), 3u);
  EXPECT_GE(tokens[0]["top_logprobs"][0]["logprob"], tokens[0]["top_logprobs"][1]["logprob"]);
  const json banned =
      served.post("/v1/chat/completions", chat({{"user", "hello"}}, {{"logit_bias", {{"65", -100}}}})).json();
  EXPECT_EQ(banned["choices"][0]["message"]["content"].get<std::string>().find('A'), std::string::npos);
}

// What a server answers to its first request it answers again: from a state in memory, from a file after a restart, in
// a fork, and after a state with a name. Log-probabilities are compared, which differ with the last bit of a logit.
class ServerOf : public ::testing::TestWithParam<const char*> {};

json answered(const Response& response) {
  json answer = response.json();
  require(response.status == 200, "{}", response.body);
  return answer["choices"][0];
}

int64_t cached(const Response& response) {
  return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
}

TEST_P(ServerOf, AnswersTheSameToTheBitHoweverItStarts) {
  const TemporaryDirectory folder;
  const Model model = served_model(GetParam());
  serve::ServerOptions options = test_options();
  options.store.directory = folder.path();
  options.scheduler.exact = true;  // so that a fork beside another one rounds as it does alone
  const json body = completion({{"logprobs", 1}, {"prompt", kText + kText + kText}});
  json cold;
  {
    Served served(model, options);
    const Response first = served.post("/v1/completions", body), second = served.post("/v1/completions", body);
    cold = answered(first);
    EXPECT_EQ(cached(first), 0);
    EXPECT_EQ(cached(second), first.json()["usage"]["prompt_tokens"]);
    EXPECT_EQ(answered(second), cold);
    json forks = body;
    forks["n"] = 3;
    EXPECT_EQ(answered(served.post("/v1/completions", forks)), cold);
    // A longer prompt goes on from the last pass that both have, not from the end of the shorter one.
    json longer = body;
    longer["prompt"] = kText + kText + kText + " and more";
    const Response warm = served.post("/v1/completions", longer);
    EXPECT_GT(cached(warm), 0);
    EXPECT_EQ(cached(warm) % options.scheduler.chunk, 0);
    serve::ServerOptions none = test_options();
    none.scheduler.exact = true;
    const Served empty(model, none);
    const Response from_nothing = empty.post("/v1/completions", longer);
    EXPECT_EQ(cached(from_nothing), 0);
    EXPECT_EQ(answered(warm), answered(from_nothing));
    served.server().drain();
  }
  const Served restarted(model, options);
  const Response restored = restarted.post("/v1/completions", body);
  EXPECT_GT(cached(restored), 0);
  EXPECT_EQ(answered(restored), cold);
}

// The tier that a prompt starts from: a slot, memory, a file. A request for as many answers as there are slots leaves
// no warm one.
TEST_P(ServerOf, StartsFromEveryTier) {
  const TemporaryDirectory folder;
  const Model model = served_model(GetParam());
  serve::ServerOptions options = test_options();
  options.store.directory = folder.path();
  options.scheduler.exact = true;
  options.scheduler.device_bytes = 1 << 30;
  const json body = completion({{"logprobs", 1}, {"prompt", kText + kText}});
  const json all_slots = completion({{"prompt", "others"}, {"n", 4}, {"max_tokens", 2}});
  const auto tiers = [](const Served& served) {
    const serve::SchedulerCounters& own = served.counters();
    return std::array{own.from_device.load(), own.from_host.load(), own.from_disk.load()};
  };
  using Tiers = std::array<int64_t, 3>;
  json cold;
  {
    Served served(model, options);
    cold = answered(served.post("/v1/completions", body));
    EXPECT_EQ(tiers(served), (Tiers{0, 0, 0}));
    const Response warm = served.post("/v1/completions", body);
    EXPECT_EQ(answered(warm), cold);
    EXPECT_EQ(cached(warm), warm.json()["usage"]["prompt_tokens"]);
    EXPECT_EQ(tiers(served), (Tiers{1, 0, 0}));
    json longer = body;
    longer["prompt"] = kText + kText + " and more";
    EXPECT_GT(cached(served.post("/v1/completions", longer)), 0);
    EXPECT_EQ(tiers(served), (Tiers{2, 0, 0})) << "from the last pass that both have";
    EXPECT_EQ(served.post("/v1/completions", all_slots).status, 200);
    EXPECT_EQ(answered(served.post("/v1/completions", body)), cold);
    EXPECT_EQ(tiers(served), (Tiers{2, 1, 0}));
    EXPECT_EQ(answered(served.post("/v1/completions", body)), cold);
    EXPECT_EQ(tiers(served), (Tiers{3, 1, 0})) << "what came from memory is warm again";
    const std::string metrics = served.get("/metrics").body;
    EXPECT_NE(metrics.find("furious_prompts_from_state_total{tier=\"device\"} 3\n"), std::string::npos) << metrics;
    EXPECT_NE(metrics.find("furious_prompts_from_state_total{tier=\"host\"} 1\n"), std::string::npos) << metrics;
    EXPECT_NE(metrics.find("furious_store_hits_total 1\n"), std::string::npos) << metrics;
    served.server().drain();
  }
  const Served restarted(model, options);
  EXPECT_EQ(answered(restarted.post("/v1/completions", body)), cold);
  EXPECT_EQ(tiers(restarted), (Tiers{0, 0, 1}));
  EXPECT_EQ(answered(restarted.post("/v1/completions", body)), cold);
  EXPECT_EQ(tiers(restarted), (Tiers{1, 0, 1}));
}

// A state in a slot that has read less does not hide one in memory that has read more.
TEST(Server, StartsFromTheLongestStateOfAllTiers) {
  const Model model = served_model("2mamba");
  serve::ServerOptions options = test_options();
  options.scheduler.device_bytes = 1 << 30;
  const Served served(model, options);
  const json part = completion({{"prompt", kText}}), whole = completion({{"prompt", kText + kText}});
  const Response cold = served.post("/v1/completions", whole);
  EXPECT_EQ(served.post("/v1/completions", completion({{"prompt", "others"}, {"n", 4}})).status, 200);
  EXPECT_EQ(served.post("/v1/completions", part).status, 200);  // its last whole pass is one of the other prompt
  const Response again = served.post("/v1/completions", whole);
  EXPECT_EQ(cached(again), again.json()["usage"]["prompt_tokens"]);
  EXPECT_EQ(answered(again), answered(cold));
  EXPECT_EQ(served.counters().from_host.load(), 1);
}

// A conversation: the next message reads only what is new, also after a restart, and gets the answer that a server
// without any state gives.
TEST_P(ServerOf, ConversationsGoOnFromTheirState) {
  const TemporaryDirectory folder;
  const Model model = served_model(GetParam());
  serve::ServerOptions options = test_options();
  options.store.directory = folder.path();
  const json more{{"logprobs", true}};
  std::vector<std::pair<std::string, std::string>> messages{{"system", "You are a test."}, {"user", "Hello, model"}};
  int64_t read = 0;
  {
    Served served(model, options);
    const Response first = served.post("/v1/chat/completions", chat(messages, more));
    messages.emplace_back("assistant", answered(first)["message"]["content"]);
    served.wait_for_jobs(2);  // the answer, and reading it
    messages.emplace_back("user", "And now?");
    const Response second = served.post("/v1/chat/completions", chat(messages, more));
    read = second.json()["usage"]["prompt_tokens"].get<int64_t>() - cached(second);
    EXPECT_LT(read, 30) << "only the new message";
    const Response cold = Served(model).post("/v1/chat/completions", chat(messages, more));
    EXPECT_EQ(cached(cold), 0);
    EXPECT_EQ(answered(second), answered(cold));
    served.server().drain();
  }
  Served restarted(model, options);
  messages.pop_back();
  messages.emplace_back("user", "Something else after a restart");
  const Response third = restarted.post("/v1/chat/completions", chat(messages, more));
  EXPECT_LT(third.json()["usage"]["prompt_tokens"].get<int64_t>() - cached(third), 60);
  EXPECT_EQ(answered(third), answered(Served(model).post("/v1/chat/completions", chat(messages, more))));
}

// A directory that was filled with other chunks, and text that was read with other boundaries: neither changes a bit.
TEST_P(ServerOf, StatesOfOtherPassesAreNotUsed) {
  const TemporaryDirectory folder;
  const Model model = served_model(GetParam());
  serve::ServerOptions options = test_options();
  const json body = completion({{"logprobs", 1}, {"prompt", kText + kText + "!"}});
  const json cold = answered(Served(model, options).post("/v1/completions", body));
  options.store.directory = folder.path();
  options.scheduler.chunk = 24;
  {
    Served other(model, options);
    EXPECT_EQ(other.post("/v1/completions", body).status, 200);
    // The same ids with a boundary within.
    EXPECT_EQ(other.post("/v1/states", {{"name", "part"}, {"text", kText + kText.substr(0, 12)}}).status, 200);
    EXPECT_EQ(other.post("/v1/completions", completion({{"state", "part"}, {"prompt", kText.substr(12) + "!"}})).status,
              200);
    other.server().drain();
  }
  options.scheduler.chunk = 16;
  const Served served(model, options);
  const Response first = served.post("/v1/completions", body), second = served.post("/v1/completions", body);
  EXPECT_EQ(cached(first), 0);
  EXPECT_EQ(answered(first), cold);
  EXPECT_GT(cached(second), 0);
  EXPECT_EQ(answered(second), cold);
  // A client that names a state goes on from it, whatever its passes.
  EXPECT_GE(cached(served.post("/v1/completions", completion({{"state", "part"}, {"prompt", " more"}}))),
            static_cast<int64_t>(kText.size()));
}

INSTANTIATE_TEST_SUITE_P(Presets, ServerOf, ::testing::Values("2mamba", "softmax", "mamba2"),
                         [](const auto& test) { return std::string(test.param); });

// The model has 300 ids, its tokenizer 258.
TEST(Server, ABiasOfAnIdThatCannotBeChosenIsRefused) {
  const Served served(served_model("2mamba"));
  const json bad{{"prompt", "a"}, {"max_tokens", 2}, {"logit_bias", {{"299", 1}}}};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(served.post("/v1/completions", bad).status, 400);
  EXPECT_EQ(served.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 2}}).status, 200);
}

TEST(Server, NamedStates) {
  const TemporaryDirectory folder;
  serve::ServerOptions options = test_options();
  options.store.directory = folder.path();
  options.scheduler.exact = true;
  const Model model = served_model("2mamba");
  const Served served(model, options);
  const Response made = served.post("/v1/states", {{"name", "document"}, {"text", kText}});
  ASSERT_EQ(made.status, 200) << made.body;
  EXPECT_EQ(made.json()["tokens"], static_cast<int64_t>(kText.size()) + 1);
  EXPECT_EQ(served.post("/v1/states", {{"name", "document"}, {"text", "x"}}).status, 409);
  const json body = completion({{"prompt", " Question?"}, {"state", "document"}, {"logprobs", 0}});
  const Response answer = served.post("/v1/completions", body);
  EXPECT_EQ(cached(answer), static_cast<int64_t>(kText.size()) + 1);
  EXPECT_EQ(served.post("/v1/states", {{"name", "copy"}, {"fork", "document"}}).status, 200);
  EXPECT_EQ(Client(served.port()).request("DELETE", "/v1/states/document").status, 200);
  EXPECT_EQ(served.get("/v1/states/document").status, 404);
  EXPECT_EQ(served.post("/v1/completions", body).status, 404);
  json other = body;
  other["state"] = "copy";
  EXPECT_EQ(answered(served.post("/v1/completions", other)), answered(answer));
  // Downloaded, and uploaded to another server.
  const Response data = served.get("/v1/states/copy/data");
  ASSERT_EQ(data.status, 200);
  const Served second(model);
  Client client(second.port());
  EXPECT_EQ(client.request("PUT", "/v1/states/copy/data", data.body).status, 200);
  EXPECT_EQ(client.request("PUT", "/v1/states/bad/data", data.body.substr(0, data.body.size() / 2)).status, 400);
  EXPECT_EQ(second.get("/v1/states").json()["data"].size(), 1u);
  EXPECT_EQ(second.post("/v1/completions", other).json()["choices"][0]["text"], answered(answer)["text"]);
  // The end of a response.
  const Response written = served.post("/v1/completions", completion());
  const json from_response{{"name", "end"}, {"response", written.json()["id"]}};
  const Response state = served.post("/v1/states", from_response);
  ASSERT_EQ(state.status, 200) << state.body;
  EXPECT_EQ(state.json()["tokens"], written.json()["usage"]["prompt_tokens"].get<int64_t>() +
                                        written.json()["usage"]["completion_tokens"].get<int64_t>());
  EXPECT_EQ(served.get("/v1/states").json()["data"].size(), 2u);
}

TEST(Server, ChatsAfterANamedState) {
  Served served(served_model("2mamba"));
  const json document{{"name", "d"}, {"messages", {{{"role", "system"}, {"content", kText}}}}};
  ASSERT_EQ(served.post("/v1/states", document).status, 200);
  const Response first = served.post("/v1/chat/completions", chat({{"user", "What?"}}, {{"state", "d"}}));
  EXPECT_GE(cached(first), static_cast<int64_t>(kText.size()));
  // The same conversation without the state has the same ids, so it finds what was read.
  const Response whole = served.post("/v1/chat/completions", chat({{"system", kText}, {"user", "What?"}}));
  EXPECT_EQ(whole.json()["usage"]["prompt_tokens"], first.json()["usage"]["prompt_tokens"]);
  EXPECT_EQ(answered(whole)["message"], answered(first)["message"]);
}

// After a state of messages, and after one of a finished response, a chat has the ids of the whole conversation.
TEST(Server, ChatsGoOnWithTheConversationOfAState) {
  for (const std::string name : {"plain", "chatml", "llama3", "zephyr"}) {
    SCOPED_TRACE(name);
    serve::ServerOptions options = test_options();
    options.chat = serve::ChatTemplate::named(name);
    Served served(served_model("2mamba"), options);
    ASSERT_EQ(
        served.post("/v1/states", {{"name", "d"}, {"messages", {{{"role", "system"}, {"content", kText}}}}}).status,
        200);
    const Response first = served.post("/v1/chat/completions", chat({{"user", "What?"}}, {{"state", "d"}}));
    const Response whole = served.post("/v1/chat/completions", chat({{"system", kText}, {"user", "What?"}}));
    EXPECT_EQ(whole.json()["usage"]["prompt_tokens"], first.json()["usage"]["prompt_tokens"]);
    EXPECT_EQ(answered(whole)["message"], answered(first)["message"]);
    const std::string answer = answered(first)["message"]["content"];
    ASSERT_EQ(served.post("/v1/states", {{"name", "e"}, {"response", first.json()["id"]}}).status, 200);
    const Response next = served.post("/v1/chat/completions", chat({{"user", "And now?"}}, {{"state", "e"}}));
    const Response all =
        served.post("/v1/chat/completions",
                    chat({{"system", kText}, {"user", "What?"}, {"assistant", answer}, {"user", "And now?"}}));
    EXPECT_EQ(all.json()["usage"]["prompt_tokens"], next.json()["usage"]["prompt_tokens"]);
    EXPECT_EQ(answered(all)["message"], answered(next)["message"]);
  }
}

TEST(Server, PagesModelsHealthAndMetrics) {
  const Served served(served_model("2mamba"));
  EXPECT_EQ(served.get("/health").json()["status"], "ok");
  EXPECT_NE(served.get("/").body.find("<html"), std::string::npos);
  EXPECT_EQ(served.get("/v1/models").json()["data"][0]["id"], "little");
  EXPECT_EQ(served.get("/v1/models/little").json()["furious"]["slots"], 4);
  EXPECT_EQ(served.get("/v1/models/other").status, 404);
  served.post("/v1/completions", completion());
  const std::string metrics = served.get("/metrics").body;
  EXPECT_NE(metrics.find("furious_written_tokens_total 20\n"), std::string::npos) << metrics;
  EXPECT_NE(metrics.find("furious_time_to_first_token_seconds_count 1\n"), std::string::npos) << metrics;
}

}  // namespace
}  // namespace furious
