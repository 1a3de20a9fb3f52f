#include <cstring>

#include "cuda.h"
#include "ops/optim/blend.h"
#include "ops/optim/muon.h"
#include "support.h"

namespace furious {
namespace {

using namespace furious::testing;

Tensor numbers_of(int64_t step, float scale) {
  AdamWConstants constants = adamw_constants({.learning_rate = 0.02, .weight_decay = 0.1}, step);
  constants.gradient_scale = scale;
  const Tensor numbers = Tensor::empty({kAdamWConstants}, DType::f32);
  std::memcpy(numbers.raw(), &constants, sizeof(constants));
  return numbers;
}

TEST(MuonCuda, AgreesWithTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {3, 40}, {40, 3}, {64, 64}, {200, 129}}) {
    const MuonTensors here{random.normal_tensor({rows, columns}), random.normal_tensor({rows, columns}),
                           Tensor::zeros({rows, columns}, DType::f32)};
    const MuonTensors there{to_gpu(here.parameter), to_gpu(here.gradient), to_gpu(here.momentum)};
    for (int64_t step = 1; step <= 3; ++step) {
      muon_update(std::span(&here, 1), numbers_of(step, 0.7f), 0.9);
      muon_update(std::span(&there, 1), to_gpu(numbers_of(step, 0.7f)), 0.9);
    }
    EXPECT_LT(relative_error(to_cpu(there.parameter), here.parameter), 1e-4) << rows << " x " << columns;
    EXPECT_LT(relative_error(to_cpu(there.momentum), here.momentum), 1e-5) << rows << " x " << columns;
    const Tensor before = to_cpu(there.parameter);
    muon_update(std::span(&there, 1), to_gpu(numbers_of(4, NAN)), 0.9);
    EXPECT_TRUE(same_bits(to_cpu(there.parameter), before));
  }
}

TEST(BlendCuda, HasTheBitsOfTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (const int64_t count : {1, 255, 257, 100001}) {
    const Tensor x = random.normal_tensor({count}), y = random.normal_tensor({count});
    const Tensor there = to_gpu(x);
    blend(there, 0.3f, there, 0.7f, to_gpu(y));
    blend(x, 0.3f, x, 0.7f, y);
    EXPECT_TRUE(same_bits(to_cpu(there), x)) << count;
  }
}

}  // namespace
}  // namespace furious
