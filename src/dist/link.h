// How tensors of a device go between ranks: through MPI on the CPU (link_cpu.cpp), through NCCL on GPUs (link_cuda.cu).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "dist/communicator.h"
#include "tensor/tensor.h"

namespace furious {

// Of one step, in seconds.
struct LinkTimes {
  double work = 0;     // of this rank, until its gradients were there
  double waiting = 0;  // for sums, parameters and other ranks
};

class Link {
 public:
  virtual ~Link() = default;

  virtual void begin_step() = 0;
  // out = this rank's part of the sum over all ranks; `in` is f32 [n·k], `out` f32 [k]. Begins when the device has done
  // what it was given so far, and goes on beside what it is given next. In the same order on all ranks.
  virtual void reduce(const Tensor& in, const Tensor& out) = 0;
  virtual void finish_reduce() = 0;  // what the device is given from now on finds the sums
  // In the order of the device's work: x (f64) becomes its sum over all ranks; and each of `all` ([n·k]), of which this
  // rank has made its own part, is filled with the parts of the others.
  virtual void all_reduce(const Tensor& x) = 0;
  virtual void all_gather(std::span<const Tensor> all) = 0;
  virtual LinkTimes end_step() = 0;  // when the device has done all of it
};

// Sums are sent in f32, or rounded to bf16. All ranks must call it, on devices of one kind.
std::unique_ptr<Link> make_link(Communicator& communicator, Device device, DType sent);
std::unique_ptr<Link> make_cuda_link(Communicator& communicator, Device device, DType sent);

std::string nccl_library();  // "NCCL 2.28.9"; empty in a build without it

}  // namespace furious
