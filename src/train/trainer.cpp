#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/hash.h"
#include "data/synthetic.h"
#include "eval/test_loss.h"
#include "infer/model_parts.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "model/safetensors.h"
#include "ops/adamw.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
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

TrainData open_dataset(const TrainOptions& options) {
  TrainData data;
  data.dataset = std::make_unique<Dataset>(options.data);
  BatchOptions batches{options.batch,   options.length, packing_from_name(options.packing),
                       Order::shuffled, options.seed,   {}};
  data.batches = std::make_unique<DatasetBatches>(*data.dataset, Split::train, batches);
  if (data.dataset->tokens(Split::test).size() > 1) {
    batches.batch = options.batch / options.accumulate;
    batches.order = Order::once;
    auto test = std::make_unique<DatasetBatches>(*data.dataset, Split::test, batches);
    data.test_batches = test->steps();
    data.test = std::move(test);
  }
  data.fingerprint = fingerprint_of(*data.dataset);
  return data;
}

template <class Task, class Options>
TrainData open_task(const TrainOptions& options, Options task) {
  TrainData data;
  task.batch = options.batch;
  task.length = options.length;
  task.seed = options.seed;
  data.batches = std::make_unique<Task>(task);
  task.batch = options.batch / options.accumulate;
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
  return compute;
}

// Measured once in a process: the trainings of an ablation are seen in one light, and short ones do not wait for it.
double known_rate(MatmulPrecision precision, Device device) {
  static std::map<std::pair<MatmulPrecision, std::string>, double> known;
  double& rate = known[{precision, name_of(device)}];
  if (rate == 0) rate = matmul_rate(precision, device);
  return rate;
}

TrainingMemory needed_memory(const TrainOptions& options, const ModelConfig& config, int64_t parts, bool recompute) {
  const Device device = device_from_name(options.device);
  TrainingMemory memory = training_memory(config, options.batch / parts, options.length, recompute, device,
                                          compute_of(options, device).activations);
  // Parts after the first make the gradient of the output projection beside the sum so far.
  if (parts > 1) memory.activations += config.vocabulary * config.hidden * static_cast<int64_t>(sizeof(float));
  return memory;
}

// What would fit into so many bytes.
std::string memory_advice(const TrainOptions& options, const ModelConfig& config, int64_t available) {
  const auto needed = [&](int64_t parts) { return needed_memory(options, config, parts, true).total(); };
  if (!options.recompute && needed(options.accumulate) <= available)
    return fmt::format("--recompute would need {}", gib(needed(options.accumulate)));
  for (int64_t parts = options.accumulate + 1; parts <= options.batch; ++parts)
    if (options.batch % parts == 0 && needed(parts) <= available)
      return fmt::format("--accumulate {} --recompute would need {}", parts, gib(needed(parts)));
  return "take a smaller --size, --length or --batch";
}

void check_memory(const TrainOptions& options, const ModelConfig& config) {
  const Device device = device_from_name(options.device);
  const Arena::Usage held = Arena::of(device).usage();  // what is held and not in use serves as well
  const int64_t available = memory::available(device) + static_cast<int64_t>(held.reserved - held.live);
  const TrainingMemory memory = needed_memory(options, config, options.accumulate, options.recompute);
  if (memory.total() <= available) return;
  fail(
      "train: needs about {} of memory on {} ({} for {} parameters with gradients and optimizer, {} for activations), "
      "but {} are free; {}",
      gib(memory.total()), options.device, gib(memory.parameters), parameter_count(config), gib(memory.activations),
      gib(available), memory_advice(options, config, available));
}

int64_t counted(const Tensor& targets) {
  const int32_t* const ids = targets.data<int32_t>();
  return targets.elements() - std::count(ids, ids + targets.elements(), kIgnoredTarget);
}

// What training.safetensors says beside its tensors.
struct SavedTraining {
  int64_t step = 0;
  std::string data;  // its fingerprint
  std::map<std::string, std::string> options;
};

SavedTraining saved_training(const SafetensorsReader& file) {
  const auto found = file.metadata().find("furious");
  require(found != file.metadata().end(), "{}: was not written by furious train", file.path().string());
  try {
    const Json saved = Json::parse(found->second);
    return {saved.at("step"), saved.at("data"), saved.at("options")};
  } catch (const Json::exception& error) {
    fail("{}: its metadata is damaged: {}", file.path().string(), error.what());
  }
}

}  // namespace

