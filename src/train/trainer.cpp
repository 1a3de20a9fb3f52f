#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>

#include "base/boundary.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "data/synthetic.h"
#include "data/utf8.h"
#include "decode/model_parts.h"
#include "eval/test_loss.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "model/plan.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"
#include "ops/nn/cross_entropy.h"
#include "ops/optim/adamw.h"
#include "tensor/arena.h"
#include "tensor/check.h"
#include "train/options.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kTrainingFile = "training.safetensors";
constexpr double kExploded = 3;  // times the loss of guessing

std::string first_moment_of(const Parameter& parameter) {
  return "first_moment." + parameter.name;
}

std::string second_moment_of(const Parameter& parameter) {
  return "second_moment." + parameter.name;
}

std::string fingerprint_of(const Dataset& dataset) {
  std::string text = dataset.manifest().tokenizer.fingerprint;
  for (const ShardInfo& shard : dataset.manifest()[Split::train].shards)
    text += fmt::format(" {} {} {:x} {:x}", shard.tokens, shard.documents, shard.tokens_crc, shard.documents_crc);
  return fmt::format("fnv1a64:{:016x}", hash_of(text));
}

TrainData open_dataset(const TrainOptions& options, int ranks) {
  TrainData data;
  data.dataset = std::make_unique<Dataset>(options.data);
  BatchOptions batches{options.batch,   options.length, packing_from_name(options.packing),
                       Order::shuffled, options.seed,   {},
                       options.bos};
  data.batches = std::make_unique<DatasetBatches>(*data.dataset, Split::train, batches);
  if (data.dataset->tokens(Split::test).size() > 1) {
    batches.batch = options.batch / options.accumulate / ranks;
    batches.order = Order::once;
    auto test = std::make_unique<DatasetBatches>(*data.dataset, Split::test, batches);
    data.test_batches = test->steps();
    data.test = std::move(test);
  }
  data.fingerprint = fingerprint_of(*data.dataset);
  return data;
}

template <class Task, class Options>
TrainData open_task(const TrainOptions& options, int ranks, Options task) {
  TrainData data;
  task.batch = options.batch;
  task.length = options.length;
  task.seed = options.seed;
  data.batches = std::make_unique<Task>(task);
  task.batch = options.batch / options.accumulate / ranks;
  task.seed = ~options.seed;
  data.test = std::make_unique<Task>(task);
  data.fingerprint = options.data;
  return data;
}

