#include <future>

#include "base/error.h"
#include "cuda.h"
#include "ops/elementwise.h"
#include "support.h"
#include "tensor/graph.h"
#include "tensor/host_copy.h"

namespace furious {
namespace {

using namespace furious::testing;

TEST(GraphCuda, ReplaysInItsOwnArena) {
  SKIP_WITHOUT_GPU();
  const Tensor in = to_gpu(tensor_of({1, 2, 3}, {3}));
  Tensor out;
  const auto twice = [&] {
    const Tensor between = add_forward(in, in);
    out = add_forward(between, in);
  };
  twice();
  const Graph graph(kGpu, twice);
  // No other tensor gets the memory between runs.
  const Tensor other = Tensor::empty({3}, DType::f32, kGpu), more = Tensor::empty({3}, DType::f32, kGpu);
  fill(other, 7);
  fill(more, 7);
  for (float factor : {1.0f, 10.0f}) {
    copy_between(in, tensor_of({factor, 2 * factor, 3 * factor}, {3}));
    graph.run();
    EXPECT_TRUE(same_bits(to_cpu(out), tensor_of({3 * factor, 6 * factor, 9 * factor}, {3})));
    EXPECT_TRUE(same_bits(to_cpu(other), to_cpu(more)));
  }
  out = {};
}

// Launches of another thread during a capture run immediately and are not part of the graph.
TEST(GraphCuda, DoesNotCaptureOtherThreads) {
  SKIP_WITHOUT_GPU();
  const Tensor in = to_gpu(tensor_of({1, 2}, {2})), other = to_gpu(tensor_of({0, 0}, {2}));
  Tensor out;
  const auto twice = [&] { out = add_forward(in, in); };
  twice();
  const Graph graph(kGpu, [&] {
    std::async(std::launch::async, [&] {
      fill(other, 7);
      const Tensor made = add_forward(other, other);  // memory of the device, not of the graph
      EXPECT_TRUE(same_bits(to_cpu(made), tensor_of({14, 14}, {2})));
    }).get();
    twice();
  });
  EXPECT_TRUE(same_bits(to_cpu(other), tensor_of({7, 7}, {2})));
  fill(other, 3);
  graph.run();
  EXPECT_TRUE(same_bits(to_cpu(out), tensor_of({2, 4}, {2})));
  EXPECT_TRUE(same_bits(to_cpu(other), tensor_of({3, 3}, {2}))) << "the graph wrote what the other thread had written";
  out = {};  // destroyed before the graph, which owns its memory
}

// Several threads capture and run graphs of their own at the same time.
TEST(GraphCuda, SeveralThreadsCaptureAtOnce) {
  SKIP_WITHOUT_GPU();
  constexpr int kThreads = 8, kGraphs = 20, kAdditions = 50;
  const auto work_of = [](int thread) {
    const Tensor in = Tensor::empty({1000}, DType::f32, kGpu);
    fill(in, static_cast<float>(thread));
    for (int g = 0; g < kGraphs; ++g) {
      Tensor out;
      const auto work = [&] {
        out = add_forward(in, in);
        for (int i = 0; i < kAdditions; ++i) out = add_forward(out, in);
      };
      work();
      const Graph graph(kGpu, work);
      graph.run();
      const Tensor expected = Tensor::empty({1000}, DType::f32);
      fill(expected, static_cast<float>(thread * (kAdditions + 2)));
      if (!same_bits(to_cpu(out), expected)) return false;
      out = {};
    }
    return true;
  };
  std::vector<std::future<bool>> threads;
  for (int i = 0; i < kThreads; ++i) threads.push_back(std::async(std::launch::async, work_of, i));
  for (std::future<bool>& thread : threads) EXPECT_TRUE(thread.get());
}

TEST(GraphCuda, WorkThatFailsLeavesTheDeviceUsable) {
  SKIP_WITHOUT_GPU();
  expect_error([] { Graph(kGpu, [] { fail("not now"); }); }, {"not now"});
  const Tensor x = Tensor::empty({2}, DType::f32, kGpu);
  fill(x, 3);
  EXPECT_TRUE(same_bits(to_cpu(x), tensor_of({3, 3}, {2})));
}

// The copy keeps its tensor alive, so that the next one of the same size gets other memory.
TEST(HostCopyCuda, KeepsTheTensorAlive) {
  SKIP_WITHOUT_GPU();
  const Tensor expected = Tensor::empty({1000}, DType::f32);
  for (int i = 0; i < 20; ++i) {
    Tensor x = Tensor::empty({1000}, DType::f32, kGpu);
    fill(x, static_cast<float>(i));
    fill(expected, static_cast<float>(i));
    const HostCopy copy(x);
    x = Tensor::empty({1000}, DType::f32, kGpu);
    fill(x, -1);
    EXPECT_TRUE(same_bits(copy.wait(), expected)) << i;
  }
}

}  // namespace
}  // namespace furious
