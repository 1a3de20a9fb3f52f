// Checkpoints of the authors' trainer (github.com/gmongaras/2Mamba2Furious): a Hugging Face folder of a Llama whose
// config.json has a key "attention_type", or its weights alone.
//
// An attention_type is made of tokens joined by "__". The first is the score (linear, squared, exp) or stands alone
// (softmax, mamba, linear); each of the others sets one switch of the block:
//
//   sm_norm | output_norm (out_norm)    ReLU | silu    in_conv_k_2 | _3 | _4    dt_on_values    D_res    Z_out_gate
//   A_mask_type_discretize | _neg_softplus | _neg_softplus_dt | _neg_softplus2 | _neg_silu
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/formats/stored.h"

namespace furious {

// The architecture that an attention_type means: the preset with these switches, else one that has the attention_type
// as its name. A token that is unknown, repeated or in contradiction to another is an Error with its name.
Preset release_architecture(std::string_view attention_type, const std::string& origin);

// The same for a name on the command line, which may also be that of a preset.
Preset named_architecture(const std::string& arch);

// The configuration of weights that come alone: dimensions follow from the first layer's tensors, switches from `arch`.
// `heads` is for weights that do not tell it (0: not known); where they do, it must agree.
ModelConfig release_config(const SafetensorsReader& reader, const std::string& arch, int64_t heads);

// The number of heads that the tensors of the first layer tell; 0 where none does.
int64_t told_heads(const SafetensorsReader& reader);

// What a config.json with an attention_type leaves open: whether there is a dt bias, and the state and window of a
// Mamba. Changes nothing where the tensors do not have the authors' names.
void follow_tensors(ModelConfig& config, const SafetensorsReader& reader);

// Where a parameter lies in the authors' layout; empty where it lies under its own name.
std::vector<StoredRange> release_pieces(const SafetensorsReader& reader, const ModelConfig& config,
                                        const std::string& name, const Shape& shape);

}  // namespace furious
