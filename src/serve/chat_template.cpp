#include "serve/chat_template.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/names.h"
#include "model/checkpoint.h"
#include "serve/template_source.h"

namespace furious::serve {
namespace {

namespace fs = std::filesystem;
using Kind = ChatTemplate::Kind;

constexpr std::array<std::pair<std::string_view, Kind>, 6> kNames = {{{"plain", Kind::plain},
                                                                      {"chatml", Kind::chatml},
                                                                      {"llama2", Kind::llama2},
                                                                      {"llama3", Kind::llama3},
                                                                      {"mistral", Kind::mistral},
                                                                      {"zephyr", Kind::zephyr}}};

// Marks of a transcript: bytes that valid UTF-8 does not contain.
constexpr std::string_view kField = "\xFF", kEnd = "\xFE";
constexpr uint64_t kMostSourceBytes = 1 << 20;

bool trims_content(Kind kind) {
  return kind == Kind::plain || kind == Kind::llama2 || kind == Kind::llama3;
}

bool alternates(Kind kind) {
  return kind == Kind::llama2 || kind == Kind::mistral;
}

std::string_view trimmed_end(std::string_view text) {
  const size_t last = text.find_last_not_of(" \t\n\r\f\v");
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

std::string_view trimmed(std::string_view text) {
  text = trimmed_end(text);
  const size_t first = text.find_first_not_of(" \t\n\r\f\v");
  return text.substr(first == std::string_view::npos ? text.size() : first);
}

// Joins text into runs that are tokenized together, up to a special token or a boundary.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, Prompt before)
      : tokenizer_(tokenizer), starts_(before.ids.empty()), prompt_(std::move(before)) {}

  void text(std::string_view text) { run_ += text; }
  void special(std::string_view content) {
    const int32_t id = tokenizer_.special(content);
    if (id < 0) return text(content);
    push(id);
  }
  void bos() {
    if (tokenizer_.bos() >= 0) push_start(tokenizer_.bos());
  }
  void eos() {
    if (tokenizer_.eos() >= 0)
      push(tokenizer_.eos());
    else
      text("</s>");
  }
  // Before the first text of a document, which may have a space put before it.
  void push_start(int32_t id) {
    push(id);
    starts_ = true;
  }
  void transcript(std::string_view more) { prompt_.transcript += more; }
  void boundary() {
    flush();
    const Prompt::Boundary here{prompt_.ids.size(), prompt_.transcript.size()};
    if (prompt_.boundaries.empty() || prompt_.boundaries.back() != here) prompt_.boundaries.push_back(here);
  }
  Prompt finish() {
    boundary();
    return std::move(prompt_);
  }

 private:
  void push(int32_t id) {
    flush();
    prompt_.ids.push_back(id);
    starts_ = false;
  }
  void flush() {
    if (run_.empty()) return;
    const std::vector<int32_t> ids = tokenizer_.encode_literal(run_, starts_);
    prompt_.ids.insert(prompt_.ids.end(), ids.begin(), ids.end());
    starts_ = false;
    run_.clear();
  }

  const Tokenizer& tokenizer_;
  bool starts_;
  std::string run_;
  Prompt prompt_;
};

// What stands before and after the content of a message, and what an answer begins with.
class Renderer {
 public:
  Renderer(Kind kind, Writer& out) : kind_(kind), out_(out) {}