TrainData TrainData::open(const TrainOptions& options) {
  if (options.data == "synthetic:recall") return open_task<RecallTask>(options, RecallOptions{});
  if (options.data == "synthetic:passkey") return open_task<PasskeyTask>(options, PasskeyOptions{});
  if (options.data == "synthetic:lookup") return open_task<LookupTask>(options, LookupOptions{});
  require(!options.data.starts_with("synthetic:"),
          "train: unknown task \"{}\"; there are synthetic:recall, synthetic:passkey and synthetic:lookup",
          options.data);
  return open_dataset(options);
}

Trainer::Trainer(const TrainOptions& options, TrainData data)
    : options_(resolved(options)), device_(device_from_name(options_.device)), data_(std::move(data)) {
  const int64_t vocabulary = data_.batches->vocabulary_size();
  ModelConfig config;
  if (options.init.empty()) {
    config = model_config(options, vocabulary);
  } else {
    config = load_config(options.init);
    require(config.vocabulary >= vocabulary, "train: {} knows {} tokens, but the data has {}", options.init,
            config.vocabulary, vocabulary);
  }
  check_memory(options_, config);
  model_ = std::make_unique<LanguageModel>(options.init.empty() ? LanguageModel(config, options.seed, device_)
                                                                : load_model(options.init, "", device_));
  for (const Parameter& parameter : model_->parameters()) {
    const Shape& shape = parameter.value.value().shape();
    moments_.push_back({Tensor::zeros(shape, DType::f32, device_), Tensor::zeros(shape, DType::f32, device_)});
  }
  prepare();
}

Trainer::Trainer(const TrainOptions& options, const fs::path& checkpoint)
    : options_(resolved(options)), device_(device_from_name(options_.device)), data_(TrainData::open(options)) {
  const SafetensorsReader file(checkpoint / kTrainingFile);
  const SavedTraining saved = saved_training(file);
  require(saved.data == data_.fingerprint,
          "train: {} was trained on other data than {} holds; to go on with new data, "
          "begin a new run with --init",
          checkpoint.string(), options.data);
  check_memory(options_, load_config(checkpoint));
  model_ = std::make_unique<LanguageModel>(load_model(checkpoint, "", device_));
  for (const Parameter& parameter : model_->parameters()) {
    Moments moments{Tensor::empty_like(parameter.value.value()), Tensor::empty_like(parameter.value.value())};
    file.load_into(first_moment_of(parameter), moments.first);
    file.load_into(second_moment_of(parameter), moments.second);
    moments_.push_back(moments);
  }
  step_ = saved.step;
  prepare();
}

void Trainer::prepare() {
  const Compute compute = compute_of(options_, device_);
  require(matmul_supports(compute.precision, device_), "train: {} has no bf16 products on this CPU; use --dtype f32",
          matmul_library(device_));
  require(options_.dtype != "tf32" || !device_.is_cpu(), "train: a CPU has no TF32; use --dtype f32");
  model_->set_compute(compute);
  flops_ = training_flops(model_->config(), options_.batch, options_.length);
  flops_rate_ = known_rate(compute.precision, device_);
  given_ = Tensor::zeros({Given::size(options_)}, DType::i32, device_);
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
  return needed_memory(options_, model_->config(), options_.accumulate, options_.recompute);
}

void Trainer::diverged(const std::string& what) const {
  throw Diverged(fmt::format("train: step {}: {}", step_ + 1, what));
}

Batch Trainer::batch_of(int64_t step, int64_t part) const {
  return data_.batches->at(step, {part * rows(), rows()});
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
  const Given given(feed_->next(), options_);
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
  for (int64_t part = 0; part < options_.accumulate; ++part)
    next_.weights.push_back(static_cast<float>(counted(given.targets[part])) /
                            static_cast<float>(std::max<int64_t>(1, all)));
  std::ranges::copy(next_.weights, given.weights.data<float>());
  const AdamW adamw{learning_rate(options_, step + 1), options_.weight_decay, options_.beta1, options_.beta2, 1e-8};
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
  const Given given(given_, options_);
  const std::vector<Parameter>& parameters = model_->parameters();
  forget_gradients();
  for (int64_t part = 0; part < options_.accumulate; ++part) {
    Tape tape;
    const Variable loss = part_loss(tape, given, part);
    copy(results_.slice(0, 1 + part, 1), loss.value());
    tape.backward(loss, given.weights.slice(0, part, 1));
  }
  std::vector<AdamWTensors> tensors;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Variable& parameter = parameters[i].value;
    gradients_.push_back(parameter.gradient());
    if (parameter.gradient())
      tensors.push_back({parameter.value(), parameter.gradient(), moments_[i].first, moments_[i].second});
    parameter.clear_gradient();
  }
  clip_gradients(results_.slice(0, 0, 1), given.numbers, gradients_, options_.clip);
  adamw_update(tensors, given.numbers);
}

