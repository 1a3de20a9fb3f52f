// `furious eval`: loss and perplexity of models on token shards, by position, and multiple-choice tasks.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/names.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "cli/load_flags.h"
#include "cli/progress.h"
#include "eval/task.h"
#include "eval/test_loss.h"
#include "model/checkpoint.h"
#include "report/chart.h"
#include "report/table.h"
#include "train/train_data.h"
#include "train/training_checkpoint.h"

namespace furious::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kPicture = "by-position.svg";

struct EvalCommand {
  std::vector<std::string> models, tasks;
  std::string data, json, svg, out;
  LoadOptions load;
  std::string packing, split = "test";
  int64_t length = 0, batch = 8, max_batches = 0;
  bool by_position = false;

  void run();

 private:
  // Of one model on --data.
  struct Loss {
    TestLoss loss;
    double seconds = 0;
    std::vector<PositionLoss> positions;
    Json json;
  };
  BatchOptions batches_for(const std::string& model, const ModelConfig& config) const;
  Loss loss_of(const std::string& model, const std::vector<DataSource>& sources) const;
  void show_losses(const std::vector<Loss>& losses) const;
  void show_positions(const std::vector<Loss>& losses) const;
  std::vector<TaskResult> task_results(size_t model, const std::vector<Task>& all) const;

  std::vector<std::string> names_;  // of the models
};

// The packing and length of training; the defaults of training where they are unknown. A model that expects bos gets
// one document per row, unless --packing is given.
BatchOptions EvalCommand::batches_for(const std::string& model, const ModelConfig& config) const {
  const fs::path folder = fs::path(model).lexically_normal();
  const fs::path checkpoint = folder.filename() == kAverageFolder ? folder.parent_path() : folder;
  const bool is_known = fs::exists(checkpoint / "training.safetensors");
  const TrainOptions trained = is_known ? saved_options(checkpoint.string()) : TrainOptions();
  const bool bos = load.bos || (is_known ? trained.bos : config.bos);
  BatchOptions options;
  options.batch = batch;
  options.length = length > 0 ? length : trained.length;
  options.packing = packing_from_name(!packing.empty() ? packing : bos ? name_of(Packing::rows) : trained.packing);
  options.bos = bos && options.packing == Packing::rows;
  options.order = Order::once;
  require(!load.bos || options.bos, "eval: --bos needs one document per row; use --packing rows");
  return options;
}

EvalCommand::Loss EvalCommand::loss_of(const std::string& model, const std::vector<DataSource>& sources) const {
  const Dataset& dataset = *sources.front().dataset;  // the others have the same tokenizer
  const Device where = usable_device(load.device);
  const bool bf16 = load.dtype == "bf16" || ((load.dtype.empty() || load.dtype == "auto") && !where.is_cpu());
  dataset.check_tokenizer_of(model);
  show_notes(model);
  const ModelConfig config = load_config(model, load.arch, load.heads);
  const BatchOptions options = batches_for(model, config);
  const Split part = split == name_of(Split::test) ? Split::test : Split::train;
  const SourceBatches all = once_batches(sources, part, options);
  const int64_t steps = max_batches > 0 ? std::min(max_batches, all.steps) : all.steps;
  ProgressLine loading("eval");
  LanguageModel language_model = load_model(model, load.arch, where, load.heads, show_loading(loading));
  loading.clear();
  language_model.set_compute(compute_in(bf16 ? DType::bf16 : DType::f32, where));

  Loss found;
  found.positions = position_losses(options.length);
  ProgressLine line("eval");
  int64_t done = 0;
  const auto progress = [&](int64_t count, const TestLoss& so_far) {
    done = count;
    if (line.due())
      line.show(
          fmt::format("batch {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left", count, steps, so_far.mean(),
                      static_cast<double>(so_far.tokens) / line.seconds(),
                      clock_text(line.seconds() * static_cast<double>(steps - count) / static_cast<double>(count))));
    return !stop_requested();
  };
  found.loss = test_loss(language_model, *all.batches, steps, dataset.tokenizer().get(), progress, &found.positions);
  const TestLoss& loss = found.loss;
  const double seconds = found.seconds = line.seconds();
  line.clear();
  require(loss.tokens > 0, "eval: {} has no token to predict; give data with at least two tokens",
          dataset.tokens(part).name());
  fmt::print("loss            {:.5f} per token\nperplexity      {:.4f}\n", loss.mean(), loss.perplexity());
  fmt::print("loss            {:.5f} per byte of text\nbits            {:.5f} per byte of text\n", loss.per_byte(),
             loss.bits_per_byte());
  fmt::print("predicted       {} tokens, {} bytes of text; {} of {} batches of {} x {} ({}, {}{})\n", loss.tokens,
             loss.text_bytes, done, all.steps, batch, options.length, split, name_of(options.packing),
             options.bos ? ", bos" : "");
  fmt::print("time            {:.1f} s, {:.0f} tokens/s\n", seconds, static_cast<double>(loss.tokens) / seconds);
  found.json = {{"loss", loss.mean()},
                {"perplexity", loss.perplexity()},
                {"loss_per_byte", loss.per_byte()},
                {"bits_per_byte", loss.bits_per_byte()},
                {"tokens", loss.tokens},
                {"text_bytes", loss.text_bytes},
                {"batches", done},
                {"batch", batch},
                {"length", options.length},
                {"packing", name_of(options.packing)},
                {"bos", options.bos},
                {"split", split},
                {"seconds", seconds}};
  if (by_position)
    for (const PositionLoss& place : found.positions)
      if (place.tokens > 0)
        found.json["by_position"].push_back(
            {{"first", place.first}, {"last", place.last}, {"tokens", place.tokens}, {"loss", place.mean()}});
  return found;
}

