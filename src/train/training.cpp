#include "train/training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "decode/model_parts.h"
#include "eval/test_loss.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "tensor/arena.h"
#include "train/options.h"
#include "train/training_checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;

// Measured once per process, so that the MFU of all trainings of an ablation has one reference.
double measured_matmul_rate(MatmulPrecision precision, Device device) {
  static std::mutex mutex;
  static std::map<std::pair<MatmulPrecision, std::string>, double> known;
  const std::lock_guard lock(mutex);
  double& rate = known[{precision, name_of(device)}];
  if (rate == 0) rate = matmul_rate(precision, device);
  return rate;
}

// Token ids of one tokenizer mean nothing to a model of another.
void check_tokens(const TrainOptions& options, const TrainData& data, const ModelConfig& config) {
  const int64_t vocabulary = data.batches->vocabulary_size();
  const fs::path model = checkpoint_of(options.init), folder = fs::is_directory(model) ? model : model.parent_path();
  if (data.tokenizer && has_tokenizer(folder)) {
    const std::string own = load_tokenizer(folder.string())->fingerprint(), used = data.tokenizer->fingerprint();
    require(own == used,
            "train: {} {}, but {} was trained with {}; tokenize the text with the model's tokenizer (furious tokenize "
            "--tokenizer {})",
            data.dataset ? options.data : "the setup",
            fmt::format("{} {}", data.dataset ? "was tokenized with" : "has the tokenizer", used), options.init, own,
            folder.string());
  } else if (data.dataset) {
    require(config.vocabulary == vocabulary,
            "train: {} has no tokenizer and a vocabulary of {} tokens, but the data has {}: its token ids are others; "
            "put the tokenizer of the model into its folder and tokenize the text with it",
            options.init, config.vocabulary, vocabulary);
  }
  require(config.vocabulary >= vocabulary, "train: {} has a vocabulary of {} tokens, but the data has {}", options.init,
          config.vocabulary, vocabulary);
}

}  // namespace

ModelConfig config_of(const TrainOptions& options, const TrainData& data) {
  if (options.init.empty()) return model_config(options, data.batches->vocabulary_size());
  ModelConfig config = load_config(options.init);
  check_tokens(options, data, config);
  return config;
}

Training::Training(const TrainOptions& options, TrainData data, const DataParallel& parallel, const Cancel& cancel)
    : Training(options, config_of(options, data), std::move(data), parallel, cancel) {}

Training::Training(const TrainOptions& options, const ModelConfig& config, TrainData&& data,
                   const DataParallel& parallel, const Cancel& cancel)
    : parallel_(parallel),
      options_(resolved(options, parallel.ranks)),
      step_options_(options_),
      rank_options_(parallel.rank_options(options_)),
      device_(device_from_name(options_.device)),
      data_(std::move(data)),
      cancel_(parallel.ranks.size() == 1 ? cancel : Cancel()) {
  check_division(options, parallel.ranks.size());
  check_memory(rank_options_, config, parallel_);
  model_ = std::make_unique<LanguageModel>(
      options.init.empty() ? LanguageModel(config, options.seed, device_,
                                           initialization_from_name(options.initialization), [this] { check_cancel(); })
                           : load_model(options.init, "", device_, 0, [this](int64_t, int64_t) { check_cancel(); }));
  if (data_.dataset) model_->set_bos(options.bos || data_.begins_with_bos());
  make_optimizer();
  prepare();
}

Training::Training(const TrainOptions& options, const fs::path& checkpoint, TrainData data,
                   const DataParallel& parallel, const Cancel& cancel)
    : parallel_(parallel),
      options_(resolved(options, parallel.ranks)),
      step_options_(options_),
      rank_options_(parallel.rank_options(options_)),
      device_(device_from_name(options_.device)),
      data_(std::move(data)),
      cancel_(parallel.ranks.size() == 1 ? cancel : Cancel()) {
  const SafetensorsReader file = open_training_file(checkpoint);
  const TrainingState saved = training_state(file);
  if (const std::vector<std::string> lines = checkpoint_mismatches(checkpoint); !lines.empty())
    fail("train: {}", lines.front());
  require(saved.data == data_.fingerprint,
          "train: {} was trained on other data than {}; start a new run with --init to train on new data",
          checkpoint.string(), options.data);
  check_memory(rank_options_, load_config(checkpoint), parallel_);
  model_ = std::make_unique<LanguageModel>(
      load_model(checkpoint, "", device_, 0, [this](int64_t, int64_t) { check_cancel(); }));
  make_optimizer();
  const double saved_ema = saved_options(checkpoint).ema;
  require(!average_ || saved_ema == 0 || saved_ema == options_.ema,
          "train: {} holds an average of the weights with --ema {}, now it is {}; go on with the same",
          checkpoint.string(), saved_ema, options_.ema);
  optimizer_->load(file);
  if (average_) average_->load(file);
  step_ = saved.step;
  prepare();
}

