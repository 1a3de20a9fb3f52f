#include "furious/presets.h"

#include "base/boundary.h"
#include "model/config.h"
#include "model/config_json.h"

namespace furious {

std::vector<PresetInfo> preset_infos() {
  std::vector<PresetInfo> infos;
  for (const Preset& preset : presets()) infos.push_back({preset.name, preset.description});
  return infos;
}

std::string preset_config(const std::string& arch, const std::string& size, int64_t vocabulary) try {
  return config_to_json(model_config(arch, size, vocabulary));
} catch (...) {
  rethrow_as_error();
}

std::string normal_config(const std::string& json) try {
  return config_to_json(config_from_json(json, "config.json"));
} catch (...) {
  rethrow_as_error();
}

}  // namespace furious
