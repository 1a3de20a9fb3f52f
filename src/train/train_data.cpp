#include "train/train_data.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/names.h"
#include "base/number.h"
#include "data/mixture.h"
#include "data/synthetic.h"
#include "train/options.h"

namespace furious {
namespace {

// False also for a name that is too long to be one.
bool exists(const std::string& path) {
  std::error_code failed;
  return std::filesystem::exists(path, failed);
}

std::string fingerprint_of(const Dataset& dataset) {
  std::string text = dataset.manifest().tokenizer.fingerprint;
  for (const ShardInfo& shard : dataset.manifest()[Split::train].shards)
    text += fmt::format(" {} {} {:x} {:x}", shard.tokens, shard.documents, shard.tokens_crc, shard.documents_crc);
  return fmt::format("fnv1a64:{:016x}", hash_of(text));
}

void check_same_tokenizer(const Dataset& first, const Dataset& other, const std::string& folder,
                          const std::string& other_folder) {
  const std::string &a = first.tokenizer()->fingerprint(), &b = other.tokenizer()->fingerprint();
  require(a == b, "--data mixes two tokenizers: \"{}\" has {}, \"{}\" has {}; tokenize both with the same --tokenizer",
          folder, a, other_folder, b);
}

// One source as it is, several mixed.
SourceBatches batches_of(const std::vector<const DataSource*>& sources, Split split, BatchOptions options) {
  const auto counted = [](auto batches) {
    const int64_t steps = batches->steps();
    return SourceBatches{std::move(batches), steps};
  };
  if (sources.size() == 1) return counted(std::make_unique<DatasetBatches>(*sources[0]->dataset, split, options));
  const int64_t batch = std::exchange(options.batch, 1);
  std::vector<DatasetBatches> parts;
  std::vector<double> shares;
  for (const DataSource* source : sources) {
    parts.emplace_back(*source->dataset, split, options);
    shares.push_back(source->share);
  }
  return counted(std::make_unique<MixedBatches>(std::move(parts), shares, batch, options.order));
}

bool has_targets(const DataSource& source, Split split) {
  return source.dataset->tokens(split).size() > 1;
}

std::string fingerprint_of(const std::vector<DataSource>& sources) {
  if (sources.size() == 1) return fingerprint_of(*sources[0].dataset);
  std::string text;
  for (const DataSource& source : sources) text += fmt::format("{}:{} ", fingerprint_of(*source.dataset), source.share);
  return fmt::format("fnv1a64:{:016x}", hash_of(text));
}

TrainData open_dataset(const TrainOptions& options, int ranks) {
  std::vector<DataSource> sources = open_sources(options.data);
  std::vector<const DataSource*> all;
  for (const DataSource& source : sources) all.push_back(&source);
  BatchOptions batches{options.batch,   options.length,        packing_from_name(options.packing),
                       Order::shuffled, options.seed,          {},
                       options.bos,     options.shuffle_window};
  TrainData data;
  auto train = batches_of(all, Split::train, batches);
  data.batches = std::move(train.batches);
  data.epoch_steps = train.steps;
  batches.batch = options.batch / options.accumulate / ranks;
  if (std::ranges::any_of(sources, [](const DataSource& source) { return has_targets(source, Split::test); })) {
    auto test = once_batches(sources, Split::test, batches);
    data.test = std::move(test.batches);
    data.test_batches = test.steps;
  }
  data.fingerprint = fingerprint_of(sources);
  data.dataset = std::move(sources.front().dataset);
  data.tokenizer = data.dataset->tokenizer();
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

std::vector<DataShare> data_shares(const std::string& data) {
  if (exists(data) || data.find_first_of(":,") == data.npos) return {{data, 0}};
  std::vector<DataShare> shares;
  for (size_t begin = 0; begin <= data.size();) {
    const size_t end = std::min(data.find(',', begin), data.size());
    const std::string part = data.substr(begin, end - begin);
    begin = end + 1;
    const size_t colon = exists(part) ? part.npos : part.rfind(':');
    if (colon == part.npos) {
      shares.push_back({part, 0});
      continue;
    }
    const auto share = parse_number<double>(part.substr(colon + 1));
    require(share && *share > 0 && std::isfinite(*share),
            "--data: \"{}\" is neither a folder nor FOLDER:SHARE with a number above 0, as in a:0.7,b:0.3", part);
    shares.push_back({part.substr(0, colon), *share});
  }
  const auto with_share = std::ranges::count_if(shares, [](const DataShare& one) { return one.share > 0; });
  require(with_share == 0 || with_share == static_cast<int64_t>(shares.size()),
          "--data: some folders of \"{}\" have a share, others have none; give all of them one, or none", data);
  return shares;
}

std::vector<DataSource> open_sources(const std::string& data) {
  std::vector<DataSource> sources;
  for (const DataShare& one : data_shares(data)) {
    sources.push_back({one.folder, one.share, std::make_unique<Dataset>(one.folder)});
    DataSource& source = sources.back();
    check_same_tokenizer(*sources.front().dataset, *source.dataset, sources.front().folder, source.folder);
    if (source.share == 0) source.share = static_cast<double>(source.dataset->tokens(Split::train).size());
  }
  return sources;
}

SourceBatches once_batches(const std::vector<DataSource>& sources, Split split, BatchOptions options) {
  options.order = Order::once;
  std::vector<const DataSource*> used;
  for (const DataSource& source : sources)
    if (sources.size() == 1 || has_targets(source, split)) used.push_back(&source);
  if (used.empty()) used.push_back(&sources.front());  // for its message
  return batches_of(used, split, options);
}

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