Training::~Training() {
  drop_graph();
}

void Training::make_optimizer() {
  optimizer_ = std::make_unique<Optimizer>(*model_, parallel_, options_);
  if (options_.ema > 0) average_.emplace(*model_, options_.ema);
}

void Training::prepare() {
  const Compute compute = compute_options(options_, device_);
  require(compute.precision != MatmulPrecision::fp8 || matmul_supports(compute.precision, device_),
          "train: {} has no products in fp8; use --dtype bf16, or a GPU of compute capability 8.9 or later",
          device_.is_cpu() ? "a CPU" : "this GPU");
  const int64_t rows = step_options_.batch / step_options_.accumulate * step_options_.length;
  require(
      compute.precision != MatmulPrecision::fp8 || rows % 16 == 0,
      "train: {} tokens in a micro-batch, expected a multiple of 16 for fp8; change --batch, --length or --accumulate",
      rows);
  require(matmul_supports(compute.precision, device_), "train: {} has no bf16 products on this CPU; use --dtype f32",
          matmul_library(device_));
  require(options_.dtype != "tf32" || !device_.is_cpu(), "train: TF32 is not supported on a CPU; use --dtype f32");
  model_->set_compute(compute);
  flops_rate_ = measured_matmul_rate(compute.precision, device_);
  make_feed(options_, false);
  divergence_ = std::make_unique<DivergenceCheck>(*model_, parallel_.ranks, options_.clip > 0);
  results_ = Tensor::zeros({1 + options_.accumulate}, DType::f64, device_);
}

// Of batches of these sizes.
void Training::make_feed(const TrainOptions& sizes, bool weighted) {
  feed_ = std::make_unique<StepFeed>(sizes, parallel_, *data_.batches, model_->config().vocabulary, device_, weighted);
  feed_->set_learning_rate(rate_);
  step_options_ = sizes;
  rank_options_ = parallel_.rank_options(sizes);
  flops_ = training_flops(model_->config(), rank_options_.batch, rank_options_.length);
}

void Training::set_sizes(int64_t rows, int64_t length, bool weighted) {
  if (rows == step_options_.batch && length == step_options_.length && weighted == feed_->weighted()) return;
  require(rows % options_.accumulate == 0,
          "train: a batch of {} rows cannot be divided into {} micro-batches; change its rows, or accumulate", rows,
          options_.accumulate);
  drop_graph();
  warmed_up_ = graph_disabled_ = false;
  TrainOptions sizes = options_;
  sizes.batch = rows;
  sizes.length = length;
  make_feed(sizes, weighted);
}

void Training::set_learning_rate(std::optional<double> rate) {
  rate_ = rate;
  feed_->set_learning_rate(rate);
}

void Training::check_cancel() const {
  if (cancel_ && cancel_()) throw Cancelled("train: ended by the caller");
}

TrainingMemory Training::memory() const {
  return needed_memory(rank_options_, model_->config(), parallel_);
}

Variable Training::micro_batch_loss(Tape& tape, const StepInputs& inputs, int64_t micro_batch) const {
  const auto i = static_cast<size_t>(micro_batch);
  const auto compute_loss = [&] {
    return model_->loss(tape, inputs.inputs[i], inputs.targets[i], feed_->boundaries()[i], {}, inputs.token_weights[i],
                        options_.z_loss);
  };
  if (!device_.is_cpu()) return compute_loss();  // its value is read after the step
  try {
    const Variable loss = compute_loss();
    if (std::isfinite(*loss.value().data<float>())) return loss;
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error&) {  // a CPU mixer refuses decays that are not finite
    divergence_->check_activations(step_ + 1, feed_->batch(step_, micro_batch));
    throw;
  }
  divergence_->loss_not_finite(step_ + 1, feed_->batch(step_, micro_batch));
}

