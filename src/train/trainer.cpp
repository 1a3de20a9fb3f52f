// furious::Trainer: a Training whose batches the caller gives.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/boundary.h"
#include "base/error.h"
#include "base/file.h"
#include "base/names.h"
#include "base/parallel.h"
#include "model/checkpoint.h"
#include "ops/nn/cross_entropy.h"
#include "train/given_batches.h"
#include "train/options.h"
#include "train/training.h"
#include "train/training_checkpoint.h"

namespace furious {
namespace {

// The token after each one in its row and document; the last has none.
void shift_targets(const TokenBatch& batch, int32_t* targets) {
  const auto elements = static_cast<int64_t>(batch.ids.size());
  for (int64_t i = 0; i < elements; ++i)
    targets[i] = (i + 1) % batch.length == 0 ? kIgnoredTarget : batch.ids[static_cast<size_t>(i + 1)];
  for (const int64_t start : batch.documents)
    if (start > 0) targets[start - 1] = kIgnoredTarget;
}

void check_documents(const TokenBatch& batch) {
  int64_t last = -1;
  for (const int64_t start : batch.documents) {
    require(start > last && start < static_cast<int64_t>(batch.ids.size()),
            "trainer: a document starts at {}, expected increasing positions from 0 to {}", start,
            batch.ids.size() - 1);
    last = start;
  }
}

// Checked; the tensors are copies.
Batch batch_of(const TokenBatch& given, int64_t vocabulary) {
  const auto [rows, length] = std::pair(given.rows, given.length);
  require(rows >= 1 && length >= 1 && rows <= std::numeric_limits<int32_t>::max() / length,
          "trainer: a batch of {} rows of {} tokens, expected at least 1 and fewer than 2³¹ tokens", rows, length);
  const auto elements = static_cast<size_t>(rows * length);
  const auto check = [&](const char* what, size_t count) {
    require(count == elements, "trainer: {} {} for {} rows of {} tokens, expected {}", count, what, rows, length,
            elements);
  };
  const auto check_ids = [&](const char* what, const std::vector<int32_t>& ids, int32_t smallest) {
    check(what, ids.size());
    for (const int32_t id : ids)
      require(id >= smallest && id < vocabulary, "trainer: {} among {}, expected {} to {}", id, what, smallest,
              vocabulary - 1);
  };
  check_ids("ids", given.ids, 0);
  check_documents(given);
  Batch batch{Tensor::empty({rows, length}, DType::i32), Tensor::empty({rows, length}, DType::i32), {}, {}};
  std::ranges::copy(given.ids, batch.inputs.data<int32_t>());
  if (given.targets.empty()) {
    shift_targets(given, batch.targets.data<int32_t>());
  } else {
    check_ids("targets", given.targets, kIgnoredTarget);
    std::ranges::copy(given.targets, batch.targets.data<int32_t>());
  }
  if (!given.weights.empty()) {
    check("weights", given.weights.size());
    for (const float weight : given.weights)
      require(std::isfinite(weight), "trainer: {} among the weights, expected finite numbers", weight);
    batch.weights = Tensor::empty({rows, length}, DType::f32);
    std::ranges::copy(given.weights, batch.weights.data<float>());
  }
  if (!given.documents.empty()) {
    batch.boundaries = Tensor::empty({static_cast<int64_t>(given.documents.size())}, DType::i32);
    std::ranges::transform(given.documents, batch.boundaries.data<int32_t>(),
                           [](int64_t start) { return static_cast<int32_t>(start); });
  }
  return batch;
}

template <class To, class From>
std::vector<To> numbers_of(const Tensor& tensor) {
  return tensor ? std::vector<To>(tensor.data<From>(), tensor.data<From>() + tensor.elements()) : std::vector<To>();
}

TokenBatch token_batch(const Batch& batch) {
  return {batch.inputs.size(0),
          batch.inputs.size(1),
          numbers_of<int32_t, int32_t>(batch.inputs),
          numbers_of<int32_t, int32_t>(batch.targets),
          numbers_of<float, float>(batch.weights),
          numbers_of<int64_t, int32_t>(batch.boundaries)};
}

std::shared_ptr<const Tokenizer> tokenizer_of(const TrainerSetup& setup, const std::filesystem::path& model) {
  if (!setup.tokenizer.empty()) return load_tokenizer(setup.tokenizer);
  if (model.empty()) return nullptr;
  const std::filesystem::path folder = checkpoint_of(model);
  return has_tokenizer(folder) ? load_tokenizer(folder.string()) : nullptr;
}

}  // namespace

struct Trainer::Memory {
  int threads;
  std::unique_ptr<BatchSource> source;  // of options.data; null without
  GivenBatches* given = nullptr;        // of the training
  std::unique_ptr<Training> training;

