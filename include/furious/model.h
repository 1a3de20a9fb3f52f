// Language models in a program of your own: load one, let it read text and write on, keep its state.
//
//   const furious::Model model = furious::Model::load("runs/stories");
//   furious::Session session(model);
//   session.read("Once upon a time");
//   session.write({}, [](std::string_view piece, int) { std::cout << piece << std::flush; return true; });
//   session.save("story.state");
//
//   Model          weights and tokenizer; logits and scores of whole texts
//   Session        one or several sequences that read and write together
//   SequenceBatch  sequences that join and leave while others go on (continuous batching)
//   SequenceState  what a sequence remembers, as plain arrays
//
// Exceptions: whatever goes wrong is thrown as furious::Error, with words for the user. What a callback throws comes
// out as it is. An argument that is refused changes nothing; after another Error of reading, writing or a step (the
// memory is exhausted, a GPU fails) a Session or SequenceBatch may only be loaded anew or destroyed. An object that was
// moved from answers every call with an Error; it may be assigned to and destroyed.
//
// Ownership: a Session or SequenceBatch shares the weights of its Model and keeps them alive. Arguments are read during
// the call and not kept; results belong to the caller.
//
// Threads: different objects may be used in different threads at once, a Model also by several; a Session or
// SequenceBatch by one at a time. A callback must not call the object that calls it. The work decides how many of a
// session's threads help. They sleep when there is none, belong to the library and have all signals blocked. Signals:
// any handler may be installed and any signal may come at any time. A thread that calls the library handles those that
// come during a matrix product after it, some milliseconds later at most; all others at once. After fork() the child
// may go on using what the parent had loaded on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "furious/array.h"
#include "furious/error.h"
#include "furious/export.h"

namespace furious {

struct LoadOptions {
  std::string arch;  // for weights without a config.json: a preset, or an attention_type of the authors
  // "byte", a SentencePiece model, a tokenizer.json or a folder with one of them; empty: the one of the checkpoint.
  std::string tokenizer;
  std::string device = "auto";  // where it runs: "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one
  std::string dtype;            // "f32" or "bf16", in which products are computed; empty: bf16 on a GPU, f32 on the CPU
  int64_t heads = 0;            // for weights without a config.json whose tensors do not tell it; 0: not known
  int threads = 0;              // of the CPU, for each session that runs on it; 0: all cores that the program may use
  // Texts begin with bos; otherwise only where the model was trained so, or where the tokenizer.json of a published
  // model puts bos there.
  bool bos = false;
  // Called again and again while weights are read: bytes of them in memory by now, and of all. What it throws ends the
  // loading.
  std::function<void(int64_t done, int64_t all)> progress = {};
};

// A token and the logarithm of the probability that the model gave it: before bias, penalties and temperature.
struct TokenLogProbability {
  int32_t id = 0;
  double log_probability = 0;
};

// A loaded checkpoint and its tokenizer. Copies share the weights; any number of sessions may use them at once, each in
// a thread of its own: they compute what they would one after another.
class FURIOUS_API Model {
 public:
  // A checkpoint directory, a training run (its newest checkpoint), or a .safetensors file.
  static Model load(const std::filesystem::path& path, const LoadOptions& options = {});

  std::string arch() const;
  int64_t parameters() const;  // how many numbers
  int64_t vocabulary() const;  // token ids are 0 to vocabulary() − 1
  std::string config() const;  // config.json of its checkpoint
  // Equal for models of equal configuration, weights and tokenizer. The first call reads all weights.
  std::string fingerprint() const;

  std::vector<int32_t> encode(std::string_view text) const;
  std::string decode(const std::vector<int32_t>& ids) const;
  // The ids that a session reads for the first text of a sequence: the mark before a document (bos or eos), if the
  // model has one, and those of encode().
  std::vector<int32_t> prompt(std::string_view text) const;
  int32_t bos() const;  // −1: the tokenizer has none
  int32_t eos() const;

