#include <memory>

#include <numeric>

#include "cuda.h"
#include "ops/sampling/oracle.h"
#include "tensor/graph.h"

namespace furious {
namespace {

using namespace furious::testing;

std::vector<int32_t> ints_of(const Tensor& tensor) {
  const Tensor here = to_device(tensor, {});
  return {here.data<int32_t>(), here.data<int32_t>() + here.elements()};
}

// Logits of many kinds: spread, flat, with ties, with one that outweighs all, and some that are not finite.
Tensor varied_logits(Random& random, int64_t rows, int64_t columns) {
  const Tensor out = random.normal_tensor({rows, columns});
  for (int64_t row = 0; row < rows; ++row) {
    float* const x = out.data<float>() + row * columns;
    const auto kind = random.integer(0, 9);
    for (int64_t i = 0; i < columns; ++i) {
      if (kind == 0) x[i] = 0.25f;             // all equal
      if (kind == 1) x[i] = std::round(x[i]);  // many ties
      if (kind == 2) x[i] *= 0.01f;            // flat
      if (kind == 3) x[i] *= 1e30f;            // far apart
      if (kind >= 4 && kind <= 6) x[i] *= static_cast<float>(kind) - 2.5f;
    }
    if (kind == 7) x[random.integer(0, columns - 1)] = 3e38f;
    if (kind == 8 && random.coin()) x[random.integer(0, columns - 1)] = random.coin() ? std::nanf("") : -INFINITY;
  }
  return out;
}

// Two samplers, one on each device, that are given the same: every id must be the same.
void expect_same_draws(Random& random, int64_t vocabulary, int blocks, int64_t rows, int steps) {
  const int64_t slots = rows + 2;
  Sampler here(slots, vocabulary, {}), there(slots, vocabulary, kGpu);
  there.set_blocks_per_row(blocks);
  const auto renew = [&](int64_t slot) {
    Sampling sampling = random_sampling(random, vocabulary);
    if (random.integer(0, 3) == 0) sampling.log_probabilities = random.pick<int64_t>({0, 1, 20});
    std::vector<int32_t> text(random.integer(0, 400));
    for (int32_t& id : text) id = static_cast<int32_t>(random.integer(0, std::min<int64_t>(vocabulary, 50) - 1));
    for (Sampler* sampler : {&here, &there}) {
      sampler->clear(slot);
      sampler->set(slot, sampling);
      sampler->read(slot, text);
    }
  };
  for (int64_t slot = 0; slot < slots; ++slot) renew(slot);
  const Tensor pool = varied_logits(random, 3 * rows, vocabulary + 3);
  const Tensor pool_there = to_gpu(pool);
  for (int step = 0; step < steps; ++step) {
    std::vector<int32_t> order(slots);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = slots - 1; i > 0; --i) std::swap(order[i], order[random.integer(0, i)]);
    order.resize(rows);
    const int64_t first = random.integer(0, 2 * rows), column = random.integer(0, 1) * random.integer(0, 3);
    const auto part = [&](const Tensor& x) {
      return x.slice(0, first, rows).slice(1, column, vocabulary + 3 - column);
    };
    const Choice a = here.choose(part(pool), slot_rows(order)),
                 b = there.choose(part(pool_there), slot_rows(order, kGpu));
    ASSERT_EQ(ints_of(a.ids), ints_of(b.ids)) << vocabulary << " step " << step;
    ASSERT_EQ(a.best.defined(), b.best.defined());
    if (a.best.defined()) {
      ASSERT_EQ(ints_of(a.best), ints_of(b.best));
      const Tensor there_values = to_device(b.log_probabilities, {});
      for (int64_t i = 0; i < a.best.elements(); ++i) {
        if (ints_of(a.ids)[2 * (i / 21) + 1] == 0) continue;
        const float x = a.log_probabilities.data<float>()[i], y = there_values.data<float>()[i];
        ASSERT_NEAR(x, y, 1e-6 * std::abs(x) + 1e-6);
      }
    }
    if (step % 5 == 4) renew(random.integer(0, slots - 1));
    if (step % 7 == 6) {
      const int64_t from = random.integer(0, slots - 1), to = random.integer(0, slots - 1);
      for (Sampler* sampler : {&here, &there}) sampler->copy(from, to);
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    EXPECT_EQ(here.contents(slot).position, there.contents(slot).position);
    EXPECT_EQ(here.contents(slot).history, there.contents(slot).history);
  }
}

// 12,000 draws.
TEST(SamplerCuda, DrawsWhatTheCpuDraws) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const int blocks : {0, 1, 2, 4, 8}) {
    expect_same_draws(random, 1, blocks, 2, 5);
    expect_same_draws(random, 7, blocks, 8, 25);
    expect_same_draws(random, 1000, blocks, 16, 70);
    expect_same_draws(random, 32000, blocks, 16, 50);
  }
  expect_same_draws(random, 5000, 0, 64, 30);
  expect_same_draws(random, 32000, 0, 200, 5);
  for (const int blocks : {0, 1, 8}) expect_same_draws(random, 200000, blocks, 8, 6);  // 1: not in shared memory
  expect_same_draws(random, kLargestSampledVocabulary, 0, 2, 6);
}

// A recorded choice goes on from where the last one left the slots.
TEST(SamplerCuda, IsRecordedInAGraph) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  constexpr int64_t kRows = 6, kVocabulary = 3000;
  Sampler here(kRows, kVocabulary, {}), there(kRows, kVocabulary, kGpu);
  for (int64_t slot = 0; slot < kRows; ++slot) {
    Sampling sampling = random_sampling(random, kVocabulary);
    sampling.temperature = 1;
    for (Sampler* sampler : {&here, &there}) sampler->set(slot, sampling);
  }
  const Tensor logits = random.normal_tensor({kRows, kVocabulary}), logits_there = to_gpu(logits);
  const SlotRows rows = all_slots(kRows), rows_there = all_slots(kRows, kGpu);
  EXPECT_EQ(ints_of(here.choose(logits, rows).ids), ints_of(there.choose(logits_there, rows_there).ids));
  std::unique_ptr<Graph> graph;  // outlives what lies in its memory
  Choice recorded;
  graph = std::make_unique<Graph>(kGpu, [&] { recorded = there.choose(logits_there, rows_there); });
  for (int step = 0; step < 300; ++step) {
    graph->run();
    ASSERT_EQ(ints_of(here.choose(logits, rows).ids), ints_of(recorded.ids)) << step;
  }
}

}  // namespace
}  // namespace furious
