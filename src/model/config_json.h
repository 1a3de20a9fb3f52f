// A model's configuration as the JSON text of a Hugging Face config.json: their keys where they have one, the names of
// BlockConfig for the rest.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace furious {

struct Format;

std::string config_to_json(const ModelConfig& config);

// The switches of a block by their keys in config.json. An unknown one is answered with the nearest; an Error says what
// a value may be.
const std::vector<std::string>& switch_names();
void set_switch(BlockConfig& block, const std::string& key, const std::string& text);
// The switches that make one block of the other: conv_window=3,norm=none.
std::string switches_between(const BlockConfig& from, const BlockConfig& to);

// Takes what config_to_json writes, what the authors' trainer writes (a Llama with an attention_type), and the
// configurations of published models (formats/format.h). Errors name `origin` and the key. Numbers are bounded, so that
// no size computed from them overflows.
ModelConfig config_from_json(std::string_view text, const std::string& origin);
// The format of a configuration that config_from_json takes; nullptr: ours, or the authors'.
const Format* config_format(std::string_view text, const std::string& origin);

// `config` itself; what check_config throws also names `origin`.
ModelConfig checked_config(const ModelConfig& config, const std::string& origin);

}  // namespace furious
