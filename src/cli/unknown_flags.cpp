#include "cli/unknown_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "base/names.h"
#include "cli/commands.h"

namespace furious::cli {
namespace {

// What a flag of another program is here. Holds for commands that have `flag`.
struct Hint {
  std::string flag;
  std::string words = {};  // empty: it has the meaning of `flag`
};

constexpr const char* kNoEpochs =
    "there are only --steps; `furious train --dry-run` prints how many steps an epoch has";
constexpr const char* kEveryStep = "there is no such option; every step is logged in log.jsonl";
constexpr const char* kUseBf16 = "use --dtype bf16, which is the default on a GPU";
constexpr const char* kNoWandb = "there is no such option; --log tensorboard writes event files";

const std::map<std::string, Hint> kHints = {
    {"learning-rate", {"lr"}},
    {"batch-size", {"batch"}},
    {"seq-len", {"length"}},
    {"sequence-length", {"length"}},
    {"block-size", {"length"}},
    {"context-length", {"length"}},
    {"max-steps", {"steps"}},
    {"max-iters", {"steps"}},
    {"n-layer", {"layers"}},
    {"num-layers", {"layers"}},
    {"n-head", {"heads"}},
    {"num-heads", {"heads"}},
    {"n-embd", {"hidden"}},
    {"wd", {"weight-decay"}},
    {"warmup-steps", {"warmup"}},
    {"optim", {"optimizer"}},
    {"output-dir", {"out"}},
    {"max-grad-norm", {"grad-clip"}},
    {"gradient-accumulation-steps", {"accumulate"}},
    {"save-total-limit", {"keep"}},
    {"save-steps", {"save-every"}},
    {"eval-steps", {"eval-every"}},
    {"eval-interval", {"eval-every"}},
    {"ema-decay", {"ema"}},
    {"max-new-tokens", {"tokens"}},
    {"temp", {"temperature"}},
    {"log-interval", {"log", kEveryStep}},
    {"log-every", {"log", kEveryStep}},
    {"logging-steps", {"log", kEveryStep}},
    {"epochs", {"steps", kNoEpochs}},
    {"num-epochs", {"steps", kNoEpochs}},
    {"num-train-epochs", {"steps", kNoEpochs}},
    {"fp16", {"dtype", kUseBf16}},
    {"bf16", {"dtype", kUseBf16}},
    {"compile", {"dtype", "there is no such option; nothing needs to be compiled"}},
    {"tokenizer", {"data", "the tokenizer is that of the data, given to `furious tokenize`"}},
    {"num-workers", {"threads", "there is no such option; reading the data needs no processes of its own"}},
    {"dropout", {"steps", "there is no such option; the models have no dropout"}},
    {"wandb", {"log", kNoWandb}},
    {"wandb-log", {"log", kNoWandb}},
    {"wandb-project", {"log", kNoWandb}},
};

// Of the command and its groups of options.
std::vector<std::string> flags_of(const CLI::App& command) {
  std::vector<std::string> names;
  const auto add = [&](const CLI::App& from) {
    for (const CLI::Option* option : from.get_options())
      for (const std::string& name : option->get_lnames()) names.push_back(name);
  };
  add(command);
  for (const CLI::App* group : command.get_subcommands({}))
    if (group->get_name().empty()) add(*group);
  return names;
}

// "furious bench step"
std::string path_of(const CLI::App& command) {
  const std::string name = command.get_name();
  return command.get_parent() ? path_of(*command.get_parent()) + " " + name : name;
}

// What is to be said of an unknown flag.
std::string advice(const std::string& typed, const std::vector<std::string>& known) {
  const auto is_known = [&](const std::string& name) { return std::ranges::find(known, name) != known.end(); };
  std::string name = typed;
  std::ranges::replace(name, '_', '-');
  const auto hint = kHints.find(name);
  if (hint != kHints.end() && is_known(hint->second.flag))
    return hint->second.words.empty() ? fmt::format("; did you mean --{}?", hint->second.flag)
                                      : fmt::format(": {};", hint->second.words);
  std::vector<std::string> candidates = known;
  if (name.size() <= 4)  // to which many are near
    std::erase_if(candidates, [&](const std::string& other) { return other.front() != name.front(); });
  const std::string near = nearest_name(name, candidates);
  return near.empty() ? ";" : fmt::format("; did you mean --{}?", near);
}

}  // namespace

void check_flags(const CLI::App& command, int argc, char** argv) {
  const std::vector<std::string> known = flags_of(command);
  for (int i = 1; i < argc; ++i) {
    const std::string word(argv[i]);
    if (word == "--") return;
    const std::string name = word.starts_with("--") ? word.substr(2, word.find('=') - 2) : "";
    if (name.empty() || std::ranges::find(known, name) != known.end()) continue;
    throw UsageError(
        fmt::format("unknown flag --{}{} `{} --help` lists all", name, advice(name, known), path_of(command)));
  }
}

void check_arguments(const CLI::App& command) {
  std::vector<std::string> left = command.remaining();
  std::erase(left, "--");
  if (!left.empty())
    throw UsageError(
        fmt::format("unexpected: {}; `{} --help` lists what it takes", fmt::join(left, " "), path_of(command)));
}

}  // namespace furious::cli
