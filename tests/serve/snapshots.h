// Shared by the tests of the state store: states that are a function of their ids.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "model/little.h"
#include "serve/state_store.h"
#include "support.h"

namespace furious::serve {

using Ids = std::vector<int32_t>;

inline ModelConfig small_config() {
  return furious::testing::little(preset("2mamba"));
}

// The state of no model: what the store keeps it does not look into.
inline SlotContents contents_of(const Ids& ids, int64_t size = 64) {
  SlotContents contents;
  contents.tokens = static_cast<int64_t>(ids.size());
  contents.pending = contents.tokens % 64;
  uint64_t sum = 1;
  for (const int32_t id : ids) sum = sum * 31 + static_cast<uint64_t>(id);
  furious::testing::Random random(sum);
  contents.tensors["layers.0.state"] = random.normal_tensor({size});
  contents.tensors["layers.0.log_decay"] = random.normal_tensor({4});
  contents.logits = random.normal_tensor({small_config().vocabulary});
  contents.sampling.position = static_cast<uint64_t>(contents.tokens);
  contents.sampling.history.assign(ids.end() - std::min<int64_t>(contents.tokens, 256), ids.end());
  return contents;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

inline void expect_equal(const SlotContents& got, const SlotContents& expected) {
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.pending, expected.pending);
  EXPECT_EQ(got.sampling.position, expected.sampling.position);
  EXPECT_EQ(got.sampling.history, expected.sampling.history);
  ASSERT_EQ(got.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) EXPECT_TRUE(same_bits(got.tensors.at(name), tensor)) << name;
  EXPECT_TRUE(same_bits(got.logits, expected.logits));
}

// Lines that the store warned with.
class Warnings {
 public:
  std::function<void(const std::string&)> sink() {
    return [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(line);
    };
  }
  std::vector<std::string> lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

inline Prompt prompt_of(Ids ids, std::string transcript = {}) {
  Prompt prompt{std::move(ids), std::move(transcript), {}};
  prompt.boundaries = {{prompt.ids.size(), prompt.transcript.size()}};
  return prompt;
}

}  // namespace furious::serve
