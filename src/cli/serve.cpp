// `furious serve`: an OpenAI-compatible server.
#include <fmt/format.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/memory.h"
#include "base/warning.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/load_flags.h"
#include "decode/model_parts.h"
#include "model/checkpoint.h"
#include "serve/server.h"
#include "tensor/arena.h"

namespace furious::cli {
namespace {

constexpr int64_t kMostSlotsCpu = 64, kMostSlotsGpu = 512;

struct ServeCommand {
  std::string model, slots = "auto", chat_template, log_format = "text", name;
  std::string state_bytes = "20GB", host_bytes = "auto", device_bytes = "auto", body_bytes = "16MB";
  LoadOptions load;
  serve::ServerOptions server;
  int64_t prefill_chunk = 0, context = 0;

  void run();
};

// "20GB", "512MiB", "1000000".
uint64_t bytes_of(const std::string& text) {
  size_t used = 0;
  double number = -1;
  try {
    number = std::stod(text, &used);
  } catch (const std::exception&) {
  }
  static const std::pair<const char*, double> kUnits[] = {
      {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  for (const auto& [unit, factor] : kUnits)
    if (number >= 0 && number * factor < 0x1p62 && text.substr(used) == unit)
      return static_cast<uint64_t>(number * factor);
  fail("{} is not a number of bytes; write one such as 20GB", text);
}

std::string bytes_text(int64_t bytes) {
  const auto number = static_cast<double>(bytes);
  return bytes >= 1'000'000'000 ? fmt::format("{:.1f} GB", number / 1e9)
         : bytes >= 1'000'000   ? fmt::format("{:.1f} MB", number / 1e6)
                                : fmt::format("{:.1f} KB", number / 1e3);
}

// As many as fit into half of the memory that is left.
int64_t automatic_slots(int64_t bytes, Device device) {
  return std::clamp<int64_t>(usable_memory(device) / 2 / std::max<int64_t>(bytes, 1), 1,
                             device.is_cpu() ? kMostSlotsCpu : kMostSlotsGpu);
}

// A connection is a descriptor: as many as the system allows.
void raise_descriptor_limit() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

int64_t most_connections() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 512;
  return std::clamp<int64_t>(static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) - 128, 16, 16384);
}

void ServeCommand::run() {
  // Before any thread begins, so that all of them leave the signals to the wait below.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  raise_descriptor_limit();
  show_notes(model);
  const Model loaded = Model::load(model, load);
  const Device device = loaded.parts().language_model.device();
  server.chat =
      chat_template.empty() ? serve::ChatTemplate::of_checkpoint(model) : serve::ChatTemplate::named(chat_template);
  const auto path = std::filesystem::path(model).lexically_normal();
  server.model_name = !name.empty() ? name : (path.has_filename() ? path : path.parent_path()).filename().string();
  server.most_context = context > 0 ? context : server.most_context;
  const int64_t bytes = serve::slot_bytes(loaded, server.most_context);
  server.scheduler.slots = slots == "auto" ? automatic_slots(bytes, device) : std::stoll(slots);
  server.scheduler.chunk = prefill_chunk > 0 ? prefill_chunk : serve::default_chunk(device);
  server.store.disk_bytes = bytes_of(state_bytes);
  server.store.host_bytes = host_bytes == "auto" ? static_cast<uint64_t>(available_memory() / 4) : bytes_of(host_bytes);
  // On a CPU a state in memory of the host is as near as one in a slot.
  server.scheduler.device_bytes = device_bytes != "auto" ? bytes_of(device_bytes)
                                  : device.is_cpu()      ? 0
                                                         : static_cast<uint64_t>(usable_memory(device) / 4);
  server.limits.body_bytes = bytes_of(body_bytes);
  server.limits.connections = most_connections();
  server.json_log = log_format == "json";
  const auto lines = std::make_shared<std::mutex>();
  server.log = [lines](const std::string& line) {
    const std::lock_guard lock(*lines);
    std::fputs((line + "\n").c_str(), stderr);
  };
  server.store.warn = [log = server.log, json = server.json_log](const std::string& line) {
    log(json ? nlohmann::json{{"warning", line}}.dump() : "warning: " + line);
  };
  set_warning_output(server.store.warn);
  serve::Server running(loaded, server);
  fmt::print("furious: serving {} ({}, {:.1f} M parameters) with {} slots of at most {}; page: http://{}:{}/\n",
             server.model_name, loaded.arch(), static_cast<double>(loaded.parameters()) / 1e6, server.scheduler.slots,
             bytes_text(bytes), server.host, running.port());
  std::fflush(stdout);
  int received = 0;
  sigwait(&signals, &received);
  fmt::print("furious: {}: finishing running answers, at most {} s\n", received == SIGINT ? "SIGINT" : "SIGTERM",
             server.drain_seconds);
  std::fflush(stdout);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second one ends the process at once
  running.drain();
}

void add_limits(CLI::App& command, ServeCommand& options) {
  command.add_option("--max-tokens", options.server.most_tokens, "Largest number of tokens of an answer")
      ->check(at_least(1))
      ->capture_default_str();
  command
      .add_option("--max-context", options.context,
                  "Largest number of tokens of a prompt and its answer; 0: 1048576. Models with a KV cache need memory "
                  "for as many in every slot")
      ->check(at_least(0))
      ->capture_default_str();
  command.add_option("--max-body", options.body_bytes, "Largest body of a request")
      ->check(parsed_by(bytes_of))
      ->capture_default_str();
  command
      .add_option("--queue", options.server.scheduler.queue, "Requests that may wait for a slot; more get status 429")
      ->check(at_least(1))
      ->capture_default_str();
  command
      .add_option("--request-seconds", options.server.request_seconds,
                  "Longest time for an answer, with the time that it waits")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      .add_option("--drain-seconds", options.server.drain_seconds,
                  "Time for running answers to end after SIGTERM or SIGINT")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      .add_option("--prefill-chunk", options.prefill_chunk,
                  "Tokens of a prompt that one pass reads; decode steps come between its layers; 0: 256 on a CPU, 1024 "
                  "on a GPU")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

}  // namespace

void add_serve(CLI::App& app) {
  auto options = std::make_shared<ServeCommand>();
  CLI::App* command = app.add_subcommand("serve", "Serve a model over HTTP with OpenAI's API and a chat page");
  add_model(*command, options->model);
  command->add_option("--port", options->server.port, "Port; 0: any free one")->capture_default_str();
  command->add_option("--host", options->server.host, "Address to listen on; 0.0.0.0: all of this machine")
      ->capture_default_str();
  const auto is_slots = [](const std::string& text) {
    int64_t count = 0;
    const bool fits = text == "auto" || (CLI::detail::lexical_cast(text, count) && count >= 1 && count <= 65536);
    require(fits, "{} is not a number of slots from 1 to 65536, nor auto", text);
  };
  command->add_option("--slots", options->slots, "Sequences at a time; auto: as many as fit into half of the memory")
      ->check(parsed_by(is_slots))
      ->capture_default_str();
  command->add_option("--state-dir", options->server.store.directory,
                      "Keep states in this directory, so that they survive a restart; empty: only in memory");
  command->add_option("--state-bytes", options->state_bytes, "Largest size of all states in --state-dir")
      ->check(parsed_by(bytes_of))
      ->capture_default_str();
  command
      ->add_option("--host-bytes", options->host_bytes,
                   "Largest size of all states in memory; auto: a quarter of what is available")
      ->capture_default_str();
  command
      ->add_option("--device-bytes", options->device_bytes,
                   "Largest size of states in slots that no request needs; auto: a quarter of what is available on a "
                   "GPU, none on a CPU")
      ->capture_default_str();
  command->add_flag("--state-bf16", options->server.store.bf16,
                    "Keep states in bf16: half the bytes, but answers after a restored one may differ in rounding");
  command->add_option("--api-key", options->server.api_key, "Key that clients must send")->envname("FURIOUS_API_KEY");
  command->add_option("--chat-template", options->chat_template,
                      "Chat template instead of that of the checkpoint: " +
                          fmt::format("{}", fmt::join(serve::ChatTemplate::names(), ", ")));
  command->add_option("--name", options->name, "Name of the model in the API; default: the last part of its path");
  command->add_option("--log-format", options->log_format, "Format of log lines on stderr: text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->add_flag("--exact", options->server.scheduler.exact,
                    "Decode one sequence at a time, so that no answer depends on how many others are written, to the "
                    "bit; slower");
  add_limits(*command, *options);
  add_text_model_flags(*command, options->load);
  command->footer(
      "Example: furious serve runs/stories --state-dir states\n"
      "         curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\\n"
      "           -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 50}'");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