std::string gib(int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

Compute compute_of(const TrainOptions& options, Device device) {
  Compute compute = compute_in(options.dtype == "bf16" ? DType::bf16 : DType::f32, device);
  if (options.dtype == "tf32") compute.precision = MatmulPrecision::tf32;
  compute.recompute = options.recompute;
  compute.mixer = mixer_precision_from_name(options.mixer_precision);
  return compute;
}

// Measured once in a process: the trainings of an ablation are seen in one light, and short ones do not wait for it.
double known_rate(MatmulPrecision precision, Device device) {
  static std::mutex mutex;
  static std::map<std::pair<MatmulPrecision, std::string>, double> known;
  const std::lock_guard lock(mutex);
  double& rate = known[{precision, name_of(device)}];
  if (rate == 0) rate = matmul_rate(precision, device);
  return rate;
}

// As `furious tokenize --bos` writes it.
bool begins_with_bos(const Dataset& dataset) {
  int32_t first = -1;
  dataset.tokens(Split::train).copy(0, 1, &first);
  return first == dataset.tokenizer()->bos();
}

// A rank's rows of every batch.
TrainOptions own_options(TrainOptions options, const Team& team) {
  options.batch /= team.ranks.size();
  return options;
}

// Of one rank, with its own options.
TrainingMemory needed_memory(const TrainOptions& options, const ModelConfig& config, int64_t parts, bool recompute,
                             const Team& team) {
  const Device device = device_from_name(options.device);
  TrainingMemory memory = training_memory(config, options.batch / parts, options.length, recompute, device,
                                          compute_of(options, device).activations);
  if (team.sharded) memory.parameters = Shards::bytes(parameter_count(config), team.ranks.size());
  // Parts after the first make the gradient of the output projection beside the sum so far.
  if (parts > 1) memory.activations += config.vocabulary * config.hidden * static_cast<int64_t>(sizeof(float));
  return memory;
}

// What would fit into so many bytes.
std::string memory_advice(const TrainOptions& options, const ModelConfig& config, int64_t available, const Team& team) {
  const auto needed = [&](int64_t parts) { return needed_memory(options, config, parts, true, team).total(); };
  if (!options.recompute && needed(options.accumulate) <= available)
    return fmt::format("--recompute would need {}", gib(needed(options.accumulate)));
  for (int64_t parts = options.accumulate + 1; parts <= options.batch; ++parts)
    if (options.batch % parts == 0 && needed(parts) <= available)
      return fmt::format("--accumulate {} --recompute would need {}", parts, gib(needed(parts)));
  return "take a smaller --size, --length or --batch";
}

void check_memory(const TrainOptions& options, const ModelConfig& config, const Team& team) {
  const Device device = device_from_name(options.device);
  const Arena::Usage held = Arena::of(device).usage();  // what is held and not in use serves as well
  const int64_t available = memory::available(device) / (device.is_cpu() ? team.ranks.local_size() : 1) +
                            static_cast<int64_t>(held.reserved - held.live);
  const TrainingMemory memory = needed_memory(options, config, options.accumulate, options.recompute, team);
  if (memory.total() <= available) return;
  fail(
      "train: needs about {} of memory on {} ({} for {} parameters with gradients and optimizer, {} for activations), "
      "but {} are free; {}",
      gib(memory.total()), options.device, gib(memory.parameters), parameter_count(config), gib(memory.activations),
      gib(available), memory_advice(options, config, available, team));
}

// Batches `first`, `first` + n, … of another source.
class EveryNth final : public BatchSource {
 public:
  EveryNth(const BatchSource& of, int64_t first, int64_t n) : of_(of), first_(first), n_(n) {}
  int64_t batch() const override { return of_.batch(); }
  int64_t length() const override { return of_.length(); }
  int32_t vocabulary_size() const override { return of_.vocabulary_size(); }
  Batch at(int64_t step, RowRange rows = {}) const override { return of_.at(first_ + n_ * step, rows); }

 private:
  const BatchSource& of_;
  int64_t first_, n_;
};

int64_t counted(const Tensor& targets) {
  const int32_t* const ids = targets.data<int32_t>();
  return targets.elements() - std::count(ids, ids + targets.elements(), kIgnoredTarget);
}

// What training.safetensors says beside its tensors.
struct SavedTraining {
  int64_t step = 0;
  std::string data;   // its fingerprint
  std::string model;  // checksum of model.safetensors; empty in checkpoints that have none
  std::map<std::string, std::string> options;
};

std::string checksum_text(const SafetensorsReader& file) {
  return file.checksum() ? hash_text(*file.checksum()) : "";
}

SavedTraining saved_training(const SafetensorsReader& file) {
  const auto found = file.metadata().find("furious");
  require(found != file.metadata().end(), "{}: was not written by furious train", file.path().string());
  const std::string origin = fmt::format("{}: its metadata is damaged", file.path().string());
  const nlohmann::json parsed = parse_json(found->second, origin);
  const JsonValue saved(parsed, origin);
  return {saved.at("step").integer(0, std::numeric_limits<int64_t>::max()), saved.at("data").text(),
          saved.has("model") ? saved.at("model").text() : "", saved.at("options").texts()};
}

}  // namespace

void together(Communicator& ranks, const std::function<void()>& work) {
  try {
    work();
  } catch (const AgreedError&) {
    throw;
  } catch (const Diverged&) {  // a trainer throws it on all ranks
    throw;
  } catch (const std::exception&) {
    if (ranks.size() == 1) throw;
    ranks.abort(words_of(std::current_exception()));  // the others would wait for this one
  }
}

