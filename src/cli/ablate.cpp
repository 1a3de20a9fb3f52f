// `furious ablate`: train the rows of an experiment and compare them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <ranges>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/number.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/progress.h"
#include "cli/train_flags.h"
#include "cli/train_jobs.h"
#include "paper/ablation_report.h"

namespace furious::cli {
namespace {

// Small enough for a laptop: about half a minute per row on two cores.
TrainOptions laptop_options() {
  TrainOptions options;
  options.length = 256;
  options.steps = 300;
  options.lr = 2e-3;
  options.warmup = 30;
  options.eval_every = 30;
  options.keep = 1;
  return options;
}

// The options of `furious train` without those that define a row or have no use in one.
std::vector<std::string> shared_options() {
  const std::set<std::string> others = {"arch", "init", "resume", "sample-every", "sample-tokens"};
  std::vector<std::string> names;
  for (const TrainOption& option : train_options())
    if (!others.contains(option.name)) names.push_back(option.name);
  return names;
}

class AblateCommand {
 public:
  explicit AblateCommand(CLI::App& command) : flags_(command, laptop_options(), shared_options()), recipe_(command) {
    command.add_option("rows", words_, "Suites, or presets with changes: 2mamba:conv_window=3,lr=1e-3");
    command.add_option("--seeds", seeds_, "Number of runs of each row, with seeds counted from --seed")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command
        .add_option("--jobs", jobs_,
                    "Number of runs to train at the same time, as processes that share the device or the cores; fewer "
                    "where their memory does not suffice")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    command
        .add_option("--grid", grid_,
                    "Train every row with each of these values of a switch or option: KEY=VALUE,VALUE or "
                    "KEY=FIRST..LAST; several grids give all combinations, and seed=1..3 three runs of each row")
        ->allow_extra_args(false)
        ->check(parsed_by([](const std::string& text) { grid_axis(text); }));
    command.add_option("--from", from_, "Write the report from this results.json, without training");
  }

  void run();

 private:
  AblationOptions options() const;
  void show(const Ablation& ablation) const;
  void begin(const Ablation& ablation);
  void step(const RowResult& row, uint64_t seed, const TrainStep& step);
  void ended(const Ablation& so_far, const RowResult& row, const RowRun& run);
  void report_again() const;
  int64_t steps_left() const { return total_ - done_before_ - done_; }

  TrainFlags flags_;
  RecipeFlag recipe_;
  std::vector<std::string> words_, grid_;
  int64_t seeds_ = 1, jobs_ = 1;
  std::string from_;

