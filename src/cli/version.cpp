#include <fmt/format.h>

#include <thread>

#include "base/build_info.h"
#include "base/parallel.h"
#include "cli/commands.h"
#include "dist/collectives.h"
#include "ops/matmul.h"
#include "tensor/device.h"

namespace furious::cli {
namespace {

std::string cuda_text() {
#ifdef FURIOUS_CUDA
  std::string text;
  for (const std::string& device : describe_cuda_devices()) text += "\ndevice          " + device;
  return text.empty() ? "\ncuda            built in; no usable GPU or driver found" : text;
#else
  return "\ncuda            not built in";
#endif
}

std::string several_text() {
  const auto or_not = [](const std::string& library) { return library.empty() ? "not built in" : library; };
  return fmt::format("\nprocesses       {}", or_not(mpi_library())) +
         fmt::format("\nseveral GPUs    {}", or_not(nccl_library()));
}

}  // namespace

std::string version_text() {
  const std::string bf16 = matmul_supports(MatmulPrecision::bf16) ? "f32, bf16" : "f32";
  return fmt::format(
      "furious {}\ncompiler        {}\nSIMD            {}\nmatrix products {} ({})\ndevice          cpu: {}, {} "
      "threads{}{}",
      version(), compiler(), simd_target(), matmul_library(), bf16, cpu_name(), threads(), cuda_text(), several_text());
}

}  // namespace furious::cli
