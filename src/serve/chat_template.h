// How the messages of a conversation become the tokens that a model was trained with.
//
//   const ChatTemplate chat = ChatTemplate::of_checkpoint("models/tiny");   or
//   ChatTemplate::named("chatml") Prompt prompt = chat.prompt(messages, *tokenizer, start);     ends where the answer
//   begins … generate until one of chat.stop_ids(*tokenizer) or chat.stop_texts(*tokenizer) … store.put(ids, contents,
//   chat.with_answer(prompt.transcript, answer, ended));
//
// Content of messages never becomes a special token, whatever it contains. A boundary (serve/prompt.h) lies after every
// message, before every answer, and between an answer and the token that ends it, since an answer may be cut off. Text
// is tokenized from boundary to boundary: a conversation that goes on has the ids of the shorter one as its prefix.
//
//   plain     User: …\nAssistant: …\n           for models without a template
//   chatml    <|im_start|>user\n…<|im_end|>\n
//   llama2    <s>[INST] <<SYS>>\n…\n<</SYS>>\n\n… [/INST] … </s>
//   llama3    <|start_header_id|>user<|end_header_id|>\n\n…<|eot_id|>
//   mistral   <s>[INST] … [/INST]…</s>
//   zephyr    <|user|>\n…</s>\n
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "serve/prompt.h"

namespace furious::serve {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

class ChatTemplate {
 public:
  enum class Kind { plain, chatml, llama2, llama3, mistral, zephyr };

  static std::vector<std::string> names();
  static ChatTemplate named(std::string_view name);  // an unknown name is an Error that suggests the nearest
  // The checkpoint's own (chat_template.jinja, or "chat_template" in tokenizer_config.json) if it is one of the
  // well-known ones, `plain` if it has none. One that we cannot run is an Error that advises --chat-template.
  // `path`: as for Model::load.
  static ChatTemplate of_checkpoint(const std::filesystem::path& path);
  // The same for the text of a template; errors begin with `origin`.
  static ChatTemplate of_source(std::string_view source, const std::string& origin);

  std::string name() const;
  bool trims() const;  // white space around the content of a message does not count

  // The conversation up to where the answer begins. If the last message is the assistant's, the answer goes on with it.
  // `start`: the id before the first of a document (Model::Parts::start), −1 for none; templates of checkpoints have
  // bos where they say so, and this one nowhere. `before`: what was read already (a named state), which the prompt goes
  // on with, so there is no start. Where it is a conversation of this template its last message is ended, and what
  // stands between messages follows: the ids are those of the whole conversation. Roles or an order that the template
  // does not have are an Error.
  Prompt prompt(std::span<const ChatMessage> messages, const Tokenizer& tokenizer, int32_t start,
                Prompt before = {}) const;

  // Ends of an answer: ids, and texts where the tokenizer has no token for the end. eos is always one.
  std::vector<int32_t> stop_ids(const Tokenizer& tokenizer) const;
  std::vector<std::string> stop_texts(const Tokenizer& tokenizer) const;

  // The transcript after an answer to the prompt. `ended`: by one of stop_ids, which the sequence has read.
  std::string with_answer(std::string prompt_transcript, std::string_view answer, bool ended) const;
  // The conversation of a transcript of this template that ends with a whole message; nothing where it is none.
  std::optional<std::vector<ChatMessage>> messages_of(std::string_view transcript) const;
  // The prompt without the last message and the header of the answer: what was read after the message before it.
  static Prompt without_last_message(Prompt prompt);

 private:
  explicit ChatTemplate(Kind kind) : kind_(kind) {}

  Kind kind_ = Kind::plain;
  std::string default_system_;  // the system message of a conversation without one; empty: none
  bool own_ = false;            // the checkpoint's: texts begin as its tokenizer says
  bool bos_ = false;            // it begins with bos
};

// A text that is not a conversation (completions, a document for a named state), with one boundary at its end.
Prompt text_prompt(std::string_view text, const Tokenizer& tokenizer, int32_t start, Prompt before = {});

}  // namespace furious::serve
