// A training run: its folder, log and checkpoints around a Trainer.
#include "train/run.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/boundary.h"
#include "base/error.h"
#include "base/file.h"
#include "base/parallel.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "model/plan.h"
#include "train/log.h"
#include "train/options.h"
#include "train/trainer.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";
constexpr const char* kOptionsFile = "run.toml";

// The newest checkpoint before the newest that is whole; empty if there is none.
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
  require(!found.empty(), "train: {} holds no undamaged checkpoint before the newest; resume from that, or begin anew",
          folder.string());
  return found;
}

// For what reads a checkpoint: when it fails because of damage, the error names that, and what can be resumed from.
template <class Read>
auto reading(const fs::path& checkpoint, Read&& read) {
  try {
    return read();
  } catch (const Error&) {
    const std::vector<std::string> damage = checkpoint_damage(checkpoint);
    if (damage.empty()) throw;
    const fs::path good = previous_checkpoint(checkpoint.parent_path());
    fail("train: the checkpoint {} is damaged: {}\n{}", checkpoint.string(), damage.front(),
         good.empty() ? "no older checkpoint of the run is undamaged; begin anew with another --out"
                      : fmt::format("{} is undamaged: --resume=previous goes on from it", good.string()));
  }
}

class Run {
 public:
  Run(const TrainOptions& options, const TrainObserver& observer, const Team& team)
      : options_(options), observer_(observer), team_(team), folder_(options.out) {}
  ~Run() { team_.ranks.set_stop({}); }  // the observer may be gone when this is

  TrainResult train();

 private:
  void open_folder();
  void find_newest();
  void begin();
  void resume();
  void tell_story() const;
  fs::path checkpoint_path() const { return folder_ / checkpoint_name(trainer_->steps_done()); }
  std::string last_good() const;
  void check_unchanged(const TrainOptions& saved, const fs::path& checkpoint) const;
  void set_newer_aside() const;
  void cut_log();
  void announce() const;
  void test(TrainStep& step) const;
  void log(const std::string& line) const;
  void save();
  void point_to_newest() const;
  void remove_old() const;
  bool every(int64_t steps) const { return steps > 0 && trainer_->steps_done() % steps == 0; }
  bool stop_wanted() const;
  void say(const std::string& text) const {
    if (observer_.message && leads()) observer_.message(text);
  }
  bool leads() const { return team_.ranks.leads(); }

  TrainOptions options_;
  const TrainObserver& observer_;
  Team team_;
  fs::path folder_;
  std::optional<DirectoryLock> lock_;
  std::unique_ptr<Trainer> trainer_;
  fs::path newest_;
  int64_t saved_step_ = -1;
};

void Run::begin() {
  require(newest_.empty(), "train: {} holds a run already; go on with it by --resume, or choose another --out",
          folder_.string());
  trainer_ = std::make_unique<Trainer>(options_, team_);
  if (leads()) write_text(folder_ / kLogFile, "");
}

void Run::check_unchanged(const TrainOptions& saved, const fs::path& checkpoint) const {
  for (const TrainOption& option : train_options()) {
    if (!option.fixed || option.get(saved) == option.get(options_)) continue;
    fail(
        "train: {} was trained with --{} {}, not {}; a run is resumed with what it began with (leave the option out), "
        "or a new one begins with --init {}",
        checkpoint.string(), option.name, option.get(saved), option.get(options_), checkpoint.string());
  }
}

// Steps after the checkpoint are made, and logged, once more.
void Run::cut_log() {
  std::string kept;
  for (const TrainStep& step : read_log(folder_).steps)
    if (step.step <= trainer_->steps_done()) kept += to_line(step) + "\n";
  write_text(folder_ / kLogFile, kept);
}

void Run::resume() {
  if (newest_.empty()) {
    say(fmt::format("{} holds no checkpoint yet: the run begins", folder_.string()));
    return begin();
  }
  const TrainOptions saved = reading(newest_, [this] { return saved_options(newest_); });
  check_unchanged(saved, newest_);
  const std::string unlike = run_toml_damage(folder_, saved);
  require(unlike.empty(), "train: {}", unlike);
  trainer_ = reading(newest_, [this] { return std::make_unique<Trainer>(options_, newest_, team_); });
  saved_step_ = trainer_->steps_done();
  if (leads()) {
    set_newer_aside();
    point_to_newest();  // in case the run was killed before it could
    cut_log();
  }
  const double was = learning_rate(saved, saved_step_ + 1), is = learning_rate(options_, saved_step_ + 1);
  if (was != is && saved_step_ < options_.steps)
    say(fmt::format("the learning rate goes on with {:.3g}; with the options the run had, it would with {:.3g}", is,
                    was));
}