  // A new one, or one that goes on from a checkpoint.
  Memory(const TrainOptions& options, const TrainerSetup& setup, const std::filesystem::path& checkpoint) {
    check_train_options(options);
    threads = threads_for(options);
    const ThreadLimit limit(threads);
    TrainData data = data_of(options, setup, checkpoint);
    given = static_cast<GivenBatches*>(data.batches.get());
    training = checkpoint.empty()
                   ? std::make_unique<Training>(options, std::move(data), DataParallel{}, setup.cancel)
                   : std::make_unique<Training>(options, checkpoint, std::move(data), DataParallel{}, setup.cancel);
    require(
        given->vocabulary_size() <= vocabulary(),
        "trainer: the model has {} token ids, but the tokenizer, the data or the setup has {}; use those of the model",
        vocabulary(), given->vocabulary_size());
  }

  TrainData data_of(const TrainOptions& options, const TrainerSetup& setup, const std::filesystem::path& checkpoint) {
    require(setup.vocabulary >= 0 && setup.vocabulary <= std::numeric_limits<int32_t>::max(),
            "trainer: a vocabulary of {}, expected 1 to 2³¹ − 1; 0 is that of the tokenizer or the data",
            setup.vocabulary);
    const std::filesystem::path model = checkpoint.empty() ? std::filesystem::path(options.init) : checkpoint;
    TrainData data;
    int64_t known = 0;  // ids that the tokenizer or the data has
    if (!options.data.empty()) {
      data = TrainData::open(options);
      source = std::move(data.batches);
      known = source->vocabulary_size();
    }
    if (!data.tokenizer) data.tokenizer = tokenizer_of(setup, model);
    if (data.tokenizer) known = std::max<int64_t>(known, data.tokenizer->vocabulary_size());
    require(setup.vocabulary == 0 || setup.vocabulary >= known,
            "trainer: a vocabulary of {}, but the tokenizer or the data has {} token ids; give at least as many",
            setup.vocabulary, known);
    const int64_t vocabulary = std::max(setup.vocabulary, known);
    require(
        vocabulary > 0 || !model.empty(),
        "trainer: the number of token ids is not known; set vocabulary or tokenizer in the setup, or data or init in "
        "the options");
    data.batches = std::make_unique<GivenBatches>(static_cast<int32_t>(vocabulary));
    return data;
  }

  int64_t vocabulary() const { return training->model().config().vocabulary; }

  void give(const TokenBatch& batch) {
    Batch checked = batch_of(batch, vocabulary());
    training->set_sizes(batch.rows, batch.length, checked.weights.defined());
    given->give(std::move(checked));
  }

