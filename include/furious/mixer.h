// The mixer as an operation on the caller's tensors: linear attention, Mamba-2, 2Mamba and softmax attention as one
// function with three switches.
//
//   S_ij = scale · q_i·k_j          w_ij = f(S_ij) · exp(A_i − A_j)  for j ≤ i, else 0       A_t = Σ_{s≤t} log_decay_s
//   y_i  = Σ_j w_ij v_j             n_i  = Σ_j w_ij
//   o_i  = y_i  (norm none)         o_i  = y_i / n_i  (norm sum)
//
// f(x) is x (linear), x² (squared), exp(x) (exponential), x^degree (power) or the first terms of the exponential's
// series (series). For all but the exponential the past fits into a state of constant size, unless the decay is signed.
//
//   furious::ops::MixerInputs inputs{q, k, v, log_decay};
//   const auto result = furious::ops::mixer_forward({}, inputs);    // 2Mamba: squared, decay, sum
//   const auto gradients = furious::ops::mixer_backward({}, inputs, result, out_gradient);
//
// Layouts, those of flash-linear-attention; any strides with unit inner stride:
//
//   q, k           [B, T, Hqk, K]   f32, bf16 or f16 (Form::reference: also f64), 8 ≤ K, V ≤ 256
//   v              [B, T, H, V]     of the dtype of q
//   log_decay      [B, T, H]        f32 (f64 with f64 inputs), none positive; exactly when the spec has decay
//   initial_state  [N, H, D, C]     f32 (f64); N is B, or the number of packed sequences
//   out            [B, T, H, V]     of the dtype of v
//
// H is the largest number of heads of q, k and v; each, and log_decay, may have a divisor
// of it, whose heads serve neighbouring ones.
// D is state_rows(spec, K), C is V, or V + 1 with norm sum: the last column is the state of n.
//
// All failures are a furious::Error that names the argument, before anything is written. Threads may call at the same
// time. On a GPU a call returns before its work is done; StreamScope (furious/tensor.h) orders it with a stream. The
// same call gives the same bits, for any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "furious/tensor.h"

namespace furious::ops {

enum class Score : uint8_t { linear, squared, exponential, power, series };
enum class Norm : uint8_t { none, sum };
// parallel: tiles of the score matrix, quadratic time. chunked: linear time, for scores with a state. reference: in
// double precision on the CPU, slow. automatic: the faster of the first two; on a GPU calls with states are chunked.
enum class Form : uint8_t { automatic, parallel, chunked, reference };
// Of the products on a GPU. automatic: bf16 for bf16 inputs, tf32x3 for f32, tf32 for f16, and f32 for dimensions above
// 128 on devices where a block has less than 161 KB of shared memory. The CPU computes in f32.
enum class Precision : uint8_t { automatic, bf16, tf32, tf32x3, f32 };

struct MixerSpec {
  Score score = Score::squared;
  bool decay = true;
  Norm norm = Norm::sum;
  float scale = 0;            // 0: 1/√K
  int degree = 0;             // of power (3 or 4) and series (1 to 4); 0 for the others
  bool signed_decay = false;  // log_decay may be positive

