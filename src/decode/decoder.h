// Sequences that a model reads and continues, each in a slot of its own: its state, its window, its position, its
// sampling parameters. Slots start, fork, stop and move to memory or a file independently of each other; a step
// advances any set of them by one token at once, whatever their lengths.
//
//   Decoder decoder(model, 8);
//   const int32_t slot = decoder.start();
//   decoder.read(slot, prompt);                             prefill, in chunks; also of several slots at once
//   decoder.set_sampling(slot, sampling);
//   const ChosenTokens chosen = decoder.step({&slot, 1});   chooses a token from the last logits and reads it
//   chosen.wait()[0];                                       the host receives it while the device reads
//
// Choosing, reading and counting happen on the model's device; nothing waits for the host. What a sequence computes
// depends on its own tokens alone, but for rounding: on a GPU the number of slots in a step decides about kernels.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decode/token_plan.h"
#include "furious/model.h"
#include "model/language_model.h"
#include "ops/mixer/recurrent.h"
#include "ops/sampling/sampling.h"
#include "ops/slots.h"
#include "tensor/host_copy.h"

namespace furious {

class TokenProgram;

// Everything that a slot holds, on the CPU in f32: to keep, and to go on from later, to the bit.
struct SlotContents {
  int64_t tokens = 0;                     // read
  int64_t pending = 0;                    // of them not yet in the state (MixerContents)
  std::map<std::string, Tensor> tensors;  // by layer: k, v, log_decay, state, conv
  Tensor logits;                          // [vocabulary] after the last token; undefined before the first
  Sampler::Contents sampling;
};

// The tokens that a step has chosen, on their way to the host.
class ChosenTokens {
 public:
  explicit ChosenTokens(const Choice& choice);
  // In the order of the step's slots; a logit that is not finite is an error.
  std::vector<int32_t> wait() const;
  bool finite(size_t row) const;  // whether the logits of a row were; where not, its token means nothing
  // The token of a row, with the log-probabilities that its slot asked for.
  WrittenToken token(size_t row) const;
  // Of the chosen tokens and of the most probable ones, as Choice has them, on the CPU; undefined if no slot asked.
  Tensor best() const;
  Tensor log_probabilities() const;

 private:
  HostCopy ids_;
  std::optional<HostCopy> best_, log_probabilities_;
};

// How probable given tokens are, one after the other.
struct TokenScores {
  std::vector<double> log_probabilities;
  bool greedy = true;  // each is the most probable one in its place; where that was asked for

  double sum() const;
};

class Decoder {
 public:
  // `vocabulary`: ids from there on are never chosen; 0: all of the model's may be. The model must outlive the decoder
  // and stay where it is; its weights may change.
  Decoder(const LanguageModel& model, int64_t slots, int64_t vocabulary = 0);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t free_slots() const;
  bool holds(int64_t slot) const { return slot >= 0 && slot < slots() && slots_[slot].used; }  // a sequence
  int32_t start();             // an empty sequence in a free slot; an Error where there is none
  int32_t fork(int32_t slot);  // another one that goes on like this one
  void stop(int32_t slot);     // frees the slot and its memory

