// Completions and chat completions: from a request to jobs of the scheduler, and from their parts to an answer.
#include <algorithm>
#include <ctime>
#include <set>

#include "base/error.h"
#include "base/names.h"
#include "data/utf8.h"
#include "decode/model_parts.h"
#include "serve/server_parts.h"

namespace furious::serve {
namespace {

constexpr int64_t kCompletionTokens = 16;  // where a completion does not say, as in OpenAI's API
constexpr size_t kMostSettled = 4;         // choices of a request whose states are kept

}  // namespace

// An answer while it is written; on the server's thread but for its making.
class Server::Parts::Answer : public std::enable_shared_from_this<Answer> {
 public:
  Answer(Parts& server, Exchange exchange, GenerationRequest request, std::string id)
      : server_(server),
        exchange_(std::move(exchange)),
        request_(std::move(request)),
        header_{request_.chat, request_.sampling.log_probabilities >= 0, std::move(id), server.options_.model_name,
                std::time(nullptr)},
        prompts_(server.prompts_of(request_)),
        choices_(prompts_.size() * static_cast<size_t>(request_.n)),
        written_(choices_.size()),
        open_(prompts_.size()) {
    for (size_t i = 0; i < choices_.size(); ++i) choices_[i].choice = static_cast<int>(i);
  }

  void on_part(size_t prompt, AnswerPart part) {
    part.choice += static_cast<int>(prompt) * request_.n;
    AnswerPart& whole = choices_[static_cast<size_t>(part.choice)];
    if (request_.stream) {
      start_stream();
      if (request_.chat && announced_.insert(part.choice).second)
        exchange_->write(event_of(first_chunk_json(header_, part.choice)));
      exchange_->write(event_of(chunk_json(header_, part, static_cast<int64_t>(utf8_length(whole.text)))));
    } else {
      std::ranges::move(part.tokens, std::back_inserter(whole.tokens));
    }
    whole.text += part.text;
    whole.finish = part.finish;
  }

  void on_end(size_t prompt, JobResult result) {
    usage_.prompt_tokens += result.usage.prompt_tokens;
    usage_.cached_tokens += result.usage.cached_tokens;
    usage_.completion_tokens += result.usage.completion_tokens;
    for (size_t i = 0; i < result.written.size(); ++i)
      written_[prompt * static_cast<size_t>(request_.n) + i] = std::move(result.written[i]);
    if (result.error && !error_) fail(result.error);
    close_jobs(1);
  }

  // After all jobs were submitted, or as many as could be.
  void on_submitted(std::vector<Scheduler::Ticket> tickets, std::shared_ptr<const ApiError> error) {
    const size_t missing = prompts_.size() - tickets.size();
    if (open_ > 0) tickets_ = std::move(tickets);  // otherwise all have ended already
    if (error) fail(error);
    if (error_)
      cancel();
    else if (open_ > 0)
      exchange_->on_gone([self = shared_from_this()] { self->cancel(); });
    close_jobs(missing);
  }

  const GenerationRequest& request() const { return request_; }
  const std::vector<Prompt>& prompts() const { return prompts_; }
  const AnswerHeader& header() const { return header_; }
  const std::vector<AnswerPart>& choices() const { return choices_; }
  const std::vector<std::vector<int32_t>>& written() const { return written_; }
  size_t settled() const { return std::min(choices_.size(), kMostSettled); }
  std::string id_of(size_t choice) const { return choice == 0 ? header_.id : fmt::format("{}:{}", header_.id, choice); }

