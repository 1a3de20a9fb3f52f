// A model on disk: a Hugging Face directory with config.json and model.safetensors. Names follow Llama and the authors'
// release (model.layers.N.self_attn.qkv_proj.weight, …).
#pragma once

#include <filesystem>
#include <string>

#include "model/config_json.h"
#include "model/language_model.h"

namespace furious {

// The checkpoint that a path means: itself, or the newest one of the training run in that folder.
std::filesystem::path checkpoint_of(const std::filesystem::path& path);

// Reads a model: a directory with config.json and model.safetensors (or shards with their index), or a .safetensors
// file of the authors' release. config.json is our own, the authors' (formats/release.h) or a plain Llama's.
// `arch`, a preset or an attention_type of the authors, is needed only where there is no config.json: dimensions then
// follow from tensor shapes, and `heads` (0: not known) is needed where they leave the number of heads open. Where
// `arch` and `heads` are known they must agree.
//
// Every tensor is compared with the configuration before the model is made. One that is missing, of another shape or
// left over is an Error; only buffers that hold no weights (masks, rotary frequencies) may be left over.
// `before_each` is called before every parameter: what it throws ends the loading.
LanguageModel load_model(const std::filesystem::path& path, const std::string& arch = "", Device device = {},
                         int64_t heads = 0, const std::function<void()>& before_each = {});
ModelConfig load_config(const std::filesystem::path& path, const std::string& arch = "", int64_t heads = 0);

// What a user should know of the files there, for a program to print: pickles, which are never read, and files that
// are not those saved with the weights.
std::vector<std::string> load_notes(const std::filesystem::path& path);

// Writes config.json and model.safetensors, with f32 weights, into an existing directory. The metadata of the weights
// holds checksums of config.json and of the tokenizer's files, where these are there already.
void save_model(const std::filesystem::path& directory, const LanguageModel& model);

// Of the small files that were saved with these weights: a line for each that has changed since. Nothing for a model
// without checksums.
class SafetensorsReader;
std::vector<std::string> changed_files(const SafetensorsReader& weights);

}  // namespace furious
