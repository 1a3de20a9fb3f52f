// The process group: ranks, and collective communication between them.
//
// mpirun or srun starts the same program several times; each process is a rank. All communication is an exchange: a
// rank sends messages to others and receives one from each. So a waiting rank knows which ranks it waits for, and sums
// are computed by the receiver in the order of ranks, which makes them reproducible.
//
// MPI is called only by a dedicated transport thread (mpi_transport.h): exchanges proceed while other threads compute,
// and the same thread monitors the other ranks. When one has ended or does not answer, it aborts the job with a line
// that names the rank, the step and the checkpoint to resume from.
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

// An error that all ranks throw; rank 0 reports it.
class AgreedError : public Error {
 public:
  using Error::Error;
};

// The number of processes that mpirun or srun has started together; 1 without them.
int launched_processes();
// "Open MPI 4.1.4"; empty in a build without MPI.
std::string mpi_library();

class Communicator {
 public:
  // A group of this process only: exchanges do nothing.
  static Communicator& alone();
  // All processes that were started together; alone() for a single one. The first call initializes MPI.
  static Communicator& world();
  // Whether this process prints errors: rank 0, or any process before MPI is initialized.
  static bool reports_errors();

  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }  // among the ranks on this machine
  int local_size() const { return local_size_; }
  int cores() const { return cores_; }       // this rank's share of the cores of its machine
  bool leads() const { return rank_ == 0; }  // prints, logs and writes for the group

  // To or from another rank.
  struct Message {
    int rank = 0;
    void* data = nullptr;
    size_t bytes = 0;
  };
  // Queues work for the transport thread; in a group of one it runs at once. Only posted work may call exchange(), and
  // all ranks must post the same exchanges in the same order.
  void post(std::function<void()> work);
  void exchange(std::span<const Message> receive, std::span<const Message> send);
  void wait();  // until all posted work is done; throws its exception

  // The values of all ranks, in the order of ranks.
  std::vector<std::string> all_gather(const std::string& own);
  template <class T>
  std::vector<T> all_gather(const T& own) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(static_cast<size_t>(size_));
    all_gather_bytes(&own, all.data(), sizeof(T));
    return all;
  }
  std::string from_first(const std::string& text) { return all_gather(leads() ? text : std::string()).front(); }

  // Runs work of any duration that may fail on some ranks only; if it does, all ranks throw an AgreedError that names
  // the rank.
  void agree(const std::function<void()>& work);

  // The time after which a rank that does not answer counts as lost.
  void set_timeout(double seconds);
  // The current step and how to resume, for the message about a lost rank. The transport thread polls `stop`: when rank
  // 0 has not stopped soon after it returned true, it prints how to resume.
  void set_fault_note(int64_t step, const std::string& resume);
  void set_stop(std::function<bool()> stop);
  // During its lifetime this rank waits for its device; longer than the timeout is an error.
  class Watch {
   public:
    explicit Watch(Communicator& of);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Communicator& of_;
  };
  // During its lifetime this rank does work that the others wait for, such as saving: they wait as long as its process
  // exists, without a timeout.
  class SoloWork {
   public:
    explicit SoloWork(Communicator& of);
    ~SoloWork();
    SoloWork(const SoloWork&) = delete;
    SoloWork& operator=(const SoloWork&) = delete;

   private:
    Communicator& of_;
  };
  // Prints the error of this rank and ends all ranks.
  [[noreturn]] void abort(const std::string& what);

 private:
  struct Transport;  // the thread that calls MPI

  Communicator();
  explicit Communicator(std::unique_ptr<Transport> transport);
  void all_gather_bytes(const void* own, void* all, size_t bytes);

  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1, cores_ = 1;
  std::unique_ptr<Transport> transport_;
};

}  // namespace furious
