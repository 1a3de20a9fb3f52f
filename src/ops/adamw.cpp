#include "ops/adamw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "tensor/check.h"

namespace furious {
namespace {

constexpr int64_t kGrain = 1 << 14;
constexpr int64_t kNormBlock = 1 << 15;  // the order of summation hangs on it

void check_options(const AdamW& options, int64_t step, double gradient_scale) {
  const auto is_rate = [](double value) { return value >= 0 && value < 1; };
  require(step >= 1, "adamw: step is {}, expected 1 or more", step);
  require(std::isfinite(options.learning_rate) && options.learning_rate >= 0,
          "adamw: learning rate is {}, expected a number of at least 0", options.learning_rate);
  require(std::isfinite(options.weight_decay) && options.weight_decay >= 0,
          "adamw: weight decay is {}, expected a number of at least 0", options.weight_decay);
  require(is_rate(options.beta1), "adamw: beta1 is {}, expected at least 0 and less than 1", options.beta1);
  require(is_rate(options.beta2), "adamw: beta2 is {}, expected at least 0 and less than 1", options.beta2);
  require(options.epsilon > 0, "adamw: epsilon is {}, expected more than 0", options.epsilon);
  require(std::isfinite(gradient_scale), "adamw: gradient scale is {}, expected a finite number", gradient_scale);
}

cpu::AdamWConstants constants_of(const AdamW& options, int64_t step, double gradient_scale) {
  const auto t = static_cast<double>(step);
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .beta1 = static_cast<float>(options.beta1),
          .one_minus_beta1 = static_cast<float>(1 - options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1 - options.beta2),
          .decay = static_cast<float>(1 - options.learning_rate * options.weight_decay),
          .step_size = static_cast<float>(options.learning_rate / (1 - std::pow(options.beta1, t))),
          .denominator = static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, t))),
          .epsilon = static_cast<float>(options.epsilon)};
}

struct Block {
  const float* data;
  int64_t count;
};

std::vector<Block> blocks_of(std::span<const Tensor> tensors) {
  const ArgumentCheck check("gradient_norm");
  std::vector<Block> blocks;
  for (const Tensor& tensor : tensors) {
    if (!tensor) continue;
    check.dtype("gradients", tensor, {DType::f32});
    check.device("gradients", tensor, {});
    check.contiguous("gradients", tensor);
    for (int64_t begin = 0; begin < tensor.elements(); begin += kNormBlock)
      blocks.push_back({tensor.data<float>() + begin, std::min(kNormBlock, tensor.elements() - begin)});
  }
  return blocks;
}

}  // namespace

void adamw_update(const Tensor& parameter, const Tensor& gradient, const Tensor& first_moment,
                  const Tensor& second_moment, const AdamW& options, int64_t step, double gradient_scale) {
  const ArgumentCheck check("adamw");
  check.present("parameter", parameter);
  const std::vector<int64_t> shape(parameter.shape().begin(), parameter.shape().end());
  check.dense("parameter", parameter, DType::f32, shape);
  check.dense("gradient", gradient, DType::f32, shape);
  check.dense("first_moment", first_moment, DType::f32, shape);
  check.dense("second_moment", second_moment, DType::f32, shape);
  check_options(options, step, gradient_scale);
  const cpu::AdamWConstants constants = constants_of(options, step, gradient_scale);
  parallel_ranges(parameter.elements(), kGrain, [&](int64_t begin, int64_t end) {
    cpu::adamw_update(end - begin, constants, parameter.data<float>() + begin, gradient.data<float>() + begin,
                      first_moment.data<float>() + begin, second_moment.data<float>() + begin);
  });
}

double gradient_norm(std::span<const Tensor> gradients) {
  const std::vector<Block> blocks = blocks_of(gradients);
  std::vector<double> sums(blocks.size());
  parallel_ranges(static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = cpu::sum_of_squares(blocks[i].data, blocks[i].count);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return std::sqrt(total);
}

}  // namespace furious
