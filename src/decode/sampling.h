// Choosing the next token from its logits (furious/model.h has the options):
//
//   l_i = logit_i / penalty if it is positive, logit_i · penalty if not     for tokens i of the recent history
//   p_i ∝ exp(l_i / temperature)                                            among the kept: top k, and top p of all
//
// Equal probabilities count the smaller id as the larger one, so a choice never depends on the order of a sort.
#pragma once

#include <cstdint>
#include <span>

#include "furious/model.h"

namespace furious {

inline constexpr int64_t kRepetitionWindow = 256;

// Throws an Error that names the option.
void check_sampling(const Sampling& sampling);

// `history`: the tokens before this one, of which the last kRepetitionWindow count. `position`: its place in the text,
// which together with the seed gives the random number.
int32_t sample(std::span<const float> logits, const Sampling& sampling, std::span<const int32_t> history,
               uint64_t position);

}  // namespace furious
