#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
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

DType dtype_of(const TrainOptions& options) {
  return options.dtype == "bf16" ? DType::bf16 : DType::f32;
}

TrainingMemory needed_memory(const TrainOptions& options, const ModelConfig& config, int64_t parts, bool recompute) {
  const Device device = device_from_name(options.device);
  return training_memory(config, options.batch / parts, options.length, recompute, device,
                         compute_in(dtype_of(options), device).activations);
}

void check_memory(const TrainOptions& options, const ModelConfig& config) {
  const auto needed = [&](int64_t parts, bool recompute) { return needed_memory(options, config, parts, recompute); };
  const Device device = device_from_name(options.device);
  const Arena::Usage held = Arena::of(device).usage();  // what is held and not in use serves as well
  const int64_t available = memory::available(device) + static_cast<int64_t>(held.reserved - held.live);
  const TrainingMemory memory = needed(options.accumulate, options.recompute);
  if (memory.total() <= available) return;
  std::string advice = "take a smaller --size, --length or --batch";
  if (!options.recompute && needed(options.accumulate, true).total() <= available) {
    advice = fmt::format("--recompute would need {}", gib(needed(options.accumulate, true).total()));
  } else if (memory.parameters < available) {
    for (int64_t parts = options.accumulate + 1; parts <= options.batch; ++parts) {
      if (options.batch % parts != 0 || needed(parts, true).total() > available) continue;
      advice = fmt::format("--accumulate {} --recompute would need {}", parts, gib(needed(parts, true).total()));
      break;
    }
  }
  fail(
      "train: needs about {} of memory on {} ({} for {} parameters with gradients and optimizer, {} for activations), "
      "but {} are free; {}",
      gib(memory.total()), options.device, gib(memory.parameters), parameter_count(config), gib(memory.activations),
      gib(available), advice);
}

double number(const Tensor& loss) {
  float value = 0;
  memory::copy({}, &value, loss.device(), loss.raw(), sizeof(value));
  return static_cast<double>(value);
}

int64_t counted_targets(const Batch& batch) {
  const int32_t* targets = batch.targets.data<int32_t>();
  return batch.targets.elements() - std::count(targets, targets + batch.targets.elements(), kIgnoredTarget);
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
  Compute compute = compute_in(dtype_of(options_), device_);
  require(matmul_supports(compute.precision, device_), "train: {} has no bf16 products on this CPU; use --dtype f32",
          matmul_library(device_));
  compute.recompute = options_.recompute;
  model_->set_compute(compute);
  flops_ = training_flops(model_->config(), options_.batch, options_.length);
  flops_rate_ = matmul_rate(compute.precision, device_);
}

TrainingMemory Trainer::memory() const {
  return needed_memory(options_, model_->config(), options_.accumulate, options_.recompute);
}

void Trainer::diverged(const std::string& what) const {
  throw Diverged(fmt::format("train: step {}: {}", step_ + 1, what));
}

// Says where in the model numbers end, if they do for this batch.
void Trainer::check_finite(const Batch& batch) const {
  const std::string place = model_->first_not_finite(batch.inputs, batch.boundaries);
  if (!place.empty()) diverged(fmt::format("the loss is not a number; the first place where is {}", place));
}

void Trainer::check_loss(double loss, const Batch& batch) const {
  if (std::isfinite(loss)) return;
  check_finite(batch);
  diverged("the loss is not a number; the first place where is the output projection");
}

// Forward and backward. On a GPU nothing waits for the loss, which is read when the step's work is done.
Tensor Trainer::part_loss(const Batch& batch, float weight) {
  Tape tape;
  Variable loss;
  try {
    loss = model_->loss(tape, batch.inputs, batch.targets, batch.boundaries);
  } catch (const Error&) {  // perhaps because a mixer of the CPU was given decays that are not finite
    if (device_.is_cpu()) check_finite(batch);
    throw;
  }
  if (device_.is_cpu()) check_loss(number(loss.value()), batch);
  const Tensor gradient = Tensor::empty({1}, DType::f32, device_);
  fill(gradient, weight);
  tape.backward(loss, gradient);
  return loss.value();
}

std::vector<Trainer::Part> Trainer::accumulate_gradients() {
  const int64_t rows = options_.batch / options_.accumulate;
  std::vector<Part> parts;
  int64_t counted = 0;
  for (int64_t part = 0; part < options_.accumulate; ++part) {
    parts.push_back({data_.batches->at(step_, {part * rows, rows}), 0, {}});
    counted += counted_targets(parts.back().batch);
  }
  for (Part& part : parts) {
    part.weight = static_cast<float>(counted_targets(part.batch)) / static_cast<float>(std::max<int64_t>(1, counted));
    part.loss = part_loss(part.batch, part.weight);
  }
  return parts;
}

double Trainer::total_loss(const std::vector<Part>& parts) const {
  double sum = 0;
  for (const Part& part : parts) {
    const double loss = number(part.loss);
    check_loss(loss, part.batch);
    sum += loss * static_cast<double>(part.weight);
  }
  return sum;
}

void Trainer::update(double gradient_scale, double lr) {
  std::vector<AdamWTensors> tensors;
  for (size_t i = 0; i < moments_.size(); ++i) {
    const Variable& parameter = model_->parameters()[i].value;
    if (parameter.gradient())
      tensors.push_back({parameter.value(), parameter.gradient(), moments_[i].first, moments_[i].second});
    parameter.clear_gradient();
  }
  adamw_update(tensors, {lr, options_.weight_decay, options_.beta1, options_.beta2, 1e-8}, step_, gradient_scale);
}

TrainStep Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Parameter>& parameters = model_->parameters();
  for (const Parameter& parameter : parameters) parameter.value.clear_gradient();
  TrainStep done;
  const std::vector<Part> parts = accumulate_gradients();
  std::vector<Tensor> gradients;
  for (const Parameter& parameter : parameters) gradients.push_back(parameter.value.gradient());
  done.gradient_norm = gradient_norm(gradients);  // waits for the device: by now the losses are there too
  done.loss = total_loss(parts);
  if (!std::isfinite(done.gradient_norm)) {
    // The backward pass goes from the last parameter to the first: the last that is broken was the first to break.
    for (size_t i = parameters.size(); i-- > 0;)
      if (!std::isfinite(gradient_norm(std::span(&gradients[i], 1))))
        diverged(fmt::format("the gradient is not a number, first at {}", parameters[i].name));
  }
  const double guessing = std::log(static_cast<double>(model_->config().vocabulary));
  if (done.loss > kExploded * guessing) {
    size_t largest = 0;
    std::vector<double> norms;
    for (const Tensor& gradient : gradients) norms.push_back(gradient_norm(std::span(&gradient, 1)));
    largest = static_cast<size_t>(std::max_element(norms.begin(), norms.end()) - norms.begin());
    diverged(
        fmt::format("the loss has exploded to {:.4g} (guessing has {:.4g}); the largest gradient is at {} (norm "
                    "{:.3g}); a smaller --lr, a longer --warmup or --clip 1 may help",
                    done.loss, guessing, parameters[largest].name, norms[largest]));
  }
  ++step_;
  done.step = step_;
  done.lr = learning_rate(options_, step_);
  const double scale = options_.clip > 0 && done.gradient_norm > options_.clip ? options_.clip / done.gradient_norm : 1;
  gradients.clear();
  update(scale, done.lr);
  // On a GPU the update is still under way, and its time counts in the next step, which waits for it.
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
  } catch (const Error&) {
    if (device_.is_cpu()) check_finite(first);
    throw;
  }
  check_loss(loss.sum, first);
  return loss.mean();
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