TrainData TrainData::open(const TrainOptions& options, int ranks) {
  check_division(options, ranks);
  if (options.data == "synthetic:recall") return open_task<RecallTask>(options, ranks, RecallOptions{});
  if (options.data == "synthetic:passkey") return open_task<PasskeyTask>(options, ranks, PasskeyOptions{});
  if (options.data == "synthetic:lookup") return open_task<LookupTask>(options, ranks, LookupOptions{});
  require(!options.data.starts_with("synthetic:"),
          "train: unknown task \"{}\"; there are synthetic:recall, synthetic:passkey and synthetic:lookup",
          options.data);
  return open_dataset(options, ranks);
}

Trainer::Trainer(const TrainOptions& options, TrainData data, const Team& team)
    : team_(team),
      options_(resolved(options, team.ranks)),
      own_(own_options(options_, team)),
      device_(device_from_name(options_.device)),
      data_(std::move(data)) {
  check_division(options, team.ranks.size());
  const int64_t vocabulary = data_.batches->vocabulary_size();
  ModelConfig config;
  if (options.init.empty()) {
    config = model_config(options, vocabulary);
  } else {
    if (data_.dataset) data_.dataset->check_tokenizer_of(checkpoint_of(options.init));
    config = load_config(options.init);
    require(config.vocabulary >= vocabulary, "train: {} knows {} tokens, but the data has {}", options.init,
            config.vocabulary, vocabulary);
  }
  check_memory(own_, config, team_);
  model_ = std::make_unique<LanguageModel>(
      options.init.empty()
          ? LanguageModel(config, options.seed, device_, initialization_from_name(options.initialization))
          : load_model(options.init, "", device_));
  if (data_.dataset) model_->set_bos(options.bos || begins_with_bos(*data_.dataset));
  add_moments(nullptr);
  prepare();
}

Trainer::Trainer(const TrainOptions& options, const fs::path& checkpoint, const Team& team)
    : team_(team),
      options_(resolved(options, team.ranks)),
      own_(own_options(options_, team)),
      device_(device_from_name(options_.device)),
      data_(TrainData::open(options, team.ranks.size())) {
  const SafetensorsReader file(checkpoint / kTrainingFile);
  const SavedTraining saved = saved_training(file);
  if (const std::vector<std::string> lines = checkpoint_disagreements(checkpoint); !lines.empty())
    fail("train: {}", lines.front());
  require(saved.data == data_.fingerprint,
          "train: {} was trained on other data than {} holds; to go on with new data, "
          "begin a new run with --init",
          checkpoint.string(), options.data);
  check_memory(own_, load_config(checkpoint), team_);
  model_ = std::make_unique<LanguageModel>(load_model(checkpoint, "", device_));
  add_moments(&file);
  step_ = saved.step;
  prepare();
}

// Zeros, or those of a file.
void Trainer::add_moments(const SafetensorsReader* file) {
  const std::vector<Parameter>& parameters = model_->parameters();
  if (team_.sharded) {
    std::vector<Variable> variables;
    for (const Parameter& parameter : parameters) variables.push_back(parameter.value);
    const DType sent = options_.reduce == "bf16" ? DType::bf16 : DType::f32;
    shards_ = std::make_unique<Shards>(team_.ranks, variables, sent, team_.bucket);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Shape& shape = parameters[i].value.value().shape();
    const Device where = shards_ ? Device{} : device_;
    if (file == nullptr && shards_) continue;
    const Moments moments{Tensor::zeros(shape, DType::f32, where), Tensor::zeros(shape, DType::f32, where)};
    if (file != nullptr) {
      file->load_into(first_moment_of(parameters[i]), moments.first);
      file->load_into(second_moment_of(parameters[i]), moments.second);
    }
    if (shards_)
      shards_->set_moments(i, moments.first, moments.second);
    else
      moments_.push_back(moments);
  }
}

void Trainer::prepare() {
  const Compute compute = compute_of(options_, device_);
  require(matmul_supports(compute.precision, device_), "train: {} has no bf16 products on this CPU; use --dtype f32",
          matmul_library(device_));
  require(options_.dtype != "tf32" || !device_.is_cpu(), "train: a CPU has no TF32; use --dtype f32");
  model_->set_compute(compute);
  flops_ = training_flops(model_->config(), own_.batch, own_.length);
  flops_rate_ = known_rate(compute.precision, device_);
  given_ = Tensor::zeros({Given::size(own_)}, DType::i32, device_);
  feed_ = std::make_unique<Feed>(given_);
  results_ = Tensor::zeros({1 + options_.accumulate}, DType::f64, device_);
}

