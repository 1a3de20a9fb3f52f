#include "serve/openai.h"

#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "base/names.h"
#include "data/utf8.h"
#include "ops/sampling/sampling.h"

namespace furious::serve {
namespace {

constexpr int64_t kMostChoices = 128;
constexpr size_t kMostStops = 16;
constexpr size_t kMostStopBytes = 1024;
constexpr size_t kMostPrompts = 64;
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr const char* kOrigin = "request";

// Errors of reading JSON become ApiErrors with status 400, which name the field of the request.
template <class Read>
auto as_bad_request(Read&& read) {
  try {
    return read();
  } catch (const JsonError& error) {
    throw ApiError(400, error.what(), "invalid_request", error.place.substr(0, error.place.find_first_of(".[")));
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "invalid_request");
  }
}

double number_in(const JsonValue& value, double low, double high) {
  const double number = value.number();
  if (!(number >= low && number <= high)) value.unexpected(fmt::format("a number from {} to {}", low, high));
  return number;
}

// Fields that would change the answer, each with the values under which they change nothing.
void refuse_unsupported(const JsonValue& request, bool chat) {
  const auto refuse = [](const char* name, std::string_view advice) {
    throw ApiError(400, fmt::format("\"{}\" is not supported; {}", name, advice), "unsupported_parameter", name);
  };
  for (const char* name : {"tools", "functions"})
    if (request.has(name) && !request.at(name).json().empty()) refuse(name, "remove it");
  for (const char* name : {"audio", "prediction", "web_search_options", "suffix"})
    if (request.has(name)) refuse(name, "remove it");
  if (request.has("echo") && request.at("echo").flag()) refuse("echo", "the prompt is not repeated in the answer");
  if (request.has("best_of") && request.at("best_of").integer(0, kMostChoices) > 1) refuse("best_of", "use \"n\"");
  if (request.has("modalities"))
    for (const JsonValue& one : request.at("modalities").items())
      if (one.text() != "text") refuse("modalities", "answers are text");
  if (!chat || !request.has("response_format")) return;
  if (request.at("response_format").at("type").text() != "text") refuse("response_format", "answers are plain text");
}

std::vector<std::string> parse_stop(const JsonValue& value) {
  std::vector<std::string> stop;
  if (value.json().is_string()) {
    stop.push_back(value.text());
  } else {
    for (const JsonValue& one : value.items()) stop.push_back(one.text());
  }
  if (stop.size() > kMostStops) value.unexpected(fmt::format("at most {} strings", kMostStops));
  for (const std::string& text : stop)
    if (text.empty() || text.size() > kMostStopBytes)
      value.unexpected(fmt::format("strings of 1 to {} bytes", kMostStopBytes));
  return stop;
}

std::vector<LogitBias> parse_logit_bias(const JsonValue& value) {
  if (!value.json().is_object()) value.unexpected("an object of token ids and numbers");
  if (value.json().size() > static_cast<size_t>(kMostLogitBiases))
    value.unexpected(fmt::format("at most {} tokens", kMostLogitBiases));
  std::vector<LogitBias> biases;
  for (const auto& [key, number] : value.json().items()) {
    int32_t id = -1;
    const auto end = std::from_chars(key.data(), key.data() + key.size(), id);
    if (end.ptr != key.data() + key.size() || id < 0 || !number.is_number() || std::abs(number.get<double>()) > 100)
      value.unexpected("token ids as keys and numbers from -100 to 100 as values");
    // -100 bans a token, as the API promises.
    const double amount = number.get<double>();
    biases.push_back({id, amount <= -100 ? -INFINITY : amount});
  }
  return biases;
}

void parse_sampling(const JsonValue& request, GenerationRequest& out) {
  Sampling& sampling = out.sampling;
  const auto read = [&](const char* name, double low, double high, double& to) {
    if (request.has(name)) to = number_in(request.at(name), low, high);
  };
  read("temperature", 0, 2, sampling.temperature);
  read("top_p", 0, 1, sampling.top_p);
  if (sampling.top_p == 0) sampling.top_p = 1e-9;  // the most probable token alone
  read("min_p", 0, 1, sampling.min_p);
  read("presence_penalty", -2, 2, sampling.presence_penalty);
  read("frequency_penalty", -2, 2, sampling.frequency_penalty);
  read("repetition_penalty", 1e-3, 1e3, sampling.repetition_penalty);
  if (request.has("top_k")) sampling.top_k = std::max<int64_t>(0, request.at("top_k").integer(-1, 1 << 30));
  if (request.has("logit_bias")) sampling.logit_bias = parse_logit_bias(request.at("logit_bias"));
  if (request.has("seed")) {
    const JsonValue seed = request.at("seed");
    out.seed = seed.json().is_number_unsigned() ? seed.whole() : static_cast<uint64_t>(seed.integer(INT64_MIN, -1));
  }
}

// The fields that completions and chats share.
void parse_common(const JsonValue& request, GenerationRequest& out) {
  refuse_unsupported(request, out.chat);
  if (request.has("model")) out.model = request.at("model").text();
  if (request.has("state")) out.state = request.at("state").text();
  if (request.has("n")) out.n = static_cast<int>(request.at("n").integer(1, kMostChoices));
  for (const char* name : {"max_tokens", "max_completion_tokens"})
    if (request.has(name)) out.max_tokens = request.at(name).integer(0, kMostTokens);
  if (request.has("stop")) out.stop = parse_stop(request.at("stop"));
  if (request.has("stream")) out.stream = request.at("stream").flag();
  if (request.has("stream_options")) {
    const JsonValue options = request.at("stream_options");
    if (options.has("include_usage")) out.include_usage = options.at("include_usage").flag();
  }
  parse_sampling(request, out);
}

std::vector<int32_t> parse_ids(const JsonValue& value) {
  std::vector<int32_t> ids;
  ids.reserve(value.json().size());
  for (const auto& one : value.json()) {
    if (!one.is_number_unsigned() || one.get<uint64_t>() > INT32_MAX) value.unexpected("a list of token ids");
    ids.push_back(one.get<int32_t>());
  }
  return ids;
}

std::vector<PromptText> parse_prompts(const JsonValue& value) {
  if (value.json().is_string()) return {value.text()};
  if (!value.json().is_array()) value.unexpected("a string, a list of strings, or token ids");
  if (value.json().empty()) value.unexpected("at least one prompt");
  if (value.json()[0].is_number()) return {parse_ids(value)};
  if (value.json().size() > kMostPrompts) value.unexpected(fmt::format("at most {} prompts", kMostPrompts));
  std::vector<PromptText> prompts;
  for (const JsonValue& one : value.items()) {
    if (one.json().is_array())
      prompts.emplace_back(parse_ids(one));
    else
      prompts.emplace_back(one.text());
  }
  return prompts;
}

// A text, or a list of parts that are text.
std::string parse_content(const JsonValue& value) {
  if (value.json().is_string()) return value.text();
  if (!value.json().is_array()) value.unexpected("a string or a list of text parts");
  std::string text;
  for (const JsonValue& part : value.items()) {
    const std::string type = part.at("type").text();
    if (type != "text")
      throw ApiError(400, fmt::format("a message has a part of type \"{}\"; this server reads text", printable(type)),
                     "unsupported_parameter", "messages");
    text += part.at("text").text();
  }
  return text;
}

std::vector<ChatMessage> parse_messages(const JsonValue& value) {
  std::vector<ChatMessage> messages;
  for (const JsonValue& one : value.items()) {
    ChatMessage message{one.at("role").text(), {}};
    if (message.role == "developer") message.role = "system";
    if (message.role != "system" && message.role != "user" && message.role != "assistant")
      one.at("role").unexpected("\"system\", \"user\" or \"assistant\"");
    if (one.has("content")) message.content = parse_content(one.at("content"));
    if (one.has("tool_calls") && !one.at("tool_calls").json().empty())
      throw ApiError(400, "\"tool_calls\" is not supported; remove it", "unsupported_parameter", "messages");
    messages.push_back(std::move(message));
  }
  if (messages.empty()) value.unexpected("at least one message");
  return messages;
}

std::string_view name_of(Finish finish) {
  return finish == Finish::length ? "length" : "stop";
}

// A token as text for JSON: parts of a character are shown as U+FFFD; "bytes" has them exactly.
std::string token_text(const std::string& bytes) {
  int64_t replaced = 0;
  return replace_invalid_utf8(bytes, replaced);
}

Json chat_token_json(const std::string& bytes, double log_probability) {
  Json list = Json::array();
  for (const char byte : bytes) list.push_back(static_cast<unsigned char>(byte));
  return {{"token", token_text(bytes)}, {"logprob", log_probability}, {"bytes", list}};
}

Json log_probabilities_json(const AnswerHeader& header, const AnswerPart& part, int64_t text_offset) {
  if (!header.log_probabilities) return nullptr;
  if (header.chat) {
    Json content = Json::array();
    for (const TokenText& one : part.tokens) {
      Json own = chat_token_json(one.bytes, one.token.log_probability);
      own["top_logprobs"] = Json::array();
      for (size_t i = 0; i < one.token.most_probable.size(); ++i)
        own["top_logprobs"].push_back(
            chat_token_json(one.most_probable_bytes[i], one.token.most_probable[i].log_probability));
      content.push_back(own);
    }
    return {{"content", content}, {"refusal", nullptr}};
  }
  Json tokens = Json::array(), logs = Json::array(), best = Json::array(), offsets = Json::array();
  for (const TokenText& one : part.tokens) {
    const std::string text = token_text(one.bytes);
    tokens.push_back(text);
    logs.push_back(one.token.log_probability);
    offsets.push_back(text_offset);
    text_offset += static_cast<int64_t>(utf8_length(text));
    Json own = Json::object();
    for (size_t i = 0; i < one.token.most_probable.size(); ++i)
      own[token_text(one.most_probable_bytes[i])] = one.token.most_probable[i].log_probability;
    best.push_back(own);
  }
  return {{"tokens", tokens}, {"token_logprobs", logs}, {"top_logprobs", best}, {"text_offset", offsets}};
}

Json header_json(const AnswerHeader& header, const char* object) {
  return {{"id", header.id}, {"object", object}, {"created", header.created}, {"model", header.model}};
}

Json usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

const char* chunk_object(const AnswerHeader& header) {
  return header.chat ? "chat.completion.chunk" : "text_completion";
}

Json finish_json(Finish finish) {
  return finish == Finish::none ? Json(nullptr) : Json(name_of(finish));
}

}  // namespace

