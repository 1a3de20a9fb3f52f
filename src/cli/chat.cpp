// `furious chat`: a conversation with a model in the terminal.
#include <fmt/format.h>
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/names.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/line_editor.h"
#include "cli/load_flags.h"
#include "cli/progress.h"
#include "cli/sampling_flags.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "decode/text_stream.h"
#include "serve/chat_template.h"
#include "serve/state_store.h"

namespace furious::cli {
namespace {

using serve::ChatMessage;
using serve::ChatTemplate;
using serve::Prompt;
using serve::Snapshot;
using serve::StateStore;

volatile sig_atomic_t interrupted = 0;

// Ctrl-C ends an answer. It also ends a read of the terminal, so system calls are not restarted.
void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = 1; };
  ::sigaction(SIGINT, &action, nullptr);
}

struct ChatCommand {
  std::string model;
  LoadOptions load;
  std::string chat_template, system, state_dir, state;
  uint64_t state_bytes = 20'000'000'000;
  int64_t tokens = 1024;
  Sampling sampling;

  void run() const;
};

// One line of a conversation that can be returned to.
struct Branch {
  std::vector<ChatMessage> messages;
  std::shared_ptr<const Snapshot> base;  // what was read before the first message; nullptr: nothing
  std::string base_name;
};

// What the last answer cost.
struct Turn {
  int64_t prompt = 0, cached = 0, written = 0;
  double read_seconds = 0, write_seconds = 0;
  int64_t state_bytes = 0, tokens = 0;
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double rate(int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// A slot for as long as it is used.
class SlotLease {
 public:
  explicit SlotLease(Decoder& decoder) : decoder_(decoder), slot_(decoder.start()) {}
  ~SlotLease() { decoder_.stop(slot_); }
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
  int32_t number() const { return slot_; }

 private:
  Decoder& decoder_;
  int32_t slot_;
};

class Chat {
 public:
  Chat(const ChatCommand& command, const Model& model, ChatTemplate chat, StateStore& store)
      : command_(command),
        parts_(model.parts()),
        tokenizer_(*parts_.tokenizer),
        chat_(std::move(chat)),
        store_(store),
        decoder_(parts_.language_model, 1, tokenizer_.vocabulary_size()),
        stop_ids_(chat_.stop_ids(tokenizer_)) {
    begin_branch();
  }

  bool handle(const std::string& line);  // false: the end
  void load(const std::string& name);

 private:
  Branch& branch() { return branches_[current_]; }
  void begin_branch();
  void answer(const std::string& question);
  void show_branches() const;
  void go_to(const std::string& number);
  void go_back();
  void save(const std::string& name);
  void show_stats() const;
  void show_states() const;

  Prompt prompt_of(const std::vector<ChatMessage>& messages) const;
  struct Read {
    std::vector<int32_t> ids;  // all that the slot has read
    int64_t cached = 0;        // of the prompt
    bool complete = true;
  };
  Read read(int32_t slot, const Prompt& prompt);
  struct Written {
    std::string text;
    bool ended = false;    // by a token
    bool by_text = false;  // by a text, of which the sequence has read a part
  };
  Written write(int32_t slot, std::vector<int32_t>& ids);

  const ChatCommand& command_;
  const Model::Parts& parts_;
  const Tokenizer& tokenizer_;
  ChatTemplate chat_;
  StateStore& store_;
  Decoder decoder_;
  std::vector<int32_t> stop_ids_;
  std::vector<Branch> branches_;
  size_t current_ = 0;
  Turn last_;
};

void Chat::begin_branch() {
  Branch fresh;
  if (!command_.system.empty()) fresh.messages.push_back({"system", command_.system});
  branches_.push_back(std::move(fresh));
  current_ = branches_.size() - 1;
}

Prompt Chat::prompt_of(const std::vector<ChatMessage>& messages) const {
  const std::shared_ptr<const Snapshot>& base = branches_[current_].base;
  return chat_.prompt(messages, tokenizer_, parts_.start, base ? base->prompt() : Prompt());
}

Chat::Read Chat::read(int32_t slot, const Prompt& prompt) {
  Read result;
  if (const auto match = store_.find(prompt)) {
    decoder_.restore(slot, match->snapshot->restored());
    result.ids = match->snapshot->ids;
    result.cached = static_cast<int64_t>(match->ids);
  }
  const std::span<const int32_t> rest = std::span(prompt.ids).subspan(static_cast<size_t>(result.cached));
  const Decoder::Prompt own{slot, rest};
  if (!rest.empty()) result.complete = decoder_.read({&own, 1}, [](int64_t, int64_t) { return interrupted == 0; });
  result.ids.insert(result.ids.end(), rest.begin(), rest.end());
  return result;
}

Chat::Written Chat::write(int32_t slot, std::vector<int32_t>& ids) {
  Written written;
  TextStream stream(chat_.stop_texts(tokenizer_));
  const auto show = [&](const std::string& piece) {
    // Templates put a space before an answer, which does not belong to it.
    const bool first = written.text.empty();
    written.text +=
        first && chat_.trims() ? piece.substr(std::min(piece.find_first_not_of(" \n"), piece.size())) : piece;
    return std::string_view(written.text).substr(written.text.size() - std::min(written.text.size(), piece.size()));
  };
  for (int64_t i = 0; i < command_.tokens && interrupted == 0; ++i) {
    const int32_t id = decoder_.step({&slot, 1}).wait()[0];
    ids.push_back(id);
    ++last_.written;
    if (std::ranges::find(stop_ids_, id) != stop_ids_.end()) {
      written.ended = true;
      break;
    }
    const std::string piece = stream.push(tokenizer_.piece(id));
    if (!piece.empty()) fmt::print("{}", show(piece));
    std::fflush(stdout);
    if (stream.stopped()) {
      written.by_text = true;
      break;
    }
  }
  const std::string held_back = stream.finish();
  if (!held_back.empty()) fmt::print("{}", show(held_back));
  return written;
}

void Chat::answer(const std::string& question) {
  std::vector<ChatMessage> messages = branch().messages;
  messages.push_back({"user", question});
  const Prompt prompt = prompt_of(messages);
  const SlotLease slot(decoder_);
  last_ = {};
  interrupted = 0;
  auto begin = std::chrono::steady_clock::now();
  Read sequence = read(slot.number(), prompt);
  if (!sequence.complete) return fmt::print("(interrupted while reading)\n");
  last_.prompt = static_cast<int64_t>(prompt.ids.size());
  last_.cached = sequence.cached;
  last_.read_seconds = seconds_since(begin);
  store_.put(sequence.ids, decoder_.contents(slot.number()), prompt.transcript);

  decoder_.set_sampling(slot.number(), command_.sampling);
  begin = std::chrono::steady_clock::now();
  const Written written = write(slot.number(), sequence.ids);
  last_.write_seconds = seconds_since(begin);
  last_.state_bytes = decoder_.bytes(slot.number());
  last_.tokens = decoder_.tokens(slot.number());
  fmt::print("{}\n", interrupted != 0 ? " (stopped)" : "");
  if (!written.by_text)
    store_.put(sequence.ids, decoder_.contents(slot.number()),
               chat_.with_answer(prompt.transcript, written.text, written.ended));
  messages.push_back({"assistant", written.text});
  branch().messages = std::move(messages);
}

void Chat::show_branches() const {
  for (size_t i = 0; i < branches_.size(); ++i) {
    const Branch& one = branches_[i];
    std::string last = "empty";
    for (const ChatMessage& message : one.messages)
      if (message.role == "user") last = printable(message.content.substr(0, 60));
    fmt::print("{} {}: {} messages{}, last: {}\n", i == current_ ? "*" : " ", i + 1, one.messages.size(),
               one.base ? fmt::format(" after \"{}\"", one.base_name) : "", last);
  }
}

void Chat::go_to(const std::string& number) {
  size_t wanted = 0;
  const bool valid = CLI::detail::lexical_cast(number, wanted) && wanted >= 1 && wanted <= branches_.size();
  require(valid, "/branch {}: there are branches 1 to {}; /branches lists them", number, branches_.size());
  current_ = wanted - 1;
  fmt::print("branch {}\n", wanted);
}

void Chat::go_back() {
  std::vector<ChatMessage>& messages = branch().messages;
  const auto is_user = [](const ChatMessage& message) { return message.role == "user"; };
  const auto last = std::find_if(messages.rbegin(), messages.rend(), is_user);
  require(last != messages.rend(), "/back: the branch has no question");
  messages.erase(last.base() - 1, messages.end());
  fmt::print("back before the last question; {} messages\n", messages.size());
}

void Chat::save(const std::string& name) {
  serve::check_state_name(name);
  Branch& own = branch();
  require(own.base || !own.messages.empty(), "/save: nothing was read yet; ask something first");
  if (own.messages.empty()) {
    store_.create(name, own.base);
  } else {
    // An answer that ended by a text has left the sequence in the middle of it: the rest is read again.
    std::vector<ChatMessage> messages = own.messages;
    messages.push_back({messages.back().role == "user" ? "assistant" : "user", "?"});
    if (messages.back().role == "assistant") messages.push_back({"user", "?"});
    const Prompt prompt = ChatTemplate::without_last_message(prompt_of(messages));
    const SlotLease slot(decoder_);
    interrupted = 0;
    const Read sequence = read(slot.number(), prompt);
    require(sequence.complete, "/save: interrupted");
    store_.create(name, sequence.ids, decoder_.contents(slot.number()), prompt.transcript);
  }
  store_.flush();
  const serve::NamedState saved = store_.describe(name);
  fmt::print("saved \"{}\": {} tokens, {} bytes{}\n", name, saved.tokens, saved.bytes,
             saved.on_disk ? "" : ", until this program ends; start it with --state-dir to keep states");
}

void Chat::load(const std::string& name) {
  const std::shared_ptr<const Snapshot> snapshot = store_.state(name);
  Branch fresh;
  if (auto messages = chat_.messages_of(snapshot->transcript)) {
    fresh.messages = std::move(*messages);
  } else {
    fresh.base = snapshot;
    fresh.base_name = name;
    if (!command_.system.empty()) fresh.messages.push_back({"system", command_.system});
  }
  branches_.push_back(std::move(fresh));
  current_ = branches_.size() - 1;
  fmt::print("loaded \"{}\" as branch {}: {} tokens, {} messages\n", name, branches_.size(), snapshot->ids.size(),
             branch().messages.size());
}

void Chat::show_states() const {
  for (const serve::NamedState& state : store_.list())
    fmt::print("{}: {} tokens, {} bytes\n", state.name, state.tokens, state.bytes);
}

void Chat::show_stats() const {
  fmt::print("prompt: {} tokens, {} of them not read again, {:.1f} tokens/s\n", last_.prompt, last_.cached,
             rate(last_.prompt - last_.cached, last_.read_seconds));
  fmt::print("answer: {} tokens, {:.1f} tokens/s\n", last_.written, rate(last_.written, last_.write_seconds));
  const serve::StateStoreStatistics kept = store_.statistics();
  fmt::print("state: {} bytes at {} tokens; {} states of {} bytes in memory, {} of {} bytes on disk\n",
             last_.state_bytes, last_.tokens, kept.host_states, kept.host_bytes, kept.disk_states, kept.disk_bytes);
}

constexpr const char* kHelp =
    "/fork          begin another branch here; this one stays\n"
    "/branches      list the branches\n"
    "/branch N      go to branch N\n"
    "/back          go back before the last question\n"
    "/new           begin an empty branch\n"
    "/save NAME     keep the state under a name\n"
    "/load NAME     go on from a state, as a branch\n"
    "/states        list the states with names\n"
    "/stats         tokens, rates and bytes of the last answer\n"
    "/help          this list\n"
    "/quit          end; so does Ctrl-D\n"
    "Ctrl-C stops an answer. A message that begins with / is written as //.\n";

bool Chat::handle(const std::string& line) {
  if (line.empty()) return true;
  if (line[0] != '/' || line.starts_with("//")) {
    answer(line.substr(line.starts_with("//") ? 1 : 0));
    return true;
  }
  const size_t space = std::min(line.find(' '), line.size());
  const std::string command = line.substr(1, space - 1);
  const std::string argument = line.substr(std::min(line.find_first_not_of(' ', space), line.size()));
  const std::vector<std::string> known = {"fork", "branches", "branch", "back", "new", "save",
                                          "load", "states",   "stats",  "help", "quit"};
  if (std::ranges::find(known, command) == known.end()) unknown_name("command", command, known);
  require(!argument.empty() || (command != "branch" && command != "save" && command != "load"), "/{}: {} is missing",
          command, command == "branch" ? "the number of a branch" : "a name");
  if (command == "quit") return false;
  if (command == "help") fmt::print("{}", kHelp);
  if (command == "branches") show_branches();
  if (command == "branch") go_to(argument);
  if (command == "back") go_back();
  if (command == "save") save(argument);
  if (command == "load") load(argument);
  if (command == "states") show_states();
  if (command == "stats") show_stats();
  if (command == "new") begin_branch();
  if (command == "fork") {
    branches_.push_back(branch());
    current_ = branches_.size() - 1;
  }
  if (command == "new" || command == "fork") fmt::print("branch {}\n", branches_.size());
  return true;
}

void ChatCommand::run() const {
  show_notes(model);
  ChatTemplate chat = chat_template.empty() ? ChatTemplate::of_checkpoint(model) : ChatTemplate::named(chat_template);
  const Model loaded = Model::load(model, load);
  const ThreadLimit limit(load.threads);
  const std::string template_name = chat.name();
  StateStore store(loaded.parts().language_model.config(), loaded.fingerprint(),
                   {.directory = state_dir, .disk_bytes = state_bytes});
  Chat conversation(*this, loaded, std::move(chat), store);
  LineEditor lines;
  if (!state.empty()) conversation.load(state);
  if (lines.terminal()) fmt::print("{}, template {}. /help lists the commands.\n", loaded.arch(), template_name);
  std::fflush(stdout);
  catch_interrupts();
  for (bool go_on = true; go_on;) {
    const std::optional<std::string> line = lines.next("> ");
    if (!line) break;
    try {
      go_on = conversation.handle(*line);
    } catch (const Error& error) {
      fmt::print("{}\n", error.what());
    }
    std::fflush(stdout);
  }
}

}  // namespace

void add_chat(CLI::App& app) {
  auto options = std::make_shared<ChatCommand>();
  CLI::App* command = app.add_subcommand("chat", "Have a conversation with a model in the terminal");
  add_model(*command, options->model);
  command->add_option("--system", options->system, "The system message");
  command->add_option("--chat-template", options->chat_template,
                      fmt::format("How messages become text: {}; default: that of the checkpoint, or plain",
                                  fmt::join(ChatTemplate::names(), ", ")));
  command->add_option("--tokens", options->tokens, "Largest number of tokens of an answer")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_option("--state-dir", options->state_dir,
                      "Keep states in this directory, as `furious serve` does; default: in memory, until the end");
  command->add_option("--state-bytes", options->state_bytes, "Largest number of bytes of files in --state-dir")
      ->transform(CLI::AsSizeValue(true))
      ->capture_default_str();
  command->add_option("--state", options->state, "Begin with the state of this name in --state-dir");
  add_sampling(*command, options->sampling);
  add_text_model_flags(*command, options->load);
  command->footer(
      fmt::format("Commands within the conversation:\n{}"
                  "Without a terminal, every line of the standard input is a message or a command.\n"
                  "Example: furious chat runs/stories --system 'Answer in one sentence.' --state-dir states",
                  kHelp));
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