// The losses of several models side by side.
void EvalCommand::show_losses(const std::vector<Loss>& losses) const {
  if (losses.size() < 2) return;
  Table table{{"model", "loss", "perplexity", "loss/byte", "bits/byte", "tokens", "bytes", "tokens/s"}, {}};
  for (size_t i = 0; i < losses.size(); ++i) {
    const TestLoss& loss = losses[i].loss;
    table.rows.push_back({names_[i], fmt::format("{:.5f}", loss.mean()), fmt::format("{:.4f}", loss.perplexity()),
                          fmt::format("{:.5f}", loss.per_byte()), fmt::format("{:.5f}", loss.bits_per_byte()),
                          fmt::format("{}", loss.tokens), fmt::format("{}", loss.text_bytes),
                          fmt::format("{:.0f}", static_cast<double>(loss.tokens) / losses[i].seconds)});
  }
  fmt::print("\n{}", to_text(table));
}

// A row for each range of positions, a column for each model; and the same as a picture.
void EvalCommand::show_positions(const std::vector<Loss>& losses) const {
  const auto longest = std::ranges::max_element(
      losses, {}, [](const Loss& loss) { return loss.positions.back().last; });  // models may differ in length
  Table table{{"tokens before"}, {}};
  for (const std::string& name : names_) {
    table.header.push_back(names_.size() == 1 ? "loss" : name);
    if (names_.size() == 1) table.header.insert(table.header.end(), {"perplexity", "tokens"});
  }
  for (size_t i = 0; i < longest->positions.size(); ++i) {
    const PositionLoss& place = longest->positions[i];
    std::vector<std::string> row{place.first == place.last ? fmt::format("{}", place.first)
                                                           : fmt::format("{} to {}", place.first, place.last)};
    for (const Loss& loss : losses) {
      const bool here = i < loss.positions.size() && loss.positions[i].tokens > 0;
      const double mean = here ? loss.positions[i].mean() : 0;
      row.push_back(here ? fmt::format("{:.4f}", mean) : "-");
      if (names_.size() > 1) continue;
      row.push_back(here ? fmt::format("{:.2f}", std::exp(mean)) : "-");
      row.push_back(fmt::format("{}", loss.positions[i].tokens));
    }
    table.rows.push_back(std::move(row));
  }
  fmt::print("\n{}", to_text(table));

  Chart chart{"Loss by position", "tokens before the predicted one", "loss per token", true, false, {}, {}};
  for (size_t i = 0; i < losses.size(); ++i) {
    Series series{names_[i], {}, {}};
    for (const PositionLoss& place : losses[i].positions) {
      if (place.tokens == 0) continue;
      series.x.push_back(std::sqrt(static_cast<double>(place.first) * static_cast<double>(place.last)));
      series.y.push_back(place.mean());
    }
    chart.series.push_back(std::move(series));
  }
  write_text(svg.empty() ? kPicture : svg, to_svg(chart));
  fmt::print("\nchart: {}\n", svg.empty() ? kPicture : svg);
}

