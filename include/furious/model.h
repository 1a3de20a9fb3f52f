// Language models in a program of your own: load one, let it read text and write on, keep its state.
//
//   const furious::Model model = furious::Model::load("runs/stories");
//   furious::Session session(model);
//   session.read("Once upon a time");
//   session.write({}, [](std::string_view piece, int) { std::cout << piece << std::flush; return true; });
//   session.save("story.state");
//
// Whatever goes wrong is thrown as furious::Error, with words for the user. What a callback throws comes out as it is.
//
// Threads: the work decides how many of a session's threads help. They sleep when there is none, belong to the library
// and have all signals blocked. Signals: any handler may be installed and any signal may come at any time. A thread
// that calls the library handles those that come during a matrix product after it, some milliseconds later at most; all
// others at once. After fork() the child may go on using what the parent had loaded on the CPU.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "furious/error.h"
#include "furious/export.h"

namespace furious {

struct LoadOptions {
  std::string arch;             // for weights without a config.json: a preset, or an attention_type of the authors
  std::string tokenizer;        // "byte", a SentencePiece model or a folder with one; empty: the one of the checkpoint
  std::string device = "auto";  // where it runs: "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one
  std::string dtype;            // "f32" or "bf16", in which products are computed; empty: bf16 on a GPU, f32 on the CPU
  int64_t heads = 0;            // for weights without a config.json whose tensors do not tell it; 0: not known
  int threads = 0;              // of the CPU, for each session that runs on it; 0: all cores that the program may use
  bool bos = false;  // texts begin with bos; otherwise only where the model was trained so, as far as is known
};

// A loaded checkpoint and its tokenizer. Copies share the weights; any number of sessions may use them at once, each in
// a thread of its own: they compute what they would one after another.
class FURIOUS_API Model {
 public:
  // A checkpoint directory, a training run (its newest checkpoint), or a .safetensors file.
  static Model load(const std::filesystem::path& path, const LoadOptions& options = {});

  std::string arch() const;
  int64_t parameters() const;  // how many numbers
  int64_t vocabulary() const;

  std::vector<int32_t> encode(std::string_view text) const;
  std::string decode(const std::vector<int32_t>& ids) const;

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

// A token and the logarithm of the probability that the model gave it: before bias, penalties and temperature.
struct TokenLogProbability {
  int32_t id = 0;
  double log_probability = 0;
};
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
};

// One or several texts that a model reads and writes, and what it remembers of them.
class FURIOUS_API Session {
 public:
  explicit Session(const Model& model, int sequences = 1);
  ~Session();
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;

  // Goes on reading, in every sequence. The first text is the start of a document.
  void read(std::string_view text);
  // The same with a text for each sequence. Their prompts are read together, which takes fewer passes over the weights
  // than one after the other.
  void read_each(const std::vector<std::string>& texts);

  // Goes on writing, in every sequence, until each has come to its end. What it writes is also read: to write again
  // goes on after it. A sequence that has ended stays where it is while others go on.
  // `show` gets every text piece by piece, always whole characters; false ends the writing.
  using Show = std::function<bool(std::string_view piece, int sequence)>;
  std::vector<Text> write(const WriteOptions& options, const Show& show = {});

  // All that it remembers, in a file. A session that loads it goes on exactly where this one was, to the bit; several
  // sequences may also start from the state of one, which is also what a session of several saves as long as it has
  // only read: its sequences are still the same text. After an error in load() the session is as it was before.
  void save(const std::filesystem::path& file) const;
  void load(const std::filesystem::path& file);

  int64_t tokens() const;  // read and written so far, in the longest sequence
  int64_t bytes() const;   // that remembering them takes now

 private:
  struct Memory;
  Memory& own() const;  // an Error where the session was moved from
  std::unique_ptr<Memory> memory_;
};

}  // namespace furious
