#include "model/export.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "base/number.h"
#include "model/config_json.h"
#include "model/formats/export_format.h"
#include "model/safetensors.h"
#include "ops/elementwise.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const ExportFormat* kFormats[] = {&kLlamaExport, &kMamba2Export, &kBrumbyExport};

// The keys of our config.json that modeling_furious.py computes, or that change nothing there.
constexpr std::string_view kModelingKeys[] = {"architectures",
                                              "model_type",
                                              "arch",
                                              "vocab_size",
                                              "hidden_size",
                                              "q_heads",
                                              "k_heads",
                                              "v_heads",
                                              "intermediate_size",
                                              "num_hidden_layers",
                                              "head_dim",
                                              "qk_dim",
                                              "mlp",
                                              "mlp_bias",
                                              "layer_norm",
                                              "branch",
                                              "rms_norm_eps",
                                              "tie_word_embeddings",
                                              "score",
                                              "norm",
                                              "decay",
                                              "score_degree",
                                              "decay_bias",
                                              "decay_heads",
                                              "sliding_window",
                                              "square_mask",
                                              "qkv_bias",
                                              "out_bias",
                                              "conv_window",
                                              "conv_bias",
                                              "conv_silu",
                                              "qk_activation",
                                              "qk_norm",
                                              "discretize",
                                              "qk_norm_per_head",
                                              "qk_norm_eps",
                                              "dt_bias",
                                              "dt_limit",
                                              "dt_least",
                                              "d_residual",
                                              "z_gate",
                                              "z_gate_bias",
                                              "scale",
                                              "z_gate_sigmoid",
                                              "out_norm_groups",
                                              "out_norm_eps",
                                              "rope",
                                              "rope_pairing",
                                              "rope_theta",
                                              "rope_factor",
                                              "rope_low_turns",
                                              "rope_high_turns",
                                              "bos",
                                              "torch_dtype",
                                              "rope_original_length",
                                              "num_attention_heads",
                                              "num_key_value_heads"};

const char* torch_name(DType dtype) {
  return dtype == DType::bf16 ? "bfloat16" : dtype == DType::f16 ? "float16" : "float32";
}

// The configuration without what a format may say in another way, or not at all: names, and the order of rows that is
// changed on writing.
ModelConfig essence(ModelConfig config) {
  config.arch.clear();
  config.bos = false;
  config.block.rope_pairing = {};
  if (config.block.qk_norm_eps == config.norm_eps) config.block.qk_norm_eps = 0;
  if (config.decays() == config.heads()) config.decay_heads = 0;
  return config;
}

// What keeps a model from being written in a format: also a switch that its configuration does not bring back.
std::string difference(const ExportFormat& format, const LanguageModel& model) {
  if (std::string found = format.difference(model); !found.empty()) return found;
  const std::string text = format.config(model.config()).dump();
  return essence(config_from_json(text, "export")) == essence(model.config()) ? "" : "a switch without a key there";
}

void write_model(const fs::path& directory, const LanguageModel& model, const ExportOptions& options, Json config,
                 const TensorsByName& tensors) {
  config["torch_dtype"] = torch_name(model.embedding_table().dtype());
  for (const auto& [key, id] : {std::pair{"bos_token_id", options.bos}, {"eos_token_id", options.eos}})
    config[key] = id < 0 ? Json(nullptr) : Json(id);
  write_text(directory / "config.json", config.dump(2) + "\n");
  write_safetensors(directory / "model.safetensors", tensors, {{"format", "pt"}});  // as the library asks
}

TensorsByName own_tensors(const LanguageModel& model) {
  TensorsByName tensors;
  for (const Parameter& parameter : model.parameters()) {
    const Tensor& value = parameter.value.value();
    const bool taps = parameter.name.ends_with("conv1d.weight");  // with their one input channel
    tensors[parameter.name] = taps ? value.view({value.size(0), 1, value.size(1)}) : value;
  }
  return tensors;
}