 private:
  void fail(std::shared_ptr<const ApiError> error) {
    error_ = std::move(error);
    cancel();  // the other prompts of the request
  }
  void cancel() {
    for (const Scheduler::Ticket& ticket : tickets_) server_.scheduler_->cancel(ticket);
  }
  void start_stream() {
    if (!std::exchange(streaming_, true)) exchange_->start_stream("text/event-stream");
  }
  void close_jobs(size_t count) {
    open_ -= count;
    if (count > 0 && open_ == 0) complete();
  }
  void complete() {
    tickets_.clear();
    if (error_ && !streaming_) return server_.respond_error(exchange_, *error_);
    if (!error_)  // before the client knows of it
      for (size_t i = 0; i < settled(); ++i) server_.responses_.expect(id_of(i));
    if (request_.stream) {
      start_stream();
      if (error_) exchange_->write(event_of(error_json(*error_)));
      if (!error_ && request_.include_usage) exchange_->write(event_of(usage_chunk_json(header_, usage_)));
      exchange_->write(event_of("[DONE]"));
      exchange_->finish();
    } else {
      exchange_->respond({200, "application/json", answer_json(header_, choices_, usage_), {}});
    }
    server_.log(exchange_->request(), error_ ? error_->status : 200,
                {{"prompt_tokens", usage_.prompt_tokens},
                 {"cached_tokens", usage_.cached_tokens},
                 {"completion_tokens", usage_.completion_tokens},
                 {"seconds", std::chrono::duration<double>(Clock::now() - start_).count()}});
    if (error_) return;
    server_.settling_.post([&server = server_, self = shared_from_this()] { server.settle(self); });
  }

