#include "serve/server.h"

#include <fmt/chrono.h>

#include <condition_variable>

#include "base/boundary.h"
#include "base/error.h"
#include "base/names.h"
#include "decode/model_parts.h"
#include "ops/mixer/recurrent.h"
#include "serve/page.h"
#include "serve/server_parts.h"

namespace furious::serve {
namespace {

constexpr std::string_view kStates = "/v1/states/";

// What a path accepts; empty: there is no such path.
std::string_view methods_of(std::string_view path) {
  if (path == "/" || path == "/health" || path == "/metrics" || path == "/v1/models") return "GET, HEAD";
  if (path.starts_with("/v1/models/")) return "GET, HEAD";
  if (path == "/v1/completions" || path == "/v1/chat/completions") return "POST";
  if (path == "/v1/states") return "GET, POST";
  if (!path.starts_with(kStates)) return "";
  return path.ends_with("/data") ? "GET, PUT" : "GET, DELETE";
}

bool accepts(std::string_view methods, std::string_view method) {
  return (", " + std::string(methods) + ",").find(fmt::format(", {},", method)) != std::string::npos;
}

// Compares without telling by its time where the first difference is.
bool same_text(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i] ^ (b.empty() ? 1 : b[i % b.size()]));
  return difference == 0;
}

HttpAnswer answer_of(const ApiError& error) {
  HttpAnswer answer{error.status, "application/json", error_json(error), {}};
  if (error.retry_after > 0) answer.headers.emplace_back("Retry-After", std::to_string(error.retry_after));
  if (error.status == 401) answer.headers.emplace_back("WWW-Authenticate", "Bearer");
  return answer;
}

std::string time_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

}  // namespace

ApiError api_error() {
  try {
    throw;
  } catch (const ApiError& error) {
    return error;
  } catch (const UnknownState& error) {
    return ApiError(404, error.what(), "state_not_found");
  } catch (const StateExists& error) {
    return ApiError(409, error.what(), "state_exists");
  } catch (const StoreFull& error) {
    return ApiError(507, error.what(), "store_full");
  } catch (const Error& error) {
    return ApiError(400, error.what(), "invalid_request");
  } catch (...) {
    return ApiError(500, words_of(std::current_exception()), "internal_error");
  }
}

void FinishedResponses::expect(const std::string& id) {
  const std::lock_guard lock(mutex_);
  expected_.insert(id);
}

void FinishedResponses::forget(const std::string& id) {
  const std::lock_guard lock(mutex_);
  expected_.erase(id);
  changed_.notify_all();
}

void FinishedResponses::add(const std::string& id, Prompt prompt) {
  const std::lock_guard lock(mutex_);
  expected_.erase(id);
  changed_.notify_all();
  ids_ += prompt.ids.size();
  prompts_[id] = std::move(prompt);
  order_.push_back(id);
  while ((ids_ > kMostIds && order_.size() > 1) || order_.size() > kMostResponses) {
    const auto oldest = prompts_.find(order_.front());
    ids_ -= oldest->second.ids.size();
    prompts_.erase(oldest);
    order_.pop_front();
  }
}

Prompt FinishedResponses::find(const std::string& id) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !expected_.contains(id); });
  const auto found = prompts_.find(id);
  if (found == prompts_.end())
    throw ApiError(404,
                   fmt::format("no finished response \"{}\" is known; the server keeps the latest ones", printable(id)),
                   "response_not_found", "response");
  return found->second;
}

Server::Parts::Parts(const Model& model, ServerOptions options)
    : model_(model),
      options_(std::move(options)),
      created_(std::time(nullptr)),
      store_(model.parts().language_model.config(), model.fingerprint(), options_.store) {
  http_ = std::make_unique<HttpServer>(http_options());
  SchedulerOptions scheduler = options_.scheduler;
  scheduler.deliver = [this](Task task) { http_->post(std::move(task)); };
  scheduler.search = [this](Task task) { workers_.post(std::move(task)); };
  scheduler_ = std::make_unique<Scheduler>(model_, &store_, std::move(scheduler));
  http_->start();
}