std::string percent(const Estimate& rate) {
  return std::isfinite(rate.error) ? fmt::format("{:.2f} ± {:.2f}", 100 * rate.value, 100 * rate.error)
                                   : fmt::format("{:.2f}", 100 * rate.value);
}

Json to_json(const Estimate& estimate) {
  return {{"value", estimate.value}, {"error", std::isfinite(estimate.error) ? Json(estimate.error) : Json()}};
}

Json to_json(const TaskResult& result) {
  Json json{{"task", result.name}, {"examples", result.examples.size()}, {"acc", to_json(result.acc())}};
  if (result.has_one_choice()) {
    json["perplexity"] = to_json(result.perplexity());
  } else {
    json["acc_norm"] = to_json(result.acc_norm());
    json["acc_token"] = to_json(result.acc_token());
  }
  return json;
}

// A line for each example.
std::string example_lines(const std::string& model, const TaskResult& result) {
  std::string lines;
  for (size_t i = 0; i < result.examples.size(); ++i) {
    const ExampleScore& example = result.examples[i];
    Json choices = Json::array();
    for (const ChoiceScore& choice : example.choices)
      choices.push_back(
          {{"log_likelihood", choice.log_likelihood}, {"tokens", choice.tokens}, {"bytes", choice.bytes}});
    Json line{{"model", model}, {"task", result.name}, {"example", i}, {"answer", example.answer}};
    if (result.has_one_choice()) {
      line["greedy"] = example.choices[0].greedy;
    } else {
      line["best"] = example.best();
      line["best_per_byte"] = example.best_per_byte();
      line["best_per_token"] = example.best_per_token();
    }
    line["choices"] = choices;
    lines += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return lines;
}

std::vector<TaskResult> EvalCommand::task_results(size_t model, const std::vector<Task>& all) const {
  const Model loaded = load_and_show("eval", models[model], load);
  std::vector<TaskResult> results;
  for (const Task& task : all) {
    if (stop_requested()) break;
    ProgressLine line("eval");
    results.push_back(run_task(loaded, task, [&](int64_t done) {
      const auto examples = static_cast<double>(task.examples.size());
      if (line.due())
        line.show(fmt::format("{}  {}  example {}/{}  {} left", names_[model], task.name, done, task.examples.size(),
                              clock_text(line.seconds() * (examples / static_cast<double>(done) - 1))));
      return !stop_requested();
    }));
  }
  return results;
}

void show_tasks(const std::vector<std::string>& names, const std::vector<std::vector<TaskResult>>& results) {
  Table choice{{"model", "task", "examples", "acc %", "acc_norm %", "acc_token %"}, {}};
  Table completion{{"model", "task", "examples", "acc %", "perplexity"}, {}};
  for (size_t i = 0; i < results.size(); ++i)
    for (const TaskResult& result : results[i]) {
      const std::string count = fmt::format("{}", result.examples.size());
      if (!result.has_one_choice()) {
        choice.rows.push_back({names[i], result.name, count, percent(result.acc()), percent(result.acc_norm()),
                               percent(result.acc_token())});
        continue;
      }
      const Estimate perplexity = result.perplexity();
      completion.rows.push_back({names[i], result.name, count, percent(result.acc()),
                                 std::isfinite(perplexity.error)
                                     ? fmt::format("{:.4g} ± {:.2g}", perplexity.value, perplexity.error)
                                     : fmt::format("{:.4g}", perplexity.value)});
    }
  for (Table* table : {&choice, &completion}) {
    if (table->rows.empty()) continue;
    if (names.size() == 1) {
      table->header.erase(table->header.begin());
      for (auto& row : table->rows) row.erase(row.begin());
    }
    fmt::print("\n{}", to_text(*table));
  }
}

void EvalCommand::run() {
  if (data.empty() && tasks.empty()) throw CLI::RequiredError("One of --data and --task");
  require(!by_position || !data.empty(), "eval: --by-position needs a text to predict; give --data");
  require(out.empty() || !tasks.empty(), "eval: --out saves the examples of tasks; give --task");
  JsonFile file(json);
  std::optional<AtomicFile> examples;
  if (!out.empty()) examples.emplace(out);
  const ThreadLimit limit(load.threads);
  names_ = distinguishing_names({models.begin(), models.end()});
  std::vector<Task> all;
  for (const std::string& path : tasks) all.push_back(read_task(path));
  for (std::string& model : models) model = checkpoint_of(model).string();
  std::vector<DataSource> sources;
  if (!data.empty()) sources = open_sources(data);
  stop_on_signals();
  std::vector<Loss> losses;
  std::vector<std::vector<TaskResult>> results;
  std::vector<Json> reports;
  for (size_t i = 0; i < models.size() && !stop_requested(); ++i) {
    if (models.size() > 1 && !sources.empty()) fmt::print("{}== {} ==\n", i == 0 ? "" : "\n", names_[i]);
    Json report;
    if (models.size() > 1) report["model"] = names_[i];
    if (!sources.empty()) {
      losses.push_back(loss_of(models[i], sources));
      report.update(losses.back().json);
    }
    if (!all.empty()) {
      results.push_back(task_results(i, all));
      report["tasks"] = Json::array();
      for (const TaskResult& result : results.back()) {
        report["tasks"].push_back(to_json(result));
        if (examples) examples->write(example_lines(names_[i], result));
      }
    }
    reports.push_back(std::move(report));
  }
  if (reports.empty()) return;  // stopped
  names_.resize(reports.size());
  show_losses(losses);
  if (by_position) show_positions(losses);
  show_tasks(names_, results);
  if (examples) examples->commit();
  file.write(models.size() == 1 ? reports.front() : Json{{"models", reports}});
}

}  // namespace

