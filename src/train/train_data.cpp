#include "train/train_data.h"

#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "data/synthetic.h"
#include "train/options.h"

namespace furious {
namespace {

std::string fingerprint_of(const Dataset& dataset) {
  std::string text = dataset.manifest().tokenizer.fingerprint;
  for (const ShardInfo& shard : dataset.manifest()[Split::train].shards)
    text += fmt::format(" {} {} {:x} {:x}", shard.tokens, shard.documents, shard.tokens_crc, shard.documents_crc);
  return fmt::format("fnv1a64:{:016x}", hash_of(text));
}

TrainData open_dataset(const TrainOptions& options, int ranks) {
  TrainData data;
  data.dataset = std::make_unique<Dataset>(options.data);
  data.tokenizer = data.dataset->tokenizer();
  BatchOptions batches{options.batch,   options.length, packing_from_name(options.packing),
                       Order::shuffled, options.seed,   {},
                       options.bos};
  auto train = std::make_unique<DatasetBatches>(*data.dataset, Split::train, batches);
  data.epoch_steps = train->steps();
  data.batches = std::move(train);
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

}  // namespace

TrainData TrainData::open(const TrainOptions& options, int ranks) {
  check_division(options, ranks);
  if (options.data == "synthetic:recall") return open_task<RecallTask>(options, ranks, RecallOptions{});
  if (options.data == "synthetic:passkey") return open_task<PasskeyTask>(options, ranks, PasskeyOptions{});
  if (options.data == "synthetic:lookup") return open_task<LookupTask>(options, ranks, LookupOptions{});
  if (options.data.starts_with("synthetic:"))
    unknown_name("task", options.data,
                 std::vector<std::string>{"synthetic:recall", "synthetic:passkey", "synthetic:lookup"});
  return open_dataset(options, ranks);
}

bool TrainData::begins_with_bos() const {
  int32_t first = -1;
  dataset->tokens(Split::train).copy(0, 1, &first);
  return first == dataset->tokenizer()->bos();
}

}  // namespace furious