  void open(const std::string& role) {
    switch (kind_) {
      case Kind::chatml:
        out_.special("<|im_start|>");
        return out_.text(role + "\n");
      case Kind::llama3:
        out_.special("<|start_header_id|>");
        out_.text(role);
        out_.special("<|end_header_id|>");
        return out_.text("\n\n");
      case Kind::zephyr:
        out_.special(fmt::format("<|{}|>", role));
        return out_.text("\n");
      case Kind::llama2:
      case Kind::mistral:
        if (role == "user") out_.text("[INST] ");
        return;
      case Kind::plain:
        if (role != "system") out_.text(role == "user" ? "User: " : "Assistant:");
        return;
    }
  }
  // Between the header of an answer, where a snapshot is taken, and its content.
  std::string_view space_before_answer() const {
    return kind_ == Kind::plain || kind_ == Kind::llama2 ? " " : std::string_view();
  }
  void close(const std::string& role) {
    switch (kind_) {
      case Kind::chatml:
        return out_.special("<|im_end|>");
      case Kind::llama3:
        return out_.special("<|eot_id|>");
      case Kind::zephyr:
        return out_.eos();
      case Kind::llama2:
        if (role == "user") return out_.text(" [/INST]");
        out_.text(" ");
        return out_.eos();
      case Kind::mistral:
        if (role == "user") return out_.text(" [/INST]");
        return out_.eos();
      case Kind::plain:
        return out_.text(role == "system" ? "\n\n" : "\n");
    }
  }
  // What follows the token that ends a message: an answer that was generated stops before it.
  void separate(const std::string& role) {
    if (kind_ == Kind::chatml || kind_ == Kind::zephyr) out_.text("\n");
    if (kind_ == Kind::llama2 && role == "assistant") out_.bos();
  }

