// The recurrent form: one token at a time, constant memory.
//
//   y_t = exp(A_t − A_fold) φ(q_t)ᵀ state + Σ_{j in window} w_tj v_j
//
// The last tokens are kept as plain k, v and log-decay (the window) and folded into the state only now and then, so
// that a token reads the state once and does not write it. There is no state before the first fold: the cache then *is*
// a KV cache, and it folds first when it has grown larger than state and window together. So at no length does it take
// more memory than a KV cache, nor more than the state and a window. A mixer without state (state_rows() is 0) never
// folds: its cache is a KV cache for good.
#pragma once

#include <array>
#include <vector>

#include "ops/mixer/mixer.h"
#include "ops/mixer/shape.h"

namespace furious {

// Some tokens of the window, head by head, so that a head's tokens lie together.
struct CachePage {
  static constexpr int64_t kTokens = 32;
  Tensor k;          // [batch, k_heads, kTokens, qk_dim]
  Tensor v;          // [batch, v_heads, kTokens, v_dim]
  Tensor log_decay;  // [batch, heads, kTokens]; with decay only
  Tensor total;      // on a GPU, with decay: f64 sums of log_decay from the first pending token up to each
};

// The tokens that are kept as they came.
struct CacheWindow {
  std::vector<CachePage> pages;
  int64_t pending = 0;  // tokens in the pages
  int64_t tokens = 0;   // seen so far
  // What the kernels of a GPU know of them: the addresses of the pages, and counters of which the first two are
  // `pending` and `tokens`, so that a step is the same work from token to token.
  Tensor table, counters;
  int64_t listed = 0;  // pages in the table
};

// Everything that a MixerCache holds, to keep elsewhere and go on from later. A cache with a state has room for a whole
// window here, used or not: it takes the same space at any length.
struct MixerContents {
  int64_t tokens = 0;   // seen
  int64_t pending = 0;  // of them in the pages; what lies beyond them there is zero
  Tensor k;             // [batch, pages, k_heads, CachePage::kTokens, qk_dim]
  Tensor v;             // [batch, pages, v_heads, CachePage::kTokens, v_dim]
  Tensor log_decay;     // [batch, pages, heads, CachePage::kTokens]; with decay only
  Tensor state;         // of the tokens before these: [batch, heads, D, columns]; not there before the first fold
};

class MixerCache {
 public:
  struct Sizes {
    int64_t batch = 1, q_heads = 1, k_heads = 1, v_heads = 1, qk_dim = 0, v_dim = 0;
  };

  MixerCache(const MixerSpec& spec, const Sizes& sizes, Device device = {});
  // Goes on from contents(), to the bit; contents that cannot be of such a cache are refused. They are f32 on any
  // device: what one device has written another can read.
  MixerCache(const MixerSpec& spec, const Sizes& sizes, const MixerContents& contents, Device device = {});
  MixerContents contents(Device where = {}) const;

  // The next token of every sequence: q, k, v [batch, their heads, dim] f32 (on a GPU also bf16: the cache keeps k and
  // v so, the state in f32) with unit inner stride, log_decay [batch, heads] f32 exactly when the spec has decay.
  // Returns the mixer's output [batch, heads, v_dim]. On a GPU nobody looks at the values of log_decay.
  Tensor step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay = {});

  // For a step on a GPU that is recorded once and run many times (tensor/graph.h). prepare() makes room for the next
  // token and folds where that is due; a step that follows it launches one kernel and nothing else, which may begin
  // before the kernel ahead of it has ended, so one that is not launched early must lie between the two. As long as
  // recording() then stays what it was, the recorded step may be run instead, and advance() counts its token.
  void prepare(DType dtype);
  std::array<const void*, 4> recording() const;
  void advance();
  // On a GPU, after prepare(): the tokens seen so far, i32 [1], where its kernels find them.
  Tensor position() const { return recent_.counters ? recent_.counters.slice(0, 1, 1) : Tensor(); }

  // Many tokens at once, as mixer_forward takes them (of such dtypes, no boundaries, no initial state); returns its
  // output.
  Tensor prefill(const MixerInputs& inputs, const MixerOptions& options = {});

  int64_t tokens() const { return recent_.tokens; }  // seen so far
  int64_t bytes() const;                             // held now
  int64_t first_fold() const { return first_fold_; }
  bool has_folded() const { return state_.defined(); }
  int64_t window() const { return window_; }

  // All tokens so far as one state, as mixer_forward takes it: [batch, heads, D, columns]. The cache stays as it is.
  Tensor state() const;

 private:
  bool has_state() const { return shape_.state_rows > 0; }
  void make_room(DType dtype);
  void reserve(int64_t tokens);
  void keep_as(DType dtype);
  void fold();
  void drop_window();
  Tensor new_state() const;
  CachePage new_page(DType dtype) const;
  // The pages of contents(): a whole window after the first fold, before it those that hold tokens.
  int64_t pages_kept(bool folded, int64_t pending) const;

  MixerSpec spec_;
  Device device_;
  MixerShape shape_;          // of one token
  int64_t window_ = 0;        // tokens between folds
  int64_t first_fold_ = 0;    // tokens before the first; 0: never
  DType dtype_ = DType::f32;  // of k and v in the pages
  bool prepared_ = false;     // for the next token
  CacheWindow recent_;
  Tensor state_;  // [batch, heads, numbers of a packed head state]; not there before the first fold
};

}  // namespace furious
