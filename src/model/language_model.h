// The Llama-2 shape around the token-mixing block:
//
//   x = embedding(tokens);   layers times:  x += block(RMSNorm(x)),  x += MLP(RMSNorm(x));   RMSNorm, output projection
//
// Forward code only: run on a tape it can be differentiated, run with a cache it continues a sequence.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "ops/matmul.h"
#include "ops/mixer/recurrent.h"
#include "ops/tape.h"

namespace furious {

struct TokenMixing;

// What a model remembers of the sequences it has read: per layer the mixer's cache and the convolution's last inputs.
class ModelCache {
 public:
  ModelCache(const ModelConfig& config, int64_t batch, Device device = {});

  // Everything it holds, to keep elsewhere and go on from later, to the bit and on any device. Every tensor is f32 and
  // begins with the batch.
  struct Contents {
    int64_t tokens = 0;   // read
    int64_t pending = 0;  // of them not yet in the state (MixerContents)
    std::map<std::string, Tensor> tensors;
  };
  Contents contents(Device where = {}) const;
  // Goes on from there; what does not fit the model is refused.
  ModelCache(const ModelConfig& config, int64_t batch, const Contents& contents, Device device = {});

  int64_t tokens() const { return layers_.front().mixer.tokens(0); }
  int64_t batch() const { return batch_; }
  int64_t bytes() const;  // held now
  // How the last step ran, in the words of LanguageModel::step_runs_as; empty before the first.
  std::string_view ran_as() const { return ran_as_; }

 private:
  friend class LanguageModel;
  struct Layer {
    MixerCache mixer;
    Tensor conv;  // [batch, window − 1, channels] f32; only with a convolution
  };
  // The step for one token, recorded on a GPU, and everything its record depends on.
  struct Recording {
    int64_t version = 0;  // of the model
    std::vector<int64_t> places;
    std::function<void(const Tensor& ids)> run;  // a graph, or one kernel where that can do it
    Tensor logits;                               // in the memory of what runs
  };

  int64_t batch_;
  SlotRows rows_;  // all slots
  std::vector<Layer> layers_;
  Tensor ids_;  // [batch, 1]: where the recorded step finds its tokens
  Recording recorded_;
  std::string_view ran_as_;
};

struct Parameter {
  std::string name;  // as in the checkpoint
  Variable value;
};

// How a model computes; what it computes stays the same but for rounding.
struct Compute {
  MatmulPrecision precision = MatmulPrecision::f32;
  bool recompute = false;  // keep only the input of each layer for the backward pass, and run the layer again there
  DType activations = DType::f32;                    // bf16 only on a GPU
  MixerPrecision mixer = MixerPrecision::automatic;  // of the products inside the mixer, in training and prefill
  bool token_program = true;                         // a token is one kernel where that can be (ops/token_program.h)
};
// Products in f32 or bf16; on a GPU activations too.
Compute compute_in(DType dtype, Device device);

// How new weights are drawn. Norms and D start at 1, A_log and dt_bias as Mamba-2 starts them.
//   furious     linear layers normal(0, 0.02); the convolution uniform ±1/√window, its bias and others 0
//   pytorch     as nn.Linear and nn.Conv1d start: inside the layers uniform ±1/√fan_in, with biases ±1/√window in the
//               convolution and ±1/√fan_in in the Z gate; embedding and output projection normal(0, 0.02)
//   identity    as furious, but the convolution starts by passing the current token on: weights [0, …, 0, 1] +
//               normal(0, 0.02)
enum class Initialization : uint8_t { furious, pytorch, identity };
const std::vector<std::string>& initialization_names();
Initialization initialization_from_name(std::string_view name);  // unknown names are answered with the nearest

class LanguageModel {
 public:
  // New weights, with the same bits on every device.
  LanguageModel(const ModelConfig& config, uint64_t seed, Device device = {},
                Initialization initialization = Initialization::furious);
  // Weights from elsewhere: `fill` is called once for each parameter, with its name and the f32 tensor to write.
  using Fill = std::function<void(const std::string& name, const Tensor& out)>;
  LanguageModel(const ModelConfig& config, const Fill& fill, Device device = {});

  // Names and shapes of the parameters of such a model, in order, without making them.
  using Visit = std::function<void(const std::string& name, const Shape& shape)>;
  static void visit_parameters(const ModelConfig& config, const Visit& visit);