int64_t Trainer::Given::size(const TrainOptions& options) {
  return 2 * options.batch * options.length + options.accumulate + kAdamWConstants;
}

Trainer::Given::Given(const Tensor& memory, const TrainOptions& options) {
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    used += count;
    return memory.slice(0, used - count, count);
  };
  const auto floats = [](const Tensor& ints) {
    return Tensor::wrap(ints.raw(), ints.shape(), DType::f32, ints.device());
  };
  const int64_t rows = options.batch / options.accumulate;
  for (int64_t part = 0; part < options.accumulate; ++part) {
    inputs.push_back(take(rows * options.length).view({rows, options.length}));
    targets.push_back(take(rows * options.length).view({rows, options.length}));
  }
  weights = floats(take(options.accumulate));
  numbers = floats(take(kAdamWConstants));
}

TrainingMemory Trainer::memory() const {
  return needed_memory(own_, model_->config(), own_.accumulate, own_.recompute, team_);
}

void Trainer::diverged(const std::string& what, Of whom) const {
  const std::string who =
      whom == Of::rank && team_.ranks.size() > 1 ? fmt::format("rank {}: ", team_.ranks.rank()) : "";
  throw Diverged(fmt::format("train: {}step {}: {}", who, step_ + 1, what));
}

// What one rank has failed with, all fail with.
void Trainer::agree(const std::string& failure) const {
  const std::vector<size_t> lengths = team_.ranks.all_gather(failure.size());
  if (std::ranges::count(lengths, size_t{0}) == team_.ranks.size()) return;
  for (const std::string& text : team_.ranks.all_gather(failure))
    if (!text.empty()) throw Diverged(text);
}

Batch Trainer::batch_of(int64_t step, int64_t part) const {
  return data_.batches->at(step, {team_.ranks.rank() * own_.batch + part * rows(), rows()});
}

// Says where in the model numbers end, if they do for this batch.
void Trainer::check_finite(const Batch& batch) const {
  const std::string place = model_->first_not_finite(batch.inputs, batch.boundaries);
  if (!place.empty()) diverged(fmt::format("the loss is not a number; the first place where is {}", place));
}

void Trainer::loss_not_finite(const Batch& batch) const {
  check_finite(batch);
  diverged("the loss is not a number; the first place where is the output projection");
}

// Sends what a step works on to the device, which may still be busy with the step before.
void Trainer::fetch(int64_t step) {
  if (next_.step == step) return;
  const Given given(feed_->next(), own_);
  next_ = {step, {}, {}};
  int64_t all = 0;
  for (int64_t part = 0; part < options_.accumulate; ++part) {
    const Batch batch = batch_of(step, part);
    const ArgumentCheck check("train");
    check.token_ids("inputs", batch.inputs, 0, model_->config().vocabulary);
    check.token_ids("targets", batch.targets, kIgnoredTarget, model_->config().vocabulary);
    copy(given.inputs[part], batch.inputs);
    copy(given.targets[part], batch.targets);
    next_.boundaries.push_back(batch.boundaries);
    all += counted(batch.targets);
  }
  if (team_.sharded) {
    const std::vector<int64_t> counts = team_.ranks.all_gather(all);
    all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }
  for (int64_t part = 0; part < options_.accumulate; ++part)
    next_.weights.push_back(static_cast<float>(counted(given.targets[part])) /
                            static_cast<float>(std::max<int64_t>(1, all)));
  std::ranges::copy(next_.weights, given.weights.data<float>());
  const AdamW adamw{learning_rate(options_, step + 1), options_.weight_decay, options_.beta1, options_.beta2,
                    options_.eps};
  const AdamWConstants constants = adamw_constants(adamw, step + 1);
  std::memcpy(given.numbers.raw(), &constants, sizeof(constants));
  feed_->send();
}

