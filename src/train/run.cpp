// A training run: a Training with its folder, log and checkpoints.
#include "train/run.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>

#include "base/boundary.h"
#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "model/plan.h"
#include "train/log_writer.h"
#include "train/options.h"
#include "train/training.h"
#include "train/training_checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";
constexpr const char* kOptionsFile = "run.toml";

// The newest undamaged checkpoint older than the newest one; empty if there is none.
fs::path previous_checkpoint(const fs::path& folder) {
  std::vector<fs::path> found = checkpoints_in(folder);
  while (!found.empty()) {
    found.pop_back();
    if (!found.empty() && checkpoint_damage(found.back()).empty()) return found.back();
  }
  return {};
}

fs::path checkpoint_to_resume(const fs::path& folder, bool previous) {
  if (!previous) {
    const std::vector<fs::path> found = checkpoints_in(folder);
    return found.empty() ? fs::path() : found.back();
  }
  fs::path found = previous_checkpoint(folder);
  require(!found.empty(),
          "train: {} has no undamaged checkpoint older than the newest; use --resume, or start a new run",
          folder.string());
  return found;
}

// Runs a function that reads a checkpoint. If it fails because of damage, the error names the damage and the checkpoint
// to resume from.
template <class Read>
auto reading(const fs::path& checkpoint, Read&& read) {
  try {
    return read();
  } catch (const Cancelled&) {
    throw;
  } catch (const Error&) {
    const std::vector<std::string> damage = checkpoint_damage(checkpoint);
    if (damage.empty()) throw;
    const fs::path good = previous_checkpoint(checkpoint.parent_path());
    fail("train: the checkpoint {} is damaged: {}\n{}", checkpoint.string(), damage.front(),
         good.empty() ? "no older checkpoint of the run is undamaged; start a new run with another --out"
                      : fmt::format("{} is undamaged; resume from it with --resume=previous", good.string()));
  }
}

// The number of first steps, of `done`, that have the same rates with both options.
int64_t same_rates(const TrainOptions& a, const TrainOptions& b, int64_t done) {
  int64_t same = 0;
  while (same < done && learning_rate(a, same + 1) == learning_rate(b, same + 1)) ++same;
  return same;
}

// Why a run that was finished with the options `saved` goes on from its newest checkpoint, after the decay.
std::string why_after_decay(const TrainOptions& saved, const TrainOptions& options) {
  if (!has_stable_phase(saved)) return "a run with --schedule wsd goes on from before its decay instead";
  const int64_t begin = decay_range(saved).begin;
  std::string changed;
  if (!has_stable_phase(options) || same_rates(saved, options, begin) < begin)
    for (const TrainOption& option : train_options())
      if (option.get(saved) != option.get(options))
        for (const char* name : {"schedule", "lr", "warmup", "decay-steps", "schedule-steps"})
          if (option.name == name)
            changed += fmt::format("{}--{} {} is now {}", changed.empty() ? "" : ", ", name, option.get(saved),
                                   option.get(options));
  if (changed.empty()) return "its checkpoint from before the decay is not there to go on from";
  return fmt::format("it does not go on from before its decay, since that part had other rates: {}", changed);
}

// Without a decay the learning rate does not depend on the number of steps. So a run that is to do another number of
// steps than its decay was made for goes on from the checkpoint before the decay, with the same bits as if it had been
// started with that number. A run that became wsd later may have no such checkpoint; it goes on from the newest.
fs::path before_decay(const fs::path& newest, const TrainOptions& options) {
  const TrainOptions saved = reading(newest, [&] { return saved_options(newest); });
  if (!has_stable_phase(saved) || !has_stable_phase(options)) return newest;
  const int64_t done = step_of_checkpoint(newest), begin = decay_range(saved).begin;
  const int64_t same = same_rates(saved, options, done);
  if (same == done || same < begin) return newest;
  const fs::path stable = newest.parent_path() / checkpoint_name(begin);
  return fs::is_directory(stable) && has_stable_phase(saved_options(stable)) ? stable : newest;
}

// Of a run that was ended before its first checkpoint.
TrainOptions options_in(const fs::path& file) {
  try {
    return from_toml(read_text(file));
  } catch (const Error& error) {
    fail("{}: {}; the file was edited or is damaged; remove it, and start the run again with all options",
         file.string(), error.what());
  }
}

