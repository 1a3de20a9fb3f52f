// What a slot holds, as the plain arrays of furious/model.h.
#pragma once

#include <string>

#include "decode/decoder.h"
#include "decode/model_parts.h"

namespace furious {

SequenceState sequence_state(const SlotContents& contents, const std::string& model_fingerprint);

// Checks that the state belongs to the model, and its arrays against themselves; Decoder::restore checks them against
// the model. The tensors are copies.
SlotContents slot_contents(const SequenceState& state, const Model::Parts& model);

std::vector<float> floats_of(const Tensor& tensor);  // row-major, of any device and dtype of floats

}  // namespace furious