  Parts& server_;
  const Exchange exchange_;
  const GenerationRequest request_;
  const AnswerHeader header_;
  const std::vector<Prompt> prompts_;
  const Clock::time_point start_ = Clock::now();
  std::vector<AnswerPart> choices_;
  std::vector<std::vector<int32_t>> written_;
  std::vector<Scheduler::Ticket> tickets_;
  size_t open_;  // jobs that have not ended
  Usage usage_;
  std::set<int> announced_;  // choices whose role was sent
  bool streaming_ = false;
  std::shared_ptr<const ApiError> error_;
};

// What a named state has read, as the beginning of a prompt; that of no name is empty.
Prompt Server::Parts::prompt_of_state(const std::string& name) const {
  if (name.empty()) return {};
  check_state_name(name);
  return const_cast<StateStore&>(store_).state(name)->prompt();
}

// `before`: what was read already; empty: this is the start of a document.
Prompt Server::Parts::prompt_of(const PromptText& text, Prompt before) const {
  const Model::Parts& parts = model_.parts();
  if (const auto* const ids = std::get_if<std::vector<int32_t>>(&text)) {
    before.append_ids(*ids);
    return before;
  }
  const std::string& words = std::get<std::string>(text);
  if (words.empty() && !before.ids.empty()) return before;
  return text_prompt(words, *parts.tokenizer, parts.start, std::move(before));
}

Prompt Server::Parts::chat_prompt(const std::vector<ChatMessage>& messages, const std::string& state) const {
  const Model::Parts& parts = model_.parts();
  return options_.chat.prompt(messages, *parts.tokenizer, parts.start, prompt_of_state(state));
}

std::vector<Prompt> Server::Parts::prompts_of(const GenerationRequest& request) const {
  if (!request.model.empty() && request.model != options_.model_name)
    throw ApiError(
        404,
        fmt::format("there is no model \"{}\"; this server has \"{}\"", printable(request.model), options_.model_name),
        "model_not_found", "model");
  if (request.chat) return {chat_prompt(request.messages, request.state)};
  const Prompt before = prompt_of_state(request.state);
  std::vector<Prompt> prompts;
  for (const PromptText& text : request.prompts) prompts.push_back(prompt_of(text, before));
  return prompts;
}

// All but the prompt and the callbacks.
Job Server::Parts::job_of(const GenerationRequest& request) const {
  Job job;
  job.choices = request.n;
  job.sampling = request.sampling;
  job.stop = request.stop;
  job.stream = request.stream;
  job.max_tokens = request.max_tokens.value_or(request.chat ? options_.most_tokens
                                                            : std::min(kCompletionTokens, options_.most_tokens));
  job.deadline = Clock::now() + std::chrono::seconds(options_.request_seconds);
  if (job.max_tokens > options_.most_tokens)
    throw ApiError(400, fmt::format("max_tokens is {}, the server allows {}", job.max_tokens, options_.most_tokens),
                   "invalid_request", "max_tokens");
  if (request.seed) {
    job.sampling.seed = *request.seed;
  } else {
    const std::lock_guard lock(random_mutex_);
    job.sampling.seed = random_();
  }
  if (request.chat) {
    const Tokenizer& tokenizer = *model_.parts().tokenizer;
    job.stop_ids = options_.chat.stop_ids(tokenizer);
    std::ranges::copy(options_.chat.stop_texts(tokenizer), std::back_inserter(job.stop));
  }
  return job;
}

void Server::Parts::generate(const Exchange& exchange) {
  const bool chat = exchange->request().path == "/v1/chat/completions";
  const std::string body = exchange->take_body();
  GenerationRequest request = chat ? parse_chat(body) : parse_completion(body);
  std::string id;
  {
    const std::lock_guard lock(random_mutex_);
    id = fmt::format("{}-{:016x}{:08x}", chat ? "chatcmpl" : "cmpl", random_(), static_cast<uint32_t>(random_()));
  }
  submit(std::make_shared<Answer>(*this, exchange, std::move(request), std::move(id)));
}

void Server::Parts::submit(const std::shared_ptr<Answer>& answer) {
  const GenerationRequest& request = answer->request();
  const Job common = job_of(request);
  std::vector<Job> jobs;
  for (size_t i = 0; i < answer->prompts().size(); ++i) {
    Job& job = jobs.emplace_back(common);
    job.prompt = answer->prompts()[i];
    const auto length = static_cast<int64_t>(job.prompt.ids.size());
    if (length + (request.max_tokens ? job.max_tokens : 1) > options_.most_context)
      throw ApiError(
          400,
          fmt::format("the prompt has {} tokens; with the answer the server allows {}", length, options_.most_context),
          "context_length_exceeded", request.chat ? "messages" : "prompt");
    job.max_tokens = std::min(job.max_tokens, options_.most_context - length);
    // Conversations share their system prompt.
    const bool has_system = request.chat && request.state.empty() && request.messages[0].role == "system";
    if (has_system && !job.prompt.boundaries.empty()) job.keep.push_back(job.prompt.boundaries[0].ids);
    job.on_part = [answer, i](AnswerPart part) { answer->on_part(i, std::move(part)); };
    job.on_end = [answer, i](JobResult result) { answer->on_end(i, std::move(result)); };
  }
  std::vector<Scheduler::Ticket> tickets;
  std::shared_ptr<const ApiError> error;
  try {
    for (Job& job : jobs) tickets.push_back(scheduler_->submit(std::move(job)));
  } catch (const ApiError& refused) {
    error = std::make_shared<const ApiError>(refused);
  }
  http_->post([answer, tickets = std::move(tickets), error] { answer->on_submitted(tickets, error); });
}

// What a choice has read and written, as a prompt.
Prompt Server::Parts::whole_of(const Answer& answer, size_t choice) const {
  const GenerationRequest& request = answer.request();
  if (request.chat) {
    std::vector<ChatMessage> messages = request.messages;
    if (messages.back().role == "assistant")
      messages.back().content += answer.choices()[choice].text;
    else
      messages.push_back({"assistant", answer.choices()[choice].text});
    return chat_prompt(messages, request.state);
  }
  const Prompt& prompt = answer.prompts()[choice / static_cast<size_t>(request.n)];
  std::vector<int32_t> ids = prompt.ids;
  for (const int32_t id : answer.written()[choice])
    if (id != model_.eos()) ids.push_back(id);
  Prompt whole;
  for (const Prompt::Boundary& boundary : prompt.boundaries)  // passes end there as they did before
    whole.boundaries.push_back({boundary.ids, 0});
  whole.append_ids(ids);
  whole.state_ids = prompt.state_ids;
  whole.state_passes = prompt.state_passes;
  return whole;
}

// Remembers what a response has read and written. Of a chat the answer is read once more, as part of a prompt, when
// nothing else is to be done: the next message of the conversation then finds a state with the very ids and passes that
// it would have without one, whatever the generated ids were.
void Server::Parts::settle(const std::shared_ptr<Answer>& answer) {
  for (size_t i = 0; i < answer->settled(); ++i) {
    try {
      Job job;
      job.prompt = whole_of(*answer, i);
      job.choices = 0;
      job.background = true;
      responses_.add(answer->id_of(i), job.prompt);
      if (answer->request().chat) scheduler_->submit(std::move(job));
    } catch (const std::exception&) {  // its state was deleted, or the server ends: the next request reads it all
      responses_.forget(answer->id_of(i));
    }
  }
}

}  // namespace furious::serve
