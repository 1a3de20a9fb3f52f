// Models of other programs: how their configuration reads, and where our parameters lie in their tensors. A format
// refuses every key of the configuration that it does not know.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/config_reader.h"
#include "model/formats/stored.h"

namespace furious {

struct Format {
  std::string_view type;         // "model_type" in the configuration
  std::string_view description;  // for people
  ModelConfig (*config)(const ConfigReader& keys);
  // Where a parameter lies; empty: under its own name, queries, keys and values apart.
  std::vector<StoredRange> (*pieces)(const SafetensorsReader& weights, const ModelConfig& config,
                                     const std::string& name, const Shape& shape);
  // Where given: what the tensors say beyond the configuration.
  void (*follow_tensors)(ModelConfig& config, const SafetensorsReader& weights) = nullptr;
};

std::span<const Format> formats();
// What a configuration says it is: "model_type", or a name of ours for configurations without one.
std::string type_of(const ConfigReader& keys);
// An unknown type is an Error with the nearest.
const Format& format_of(const std::string& type, const ConfigReader& keys);
const Format* find_format(std::string_view type);  // nullptr when there is none

// What configurations of Hugging Face's library have in common: keys that change no result, and those of RoPE.
void ignore_common_keys(const ConfigReader& keys);
void read_rope(BlockConfig& block, const ConfigReader& keys);

// Each has a file of its own.
extern const std::span<const Format> kLlamaFormats, kPowerFormats, kMamba2Formats, kForgettingFormats;

// A Llama's configuration, which others extend: sizes, heads, norms and RoPE, with this block and activation of the
// MLP.
ModelConfig read_llama_like(const ConfigReader& keys, const std::string& arch, const BlockConfig& block,
                            const char* activation = "silu");

}  // namespace furious