Variable Trainer::part_loss(Tape& tape, const Given& given, int64_t part) const {
  const Tensor& boundaries = now_.boundaries[static_cast<size_t>(part)];
  if (!device_.is_cpu()) return model_->loss(tape, given.inputs[part], given.targets[part], boundaries);
  try {
    const Variable loss = model_->loss(tape, given.inputs[part], given.targets[part], boundaries);
    if (std::isfinite(*loss.value().data<float>())) return loss;
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error&) {  // perhaps because a mixer of the CPU was given decays that are not finite
    check_finite(batch_of(step_, part));
    throw;
  }
  loss_not_finite(batch_of(step_, part));
}

// All of a step: forward, backward, clipping, AdamW. On a GPU nothing in it waits, and without boundaries nothing in it
// comes from the host.
void Trainer::compute() {
  const Given given(given_, own_);
  const std::vector<Parameter>& parameters = model_->parameters();
  const Tensor norm = results_.slice(0, 0, 1);
  forget_gradients();
  if (shards_) {
    shards_->begin_step();
    compute_parts(given);
    shards_->finish();
    clip_gradients(norm, given.numbers, shards_->sums(), options_.clip,
                   [this](const Tensor& squares) { shards_->add_squares(squares); });
    adamw_update(shards_->to_update(), given.numbers);
    shards_->gather_parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      gradients_.push_back(shards_->gradient(i));
      parameters[i].value.clear_gradient();
    }
    return;
  }
  compute_parts(given);
  std::vector<AdamWTensors> tensors;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Variable& parameter = parameters[i].value;
    gradients_.push_back(parameter.gradient());
    if (parameter.gradient())
      tensors.push_back({parameter.value(), parameter.gradient(), moments_[i].first, moments_[i].second});
    parameter.clear_gradient();
  }
  clip_gradients(norm, given.numbers, gradients_, options_.clip);
  adamw_update(tensors, given.numbers);
}

// Forward and backward. A rank that fails still takes part in the step, so that all learn of it.
void Trainer::compute_parts(const Given& given) {
  for (int64_t part = 0; part < own_.accumulate; ++part) {
    if (shards_ && part + 1 == own_.accumulate) shards_->send();
    Tape tape;
    Variable loss;
    try {
      loss = part_loss(tape, given, part);
    } catch (const Diverged& error) {
      if (!shards_) throw;
      failure_ = error.what();
      return shards_->fail();
    }
    copy(results_.slice(0, 1 + part, 1), loss.value());
    tape.backward(loss, given.weights.slice(0, part, 1));
  }
}

// A graph cannot hold the tables of packed documents, which the host makes anew for every batch: such a run launches
// kernel by kernel, as does the first step, in which libraries make what they keep.
void Trainer::launch() {
  one_by_one_ |= std::ranges::any_of(now_.boundaries, [](const Tensor& boundaries) { return boundaries.defined(); });
  if (device_.is_cpu() || one_by_one_ || !warm_) {
    drop_graph();
    Arena& arena = Arena::of(device_);
    arena.reset_peak();
    const size_t before = arena.usage().live;
    compute();
    step_bytes_ = arena.usage().peak - before;
    warm_ = true;
    return;
  }
  if (!graph_) {
    forget_gradients();
    Arena::of(device_).trim();  // a graph has memory of its own: what the first step took serves it
    const auto work = [this] {
      try {
        compute();
      } catch (...) {
        forget_gradients();  // before that memory goes
        throw;
      }
    };
    graph_.emplace(device_, work, step_bytes_);
  }
  graph_->run();
}

void Trainer::forget_gradients() {
  gradients_.clear();
  for (const Parameter& parameter : model_->parameters()) parameter.value.clear_gradient();
}

void Trainer::drop_graph() {
  forget_gradients();  // which lie in its memory
  graph_.reset();
}

// Says which gradient of this rank is not finite, if one is.
void Trainer::check_gradients() const {
  // The backward pass goes from the last parameter to the first: the last that is broken was the first to break.
  for (size_t i = gradients_.size(); i-- > 0;)
    if (!std::isfinite(gradient_norm(std::span(&gradients_[i], 1))))
      diverged(fmt::format("the gradient is not a number, first at {}", model_->parameters()[i].name));
}

