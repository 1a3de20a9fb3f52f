// Data-parallel training: every rank (process) computes its own rows of each batch; gradients are summed over ranks.
#pragma once

#include <functional>

#include "dist/communicator.h"
#include "furious/train.h"

namespace furious {

struct DataParallel {
  Communicator& ranks = Communicator::alone();
  bool sharded = ranks.size() > 1;  // sharded gradients and moments (dist/sharded_optimizer.h); one rank may, too
  int64_t bucket = 0;               // elements in a gradient bucket; 0: the default of the device

  // The options with the rows of one rank as batch.
  TrainOptions rank_options(TrainOptions options) const {
    options.batch /= ranks.size();
    return options;
  }
};

// Runs `work` on all ranks. An exception on a single rank aborts all of them, since the others would wait for it; an
// AgreedError or Diverged, which all ranks throw, is passed on.
void run_on_all_ranks(Communicator& ranks, const std::function<void()>& work);

}  // namespace furious