void add_eval(CLI::App& app) {
  auto options = std::make_shared<EvalCommand>();
  CLI::App* command =
      app.add_subcommand("eval", "Compute the loss of models on token shards, and score multiple-choice tasks");
  command->add_option("model", options->models, "Checkpoint directories, training runs or .safetensors files")
      ->required();
  command->add_option(
      "--data", options->data,
      "Folder of token shards, written by `furious tokenize`; several as in training, web:0.7,book:0.3");
  command->add_option("--split", options->split, "Split of the data: test or train")
      ->check(CLI::IsMember({"test", "train"}))
      ->capture_default_str();
  command
      ->add_option("--length", options->length,
                   "Number of tokens in a row; default: as in training, or 512 where that is unknown")
      ->check(CLI::Range(1, 1 << 26));
  command->add_option("--batch", options->batch, "Number of rows in a batch")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--packing", options->packing,
                   "packed: windows over the concatenated documents; isolated: the same, with attention limited to "
                   "the document; rows: one document per row. Default: as in training; where that is unknown, rows for "
                   "models that expect bos, and packed for others")
      ->check(CLI::IsMember({"packed", "isolated", "rows"}));
  command->add_option("--max-batches", options->max_batches, "Stop after this number of batches; 0: all batches")
      ->check(at_least(0))
      ->capture_default_str();
  command->add_flag("--by-position", options->by_position,
                    "Also show the loss by the number of tokens before the predicted one, as a table and a chart");
  command->add_option("--svg", options->svg, fmt::format("Chart of --by-position; default: {}", kPicture));
  command
      ->add_option("--task", options->tasks,
                   "A .jsonl file with context, choices and answer on each line; may be given several times")
      ->allow_extra_args(false);
  command->add_option("--out", options->out, "Write the scores of every example of the tasks to this .jsonl file");
  add_text_model_flags(*command, options->load);
  add_json(*command, options->json, "Write the results to this JSON file");
  command->footer(
      "acc: the right choice has the largest log-likelihood; acc_norm: per byte; acc_token: per token; with ± the\n"
      "standard error. With one choice per example acc counts greedy matches (LAMBADA). See docs/evaluation.md.\n"
      "Example: furious eval runs/stories --data data/stories --json loss.json\n"
      "         furious eval runs/2mamba runs/softmax --data data/stories --by-position --length 4096\n"
      "         furious eval runs/stories --task hellaswag.jsonl --task piqa.jsonl --out examples.jsonl");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
