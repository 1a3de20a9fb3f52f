// `furious bench serve`: a server with a model of random weights, and clients that stream from it over loopback, beside
// the decoder alone.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "cli/bench_rates.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "serve/server.h"

namespace furious::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Times = std::vector<double>;  // seconds

// Tokens per second of the clock, and per second of all cores: the second is the same on a machine that others use.
struct Rates {
  double per_second = 0, per_cpu_second = 0;
};

double cpu_seconds() {
  struct rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct ServeBench {
  std::string preset = "2mamba", size = "tiny";
  std::vector<int64_t> clients{1, 8, 64};
  int64_t prompt = 64, tokens = 128, vocabulary = 32000, long_prompt = 100000, writers = 4, chunk = 0;
  double long_seconds = 60, temperature = 0, top_p = 1;
  std::string device = "auto", dtype;
  int threads = 0;
  std::string json;

  void run() const;
  Model model() const;
  Sampling sampling() const;
  std::string request_json(int64_t seed, int64_t prompt_tokens, int64_t answer_tokens) const;
  Rates decoder_rates(const Model& model, int64_t batch) const;
  nlohmann::json measure_clients(const Model& model, uint16_t port, int64_t count, int64_t round) const;
  nlohmann::json measure_long_prompt(uint16_t port) const;
};

double percentile(Times times, double part) {
  if (times.empty()) return 0;
  std::ranges::sort(times);
  return times[std::min(times.size() - 1, static_cast<size_t>(part * static_cast<double>(times.size())))];
}

// Ids without meaning, different for every seed, so that no state of another prompt fits.
std::string ids_json(int64_t seed, int64_t length) {
  std::string out = "[";
  for (int64_t i = 0; i < length; ++i) out += fmt::format("{}{}", i == 0 ? "" : ",", (seed * 31 + i * i * 7 + i) % 256);
  return out + "]";
}

// One streamed completion: when each event came.
class StreamedRequest {
 public:
  StreamedRequest(uint16_t port, const std::string& body)
      : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), start_(Clock::now()) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
            "bench serve: no connection to port {}", port);
    std::string bytes =
        fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                    body.size(), body);
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t sent = ::send(socket_, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      require(sent > 0, "bench serve: the server closed the connection");
      at += static_cast<size_t>(sent);
    }
  }
  ~StreamedRequest() { ::close(socket_); }
  StreamedRequest(const StreamedRequest&) = delete;
  StreamedRequest& operator=(const StreamedRequest&) = delete;

  // Until the end, or until `stop`.
  void receive(const std::atomic<bool>* stop = nullptr) {
    std::string buffer(1 << 16, '\0'), text;
    while (text.find("data: [DONE]") == std::string::npos && (stop == nullptr || !stop->load())) {
      const ssize_t count = ::recv(socket_, buffer.data(), buffer.size(), 0);
      require(count > 0, "bench serve: the server closed the connection: {}", text.substr(0, 300));
      text.append(buffer, 0, static_cast<size_t>(count));
      require(!text.starts_with("HTTP/1.1 4") && !text.starts_with("HTTP/1.1 5"), "bench serve: {}",
              text.substr(0, 400));
      const Clock::time_point now = Clock::now();
      for (size_t found; (found = text.find("\"text\":")) != std::string::npos;) {
        events_.push_back(now);
        text.erase(0, found + 7);
      }
    }
  }
  int descriptor() const { return socket_; }
  const std::vector<Clock::time_point>& events() const { return events_; }
  double first() const { return std::chrono::duration<double>(events_.at(0) - start_).count(); }
  Times gaps() const {
    Times gaps;
    for (size_t i = 1; i < events_.size(); ++i)
      gaps.push_back(std::chrono::duration<double>(events_[i] - events_[i - 1]).count());
    return gaps;
  }

 private:
  int socket_;
  Clock::time_point start_;
  std::vector<Clock::time_point> events_;
};

