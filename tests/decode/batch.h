// Sequences of one length in a decoder: what a test reads and compares row by row.
#pragma once

#include <numeric>
#include <vector>

#include "decode/decoder.h"
#include "ops/elementwise.h"

namespace furious::testing {

class Batch {
 public:
  Batch(const LanguageModel& model, int64_t rows) : decoder_(model, rows) {
    for (int64_t i = 0; i < rows; ++i) slots_.push_back(decoder_.start());
  }
  // Restores the slots of another batch, on any device.
  Batch(const LanguageModel& model, const std::vector<SlotContents>& contents)
      : Batch(model, static_cast<int64_t>(contents.size())) {
    for (size_t i = 0; i < contents.size(); ++i) decoder_.restore(slots_[i], contents[i]);
  }

  // More tokens i32 [rows, length] of every sequence; the logits after the last, [rows, vocabulary] on the CPU.
  Tensor read(const Tensor& tokens) {
    if (tokens.size(1) == 1) return to_device(step(tokens), {});
    for (size_t i = 0; i < slots_.size(); ++i) {
      const int32_t* const row = tokens.data<int32_t>() + static_cast<int64_t>(i) * tokens.stride(0);
      decoder_.read(slots_[i], {row, static_cast<size_t>(tokens.size(1))});
    }
    return logits();
  }
  // One token [rows, 1]; the logits [rows, vocabulary] on the model's device.
  Tensor step(const Tensor& tokens) {
    decoder_.read_token(slots_, tokens);
    return stacked();
  }
  Tensor logits() const { return to_device(stacked(), {}); }
  std::vector<SlotContents> contents() const {
    std::vector<SlotContents> all;
    for (const int32_t slot : slots_) all.push_back(decoder_.contents(slot));
    return all;
  }
  int64_t tokens() const { return decoder_.tokens(slots_[0]); }
  int64_t bytes() const { return decoder_.bytes(); }
  std::string_view ran_as() const { return decoder_.ran_as(); }
  Decoder& decoder() { return decoder_; }
  const std::vector<int32_t>& slots() const { return slots_; }

 private:
  Tensor stacked() const {
    const Tensor first = decoder_.logits(slots_[0]);
    const Tensor all = Tensor::empty({static_cast<int64_t>(slots_.size()), first.size(0)}, DType::f32, first.device());
    for (size_t i = 0; i < slots_.size(); ++i) copy(all.select(0, static_cast<int64_t>(i)), decoder_.logits(slots_[i]));
    return all;
  }

  Decoder decoder_;
  std::vector<int32_t> slots_;
};

}  // namespace furious::testing
