// What random.cpp calls after all checks.
#pragma once

#include "ops/random.h"

namespace furious::cpu {

void fill_uniform(const Tensor& out, float low, float range, uint64_t seed, uint64_t stream);
void fill_normal(const Tensor& out, float mean, float stddev, uint64_t seed, uint64_t stream);

}  // namespace furious::cpu

namespace furious::cuda {

void fill_uniform(const Tensor& out, float low, float range, uint64_t seed, uint64_t stream);
void fill_normal(const Tensor& out, float mean, float stddev, uint64_t seed, uint64_t stream);

}  // namespace furious::cuda