  // Logits of a full pass over the ids, and only these: f32 [length, vocabulary], row i after ids[0] to ids[i]. The
  // second writes them to memory of the caller, ids.size() · vocabulary() numbers.
  std::vector<float> logits(const std::vector<int32_t>& ids) const;
  void logits(std::span<const int32_t> ids, float* out) const;
  // log P(ids[i + 1] | ids[0] to ids[i]), one fewer than ids: the log-softmax of the logits, without storing them.
  std::vector<double> scores(const std::vector<int32_t>& ids) const;
  // The tokens of a text after the mark before a document, each with its score. Without a mark the first has none and
  // is left out.
  std::vector<TokenLogProbability> text_scores(std::string_view text) const;

  struct Parts;  // of the library
  explicit Model(std::shared_ptr<const Parts> parts);
  const Parts& parts() const;  // an Error where the model was moved from

 private:
  std::shared_ptr<const Parts> parts_;
};

// Added to the logit of a token. Minus infinity: the token is never chosen.
struct LogitBias {
  int32_t id = 0;
  double value = 0;
};

// How the next token is chosen. A choice is a function of these, of what came before, and of its place in the text.
// The penalties look at the last 256 tokens of the sequence, its prompt included.
struct Sampling {
  double temperature = 0.8;                // 0: always the most probable token
  int64_t top_k = 0;                       // only the k most probable tokens; 0: all
  double top_p = 0.95;                     // only the most probable tokens that together have this probability; 1: all
  double repetition_penalty = 1;           // above 1: tokens that occurred become less probable
  uint64_t seed = 123;                     // sequence i draws from seed + i
  double min_p = 0;                        // only tokens with at least this times the largest probability; 0: all
  double frequency_penalty = 0;            // subtracted from a token's logit for each time it occurred
  double presence_penalty = 0;             // subtracted once if it occurred
  std::vector<LogitBias> logit_bias = {};  // at most 300, of different tokens
  int64_t log_probabilities = -1;  // 0: of the chosen token; k: also of the k most probable, at most 20; -1: none
};

struct WriteOptions {
  int64_t tokens = 256;  // at most
  Sampling sampling;
  std::vector<std::string> stop;  // the text ends before any of these
};

enum class Ending { tokens, eos, stop, interrupted };

// A token that was written, and the most probable ones in its place, in order.
struct WrittenToken : TokenLogProbability {
  std::vector<TokenLogProbability> most_probable = {};
};

struct Text {
  std::string text;
  int64_t tokens = 0;
  Ending ending = Ending::tokens;
  // Of every token, eos included, where Sampling::log_probabilities is 0 or more; otherwise empty.
  std::vector<WrittenToken> log_probabilities = {};
  std::vector<int32_t> ids = {};  // of every token, eos included
};

// What a sequence remembers: everything that it needs to go on, to the bit. docs/formats.md describes the arrays.
struct SequenceState {
  std::string model;                 // Model::fingerprint(); empty: not compared with the model that goes on
  int64_t tokens = 0;                // read and written
  int64_t pending = 0;               // of them not in the arrays "state" yet, but in the windows "k", "v", "log_decay"
  std::vector<int32_t> recent = {};  // the last tokens, at most 256
  std::vector<NamedArray> arrays = {};  // layers.N.state, .k, .v, .log_decay, .conv as far as they exist; logits
};

// Called during prefill after each pass over the weights (up to 4,096 tokens), with the number of tokens read so far
// and of all that are to be read. false stops: the call returns false, and every sequence has read a prefix of its
// tokens, as if it had been given no more (tokens() tells how many). So does an exception.
using ReadProgress = std::function<bool(int64_t read, int64_t all)>;

// One or several texts that a model reads and writes, and what it remembers of them.
class FURIOUS_API Session {
 public:
  explicit Session(const Model& model, int sequences = 1);
  ~Session();
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;

  // Goes on reading, in every sequence. The first text is the start of a document. Returns whether all was read.
  bool read(std::string_view text, const ReadProgress& progress = {});
  // The same with a text for each sequence. Their prompts are read together, which takes fewer passes over the weights
  // than one after the other.
  bool read_each(const std::vector<std::string>& texts, const ReadProgress& progress = {});
  // The same with token ids: these and no others, so that the mark before a document is the caller's (Model::prompt).
  bool read_ids(const std::vector<int32_t>& ids, const ReadProgress& progress = {});
  bool read_ids_each(const std::vector<std::vector<int32_t>>& ids, const ReadProgress& progress = {});

