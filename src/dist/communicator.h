// The processes that work on one thing together: who they are, and how they talk.
//
// mpirun or srun starts the same program several times; each process is a rank. Everything they say to each other is an
// exchange: a rank sends a piece of memory to others and receives one from each. So a rank that waits knows whom it
// waits for, and sums are added up where they are needed, in the order of ranks, whatever the network does.
//
// MPI is called by one thread only, made for it: exchanges go on while the others compute, and the same thread watches
// for ranks that have ended or do not answer. It ends the whole job then, with a line that says which rank, which step
// and which checkpoint to resume from.
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "furious/error.h"

namespace furious {

// What all ranks have failed with, each of them: rank 0 says it, and the job ends.
class AgreedError : public Error {
 public:
  using Error::Error;
};

// How many processes mpirun or srun says it has started together; 1 where neither has started this one.
int launched_processes();
// Whether this program was built to talk to them, and through what: "Open MPI 4.1.4"; empty where it was not.
std::string mpi_library();

class Communicator {
 public:
  // This process by itself: every exchange is with nobody.
  static Communicator& alone();
  // All processes that were started together; alone() where there is one. The first call finds the others.
  static Communicator& world();
  // Whether this process is to say what all have failed with: the first of them, or one that has not met the others.
  static bool speaks();

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }  // among those on this machine
  int local_size() const { return local_size_; }
  int cores() const { return cores_; }       // this rank's share of those of its machine
  bool leads() const { return rank_ == 0; }  // prints, logs and writes for all

  // Of one exchange with another rank.
  struct Piece {
    int rank = 0;
    void* data = nullptr;
    size_t bytes = 0;
  };
  // Work of the thread that talks, in the order in which it is posted; alone it is done at once. It alone may call
  // exchange(), and all ranks must post the same exchanges in the same order.
  void post(std::function<void()> work);
  void exchange(std::span<const Piece> receive, std::span<const Piece> send);
  void wait();  // until all that was posted is done; throws what it threw

  // What every rank gives, in the order of ranks.
  std::vector<std::string> all_gather(const std::string& own);
  template <class T>
  std::vector<T> all_gather(const T& own) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(size_));
    all_gather_bytes(&own, all.data(), sizeof(T));
    return all;
  }
  std::string from_first(const std::string& text) { return all_gather(leads() ? text : std::string()).front(); }

  // Does something that may fail on some ranks only, however long it takes; if it does on any, all throw an AgreedError
  // that names it.
  void agree(const std::function<void()>& work);

  // The time after which a rank that does not answer counts as lost.
  void set_timeout(double seconds);
  // For the line that tells of a fault: the step in work and what to do then. `stop` is asked now and then by the
  // thread that talks: when rank 0 does not come to stop soon after it says yes, that line tells what is there by then.
  void set_story(int64_t step, const std::string& resume);
  void set_stop(std::function<bool()> stop);
  // While it lives, this rank waits for its device: more than the time-out counts as a fault.
  class Watch {
   public:
    explicit Watch(Communicator& of);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Communicator& of_;
  };
  // While it lives, this rank works at what only it does, as saving: the others wait for it however long it takes, as
  // long as its process is there.
  class Alone {
   public:
    explicit Alone(Communicator& of);
    ~Alone();
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    Communicator& of_;
  };
  // Says what has happened to this rank and ends all of them.
  [[noreturn]] void abort(const std::string& what);

 private:
  struct Talk;  // the thread and MPI

  Communicator();
  explicit Communicator(std::unique_ptr<Talk> talk);
  void all_gather_bytes(const void* own, void* all, size_t bytes);

  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1, cores_ = 1;
  std::unique_ptr<Talk> talk_;
};

}  // namespace furious