  size_t index_of(const std::string& name) const {
    const std::vector<Parameter>& parameters = training->model().parameters();
    const auto found = std::ranges::find(parameters, name, &Parameter::name);
    if (found != parameters.end()) return static_cast<size_t>(found - parameters.begin());
    std::vector<std::string> known;
    for (const Parameter& parameter : parameters) known.push_back(parameter.name);
    unknown_name("parameter", name, known);
  }
  const Tensor& parameter(size_t index) const { return training->model().parameters()[index].value.value(); }
};

namespace {

NamedArray array_of(const std::string& name, const Tensor& tensor, const Shape& shape) {
  NamedArray array{name, {shape.begin(), shape.end()}, std::vector<float>(static_cast<size_t>(shape.elements()))};
  if (!tensor) return array;
  const Tensor here = to_device(tensor, {});
  std::copy_n(here.data<float>(), here.elements(), array.values.begin());
  return array;
}

}  // namespace

Trainer::Trainer(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;
Trainer& Trainer::operator=(Trainer&&) noexcept = default;

Trainer::Trainer(const TrainOptions& options, const TrainerSetup& setup) try {
  memory_ = std::make_unique<Memory>(options, setup, std::filesystem::path());
} catch (...) {
  rethrow_as_error();
}

Trainer Trainer::resume(const std::string& checkpoint, const std::optional<TrainOptions>& options,
                        const TrainerSetup& setup) try {
  const std::filesystem::path path = checkpoint_of(checkpoint);
  return Trainer(std::make_unique<Memory>(options ? *options : saved_options(path), setup, path));
} catch (...) {
  rethrow_as_error();
}

Trainer::Memory& Trainer::own() const {
  require(memory_ != nullptr, "trainer: it was moved to another; use that one");
  return *memory_;
}

TrainStep Trainer::step(const TokenBatch& batch) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.threads);
  memory.give(batch);
  return memory.training->step();
} catch (...) {
  rethrow_as_error();
}

TrainStep Trainer::backward(const TokenBatch& batch) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.threads);
  memory.give(batch);
  return memory.training->backward();
} catch (...) {
  rethrow_as_error();
}

double Trainer::evaluate(const TokenBatch& batch) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.threads);
  return memory.training->loss(batch_of(batch, memory.vocabulary()));
} catch (...) {
  rethrow_as_error();
}

TokenBatch Trainer::data_batch(int64_t step) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.threads);
  require(memory.source != nullptr, "trainer: there is no data; set data in the options, or make batches of your own");
  require(step >= 1, "trainer: step {}, expected 1 or more", step);
  return token_batch(memory.source->at(step - 1));
} catch (...) {
  rethrow_as_error();
}

std::optional<double> Trainer::test_loss() const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.threads);
  return memory.training->test_loss();
} catch (...) {
  rethrow_as_error();
}

void Trainer::set_learning_rate(std::optional<double> rate) {
  Memory& memory = own();
  require(!rate || (std::isfinite(*rate) && *rate >= 0), "trainer: a learning rate of {}, expected 0 or more",
          rate.value_or(0));
  memory.training->set_learning_rate(rate);
}

std::vector<std::string> Trainer::parameter_names() const try {
  std::vector<std::string> names;
  for (const Parameter& parameter : own().training->model().parameters()) names.push_back(parameter.name);
  return names;
} catch (...) {
  rethrow_as_error();
}

NamedArray Trainer::parameter(const std::string& name) const try {
  const Memory& memory = own();
  const Tensor& value = memory.parameter(memory.index_of(name));
  return array_of(name, value, value.shape());
} catch (...) {
  rethrow_as_error();
}

void Trainer::set_parameter(const std::string& name, const std::vector<float>& values) try {
  const Memory& memory = own();
  const Tensor& value = memory.parameter(memory.index_of(name));
  require(static_cast<int64_t>(values.size()) == value.elements(), "trainer: {} values for {}, expected {}",
          values.size(), name, value.elements());
  const Tensor here = Tensor::empty(value.shape(), DType::f32);
  std::ranges::copy(values, here.data<float>());
  copy_between(value, here);
} catch (...) {
  rethrow_as_error();
}

NamedArray Trainer::gradient(const std::string& name) const try {
  const Memory& memory = own();
  const size_t index = memory.index_of(name);
  const std::vector<Tensor>& gradients = memory.training->gradients();
  require(!gradients.empty(), "trainer: there are no gradients; call step() or backward() first");
  return array_of(name, gradients[index], memory.parameter(index).shape());
} catch (...) {
  rethrow_as_error();
}

void Trainer::save(const std::string& directory) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.threads);
  require(!directory.empty(), "trainer.save: the name of the directory is empty");
  replace_directory(directory, [&](const std::filesystem::path& temporary) { memory.training->save(temporary); });
} catch (...) {
  rethrow_as_error();
}

int64_t Trainer::steps_done() const {
  return own().training->steps_done();
}

int64_t Trainer::vocabulary() const {
  return own().vocabulary();
}

TrainOptions Trainer::options() const {
  return own().training->options();
}

}  // namespace furious
