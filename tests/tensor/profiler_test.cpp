#include "tensor/profiler.h"

#include "ops/elementwise.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;
using Clock = std::chrono::steady_clock;

constexpr WorkLabel kOuter{"outer", "a"}, kInner{"inner", "b"};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void work_for(double seconds) {
  for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
  }
}

TEST(Profiler, TimeCountsForTheInnermostScope) {
  Profiler profiler({});
  const auto start = Clock::now();
  {
    const Profiler::Scope outer(&profiler, kOuter, StepPass::forward);
    work_for(0.002);
    for (int i = 0; i < 2; ++i) {
      const Profiler::Scope inner(&profiler, kInner, StepPass::forward);
      work_for(0.01);
    }
    work_for(0.002);
  }
  work_for(0.01);  // outside
  { const Profiler::Scope backward(&profiler, kOuter, StepPass::backward); }
  const double wall = seconds_since(start);
  const std::vector<Profiler::Row> rows = profiler.rows();
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].label, kOuter);
  EXPECT_EQ(rows[1].label, kInner);
  EXPECT_EQ(rows[2].label, kOuter);
  EXPECT_EQ(rows[0].pass, StepPass::forward);
  EXPECT_EQ(rows[2].pass, StepPass::backward);
  EXPECT_EQ(rows[0].calls, 1);
  EXPECT_EQ(rows[1].calls, 2);
  // Bounds that hold however slow the machine is.
  EXPECT_GE(rows[0].seconds, 0.004);
  EXPECT_GE(rows[1].seconds, 0.02);
  EXPECT_LE(rows[0].seconds + rows[1].seconds + rows[2].seconds, wall - 0.01);
}

TEST(Profiler, AnErrorEndsItsScopes) {
  Profiler profiler({});
  const Profiler::Scope outer(&profiler, kOuter, StepPass::forward);
  const auto failing = [&] {
    const Profiler::Scope inner(&profiler, kInner, StepPass::forward);
    fail("inner");
  };
  EXPECT_THROW(failing(), Error);
  work_for(0.005);
  { const Profiler::Scope end(&profiler, kInner, StepPass::backward); }
  EXPECT_GE(profiler.rows()[0].seconds, 0.005);
}

TEST(Profiler, WithoutProfilerOrLabelNothingIsRecorded) {
  const Profiler::Scope none(nullptr, kOuter, StepPass::forward);
  Profiler profiler({});
  { const Profiler::Scope unlabelled(&profiler, {}, StepPass::forward); }
  EXPECT_TRUE(profiler.rows().empty());
}

TEST(Profiler, ATapeTimesBothPassesOfWhatIsLabelled) {
  Profiler profiler({});
  Tape tape(&profiler);
  const Variable x(tensor_of({1, 2, 3}, {3}), true);
  const auto twice = [](Tape& t, const Variable& in) {
    const Tape::Label label(t, kInner);
    return add(t, in, in);
  };
  Variable y;
  {
    const Tape::Label label(tape, kOuter);
    y = twice(tape, add(tape, x, x));
    y = add(tape, y, y);
  }
  y = recomputed(tape, y, twice);
  tape.backward(y, tensor_of({1, 1, 1}, {3}));
  EXPECT_TRUE(same_bits(x.gradient(), tensor_of({16, 16, 16}, {3})));
  const std::vector<Profiler::Row> rows = profiler.rows();
  const auto calls = [&](const WorkLabel& label, StepPass pass) {
    int64_t sum = 0;
    for (const Profiler::Row& row : rows)
      if (row.label == label && row.pass == pass) sum += row.calls;
    return sum;
  };
  EXPECT_EQ(calls(kOuter, StepPass::forward), 1);
  EXPECT_EQ(calls(kInner, StepPass::forward), 2);   // inside kOuter, and of the recomputed function
  EXPECT_EQ(calls(kInner, StepPass::backward), 3);  // that of each, and the forward pass that runs again
  EXPECT_EQ(calls(kOuter, StepPass::backward), 2);  // two additions
}

}  // namespace
}  // namespace furious