 private:
  Kind kind_;
  Writer& out_;
};

// The last message of a transcript.
struct LastMessage {
  std::string role;
  bool ended = false;  // otherwise an answer that may go on
};

// Nothing where the transcript does not end with a conversation of the template with this name.
std::optional<LastMessage> last_message(std::string_view transcript, std::string_view name) {
  LastMessage last;
  last.ended = transcript.ends_with(kEnd);
  if (last.ended) transcript.remove_suffix(kEnd.size());
  const size_t content = transcript.rfind(kField);
  if (content == std::string_view::npos || content == 0 || transcript.find(kEnd, content) != std::string_view::npos)
    return std::nullopt;
  const size_t header = transcript.rfind(kField, content - 1);
  if (header == std::string_view::npos) return std::nullopt;
  last.role = transcript.substr(header + 1, content - header - 1);
  if (last.role != "system" && last.role != "user" && last.role != "assistant") return std::nullopt;
  // Back over the messages before it, to the name of their template.
  size_t mark = transcript.rfind(kEnd, header);
  while (mark != std::string_view::npos && mark > 0 && transcript.substr(mark + 1).starts_with(kField))
    mark = transcript.rfind(kEnd, mark - 1);
  if (mark == std::string_view::npos || !transcript.substr(mark + 1).starts_with(fmt::format("{}{}", name, kField)))
    return std::nullopt;
  return last;
}

// The messages as the template has them: default and merged system messages, trimmed content. `previous`: the role of
// the message before them; empty: they begin the conversation.
std::vector<ChatMessage> prepared(Kind kind, std::span<const ChatMessage> messages, const std::string& default_system,
                                  std::string_view previous) {
  require(!messages.empty(), "messages: there are none; send at least one message of the user");
  std::vector<ChatMessage> out;
  const bool begins = previous.empty();
  if (begins && !default_system.empty() && messages[0].role != "system" && messages[0].role != "developer")
    out.push_back({"system", default_system});
  for (const ChatMessage& message : messages) {
    const std::string role = message.role == "developer" ? "system" : message.role;
    require(role == "system" || role == "user" || role == "assistant",
            "messages: the role \"{}\" is not supported; use system, user or assistant", printable(message.role));
    out.push_back({role, std::string(trims_content(kind) ? trimmed(message.content) : message.content)});
  }
  if (!alternates(kind)) return out;
  if (begins && out[0].role == "system") {
    require(out.size() > 1 && out[1].role == "user",
            "messages: this model's template has no system message without a message of the user after it; add one");
    const std::string system = std::move(out[0].content);
    out.erase(out.begin());
    out[0].content = kind == Kind::llama2 ? fmt::format("<<SYS>>\n{}\n<</SYS>>\n\n{}", system, out[0].content)
                                          : fmt::format("{}\n\n{}", system, out[0].content);
  }
  const size_t turn = previous == "user" ? 1 : 0;
  for (size_t i = 0; i < out.size(); ++i)
    require(out[i].role == ((i + turn) % 2 == 0 ? "user" : "assistant"),
            "messages: with this model's template user and assistant must alternate, but message {} is of {}{}", i + 1,
            out[i].role, begins ? "" : fmt::format(", after a state that ends with one of {}", previous));
  return out;
}

}  // namespace

std::vector<std::string> ChatTemplate::names() {
  std::vector<std::string> all;
  for (const auto& [name, kind] : kNames) all.emplace_back(name);
  return all;
}

ChatTemplate ChatTemplate::named(std::string_view name) {
  for (const auto& [known, kind] : kNames)
    if (known == name) return ChatTemplate(kind);
  unknown_name("chat template", name, names());
}

std::string ChatTemplate::name() const {
  for (const auto& [name, kind] : kNames)
    if (kind == kind_) return std::string(name);
  fail("chat template: it has no name");
}

bool ChatTemplate::trims() const {
  return trims_content(kind_);
}

ChatTemplate ChatTemplate::of_source(std::string_view source, const std::string& origin) {
  const std::optional<KnownTemplate> known = recognized(source);
  if (!known) {
    const std::string guess = similar_template(source);
    fail("{}: its chat template is none of the well-known ones ({}), and furious does not run others; {}", origin,
         fmt::join(names(), ", "),
         guess.empty() ? std::string("choose one with --chat-template NAME")
                       : fmt::format("the nearest is probably --chat-template {}", guess));
  }
  ChatTemplate chat = named(known->name);
  chat.default_system_ = known->default_system;
  chat.own_ = true;
  chat.bos_ = known->bos;
  return chat;
}

ChatTemplate ChatTemplate::of_checkpoint(const fs::path& path) {
  const fs::path checkpoint = checkpoint_of(path);
  const fs::path folder = fs::is_directory(checkpoint) ? checkpoint : checkpoint.parent_path();
  const fs::path jinja = folder / "chat_template.jinja", config = folder / "tokenizer_config.json";
  if (fs::exists(jinja)) return of_source(read_text(jinja, kMostSourceBytes), jinja.string());
  if (!fs::exists(config)) return named("plain");
  const nlohmann::json parsed = read_json(config, {.python_words = true});
  const JsonValue json(parsed, config.string());
  if (!json.has("chat_template")) return named("plain");
  const JsonValue value = json.at("chat_template");
  if (!value.json().is_array()) return of_source(value.text(), config.string());
  for (const JsonValue& one : value.items())  // several, with names
    if (one.at("name").text() == "default") return of_source(one.at("template").text(), config.string());
  value.unexpected("a text, or a list with a template named \"default\"");
}

Prompt ChatTemplate::prompt(std::span<const ChatMessage> messages, const Tokenizer& tokenizer, int32_t start,
                            Prompt before) const {
  const std::optional<LastMessage> last = last_message(before.transcript, name());
  const std::vector<ChatMessage> all = prepared(kind_, messages, default_system_, last ? last->role : "");
  const bool begins = before.ids.empty();
  Writer out(tokenizer, std::move(before));
  Renderer render(kind_, out);
  const auto end_message = [&](const std::string& role) {
    render.close(role);
    out.transcript(kEnd);
    out.boundary();
  };
  if (last) {
    if (!last->ended) end_message(last->role);
    render.separate(last->role);
  } else {
    out.transcript(fmt::format("{}{}", kEnd, name()));
  }
  const bool has_bos = kind_ == Kind::llama2 || kind_ == Kind::llama3 || kind_ == Kind::mistral;
  if (begins && (has_bos || bos_ || (own_ && tokenizer.begins_with_bos())))
    out.bos();
  else if (begins && !own_ && start >= 0)
    out.push_start(start);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [role, content] = all[i];
    const bool answer = role == "assistant";
    out.transcript(fmt::format("{}{}{}", kField, role, kField));
    render.open(role);
    if (answer) {
      out.boundary();
      if (!content.empty()) out.text(render.space_before_answer());
    }
    out.text(content);
    out.transcript(content);
    if (answer) out.boundary();
    if (answer && i + 1 == all.size()) return out.finish();  // the model goes on with it
    end_message(role);
    render.separate(role);
  }
  out.transcript(fmt::format("{}assistant{}", kField, kField));
  render.open("assistant");
  return out.finish();
}

