#ifdef FURIOUS_NCCL

#include <dlfcn.h>
#include <nccl.h>

#include <array>
#include <type_traits>

#include "dist/collectives.h"
#include "tensor/cuda.cuh"

namespace furious {
namespace {

// Loaded on first use: the library is large, and a single GPU does not need it.
struct Nccl {
  decltype(&ncclGetVersion) version;
  decltype(&ncclGetErrorString) error;
  decltype(&ncclGetUniqueId) unique_id;
  decltype(&ncclCommInitRank) init;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;

  Nccl() {
    void* library = ::dlopen("libnccl.so.2", RTLD_NOW);
    if (library == nullptr) library = ::dlopen(FURIOUS_NCCL, RTLD_NOW);  // where the build found it
    require(library != nullptr, "NCCL, which several GPUs need, cannot be loaded: {}; install libnccl2", ::dlerror());
    const auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      require(function != nullptr, "NCCL: the library has no function {}; install a newer version", name);
    };
    load(version, "ncclGetVersion");
    load(error, "ncclGetErrorString");
    load(unique_id, "ncclGetUniqueId");
    load(init, "ncclCommInitRank");
    load(destroy, "ncclCommDestroy");
    load(reduce_scatter, "ncclReduceScatter");
    load(all_reduce, "ncclAllReduce");
    load(all_gather, "ncclAllGather");
    load(group_start, "ncclGroupStart");
    load(group_end, "ncclGroupEnd");
  }
};

const Nccl& nccl() {
  static const Nccl loaded;
  return loaded;
}

void check(ncclResult_t status, const char* what) {
  require(status == ncclSuccess, "NCCL: {}: {}", what, nccl().error(status));
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

// Communication runs on a side stream, forked from the device's stream and joined to it by events: so it overlaps the
// backward pass, and a graph that captures the device's stream captures it too.
class CudaCollectives final : public Collectives {
 public:
  CudaCollectives(Communicator& communicator, Device device, DType sent)
      : communicator_(communicator), device_(device), sent_(sent) {
    Id own{};
    if (communicator.leads()) check(nccl().unique_id(&own.nccl), "start");
    const ncclUniqueId id = communicator.all_gather(own).front().nccl;
    (void)cuda::stream(device);  // makes it current
    const Communicator::Watch watch(communicator);
    check(nccl().init(&ranks_, communicator.size(), id, communicator.rank()),
          "initialization (set NCCL_DEBUG=WARN for details)");
    cuda::check(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking), "nccl");
    cuda::check(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), "nccl");
    cuda::check(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), "nccl");
    for (cudaEvent_t& event : times_) cuda::check(cudaEventCreate(&event), "nccl");
  }

  ~CudaCollectives() override {
    (void)cudaSetDevice(device_.index);
    if (ranks_ != nullptr) (void)nccl().destroy(ranks_);
    for (const cudaEvent_t event : times_) (void)cudaEventDestroy(event);
    (void)cudaEventDestroy(fork_);
    (void)cudaEventDestroy(join_);
    (void)cudaStreamDestroy(side_);
  }

  void begin_step() override { mark(kBegun); }

  void reduce_scatter(const Tensor& in, const Tensor& out) override {
    fork();
    const auto count = static_cast<size_t>(out.elements());
    if (sent_ == DType::f32) {
      check(nccl().reduce_scatter(in.raw(), out.raw(), count, ncclFloat, ncclSum, ranks_, side_), "sum of gradients");
      return;
    }
    // Used by the side stream only, one bucket after the other.
    if (!rounded_ || rounded_.elements() < in.elements()) rounded_ = Tensor::empty(in.shape(), DType::bf16, device_);
    if (!rounded_sum_ || rounded_sum_.elements() < out.elements())
      rounded_sum_ = Tensor::empty(out.shape(), DType::bf16, device_);
    round_kernel<<<cuda::blocks_for(in.elements(), kThreads), kThreads, 0, side_>>>(cuda::pointer<bfloat16>(rounded_),
                                                                                    in.data<float>(), in.elements());
    cuda::check_launch("sum of gradients");
    check(nccl().reduce_scatter(rounded_.raw(), rounded_sum_.raw(), count, ncclBfloat16, ncclSum, ranks_, side_),
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
    fork();
    check(nccl().all_reduce(x.raw(), x.raw(), static_cast<size_t>(x.elements()), ncclDouble, ncclSum, ranks_, side_),
          "sum");
    join();
  }

  void all_gather(std::span<const Tensor> all) override {
    mark(kUpdated);
    fork();
    check(nccl().group_start(), "parameters");
    for (const Tensor& tensor : all) {
      const int64_t part = tensor.elements() / communicator_.size();
      check(nccl().all_gather(tensor.slice(0, communicator_.rank() * part, part).raw(), tensor.raw(),
                              static_cast<size_t>(part), ncclFloat, ranks_, side_),
            "parameters");
    }
    check(nccl().group_end(), "parameters");
    join();
    mark(kGathered);
  }

  StepTimes end_step() override {
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

  void fork() {
    cuda::check(cudaEventRecord(fork_, cuda::stream(device_)), "nccl");
    cuda::check(cudaStreamWaitEvent(side_, fork_), "nccl");
  }
  void join() {
    cuda::check(cudaEventRecord(join_, side_), "nccl");
    cuda::check(cudaStreamWaitEvent(cuda::stream(device_), join_), "nccl");
  }
  // In a captured graph the event is recorded each time the graph runs.
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
  ncclComm_t ranks_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  std::array<cudaEvent_t, kMoments> times_{};
  Tensor rounded_, rounded_sum_;
};

}  // namespace

std::string nccl_library() {
  int version = 0;
  try {
    check(nccl().version(&version), "version");
  } catch (const Error&) {
    return "NCCL, built in; the library was not found";
  }
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::unique_ptr<Collectives> make_cuda_collectives(Communicator& communicator, Device device, DType sent) {
  return std::make_unique<CudaCollectives>(communicator, device, sent);
}

}  // namespace furious

#endif