  const ModelConfig& config() const { return config_; }
  void set_bos(bool bos) { config_.bos = bos; }  // whether the texts it is trained on begin with bos
  Device device() const { return device_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  void set_compute(const Compute& compute);
  // For reading only: keeps the weights of products in bf16 beside the parameters, so that a token reads half the
  // bytes. Such a model is not trained.
  void round_weights();
  int64_t bytes_per_token() const;  // of the weights that reading a token takes, however many sequences read one

  // Tokens and targets may be on the CPU, whatever the model's device; what is not is not checked. Boundaries always
  // are.

  // Mean cross-entropy of targets (i32 [batch, length], −1 ignored) after tokens of the same shape. Documents of a
  // packed batch are kept apart by boundaries (ops/boundaries.h). Loss and row_losses are on the model's device.
  Variable loss(Tape& tape, const Tensor& tokens, const Tensor& targets, const Tensor& boundaries = {},
                const Tensor& row_losses = {}) const;

  // Logits [batch, length, vocabulary] of a full pass, f32 on the CPU.
  Tensor logits(const Tensor& tokens, const Tensor& boundaries = {}) const;
  // Reads more tokens [batch, length] of every sequence of the cache; logits [batch, vocabulary] after the last, f32 on
  // the CPU.
  Tensor read(ModelCache& cache, const Tensor& tokens) const;
  // The same for one token [batch, 1] of every sequence, with the logits on the model's device, where the next step
  // writes its own. On a GPU the step is recorded as a graph and run again from token to token, with the weights where
  // they are: they may change. Nothing waits for the device.
  Tensor step(ModelCache& cache, const Tensor& tokens) const;
  // How such a step would run for this cache as it is: "one kernel" (ops/token_program.h), "graph", or "operations" one
  // after the other, as on a CPU.
  std::string_view step_runs_as(const ModelCache& cache) const;

  // Where a full pass first meets a number that is not finite, as the checkpoint names the place
  // ("model.layers.3.self_attn"); empty if nowhere.
  std::string first_not_finite(const Tensor& tokens, const Tensor& boundaries = {}) const;
  // For each layer, √ of the mean square of the values that enter its mixer in a full pass.
  std::vector<double> value_rms(const Tensor& tokens, const Tensor& boundaries = {}) const;

 private:
  struct Layer {
    Variable input_norm, qkv, conv_weight, conv_bias, dt, dt_bias, a_mask, a_mask_bias, a_log, d, z_gate, z_gate_bias;
    Variable out_norm, branch_gate, branch, out;
    Variable mlp_norm, gate, up, down;
  };

  LanguageModel(const ModelConfig& config, Device device) : config_(config), device_(device) {}

  // Makes the parameters, in order.
  class Maker;
  void make(Maker& maker);

  // Called with the place and what came out of it; "….self_attn.values" are the mixer's.
  using Observer = std::function<void(const std::string& place, const Tensor& out)>;
  Variable hidden(Tape& tape, const Tensor& tokens, const Tensor& boundaries, ModelCache* cache,
                  const Observer& observe = {}) const;
  Variable project(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias = {},
                   const Variable& residual = {}) const;
  std::vector<Variable> project(Tape& tape, const Variable& x, const std::vector<Variable>& weights) const;
  // Each with its norm and its residual.
  Variable mlp(Tape& tape, const Layer& layer, const Variable& x) const;
  Variable block(Tape& tape, size_t index, const Variable& x, const Tensor& boundaries, ModelCache* caches,
                 const Observer& observe) const;
  Variable mix(Tape& tape, const Variable& q, const Variable& k, const Variable& v, const Variable& log_decay,
               const Tensor& boundaries, ModelCache::Layer* cache) const;
  Tensor here(std::string_view argument, const Tensor& ids, int64_t first) const;
  TokenMixing token_mixing_of(const Layer& layer) const;
  Tensor token_pass(ModelCache& cache, const Tensor& tokens) const;
  bool fits_program(const ModelCache& cache) const;
  Variable output_weight() const { return head_ ? head_ : embedding_; }

  ModelConfig config_;
  Device device_;
  Compute compute_;
  int64_t version_ = new_version();  // another one when other tensors or other kernels serve
  static int64_t new_version();
  std::vector<Parameter> parameters_;
  std::vector<Layer> layers_;
  Variable embedding_, norm_;
  Variable head_;  // not there where the embedding serves
};

}  // namespace furious
