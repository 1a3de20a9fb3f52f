// The mixer family: linear attention, Mamba-2, 2Mamba and softmax attention as one function with three switches.
//
//   S_ij = scale · q_i·k_j          w_ij = f(S_ij) · exp(A_i − A_j)  for j ≤ i, else 0       A_t = Σ_{s≤t} a_s
//   y_i  = Σ_j w_ij v_j             n_i  = Σ_j w_ij
//   o_i  = y_i  (norm none)         o_i  = y_i / n_i  (norm sum; 0 where |n_i| < kSmallestNormalizer)
//
// f(x) is x (linear), x² (squared), exp(x) (exponential), x^degree (power) or Σ_{n ≤ degree} xⁿ/n! (series: the
// exponential, cut off). For polynomials f(S_ij) = φ(scale·q_i)·φ(k_j) (features.h), so the past fits into a state of
// constant size: state = Σ_j exp(A_end − A_j) φ(k_j) [v_j, 1]ᵀ, with D rows (φ's length: dim for a linear score,
// dim(dim+1)/2 for a squared one, (dim+1)(dim+2)/2 for a series of degree 2, more for higher degrees) and v_dim
// columns, plus one for n when norm = sum. Where D would be more than kLargestStateRows there is no state.
//
// The forms compute the same function. `parallel` walks tiles of the score matrix (quadratic time, any score);
// `chunked` does so inside chunks and carries the state between them (linear time; scores that have a state); both
// need memory linear in length. On a GPU a call with states runs in the chunked form whatever was requested.
// `reference` is the double-precision oracle, on the CPU. `recurrent.h` is the form for one token.
//
// A decay factor below the smallest normal f32 (exp(−87)) may count as zero: what lies behind it is forgotten.
//
// An exponential score without normalizer saturates: f(x) = exp(min(x, kLargestExponent)), so finite stays finite.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/tape.h"
#include "tensor/tensor.h"

namespace furious {

enum class Score : uint8_t { linear, squared, exponential, power, series };
enum class Norm : uint8_t { none, sum };
enum class Form : uint8_t { automatic, parallel, chunked, reference };
// What the products inside the mixer (scores, weighted sums and those of their gradients) are computed in, on a GPU.
// Sums, decays and normalizers are f32 in any case. automatic: bf16 for bf16 inputs, tf32x3 for f32, tf32 for f16, and
// f32 for dimensions above 128 where a block has less than 161 KB of shared memory. The inputs keep their dtype: bf16
// inputs are widened for the others, f32 inputs are rounded for bf16. Products with the states of the chunked form are
// at least those of TF32, but for bf16 inputs with automatic precision. A CPU computes in f32 only.
enum class MixerPrecision : uint8_t { automatic, bf16, tf32, tf32x3, f32 };

inline constexpr int64_t kSmallestDim = 8;  // of a head's queries, keys and values
inline constexpr int64_t kLargestDim = 256;
inline constexpr float kSmallestNormalizer = 1e-30f;
inline constexpr float kLargestExponent = 60.0f;
inline constexpr int kLargestDegree = 4;  // of power (3 or more) and series (1 or more)
// That of a series of degree 2 in the largest dimension: power 3 and series 3 to dimension 57 and 56, degree 4 to 28
// and 27.
inline constexpr int64_t kLargestStateRows = (kLargestDim + 1) * (kLargestDim + 2) / 2;

struct MixerSpec {
  Score score = Score::squared;
  bool decay = true;
  Norm norm = Norm::sum;
  float scale = 0;  // 0: 1/√qk_dim
  int degree = 0;   // of power and series; 0 for the others
  // log_decay may be positive: the mask may grow. A factor of the mask is exp(min(A_i − A_j, kLargestExponent)) then.
  bool signed_decay = false;
  // A sliding window: w_ij is 0 where i − j ≥ window. Only for an exponential score with sum norm and without decay; 0:
  // none.
  int64_t window = 0;

