// The architectures of the paper by name, and the configurations (config.json) of models made from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "furious/error.h"
#include "furious/export.h"

namespace furious {

struct PresetInfo {
  std::string name, description;
};
FURIOUS_API std::vector<PresetInfo> preset_infos();

// config.json of a model of an architecture and a size (tiny, mini, small, medium). docs/checkpoints.md describes it.
FURIOUS_API std::string preset_config(const std::string& arch, const std::string& size, int64_t vocabulary);
// The configuration of any model that Model::load() reads, in the keys of furious. An Error where it cannot work.
FURIOUS_API std::string normal_config(const std::string& json);

}  // namespace furious
