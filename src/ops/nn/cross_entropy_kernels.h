// What cross_entropy.cpp calls after all checks.
#pragma once

#include "ops/nn/cross_entropy.h"

namespace furious::cpu {

// The number of targets that are not ignored.
void count_targets(const Tensor& counted, const Tensor& targets);
// losses (f64) of the rows of logits [rows, vocabulary]; with_gradient replaces each row by 1/n of its loss's gradient.
void cross_entropy_rows(const Tensor& logits, const Tensor& targets, const Tensor& weights, double z_loss,
                        const Tensor& counted, bool with_gradient, const Tensor& losses);
void mean_loss(const Tensor& loss, const Tensor& losses, const Tensor& counted);
void scale(const Tensor& tensor, const Tensor& factor);  // tensor *= factor [1]

}  // namespace furious::cpu

namespace furious::cuda {

void count_targets(const Tensor& counted, const Tensor& targets);
void cross_entropy_rows(const Tensor& logits, const Tensor& targets, const Tensor& weights, double z_loss,
                        const Tensor& counted, bool with_gradient, const Tensor& losses);
void mean_loss(const Tensor& loss, const Tensor& losses, const Tensor& counted);
void scale(const Tensor& tensor, const Tensor& factor);

}  // namespace furious::cuda