  struct Prompt {
    int32_t slot = 0;
    std::span<const int32_t> tokens;
  };
  // Prefill of different slots, in passes over the weights that read chunks of several of them, packed into one row.
  // Where a prompt is cut into chunks depends on its own tokens alone. New sequences run as the documents of a packed
  // row of training; in a pass with others, convolution, rotary positions and mixer run slot by slot. A pass that
  // throws leaves the slots that it was reading in an undefined state: stop them. `progress` is called after every
  // pass; where it returns false or throws, the slots have read a prefix of their prompts. Returns whether all was
  // read.
  bool read(std::span<const Prompt> prompts, const ReadProgress& progress = {});
  void read(int32_t slot, std::span<const int32_t> tokens);
  // One pass of read(), over at most kPassTokens tokens of one slot, layer by layer: other slots may step, read and
  // fork in between. Its own slot may only be stopped, and the pass be dropped with it.
  class Pass;
  static constexpr size_t kPassTokens = 4096;  // the activations of a long text must not grow with it
  std::shared_ptr<Pass> begin_pass(const Prompt& prompt);
  bool advance(Pass& pass);  // the next layer; whether that was all
  // log P of the tokens of each prompt (at least one), each after those before it and what its slot has read (at least
  // one token). The slots then have read all of their prompt but its last token. `greedy` asks for TokenScores::greedy.
  std::vector<TokenScores> score(std::span<const Prompt> prompts, bool greedy = false);
  void set_sampling(int32_t slot, const Sampling& sampling);
  ChosenTokens step(std::span<const int32_t> slots);
  // Reads given tokens, i32 [rows, 1] on any device, instead of choosing them. Penalties and random numbers count only
  // those that come from the CPU.
  void read_token(std::span<const int32_t> slots, const Tensor& tokens);
  Tensor logits(int32_t slot) const;  // f32 [vocabulary] after the last token, on the model's device

  SlotContents contents(int32_t slot) const;
  void restore(int32_t slot, const SlotContents& contents);  // contents that do not fit the model are refused

  int64_t tokens(int32_t slot) const;  // read so far
  int64_t bytes(int32_t slot) const;   // that it holds now
  int64_t bytes() const;               // of all slots
  const LanguageModel& model() const { return *model_; }

  // How the last token of a step was computed: "persistent kernel" (decode/token_program.h), "graph" of kernels, or
  // "operations" one after the other. Empty before the first.
  std::string_view ran_as() const { return ran_as_; }

 private:
  struct Layer {
    MixerCache mixer;
    Tensor conv;  // f32 [slots, window − 1, channels]; only with a convolution
  };
  struct Slot {
    bool used = false;
    Tensor logits;     // [1, vocabulary] after the last token
    int64_t row = -1;  // of the last step's logits, if they are these; −1: they lie in memory of their own
  };
  // What the last step wrote: on a GPU the next one may write there again.
  struct LastStep {
    std::vector<int32_t> slots;
    Tensor logits;
  };
  // A step for so many rows, recorded on a GPU, and all that the record depends on.
  struct Recording;
  class StepOps;
  class PrefillOps;

  // Called after a pass with what it read, and the output of the last norm for these tokens, [1, tokens, hidden];
  // undefined where it read one token of each slot.
  using AfterPass = std::function<void(std::span<const Prompt> chunks, const Tensor& hidden)>;
  bool read_passes(std::span<const Prompt> prompts, const ReadProgress& progress, const AfterPass& after);
  bool run_layer(Pass& pass);
  Tensor read_chunks(std::span<const Prompt> chunks);
  void check_prompts(std::span<const Prompt> prompts) const;
  Slot& used(int32_t slot);
  const Slot& used(int32_t slot) const { return const_cast<Decoder*>(this)->used(slot); }
  const SlotRows& rows_of(std::span<const int32_t> slots);
  Tensor logits_of(std::span<const int32_t> slots) const;
  void forward(std::span<const int32_t> slots, const Tensor& ids);
  Tensor recorded_pass(const SlotRows& rows, const Tensor& ids);
  Tensor token_pass(const SlotRows& rows, const Tensor& tokens);
  Tensor run_layer(size_t layer, const SlotRows& rows, const Tensor& x);
  std::shared_ptr<TokenProgram> new_program(const SlotRows& rows) const;
  bool runs_as_program(int64_t rows) const;

  const LanguageModel* model_;
  TokenPlan plan_;
  std::vector<Layer> layers_;
  std::vector<Slot> slots_;
  LastStep last_;
  Sampler sampler_;
  std::map<int64_t, SlotRows> rows_;  // by their number: a recording finds them where they were
  std::map<int64_t, std::unique_ptr<Recording>> recordings_;
  bool program_fits_ = true;  // the blocks of the persistent kernel have had places on the device
  std::string_view ran_as_;
};

}  // namespace furious
