// The parameters of one model over several ranks (ZeRO, stage 1: Rajbhandari and others, 2020).
//
// All parameters lie one after the other in one piece of memory, the last first: in about the order in which the
// backward pass completes their gradients, which lie the same way. Both are cut into buckets, whatever parameter a cut
// goes through, and each bucket into as many parts as there are ranks. A bucket is summed over the ranks as soon as its
// last gradient is complete, while the backward pass goes on. A rank receives only the sum of its own part, keeps the
// moments of its own part, updates it, and gives the parameters to the others:
//
//   bucket 0            bucket 1            ...
//   rank 0 | rank 1     rank 0 | rank 1
//
// So a rank holds all parameters and its own gradients, but the sum and the moments only of 1/n of them.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dist/link.h"
#include "ops/optim/adamw.h"
#include "ops/tape.h"

namespace furious {

class Shards {
 public:
  // The parameters move into its memory, with their values. `bucket` is the number of elements to aim at; 0: what suits
  // the device. Talks to nobody: the ranks meet in the first step.
  Shards(Communicator& communicator, std::span<const Variable> parameters, DType sent, int64_t bucket = 0);
  ~Shards();

  // A step: between send() and finish(), a gradient that is complete is sent.
  void begin_step();
  void send();
  void fail();    // the gradients of this rank will not be there: they count as NaN
  void finish();  // the sums are there for what the device is given from now on
  std::vector<Tensor> sums() const;
  void add_squares(const Tensor& squares);  // those of the other ranks
  std::vector<AdamWTensors> to_update() const;
  void gather_parameters();
  LinkTimes end_step();

  const Tensor& gradient(size_t parameter) const { return gradients_[parameter]; }  // of this rank alone

  // Moments of whole parameters, on the CPU: taken apart, and put together again on rank 0 (there is nothing elsewhere;
  // all ranks must call it).
  struct Moments {
    std::vector<Tensor> first, second;
  };
  void set_moments(size_t parameter, const Tensor& first, const Tensor& second);
  Moments moments() const;

  int64_t buckets() const { return static_cast<int64_t>(begins_.size()) - 1; }
  // Bytes of all that belongs to so many parameters on each of so many ranks.
  static int64_t bytes(int64_t parameters, int ranks);

 private:
  Tensor bucket_of(const Tensor& flat, int64_t bucket) const;
  Tensor own_part_of(const Tensor& bucket) const;
  Tensor part_in_shard(const Tensor& shard, int64_t bucket) const;
  Tensor place_of(const Tensor& flat, size_t parameter) const;
  void for_each_bucket(size_t parameter, const std::function<void(int64_t)>& f) const;
  void complete(size_t parameter);
  void send_ready();
  std::vector<Tensor> whole(const Tensor& shard) const;

  Communicator& communicator_;
  Device device_;
  DType sent_;
  std::vector<Variable> variables_;
  std::vector<int64_t> offsets_;  // of each parameter
  std::vector<int64_t> begins_;   // of each bucket, and behind the last
  Tensor parameters_, gradient_;  // f32, all
  Tensor sum_, first_, second_;   // f32, of this rank's parts, one after the other
  std::vector<Tensor> gradients_;
  std::unique_ptr<Link> link_;

  bool sending_ = false;
  std::vector<bool> complete_;
  std::vector<int64_t> parameters_in_;  // each bucket, wholly or partly
  std::vector<int64_t> missing_;        // of them in this step
  int64_t next_ = 0;                    // bucket to be sent
};

}  // namespace furious
