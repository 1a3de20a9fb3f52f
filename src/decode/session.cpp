// furious::Session: reading by the chunked form, writing one token at a time.
#include <algorithm>
#include <iterator>
#include <span>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/model_parts.h"
#include "decode/state_file.h"
#include "decode/text_stream.h"
#include "ops/elementwise.h"
#include "ops/sampling/argmax.h"
#include "ops/sampling/sampling.h"
#include "tensor/host_copy.h"

namespace furious {
namespace {

// Tokens read at once: the activations of a long text must not grow with it.
constexpr int64_t kPiece = 4096;

// Every row of `x` `times` times.
Tensor repeated(const Tensor& x, int64_t times) {
  std::vector<int64_t> sizes(x.shape().begin(), x.shape().end());
  sizes[0] *= times;
  const Tensor out = Tensor::empty(Shape(sizes), x.dtype(), x.device());
  for (int64_t i = 0; i < times; ++i) copy(out.slice(0, i * x.size(0), x.size(0)), x);
  return out;
}

}  // namespace

struct Session::Memory {
  Model model;
  int64_t sequences;
  ModelCache cache;  // of one sequence as long as all are the same
  Tensor logits;     // [rows of the cache, vocabulary] after the last token, on any device; not there before the first
  std::vector<std::vector<int32_t>> history;  // the last tokens of each row

  const LanguageModel& language_model() const { return model.parts().language_model; }
  const Tokenizer& tokenizer() const { return *model.parts().tokenizer; }

  bool at_start_of_text(size_t row) const {
    const int32_t last = history[row].empty() ? -1 : history[row].back();
    return last < 0 || last == tokenizer().bos() || last == tokenizer().eos();
  }

  void read(const std::vector<std::vector<int32_t>>& rows);
  void remember(const std::vector<std::vector<int32_t>>& rows);
  int32_t choose(const Tensor& all, size_t row, Sampling sampling) const;
  Tensor read_ahead();
  void start();
  void spread();
  std::string own_fingerprint() const { return fingerprint(language_model(), tokenizer().fingerprint()); }
};

// More tokens, the same number for each row of the cache.
void Session::Memory::read(const std::vector<std::vector<int32_t>>& rows) {
  const auto length = static_cast<int64_t>(rows[0].size());
  // Without a state the first piece must be all of it: a KV cache reads what follows token by token.
  const ModelConfig& config = language_model().config();
  const int64_t longest = state_rows(config.block.mixer(), config.qk_dim) > 0 ? kPiece : length;
  for (int64_t begin = 0; begin < length; begin += longest) {
    const int64_t count = std::min(longest, length - begin);
    const Tensor tokens = Tensor::empty({cache.batch(), count}, DType::i32);
    for (int64_t row = 0; row < cache.batch(); ++row)
      std::copy_n(rows[row].begin() + begin, count, tokens.data<int32_t>() + row * count);
    logits = count == 1 ? language_model().step(cache, tokens) : language_model().read(cache, tokens);
  }
  remember(rows);
}

// What the rows have read.
void Session::Memory::remember(const std::vector<std::vector<int32_t>>& rows) {
  for (size_t row = 0; row < history.size(); ++row) {
    std::vector<int32_t>& recent = history[row];
    recent.insert(recent.end(), rows[row].begin(), rows[row].end());
    if (recent.size() > kRepetitionWindow) recent.erase(recent.begin(), recent.end() - kRepetitionWindow);
  }
}

// The next token of a row, from the logits of all.
int32_t Session::Memory::choose(const Tensor& all, size_t row, Sampling sampling) const {
  sampling.seed += row;
  // A model may have room for more ids than its tokenizer has.
  const std::span<const float> own(all.select(0, static_cast<int64_t>(row)).data<float>(),
                                   static_cast<size_t>(tokenizer().vocabulary_size()));
  return sample(own, sampling, history[row], static_cast<uint64_t>(cache.tokens()));
}

// Reads the most probable token of every row, and says which they were while the device is still at it.
Tensor Session::Memory::read_ahead() {
  const Tensor best = argmax(logits.slice(1, 0, tokenizer().vocabulary_size()));
  const HostCopy copy(best);
  logits = language_model().step(cache, best.slice(1, 0, 1));
  const Tensor known = copy.wait();
  require_finite_logits(known);
  return known;
}

// The mark before the text.
void Session::Memory::start() {
  if (cache.tokens() > 0 || model.parts().start < 0) return;
  read(std::vector(history.size(), std::vector{model.parts().start}));
}

// From here on every sequence has a row of its own.
void Session::Memory::spread() {
  if (cache.batch() == sequences) return;
  const Device device = language_model().device();
  ModelCache::Contents contents = cache.contents(device);
  for (auto& [name, tensor] : contents.tensors) tensor = repeated(tensor, sequences);
  cache = ModelCache(language_model().config(), sequences, contents, device);
  logits = repeated(logits, sequences);
  history.resize(sequences, history[0]);
}

Session::Session(const Model& model, int sequences) try {
  require(sequences >= 1, "session: {} sequences, expected 1 or more", sequences);
  const LanguageModel& language_model = model.parts().language_model;
  ModelCache cache(language_model.config(), 1, language_model.device());
  memory_ = std::make_unique<Memory>(Memory{model, sequences, std::move(cache), {}, {{}}});
} catch (...) {
  rethrow_as_error();
}

Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

Session::Memory& Session::own() const {
  require(memory_ != nullptr, "session: it was moved to another; use that one");
  return *memory_;
}

void Session::read(std::string_view text) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.start();
  if (text.empty()) return;
  bool first = true;
  for (size_t row = 0; row < memory.history.size(); ++row) first = first && memory.at_start_of_text(row);
  const Tokenizer& tokenizer = memory.tokenizer();
  memory.read(std::vector(memory.history.size(), first ? tokenizer.encode(text) : tokenizer.encode_continuation(text)));
} catch (...) {
  rethrow_as_error();
}

