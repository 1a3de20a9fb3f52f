#include "ops/optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/optim/adamw_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

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

struct Block {
  const float* data;
  int64_t count;
};

std::vector<Block> blocks_of(std::span<const Tensor> tensors) {
  std::vector<Block> blocks;
  for (const Tensor& tensor : tensors)
    for (int64_t begin = 0; begin < tensor.elements(); begin += kNormBlock)
      blocks.push_back({tensor.data<float>() + begin, std::min(kNormBlock, tensor.elements() - begin)});
  return blocks;
}

void check_tensors(const AdamWTensors& tensors, Device device) {
  const ArgumentCheck check("adamw");
  check.present("parameter", tensors.parameter);
  const std::vector<int64_t> shape(tensors.parameter.shape().begin(), tensors.parameter.shape().end());
  check.dense("parameter", tensors.parameter, DType::f32, shape, device);
  check.dense("gradient", tensors.gradient, DType::f32, shape, device);
  check.dense("first_moment", tensors.first_moment, DType::f32, shape, device);
  check.dense("second_moment", tensors.second_moment, DType::f32, shape, device);
}

// A scale that leaves nothing to do: NaN where the norm is not finite.
float scale_for(double norm, double most) {
  if (!std::isfinite(norm)) return std::numeric_limits<float>::quiet_NaN();
  return most > 0 && norm > most ? static_cast<float>(most / norm) : 1.0f;
}

Tensor on_device(Device device, const AdamWConstants& constants) {
  const Tensor numbers = Tensor::empty({kAdamWConstants}, DType::f32, device);
  memory::copy(device, numbers.raw(), {}, &constants, sizeof(constants));
  return numbers;
}

// The tensors that are there, checked.
std::vector<Tensor> present_of(const ArgumentCheck& check, std::span<const Tensor> gradients) {
  std::vector<Tensor> present;
  for (const Tensor& gradient : gradients) {
    if (!gradient) continue;
    present.push_back(gradient);
    check.dtype("gradients", gradient, {DType::f32});
    check.device("gradients", gradient, present.front().device());
    check.contiguous("gradients", gradient);
  }
  return present;
}

}  // namespace

namespace cpu {

void adamw_update(std::span<const AdamWTensors> tensors, const Tensor& numbers) {
  AdamWConstants constants;
  std::memcpy(&constants, numbers.raw(), sizeof(constants));
  if (std::isnan(constants.gradient_scale)) return;
  for (const auto& [parameter, gradient, first_moment, second_moment] : tensors) {
    float* const p = parameter.data<float>();
    const float* const g = gradient.data<float>();
    float* const m = first_moment.data<float>();
    float* const v = second_moment.data<float>();
    parallel_ranges(parameter.elements(), kGrain, [&](int64_t begin, int64_t end) {
      adamw_update(end - begin, constants, p + begin, g + begin, m + begin, v + begin);
    });
  }
}

void sum_of_squares(const Tensor& sum, std::span<const Tensor> gradients) {
  const std::vector<Block> blocks = blocks_of(gradients);
  std::vector<double> sums(blocks.size());
  parallel_ranges(static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = sum_of_squares(blocks[i].data, blocks[i].count);
  });
  double total = 0;
  for (double part : sums) total += part;
  *sum.data<double>() = total;
}

void set_scale(const Tensor& numbers, const Tensor& norm, double most) {
  double& value = *norm.data<double>();
  value = std::sqrt(value);
  *numbers.data<float>() = scale_for(value, most);
}

}  // namespace cpu

AdamWConstants adamw_constants(const AdamW& options, int64_t step, double gradient_scale) {
  check_options(options, step, gradient_scale);
  const auto t = static_cast<double>(step);
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .beta1 = static_cast<float>(options.beta1),
          .one_minus_beta1 = static_cast<float>(1 - options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1 - options.beta2),
          .decay = static_cast<float>(1 - options.learning_rate * options.weight_decay),
          .step_size = static_cast<float>(options.learning_rate / (1 - std::pow(options.beta1, t))),
          .denominator = static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, t))),
          .epsilon = static_cast<float>(options.epsilon),
          .learning_rate = static_cast<float>(options.learning_rate)};
}

void adamw_update(std::span<const AdamWTensors> tensors, const Tensor& numbers) {
  if (tensors.empty()) return;
  const Device device = numbers.device();
  ArgumentCheck("adamw").dense("numbers", numbers, DType::f32, {kAdamWConstants}, device);
  for (const AdamWTensors& each : tensors) check_tensors(each, device);
  FURIOUS_DISPATCH(device, adamw_update(tensors, numbers));
}

void adamw_update(std::span<const AdamWTensors> tensors, const AdamW& options, int64_t step, double gradient_scale) {
  const AdamWConstants constants = adamw_constants(options, step, gradient_scale);
  if (tensors.empty()) return;
  ArgumentCheck("adamw").present("parameter", tensors.front().parameter);
  adamw_update(tensors, on_device(tensors.front().parameter.device(), constants));
}

void adamw_update(const Tensor& parameter, const Tensor& gradient, const Tensor& first_moment,
                  const Tensor& second_moment, const AdamW& options, int64_t step, double gradient_scale) {
  const AdamWTensors tensors{parameter, gradient, first_moment, second_moment};
  adamw_update(std::span(&tensors, 1), options, step, gradient_scale);
}

double gradient_norm(std::span<const Tensor> gradients) {
  const std::vector<Tensor> present = present_of(ArgumentCheck("gradient_norm"), gradients);
  if (present.empty()) return 0;
  const Device device = present.front().device();
  const Tensor sum = Tensor::empty({1}, DType::f64, device);
  FURIOUS_DISPATCH(device, sum_of_squares(sum, present));
  return std::sqrt(*to_device(sum, {}).data<double>());
}

void clip_gradients(const Tensor& norm, const Tensor& numbers, std::span<const Tensor> gradients, double most,
                    const std::function<void(const Tensor& squares)>& add_others) {
  const ArgumentCheck check("clip_gradients");
  const Device device = numbers.device();
  check.dense("numbers", numbers, DType::f32, {kAdamWConstants}, device);
  check.dense("norm", norm, DType::f64, {1}, device);
  const std::vector<Tensor> present = present_of(check, gradients);
  FURIOUS_DISPATCH(device, sum_of_squares(norm, present));
  if (add_others) add_others(norm);
  FURIOUS_DISPATCH(device, set_scale(numbers, norm, most));
}

}  // namespace furious