  bool operator==(const MixerSpec&) const = default;
};

// The mixers of the paper by name: "2mamba", "mamba2", "softmax", "linear", …
FURIOUS_API MixerSpec mixer_spec(std::string_view name);
FURIOUS_API std::vector<std::string> mixer_names();
FURIOUS_API Score score_from_name(std::string_view name);
FURIOUS_API Norm norm_from_name(std::string_view name);
FURIOUS_API Form form_from_name(std::string_view name);            // "auto", "parallel", "chunked", "reference"
FURIOUS_API Precision precision_from_name(std::string_view name);  // "auto", "bf16", "tf32", "tf32x3", "f32"
FURIOUS_API std::string name_of(Form form);

// D, the rows of the state; 0 where there is none of constant size (exponential scores, signed decays, large degrees).
FURIOUS_API int64_t state_rows(const MixerSpec& spec, int64_t qk_dim);
// C, the columns of the state.
FURIOUS_API int64_t state_columns(const MixerSpec& spec, int64_t v_dim);

struct MixerInputs {
  Tensor q, k, v;
  Tensor log_decay = {};
  Tensor initial_state = {};
  // Packed sequences: B is 1, and sequence n has the tokens from cu_seqlens[n] to cu_seqlens[n + 1]; it begins with 0
  // and ends with T. Empty: every row of the batch is a sequence.
  std::vector<int64_t> cu_seqlens = {};
};

struct MixerOptions {
  Form form = Form::automatic;
  int64_t chunk = 0;  // tokens in a chunk of the chunked form; 0: chosen by dimension
  bool final_state = false;
  Precision precision = Precision::automatic;
};

struct MixerResult {
  Tensor out = {};
  // For the backward pass, B·T·H numbers of f32 (f64 with f64 inputs): [B, H, T], and [H, T of the sequence] of one
  // sequence after another in calls with cu_seqlens and states.
  Tensor normalizer = {};       // with norm sum
  Tensor maximum = {};          // with norm sum and an exponential score
  Tensor final_state = {};      // [N, H, D, C] if requested
  Form form = Form::automatic;  // that ran
  int64_t chunk = 0;            // on a GPU: of the chunked form
  std::string kernel = {};      // "cpu", "hopper", "tensor cores", …
  Tensor states = {};           // memory of the library that spares the backward pass work; may be dropped
};

struct MixerGradients {
  Tensor q = {}, k = {}, v = {}, log_decay = {}, initial_state = {};  // in shape and dtype of their inputs
};

// The defined ones of `into.out`, `normalizer`, `maximum` and `final_state` are written instead of new tensors: memory
// of the caller, of any strides without overlap (contiguous ones spare a copy).
FURIOUS_API MixerResult mixer_forward(const MixerSpec& spec, const MixerInputs& inputs,
                                      const MixerOptions& options = {}, const MixerResult& into = {});

// `result`: of mixer_forward for these inputs and options, at least out, normalizer and maximum, and with a gradient of
// the final state also final_state. `final_state_gradient` is optional. `into` as above.
FURIOUS_API MixerGradients mixer_backward(const MixerSpec& spec, const MixerInputs& inputs, const MixerResult& result,
                                          const Tensor& out_gradient, const Tensor& final_state_gradient = {},
                                          const MixerOptions& options = {}, const MixerGradients& into = {});

// One token of every sequence: q, k [B, Hqk, K], v [B, H, V], log_decay [B, H]; returns out [B, H, V]. `state`
// [B, H, D, C] f32, which starts with zeros or as a final state, is brought up to date in place. Writes into `out`
// where that is defined. For scores with a state; for decoding many tokens use a MixerCache.
FURIOUS_API Tensor mixer_step(const MixerSpec& spec, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& log_decay, const Tensor& state, const Tensor& out = {});

// The sizes of a call without its tensors. Of a MixerCache, whose sequences grow, the length is not used.
struct MixerSizes {
  int64_t batch = 1, length = 0;
  int64_t heads = 1, qk_heads = 1;  // of v, and of q and k
  int64_t qk_dim = 0, v_dim = 0;
  DType dtype = DType::f32;
  Device device = {};
  bool initial_state = false;
  std::vector<int64_t> cu_seqlens = {};
};

// The past of sequences that are decoded together, for any score: a KV cache until a state and a window of the last
// tokens take less memory, then these. A step reads the state once and writes it only now and then, which makes it
// faster than mixer_step. On the CPU the inputs are f32, on a GPU f32 or bf16. One thread at a time.
class FURIOUS_API MixerCache {
 public:
  // Of `sizes`: batch, the heads, the dimensions and the device.
  MixerCache(const MixerSpec& spec, const MixerSizes& sizes);
  ~MixerCache();
  MixerCache(MixerCache&&) noexcept;
  MixerCache& operator=(MixerCache&&) noexcept;

  // Further tokens of every sequence, as mixer_forward takes them, without states and packing; returns out.
  Tensor prefill(const MixerInputs& inputs, const Tensor& out = {});
  // The next token of every sequence, as mixer_step takes it; returns out.
  Tensor step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay = {}, const Tensor& out = {});
  void clear();  // back to no tokens

  Tensor state() const;    // of all tokens so far, [B, H, D, C]: an initial state. An Error for a score without one
  int64_t tokens() const;  // of each sequence so far
  int64_t bytes() const;   // that the cache takes now

 private:
  struct Contents;
  Contents& own() const;  // an Error where the cache was moved from
  std::unique_ptr<Contents> contents_;
};

struct MixerCost {
  Form form = Form::automatic;  // that would run; on the CPU strong decays may favour the parallel one over it
  int64_t chunk = 0;            // tokens in its chunks; the length in the parallel form
  double forward_flops = 0, backward_flops = 0;  // of the products, counting only pairs with j ≤ i
  int64_t output_bytes = 0;                      // of out, normalizer, maximum and final state
  int64_t state_bytes = 0;                       // of one state [N, H, D, C]; 0 for a score without state
};
FURIOUS_API MixerCost mixer_cost(const MixerSpec& spec, const MixerSizes& sizes, const MixerOptions& options = {});

// The largest scratch memory that the passes of a call have at any time, beside inputs, results and gradients.
// Measured: both passes run once, on zeros. On the CPU an upper bound for the threads of this thread's calls.
struct MixerScratch {
  int64_t forward_bytes = 0, backward_bytes = 0;
};
FURIOUS_API MixerScratch mixer_scratch(const MixerSpec& spec, const MixerSizes& sizes,
                                       const MixerOptions& options = {});

}  // namespace furious::ops
