#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "data/synthetic.h"
#include "eval/test_loss.h"
#include "infer/model_parts.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "model/safetensors.h"
#include "ops/adamw.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
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
  BatchOptions batches{options.batch, options.length, packing_from_name(options.packing), Order::shuffled,
                       options.seed, {}};
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

void check_memory(const TrainOptions& options, const ModelConfig& config) {
  const auto needed = [&](int64_t parts, bool recompute) {
    return training_memory(config, options.batch / parts, options.length, recompute);
  };
  const int64_t available = available_memory();
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
  fail("train: needs about {} of memory ({} for {} parameters with gradients and optimizer, {} for activations), "
       "but {} are free; {}",
       gib(memory.total()), gib(memory.parameters), parameter_count(config), gib(memory.activations), gib(available),
       advice);
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
  require(!options.data.starts_with("synthetic:"),
          "train: unknown task \"{}\"; there are synthetic:recall and synthetic:passkey", options.data);
  return open_dataset(options);
}

Trainer::Trainer(const TrainOptions& options, TrainData data) : options_(options), data_(std::move(data)) {
  const int64_t vocabulary = data_.batches->vocabulary_size();
  ModelConfig config;
  if (options.init.empty()) {
    config = model_config(options, vocabulary);
  } else {
    config = load_config(options.init);
    require(config.vocabulary >= vocabulary, "train: {} knows {} tokens, but the data has {}", options.init,
            config.vocabulary, vocabulary);
  }
  check_memory(options, config);
  model_ = std::make_unique<LanguageModel>(options.init.empty() ? LanguageModel(config, options.seed)
                                                                : load_model(options.init));
  for (const Parameter& parameter : model_->parameters()) {
    const Shape& shape = parameter.value.value().shape();
    moments_.push_back({Tensor::zeros(shape, DType::f32), Tensor::zeros(shape, DType::f32)});
  }
  prepare();
}

Trainer::Trainer(const TrainOptions& options, const fs::path& checkpoint)
    : options_(options), data_(TrainData::open(options)) {
  const SafetensorsReader file(checkpoint / kTrainingFile);
  const SavedTraining saved = saved_training(file);
  require(saved.data == data_.fingerprint, "train: {} was trained on other data than {} holds; to go on with new data, "
          "begin a new run with --init", checkpoint.string(), options.data);
  check_memory(options, load_config(checkpoint));
  model_ = std::make_unique<LanguageModel>(load_model(checkpoint));
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
  const bool bf16 = options_.dtype == "bf16";
  const MatmulPrecision precision = bf16 ? MatmulPrecision::bf16 : MatmulPrecision::f32;
  require(matmul_supports(precision), "train: {} has no bf16 products on this CPU; use --dtype f32", matmul_library());
  model_->set_compute({precision, options_.recompute});
  flops_ = training_flops(model_->config(), options_.batch, options_.length);
  flops_rate_ = matmul_rate(precision);
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

double Trainer::part_loss(const Batch& batch, float weight) {
  Tape tape;
  Variable loss;
  try {
    loss = model_->loss(tape, batch.inputs, batch.targets, batch.boundaries);
  } catch (const Error&) {  // perhaps because a mixer was given decays that are not finite
    check_finite(batch);
    throw;
  }
  const auto value = static_cast<double>(loss.value().data<float>()[0]);
  check_loss(value, batch);
  const Tensor gradient = Tensor::empty({1}, DType::f32);
  fill(gradient, weight);
  tape.backward(loss, gradient);
  return value * static_cast<double>(weight);
}

double Trainer::accumulate_gradients() {
  const int64_t rows = options_.batch / options_.accumulate;
  std::vector<Batch> parts;
  int64_t counted = 0;
  for (int64_t part = 0; part < options_.accumulate; ++part) {
    parts.push_back(data_.batches->at(step_, {part * rows, rows}));
    counted += counted_targets(parts.back());
  }
  double loss = 0;
  for (const Batch& part : parts)
    loss += part_loss(part, static_cast<float>(counted_targets(part)) / static_cast<float>(std::max<int64_t>(1, counted)));
  return loss;
}

TrainStep Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Parameter>& parameters = model_->parameters();
  for (const Parameter& parameter : parameters) parameter.value.clear_gradient();
  TrainStep done;
  done.loss = accumulate_gradients();
  std::vector<Tensor> gradients;
  for (const Parameter& parameter : parameters) gradients.push_back(parameter.value.gradient());
  done.gradient_norm = gradient_norm(gradients);
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
    diverged(fmt::format("the loss has exploded to {:.4g} (guessing has {:.4g}); the largest gradient is at {} (norm "
                         "{:.3g}); a smaller --lr, a longer --warmup or --clip 1 may help",
                         done.loss, guessing, parameters[largest].name, norms[largest]));
  }
  ++step_;
  done.step = step_;
  done.lr = learning_rate(options_, step_);
  const double scale = options_.clip > 0 && done.gradient_norm > options_.clip ? options_.clip / done.gradient_norm : 1;
  const AdamW adamw{done.lr, options_.weight_decay, options_.beta1, options_.beta2, 1e-8};
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (gradients[i])
      adamw_update(parameters[i].value.value(), gradients[i], moments_[i].first, moments_[i].second, adamw, step_, scale);
    gradients[i] = {};
    parameters[i].value.clear_gradient();
  }
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
    check_finite(first);
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