// One step: forward, backward, clipping, update. On a GPU nothing in it waits for the device, and without boundaries
// nothing in it comes from the host, so that a graph can capture it.
void Training::compute(Profiler* profiler) {
  const StepInputs inputs = feed_->inputs();
  optimizer_->begin_step();
  compute_gradients(inputs, profiler);
  const Profiler::Scope scope(profiler, kOptimizerWork, StepPass::update);
  optimizer_->update(results_.slice(0, 0, 1), inputs.constants);
  if (average_) average_->update(inputs.constants);
}

// Forward and backward of all micro-batches. A rank that diverges still takes part in the collectives of the step, so
// that all ranks learn of it.
void Training::compute_gradients(const StepInputs& inputs, Profiler* profiler) {
  for (int64_t i = 0; i < options_.accumulate; ++i) {
    if (device_.is_cpu()) check_cancel();
    if (i + 1 == options_.accumulate) optimizer_->begin_last_backward();
    Tape tape(profiler);
    Variable loss;
    try {
      loss = micro_batch_loss(tape, inputs, i);
    } catch (const Diverged& error) {
      if (!optimizer_->sharded()) throw;
      failure_ = error.what();
      return optimizer_->fail();
    }
    copy(results_.slice(0, 1 + i, 1), loss.value());
    tape.backward(loss, inputs.weights.slice(0, i, 1));
  }
}

// The boundaries of packed documents are tables that the host makes for every batch, which a graph cannot hold: with
// them kernels are launched one by one, as in the first step, in which libraries allocate what they keep.
void Training::run_step(Profiler* profiler) {
  graph_disabled_ |= std::ranges::any_of(feed_->boundaries(), [](const Tensor& each) { return each.defined(); });
  if (device_.is_cpu() || graph_disabled_ || !warmed_up_ || profiler != nullptr) {
    drop_graph();
    Arena& arena = Arena::of(device_);
    arena.reset_peak();
    const size_t before = arena.usage().live;
    const MatmulTuning tuning;
    compute(profiler);
    memory_ = arena.usage().peak;
    step_bytes_ = memory_ - before;
    warmed_up_ = true;
    return;
  }
  if (!graph_) {
    optimizer_->clear_gradients();
    Arena::of(device_).trim();  // the graph has memory of its own: what the first step used becomes free for it
    const auto work = [this] {
      try {
        compute(nullptr);
      } catch (...) {
        optimizer_->clear_gradients();  // before the memory of the failed capture is freed
        throw;
      }
    };
    graph_.emplace(device_, work, step_bytes_);
  }
  memory_ = Arena::of(device_).usage().live + step_bytes_;  // the graph has an arena of its own
  graph_->run();
}

void Training::drop_graph() {
  optimizer_->clear_gradients();  // they are in its memory
  graph_.reset();
}

TrainStep Training::step(Profiler* profiler) {
  check_cancel();
  const auto start = std::chrono::steady_clock::now();
  feed_->advance(step_);
  try {
    run_step(profiler);
  } catch (const OutOfMemory& error) {  // the update comes last, and allocates first: the weights are unchanged
    drop_graph();
    const int64_t estimate = memory().total();
    throw OutOfMemory(fmt::format("train: step {}: {}; the estimate was {}; {}", step_ + 1, error.what(), gib(estimate),
                                  memory_advice(rank_options_, model_->config(), estimate - 1, parallel_)));
  }
  if (!device_.is_cpu() && data_.batches->known_ahead()) feed_->prefetch(step_ + 1);
  TrainStep done = outcome();
  if (std::isfinite(done.gradient_norm)) ++step_;  // else the update was skipped
  check_divergence(done, std::isfinite(done.gradient_norm) ? step_ : step_ + 1);
  done.step = step_;
  done.lr = feed_->learning_rate(step_);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  done.tokens_per_second = static_cast<double>(step_options_.batch * step_options_.length) / seconds;
  done.mfu = flops_ / seconds / flops_rate_;
  done.memory = static_cast<int64_t>(memory_);
  return done;
}

TrainStep Training::backward() {
  check_cancel();
  drop_graph();
  feed_->advance(step_);
  const StepInputs inputs = feed_->inputs();
  optimizer_->begin_step();
  compute_gradients(inputs, nullptr);
  optimizer_->finish_gradients(results_.slice(0, 0, 1), inputs.constants);
  TrainStep done = outcome();
  check_divergence(done, step_ + 1);
  return done;
}

