// furious::Session: sequences in the slots of a decoder, and the text around their tokens.
#include <algorithm>
#include <numeric>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "decode/state_file.h"
#include "decode/text_stream.h"

namespace furious {

struct Session::Memory {
  Model model;
  int64_t sequences;
  Decoder decoder;
  std::vector<int32_t> slots;  // one for each sequence; one for all as long as they are the same
  std::vector<int32_t> last;   // the last token of each slot; −1 before the first

  Memory(const Model& its_model, int64_t its_sequences)
      : model(its_model),
        sequences(its_sequences),
        decoder(language_model(), its_sequences, tokenizer().vocabulary_size()),
        slots{decoder.start()},
        last{-1} {}

  const LanguageModel& language_model() const { return model.parts().language_model; }
  const Tokenizer& tokenizer() const { return *model.parts().tokenizer; }
  std::string own_fingerprint() const { return fingerprint(language_model(), tokenizer().fingerprint()); }

  bool at_start_of_text(size_t i) const {
    return last[i] < 0 || last[i] == tokenizer().bos() || last[i] == tokenizer().eos();
  }
  bool has_read() const {
    return std::ranges::all_of(slots, [&](int32_t slot) { return decoder.tokens(slot) > 0; });
  }

  // Further tokens of every slot. Where that fails, the last tokens are those that were read.
  void read(const std::vector<std::vector<int32_t>>& tokens) {
    std::vector<Decoder::Prompt> prompts;
    std::vector<int64_t> before;
    for (size_t i = 0; i < slots.size(); ++i) {
      prompts.push_back({slots[i], tokens[i]});
      before.push_back(decoder.tokens(slots[i]));
    }
    const auto remember_last = [&] {
      for (size_t i = 0; i < slots.size(); ++i)
        if (const int64_t count = decoder.tokens(slots[i]) - before[i]; count > 0) last[i] = tokens[i][count - 1];
    };
    try {
      decoder.read(prompts);
    } catch (...) {
      remember_last();
      throw;
    }
    remember_last();
  }
  // The tokens of a further text of slot i, after the mark before the text if the slot is empty. `first`: whether it is
  // the start of a text for the tokenizer.
  std::vector<int32_t> tokens_of(size_t i, std::string_view text, bool first) const {
    std::vector<int32_t> tokens;
    if (decoder.tokens(slots[i]) == 0 && model.parts().start >= 0) tokens.push_back(model.parts().start);
    if (text.empty()) return tokens;
    const std::vector<int32_t> own = first ? tokenizer().encode(text) : tokenizer().encode_continuation(text);
    tokens.insert(tokens.end(), own.begin(), own.end());
    return tokens;
  }
  // The mark before the text, where nothing else was read.
  void start() {
    std::vector<std::vector<int32_t>> tokens;
    for (size_t i = 0; i < slots.size(); ++i) tokens.push_back(tokens_of(i, "", true));
    read(tokens);
  }
  // From here on every sequence has a slot of its own.
  void spread() {
    while (static_cast<int64_t>(slots.size()) < sequences) {
      slots.push_back(decoder.fork(slots[0]));
      last.push_back(last[0]);
    }
  }
};

Session::Session(const Model& model, int sequences) try {
  require(sequences >= 1, "session: {} sequences, expected 1 or more", sequences);
  const ThreadLimit limit(model.parts().threads);
  memory_ = std::make_unique<Memory>(model, sequences);
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
  bool first = true;
  for (size_t i = 0; i < memory.slots.size(); ++i) first = first && memory.at_start_of_text(i);
  std::vector<std::vector<int32_t>> tokens;
  for (size_t i = 0; i < memory.slots.size(); ++i) tokens.push_back(memory.tokens_of(i, text, first));
  memory.read(tokens);
} catch (...) {
  rethrow_as_error();
}

void Session::read_each(const std::vector<std::string>& texts) try {
  Memory& memory = own();
  require(static_cast<int64_t>(texts.size()) == memory.sequences,
          "session.read_each: {} texts for {} sequences; give one for each", texts.size(), memory.sequences);
  const ThreadLimit limit(memory.model.parts().threads);
  memory.spread();
  std::vector<std::vector<int32_t>> tokens;
  for (size_t i = 0; i < texts.size(); ++i) tokens.push_back(memory.tokens_of(i, texts[i], memory.at_start_of_text(i)));
  memory.read(tokens);
} catch (...) {
  rethrow_as_error();
}

namespace {

// A sequence while it is written.
struct Writing {
  size_t index;
  TextStream stream;
  Text out;
};

WrittenToken written_token(const ChosenTokens& chosen, size_t row, int64_t most_probable) {
  const Tensor ids = chosen.best().select(0, static_cast<int64_t>(row));
  const Tensor log_probabilities = chosen.log_probabilities().select(0, static_cast<int64_t>(row));
  const auto column = [&](int64_t i) {
    return TokenLogProbability{ids.data<int32_t>()[i], static_cast<double>(log_probabilities.data<float>()[i])};
  };
  WrittenToken token{column(0), {}};
  for (int64_t i = 1; i <= most_probable && column(i).id >= 0; ++i) token.most_probable.push_back(column(i));
  return token;
}

}  // namespace

std::vector<Text> Session::write(const WriteOptions& options, const Show& show) try {
  require(options.tokens >= 0, "generate: {} tokens, expected 0 or more", options.tokens);
  check_sampling(options.sampling);
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  const Tokenizer& tokenizer = memory.tokenizer();
  memory.start();
  require(memory.has_read(),
          "generate: there is nothing to start from, since the tokenizer has neither bos nor eos; read a text first");
  memory.spread();
  std::vector<Writing> writings;
  std::vector<size_t> active(memory.slots.size());  // sequences that have not ended
  std::iota(active.begin(), active.end(), size_t{0});
  for (const size_t i : active) {
    writings.push_back({i, TextStream(options.stop), {}});
    Sampling sampling = options.sampling;
    sampling.seed += i;
    memory.decoder.set_sampling(memory.slots[i], sampling);
  }
  bool interrupted = false;
  const auto show_piece = [&](Writing& writing, const std::string& piece) {
    if (piece.empty()) return;
    writing.out.text += piece;
    if (show && !interrupted && !show(piece, static_cast<int>(writing.index))) interrupted = true;
  };
  const auto end = [&](Writing& writing, Ending ending) {
    writing.out.ending = ending;
    show_piece(writing, writing.stream.finish());
  };

  for (int64_t step = 0; step < options.tokens && !active.empty() && !interrupted; ++step) {
    std::vector<int32_t> slots;
    for (const size_t i : active) slots.push_back(memory.slots[i]);
    // The device reads the tokens while their text is made here.
    const ChosenTokens chosen = memory.decoder.step(slots);
    const std::vector<int32_t> ids = chosen.wait();
    std::vector<size_t> going_on;
    for (size_t row = 0; row < active.size(); ++row) {
      Writing& writing = writings[active[row]];
      const int32_t id = ids[row];
      const bool starts = memory.at_start_of_text(active[row]);
      memory.last[active[row]] = id;
      writing.out.tokens += 1;
      if (options.sampling.log_probabilities >= 0)
        writing.out.log_probabilities.push_back(written_token(chosen, row, options.sampling.log_probabilities));
      if (id == tokenizer.eos()) {
        end(writing, Ending::eos);
        continue;
      }
      show_piece(writing, writing.stream.push(starts ? tokenizer.first_piece(id) : tokenizer.piece(id)));
      if (writing.stream.stopped())
        end(writing, Ending::stop);
      else
        going_on.push_back(active[row]);
    }
    active = std::move(going_on);
  }
  for (const size_t i : active) end(writings[i], interrupted ? Ending::interrupted : Ending::tokens);
  std::vector<Text> texts;
  for (Writing& writing : writings) texts.push_back(std::move(writing.out));
  return texts;
} catch (...) {
  rethrow_as_error();
}

void Session::save(const std::filesystem::path& file) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  require(memory.has_read(), "save state: nothing has been read yet; read a text in every sequence first");
  std::vector<SlotContents> sequences;
  for (const int32_t slot : memory.slots) sequences.push_back(memory.decoder.contents(slot));
  save_state(file, sequences, memory.language_model().config(), memory.own_fingerprint());
} catch (...) {
  rethrow_as_error();
}

