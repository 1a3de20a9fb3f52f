#include "serve/openai.h"

#include <gtest/gtest.h>

#include <cmath>

namespace furious {
namespace {

using namespace furious::serve;

int status_of(const std::function<void()>& parse) {
  try {
    parse();
  } catch (const ApiError& error) {
    return error.status;
  }
  return 200;
}

TEST(OpenAi, ParsesCompletions) {
  const GenerationRequest request = parse_completion(
      R"({"model": "m", "prompt": ["a", [1, 2]], "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3,
          "stop": "x", "stream": true, "stream_options": {"include_usage": true}, "logprobs": 4,
          "logit_bias": {"7": -100, "8": 1.5}, "presence_penalty": 1, "frequency_penalty": -1, "user": "someone"})");
  EXPECT_EQ(request.model, "m");
  ASSERT_EQ(request.prompts.size(), 2u);
  EXPECT_EQ(std::get<std::string>(request.prompts[0]), "a");
  EXPECT_EQ(std::get<std::vector<int32_t>>(request.prompts[1]), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(request.n, 2);
  EXPECT_EQ(request.max_tokens, 5);
  EXPECT_EQ(request.seed, 3u);
  EXPECT_EQ(request.stop, std::vector<std::string>{"x"});
  EXPECT_TRUE(request.stream && request.include_usage);
  EXPECT_EQ(request.sampling.temperature, 0.5);
  EXPECT_EQ(request.sampling.top_p, 0.9);
  EXPECT_EQ(request.sampling.log_probabilities, 4);
  EXPECT_EQ(request.sampling.presence_penalty, 1);
  EXPECT_EQ(request.sampling.frequency_penalty, -1);
  ASSERT_EQ(request.sampling.logit_bias.size(), 2u);
  EXPECT_TRUE(std::isinf(request.sampling.logit_bias[0].value));
  EXPECT_EQ(request.sampling.logit_bias[1].value, 1.5);
}

TEST(OpenAi, ParsesChats) {
  const GenerationRequest request = parse_chat(
      R"({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text",
          "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": null}],
          "max_completion_tokens": 9, "logprobs": true, "top_logprobs": 2, "tools": [], "response_format":
          {"type": "text"}, "state": "name"})");
  ASSERT_EQ(request.messages.size(), 3u);
  EXPECT_EQ(request.messages[0].role, "system");
  EXPECT_EQ(request.messages[1].content, "ab");
  EXPECT_EQ(request.messages[2].content, "");
  EXPECT_EQ(request.max_tokens, 9);
  EXPECT_EQ(request.sampling.log_probabilities, 2);
  EXPECT_EQ(request.sampling.temperature, 1);
  EXPECT_EQ(request.state, "name");
}

TEST(OpenAi, RefusesWhatItCannotDo) {
  for (const char* body :
       {R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]})",
        R"({"messages": [{"role": "tool", "content": "a"}]})", R"({"messages": "a"})", R"({})",
        R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
        R"({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}})",
        R"({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2})",
        R"({"messages": [{"role": "user", "content": "a"}], "logit_bias": {"x": 1}})",
        R"({"messages": [{"role": "user", "content": "a"}], "n": 0})",
        R"({"messages": [{"role": "user", "content": "a"}], "seed": 1.5})"})
    EXPECT_EQ(status_of([&] { parse_chat(body); }), 400) << body;
  for (const char* body : {R"({"prompt": []})", R"({"prompt": ["a", 1]})", R"({"prompt": [-1]})",
                           R"({"prompt": "a", "best_of": 2})", R"({"prompt": "a", "suffix": "b"})",
                           R"({"prompt": "a", "stop": ["1", ""]})", R"({"prompt": "a", "logprobs": 21})"})
    EXPECT_EQ(status_of([&] { parse_completion(body); }), 400) << body;
  EXPECT_EQ(status_of([] { parse_state_request(R"({"name": "a", "text": "b", "fork": "c"})"); }), 400);
}

TEST(OpenAi, NamesTheFieldOfABadValue) {
  const auto field_of = [](const std::string& body) -> std::string {
    try {
      parse_completion(body);
      return "no error";
    } catch (const ApiError& error) {
      return error.param;
    }
  };
  EXPECT_EQ(field_of(R"({"prompt": "a", "max_tokens": "five"})"), "max_tokens");
  EXPECT_EQ(field_of(R"({"prompt": "a", "temperature": -1})"), "temperature");
  EXPECT_EQ(field_of(R"({"prompt": "a", "n": 0})"), "n");
  EXPECT_EQ(field_of(R"({"prompt": "a", "stop": [1]})"), "stop");
  EXPECT_EQ(field_of(R"({"prompt": "a", "stream_options": {"include_usage": 1}})"), "stream_options");
  EXPECT_EQ(field_of("{"), "");
  for (const char* body : {"{}", R"({"messages": []})", R"({"messages": [{"role": "user", "content": 1}]})"}) {
    try {
      parse_chat(body);
      FAIL() << body;
    } catch (const ApiError& error) {
      EXPECT_EQ(error.param, "messages") << body;
    }
  }
}

TEST(OpenAi, WritesValidJsonOfAnyBytes) {
  const AnswerHeader header{true, true, "id", "m", 1};
  AnswerPart part{0, "text \xF0\x9F", {{{{5, -1.5}, {{5, -1.5}}}, "\xF0\x9F", {"\xF0\x9F"}}}, Finish::stop};
  const nlohmann::json answer = nlohmann::json::parse(answer_json(header, {part}, {3, 2, 1}));
  EXPECT_EQ(answer["choices"][0]["logprobs"]["content"][0]["bytes"], nlohmann::json::array({0xF0, 0x9F}));
  EXPECT_EQ(answer["usage"]["total_tokens"], 4);
  EXPECT_EQ(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(nlohmann::json::parse(chunk_json(header, part, 0))["choices"][0]["finish_reason"], "stop");
  // Chunks of plain text have the same fields as others.
  for (const bool chat : {true, false}) {
    const AnswerHeader own{chat, false, "i\"d", "m\\", 7};
    nlohmann::json plain = nlohmann::json::parse(chunk_json(own, {2, "a \"b\"\n\xE9", {}, Finish::none}, 0));
    const nlohmann::json last = nlohmann::json::parse(chunk_json(own, {2, "a \"b\"\n\xE9", {}, Finish::stop}, 0));
    EXPECT_TRUE(plain["choices"][0]["finish_reason"].is_null());
    plain["choices"][0]["finish_reason"] = "stop";
    EXPECT_EQ(plain, last);
  }
  EXPECT_TRUE(nlohmann::json::parse(error_json(429, "m"))["error"]["code"].is_null());
}

}  // namespace
}  // namespace furious