ApiError too_busy(const std::string& message, int retry_after) {
  ApiError error(429, message, "rate_limit_exceeded");
  error.retry_after = retry_after;
  return error;
}

std::string error_json(int status, std::string_view message, std::string_view code, std::string_view param) {
  const auto text = [](std::string_view words) { return words.empty() ? Json(nullptr) : Json(words); };
  const char* const type = status == 401   ? "authentication_error"
                           : status == 429 ? "rate_limit_error"
                           : status >= 500 ? "server_error"
                                           : "invalid_request_error";
  return dump({{"error", {{"message", message}, {"type", type}, {"param", text(param)}, {"code", text(code)}}}});
}

std::string error_json(const ApiError& error) {
  return error_json(error.status, error.what(), error.code, error.param);
}

GenerationRequest parse_completion(std::string_view body) {
  return as_bad_request([&] {
    const nlohmann::json json = parse_json(body, kOrigin);
    const JsonValue request(json, kOrigin);
    GenerationRequest out;
    parse_common(request, out);
    out.prompts = request.has("prompt") ? parse_prompts(request.at("prompt")) : std::vector<PromptText>{""};
    if (request.has("logprobs"))
      out.sampling.log_probabilities = request.at("logprobs").integer(0, kMostLogProbabilities);
    return out;
  });
}