void Session::load(const std::filesystem::path& file) try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  const std::vector<SlotContents> saved = load_state(file, memory.language_model().config(), memory.own_fingerprint());
  const auto count = static_cast<int64_t>(saved.size());
  require(count == 1 || count == memory.sequences, "{}: the state of {} sequences, expected {}", file.string(), count,
          memory.sequences);
  auto loaded = std::make_unique<Memory>(memory.model, memory.sequences);
  try {
    for (size_t i = 0; i < saved.size(); ++i) {
      if (i > 0) loaded->slots.push_back(loaded->decoder.start());
      loaded->decoder.restore(loaded->slots[i], saved[i]);
    }
  } catch (const Error& error) {
    fail("{}: {}", file.string(), error.what());
  }
  loaded->last.clear();
  for (const SlotContents& contents : saved)
    loaded->last.push_back(contents.sampling.history.empty() ? -1 : contents.sampling.history.back());
  memory_ = std::move(loaded);
} catch (...) {
  rethrow_as_error();
}

int64_t Session::tokens() const {
  const Memory& memory = own();
  int64_t most = 0;
  for (const int32_t slot : memory.slots) most = std::max(most, memory.decoder.tokens(slot));
  return most;
}

int64_t Session::bytes() const {
  return own().decoder.bytes();
}

}  // namespace furious
