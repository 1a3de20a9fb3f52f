// The mean of the log-decays that enter the mixers. That of new weights is strong (about −0.69 for a softplus), which
// erases most of the past; trained models keep some heads near 0. Benchmarks set it, so that what they measure does not
// depend on how weights are drawn.
#pragma once

#include <vector>

#include "model/language_model.h"

namespace furious {

// The configuration with a parameter that shifts the decays of a layer: A_log, or the bias of the decay's projection,
// which is added where the preset has none. An Error if the model has no decay.
ModelConfig with_settable_decay(ModelConfig config);

// Sets that parameter in every layer, in the same way for all heads, such that these tokens (i32 [rows, length], on the
// CPU) have this mean log-decay, which is negative.
void set_mean_log_decay(const LanguageModel& model, const Tensor& tokens, double mean);

// The mean for each layer; empty if the model has no decay.
std::vector<double> mean_log_decays(const LanguageModel& model, const Tensor& tokens);

}  // namespace furious