class Run {
 public:
  Run(const TrainOptions& options, const TrainObserver& observer, const DataParallel& parallel)
      : options_(options), observer_(observer), parallel_(parallel), folder_(options.out) {}
  ~Run() {
    parallel_.ranks.set_stop({});  // the observer does not outlive the run
  }

  TrainResult train();

 private:
  void open_folder();
  void find_newest();
  void report_rate(const TrainOptions& saved) const;
  void start();
  void resume();
  void update_fault_note() const;
  fs::path checkpoint_path() const { return folder_ / checkpoint_name(trainer_->steps_done()); }
  std::string last_good(int64_t step) const;
  void check_unchanged(const TrainOptions& saved, const fs::path& checkpoint) const;
  void set_newer_aside() const;
  void open_log();
  void announce() const;
  void test(TrainStep& step) const;
  void add_totals(TrainStep& step) const;
  template <class Write>
  void log(Write&& write);
  void save();
  void point_to_newest() const;
  void remove_old() const;
  bool every(int64_t steps) const { return steps > 0 && trainer_->steps_done() % steps == 0; }
  // The step before a decay from which a longer run goes on; none: -1.
  int64_t last_stable_step() const { return has_stable_phase(options_) ? decay_range(options_).begin : -1; }
  bool stop_wanted() const;
  void report(const std::string& text) const {
    if (observer_.message && leads()) observer_.message(text);
  }
  bool leads() const { return parallel_.ranks.leads(); }

  TrainOptions options_;
  const TrainObserver& observer_;
  DataParallel parallel_;
  fs::path folder_;
  std::optional<DirectoryToFill> filled_;  // before the lock and the log, which are gone when it is removed
  std::optional<DirectoryLock> lock_;
  std::unique_ptr<Training> trainer_;
  std::optional<LogWriter> log_;  // of rank 0
  fs::path newest_;
  int64_t saved_step_ = -1;
  double seconds_before_ = 0;  // in training, by earlier processes
  std::chrono::steady_clock::time_point start_;
};

void Run::start() {
  require(newest_.empty(), "train: {} already holds a run; continue it with --resume, or choose another --out",
          folder_.string());
  trainer_ = std::make_unique<Training>(options_, TrainData::open(options_, parallel_.ranks.size()), parallel_,
                                        observer_.cancel);
  if (leads()) log_.emplace(folder_, log_formats_from_names(options_.log), std::vector<TrainStep>());
}

void Run::check_unchanged(const TrainOptions& saved, const fs::path& checkpoint) const {
  for (const TrainOption& option : train_options()) {
    if (!option.fixed || option.get(saved) == option.get(options_)) continue;
    fail(
        "train: {} was trained with --{} {}, not {}; leave the option out to resume, or start a new run with --init "
        "{}",
        checkpoint.string(), option.name, option.get(saved), option.get(options_), checkpoint.string());
  }
}

// Steps after the checkpoint will be repeated and logged again.
void Run::open_log() {
  std::vector<TrainStep> kept = read_log(folder_).steps;
  std::erase_if(kept, [&](const TrainStep& step) { return step.step > trainer_->steps_done(); });
  if (!kept.empty()) seconds_before_ = kept.back().seconds;
  log_.emplace(folder_, log_formats_from_names(options_.log), kept);
}

void Run::resume() {
  if (newest_.empty()) {
    report(fmt::format("{} has no checkpoint yet; starting a new run", folder_.string()));
    return start();
  }
  const TrainOptions saved = reading(newest_, [this] { return saved_options(newest_); });
  check_unchanged(saved, newest_);
  const std::string unlike = run_toml_damage(folder_, saved);
  require(unlike.empty(), "train: {}", unlike);
  trainer_ = reading(newest_, [this] {
    return std::make_unique<Training>(options_, newest_, TrainData::open(options_, parallel_.ranks.size()), parallel_,
                                      observer_.cancel);
  });
  saved_step_ = trainer_->steps_done();
  if (leads()) {
    set_newer_aside();
    point_to_newest();  // the run may have been killed before it did
    open_log();
  }
  report_rate(saved);
}

// Where resuming changes the learning rate.
void Run::report_rate(const TrainOptions& saved) const {
  if (saved_step_ >= options_.steps) return;
  const double was = learning_rate(saved, saved_step_ + 1), is = learning_rate(options_, saved_step_ + 1);
  if (was != is)
    report(fmt::format(
        "the learning rate continues with {:.3g}; with the previous options of the run it would be {:.3g}", is, was));
  const double last = learning_rate(saved, saved_step_);
  if (saved_step_ >= saved.steps && is > 2 * last)
    report(fmt::format("the finished run ended with a rate of {:.3g}: the loss rises at first; {}", last,
                       why_after_decay(saved, options_)));
}

