// furious::SequenceBatch: the slots of a decoder.
#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "decode/sequence_state.h"

namespace furious {

struct SequenceBatch::Memory {
  Model model;
  Decoder decoder;

  Memory(const Model& its_model, int capacity)
      : model(its_model),
        decoder(its_model.parts().language_model, capacity, its_model.parts().tokenizer->vocabulary_size()) {}

  int added(int32_t slot) {
    decoder.set_sampling(slot, {});
    return slot;
  }
  void check(int sequence) const {
    require(decoder.holds(sequence), "sequence_batch: there is no sequence {}; add() returns the number of a new one",
            sequence);
  }
  void check_space() const {
    require(decoder.free_slots() > 0, "sequence_batch: all {} sequences are in use; remove one, or make a larger batch",
            decoder.slots());
  }
  // As slots; each named once, at least one.
  std::vector<int32_t> slots_of(const std::vector<int>& sequences) const {
    require(!sequences.empty(), "sequence_batch.step: no sequences were given");
    for (const int sequence : sequences) check(sequence);
    return {sequences.begin(), sequences.end()};
  }
};

SequenceBatch::SequenceBatch(const Model& model, int capacity) try {
  require(capacity >= 1, "sequence_batch: a capacity of {}, expected 1 or more", capacity);
  const ThreadLimit limit(model.parts().threads);
  memory_ = std::make_unique<Memory>(model, capacity);
} catch (...) {
  rethrow_as_error();
}

SequenceBatch::~SequenceBatch() = default;
SequenceBatch::SequenceBatch(SequenceBatch&&) noexcept = default;
SequenceBatch& SequenceBatch::operator=(SequenceBatch&&) noexcept = default;

SequenceBatch::Memory& SequenceBatch::own() const {
  require(memory_ != nullptr, "sequence_batch: it was moved to another; use that one");
  return *memory_;
}

int SequenceBatch::add() try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check_space();
  return memory.added(memory.decoder.start());
} catch (...) {
  rethrow_as_error();
}

int SequenceBatch::add(const SequenceState& state) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check_space();
  const SlotContents contents = slot_contents(state, memory.model.parts());
  const int32_t slot = memory.decoder.start();
  try {
    memory.decoder.restore(slot, contents);
  } catch (...) {
    memory.decoder.stop(slot);
    throw;
  }
  return memory.added(slot);
} catch (...) {
  rethrow_as_error();
}

int SequenceBatch::fork(int sequence) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check(sequence);
  memory.check_space();
  return memory.added(memory.decoder.fork(sequence));
} catch (...) {
  rethrow_as_error();
}

void SequenceBatch::remove(int sequence) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check(sequence);
  memory.decoder.stop(sequence);
} catch (...) {
  rethrow_as_error();
}

std::vector<int> SequenceBatch::sequences() const {
  const Memory& memory = own();
  std::vector<int> all;
  for (int i = 0; i < memory.decoder.slots(); ++i)
    if (memory.decoder.holds(i)) all.push_back(i);
  return all;
}

int SequenceBatch::capacity() const {
  return static_cast<int>(own().decoder.slots());
}

bool SequenceBatch::read(const std::vector<Prompt>& prompts, const ReadProgress& progress) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  std::vector<Decoder::Prompt> slots;
  for (const auto& [sequence, ids] : prompts) {
    memory.check(sequence);
    slots.push_back({sequence, ids});
  }
  return memory.decoder.read(slots, progress);
} catch (...) {
  rethrow_as_error();
}

void SequenceBatch::set_sampling(int sequence, const Sampling& sampling) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check(sequence);
  memory.decoder.set_sampling(sequence, sampling);
} catch (...) {
  rethrow_as_error();
}

std::vector<WrittenToken> SequenceBatch::step(const std::vector<int>& sequences) try {
  Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  const ChosenTokens chosen = memory.decoder.step(memory.slots_of(sequences));
  (void)chosen.wait();  // an Error if a logit is not finite
  std::vector<WrittenToken> tokens;
  for (size_t row = 0; row < sequences.size(); ++row) tokens.push_back(chosen.token(row));
  return tokens;
} catch (...) {
  rethrow_as_error();
}

void SequenceBatch::step(const std::vector<int>& sequences, const std::vector<int32_t>& ids) try {
  Memory& memory = own();
  require(ids.size() == sequences.size(), "sequence_batch.step: {} ids for {} sequences; give one for each", ids.size(),
          sequences.size());
  const ThreadLimit limit(memory.model.parts().threads);
  std::vector<Decoder::Prompt> prompts;
  for (const int32_t slot : memory.slots_of(sequences)) prompts.push_back({slot, {&ids[prompts.size()], 1}});
  memory.decoder.read(prompts);
} catch (...) {
  rethrow_as_error();
}

std::vector<float> SequenceBatch::logits(int sequence) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check(sequence);
  return floats_of(memory.decoder.logits(sequence));
} catch (...) {
  rethrow_as_error();
}

SequenceState SequenceBatch::state(int sequence) const try {
  const Memory& memory = own();
  const ThreadLimit limit(memory.model.parts().threads);
  memory.check(sequence);
  return sequence_state(memory.decoder.contents(sequence), memory.model.parts().fingerprint());
} catch (...) {
  rethrow_as_error();
}

int64_t SequenceBatch::tokens(int sequence) const {
  const Memory& memory = own();
  memory.check(sequence);
  return memory.decoder.tokens(sequence);
}

int64_t SequenceBatch::bytes() const {
  return own().decoder.bytes();
}

}  // namespace furious