  std::string out_;
  std::unique_ptr<ProgressLine> line_;
  int64_t total_ = 0;                                   // steps
  int64_t done_ = 0, done_before_ = 0;                  // now, and by an earlier call
  int64_t row_steps_ = 0;                               // of the run in progress, done now
  std::set<std::pair<std::string, uint64_t>> trained_;  // rows and seeds, by processes of their own
};

AblationOptions AblateCommand::options() const {
  TrainOptions base = laptop_options();
  if (recipe_) {
    base = {};
    base.keep = 1;
  }
  AblationOptions options{words_, base, seeds_};
  for (const std::string& text : grid_) options.grid.push_back(grid_axis(text));
  recipe_.apply(options.base, [&](TrainOptions& given) { flags_.apply(given); });
  if (options.base.out.empty() && !words_.empty())
    options.base.out = "ablate-" + words_.front().substr(0, words_.front().find(':'));
  return options;
}

void AblateCommand::show(const Ablation& ablation) const {
  fmt::print("\n{}\n{}", to_text(ablation_table(ablation)), ablation_notes(ablation));
}

// Of a run of this row.
int64_t steps_of(const RowResult& row) {
  return parse_number<int64_t>(row.options.at("steps")).value_or(0);
}

void AblateCommand::begin(const Ablation& ablation) {
  for (const RowResult& row : ablation.rows) total_ += seeds_ * steps_of(row);
  const auto [fewest, most] = std::ranges::minmax(ablation.rows | std::views::transform(steps_of));
  line_->print(fmt::format("{} rows, {} seed{}, {} steps each; runs in {}/runs", ablation.rows.size(), seeds_,
                           seeds_ == 1 ? "" : "s",
                           fewest == most ? fmt::format("{}", most) : fmt::format("{} to {}", fewest, most), out_));
}

void AblateCommand::step(const RowResult& row, uint64_t seed, const TrainStep& step) {
  if (row_steps_ == 0) done_before_ += step.step - 1;
  ++row_steps_;
  ++done_;
  if (!line_->due()) return;
  const double left = line_->seconds() * static_cast<double>(steps_left()) / static_cast<double>(done_);
  line_->show(fmt::format("{} seed {}  step {}/{}  loss {:.4f}  {:.0f} tokens/s  {:.0f} % of all  {} left", row.name,
                          seed, step.step, steps_of(row), step.loss, step.tokens_per_second,
                          100 * static_cast<double>(done_before_ + done_) / static_cast<double>(total_),
                          clock_text(left)));
}

void AblateCommand::ended(const Ablation& so_far, const RowResult& row, const RowRun& run) {
  if (row_steps_ == 0) done_before_ += run.steps;
  if (run.finished) done_before_ += steps_of(row) - run.steps;  // a diverged run has no further steps
  std::string text = fmt::format("{}  seed {}  ", row.label, run.seed);
  if (!run.diverged.empty())
    text += run.diverged;
  else
    text += fmt::format("train loss {:.4f}  test loss {:.4f}  {:.0f} tokens/s", run.train_loss, run.test_loss,
                        run.tokens_per_second);
  if (row_steps_ == 0 && !trained_.contains({row.name, run.seed})) text += "  (already done)";
  if (!run.finished) text += fmt::format("  stopped at step {}", run.steps);
  line_->print(text);
  row_steps_ = 0;
  write_ablation_report(out_, so_far);
}

void AblateCommand::report_again() const {
  require(words_.empty(), "ablate: --from only writes a report; leave out the suites");
  TrainOptions given;
  flags_.apply(given);
  require(!given.out.empty(), "ablate: --from needs a folder for the report; give --out");
  const Ablation ablation = ablation_from_json(read_input(from_), from_);
  std::filesystem::create_directories(given.out);
  write_ablation_report(given.out, ablation);
  show(ablation);
  fmt::print("\nreport: {}/report.html\n", given.out);
}

void AblateCommand::run() {
  if (!from_.empty()) return report_again();
  const AblationOptions chosen = options();
  if (words_.empty()) {
    std::vector<std::string> names;
    for (const Suite& suite : suites()) names.push_back(suite.name);
    throw CLI::ValidationError(fmt::format("no rows; give a suite ({}) or presets", fmt::join(names, ", ")));
  }
  if (chosen.base.data.empty()) throw CLI::RequiredError("--data");
  out_ = chosen.base.out;
  seeds_ = static_cast<int64_t>(chosen.all_seeds().size());
  stop_on_signals();
  std::signal(SIGPIPE, SIG_IGN);  // as in `furious train`
  line_ = std::make_unique<ProgressLine>("ablate");
  AblationObserver observer;
  observer.begin = [&](const Ablation& ablation) { begin(ablation); };
  if (jobs_ > 1)
    observer.train = [&](const std::vector<AblationJob>& unfinished) {
      for (const AblationJob& job : unfinished) trained_.emplace(job.row, job.options.seed);
      train_in_processes(unfinished, jobs_, *line_);
    };
  observer.step = [&](const RowResult& row, uint64_t seed, const TrainStep& done) { step(row, seed, done); };
  observer.run = [&](const Ablation& so_far, const RowResult& row, const RowRun& done) { ended(so_far, row, done); };
  observer.stop = stop_requested;
  const Ablation ablation = run_ablation(chosen, observer);
  line_->clear();
  write_ablation_report(out_, ablation);
  show(ablation);
  fmt::print("\n{} in {}; report: {}/report.html\n", ablation.stopped ? "stopped" : "done",
             clock_text(line_->seconds()), out_);
  if (ablation.stopped) fmt::print("run the same command to resume\n");
}

}  // namespace

void add_ablate(CLI::App& app) {
  CLI::App* ablate = app.add_subcommand("ablate", "Train the rows of an experiment and compare them");
  auto command = std::make_shared<AblateCommand>(*ablate);
  std::string text = "Suites:\n";
  for (const Suite& suite : suites()) text += fmt::format("  {:<10} {}\n", suite.name, suite.about);
  ablate->footer(
      text +
      "A change is a switch of config.json (score, norm, decay, conv_window, …) or an option of `furious train`.\n"
      "Runs and report are in --out, by default ablate-SUITE. Ctrl-C saves and stops; the same command resumes.\n"
      "With --grid the best row is marked; a row added later trains alone, the others are found in --out.\n"
      "Example: furious ablate 2mamba --grid lr=1e-3,3e-3 --grid seed=1..3 --data shards --out lr\n"
      "         furious ablate compare 2mamba:conv_window=4 --data shards --seeds 3\n" +
      kPaperPage);
  ablate->callback([command] { command->run(); });
}

}  // namespace furious::cli