// Checkpoints newer than the one that is resumed would otherwise count as the newest ones.
void Run::set_newer_aside() const {
  std::vector<fs::path> found = checkpoints_in(folder_);
  for (; !found.empty() && found.back() != newest_; found.pop_back()) {
    fs::path aside = found.back();
    aside += ".set-aside";
    std::error_code problem;
    fs::remove_all(aside, problem);
    fs::rename(found.back(), aside, problem);
    require(!problem, "train: cannot rename {} to {}: {}", found.back().string(), aside.string(), problem.message());
    report(fmt::format("{} is not used; renamed to {}", found.back().string(), aside.filename().string()));
  }
}

void Run::announce() const {
  const ModelConfig& config = trainer_->model().config();
  const TrainingMemory memory = trainer_->memory();
  report(fmt::format("{}: {:.2f} M parameters, {} layers of width {}, {} heads of {}, vocabulary {}", config.arch,
                     static_cast<double>(parameter_count(config)) / 1e6, config.layers, config.hidden, config.heads(),
                     config.head_dim, config.vocabulary));
  if (!options_.init.empty() && trainer_->steps_done() == 0)
    report(fmt::format("weights and configuration are those of {}", options_.init));
  const bool cpu = trainer_->model().device().is_cpu();
  if (trainer_->steps_done() < options_.steps)
    report(fmt::format(
        "steps {} to {} of {} x {} tokens, {}, {} products{}, about {:.2f} GB of memory", trainer_->steps_done() + 1,
        options_.steps, options_.batch, options_.length,
        cpu ? fmt::format("{} thread{}", threads(), threads() == 1 ? "" : "s") : options_.device, options_.dtype,
        options_.mixer_precision == "auto" ? "" : fmt::format(" ({} in the mixer)", options_.mixer_precision),
        static_cast<double>(memory.total()) / 1e9));
  else
    report(fmt::format("all {} steps are done; increase --steps to continue", trainer_->steps_done()));
  if (const int64_t next = trainer_->steps_done() + 1;
      next <= options_.steps && options_.lr > 0 && learning_rate(options_, next) == 0)
    report(fmt::format(
        "warning: the learning rate is 0 from here on, since the schedule ends at step {}; increase --schedule-steps, "
        "or give --min-lr",
        decay_range(options_).end));
  if (const std::string slow = slow_precision(options_); !slow.empty()) report("warning: " + slow);
  if (const std::string low = low_rate(options_); !low.empty()) report("warning: " + low);
  if (const int ranks = parallel_.ranks.size(); ranks > 1) {
    report(fmt::format(
        "{} ranks, {} on this machine, each with {} rows of a batch, this number of threads and this memory; "
        "gradients are sent in {}",
        ranks, parallel_.ranks.local_size(), options_.batch / ranks, options_.reduce));
    if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr && mpi_library().starts_with("Open MPI 4") &&
        std::getenv("OMPI_MCA_odls_base_sigkill_timeout") == nullptr)
      report(fmt::format(
          "Ctrl-C allows one second to save; kill -TERM {} stops all ranks and allows the time that saving needs",
          ::getpid()));
  }
  if (saved_step_ >= 0) report(fmt::format("resumed from {}", newest_.string()));
  if (!trainer_->data().test && options_.eval_every > 0)
    report("no test loss: the data has no test split; create one with `furious tokenize --test-fraction`");
}

void Run::test(TrainStep& step) const {
  step.test_loss = trainer_->test_loss();
  if (options_.log_values) step.value_rms = trainer_->value_rms();
}

// Batch and length of a run never change.
void Run::add_totals(TrainStep& step) const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  step.time = static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) / 1e3;
  step.seconds = seconds_before_ + std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  step.total_tokens = step.step * options_.batch * options_.length;
  step.total_flops = static_cast<double>(step.step) * trainer_->flops();
}

template <class Write>
void Run::log(Write&& write) {
  try {
    write(*log_);
  } catch (const Error& error) {
    fail("train: {}\n{}", error.what(), last_good(trainer_->steps_done()));
  }
}