// A graph cannot hold the tables of packed documents, which the host makes anew for every batch: such a run launches
// kernel by kernel, as does the first step, in which libraries make what they keep.
void Trainer::launch() {
  one_by_one_ |= std::ranges::any_of(now_.boundaries, [](const Tensor& boundaries) { return boundaries.defined(); });
  if (device_.is_cpu() || one_by_one_ || !warm_) {
    drop_graph();
    compute();
    warm_ = true;
    return;
  }
  if (!graph_) {
    forget_gradients();
    Arena::of(device_).trim();  // a graph has memory of its own: what the first step took serves it
    graph_.emplace(device_, [this] {
      try {
        compute();
      } catch (...) {
        forget_gradients();  // before that memory goes
        throw;
      }
    });
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

void Trainer::check_divergence(const TrainStep& done) const {
  const std::vector<Parameter>& parameters = model_->parameters();
  if (!std::isfinite(done.gradient_norm)) {
    // The backward pass goes from the last parameter to the first: the last that is broken was the first to break.
    for (size_t i = parameters.size(); i-- > 0;)
      if (!std::isfinite(gradient_norm(std::span(&gradients_[i], 1))))
        diverged(fmt::format("the gradient is not a number, first at {}", parameters[i].name));
  }
  const double guessing = std::log(static_cast<double>(model_->config().vocabulary));
  if (done.loss > kExploded * guessing) {
    std::vector<double> norms;
    for (const Tensor& gradient : gradients_) norms.push_back(gradient_norm(std::span(&gradient, 1)));
    const auto largest = static_cast<size_t>(std::max_element(norms.begin(), norms.end()) - norms.begin());
    diverged(
        fmt::format("the loss has exploded to {:.4g} (guessing has {:.4g}); the largest gradient is at {} (norm "
                    "{:.3g}); a smaller --lr, a longer --warmup or --clip 1 may help",
                    done.loss, guessing, parameters[largest].name, norms[largest]));
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
                                  gib(estimate), memory_advice(options_, model_->config(), estimate - 1)));
  }
  if (!device_.is_cpu()) fetch(step_ + 1);
  const Tensor results = to_device(results_, {});  // waits for the device
  TrainStep done;
  done.gradient_norm = results.data<double>()[0];
  for (int64_t part = 0; part < options_.accumulate; ++part) {
    const double loss = results.data<double>()[1 + part];
    if (!std::isfinite(loss)) loss_not_finite(batch_of(step_, part));
    done.loss += loss * static_cast<double>(now_.weights[static_cast<size_t>(part)]);
  }
  check_divergence(done);
  ++step_;
  done.step = step_;
  done.lr = learning_rate(options_, step_);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  done.tokens_per_second = static_cast<double>(options_.batch * options_.length) / seconds;
  done.mfu = flops_ / seconds / flops_rate_;
  return done;
}

std::optional<double> Trainer::test_loss() const {
  if (!data_.test) return {};
  constexpr int64_t kEndless = 8;  // batches of a task that has no end
  // A part of a batch at a time: in more parts the same tokens.
  int64_t batches = data_.test_batches > 0 ? data_.test_batches : kEndless * options_.accumulate;
  if (options_.eval_batches > 0) batches = std::min(batches, options_.eval_batches * options_.accumulate);
  const Batch first = data_.test->at(0);
  TestLoss loss;
  try {
    loss = furious::test_loss(*model_, *data_.test, batches);
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error&) {
    if (device_.is_cpu()) check_finite(first);
    throw;
  }
  if (!std::isfinite(loss.sum)) loss_not_finite(first);
  return loss.mean();
}

std::vector<double> Trainer::value_rms() const {
  const Batch batch = data_.batches->at(std::max<int64_t>(0, step_ - 1), {0, options_.batch / options_.accumulate});
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
  save_model(directory, *model_);
  if (data_.dataset) save_tokenizer(directory, *data_.dataset->tokenizer());
  std::map<std::string, Tensor> tensors;
  for (size_t i = 0; i < moments_.size(); ++i) {
    tensors[first_moment_of(model_->parameters()[i])] = moments_[i].first;
    tensors[second_moment_of(model_->parameters()[i])] = moments_[i].second;
  }
  // The place in the data is the step: batches are a pure function of it.
  const Json saved{{"step", step_}, {"data", data_.fingerprint}, {"options", to_texts(options_)}};
  write_safetensors(directory / kTrainingFile, tensors, {{"furious", saved.dump()}});
}

TrainOptions saved_options(const fs::path& checkpoint) {
  const SafetensorsReader file(checkpoint / kTrainingFile);
  TrainOptions options;
  for (const auto& [name, text] : saved_training(file).options) set_train_option(options, name, text);
  return options;
}

}  // namespace furious