double Training::loss(const Batch& batch) const {
  const Variable loss = model_->loss(Tape::off(), batch.inputs, batch.targets, batch.boundaries, {}, batch.weights);
  return static_cast<double>(*to_device(loss.value(), {}).data<float>());
}

// Of the gradients that were computed last: waits for the device.
TrainStep Training::outcome() {
  Tensor results;
  {
    const Communicator::Watch watch(parallel_.ranks);
    results = to_device(results_, {});  // waits for the device
  }
  TrainStep done;
  done.gradient_norm = results.data<double>()[0];
  done.loss = batch_loss(results);
  if (optimizer_->sharded()) add_times(done);
  done.tokens = feed_->targets();
  return done;
}

void Training::check_divergence(const TrainStep& done, int64_t step) const {
  divergence_->check_step(step, done, optimizer_->gradients(), feed_->weighted(), options_.z_loss);
}

// The mean loss of the batch over micro-batches and ranks.
double Training::batch_loss(const Tensor& results) {
  double sum = 0;
  try {
    for (int64_t i = 0; i < options_.accumulate && failure_.empty(); ++i) {
      const double loss = results.data<double>()[1 + i];
      if (!std::isfinite(loss)) divergence_->loss_not_finite(step_ + 1, feed_->batch(step_, i));
      sum += loss * static_cast<double>(feed_->weights()[static_cast<size_t>(i)]);
    }
  } catch (const Diverged& error) {
    failure_ = error.what();
  }
  divergence_->agree(std::exchange(failure_, {}));
  if (!optimizer_->sharded()) return sum;
  const std::vector<double> sums = parallel_.ranks.all_gather(sum);
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

void Training::add_times(TrainStep& done) {
  const std::vector<StepTimes> times = parallel_.ranks.all_gather(optimizer_->end_step());
  const auto [fastest, slowest] = std::ranges::minmax_element(times, {}, &StepTimes::work);
  done.ranks = {static_cast<int64_t>(times.size()),
                slowest - times.begin(),
                fastest - times.begin(),
                slowest->work,
                fastest->work,
                times.front().waiting};
}

std::optional<double> Training::test_loss() const {
  if (!data_.test) return {};
  constexpr int64_t kEndless = 8;  // batches of a task without an end
  // Test batches have the rows of one rank's micro-batch: any division of a batch tests the same tokens.
  const int64_t rank = parallel_.ranks.rank(), ranks = parallel_.ranks.size(), parts = options_.accumulate * ranks;
  int64_t batches = data_.test_batches > 0 ? data_.test_batches : kEndless * parts;
  if (options_.eval_batches > 0) batches = std::min(batches, options_.eval_batches * parts);
  const StridedBatches own(*data_.test, rank, ranks);
  const Batch first = own.at(0);
  TestLoss loss;
  std::string failure;
  try {
    loss = furious::test_loss(*model_, own, (batches - rank + ranks - 1) / ranks);
    if (!std::isfinite(loss.sum)) divergence_->loss_not_finite(step_ + 1, first);
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Diverged& error) {
    failure = error.what();
  } catch (const Error&) {
    if (!device_.is_cpu()) throw;
    try {
      divergence_->check_activations(step_ + 1, first);
    } catch (const Diverged& error) {
      failure = error.what();
    }
    if (failure.empty()) throw;
  }
  divergence_->agree(failure);
  TestLoss all;
  for (const TestLoss& each : parallel_.ranks.all_gather(loss)) {
    all.sum += each.sum;
    all.tokens += each.tokens;
  }
  return all.mean();
}

std::vector<double> Training::value_rms() const {
  const Batch batch = feed_->batch(std::max<int64_t>(0, step_ - 1), 0);
  return model_->value_rms(batch.inputs, batch.boundaries);
}

std::string Training::sample(int64_t tokens) const {
  if (!data_.tokenizer) return {};
  const Model model(std::make_shared<Model::Parts>(*model_, data_.tokenizer, false));
  Session session(model);
  session.read("");
  WriteOptions options;
  options.tokens = tokens;
  options.sampling.seed = options_.seed;
  return session.write(options).front().text;
}

void Training::save(const fs::path& directory) const {
  std::map<std::string, Tensor> states = optimizer_->state();
  if (!parallel_.ranks.leads()) return;
  if (average_) {
    average_->add_state(states);
    write_average(directory, average_->averaged(step_), data_);
  }
  write_checkpoint(directory, *model_, states, step_, data_, options_);
}

}  // namespace furious
