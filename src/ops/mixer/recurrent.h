// The recurrent form: one token at a time, constant memory.
//
//   y_t = exp(A_t − A_fold) φ(q_t)ᵀ state + Σ_{j in window} w_tj v_j
//
// The last tokens are kept as plain k, v and log-decay (the window) and folded into the state only now and then, so
// that a token reads the state once and does not write it. There is no state before the first fold: the cache then *is*
// a KV cache, and it folds first when it has grown larger than state and window together. So at no length does it take
// more memory than a KV cache, nor more than the state and a window. A mixer without state (state_rows() is 0) never
// folds: its cache is a KV cache for good.
//
// Heads of the output that share k, v and decay share a state: there are shape().state_heads of them.
//
// With a sliding window the cache is a KV cache that drops pages as the window leaves them.
//
// A cache holds slots: sequences with lengths, pages, states and fold times of their own. When a slot folds depends on
// its own tokens alone, and it takes memory only as it needs it.
#pragma once

#include <span>
#include <vector>

#include "ops/mixer/mixer.h"
#include "ops/mixer/shape.h"
#include "ops/slots.h"

namespace furious {

// Some tokens of a slot's window, head by head, so that a head's tokens lie together. All are views of one memory.
struct CachePage {
  static constexpr int64_t kTokens = 32;
  Tensor memory;     // i32, for copies to the bit
  Tensor k;          // [k_heads, kTokens, qk_dim]
  Tensor v;          // [v_heads, kTokens, v_dim]
  Tensor log_decay;  // [decay_heads, kTokens]; with decay only
};

// One sequence.
struct CacheSlot {
  std::vector<CachePage> pages;  // of the tokens that are kept as they came
  int64_t pending = 0;           // tokens in the pages
  int64_t tokens = 0;            // seen so far
  Tensor state;                  // [state_heads, numbers of a packed state]; undefined before the first fold
  bool prepared = false;         // for the next token
  // On a GPU: the addresses of the pages, and how many of them the table has by now.
  Tensor table;
  int64_t listed = 0;
};

// What the kernels of a GPU know of all slots, so that a step is the same work from token to token.
struct CacheRecords {
  static constexpr int64_t kTokensWord = 5;  // of a record: where it counts the tokens
  Tensor slots;                              // i32 [slots, words of a record]
  Tensor done;  // i32 counters of a step that runs: heads of a row, and blocks of a head, that are done
};

// Everything that a slot of a MixerCache holds, to keep elsewhere and go on from later. A slot with a state has room
// for a whole window here, used or not: it takes the same space at any length.
struct MixerContents {
  int64_t tokens = 0;   // seen
  int64_t pending = 0;  // of them in the pages; what lies beyond them there is zero
  Tensor k;             // [1, pages, k_heads, CachePage::kTokens, qk_dim]
  Tensor v;             // [1, pages, v_heads, CachePage::kTokens, v_dim]
  Tensor log_decay;     // [1, pages, decay_heads, CachePage::kTokens]; with decay only
  Tensor state;         // of the tokens before these: [1, state_heads, D, columns]; undefined before the first fold
};

class MixerCache {
 public:
  struct Sizes {
    int64_t slots = 1, q_heads = 1, k_heads = 1, v_heads = 1, qk_dim = 0, v_dim = 0;
    int64_t decay_heads = 0;  // of log_decay; 0: a decay for each head of the output
  };

  MixerCache(const MixerSpec& spec, const Sizes& sizes, Device device = {});

  // The next token of each row's slot: q, k, v [rows, their heads, dim] f32 (on a GPU also bf16: the cache keeps k and
  // v so, the states in f32) with unit inner stride, log_decay [rows, decay_heads] f32 exactly when the spec has decay.
  // Returns the mixer's output [rows, heads, v_dim]. On a GPU nobody looks at the values of log_decay.
  Tensor step(const SlotRows& rows, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay = {});

  // For a step on a GPU that is recorded once and run many times (tensor/graph.h). prepare() makes room for the next
  // token of these slots and folds where that is due; a step of them that follows launches one kernel and nothing else,
  // which may begin before the kernel ahead of it has ended, so one that is not launched early must lie between the
  // two. As long as recording() then stays what it was, the recorded step may be run instead, also for other slots in
  // the same table, and advance() counts its tokens.
  void prepare(const SlotRows& rows, DType dtype);
  std::vector<int64_t> recording(const SlotRows& rows) const;
  void advance(const SlotRows& rows);
  // The tokens seen so far, i32 [slots], on a GPU where its kernels find and count them.
  Tensor positions() const;

  // Many tokens of one slot, as mixer_forward takes them (batch 1, of such dtypes, no boundaries, no initial state);
  // returns its output.
  Tensor prefill(int64_t slot, const MixerInputs& inputs, const MixerOptions& options = {});
  // The same for several different slots, whose tokens follow each other in one row. Slots that are empty and do not
  // fold yet are documents of one call of mixer_forward; otherwise there is a call for each slot.
  struct SlotTokens {
    int64_t slot = 0, count = 0;
  };
  Tensor prefill(std::span<const SlotTokens> slots, const MixerInputs& inputs, const MixerOptions& options = {});

  // Makes the slot empty and frees its memory.
  void clear(int64_t slot);
  // `to` goes on like `from`, to the bit, in memory of its own.
  void copy(int64_t from, int64_t to);
  // Goes on from contents(), to the bit; contents that cannot be of such a cache are refused. They are f32 on any
  // device: what one device has written another can read.
  MixerContents contents(int64_t slot, Device where = {}) const;
  void restore(int64_t slot, const MixerContents& contents);

  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t tokens(int64_t slot) const { return at(slot).tokens; }  // seen so far
  int64_t bytes(int64_t slot) const;                              // held now
  int64_t bytes() const;                                          // of all slots
  int64_t first_fold() const { return first_fold_; }
  bool has_folded(int64_t slot) const { return at(slot).state.defined(); }
  int64_t window() const { return window_; }

  // All tokens of a slot so far as one state, as mixer_forward takes it: [1, heads, D, columns], whatever heads share
  // one. The slot stays as it is.
  Tensor state(int64_t slot) const;

  // For a kernel that steps the caches of all layers at once (decode/token_program.h).
  const MixerSpec& spec() const { return spec_; }
  const MixerShape& shape() const { return shape_; }
  const CacheRecords& records() const { return records_; }

 private:
  bool has_state() const { return shape_.state_rows > 0; }
  const CacheSlot& at(int64_t slot) const;
  CacheSlot& at(int64_t slot);
  void make_room(const SlotRows& rows, DType dtype);
  bool reserve(CacheSlot& slot, int64_t tokens);
  void keep_as(DType dtype);
  void drop_window(CacheSlot& slot);
  bool drop_passed(CacheSlot& slot);
  void changed(int64_t slot);
  void append(int64_t slot, const MixerInputs& inputs);
  MixerInputs all_pending(const CacheSlot& slot, const Tensor& q) const;
  Tensor new_state() const;
  Tensor shared_states(const Tensor& all) const;
  CachePage new_page() const;
  // The pages of contents(): a whole window after the first fold, before it those that hold tokens.
  int64_t pages_kept(bool folded, int64_t pending) const;

  MixerSpec spec_;
  Device device_;
  MixerShape shape_;          // of one token of one sequence
  int64_t window_ = 0;        // tokens between folds
  int64_t first_fold_ = 0;    // tokens before the first; 0: never
  DType dtype_ = DType::f32;  // of k and v in the pages
  std::vector<CacheSlot> slots_;
  CacheRecords records_;
};

}  // namespace furious