// What is newer than the checkpoint that the run goes on from would be taken for its newest.
void Run::set_newer_aside() const {
  std::vector<fs::path> found = checkpoints_in(folder_);
  for (; !found.empty() && found.back() != newest_; found.pop_back()) {
    fs::path aside = found.back();
    aside += ".set-aside";
    std::error_code problem;
    fs::remove_all(aside, problem);
    fs::rename(found.back(), aside, problem);
    require(!problem, "train: {} cannot be renamed to {}: {}", found.back().string(), aside.string(),
            problem.message());
    say(fmt::format("{} is not used; it is now {}", found.back().string(), aside.filename().string()));
  }
}

void Run::announce() const {
  const ModelConfig& config = trainer_->model().config();
  const TrainingMemory memory = trainer_->memory();
  say(fmt::format("{}: {:.2f} M parameters, {} layers of width {}, {} heads of {}, vocabulary {}", config.arch,
                  static_cast<double>(parameter_count(config)) / 1e6, config.layers, config.hidden, config.heads(),
                  config.head_dim, config.vocabulary));
  if (!options_.init.empty() && trainer_->steps_done() == 0)
    say(fmt::format(
        "it is the model of {}: --arch, --size, --switches and other options of a new model do not change it",
        options_.init));
  const bool cpu = trainer_->model().device().is_cpu();
  if (trainer_->steps_done() < options_.steps)
    say(fmt::format(
        "steps {} to {} of {} x {} tokens, {}, {} products{}, about {:.2f} GB of memory", trainer_->steps_done() + 1,
        options_.steps, options_.batch, options_.length, cpu ? fmt::format("{} threads", threads()) : options_.device,
        options_.dtype,
        options_.mixer_precision == "auto" ? "" : fmt::format(" ({} in the mixer)", options_.mixer_precision),
        static_cast<double>(memory.total()) / 1e9));
  else
    say(fmt::format("{} steps are done, nothing is left to do; a larger --steps goes on", trainer_->steps_done()));
  if (const std::string slow = slow_precision(options_); !slow.empty()) say("warning: " + slow);
  if (const int ranks = team_.ranks.size(); ranks > 1) {
    say(
        fmt::format("{} ranks, {} on this machine, each with {} rows of a batch, these threads and this memory; "
                    "gradients are sent in {}",
                    ranks, team_.ranks.local_size(), options_.batch / ranks, options_.reduce));
    if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr && mpi_library().starts_with("Open MPI 4") &&
        std::getenv("OMPI_MCA_odls_base_sigkill_timeout") == nullptr)
      say(fmt::format("Ctrl-C leaves one second to save; kill -TERM {} stops all ranks and leaves the time it takes",
                      ::getpid()));
  }
  if (saved_step_ >= 0) say(fmt::format("resumed from {}", newest_.string()));
  if (!trainer_->data().test && options_.eval_every > 0)
    say("no test loss: the data has no test part (furious tokenize --test-fraction)");
}

void Run::test(TrainStep& step) const {
  step.test_loss = trainer_->test_loss();
  if (options_.log_values) step.value_rms = trainer_->value_rms();
}

void Run::log(const std::string& line) const {
  std::ofstream file(folder_ / kLogFile, std::ios::app);
  file << line << "\n";
  file.flush();
  require(file.good(), "train: cannot write {}: is the disk full?\n{}", (folder_ / kLogFile).string(), last_good());
}

// For errors. Weights that fail do so in the next step: when they were saved before, theirs is not a good checkpoint.
std::string Run::last_good() const {
  std::vector<fs::path> found = checkpoints_in(folder_);
  std::string bad;
  if (!found.empty() && found.back() == checkpoint_path()) {
    bad = fmt::format(" (remove {}, which holds the weights that failed, to resume from it)", found.back().string());
    found.pop_back();
  }
  if (found.empty()) return "there is no good checkpoint";
  return fmt::format("last good checkpoint: {}{}", found.back().string(), bad);
}

void Run::remove_old() const {
  std::vector<fs::path> found = checkpoints_in(folder_);
  const size_t keep = static_cast<size_t>(options_.keep);
  for (size_t i = 0; i + keep < found.size(); ++i) {
    std::error_code ignored;  // what cannot be removed harms nothing
    fs::remove_all(found[i], ignored);
  }
}

