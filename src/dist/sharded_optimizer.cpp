#include "dist/sharded_optimizer.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "ops/elementwise.h"

namespace furious {
namespace {

// Alignment of parameters and parts in elements, for vector loads.
constexpr int64_t kAligned = 64;

// Large enough to amortize latency, small enough that the last message, which nothing overlaps, is short.
int64_t bucket_for(Device device) {
  return device.is_cpu() ? 1 << 20 : 8 << 20;
}

int64_t rounded_up(int64_t count, int64_t to) {
  return (count + to - 1) / to * to;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(Communicator& communicator, std::span<const Variable> parameters, DType sent,
                                   int64_t bucket)
    : communicator_(communicator), sent_(sent), variables_(parameters.begin(), parameters.end()) {
  require(!parameters.empty(), "sharded optimizer: no parameters");
  device_ = parameters.front().value().device();
  offsets_.resize(parameters.size());
  int64_t used = 0;
  for (size_t i = parameters.size(); i-- > 0;) {
    offsets_[i] = used;
    used = rounded_up(used + parameters[i].value().elements(), kAligned);
  }
  const int64_t unit = kAligned * communicator.size();  // so that parts are equal
  const int64_t all = rounded_up(used, unit);
  bucket = rounded_up(bucket > 0 ? bucket : bucket_for(device_), unit);
  for (int64_t begin = 0; begin < all; begin += bucket) begins_.push_back(begin);
  begins_.push_back(all);

  parameters_ = Tensor::zeros({all}, DType::f32, device_);
  gradient_ = Tensor::zeros({all}, DType::f32, device_);
  for (Tensor* shard : {&sum_, &first_, &second_})
    *shard = Tensor::zeros({all / communicator.size()}, DType::f32, device_);
  for (size_t i = 0; i < variables_.size(); ++i) {
    const Tensor place = place_of(parameters_, i);
    copy(place, variables_[i].value());
    gradients_.push_back(place_of(gradient_, i));
    variables_[i].settle(place, gradients_.back(), [this, i] { complete(i); });
  }
  parameters_in_.resize(begins_.size() - 1);
  for (size_t i = 0; i < variables_.size(); ++i) for_each_bucket(i, [this](int64_t which) { ++parameters_in_[which]; });
}

ShardedOptimizer::~ShardedOptimizer() {
  for (size_t i = 0; i < variables_.size(); ++i) variables_[i].settle(variables_[i].value(), gradients_[i], {});
}

int64_t ShardedOptimizer::bytes(int64_t parameters, int ranks) {
  return parameters * static_cast<int64_t>(sizeof(float)) * 2 +
         parameters * static_cast<int64_t>(sizeof(float)) * 3 / ranks;
}

Tensor ShardedOptimizer::bucket_of(const Tensor& flat, int64_t bucket) const {
  return flat.slice(0, begins_[bucket], begins_[bucket + 1] - begins_[bucket]);
}

Tensor ShardedOptimizer::own_part_of(const Tensor& bucket) const {
  const int64_t part = bucket.elements() / communicator_.size();
  return bucket.slice(0, communicator_.rank() * part, part);
}

Tensor ShardedOptimizer::part_in_shard(const Tensor& shard, int64_t bucket) const {
  const int64_t ranks = communicator_.size();
  return shard.slice(0, begins_[bucket] / ranks, (begins_[bucket + 1] - begins_[bucket]) / ranks);
}

Tensor ShardedOptimizer::place_of(const Tensor& flat, size_t parameter) const {
  const Shape& shape = variables_[parameter].value().shape();
  return flat.slice(0, offsets_[parameter], shape.elements()).view(shape);
}

void ShardedOptimizer::for_each_bucket(size_t parameter, const std::function<void(int64_t)>& f) const {
  const int64_t begin = offsets_[parameter], end = begin + variables_[parameter].value().elements();
  const auto after = std::ranges::upper_bound(begins_, begin);  // the bucket after the one it begins in
  for (int64_t bucket = after - begins_.begin() - 1; bucket < buckets() && begins_[bucket] < end; ++bucket) f(bucket);
}

void ShardedOptimizer::begin_step() {
  if (!collectives_) collectives_ = make_collectives(communicator_, device_, sent_);
  collectives_->begin_step();
  sending_ = false;
  next_ = 0;
  complete_.assign(variables_.size(), false);
  missing_ = parameters_in_;
}

void ShardedOptimizer::send() {
  sending_ = true;
}

void ShardedOptimizer::complete(size_t parameter) {
  if (!sending_ || complete_[parameter]) return;
  complete_[parameter] = true;
  for_each_bucket(parameter, [this](int64_t bucket) { --missing_[bucket]; });
  send_ready();
}

// In one order on all ranks.
void ShardedOptimizer::send_ready() {
  for (; next_ < buckets() && missing_[next_] == 0; ++next_)
    collectives_->reduce_scatter(bucket_of(gradient_, next_), part_in_shard(sum_, next_));
}

void ShardedOptimizer::fail() {
  for (size_t i = 0; i < variables_.size(); ++i) {
    fill(gradients_[i], std::numeric_limits<float>::quiet_NaN());
    complete_[i] = true;
  }
}

void ShardedOptimizer::finish() {
  for (size_t i = 0; i < variables_.size(); ++i)
    if (!complete_[i] && !variables_[i].gradient()) fill(gradients_[i], 0);  // unused parameter
  std::ranges::fill(missing_, 0);
  send_ready();
  collectives_->finish_reduce();
}

std::vector<Tensor> ShardedOptimizer::sums() const {
  std::vector<Tensor> sums;
  for (int64_t bucket = 0; bucket < buckets(); ++bucket) sums.push_back(part_in_shard(sum_, bucket));
  return sums;
}

void ShardedOptimizer::add_squares(const Tensor& squares) {
  collectives_->all_reduce(squares);
}

std::vector<AdamWTensors> ShardedOptimizer::to_update(const std::function<bool(size_t)>& is_member) const {
  std::vector<AdamWTensors> tensors;
  if (!is_member) {
    for (int64_t bucket = 0; bucket < buckets(); ++bucket) tensors.push_back(own_tensors(bucket));
    return tensors;
  }
  for (size_t i = 0; i < variables_.size(); ++i)
    if (is_member(i))
      for (const OwnPart& part : own_parts(i)) tensors.push_back(part.tensors);
  return tensors;
}

AdamWTensors ShardedOptimizer::own_tensors(int64_t bucket) const {
  return {own_part_of(bucket_of(parameters_, bucket)), part_in_shard(sum_, bucket), part_in_shard(first_, bucket),
          part_in_shard(second_, bucket)};
}

std::vector<ShardedOptimizer::OwnPart> ShardedOptimizer::own_parts(size_t parameter) const {
  std::vector<OwnPart> parts;
  for (const Stretch& own : own_stretches(parameter)) {
    const AdamWTensors all = own_tensors(own.bucket);
    const auto cut = [&](const Tensor& part) { return part.slice(0, own.in_part, own.count); };
    parts.push_back(
        {own.in_parameter, {cut(all.parameter), cut(all.gradient), cut(all.first_moment), cut(all.second_moment)}});
  }
  return parts;
}

std::vector<ShardedOptimizer::Stretch> ShardedOptimizer::own_stretches(size_t parameter) const {
  std::vector<Stretch> stretches;
  const int64_t offset = offsets_[parameter], count = variables_[parameter].value().elements();
  for_each_bucket(parameter, [&](int64_t bucket) {
    const int64_t part = (begins_[bucket + 1] - begins_[bucket]) / communicator_.size();
    const int64_t own = begins_[bucket] + communicator_.rank() * part;
    const int64_t begin = std::max(offset, own), end = std::min(offset + count, own + part);
    if (begin < end) stretches.push_back({bucket, begin - own, begin - offset, end - begin});
  });
  return stretches;
}

void ShardedOptimizer::gather_parameters() {
  std::vector<Tensor> all;
  for (int64_t bucket = 0; bucket < buckets(); ++bucket) all.push_back(bucket_of(parameters_, bucket));
  collectives_->all_gather(all);
}

Tensor ShardedOptimizer::zeros_for_all() const {
  return Tensor::zeros({begins_.back()}, DType::f32, device_);
}

void ShardedOptimizer::gather(const Tensor& flat, const std::function<bool(size_t)>& is_member) {
  std::vector<bool> wanted(static_cast<size_t>(buckets()));
  for (size_t i = 0; i < variables_.size(); ++i)
    if (is_member(i)) for_each_bucket(i, [&](int64_t bucket) { wanted[static_cast<size_t>(bucket)] = true; });
  std::vector<Tensor> all;
  for (int64_t bucket = 0; bucket < buckets(); ++bucket)
    if (wanted[static_cast<size_t>(bucket)]) all.push_back(bucket_of(flat, bucket));
  collectives_->all_gather(all);
}

StepTimes ShardedOptimizer::end_step() {
  return collectives_->end_step();
}

void ShardedOptimizer::set_moments(size_t parameter, const Tensor& first, const Tensor& second) {
  for (const Stretch& own : own_stretches(parameter)) {
    const auto put = [&](const Tensor& shard, const Tensor& from) {
      copy_between(part_in_shard(shard, own.bucket).slice(0, own.in_part, own.count),
                   from.view({from.elements()}).slice(0, own.in_parameter, own.count));
    };
    put(first_, first);
    if (second) put(second_, second);
  }
}

// The shards of all ranks as tensors of the parameters' shapes, on the CPU of rank 0.
std::vector<Tensor> ShardedOptimizer::whole(const Tensor& shard) const {
  const Tensor own = to_device(shard, {});
  const Tensor all = communicator_.leads() ? Tensor::empty({begins_.back()}, DType::f32) : Tensor();
  std::vector<Communicator::Message> receive, send;
  for (int64_t bucket = 0; bucket < buckets(); ++bucket) {
    const Tensor part = part_in_shard(own, bucket);
    if (!communicator_.leads()) {
      send.push_back({0, part.raw(), part.bytes()});
      continue;
    }
    const Tensor place = bucket_of(all, bucket);
    copy(own_part_of(place), part);
    for (int rank = 1; rank < communicator_.size(); ++rank)
      receive.push_back({rank, place.slice(0, rank * part.elements(), part.elements()).raw(), part.bytes()});
  }
  communicator_.post([&] { communicator_.exchange(receive, send); });
  communicator_.wait();
  std::vector<Tensor> tensors;
  if (communicator_.leads())
    for (size_t i = 0; i < variables_.size(); ++i) tensors.push_back(place_of(all, i));
  return tensors;
}

ShardedOptimizer::Moments ShardedOptimizer::moments() const {
  return {whole(first_), whole(second_)};
}

}  // namespace furious
