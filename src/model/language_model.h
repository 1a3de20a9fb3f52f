// The Llama-2 shape around the token-mixing block:
//
//   x = embedding(tokens);   layers times:  x += block(RMSNorm(x)),  x += MLP(RMSNorm(x));   RMSNorm, output projection
//
// The layers are a plan (plan.h) that is run on a tape. decode/decoder.h runs the same plan to continue sequences.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/plan.h"
#include "model/run_plan.h"

namespace furious {

struct Parameter {
  std::string name;  // as in the checkpoint
  Variable value;
};

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
  // `before_each` is called before every parameter: what it throws ends the making of a large model.
  // Matrices are of the dtype given, everything else is f32; in bf16 or f16 the model is for reading only. An embedding
  // on a GPU is f32 in any case. At no time is more than one matrix in memory in f32 too.
  LanguageModel(const ModelConfig& config, uint64_t seed, Device device = {},
                Initialization initialization = Initialization::furious, const std::function<void()>& before_each = {},
                DType matrices = DType::f32);
  // Weights from elsewhere: `fill` is called once for each parameter, with its name and the tensor to write.
  using Fill = std::function<void(const std::string& name, const Tensor& out)>;
  LanguageModel(const ModelConfig& config, const Fill& fill, Device device = {}, DType matrices = DType::f32);

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

  // Mean cross-entropy of targets (i32 [batch, length], −1 ignored) after tokens of the same shape, each times its
  // weight (f32 of that shape; undefined: 1). Documents of a packed batch are kept apart by boundaries
  // (ops/boundaries.h). Loss and row_losses are on the model's device. `z_loss`: as in ops/nn/cross_entropy.h.
  Variable loss(Tape& tape, const Tensor& tokens, const Tensor& targets, const Tensor& boundaries = {},
                const Tensor& row_losses = {}, const Tensor& weights = {}, double z_loss = 0) const;

  // Logits [batch, length, vocabulary] of a full pass, f32 on the CPU.
  Tensor logits(const Tensor& tokens, const Tensor& boundaries = {}) const;

  // Where a full pass first meets a number that is not finite, as the checkpoint names the place
  // ("model.layers.3.self_attn"); empty if nowhere.
  std::string first_not_finite(const Tensor& tokens, const Tensor& boundaries = {}) const;
  // For each layer, √ of the mean square of the values that enter its mixer in a full pass.
  std::vector<double> value_rms(const Tensor& tokens, const Tensor& boundaries = {}) const;

  // What decoding runs: the plan of a layer and the weights of each, and what lies around the layers.
  const Plan& plan() const { return plan_; }
  const std::vector<std::vector<Variable>>& layers() const { return layers_; }
  const Compute& compute() const { return compute_; }
  const Tensor& embedding_table() const { return embedding_.value(); }
  const Tensor& final_norm() const { return norm_.value(); }
  // The parts of a pass: the embeddings of tokens, a layer with operations of the caller that look at other tokens, the
  // final norm.
  Tensor embedded(const Tensor& tokens) const;
  Tensor after_layer(size_t layer, const Tensor& x, SequenceOps& ops) const;
  Tensor last_norm(const Tensor& x) const;
  const Tensor& output_matrix() const { return output_weight().value(); }
  int64_t version() const { return version_; }  // another one when other tensors or other kernels serve
  // Token ids that enter from the CPU, checked, on the model's device.
  Tensor checked_ids(std::string_view argument, const Tensor& ids, int64_t smallest = 0) const;

 private:
  LanguageModel(const ModelConfig& config, Device device);

  // Makes the parameters, in order.
  class Maker;
  void make(Maker& maker);
  // An embedding of another dtype does not serve as the output matrix.
  void round_tied_head(DType matrices);

  // Called with the place and what came out of it; "….self_attn.values" are the mixer's.
  using Observer = std::function<void(const std::string& place, const Tensor& out)>;
  Variable run(Tape& tape, const Tensor& tokens, const Tensor& boundaries, const Observer& observe = {}) const;
  Variable output_weight() const { return head_ ? head_ : embedding_; }

  ModelConfig config_;
  Device device_;
  Plan plan_;
  Compute compute_;
  int64_t version_ = new_version();
  static int64_t new_version();
  std::vector<Parameter> parameters_;
  std::vector<std::vector<Variable>> layers_;  // the weights of the plan
  Variable embedding_, norm_, norm_bias_;      // the bias: of a layer norm
  Variable head_;                              // undefined where the embedding serves
};

}  // namespace furious