// For errors after so many good steps. Diverged weights fail in the step after their update: a checkpoint of them is
// not a good one.
std::string Run::last_good(int64_t step) const {
  std::vector<fs::path> found = checkpoints_in(folder_);
  std::string bad;
  if (!found.empty() && found.back() == folder_ / checkpoint_name(step)) {
    bad = fmt::format(" (remove {}, which holds the diverged weights, to resume from it)", found.back().string());
    found.pop_back();
  }
  if (found.empty()) return "there is no good checkpoint";
  return fmt::format("last good checkpoint: {}{}", found.back().string(), bad);
}

void Run::remove_old() const {
  std::vector<fs::path> found = checkpoints_in(folder_);
  std::erase(found, folder_ / checkpoint_name(last_stable_step()));
  const size_t keep = static_cast<size_t>(options_.keep);
  for (size_t i = 0; i + keep < found.size(); ++i) remove_directory(found[i]);
}

// Called by all ranks; rank 0 gathers and writes.
void Run::save() {
  if (saved_step_ == trainer_->steps_done()) return;
  std::optional<Communicator::SoloWork> solo;
  if (leads()) {
    solo.emplace(parallel_.ranks);
    try {
      replace_directory(checkpoint_path(), [&](const fs::path& temporary) { trainer_->save(temporary); });
    } catch (const Error& error) {
      fail("{}\n{}", error.what(), last_good(trainer_->steps_done()));
    }
  } else {
    trainer_->save({});
  }
  newest_ = checkpoint_path();
  saved_step_ = trainer_->steps_done();
  if (!leads()) return;
  point_to_newest();
  remove_old();
}

// A signal on any rank stops all of them after the same step.
bool Run::stop_wanted() const {
  const int wanted = observer_.stop && observer_.stop() ? 1 : 0;
  return std::ranges::max(parallel_.ranks.all_gather(wanted)) > 0;
}

// The message for the case that a rank is lost in this step.
void Run::update_fault_note() const {
  parallel_.ranks.set_fault_note(trainer_->steps_done() + 1,
                                 newest_.empty() ? "there is no checkpoint to resume from"
                                                 : fmt::format("resume with furious train --out {} --resume, from {}",
                                                               folder_.string(), newest_.string()));
}

void Run::point_to_newest() const {
  const fs::path link = folder_ / (std::string(kLatest) + ".new");
  std::error_code ignored;  // file systems without symbolic links do without it
  fs::remove(link, ignored);
  fs::create_directory_symlink(newest_.filename(), link, ignored);
  fs::rename(link, folder_ / kLatest, ignored);
}

void Run::open_folder() {
  if (!leads()) return;
  filled_.emplace(folder_);
  lock_.emplace(folder_);
  remove_leftovers(folder_);  // an incomplete checkpoint of a killed run
}

void Run::find_newest() {
  fs::path found;
  parallel_.ranks.agree([&] {
    if (!leads()) return;
    const std::vector<fs::path> all = checkpoints_in(folder_);
    found = options_.resume ? resumed_checkpoint(options_) : all.empty() ? fs::path() : all.back();
    if (options_.resume && !options_.resume_previous && !found.empty() && found != all.back())
      report(fmt::format("{} steps instead of {}: going on from {}, before the decay of the learning rate",
                         options_.steps, saved_options(all.back()).steps, found.string()));
  });
  newest_ = parallel_.ranks.from_first(found.string());
  options_.resume_previous = false;  // done; not an option of the run itself
}