// Threads whose exceptions come out of join().
class ClientThreads {
 public:
  template <class Run>
  void start(Run run) {
    threads_.emplace_back([this, run] {
      try {
        run();
      } catch (...) {
        const std::lock_guard lock(mutex_);
        failure_ = std::current_exception();
      }
    });
  }
  void join() {
    threads_.clear();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
  std::vector<std::jthread> threads_;
};

Model ServeBench::model() const {
  const Device where = usable_device(device);
  const DType type = !dtype.empty() && dtype != "auto" ? dtype_from_name(dtype)
                     : where.is_cpu()                  ? DType::f32
                                                       : DType::bf16;
  LanguageModel language_model(model_config(preset, size, vocabulary), 1, where);
  language_model.set_compute(compute_in(type, where));
  if (type == DType::bf16) language_model.round_weights();
  return Model(std::make_shared<const Model::Parts>(std::move(language_model), load_tokenizer("byte"), false, threads));
}

// Only ASCII is written: eos is never chosen, so that all answers have the same length, and every token is an event,
// since none is a part of a character that waits for the rest.
Sampling ServeBench::sampling() const {
  Sampling sampling{.temperature = temperature, .top_p = top_p};
  for (int32_t id = 128; id < 258; ++id) sampling.logit_bias.push_back({id, -100});
  return sampling;
}

std::string ServeBench::request_json(int64_t seed, int64_t prompt_tokens, int64_t answer_tokens) const {
  nlohmann::json bias;
  for (const LogitBias& one : sampling().logit_bias) bias[std::to_string(one.id)] = one.value;
  return fmt::format(
      R"({{"prompt":{},"max_tokens":{},"temperature":{},"top_p":{},"seed":{},"stream":true,"logit_bias":{}}})",
      ids_json(seed, prompt_tokens), answer_tokens, temperature, top_p, seed, bias.dump());
}

// Of the decoder alone, after the same prompt, which counts for the cores.
Rates ServeBench::decoder_rates(const Model& model, int64_t batch) const {
  const ThreadLimit limit(threads);
  Decoder decoder(model.parts().language_model, batch, model.parts().tokenizer->vocabulary_size());
  std::vector<int32_t> slots;
  const double cpu = cpu_seconds();
  for (int64_t i = 0; i < batch; ++i) {
    slots.push_back(decoder.start());
    decoder.read(slots.back(), std::vector<int32_t>(static_cast<size_t>(prompt), static_cast<int32_t>(i)));
    decoder.set_sampling(slots.back(), sampling());
  }
  const auto write = [&](int64_t count) {
    for (int64_t i = 0; i < count; ++i) (void)decoder.step(slots).wait();
  };
  write(1);  // the first step makes kernels, which the server then finds too
  const Clock::time_point start = Clock::now();
  write(tokens);
  const auto written = static_cast<double>(batch * tokens);
  return {written / std::chrono::duration<double>(Clock::now() - start).count(), written / (cpu_seconds() - cpu)};
}

nlohmann::json ServeBench::measure_clients(const Model& model, uint16_t port, int64_t count, int64_t round) const {
  const Rates alone = decoder_rates(model, count);
  std::vector<std::unique_ptr<StreamedRequest>> requests(static_cast<size_t>(count));
  const Clock::time_point start = Clock::now();
  const double cpu = cpu_seconds();
  {
    ClientThreads threads_of_clients;
    for (int64_t i = 0; i < count; ++i)
      threads_of_clients.start([&, i] {
        requests[i] = std::make_unique<StreamedRequest>(port, request_json(1000 * round + i, prompt, tokens));
        requests[i]->receive();
      });
    threads_of_clients.join();
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const double per_cpu_second = static_cast<double>(count * tokens) / (cpu_seconds() - cpu);
  Times first, gaps;
  Clock::time_point all_write = start, one_ended = Clock::time_point::max();
  for (const auto& request : requests) {
    first.push_back(request->first());
    std::ranges::copy(request->gaps(), std::back_inserter(gaps));
    all_write = std::max(all_write, request->events().front());
    one_ended = std::min(one_ended, request->events().back());
  }
  int64_t within = 0;
  for (const auto& request : requests)
    within += std::ranges::count_if(request->events(),
                                    [&](const auto time) { return time > all_write && time <= one_ended; });
  const double window = std::chrono::duration<double>(one_ended - all_write).count();
  const double steady = window > 0 ? static_cast<double>(within) / window : 0;
  fmt::print("{:>8} {:>10.1f} {:>10.1f} {:>10.1f} {:>7.2f} {:>9.2f} {:>10.1f} {:>10.1f} {:>10.2f} {:>10.2f}\n", count,
             static_cast<double>(count * tokens) / seconds, steady, alone.per_second, steady / alone.per_second,
             per_cpu_second / alone.per_cpu_second, percentile(first, 0.5) * 1e3, percentile(first, 0.99) * 1e3,
             percentile(gaps, 0.5) * 1e3, percentile(gaps, 0.99) * 1e3);
  std::fflush(stdout);
  return {{"clients", count},
          {"tokens_per_second", static_cast<double>(count * tokens) / seconds},
          {"tokens_per_second_while_all_write", steady},
          {"decoder_tokens_per_second", alone.per_second},
          {"tokens_per_cpu_second", per_cpu_second},
          {"decoder_tokens_per_cpu_second", alone.per_cpu_second},
          {"first_token_p50", percentile(first, 0.5)},
          {"first_token_p99", percentile(first, 0.99)},
          {"per_token_p50", percentile(gaps, 0.5)},
          {"per_token_p99", percentile(gaps, 0.99)}};
}

// Time per token of some answers, and of some while a long prompt is read.
nlohmann::json ServeBench::measure_long_prompt(uint16_t port) const {
  const auto times_of = [&](int64_t length) {
    std::atomic<bool> stop{false};
    std::vector<std::unique_ptr<StreamedRequest>> requests(static_cast<size_t>(writers));
    ClientThreads all;
    for (int64_t i = 0; i < writers; ++i)
      all.start([&, i] {
        requests[i] = std::make_unique<StreamedRequest>(port, request_json(900000 + 100 * length + i, prompt, 1 << 20));
        requests[i]->receive(&stop);
      });
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const Clock::time_point begin = Clock::now();
    std::atomic<bool> arrived{false};
    if (length > 0) {
      StreamedRequest request(port, request_json(7, length, 1));
      std::atomic<bool> enough{false};
      std::jthread reader([&] {
        try {
          request.receive(&enough);
          arrived = true;
        } catch (const Error&) {  // the time was over
        }
      });
      while (!arrived && std::chrono::duration<double>(Clock::now() - begin).count() < long_seconds)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (!arrived) ::shutdown(request.descriptor(), SHUT_RDWR);
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(3));
    }
    const Clock::time_point end = Clock::now();
    stop.store(true);
    all.join();
    Times gaps;
    for (const auto& request : requests)
      for (size_t i = 1; i < request->events().size(); ++i)
        if (request->events()[i] > begin && request->events()[i] <= end)
          gaps.push_back(std::chrono::duration<double>(request->events()[i] - request->events()[i - 1]).count());
    return std::tuple(gaps, arrived.load(), std::chrono::duration<double>(end - begin).count());
  };
  const auto [without, none, ignored] = times_of(0);
  const auto [with, arrived, seconds] = times_of(long_prompt);
  const double before = percentile(without, 0.99), after = percentile(with, 0.99);
  fmt::print(
      "\n{} answers: p99 per token {:.2f} ms; while {} tokens arrive ({} after {:.1f} s): {:.2f} ms, {:.2f} times\n",
      writers, before * 1e3, long_prompt, arrived ? "read" : "not all read", seconds, after * 1e3, after / before);
  return {{"writers", writers},         {"per_token_p99", before},        {"per_token_p99_with_long_prompt", after},
          {"long_prompt", long_prompt}, {"long_prompt_seconds", seconds}, {"long_prompt_read", arrived}};
}

void ServeBench::run() const {
  JsonFile file(json);
  const ThreadLimit limit(threads);
  const Model served = model();
  serve::ServerOptions options;
  options.port = 0;
  options.model_name = preset;
  options.most_tokens = 1 << 20;
  options.most_context = 1 << 22;
  options.scheduler.slots = std::max(*std::ranges::max_element(clients), writers + 1);
  options.scheduler.chunk = chunk > 0 ? chunk : serve::default_chunk(served.parts().language_model.device());
  options.store.host_bytes = uint64_t{256} << 20;
  serve::Server server(served, options);
  fmt::print("serve {} {}: {:.1f} M parameters, prompts of {} tokens, answers of {}, chunks of {}\n\n", preset, size,
             static_cast<double>(served.parameters()) / 1e6, prompt, tokens, options.scheduler.chunk);
  fmt::print("{:>8} {:>10} {:>10} {:>10} {:>7} {:>9} {:>10} {:>10} {:>10} {:>10}\n", "clients", "tokens/s", "all write",
             "decoder", "ratio", "cpu ratio", "first p50", "first p99", "token p50", "token p99");
  nlohmann::json rows = nlohmann::json::array();
  for (size_t i = 0; i < clients.size(); ++i)
    rows.push_back(measure_clients(served, server.port(), clients[i], static_cast<int64_t>(i)));
  nlohmann::json result{{"clients", rows}};
  if (long_prompt > 0) result["long_prompt"] = measure_long_prompt(server.port());
  file.write(result);
}

}  // namespace

