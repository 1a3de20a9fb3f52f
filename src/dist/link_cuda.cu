#ifdef FURIOUS_NCCL

#include <nccl.h>

#include <array>

#include "dist/link.h"
#include "tensor/cuda.cuh"

namespace furious {
namespace {

void check(ncclResult_t status, const char* what) {
  require(status == ncclSuccess, "NCCL: {}: {}", what, ncclGetErrorString(status));
}

struct Id {  // with a name, which nvcc 13 needs to make a vector of it
  ncclUniqueId nccl;
};

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) round_kernel(__nv_bfloat16* out, const float* in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = __float2bfloat16_rn(in[i]);
}

__global__ void __launch_bounds__(kThreads) widen_kernel(float* out, const __nv_bfloat16* in, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = __bfloat162float(in[i]);
}

// All that goes between GPUs runs on a stream beside the device's own, which it leaves and joins again by events: so it
// goes on beside the backward pass, and a graph that captures the device's stream captures it too.
class CudaLink final : public Link {
 public:
  CudaLink(Communicator& communicator, Device device, DType sent)
      : communicator_(communicator), device_(device), sent_(sent) {
    Id own{};
    if (communicator.leads()) check(ncclGetUniqueId(&own.nccl), "start");
    const ncclUniqueId id = communicator.all_gather(own).front().nccl;
    (void)cuda::stream(device);  // makes it current
    const Communicator::Watch watch(communicator);
    check(ncclCommInitRank(&nccl_, communicator.size(), id, communicator.rank()),
          "meeting the other ranks (NCCL_DEBUG=WARN says more)");
    cuda::check(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking), "nccl");
    cuda::check(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), "nccl");
    cuda::check(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), "nccl");
    for (cudaEvent_t& event : times_) cuda::check(cudaEventCreate(&event), "nccl");
  }

  ~CudaLink() override {
    (void)cudaSetDevice(device_.index);
    if (nccl_ != nullptr) (void)ncclCommDestroy(nccl_);
    for (const cudaEvent_t event : times_) (void)cudaEventDestroy(event);
    (void)cudaEventDestroy(fork_);
    (void)cudaEventDestroy(join_);
    (void)cudaStreamDestroy(side_);
  }

  void begin_step() override { mark(kBegun); }

  void reduce(const Tensor& in, const Tensor& out) override {
    leave();
    const auto count = static_cast<size_t>(out.elements());
    if (sent_ == DType::f32) {
      check(ncclReduceScatter(in.raw(), out.raw(), count, ncclFloat, ncclSum, nccl_, side_), "sum of gradients");
      return;
    }
    // Only the side stream works on them, one bucket after the other.
    if (!rounded_ || rounded_.elements() < in.elements()) rounded_ = Tensor::empty(in.shape(), DType::bf16, device_);
    if (!rounded_sum_ || rounded_sum_.elements() < out.elements())
      rounded_sum_ = Tensor::empty(out.shape(), DType::bf16, device_);
    round_kernel<<<cuda::blocks_for(in.elements(), kThreads), kThreads, 0, side_>>>(cuda::pointer<bfloat16>(rounded_),
                                                                                    in.data<float>(), in.elements());
    cuda::check_launch("sum of gradients");
    check(ncclReduceScatter(rounded_.raw(), rounded_sum_.raw(), count, ncclBfloat16, ncclSum, nccl_, side_),
          "sum of gradients");
    widen_kernel<<<cuda::blocks_for(out.elements(), kThreads), kThreads, 0, side_>>>(
        out.data<float>(), cuda::pointer<bfloat16>(rounded_sum_), out.elements());
    cuda::check_launch("sum of gradients");
  }

  void finish_reduce() override {
    mark(kComputed);
    join();
    mark(kReduced);
  }

  void all_reduce(const Tensor& x) override {
    leave();
    check(ncclAllReduce(x.raw(), x.raw(), static_cast<size_t>(x.elements()), ncclDouble, ncclSum, nccl_, side_), "sum");
    join();
  }

  void all_gather(std::span<const Tensor> all) override {
    mark(kUpdated);
    leave();
    check(ncclGroupStart(), "parameters");
    for (const Tensor& tensor : all) {
      const int64_t part = tensor.elements() / communicator_.size();
      check(ncclAllGather(tensor.slice(0, communicator_.rank() * part, part).raw(), tensor.raw(),
                          static_cast<size_t>(part), ncclFloat, nccl_, side_),
            "parameters");
    }
    check(ncclGroupEnd(), "parameters");
    join();
    mark(kGathered);
  }

  LinkTimes end_step() override {
    const auto between = [&](Moment begin, Moment end) {
      float milliseconds = 0;
      cuda::check(cudaEventElapsedTime(&milliseconds, times_[begin], times_[end]), "nccl");
      return 1e-3 * static_cast<double>(milliseconds);
    };
    return {between(kBegun, kComputed) + between(kReduced, kUpdated),
            between(kComputed, kReduced) + between(kUpdated, kGathered)};
  }

 private:
  enum Moment { kBegun, kComputed, kReduced, kUpdated, kGathered, kMoments };

  void leave() {
    cuda::check(cudaEventRecord(fork_, cuda::stream(device_)), "nccl");
    cuda::check(cudaStreamWaitEvent(side_, fork_), "nccl");
  }
  void join() {
    cuda::check(cudaEventRecord(join_, side_), "nccl");
    cuda::check(cudaStreamWaitEvent(cuda::stream(device_), join_), "nccl");
  }
  // In a graph the time is taken each time it runs.
  void mark(Moment moment) {
    const cudaStream_t stream = cuda::stream(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda::check(cudaStreamIsCapturing(stream, &status), "nccl");
    const bool captured = status == cudaStreamCaptureStatusActive;
    cuda::check(
        cudaEventRecordWithFlags(times_[moment], stream, captured ? cudaEventRecordExternal : cudaEventRecordDefault),
        "nccl");
  }

  Communicator& communicator_;
  Device device_;
  DType sent_;
  ncclComm_t nccl_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  std::array<cudaEvent_t, kMoments> times_{};
  Tensor rounded_, rounded_sum_;
};

}  // namespace

std::string nccl_library() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "NCCL";
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::unique_ptr<Link> make_cuda_link(Communicator& communicator, Device device, DType sent) {
  return std::make_unique<CudaLink>(communicator, device, sent);
}

}  // namespace furious

#endif