  bool operator==(const MixerSpec&) const = default;
};

// The mixers of the paper by name ("2mamba", "softmax", …); unknown names are answered with the nearest.
MixerSpec mixer_spec(std::string_view name);
const std::vector<std::string>& mixer_names();
std::string to_string(const MixerSpec& spec);  // "squared, decay, sum"

Form form_from_name(std::string_view name);
std::string_view name_of(Form form);
MixerPrecision mixer_precision_from_name(std::string_view name);  // auto, bf16, tf32, tf32x3, f32
std::string_view name_of(MixerPrecision precision);
const std::vector<std::string>& mixer_precision_names();

// D, the rows of the state; 0 if the mixer has no state of constant size.
int64_t state_rows(const MixerSpec& spec, int64_t qk_dim);
// v_dim, or one more when the normalizer is carried along.
int64_t state_columns(const MixerSpec& spec, int64_t v_dim);

// q, k: [batch, length, heads or a divisor of it, qk_dim]; v: [batch, length, heads or a divisor, v_dim]; all f32, bf16
// or f16 (f64 for the reference), any strides with unit inner stride. Head h of the result uses head h/(heads/own) of
// an input with `own` heads; heads is the largest of the three.
struct MixerInputs {
  Tensor q, k, v;
  // [batch, length, heads or a divisor] f32 (f64 for the reference), none positive; exactly when spec.decay.
  Tensor log_decay;
  Tensor boundaries;     // optional: where documents start (boundaries.h); nothing passes a boundary
  Tensor initial_state;  // optional: [batch, heads, D, columns] f32 (f64); enters each row's first document
  // Forward only, in the parallel form, without boundaries and states: q and the results have only the tokens from this
  // one on, k, v and log_decay have all. What a chunk of a prompt costs is then linear in the tokens before it.
  int64_t first_query = 0;
};

struct MixerOptions {
  Form form = Form::automatic;
  int64_t chunk = 0;  // tokens in a chunk of the chunked form; 0: chosen by dimension
  bool final_state = false;
  MixerPrecision precision = MixerPrecision::automatic;
};

struct MixerResult {
  // For every query, which are all tokens but with first_query.
  Tensor out;         // [batch, length, heads, v_dim], dtype of v
  Tensor normalizer;  // [batch, heads, length] f32 when norm = sum: n_i, divided by exp(maximum) for exponential scores
  Tensor maximum;     // [batch, heads, length] f32 for exponential with sum: the largest exponent of the row
  Tensor final_state;           // [batch, heads, D, columns] when requested: the state after each row's last document
  Form form = Form::automatic;  // the form that ran
  int64_t chunk = 0;            // and its chunk
  std::string_view kernel;  // which kernels of a device ran: "cpu", "hopper", "tensor cores", "tiles", "simple", …
  Tensor states;            // that the backward pass need not make again; may be dropped
};

// Gradients, contiguous and in the dtype of their inputs; da in f32. Tensors given in `into` are written instead (any
// strides with unit inner stride: slices of a fused gradient).
struct MixerGradients {
  Tensor q, k, v, log_decay, initial_state;
};

// The tensors of `into` (out, normalizer, maximum, final_state), where defined, are written instead of new ones. They
// are contiguous; on a GPU they start at a multiple of 16 bytes.
MixerResult mixer_forward(const MixerSpec& spec, const MixerInputs& inputs, const MixerOptions& options = {},
                          const MixerResult& into = {});

// `result` is what mixer_forward returned for these inputs. `final_state_gradient` is optional. No floating-point
// atomics: the same bits on every run, for every number of threads.
MixerGradients mixer_backward(const MixerSpec& spec, const MixerInputs& inputs, const MixerResult& result,
                              const Tensor& out_gradient, const Tensor& final_state_gradient = {},
                              const MixerOptions& options = {}, const MixerGradients& into = {});

// On the tape: q, k, v and log_decay receive gradients.
Variable mixer(Tape& tape, const MixerSpec& spec, const Variable& q, const Variable& k, const Variable& v,
               const Variable& log_decay, const Tensor& boundaries = {}, const MixerOptions& options = {});

}  // namespace furious