void add_bench_serve(CLI::App& bench) {
  auto options = std::make_shared<ServeBench>();
  CLI::App* command = bench.add_subcommand("serve", "Measure the server over loopback, beside the decoder alone");
  command->add_option("--preset,--arch", options->preset, "Architecture; `furious presets` lists them")
      ->capture_default_str();
  command->add_option("--size", options->size, "Model size; `furious presets` lists them")->capture_default_str();
  command->add_option("--vocab", options->vocabulary, "Vocabulary size of the model")
      ->check(CLI::Range(258, 1 << 30))
      ->capture_default_str();
  with_commas(command->add_option("--clients", options->clients, "Numbers of clients at a time, with commas"))
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--prompt", options->prompt, "Tokens of a prompt")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "Tokens of an answer")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--long-prompt", options->long_prompt,
                   "Tokens of a prompt that arrives while --writers answers are written; 0: none")
      ->check(CLI::Range(0, 1 << 22))
      ->capture_default_str();
  command->add_option("--writers", options->writers, "Answers that are written while the long prompt arrives")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--long-seconds", options->long_seconds, "Longest time to wait for the long prompt")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_option("--prefill-chunk", options->chunk, "As in `furious serve`; 0: the default")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "Of sampling, also of the decoder alone; 0: greedy")
      ->check(CLI::Range(0.0, 2.0))
      ->capture_default_str();
  command->add_option("--top-p", options->top_p, "Of sampling")->check(CLI::Range(0.0, 1.0))->capture_default_str();
  add_threads(*command, options->threads);
  add_device(*command, options->device);
  add_dtype(*command, options->dtype);
  command->add_option("--json", options->json, "Write the results to this JSON file");
  command->footer(
      "Times are in milliseconds. \"all write\": while all clients receive tokens; \"cpu ratio\": tokens per second "
      "of\n"
      "all cores against the decoder alone, with the time of the clients themselves.\nExample: furious bench serve "
      "--size mini --clients 1,8");
  command->callback([options] { with_memory_advice("use fewer --clients", [&] { options->run(); }); });
}

}  // namespace furious::cli
