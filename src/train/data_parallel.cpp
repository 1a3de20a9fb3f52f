#include "train/data_parallel.h"

#include "base/boundary.h"
#include "train/divergence.h"

namespace furious {

void run_on_all_ranks(Communicator& ranks, const std::function<void()>& work) {
  try {
    work();
  } catch (const AgreedError&) {
    throw;
  } catch (const Diverged&) {
    throw;
  } catch (const std::exception&) {
    if (ranks.size() == 1) throw;
    ranks.abort(words_of(std::current_exception()));
  }
}

}  // namespace furious
