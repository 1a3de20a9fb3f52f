// furious::Session: sequences in the slots of a decoder, and the text around their tokens.
#include <algorithm>
#include <numeric>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "decode/sequence_state.h"
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
  // Another one of the same model and number of sequences with the contents of one slot for all of them, or of one for
  // each. Errors begin with `origin`.
  std::unique_ptr<Memory> with(const std::string& origin, const std::vector<SlotContents>& contents) const {
    const auto count = static_cast<int64_t>(contents.size());
    require(count == 1 || count == sequences, "{}: the state of {} sequences, expected {}", origin, count, sequences);
    auto other = std::make_unique<Memory>(model, sequences);
    other->last.clear();
    try {
      for (size_t i = 0; i < contents.size(); ++i) {
        if (i > 0) other->slots.push_back(other->decoder.start());
        other->decoder.restore(other->slots[i], contents[i]);
        const std::vector<int32_t>& history = contents[i].sampling.history;
        other->last.push_back(history.empty() ? -1 : history.back());
      }
    } catch (const Error& error) {
      fail("{}: {}", origin, error.what());
    }
    return other;
  }
  std::vector<SlotContents> contents() const {
    std::vector<SlotContents> all;
    for (const int32_t slot : slots) all.push_back(decoder.contents(slot));
    return all;
  }
  std::vector<SlotContents> contents_to_save() const {
    require(has_read(), "save state: nothing has been read yet; read a text in every sequence first");
    return contents();
  }

  const LanguageModel& language_model() const { return model.parts().language_model; }
  const Tokenizer& tokenizer() const { return *model.parts().tokenizer; }
  const std::string& fingerprint() const { return model.parts().fingerprint(); }

  bool at_start_of_text(size_t i) const {
    return last[i] < 0 || last[i] == tokenizer().bos() || last[i] == tokenizer().eos();
  }
  int32_t slot_of(int sequence) const {
    require(sequence >= 0 && sequence < sequences, "session: sequence {}, expected 0 to {}", sequence, sequences - 1);
    return slots[std::min(static_cast<size_t>(sequence), slots.size() - 1)];
  }
  bool has_read() const {
    return std::ranges::all_of(slots, [&](int32_t slot) { return decoder.tokens(slot) > 0; });
  }

  // Further tokens of every slot. Where that fails or stops, the last tokens are those that were read.
  bool read(const std::vector<std::vector<int32_t>>& tokens, const ReadProgress& progress = {}) {
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
      const bool all = decoder.read(prompts, progress);
      remember_last();
      return all;
    } catch (...) {
      remember_last();
      throw;
    }
  }
  // The tokens of a further text of slot i, after the mark before the text if the slot is empty. `first`: whether it is
  // the start of a text for the tokenizer.
  std::vector<int32_t> tokens_of(size_t i, std::string_view text, bool first) const {
    if (decoder.tokens(slots[i]) == 0) return model.parts().prompt(text);
    if (text.empty()) return {};
    return first ? tokenizer().encode(text) : tokenizer().encode_continuation(text);
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

Session::Session(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}
Session::~Session() = default;
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;

Session::Memory& Session::own() const {
  require(memory_ != nullptr, "session: it was moved to another; use that one");
  return *memory_;
}

bool Session::read(std::string_view text, const ReadProgress& progress) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  bool first = true;
  for (size_t i = 0; i < memory.slots.size(); ++i) first = first && memory.at_start_of_text(i);
  std::vector<std::vector<int32_t>> tokens;
  for (size_t i = 0; i < memory.slots.size(); ++i) tokens.push_back(memory.tokens_of(i, text, first));
  return memory.read(tokens, progress);
} catch (...) {
  rethrow_as_error();
}

bool Session::read_each(const std::vector<std::string>& texts, const ReadProgress& progress) try {
  Memory& memory = own();
  require(static_cast<int64_t>(texts.size()) == memory.sequences,
          "session.read_each: {} texts for {} sequences; give one for each", texts.size(), memory.sequences);
  const ThreadLimit limit(memory.model.parts().threads);
  memory.spread();
  std::vector<std::vector<int32_t>> tokens;
  for (size_t i = 0; i < texts.size(); ++i) tokens.push_back(memory.tokens_of(i, texts[i], memory.at_start_of_text(i)));
  return memory.read(tokens, progress);
} catch (...) {
  rethrow_as_error();
}

bool Session::read_ids(const std::vector<int32_t>& ids, const ReadProgress& progress) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  return memory.read(std::vector(memory.slots.size(), ids), progress);
} catch (...) {
  rethrow_as_error();
}

bool Session::read_ids_each(const std::vector<std::vector<int32_t>>& ids, const ReadProgress& progress) try {
  Memory& memory = own();
  require(static_cast<int64_t>(ids.size()) == memory.sequences,
          "session.read_ids_each: {} lists of ids for {} sequences; give one for each", ids.size(), memory.sequences);
  const ThreadLimit limit(memory.model.parts().threads);
  memory.spread();
  return memory.read(ids, progress);
} catch (...) {
  rethrow_as_error();
}

void Session::step(const std::vector<int32_t>& ids) try {
  Memory& memory = own();
  require(static_cast<int64_t>(ids.size()) == memory.sequences,
          "session.step: {} ids for {} sequences; give one for each", ids.size(), memory.sequences);
  const ThreadLimit limit(memory.model.parts().threads);
  memory.spread();
  std::vector<std::vector<int32_t>> each;
  for (const int32_t id : ids) each.push_back({id});
  memory.read(each);
} catch (...) {
  rethrow_as_error();
}

std::vector<float> Session::logits(int sequence) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  return floats_of(memory.decoder.logits(memory.slot_of(sequence)));
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
      writing.out.ids.push_back(id);
      if (options.sampling.log_probabilities >= 0) writing.out.log_probabilities.push_back(chosen.token(row));
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
  save_state(file, memory.contents_to_save(), memory.language_model().config(), memory.fingerprint());
} catch (...) {
  rethrow_as_error();
}

std::vector<std::byte> Session::save_bytes() const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  return state_bytes(memory.contents_to_save(), memory.language_model().config(), memory.fingerprint());
} catch (...) {
  rethrow_as_error();
}

std::vector<SequenceState> Session::states() const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  std::vector<SequenceState> states;
  for (const SlotContents& contents : memory.contents())
    states.push_back(sequence_state(contents, memory.fingerprint()));
  return states;
} catch (...) {
  rethrow_as_error();
}

void Session::load(const std::filesystem::path& file) try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory_ = memory.with(file.string(), load_state(file, memory.language_model().config(), memory.fingerprint()));
} catch (...) {
  rethrow_as_error();
}

void Session::load_bytes(std::span<const std::byte> bytes) try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory_ = memory.with("state in memory", load_state(bytes, memory.language_model().config(), memory.fingerprint()));
} catch (...) {
  rethrow_as_error();
}

void Session::set_states(const std::vector<SequenceState>& states) try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  std::vector<SlotContents> contents;
  for (const SequenceState& state : states) contents.push_back(slot_contents(state, memory.model.parts()));
  memory_ = memory.with("session.set_states", contents);
} catch (...) {
  rethrow_as_error();
}

Session Session::fork() const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  return Session(memory.with("session.fork", memory.contents()));
} catch (...) {
  rethrow_as_error();
}

int Session::sequences() const {
  return static_cast<int>(own().sequences);
}

int64_t Session::tokens(int sequence) const {
  const Memory& memory = own();
  return memory.decoder.tokens(memory.slot_of(sequence));
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
