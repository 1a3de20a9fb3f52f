#include "cli/sampling_flags.h"

#include <fmt/format.h>

#include <string>
#include <vector>

namespace furious::cli {
namespace {

void set_biases(Sampling& sampling, const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    const size_t equal = text.find('=');
    LogitBias bias;
    const bool is_pair = equal != std::string::npos && CLI::detail::lexical_cast(text.substr(0, equal), bias.id) &&
                         CLI::detail::lexical_cast(text.substr(equal + 1), bias.value);
    if (!is_pair) throw CLI::ValidationError("--logit-bias", fmt::format("{} is not ID=VALUE, such as 42=-1.5", text));
    sampling.logit_bias.push_back(bias);
  }
}

std::string top_p_problem(const std::string& text) {
  double value = 0;
  if (CLI::detail::lexical_cast(text, value) && value > 0 && value <= 1) return {};
  return fmt::format(
      "{} is not above 0 and at most 1; for always the most probable token use --temperature 0, for all tokens "
      "--top-p 1",
      text);
}

}  // namespace

void add_sampling(CLI::App& command, Sampling& sampling) {
  command.add_option("--temperature", sampling.temperature, "Sampling temperature; 0: always the most probable token")
      ->check(at_least(0))
      ->capture_default_str();
  command.add_option("--top-k", sampling.top_k, "Sample only from the K most probable tokens; 0: from all")
      ->check(at_least(0))
      ->capture_default_str();
  command
      .add_option("--top-p", sampling.top_p,
                  "Sample only from the most probable tokens that together have this probability; 1: from all")
      ->check(CLI::Validator(top_p_problem, ""))
      ->capture_default_str();
  command
      .add_option(
          "--repetition-penalty", sampling.repetition_penalty,
          "Divide the positive logits of the last 256 tokens by this factor, and multiply the negative ones; 1: off")
      ->check(at_least(1e-3))
      ->capture_default_str();
  command
      .add_option("--min-p", sampling.min_p,
                  "Sample only from tokens with at least this fraction of the largest probability; 0: from all")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command
      .add_option("--frequency-penalty", sampling.frequency_penalty,
                  "Subtract this from the logit of a token for each time it is among the last 256 tokens")
      ->capture_default_str();
  command
      .add_option("--presence-penalty", sampling.presence_penalty,
                  "Subtract this from the logit of a token that is among the last 256 tokens")
      ->capture_default_str();
  command
      .add_option_function<std::vector<std::string>>(
          "--logit-bias", [&sampling](const std::vector<std::string>& texts) { set_biases(sampling, texts); },
          "Add VALUE to the logit of token ID, as ID=VALUE; -inf: never choose it; several with commas")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--seed", sampling.seed, "Seed of the sampling; sequence i uses seed + i - 1")
      ->capture_default_str();
}

}  // namespace furious::cli
