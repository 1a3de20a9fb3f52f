// Collectives on tensors: MPI on CPUs (collectives_cpu.cpp), NCCL on GPUs (collectives_cuda.cu).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "dist/communicator.h"
#include "tensor/tensor.h"

namespace furious {

// Times of one step in seconds.
struct StepTimes {
  double work = 0;     // computation of this rank
  double waiting = 0;  // for sums, parameters and other ranks
};

class Collectives {
 public:
  virtual ~Collectives() = default;

  virtual void begin_step() = 0;
  // out = this rank's part of the sum over all ranks; `in` is f32 [n·k], `out` f32 [k]. Asynchronous: ordered after the
  // work submitted to the device so far, and concurrent with what follows. All ranks must call it in the same order.
  virtual void reduce_scatter(const Tensor& in, const Tensor& out) = 0;
  virtual void finish_reduce() = 0;  // work submitted from now on sees the sums
  // In stream order: x (f64) becomes its sum over all ranks; each of `all` ([n·k]), of which this rank has written its
  // own part, receives the parts of the others.
  virtual void all_reduce(const Tensor& x) = 0;
  virtual void all_gather(std::span<const Tensor> all) = 0;
  virtual StepTimes end_step() = 0;  // after the device has finished the step
};

// Gradients are sent in f32, or rounded to bf16. All ranks must call it, on devices of one kind.
std::unique_ptr<Collectives> make_collectives(Communicator& communicator, Device device, DType sent);
std::unique_ptr<Collectives> make_cuda_collectives(Communicator& communicator, Device device, DType sent);

std::string nccl_library();  // "NCCL 2.28.9"; empty in a build without it

}  // namespace furious