std::vector<int32_t> ChatTemplate::stop_ids(const Tokenizer& tokenizer) const {
  std::vector<int32_t> ids;
  const auto add = [&](int32_t id) {
    if (id >= 0 && std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  };
  if (kind_ == Kind::chatml) add(tokenizer.special("<|im_end|>"));
  if (kind_ == Kind::llama3) add(tokenizer.special("<|eot_id|>"));
  add(tokenizer.eos());
  return ids;
}

std::vector<std::string> ChatTemplate::stop_texts(const Tokenizer& tokenizer) const {
  const auto unless_special = [&](const std::string& text) {
    return tokenizer.special(text) >= 0 ? std::vector<std::string>{} : std::vector<std::string>{text};
  };
  switch (kind_) {
    case Kind::plain:
      return {"\nUser:"};
    case Kind::chatml:
      return unless_special("<|im_end|>");
    case Kind::llama3:
      return unless_special("<|eot_id|>");
    default:
      return tokenizer.eos() >= 0 ? std::vector<std::string>{} : std::vector<std::string>{"</s>"};
  }
}

std::string ChatTemplate::with_answer(std::string prompt_transcript, std::string_view answer, bool ended) const {
  if (trims()) answer = prompt_transcript.ends_with(kField) ? trimmed(answer) : trimmed_end(answer);
  prompt_transcript += answer;
  if (ended) prompt_transcript += kEnd;
  return prompt_transcript;
}

std::optional<std::vector<ChatMessage>> ChatTemplate::messages_of(std::string_view transcript) const {
  const std::string begin = fmt::format("{}{}", kEnd, name());
  if (!transcript.starts_with(begin)) return std::nullopt;
  transcript.remove_prefix(begin.size());
  std::vector<ChatMessage> messages;
  while (!transcript.empty()) {
    const size_t role_end = transcript.find(kField, 1), end = transcript.find(kEnd);
    if (!transcript.starts_with(kField) || role_end > end || end == std::string_view::npos) return std::nullopt;
    messages.push_back({std::string(transcript.substr(1, role_end - 1)),
                        std::string(transcript.substr(role_end + 1, end - role_end - 1))});
    transcript.remove_prefix(end + 1);
  }
  return messages;
}

Prompt ChatTemplate::without_last_message(Prompt prompt) {
  size_t end = prompt.transcript.size();
  for (int message = 0; message < 2; ++message) {  // its header and that of the answer, two marks each
    end = prompt.transcript.rfind(kField, end - 1);
    end = end == std::string::npos ? end : prompt.transcript.rfind(kField, end - 1);
    require(end != std::string::npos, "chat template: the prompt has no message");
  }
  std::erase_if(prompt.boundaries, [&](const Prompt::Boundary& boundary) { return boundary.transcript > end; });
  require(!prompt.boundaries.empty(), "chat template: the prompt has only one message");
  prompt.end_at_last_boundary();
  return prompt;
}

Prompt text_prompt(std::string_view text, const Tokenizer& tokenizer, int32_t start, Prompt before) {
  const bool begins = before.ids.empty();
  Writer out(tokenizer, std::move(before));
  if (begins && start >= 0) out.push_start(start);
  out.text(text);
  out.transcript(fmt::format("{}text{}", kField, kField));
  out.transcript(text);
  return out.finish();
}

}  // namespace furious::serve