Server::Parts::~Parts() {
  stopped_.store(true);
  http_->stop_listening();
  wait_for_thread();  // no handler uses the scheduler from here on
  workers_.wait_until_idle();
  settling_.wait_until_idle();
  scheduler_->drain(std::chrono::milliseconds(0));
  wait_for_thread();
  workers_.wait_until_idle();
  settling_.wait_until_idle();
  scheduler_.reset();
  http_.reset();
}

// Returns when the server's thread has done what was posted to it before.
void Server::Parts::wait_for_thread() {
  std::mutex mutex;
  std::condition_variable done;
  bool is_done = false;
  http_->post([&] {
    const std::lock_guard lock(mutex);
    is_done = true;
    done.notify_all();
  });
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return is_done; });
}

void Server::Parts::drain() {
  http_->stop_listening();
  scheduler_->drain(std::chrono::seconds(options_.drain_seconds));
  // The last answers may have left states to save.
  wait_for_thread();
  workers_.wait_until_idle();
  settling_.wait_until_idle();
  scheduler_->drain(std::chrono::seconds(options_.drain_seconds));
  store_.flush();
  for (int i = 0; i < 200 && http_->connections() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

HttpOptions Server::Parts::http_options() {
  HttpOptions http{options_.host, options_.port, options_.limits, {}, {}, {}, {}};
  const auto state = static_cast<uint64_t>(slot_bytes(model_, options_.most_context));
  constexpr uint64_t kMostUpload = uint64_t{4} << 30;
  const uint64_t upload = std::min(state * 2 + (uint64_t{64} << 20), kMostUpload);
  http.body_limit = [this, upload](const HttpRequest& head) {
    const bool is_upload = head.method == "PUT";
    return is_upload ? upload : options_.limits.body_bytes;
  };
  http.refuse = [this](const HttpRequest& head, HttpAnswer& refusal) { return refuse(head, refusal); };
  http.handle = [this](const Exchange& exchange) { handle(exchange); };
  http.error_body = [](int status, std::string_view message) { return error_json(status, message); };
  return http;
}

// Before the body is read: paths, methods, keys, types, and whether there is room for another job.
bool Server::Parts::refuse(const HttpRequest& head, HttpAnswer& answer) const {
  const auto refused = [&](ApiError error) {
    answer = answer_of(error);
    log(head, error.status);
    return true;
  };
  const std::string_view methods = methods_of(head.path);
  if (methods.empty())
    return refused(ApiError(404, fmt::format("there is no {}; docs/serving.md lists the paths", printable(head.path)),
                            "not_found"));
  if (!accepts(methods, head.method)) {
    refused(ApiError(405, fmt::format("{} accepts {}, not {}", printable(head.path), methods, printable(head.method)),
                     "method_not_allowed"));
    answer.headers.emplace_back("Allow", methods);
    return true;
  }
  const bool is_open = head.path == "/" || head.path == "/health";
  if (!options_.api_key.empty() && !is_open && !same_text(head.authorization, "Bearer " + options_.api_key))
    return refused(
        ApiError(401, "a valid API key is needed; send it as \"Authorization: Bearer KEY\"", "invalid_api_key"));
  // A page of another site can make a browser send anything but this type to us without asking first.
  if (head.method == "POST" && !head.content_type.starts_with("application/json"))
    return refused(ApiError(415, "expected the header \"Content-Type: application/json\"", "unsupported_media_type"));
  if (head.method == "POST")
    if (const std::optional<ApiError> refusal = scheduler_->refusal()) return refused(*refusal);
  return false;
}

void Server::Parts::handle(const Exchange& exchange) {
  requests_.fetch_add(1);
  const std::string& path = exchange->request().path;
  const std::string& method = exchange->request().method;
  if (stopped_.load()) return respond_error(exchange, ApiError(503, "the server is shutting down", "shutting_down"));
  if (path == "/v1/completions" || path == "/v1/chat/completions") return on_worker(exchange, &Parts::generate);
  if (path == "/v1/states") return on_worker(exchange, method == "GET" ? &Parts::list_states : &Parts::create_state);
  if (path.starts_with(kStates))
    return on_worker(exchange, path.substr(kStates.size()).ends_with("/data") ? &Parts::state_data : &Parts::one_state);
  if (path == "/") return respond(exchange, {200, "text/html; charset=utf-8", std::string(page_html()), {}});
  if (path == "/health") return respond(exchange, {200, "application/json", R"({"status":"ok"})", {}});
  if (path == "/metrics") return respond(exchange, {200, "text/plain; version=0.0.4", metrics_text(), {}});
  if (path == "/v1/models") return respond(exchange, {200, "application/json", models_json(), {}});
  if (path == "/v1/models/" + options_.model_name)
    return respond(exchange, {200, "application/json", dump(model_json()), {}});
  respond_error(
      exchange,
      ApiError(404, fmt::format("there is no model of this name; this server has \"{}\"", options_.model_name),
               "model_not_found", "model"));
}

void Server::Parts::on_worker(const Exchange& exchange, void (Parts::*work)(const Exchange&)) {
  workers_.post([this, exchange, work] {
    try {
      (this->*work)(exchange);
    } catch (...) {
      respond_error(exchange, api_error());
    }
  });
}

void Server::Parts::respond(const Exchange& exchange, HttpAnswer answer) {
  log(exchange->request(), answer.status);
  exchange->respond(std::move(answer));
}

void Server::Parts::respond_error(const Exchange& exchange, const ApiError& error) {
  errors_.fetch_add(1);
  log(exchange->request(), error.status, {{"error", error.what()}});
  exchange->respond(answer_of(error));
}

void Server::Parts::log(const HttpRequest& request, int status, const Json& more) const {
  if (!options_.log) return;
  if (options_.json_log) {
    Json line{{"time", time_text()}, {"method", request.method}, {"path", request.path}, {"status", status}};
    for (const auto& [key, value] : more.items()) line[key] = value;
    return options_.log(dump(line));
  }
  std::string line =
      fmt::format("{} {} {} {}", time_text(), printable(request.method), printable(request.path), status);
  for (const auto& [key, value] : more.items()) line += fmt::format(" {}={}", key, dump(value));
  options_.log(line);
}

Json Server::Parts::model_json() const {
  return {{"id", options_.model_name},
          {"object", "model"},
          {"created", created_},
          {"owned_by", "furious"},
          {"furious",
           {{"arch", model_.arch()},
            {"parameters", model_.parameters()},
            {"state_bytes", slot_bytes(model_, options_.most_context)},
            {"kv_bytes_per_token", kv_bytes_per_token(model_)},
            {"chat_template", options_.chat.name()},
            {"slots", options_.scheduler.slots},
            {"most_tokens", options_.most_tokens},
            {"most_context", options_.most_context}}}};
}

std::string Server::Parts::models_json() const {
  return dump({{"object", "list"}, {"data", Json::array({model_json()})}});
}

std::string Server::Parts::metrics_text() const {
  std::string out;
  const SchedulerCounters& own = scheduler_->counters();
  const StateStoreStatistics store = store_.statistics();
  const auto counter = [&](std::string_view name, std::string_view help, int64_t value) {
    write_counter(out, fmt::format("furious_{}", name), help, value);
  };
  const auto gauge = [&](std::string_view name, std::string_view help, auto value) {
    write_gauge(out, fmt::format("furious_{}", name), help, static_cast<double>(value));
  };
  counter("requests_total", "HTTP requests", requests_.load());
  counter("request_errors_total", "HTTP requests answered with an error", errors_.load());
  counter("jobs_finished_total", "Jobs that came to their end", own.finished.load());
  counter("jobs_cancelled_total", "Jobs whose client went away", own.cancelled.load());
  counter("jobs_failed_total", "Jobs that ended with an error", own.failed.load());
  counter("jobs_refused_total", "Jobs refused because too many were waiting", own.refused.load());
  counter("prompt_tokens_total", "Tokens of prompts", own.prompt_tokens.load());
  counter("cached_tokens_total", "Tokens of prompts that were not read, since a state had read them",
          own.cached_tokens.load());
  counter("written_tokens_total", "Tokens of answers", own.written_tokens.load());
  counter("steps_total", "Decode steps", own.steps.load());
  gauge("waiting", "Jobs without a slot", own.waiting.load());
  gauge("slots", "Slots", options_.scheduler.slots);
  gauge("used_slots", "Slots in use", own.used_slots.load());
  gauge("warm_slots", "Slots that hold a state for later", own.warm_slots.load());
  gauge("warm_bytes", "Bytes of states in these slots", own.warm_bytes.load());
  gauge("connections", "Open connections", http_->connections());
  write_counters(out, "furious_prompts_from_state_total", "Prompts that started from a state, by where it was", "tier",
                 {{"device", own.from_device.load()}, {"host", own.from_host.load()}, {"disk", own.from_disk.load()}});
  counter("store_hits_total", "Searches of the state store that found a prefix", store.hits);
  counter("store_misses_total", "Searches of the state store that found none", store.misses);
  counter("store_hit_tokens_total", "Tokens that found states had read", store.hit_tokens);
  gauge("store_host_bytes", "Bytes of states in memory", store.host_bytes);
  gauge("store_disk_bytes", "Bytes of states in files", store.disk_bytes);
  gauge("store_host_states", "States in memory", store.host_states);
  gauge("store_disk_states", "States in files", store.disk_states);
  gauge("store_named_states", "Named states", store.named_states);
  counter("store_damaged_files_total", "State files that were damaged and removed", store.damaged_files);
  counter("store_failed_writes_total", "State files that could not be written", store.failed_writes);
  own.first_token.write(out, "furious_time_to_first_token_seconds", "From the request to its first token");
  own.per_token.write(out, "furious_time_per_token_seconds", "Between two tokens of an answer");
  return out;
}

Server::Server(const Model& model, ServerOptions options)
    : parts_(std::make_unique<Parts>(model, std::move(options))) {}
Server::~Server() = default;
uint16_t Server::port() const {
  return parts_->port();
}
void Server::drain() {
  parts_->drain();
}
const SchedulerCounters& Server::counters() const {
  return parts_->counters();
}

int64_t slot_bytes(const Model& model, int64_t tokens) {
  const LanguageModel& own = model.parts().language_model;
  const ModelConfig& config = own.config();
  const MixerSpec spec = config.block.mixer();
  const MixerCache cache(
      spec, {1, config.q_heads, config.k_heads, config.v_heads, config.qk_dim, config.head_dim, config.decays()});
  // Keys and values are bf16 on a GPU that computes in it; counted as f32, since decays and tables come to them.
  const int64_t token =
      config.k_heads * config.qk_dim + config.v_heads * config.head_dim + (spec.decay ? config.decays() : 0);
  const int64_t state = config.states() * state_rows(spec, config.qk_dim) * state_columns(spec, config.head_dim);
  const bool folds = state > 0 && tokens >= cache.first_fold();
  const int64_t kept = spec.window > 0 ? std::min(tokens, spec.window + CachePage::kTokens) : tokens;
  const int64_t numbers = folds ? state + cache.window() * token : kept * token;
  const int64_t conv = config.block.conv_window > 0 ? (config.block.conv_window - 1) * config.qkv_width() : 0;
  return config.layers * (numbers + conv) * 4 + config.vocabulary * 4;
}

int64_t kv_bytes_per_token(const Model& model) {
  const ModelConfig& config = model.parts().language_model.config();
  return config.layers * (config.k_heads * config.qk_dim + config.v_heads * config.head_dim) * 2;
}

}  // namespace furious::serve
