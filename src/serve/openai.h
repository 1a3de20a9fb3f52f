// Requests and answers in the JSON of OpenAI's API, as plain functions of text and values.
//
// A request is checked completely when it is parsed: a field of the wrong type or range, or one that changes the
// meaning of the answer and is not supported (tools, audio, echo), is an ApiError. Other unknown fields are ignored,
// since clients send many.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "furious/model.h"
#include "serve/chat_template.h"

namespace furious::serve {

using Json = nlohmann::ordered_json;

// An answer that is an error: an HTTP status and OpenAI's fields.
struct ApiError : std::runtime_error {
  ApiError(int its_status, const std::string& message, std::string its_code = "", std::string its_param = "")
      : std::runtime_error(message), status(its_status), code(std::move(its_code)), param(std::move(its_param)) {}

  int status;
  std::string code, param;
  int retry_after = 0;  // seconds; 0: not said
};
ApiError too_busy(const std::string& message, int retry_after);  // 429

// {"error": {"message", "type", "param", "code"}}
std::string error_json(int status, std::string_view message, std::string_view code = "", std::string_view param = "");
std::string error_json(const ApiError& error);

using PromptText = std::variant<std::string, std::vector<int32_t>>;  // a text, or token ids

// A request for a completion or a chat completion.
struct GenerationRequest {
  bool chat = false;
  std::string model;                  // empty: not said
  std::vector<PromptText> prompts;    // of a completion, at least one
  std::vector<ChatMessage> messages;  // of a chat, at least one
  std::string state;                  // the named state to continue; empty: none
  int n = 1;
  std::optional<int64_t> max_tokens;
  std::optional<uint64_t> seed;
  Sampling sampling{.temperature = 1, .top_p = 1};  // its seed is not set
  std::vector<std::string> stop;
  bool stream = false;
  bool include_usage = false;  // in a stream
};
GenerationRequest parse_completion(std::string_view body);
GenerationRequest parse_chat(std::string_view body);

// A request for a named state: after a text, after messages, after a finished response, or a copy of another state.
// Exactly one of them is given.
struct StateRequest {
  std::string name;
  std::optional<std::string> text;
  std::vector<ChatMessage> messages;
  std::string response;  // its id
  std::string fork;      // the other state
  std::string state;     // the state that the text or the messages continue; empty: none
};
StateRequest parse_state_request(std::string_view body);

enum class Finish { none, stop, length };

// A written token with the bytes that it stands for.
struct TokenText {
  WrittenToken token;
  std::string bytes;
  std::vector<std::string> most_probable_bytes;
};

// A part of an answer: text of one choice, and its tokens where log-probabilities were asked for.
struct AnswerPart {
  int choice = 0;
  std::string text = {};
  std::vector<TokenText> tokens = {};
  Finish finish = Finish::none;
};

struct Usage {
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
};

// What all parts of an answer have in common.
struct AnswerHeader {
  bool chat = false;
  bool log_probabilities = false;
  std::string id, model;
  int64_t created = 0;  // seconds since 1970
};

std::string answer_json(const AnswerHeader& header, const std::vector<AnswerPart>& choices, const Usage& usage);
// The data of server-sent events. `text_offset`: characters of the choice before this part, for the log-probabilities
// of completions.
std::string first_chunk_json(const AnswerHeader& header, int choice);  // the role; of chats only
std::string chunk_json(const AnswerHeader& header, const AnswerPart& part, int64_t text_offset);
std::string usage_chunk_json(const AnswerHeader& header, const Usage& usage);
inline std::string event_of(std::string_view data) {
  return "data: " + std::string(data) + "\n\n";
}

std::string dump(const Json& json);  // invalid UTF-8 is replaced

}  // namespace furious::serve