std::vector<Text> Session::write(const WriteOptions& options, const Show& show) try {
  require(options.tokens >= 0, "generate: {} tokens, expected 0 or more", options.tokens);
  check_sampling(options.sampling);
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  const Tokenizer& tokenizer = memory.tokenizer();
  memory.start();
  require(memory.logits.defined(),
          "generate: nothing to start from: the tokenizer has neither bos nor eos, and no text "
          "was read");
  memory.spread();

  struct Sequence {
    TextStream stream;
    Text out;
    bool ended = false;
  };
  std::vector<Sequence> sequences(memory.sequences, {TextStream(options.stop), {}, false});
  bool interrupted = false;
  const auto show_piece = [&](size_t i, const std::string& piece) {
    sequences[i].out.text += piece;
    if (!piece.empty() && show && !show(piece, static_cast<int>(i))) interrupted = true;
  };
  const auto end = [&](size_t i, Ending ending) {
    sequences[i].ended = true;
    sequences[i].out.ending = ending;
    show_piece(i, sequences[i].stream.finish());
  };

  const Sampling& sampling = options.sampling;
  const bool most_probable = sampling.temperature == 0 && sampling.repetition_penalty == 1 &&
                             sampling.frequency_penalty == 0 && sampling.presence_penalty == 0 &&
                             sampling.logit_bias.empty();
  for (int64_t step = 0; step < options.tokens; ++step) {
    std::vector<std::vector<int32_t>> next(sequences.size(), {std::max(0, tokenizer.eos())});
    // Where a GPU can choose by itself it reads on at once, while the text is made here.
    const bool ahead =
        most_probable && !memory.logits.device().is_cpu() && std::ranges::none_of(sequences, &Sequence::ended);
    const Tensor known = ahead ? memory.read_ahead() : HostCopy(memory.logits).wait();
    for (size_t i = 0; i < sequences.size(); ++i) {
      Sequence& sequence = sequences[i];
      if (sequence.ended) continue;
      const int32_t id = ahead ? known.select(0, static_cast<int64_t>(i)).data<int32_t>()[0]
                               : memory.choose(known, i, options.sampling);
      next[i] = {id};
      sequence.out.tokens += 1;
      if (id == tokenizer.eos()) {
        end(i, Ending::eos);
        continue;
      }
      show_piece(i, sequence.stream.push(memory.at_start_of_text(i) ? tokenizer.first_piece(id) : tokenizer.piece(id)));
      if (sequence.stream.stopped()) end(i, Ending::stop);
    }
    ahead ? memory.remember(next) : memory.read(next);
    if (interrupted || std::ranges::all_of(sequences, &Sequence::ended)) break;
  }
  std::vector<Text> texts;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (!sequences[i].ended) end(i, interrupted ? Ending::interrupted : Ending::tokens);
    texts.push_back(std::move(sequences[i].out));
  }
  return texts;
} catch (...) {
  rethrow_as_error();
}

void Session::save(const std::filesystem::path& file) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  require(memory.logits.defined(), "save state: nothing has been read yet");
  SavedState state{memory.cache.contents(), to_device(memory.logits, {}),
                   Tensor::empty({memory.cache.batch(), kRepetitionWindow}, DType::i32)};
  int32_t* out = state.history.data<int32_t>();
  for (const std::vector<int32_t>& recent : memory.history) {
    out = std::fill_n(out, kRepetitionWindow - static_cast<int64_t>(recent.size()), -1);
    out = std::copy(recent.begin(), recent.end(), out);
  }
  save_state(file, state, memory.language_model().config(), memory.own_fingerprint());
} catch (...) {
  rethrow_as_error();
}

void Session::load(const std::filesystem::path& file) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  const ModelConfig& config = memory.language_model().config();
  const SavedState state = load_state(file, config, memory.own_fingerprint());
  const int64_t rows = state.logits.size(0);
  require(rows == 1 || rows == memory.sequences, "{}: the state of {} sequences, asked for were {}", file.string(),
          rows, memory.sequences);
  std::vector<std::vector<int32_t>> history(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* recent = state.history.data<int32_t>() + row * kRepetitionWindow;
    std::copy_if(recent, recent + kRepetitionWindow, std::back_inserter(history[row]),
                 [](int32_t id) { return id >= 0; });
  }
  try {
    memory.cache = ModelCache(config, rows, state.cache, memory.language_model().device());
  } catch (const Error& error) {
    fail("{}: {}", file.string(), error.what());
  }
  memory.logits = state.logits;
  memory.history = std::move(history);
} catch (...) {
  rethrow_as_error();
}

int64_t Session::tokens() const {
  return own().cache.tokens();
}

int64_t Session::bytes() const {
  return own().cache.bytes();
}

}  // namespace furious