void Trainer::check_divergence(const TrainStep& done) const {
  const std::vector<Parameter>& parameters = model_->parameters();
  if (!std::isfinite(done.gradient_norm)) {
    std::string failure;
    try {
      check_gradients();
    } catch (const Diverged& error) {
      failure = error.what();
    }
    agree(failure);
    diverged("the sum of the gradients is not a number", Of::all);  // though each of them is
  }
  const double guessing = std::log(static_cast<double>(model_->config().vocabulary));
  if (done.loss > kExploded * guessing) {
    std::vector<double> norms;
    for (const Tensor& gradient : gradients_) norms.push_back(gradient_norm(std::span(&gradient, 1)));
    const auto largest = static_cast<size_t>(std::max_element(norms.begin(), norms.end()) - norms.begin());
    diverged(fmt::format("the loss has exploded to {:.4g} (guessing has {:.4g}); the largest gradient is at {} (norm "
                         "{:.3g}); a smaller --lr, a longer --warmup or --clip 1 may help",
                         done.loss, guessing, parameters[largest].name, norms[largest]),
             Of::all);
  }
}

TrainStep Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  fetch(step_);
  now_ = std::exchange(next_, {});
  feed_->arrive();
  try {
    launch();
  } catch (const OutOfMemory& error) {  // before the update, the last of it: the weights are what they were
    drop_graph();
    const int64_t estimate = memory().total();
    throw OutOfMemory(fmt::format("train: step {}: {}; {} were expected to be enough; {}", step_ + 1, error.what(),
                                  gib(estimate), memory_advice(own_, model_->config(), estimate - 1, team_)));
  }
  if (!device_.is_cpu()) fetch(step_ + 1);
  Tensor results;
  {
    const Communicator::Watch watch(team_.ranks);
    results = to_device(results_, {});  // waits for the device
  }
  TrainStep done;
  done.gradient_norm = results.data<double>()[0];
  done.loss = add_losses(results);
  if (shards_) add_times(done);
  check_divergence(done);
  ++step_;
  done.step = step_;
  done.lr = learning_rate(options_, step_);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  done.tokens_per_second = static_cast<double>(options_.batch * options_.length) / seconds;
  done.mfu = flops_ / seconds / flops_rate_;
  return done;
}

