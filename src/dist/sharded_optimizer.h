// Optimizer state sharded over ranks (ZeRO, stage 1: Rajbhandari and others, 2020).
//
// All parameters are contiguous in one block of memory, the last first: about the order in which the backward pass
// completes their gradients, which have the same layout. Both are divided into buckets, also in the middle of a
// parameter, and each bucket into one part per rank. A bucket is reduced as soon as its last gradient is complete,
// while the backward pass continues. A rank receives only the sum of its own part, keeps the moments of that part,
// updates it, and broadcasts the new parameters (reduce-scatter and all-gather):
//
//   bucket 0            bucket 1            ...
//   rank 0 | rank 1     rank 0 | rank 1
//
// So a rank holds all parameters and its own gradients, but sums and moments of only 1/n of them.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "dist/collectives.h"
#include "ops/optim/adamw.h"
#include "ops/tape.h"

namespace furious {

class ShardedOptimizer {
 public:
  // Moves the parameters, with their values, into its memory. `bucket`: the approximate number of elements; 0: the
  // default of the device. Does not communicate before the first step.
  ShardedOptimizer(Communicator& communicator, std::span<const Variable> parameters, DType sent, int64_t bucket = 0);
  ~ShardedOptimizer();

  // A step: between send() and finish(), completed gradients are sent.
  void begin_step();
  void send();
  void fail();    // this rank has no gradients: they count as NaN
  void finish();  // work submitted to the device from now on sees the sums
  std::vector<Tensor> sums() const;
  void add_squares(const Tensor& squares);  // adds those of the other ranks
  // This rank's parts of all parameters, or of those that `is_member` selects by number.
  std::vector<AdamWTensors> to_update(const std::function<bool(size_t parameter)>& is_member = {}) const;
  // This rank's parts of one parameter, with the element at which each begins in it.
  struct OwnPart {
    int64_t begin;
    AdamWTensors tensors;
  };
  std::vector<OwnPart> own_parts(size_t parameter) const;
  void gather_parameters();
  // Memory with the layout of the parameters, zero; what it has for one of them; and its parts on all ranks where each
  // has written its own, of the parameters that `is_member` selects.
  Tensor zeros_for_all() const;
  Tensor place_of(const Tensor& flat, size_t parameter) const;
  void gather(const Tensor& flat, const std::function<bool(size_t parameter)>& is_member);
  StepTimes end_step();

  const Tensor& gradient(size_t parameter) const { return gradients_[parameter]; }  // of this rank alone

  // Moments of whole parameters, on the CPU: set_moments keeps the part of this rank (an undefined second moment: zero,
  // as it began), moments() gathers all on rank 0
  // and is empty on the others; all ranks must call it.
  struct Moments {
    std::vector<Tensor> first, second;
  };
  void set_moments(size_t parameter, const Tensor& first, const Tensor& second);
  Moments moments() const;

  int64_t buckets() const { return static_cast<int64_t>(begins_.size()) - 1; }
  // Bytes per rank of parameters, gradients, sums and moments.
  static int64_t bytes(int64_t parameters, int ranks);

 private:
  Tensor bucket_of(const Tensor& flat, int64_t bucket) const;
  Tensor own_part_of(const Tensor& bucket) const;
  AdamWTensors own_tensors(int64_t bucket) const;
  Tensor part_in_shard(const Tensor& shard, int64_t bucket) const;
  void for_each_bucket(size_t parameter, const std::function<void(int64_t)>& f) const;
  // The stretches of a parameter that are in this rank's parts: where in the part of the bucket, and where in the
  // parameter.
  struct Stretch {
    int64_t bucket, in_part, in_parameter, count;
  };
  std::vector<Stretch> own_stretches(size_t parameter) const;
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
  std::unique_ptr<Collectives> collectives_;

  bool sending_ = false;
  std::vector<bool> complete_;
  std::vector<int64_t> parameters_in_;  // each bucket, wholly or partly
  std::vector<int64_t> missing_;        // of them in this step
  int64_t next_ = 0;                    // bucket to be sent
};

}  // namespace furious