  // For sampling of your own: the logits f32 [vocabulary] after the last token of a sequence, and a step that reads the
  // token chosen for each sequence. An Error where nothing has been read.
  std::vector<float> logits(int sequence = 0) const;
  void step(const std::vector<int32_t>& ids);

  // Goes on writing, in every sequence, until each has come to its end. What it writes is also read: to write again
  // goes on after it. A sequence that has ended stays where it is while others go on.
  // `show` gets every text piece by piece, always whole characters; false ends the writing.
  using Show = std::function<bool(std::string_view piece, int sequence)>;
  std::vector<Text> write(const WriteOptions& options, const Show& show = {});

  // All that it remembers, in a file. A session that loads it goes on exactly where this one was, to the bit; several
  // sequences may also start from the state of one, which is also what a session of several saves as long as it has
  // only read: its sequences are still the same text. After an error in load() the session is as it was before. The
  // state of another model (other sizes, weights or tokenizer) is an Error.
  void save(const std::filesystem::path& file) const;
  void load(const std::filesystem::path& file);
  // The bytes of such a file, in memory.
  std::vector<std::byte> save_bytes() const;
  void load_bytes(std::span<const std::byte> bytes);
  // The same as arrays, one entry for each saved sequence. Unlike save(), before anything is read, too.
  std::vector<SequenceState> states() const;
  void set_states(const std::vector<SequenceState>& states);
  // Another session that goes on like this one.
  Session fork() const;

  int sequences() const;
  int64_t tokens() const;              // read and written so far, in the longest sequence
  int64_t tokens(int sequence) const;  // in this one
  int64_t bytes() const;               // that remembering them takes now

 private:
  struct Memory;
  explicit Session(std::unique_ptr<Memory> memory);
  Memory& own() const;  // an Error where the session was moved from
  std::unique_ptr<Memory> memory_;
};

// Sequences with prompts, lengths and sampling of their own, in slots that they leave again: a step advances any set of
// them by one token at once.
//
//   furious::SequenceBatch batch(model, 8);
//   const int a = batch.add(), b = batch.add();
//   batch.read({{a, model.prompt("One")}, {b, model.prompt("Another")}});
//   for (const furious::WrittenToken& token : batch.step({a, b})) …
//   batch.remove(a);                                       b goes on, and another may be added
//
// What a sequence computes depends on its own tokens alone, but for rounding: on a GPU the number of sequences in a
// step decides about kernels.
class FURIOUS_API SequenceBatch {
 public:
  SequenceBatch(const Model& model, int capacity);  // at most so many sequences at a time
  ~SequenceBatch();
  SequenceBatch(SequenceBatch&&) noexcept;
  SequenceBatch& operator=(SequenceBatch&&) noexcept;

  // A sequence is known by the number that these return, until it is removed; numbers are used again. An Error where
  // the batch is full.
  int add();                            // empty
  int add(const SequenceState& state);  // goes on from a state
  int fork(int sequence);               // goes on like this one, with sampling of its own
  void remove(int sequence);
  std::vector<int> sequences() const;  // in use, in ascending order
  int capacity() const;

  struct Prompt {
    int sequence = 0;
    std::vector<int32_t> ids;  // these and no others (Model::prompt)
  };
  // Prefill of different sequences together. Returns whether all was read.
  bool read(const std::vector<Prompt>& prompts, const ReadProgress& progress = {});
  void set_sampling(int sequence, const Sampling& sampling);  // of a new sequence: Sampling()
  // Chooses a token in each of these sequences and reads it. In their order; log-probabilities are 0 where
  // Sampling::log_probabilities asks for none. A sequence that comes to eos goes on unless it is removed.
  std::vector<WrittenToken> step(const std::vector<int>& sequences);
  // Reads given tokens instead, one for each sequence.
  void step(const std::vector<int>& sequences, const std::vector<int32_t>& ids);
  std::vector<float> logits(int sequence) const;  // f32 [vocabulary] after its last token

  SequenceState state(int sequence) const;
  int64_t tokens(int sequence) const;  // read and written so far
  int64_t bytes() const;               // that remembering all takes now

 private:
  struct Memory;
  Memory& own() const;  // an Error where the batch was moved from
  std::unique_ptr<Memory> memory_;
};

}  // namespace furious