TrainResult Run::train() {
  parallel_.ranks.set_timeout(options_.timeout);
  std::string data;
  parallel_.ranks.agree([&] { data = TrainData::open(options_, parallel_.ranks.size()).fingerprint; });
  check_same_everywhere(options_, {{"data", data}}, parallel_.ranks);
  parallel_.ranks.agree([this] { open_folder(); });
  find_newest();
  parallel_.ranks.agree([this] {
    options_.resume ? resume() : start();
    if (leads()) write_text(folder_ / kOptionsFile, to_toml(options_));
  });
  announce();
  if (observer_.begin && trainer_->steps_done() < options_.steps) observer_.begin(trainer_->steps_done() + 1);
  parallel_.ranks.set_stop(observer_.stop);
  start_ = std::chrono::steady_clock::now();
  TrainResult result;
  while (trainer_->steps_done() < options_.steps && !result.stopped) {
    bool finished = false;
    int64_t good = trainer_->steps_done();  // a step that explodes counts, too
    update_fault_note();
    try {
      result.last = trainer_->step();
      good = trainer_->steps_done();
      finished = trainer_->steps_done() == options_.steps;
      if (every(options_.eval_every) || (finished && options_.eval_every > 0)) test(result.last);
    } catch (const Diverged& error) {
      if (leads()) log([&](LogWriter& file) { file.add_divergence(good + 1, error.what()); });
      throw Diverged(fmt::format("{}\n{}", error.what(), last_good(good)));
    } catch (const OutOfMemory& error) {
      fail("{}\n{}", error.what(),
           newest_.empty() ? "there is no checkpoint yet"
                           : fmt::format("resume from {} with --resume", newest_.string()));
    }
    if (leads()) {
      const Communicator::SoloWork solo(parallel_.ranks);
      if (every(options_.sample_every)) result.last.sample = trainer_->sample(options_.sample_tokens);
      add_totals(result.last);
      log([&](LogWriter& file) { file.add(result.last); });
      if (observer_.step) observer_.step(result.last);
    }
    if (every(options_.save_every) || trainer_->steps_done() == last_stable_step()) save();
    result.stopped = !finished && stop_wanted();
  }
  save();
  parallel_.ranks.all_gather(0);  // no rank exits, and seems lost, while rank 0 still writes
  result.steps = trainer_->steps_done();
  result.checkpoint = newest_.string();
  return result;
}

}  // namespace

TrainResult train(const TrainOptions& given, const TrainObserver& observer) try {
  check_train_options(given);
  require(!given.data.empty(), "train: no data; give --data with a folder written by `furious tokenize`");
  require(!given.out.empty(), "train: no folder for the run; give --out");
  const DataParallel parallel{Communicator::world()};
  TrainResult result;
  run_on_all_ranks(parallel.ranks, [&] {
    TrainOptions options;
    parallel.ranks.agree([&] { options = resolved(given, parallel.ranks); });
    const ThreadLimit limit(threads_for(options, parallel.ranks));
    if (given.device == "auto" && options.device == "cpu" && observer.message && parallel.ranks.leads())
      observer.message(fmt::format("no GPU ({}); training on the CPU", cuda_problem()));
    result = Run(options, observer, parallel).train();
  });
  return result;
} catch (...) {
  rethrow_as_error();
}

std::optional<TrainOptions> options_of_run(const std::string& folder, bool previous) try {
  const fs::path found = checkpoint_to_resume(folder, previous && !checkpoints_in(folder).empty());
  const fs::path written = fs::path(folder) / kOptionsFile;
  std::error_code ignored;
  if (found.empty() && !fs::exists(written, ignored)) return {};
  TrainOptions options = found.empty() ? options_in(written) : reading(found, [&] { return saved_options(found); });
  options.out = folder;
  options.resume = true;
  options.resume_previous = previous;
  return options;
} catch (...) {
  rethrow_as_error();
}

fs::path resumed_checkpoint(const TrainOptions& options) {
  const fs::path found = checkpoint_to_resume(options.out, options.resume_previous);
  return options.resume_previous || found.empty() ? found : before_decay(found, options);
}

std::vector<fs::path> checkpoints_in(const fs::path& run) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(run, ignored))
    if (is_checkpoint_name(entry.path().filename().string()) && entry.is_directory()) found.push_back(entry.path());
  std::ranges::sort(found, {}, [](const fs::path& path) {  // by number: a name may have more than eight digits
    const std::string name = path.filename().string();
    return std::pair(name.size(), name);
  });
  return found;
}

std::vector<std::string> runs_beside(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(fs::absolute(folder).parent_path(), ignored))
    if (!checkpoints_in(entry.path()).empty()) names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

std::string run_toml_damage(const fs::path& run, const TrainOptions& saved) {
  const fs::path file = run / kOptionsFile;
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  try {
    const TrainOptions written = from_toml(read_text(file));
    for (const TrainOption& option : train_options())
      require(!option.fixed || option.get(written) == option.get(saved),
              "{} is {}, but the checkpoints of the run were trained with {}", option.name, option.get(written),
              option.get(saved));
    return {};
  } catch (const Error& error) {
    return fmt::format("{}: {}; the file was edited or is damaged; remove it, and --resume will write it again",
                       file.string(), error.what());
  }
}

}  // namespace furious
