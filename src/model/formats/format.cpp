#include "model/formats/format.h"

#include <algorithm>

namespace furious {

std::span<const Format> formats() {
  static const std::vector<Format> all = [] {
    std::vector<Format> list;
    for (const std::span<const Format> own : {kLlamaFormats, kPowerFormats, kMamba2Formats, kForgettingFormats})
      list.insert(list.end(), own.begin(), own.end());
    return list;
  }();
  return all;
}

std::string type_of(const ConfigReader& keys) {
  if (keys.contains("d_model") && !keys.contains("model_type")) return "mamba_ssm";
  if (keys.contains("dim") && keys.contains("n_layers")) return "mamba_consolidated";
  std::string type;
  keys("model_type", type);
  return type;
}

const Format* find_format(std::string_view type) {
  const auto found = std::ranges::find(formats(), type, &Format::type);
  return found == formats().end() ? nullptr : &*found;
}

const Format& format_of(const std::string& type, const ConfigReader& keys) {
  if (const Format* const format = find_format(type)) return *format;
  std::vector<std::string> known = {"furious"};
  for (const Format& format : formats()) known.emplace_back(format.type);
  unknown_name(fmt::format("\"model_type\" in {}:", keys.origin()), printable(type), known);
}

void ignore_common_keys(const ConfigReader& keys) {
  keys.ignore({"_attn_implementation_autoset",
               "_name_or_path",
               "architectures",
               "attention_dropout",
               "auto_map",
               "bos_token_id",
               "dtype",
               "embedding_dropout",
               "eos_token_id",
               "hidden_dropout",
               "id2label",
               "initializer_range",
               "is_llama_config",
               "label2id",
               "max_position_embeddings",
               "model_type",
               "output_attentions",
               "output_hidden_states",
               "pad_token_id",
               "pretraining_tp",
               "residual_dropout",
               "return_dict",
               "task_specific_params",
               "tokenizer_class",
               "torch_dtype",
               "transformers.js_config",
               "transformers_version",
               "unk_token_id",
               "unsloth_fixed",
               "unsloth_version",
               "use_cache"});
  keys.only("is_encoder_decoder", false, "only decoders are computed here");
  keys.only("add_cross_attention", false, "only decoders are computed here");
}

namespace {

// {"rope_type": "llama3", "factor": 8, …}, of "rope_scaling" or "rope_parameters".
void read_scaling(BlockConfig& block, const ConfigReader& keys) {
  std::string type = "default";
  keys.optional("type", type);  // the older name
  keys.optional("rope_type", type);
  RopeScaling& scaling = block.rope_scaling;
  constexpr Range<double> kFactor{1e-6, 1e6};
  if (type == "linear" || type == "llama3") keys("factor", scaling.factor, kFactor);
  if (type == "llama3") {
    keys("low_freq_factor", scaling.low, kFactor);
    keys("high_freq_factor", scaling.high, kFactor);
    keys("original_max_position_embeddings", scaling.original, Range<double>{1, 1e12});
    if (!(scaling.high > scaling.low)) keys.unexpected("high_freq_factor", "more than \"low_freq_factor\"");
  } else if (type != "linear" && type != "default") {
    keys.unexpected(keys.has("rope_type") ? "rope_type" : "type", "\"default\", \"linear\" or \"llama3\"");
  }
  keys.optional("rope_theta", block.rope_base, kRopeBase);
  keys.only("partial_rotary_factor", 1, "rotary positions turn whole heads here");
  keys.finish("with rotary positions of type " + type);
}

}  // namespace

void read_rope(BlockConfig& block, const ConfigReader& keys) {
  block.rope = true;
  block.rope_pairing = RopePairing::halves;
  keys.optional("rope_theta", block.rope_base, kRopeBase);
  keys.only("partial_rotary_factor", 1, "rotary positions turn whole heads here");
  keys.only("rope_interleaved", false, "pairs of dimensions are halves of a head in this format");
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    keys.ignore({key});
    if (!keys.has(key)) continue;
    const ConfigReader inside = keys.inside(key);
    if (key == std::string_view("rope_scaling") && !inside.has("rope_type") && !inside.has("type"))
      keys.unexpected(key, "null, or a \"rope_type\"");
    read_scaling(block, inside);
  }
}

}  // namespace furious