GenerationRequest parse_chat(std::string_view body) {
  return as_bad_request([&] {
    const nlohmann::json json = parse_json(body, kOrigin);
    const JsonValue request(json, kOrigin);
    GenerationRequest out;
    out.chat = true;
    parse_common(request, out);
    out.messages = parse_messages(request.at("messages"));
    if (request.has("logprobs") && request.at("logprobs").flag()) out.sampling.log_probabilities = 0;
    if (request.has("top_logprobs")) {
      const int64_t count = request.at("top_logprobs").integer(0, kMostLogProbabilities);
      if (out.sampling.log_probabilities < 0) request.at("top_logprobs").unexpected("\"logprobs\": true beside it");
      out.sampling.log_probabilities = count;
    }
    return out;
  });
}

StateRequest parse_state_request(std::string_view body) {
  return as_bad_request([&] {
    const nlohmann::json json = parse_json(body, kOrigin);
    const JsonValue request(json, kOrigin);
    StateRequest out;
    out.name = request.at("name").text();
    if (request.has("text")) out.text = request.at("text").text();
    if (request.has("messages")) out.messages = parse_messages(request.at("messages"));
    if (request.has("response")) out.response = request.at("response").text();
    if (request.has("fork")) out.fork = request.at("fork").text();
    if (request.has("state")) out.state = request.at("state").text();
    const int given = out.text.has_value() + !out.messages.empty() + !out.response.empty() + !out.fork.empty();
    require(given == 1, "request: expected exactly one of \"text\", \"messages\", \"response\" and \"fork\", got {}",
            given);
    return out;
  });
}

