#include <algorithm>
#include <chrono>
#include <vector>

#include "base/error.h"
#include "dist/collectives.h"

namespace furious {
namespace {

using Clock = std::chrono::steady_clock;
using Message = Communicator::Message;

constexpr int64_t kBlock = 4096;  // elements that are summed at a time, so that they stay in the cache

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// sum = x for the first, then sum += x.
template <class T>
void add(float* sum, const T* x, int64_t count, bool first) {
  if (first)
    for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<float>(x[i]);
  else
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(x[i]);
}

// Each rank receives the contributions to its own part and adds them in the order of ranks, which makes the sums
// reproducible. Runs on the transport thread.
class CpuCollectives final : public Collectives {
 public:
  CpuCollectives(Communicator& communicator, DType sent) : communicator_(communicator), sent_(sent) {}

  void begin_step() override {
    begun_ = Clock::now();
    waiting_ = 0;
  }

  void reduce_scatter(const Tensor& in, const Tensor& out) override {
    communicator_.post([this, in, out] {
      if (sent_ == DType::bf16)
        reduce_as<bfloat16>(in, out);
      else
        reduce_as<float>(in, out);
    });
  }

  void finish_reduce() override { wait(); }

  void all_reduce(const Tensor& x) override {
    const auto begin = Clock::now();
    for (int64_t i = 0; i < x.elements(); ++i) {
      double& number = x.data<double>()[i];
      const std::vector<double> all = communicator_.all_gather(number);
      number = 0;
      for (const double each : all) number += each;
    }
    waiting_ += seconds_between(begin, Clock::now());
  }

  void all_gather(std::span<const Tensor> all) override {
    std::vector<Message> receive, send;
    for (const Tensor& tensor : all) {
      const size_t bytes = tensor.bytes() / static_cast<size_t>(communicator_.size());
      auto* const data = static_cast<std::byte*>(tensor.raw());
      for (int rank = 0; rank < communicator_.size(); ++rank) {
        if (rank == communicator_.rank()) continue;
        receive.push_back({rank, data + static_cast<size_t>(rank) * bytes, bytes});
        send.push_back({rank, data + static_cast<size_t>(communicator_.rank()) * bytes, bytes});
      }
    }
    communicator_.post([&] { communicator_.exchange(receive, send); });
    wait();
  }

  StepTimes end_step() override {
    const double all = seconds_between(begun_, Clock::now());
    return {all - waiting_, waiting_};
  }

 private:
  void wait() {
    const auto begin = Clock::now();
    communicator_.wait();
    waiting_ += seconds_between(begin, Clock::now());
  }

  template <class T>
  void reduce_as(const Tensor& in, const Tensor& out) {
    const int ranks = communicator_.size(), own = communicator_.rank();
    const int64_t count = out.elements();
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    received_.resize(std::max(received_.size(), bytes * static_cast<size_t>(ranks)));
    const auto received = [&](int rank) {
      return reinterpret_cast<T*>(received_.data() + static_cast<size_t>(rank) * bytes);
    };
    const auto given = [&](int rank) { return in.data<float>() + rank * count; };
    std::vector<Message> receive, send;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == own) continue;
      receive.push_back({rank, received(rank), bytes});
      send.push_back({rank, to_send<T>(given(rank), rank, count), bytes});
    }
    communicator_.exchange(receive, send);
    float* const sum = out.data<float>();
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t block = std::min(kBlock, count - begin);
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == own)
          add(sum + begin, given(own) + begin, block, rank == 0);
        else
          add(sum + begin, received(rank) + begin, block, rank == 0);
      }
    }
  }

  template <class T>
  void* to_send(float* from, int rank, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      return from;
    } else {
      const size_t bytes = static_cast<size_t>(count) * sizeof(T);
      sent_memory_.resize(std::max(sent_memory_.size(), bytes * static_cast<size_t>(communicator_.size())));
      auto* const to = reinterpret_cast<T*>(sent_memory_.data() + static_cast<size_t>(rank) * bytes);
      for (int64_t i = 0; i < count; ++i) to[i] = T(from[i]);
      return to;
    }
  }

  Communicator& communicator_;
  DType sent_;
  std::vector<std::byte> received_, sent_memory_;
  Clock::time_point begun_;
  double waiting_ = 0;
};

}  // namespace

std::unique_ptr<Collectives> make_collectives(Communicator& communicator, Device device, DType sent) {
  require(sent == DType::f32 || sent == DType::bf16, "gradients can be sent in f32 or bf16, got {}", name_of(sent));
  if (!device.is_cpu()) return make_cuda_collectives(communicator, device, sent);
  return std::make_unique<CpuCollectives>(communicator, sent);
}

#ifndef FURIOUS_NCCL
std::string nccl_library() {
  return {};
}

std::unique_ptr<Collectives> make_cuda_collectives(Communicator& communicator, Device, DType) {
  fail(
      "{} processes cannot train on GPUs: furious was built without NCCL; install it (NVIDIA's packages libnccl2 and "
      "libnccl-dev) and build again, or use --device cpu",
      communicator.size());
}
#endif

}  // namespace furious