Exported write_with_code(const fs::path& directory, const LanguageModel& model, const ExportOptions& options) {
  Json config = Json::parse(config_to_json(model.config()));
  for (const auto& [key, value] : config.items())
    require(std::ranges::count(kModelingKeys, key) > 0,
            "export: the model has \"{}\": {}, which modeling_furious.py does not compute; use --to safetensors", key,
            value.dump());
  config["auto_map"] = {{"AutoConfig", "modeling_furious.FuriousConfig"},
                        {"AutoModelForCausalLM", "modeling_furious.FuriousForCausalLM"}};
  write_text(directory / "modeling_furious.py", modeling_furious());
  write_model(directory, model, options, std::move(config), own_tensors(model));
  return {.what = "a directory with modeling_furious.py", .model_type = "furious", .needs_code = true};
}

}  // namespace

double short_number(float value) {
  return *parse_number<double>(fmt::format("{}", value));
}

std::optional<Tensor> shared_rows(const Tensor& rows, int64_t groups) {
  const int64_t each = rows.size(0) / groups, width = rows.elements() / rows.size(0);
  const Tensor from = rows.view({groups, each, width});
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t row = 1; row < each; ++row) {
      const Tensor first = from.select(0, group).select(0, 0), other = from.select(0, group).select(0, row);
      if (std::memcmp(first.raw(), other.raw(), first.bytes()) != 0) return std::nullopt;
    }
  Shape shape = rows.shape();
  shape[0] = groups;
  const Tensor out = Tensor::empty(shape, rows.dtype());
  copy(out.view({groups, width}), from.select(1, 0));
  return out;
}

Tensor joined_rows(const std::vector<Tensor>& parts) {
  Shape shape = parts[0].shape();
  shape[0] = 0;
  for (const Tensor& part : parts) shape[0] += part.size(0);
  const Tensor out = Tensor::empty(shape, parts[0].dtype());
  int64_t row = 0;
  for (const Tensor& part : parts) {
    copy_between(out.slice(0, row, part.size(0)), part);
    row += part.size(0);
  }
  return out;
}

Exported export_model(const fs::path& directory, const LanguageModel& model, const ExportOptions& options) {
  if (options.kind == ExportKind::own) {
    write_model(directory, model, options, Json::parse(config_to_json(model.config())), own_tensors(model));
    return {.what = "a directory of furious' own format", .model_type = "furious"};
  }
  if (options.kind == ExportKind::code) return write_with_code(directory, model, options);
  std::vector<std::string> reasons;
  for (const ExportFormat* const format : kFormats) {
    const std::string found = difference(*format, model);
    if (!found.empty()) {
      reasons.push_back(fmt::format("{} has not {}", format->name, found));
      continue;
    }
    Json config = format->config(model.config());
    Exported done{.what = config["architectures"][0].get<std::string>(), .model_type = config["model_type"]};
    if (!format->in_library)
      done.reason =
          fmt::format("Hugging Face's library has no {}: its authors' code is needed beside the files", format->name);
    write_model(directory, model, options, std::move(config), format->tensors(model));
    return done;
  }
  Exported done = write_with_code(directory, model, options);
  done.reason = fmt::format("no class of Hugging Face's library has the block: {}", fmt::join(reasons, "; "));
  return done;
}

LanguageModel with_matrices(const LanguageModel& model, DType dtype) {
  std::map<std::string, Tensor> values;
  for (const Parameter& parameter : model.parameters()) values[parameter.name] = parameter.value.value();
  const auto fill = [&](const std::string& name, const Tensor& out) {
    const Tensor& value = values.at(name);
    copy(out, value);
    if (out.dtype() != DType::f16) return;
    const Tensor before = to_dtype(value, DType::f32), after = to_dtype(out, DType::f32);
    const auto is_finite = [](float x) { return std::isfinite(x); };
    const std::span<const float> wide(before.data<float>(), before.elements());
    const std::span<const float> narrow(after.data<float>(), after.elements());
    require(std::ranges::count_if(wide, is_finite) == std::ranges::count_if(narrow, is_finite),
            "export: {} has weights beyond 65504, the largest number of f16; use bf16", name);
  };
  return LanguageModel(model.config(), fill, model.device(), dtype);
}

}  // namespace furious
