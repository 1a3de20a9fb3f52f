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
// Whether a configuration is beside the weights; without one, the architecture must be named to load them.
bool has_config(const std::filesystem::path& path);

// Reads a model: a directory with config.json and model.safetensors (or shards with their index), or a .safetensors
// file of the authors' release. config.json is our own, the authors' (formats/release.h) or that of a published model
// (formats/format.h).
// `arch`, a preset or an attention_type of the authors, is needed only where there is no config.json: dimensions then
// follow from tensor shapes, and `heads` (0: not known) is needed where they leave the number of heads open. Where
// `arch` and `heads` are known they must agree.
//
// Every tensor is compared with the configuration before the model is made. One that is missing, of another shape or
// left over is an Error; only buffers that hold no weights (masks, rotary frequencies) may be left over.
// `progress` is called before every parameter, with the bytes of weights in memory by then and of all: what it throws
// ends the loading.
//
// as_stored keeps matrices of bf16 and f16 as they are on a CPU, whose results do not change by it; bf16 rounds others.
// Both are for reading only. A model whose weights exceed the free memory of the device is an Error before anything is
// read.
using LoadProgress = std::function<void(int64_t done, int64_t all)>;
enum class WeightDType : uint8_t { f32, as_stored, bf16 };
LanguageModel load_model(const std::filesystem::path& path, const std::string& arch = "", Device device = {},
                         int64_t heads = 0, const LoadProgress& progress = {}, WeightDType weights = WeightDType::f32);
ModelConfig load_config(const std::filesystem::path& path, const std::string& arch = "", int64_t heads = 0);
// The same, and every tensor compared with the configuration; nothing is loaded.
class SafetensorsReader;
ModelConfig check_model(const std::filesystem::path& path, const std::string& arch = "", int64_t heads = 0);
// The format of another program that a model is in; nullptr: ours, or the authors' release.
struct Format;
const Format* model_format(const std::filesystem::path& path);
// The dtype of the largest tensor if matrices can be kept in it, else f32.
DType stored_matrices(const SafetensorsReader& weights);
// Of the weights of such a model in memory.
int64_t weight_bytes(const ModelConfig& config, DType matrices, Device device = {});
// An Error, with the bytes needed and free, where they do not fit into the device's memory; messages begin with
// `origin`. Returns weight_bytes().
int64_t check_weight_memory(const std::string& origin, const ModelConfig& config, DType matrices, Device device = {});

// What a user should know of the files there, for a program to print: pickles, which are never read, and files that
// are not those saved with the weights.
std::vector<std::string> load_notes(const std::filesystem::path& path);

// Writes config.json and model.safetensors, with f32 weights, into an existing directory. The metadata of the weights
// holds checksums of config.json and of the tokenizer's files, where these are there already.
void save_model(const std::filesystem::path& directory, const LanguageModel& model);

// Of the small files that were saved with these weights: a line for each that has changed since. Nothing for a model
// without checksums.
std::vector<std::string> changed_files(const SafetensorsReader& weights);

}  // namespace furious
