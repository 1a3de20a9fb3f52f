// `furious generate`: continue a prompt with a model.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/load_flags.h"
#include "cli/progress.h"
#include "cli/sampling_flags.h"
#include "furious/model.h"

namespace furious::cli {
namespace {

struct GenerateCommand {
  std::string model;
  LoadOptions load;
  std::optional<std::string> prompt, prompt_file;
  std::optional<std::string> word;  // the prompt; "-": the standard input
  WriteOptions write;
  int sequences = 1;
  std::string save_state, load_state, json;

  std::string prompt_text() const;
  void run() const;
};

// One line for each token, the chosen one first.
void print_log_probabilities(const Model& model, const Text& text) {
  const auto shown = [&](const TokenLogProbability& token) {
    // Quoted, with what cannot be printed escaped or replaced.
    using nlohmann::json;
    const std::string piece = json(model.decode({token.id})).dump(-1, ' ', false, json::error_handler_t::replace);
    return fmt::format("{} {} {:.4f}", token.id, piece, token.log_probability);
  };
  for (const WrittenToken& token : text.log_probabilities) {
    fmt::print("{}", shown(token));
    for (size_t i = 0; i < token.most_probable.size(); ++i)
      fmt::print("{}{}", i == 0 ? "  |  " : ",  ", shown(token.most_probable[i]));
    fmt::print("\n");
  }
}

nlohmann::ordered_json to_json(const TokenLogProbability& token) {
  return {{"id", token.id}, {"log_probability", token.log_probability}};
}

// How fast something went.
struct Rate {
  int64_t tokens = 0;
  double seconds = 0;

  double per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

std::string_view name_of(Ending ending) {
  switch (ending) {
    case Ending::eos:
      return "eos";
    case Ending::stop:
      return "stop";
    case Ending::interrupted:
      return "interrupted";
    default:
      return "tokens";
  }
}

nlohmann::ordered_json to_json(const Text& text) {
  nlohmann::ordered_json json{{"text", text.text}, {"tokens", text.tokens}, {"ending", name_of(text.ending)}};
  for (const WrittenToken& token : text.log_probabilities) {
    nlohmann::ordered_json own = to_json(static_cast<const TokenLogProbability&>(token));
    own["most_probable"] = nlohmann::ordered_json::array();
    for (const TokenLogProbability& other : token.most_probable) own["most_probable"].push_back(to_json(other));
    json["log_probabilities"].push_back(own);
  }
  return json;
}

std::string GenerateCommand::prompt_text() const {
  if (prompt) return *prompt;
  if (word) return *word == "-" ? read_input("/dev/stdin") : *word;
  return prompt_file ? read_input(*prompt_file) : "";
}

void GenerateCommand::run() const {
  if (!prompt && !prompt_file && !word && load_state.empty())
    throw CLI::RequiredError("One of --prompt, --prompt-file, - and --load-state");
  JsonFile file(json);
  if (!save_state.empty()) AtomicFile(save_state, 0);  // a place that cannot be written is said first
  const std::string text = prompt_text();
  const Model loaded = load_and_show("generate", model, load);
  Session session(loaded, sequences);
  if (!load_state.empty()) session.load(load_state);

  Rate reading, writing;
  const int64_t before = session.tokens();
  const Stopwatch read_watch;
  session.read(text);
  reading = {session.tokens() - before, read_watch.seconds()};

  stop_on_signals();
  const Stopwatch write_watch;
  const std::vector<Text> texts = session.write(write, [&](std::string_view piece, int) {
    if (sequences == 1) {
      fmt::print("{}", piece);
      std::fflush(stdout);
    }
    return !stop_requested();
  });
  for (const Text& one : texts) writing.tokens += one.tokens;
  writing.seconds = write_watch.seconds();
  for (size_t i = 0; i < texts.size(); ++i) {
    if (sequences == 1)
      fmt::print("\n");
    else
      fmt::print("=== sequence {}: {} tokens, ended by {} ===\n{}\n", i + 1, texts[i].tokens, name_of(texts[i].ending),
                 texts[i].text);
    print_log_probabilities(loaded, texts[i]);
  }
  std::fflush(stdout);
  if (!save_state.empty()) session.save(save_state);
  fmt::print(
      stderr, "prompt: {} tokens, {:.1f} tokens/s; new: {} tokens, {:.1f} tokens/s; cache: {} bytes at {} tokens\n",
      reading.tokens, reading.per_second(), writing.tokens, writing.per_second(), session.bytes(), session.tokens());

  nlohmann::ordered_json written = nlohmann::ordered_json::array();
  for (const Text& one : texts) written.push_back(to_json(one));
  file.write(nlohmann::ordered_json{{"prompt_tokens", reading.tokens},
                                    {"prompt_seconds", reading.seconds},
                                    {"tokens", writing.tokens},
                                    {"seconds", writing.seconds},
                                    {"cache_bytes", session.bytes()},
                                    {"sequences", written}});
}

}  // namespace

void add_generate(CLI::App& app) {
  auto options = std::make_shared<GenerateCommand>();
  CLI::App* command = app.add_subcommand("generate", "Generate text from a prompt");
  command->add_option("model", options->model, "A checkpoint directory, a training run or a .safetensors file")
      ->required();
  CLI::Option* prompt = command->add_option("--prompt", options->prompt, "The prompt; may be empty");
  CLI::Option* prompt_file =
      command->add_option("--prompt-file", options->prompt_file, "Read the prompt from this file")->excludes(prompt);
  command->add_option("text", options->word, "The prompt, as with --prompt; -: read it from the standard input")
      ->excludes(prompt)
      ->excludes(prompt_file);
  command->add_option("--tokens", options->write.tokens, "Largest number of new tokens")
      ->check(at_least(0))
      ->capture_default_str();
  add_sampling(*command, options->write.sampling);
  command
      ->add_option(
          "--logprobs", options->write.sampling.log_probabilities,
          "After the text, print a line for each token: its id, text and log-probability, and those of the N most "
          "probable tokens, at most 20")
      ->type_name("N")
      ->check(CLI::Range(0, 20));
  command->add_option("--stop", options->write.stop, "Stop before this text is written; may be given several times")
      ->allow_extra_args(false);
  command->add_option("--sequences", options->sequences, "Number of texts to generate from the same prompt")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_option("--save-state", options->save_state, "Save the state (cache) after the last token to this file");
  command->add_option("--load-state", options->load_state,
                      "Start from a state saved by --save-state; the prompt is appended");
  add_text_model_flags(*command, options->load);
  command->add_option("--json", options->json, "Also write the texts and rates to this JSON file");
  command->footer(
      "A text begins with eos, which precedes every document of training data; with bos where the checkpoint was\n"
      "trained so (Llama models, the authors' release, `train --bos`), or with --bos. A single sequence is printed\n"
      "while it is generated, several ones at the end.\n"
      "Example: furious generate runs/stories --prompt 'Once upon a time' --tokens 100 --temperature 0.7");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
