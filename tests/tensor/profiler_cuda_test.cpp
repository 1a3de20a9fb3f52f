#include <chrono>

#include "cuda.h"
#include "support.h"
#include "tensor/profiler.h"

namespace furious {
namespace {

using namespace furious::testing;

// The times are those of the device, which runs after the scopes have ended.
TEST(ProfilerCuda, CountsTheTimeOfTheDevice) {
  SKIP_WITHOUT_GPU();
  const Tensor x = Tensor::empty({1 << 26}, DType::f32, kGpu);
  fill(x, 1);
  synchronize(kGpu);
  Profiler profiler(kGpu);
  const auto start = std::chrono::steady_clock::now();
  {
    const Profiler::Scope outer(&profiler, {"outer", "a"}, StepPass::forward);
    const Profiler::Scope inner(&profiler, {"inner", "b"}, StepPass::forward);
    for (int i = 0; i < 20; ++i) fill(x, 2);
  }
  const std::vector<Profiler::Row> rows = profiler.rows();
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_GT(rows[1].seconds, 20 * static_cast<double>(x.bytes()) / 20e12);  // 20 TB/s: faster than any memory
  EXPECT_LE(rows[0].seconds + rows[1].seconds, wall);
}

}  // namespace
}  // namespace furious
