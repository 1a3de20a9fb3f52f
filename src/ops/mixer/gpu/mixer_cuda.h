// What the kernels of the mixer on a GPU share on the host, and the sets of kernels behind mixer_cuda.cu.
#pragma once

#include "ops/mixer/mixer_kernels.h"

namespace furious::cuda {

// While it lives, mixers of this thread run the kernels of this name (MixerResult::kernel: "hopper", "tensor cores",
// "tiles", "simple", "walk" or "chunk states") instead of the fastest; a call that they cannot compute is an Error.
// With "tensor cores" a Hopper device runs what older devices run. Inside chunks, "hopper" computes what no earlier
// chunk adds to; with a past, "tensor cores" compute the forward pass in its place. "chunk states" is about states
// only, in place of "walk" and of the states on Hopper: the kernels inside chunks are the fastest.
class KernelScope {
 public:
  explicit KernelScope(std::string_view kernel);
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  std::string_view before_;
};
std::string_view forced_kernel();  // empty: none

// Tables of the tokens of a call. Without decay or boundaries the tensors are undefined.
struct TokenTables {
  Tensor decay;   // f64 [batch, heads, length]: A, summed over the whole row; only differences within a document count
  Tensor starts;  // i32 [batch, length]: the first key of a query, where its document or its sliding window starts
  Tensor ends;    // i32 [batch, length]: behind the last query of a key
};
TokenTables token_tables(const MixerCall& call);

// Gradients of one head of the call each, before heads that share an input are summed.
struct HeadGradients {
  Tensor q, k, v;  // [batch, length, heads, dim]
  // f64 [batch, heads, length]: the part of dA that queries give, and that which keys give. Under the sum norm the
  // first is zero but for rounding. It is defined (and but for rounding in f32 a pair cancels in da, where t does not
  // lie between its tokens) where kernels sum over pairs in both; kernels that round pairs to bf16 differently for each
  // have none.
  Tensor row_decay, key_decay;
};

// Any dtype, dimension and spec; f32 arithmetic, a warp per token. `past` is f32 [batch, heads, length,
// past_columns()]: what a state adds to each token.
void simple_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past);
void simple_backward(const MixerCall& call, const TokenTables& tables, const Tensor& out_gradient,
                     const HeadGradients& gradients);

// Whether every row of a bf16 tensor [batch, length, heads, dim] can be read 16 bytes at a time.
bool rows_are_wide(const Tensor& x);

// The precision of the call's products: the requested one, or that of the inputs.
MixerPrecision product_precision(const MixerCall& call);

// Any spec and dtype, products in product_precision(call); dimensions up to largest_tile_dim(). `past` as above.
int64_t largest_tile_dim(Device device);  // 256, or 128 where a block has less than 161 KB of shared memory
bool tiles_support(const MixerCall& call);
void tiles_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past);
void tiles_backward(const MixerCall& call, const TokenTables& tables, const Tensor& out_gradient,
                    const HeadGradients& gradients);

// g/n and δ/n, as the gradients use them; for exponentials g, δ and log2 of n·exp(maximum). Where `inverse` is defined,
// g and δ are left to be multiplied by it, and `reach` is that of scale_gradient() (or else 1) multiplied by it.
struct ScaledGradient {
  Tensor g;                               // bf16 [batch, length, heads, v_dim to a multiple of 8]
  Tensor delta, log_sum, inverse, reach;  // f32 [batch, heads, length]
};

// bf16 on tensor cores, any spec and dimension. Where hopper_supports(call), kernels for Hopper compute it, but for a
// forward pass with a `past` (as above).
bool parallel_supports(const MixerCall& call);
bool hopper_supports(const MixerCall& call);
bool hopper_supports_wide_rows(const MixerCall& call);  // the same, if rows_are_wide() held for q, k and v
void parallel_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past);
// in_kernels: whether the kernels multiply by `inverse`, as those for Hopper do. reach: ChunkTables::in, or undefined.
ScaledGradient scale_gradient(const MixerCall& call, const Tensor& out_gradient, bool in_kernels,
                              const Tensor& reach = {});
void parallel_backward(const MixerCall& call, const TokenTables& tables, const ScaledGradient& scaled,
                       const HeadGradients& gradients);

// The part of the chunked form inside chunks of `chunk` tokens, a multiple of 256; on Hopper only. What earlier chunks
// give each query comes as `past`, bf16 like out, and its share `past_n` of the normalizer, f32 [batch, heads, length]:
// under the sum norm `past` is y divided by that share. Backward, the gradients hold the part of other chunks already.
bool on_hopper(Device device);
void inside_chunks_forward(const MixerCall& call, const TokenTables& tables, int64_t chunk, const Tensor& past,
                           const Tensor& past_n);
void inside_chunks_backward(const MixerCall& call, const TokenTables& tables, int64_t chunk,
                            const ScaledGradient& scaled, const HeadGradients& gradients);

// What decay and boundaries do to states. Without both the factors are all 1, and undefined.
struct ChunkTables {
  Tensor in;           // f32 [batch, heads, length]: what of the state before a token's chunk reaches the token
  Tensor out;          // f32 [batch, heads, length]: what of a token reaches the end of its chunk
  Tensor through;      // f32 [batch, heads, chunks]: what of the state before a chunk reaches its end
  TokenTables within;  // every chunk begins a document
  int64_t chunk = 0, chunks = 0;
};
ChunkTables chunk_tables(const MixerCall& call, const TokenTables& tokens);

// The chunked form but for what happens inside the chunks; any dtype, dimension and score with a state. Features lie in
// memory; chunked_backward() uses the kernels of chunk_states.h where they support the call.
// Forward: `past` (undefined where nothing comes in), and the final state if it is requested.
Tensor chunked_past(const MixerCall& call, const ChunkTables& tables);
// Backward: adds to the gradients, and writes that of an initial state.
void chunked_backward(const MixerCall& call, const ChunkTables& tables, const Tensor& out_gradient,
                      const Tensor& final_state_gradient, const HeadGradients& gradients,
                      const Tensor& initial_state_gradient);

}  // namespace furious::cuda