// By all ranks; the first writes what it has of its own and what the others give it.
void Run::save() {
  if (saved_step_ == trainer_->steps_done()) return;
  std::optional<Communicator::Alone> alone;
  if (leads()) {
    alone.emplace(team_.ranks);
    try {
      replace_directory(checkpoint_path(), [&](const fs::path& temporary) { trainer_->save(temporary); });
    } catch (const Error& error) {
      fail("{}\n{}", error.what(), last_good());
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

// A signal on any rank ends them all, after the same step.
bool Run::stop_wanted() const {
  const int wanted = observer_.stop && observer_.stop() ? 1 : 0;
  return std::ranges::max(team_.ranks.all_gather(wanted)) > 0;
}

// What is to be said, should a rank be lost now.
void Run::tell_story() const {
  team_.ranks.set_story(trainer_->steps_done() + 1, newest_.empty()
                                                        ? "there is no checkpoint to resume from"
                                                        : fmt::format("furious train --out {} --resume goes on from {}",
                                                                      folder_.string(), newest_.string()));
}

void Run::point_to_newest() const {
  const fs::path link = folder_ / (std::string(kLatest) + ".new");
  std::error_code ignored;  // a file system without links still has the checkpoints
  fs::remove(link, ignored);
  fs::create_directory_symlink(newest_.filename(), link, ignored);
  fs::rename(link, folder_ / kLatest, ignored);
}

void Run::open_folder() {
  if (!leads()) return;
  std::error_code problem;
  fs::create_directories(folder_, problem);
  require(!problem, "train: cannot make the folder {}: {}", folder_.string(), problem.message());
  lock_.emplace(folder_);
  remove_leftovers(folder_);  // a checkpoint that was being written when the run was killed
}

void Run::find_newest() {
  fs::path found;
  team_.ranks.agree([&] {
    if (leads()) found = checkpoint_to_resume(folder_, options_.resume && options_.resume_previous);
  });
  newest_ = team_.ranks.from_first(found.string());
  options_.resume_previous = false;  // is done: it is no property of the run
}

TrainResult Run::train() {
  team_.ranks.set_timeout(options_.timeout);
  std::string data;
  team_.ranks.agree([&] { data = TrainData::open(options_, team_.ranks.size()).fingerprint; });
  check_same_everywhere(options_, {{"data", data}}, team_.ranks);
  team_.ranks.agree([this] { open_folder(); });
  find_newest();
  team_.ranks.agree([this] {
    options_.resume ? resume() : begin();
    if (leads()) write_text(folder_ / kOptionsFile, to_toml(options_));
  });
  announce();
  team_.ranks.set_stop(observer_.stop);
  TrainResult result;
  while (trainer_->steps_done() < options_.steps && !result.stopped) {
    bool finished = false;
    tell_story();
    try {
      result.last = trainer_->step();
      finished = trainer_->steps_done() == options_.steps;
      if (every(options_.eval_every) || (finished && options_.eval_every > 0)) test(result.last);
    } catch (const Diverged& error) {
      if (leads()) log(diverged_line(trainer_->steps_done() + 1, error.what()));
      throw Diverged(fmt::format("{}\n{}", error.what(), last_good()));
    } catch (const OutOfMemory& error) {
      fail("{}\n{}", error.what(),
           newest_.empty() ? "there is no checkpoint yet" : fmt::format("--resume goes on from {}", newest_.string()));
    }
    if (leads()) {
      const Communicator::Alone alone(team_.ranks);
      if (every(options_.sample_every)) result.last.sample = trainer_->sample(options_.sample_tokens);
      log(to_line(result.last));
      if (observer_.step) observer_.step(result.last);
    }
    if (every(options_.save_every)) save();
    result.stopped = !finished && stop_wanted();
  }
  save();
  team_.ranks.all_gather(0);  // no rank leaves, and seems lost, while the first still writes
  result.steps = trainer_->steps_done();
  result.checkpoint = newest_.string();
  return result;
}

}  // namespace

TrainResult train(const TrainOptions& given, const TrainObserver& observer) try {
  check_train_options(given);
  require(!given.data.empty(), "train: no data; give --data with a folder of `furious tokenize`");
  require(!given.out.empty(), "train: no folder for the run; give --out");
  const Team team{Communicator::world()};
  TrainResult result;
  together(team.ranks, [&] {
    TrainOptions options;
    team.ranks.agree([&] { options = resolved(given, team.ranks); });
    const ThreadLimit limit(threads_for(options, team.ranks));
    if (given.device == "auto" && options.device == "cpu" && observer.message && team.ranks.leads())
      observer.message(fmt::format("no GPU ({}): the CPU trains", cuda_problem()));
    result = Run(options, observer, team).train();
  });
  return result;
} catch (...) {
  rethrow_as_error();
}

std::optional<TrainOptions> options_of_run(const std::string& folder, bool previous) try {
  const fs::path found = checkpoint_to_resume(folder, previous && !checkpoints_in(folder).empty());
  if (found.empty()) return {};
  TrainOptions options = reading(found, [&] { return saved_options(found); });
  options.out = folder;
  options.resume = true;
  options.resume_previous = previous;
  return options;
} catch (...) {
  rethrow_as_error();
}

std::vector<fs::path> checkpoints_in(const fs::path& run) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(run, ignored))
    if (is_checkpoint_name(entry.path().filename().string()) && entry.is_directory()) found.push_back(entry.path());
  std::ranges::sort(found, {}, [](const fs::path& path) {  // by number: names grow beyond eight digits
    const std::string name = path.filename().string();
    return std::pair(name.size(), name);
  });
  return found;
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
    return fmt::format("{}: {}; it was edited, or is damaged: remove it, --resume writes it anew", file.string(),
                       error.what());
  }
}

}  // namespace furious