// The loss of the batch, from those of the parts and of the other ranks.
double Trainer::add_losses(const Tensor& results) {
  double sum = 0;
  try {
    for (int64_t part = 0; part < own_.accumulate && failure_.empty(); ++part) {
      const double loss = results.data<double>()[1 + part];
      if (!std::isfinite(loss)) loss_not_finite(batch_of(step_, part));
      sum += loss * static_cast<double>(now_.weights[static_cast<size_t>(part)]);
    }
  } catch (const Diverged& error) {
    failure_ = error.what();
  }
  agree(std::exchange(failure_, {}));
  if (!shards_) return sum;
  const std::vector<double> sums = team_.ranks.all_gather(sum);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

void Trainer::add_times(TrainStep& done) const {
  const std::vector<LinkTimes> times = team_.ranks.all_gather(shards_->end_step());
  const auto [fastest, slowest] = std::ranges::minmax_element(times, {}, &LinkTimes::work);
  done.ranks = {static_cast<int64_t>(times.size()),
                slowest - times.begin(),
                fastest - times.begin(),
                slowest->work,
                fastest->work,
                times.front().waiting};
}

std::optional<double> Trainer::test_loss() const {
  if (!data_.test) return {};
  constexpr int64_t kEndless = 8;  // batches of a task that has no end
  // A part of a rank's batch at a time: in more parts, and by more ranks, the same tokens.
  const int64_t rank = team_.ranks.rank(), ranks = team_.ranks.size(), parts = options_.accumulate * ranks;
  int64_t batches = data_.test_batches > 0 ? data_.test_batches : kEndless * parts;
  if (options_.eval_batches > 0) batches = std::min(batches, options_.eval_batches * parts);
  const EveryNth own(*data_.test, rank, ranks);
  const Batch first = own.at(0);
  TestLoss loss;
  std::string failure;
  try {
    loss = furious::test_loss(*model_, own, (batches - rank + ranks - 1) / ranks);
    if (!std::isfinite(loss.sum)) loss_not_finite(first);
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Diverged& error) {
    failure = error.what();
  } catch (const Error&) {
    if (!device_.is_cpu()) throw;
    try {
      check_finite(first);
    } catch (const Diverged& error) {
      failure = error.what();
    }
    if (failure.empty()) throw;
  }
  agree(failure);
  TestLoss all;
  for (const TestLoss& each : team_.ranks.all_gather(loss)) {
    all.sum += each.sum;
    all.tokens += each.tokens;
  }
  return all.mean();
}

std::vector<double> Trainer::value_rms() const {
  const Batch batch = batch_of(std::max<int64_t>(0, step_ - 1), 0);
  return model_->value_rms(batch.inputs, batch.boundaries);
}

std::string Trainer::sample(int64_t tokens) const {
  if (!data_.dataset) return {};
  const Model model(std::make_shared<Model::Parts>(*model_, data_.dataset->tokenizer(), false));
  Session session(model);
  session.read("");
  WriteOptions options;
  options.tokens = tokens;
  options.sampling.seed = options_.seed;
  return session.write(options).front().text;
}

void Trainer::save(const fs::path& directory) const {
  Shards::Moments moments;
  if (shards_) moments = shards_->moments();
  if (!team_.ranks.leads()) return;
  if (data_.dataset) save_tokenizer(directory, *data_.dataset->tokenizer(), model_->config().bos);
  save_model(directory, *model_);
  std::map<std::string, Tensor> tensors;
  for (size_t i = 0; i < model_->parameters().size(); ++i) {
    const Parameter& parameter = model_->parameters()[i];
    tensors[first_moment_of(parameter)] = shards_ ? moments.first[i] : moments_[i].first;
    tensors[second_moment_of(parameter)] = shards_ ? moments.second[i] : moments_[i].second;
  }
  // The place in the data is the step: batches are a pure function of it.
  const Json saved{{"step", step_},
                   {"data", data_.fingerprint},
                   {"model", checksum_text(SafetensorsReader(directory))},
                   {"options", to_texts(options_)}};
  write_safetensors(directory / kTrainingFile, tensors, {{"furious", saved.dump()}});
}

TrainOptions saved_options(const fs::path& checkpoint) {
  const SafetensorsReader file(checkpoint / kTrainingFile);
  TrainOptions options;
  for (const auto& [name, text] : saved_training(file).options) set_train_option(options, name, bytes_of_utf8(text));
  return options;
}

std::vector<std::string> checkpoint_disagreements(const fs::path& checkpoint) {
  const SafetensorsReader file(checkpoint / kTrainingFile), weights(checkpoint);
  const SavedTraining saved = saved_training(file);
  std::vector<std::string> lines = changed_files(weights);
  const std::string folder = checkpoint.filename().string();
  if (is_checkpoint_name(folder) && folder != checkpoint_name(saved.step))
    lines.push_back(fmt::format("{}: is of step {} by its name, but of step {} by its {}", checkpoint.string(),
                                folder.substr(5), saved.step, kTrainingFile));
  if (!saved.model.empty() && saved.model != checksum_text(weights))
    lines.push_back(fmt::format("{}: was not saved together with {}", weights.path().string(), kTrainingFile));
  return lines;
}

std::vector<std::string> checkpoint_damage(const fs::path& checkpoint) {
  std::vector<std::string> lines;
  const auto add = [&](const auto& find) {
    try {
      for (const std::string& line : find()) lines.push_back(line);
    } catch (const Error& error) {
      if (std::ranges::count(lines, error.what()) == 0) lines.emplace_back(error.what());
    }
  };
  add([&] { return SafetensorsReader(checkpoint).damage(); });
  add([&] { return SafetensorsReader(checkpoint / kTrainingFile).damage(); });
  add([&] { return checkpoint_disagreements(checkpoint); });
  return lines;
}

bool is_checkpoint_name(const std::string& name) {
  return name.starts_with("step-") && name.size() >= 13 &&
         std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string checkpoint_name(int64_t step) {
  return fmt::format("step-{:08}", step);
}

}  // namespace furious