std::string answer_json(const AnswerHeader& header, const std::vector<AnswerPart>& choices, const Usage& usage) {
  Json json = header_json(header, header.chat ? "chat.completion" : "text_completion");
  json["choices"] = Json::array();
  for (const AnswerPart& part : choices) {
    Json choice{{"index", part.choice}};
    if (header.chat)
      choice["message"] = {{"role", "assistant"}, {"content", part.text}, {"refusal", nullptr}};
    else
      choice["text"] = part.text;
    choice["logprobs"] = log_probabilities_json(header, part, 0);
    choice["finish_reason"] = finish_json(part.finish);
    json["choices"].push_back(choice);
  }
  json["usage"] = usage_json(usage);
  return dump(json);
}

std::string first_chunk_json(const AnswerHeader& header, int choice) {
  Json json = header_json(header, chunk_object(header));
  Json own{{"index", choice}, {"delta", {{"role", "assistant"}, {"content", ""}}}};
  own["logprobs"] = nullptr;
  own["finish_reason"] = nullptr;
  json["choices"] = Json::array({own});
  return dump(json);
}

std::string chunk_json(const AnswerHeader& header, const AnswerPart& part, int64_t text_offset) {
  if (part.tokens.empty() && part.finish == Finish::none)  // most chunks: written without building a document
    return fmt::format(R"({{"id":{},"object":"{}","created":{},"model":{},"choices":[{{"index":{},)"
                       R"({}{}{},"logprobs":null,"finish_reason":null}}]}})",
                       dump(header.id), chunk_object(header), header.created, dump(header.model), part.choice,
                       header.chat ? R"("delta":{"content":)" : R"("text":)", dump(part.text), header.chat ? "}" : "");
  Json json = header_json(header, chunk_object(header));
  Json own{{"index", part.choice}};
  if (header.chat)
    own["delta"] = part.text.empty() ? Json::object() : Json{{"content", part.text}};
  else
    own["text"] = part.text;
  own["logprobs"] = part.tokens.empty() ? Json(nullptr) : log_probabilities_json(header, part, text_offset);
  own["finish_reason"] = finish_json(part.finish);
  json["choices"] = Json::array({own});
  return dump(json);
}

std::string usage_chunk_json(const AnswerHeader& header, const Usage& usage) {
  Json json = header_json(header, chunk_object(header));
  json["choices"] = Json::array();
  json["usage"] = usage_json(usage);
  return dump(json);
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace furious::serve
