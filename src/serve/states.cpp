// /v1/states: named states.
#include "base/error.h"
#include "serve/server_parts.h"

namespace furious::serve {
namespace {

Json state_json(const NamedState& state) {
  return {{"name", state.name},   {"object", "state"},        {"tokens", state.tokens},  {"bytes", state.bytes},
          {"exact", state.exact}, {"on_disk", state.on_disk}, {"created", state.created}};
}

// The name in /v1/states/NAME and /v1/states/NAME/data; one that is no name is an Error.
std::string name_in(std::string_view path) {
  path.remove_prefix(std::string_view("/v1/states/").size());
  if (path.ends_with("/data")) path.remove_suffix(std::string_view("/data").size());
  check_state_name(path);
  return std::string(path);
}

}  // namespace

void Server::Parts::list_states(const Exchange& exchange) {
  Json list = Json::array();
  for (const NamedState& state : store_.list()) list.push_back(state_json(state));
  const StateStoreStatistics statistics = store_.statistics();
  const Json store{{"host_bytes", statistics.host_bytes},
                   {"disk_bytes", statistics.disk_bytes},
                   {"host_states", statistics.host_states},
                   {"disk_states", statistics.disk_states}};
  respond(exchange, {200, "application/json", dump({{"object", "list"}, {"data", list}, {"store", store}}), {}});
}

void Server::Parts::create_state(const Exchange& exchange) {
  const StateRequest request = parse_state_request(exchange->take_body());
  check_state_name(request.name);
  if (store_.has(request.name))
    throw StateExists(fmt::format("a state \"{}\" exists already; delete it first", request.name));
  if (!request.fork.empty()) {
    check_state_name(request.fork);
    store_.fork(request.fork, request.name);
    return respond(exchange, {200, "application/json", dump(state_json(store_.describe(request.name))), {}});
  }
  Job job;
  job.prompt = !request.response.empty()   ? responses_.find(request.response)
               : !request.messages.empty() ? chat_prompt(request.messages, request.state)
                                           : prompt_of(*request.text, prompt_of_state(request.state));
  // A state ends after the last message: where the next one begins, not where an answer would.
  if (!request.messages.empty() && request.messages.back().role != "assistant" && job.prompt.boundaries.size() > 1) {
    job.prompt.boundaries.pop_back();
    job.prompt.end_at_last_boundary();
  }
  if (static_cast<int64_t>(job.prompt.ids.size()) > options_.most_context)
    throw ApiError(
        400, fmt::format("the text has {} tokens, the server allows {}", job.prompt.ids.size(), options_.most_context),
        "context_length_exceeded");
  job.choices = 0;
  job.name = request.name;
  job.deadline = Clock::now() + std::chrono::seconds(options_.request_seconds);
  const auto ended = std::make_shared<bool>(false);  // of the server's thread
  job.on_end = [this, exchange, ended, name = request.name](const JobResult& result) {
    *ended = true;
    if (result.error) return respond_error(exchange, *result.error);
    try {
      respond(exchange, {200, "application/json", dump(state_json(store_.describe(name))), {}});
    } catch (...) {
      respond_error(exchange, api_error());
    }
  };
  const Scheduler::Ticket ticket = scheduler_->submit(std::move(job));
  exchange->on_gone([this, ticket, ended] {
    if (!*ended) scheduler_->cancel(ticket);
  });
}

void Server::Parts::one_state(const Exchange& exchange) {
  const std::string name = name_in(exchange->request().path);
  if (exchange->request().method == "GET")
    return respond(exchange, {200, "application/json", dump(state_json(store_.describe(name))), {}});
  store_.remove(name);
  respond(exchange, {200, "application/json", dump({{"name", name}, {"object", "state"}, {"deleted", true}}), {}});
}

// Counts the bytes of a download for as long as what it returns is held; an ApiError (429) where there is no space.
std::shared_ptr<const void> Server::Parts::reserve_download(uint64_t bytes) {
  const uint64_t others = downloads_->fetch_add(bytes);
  std::shared_ptr<const void> held(nullptr, [all = downloads_, bytes](const void*) { all->fetch_sub(bytes); });
  if (others > 0 && others + bytes > options_.download_bytes)
    throw too_busy("other downloads of states take all memory for them; try again later", 1);
  return held;
}

void Server::Parts::state_data(const Exchange& exchange) {
  const std::string name = name_in(exchange->request().path);
  if (exchange->request().method == "PUT") {
    const std::string body = exchange->take_body();
    store_.import_state(name, std::as_bytes(std::span(body)));
    return respond(exchange, {200, "application/json", dump(state_json(store_.describe(name))), {}});
  }
  const NamedState state = store_.describe(name);
  const uint64_t in_f32 = state.exact ? state.bytes : 2 * state.bytes;
  std::shared_ptr<const void> held = reserve_download(in_f32);
  const std::vector<std::byte> bytes = store_.export_state(name);
  respond(exchange, {200,
                     "application/octet-stream",
                     {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                     {{"Content-Disposition", fmt::format("attachment; filename=\"{}.state\"", name)}},
                     std::move(held)});
}

}  // namespace furious::serve
