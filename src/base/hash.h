// Hashes of bytes.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/parallel.h"

namespace furious {

// 64-bit FNV-1a: for fingerprints and for selection by content. Not cryptographic.
inline uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

// For large data, at memory bandwidth: words in four lanes, blocks in parallel. Independent of the number of threads.
class LargeHash {
 public:
  static constexpr size_t kBlock = 1 << 20;

  // Bytes must be a multiple of kBlock in every call but the last.
  void add(std::span<const std::byte> bytes) {
    const size_t before = hashes_.size();
    hashes_.resize(before + (bytes.size() + kBlock - 1) / kBlock);
    parallel_for(static_cast<int64_t>(hashes_.size() - before), [&](int64_t i) {
      const size_t begin = static_cast<size_t>(i) * kBlock;
      hashes_[before + static_cast<size_t>(i)] = of_block(bytes.subspan(begin, std::min(kBlock, bytes.size() - begin)));
    });
    size_ += bytes.size();
  }
  uint64_t finish() {
    hashes_.push_back(size_);
    return hash_of({reinterpret_cast<const char*>(hashes_.data()), hashes_.size() * sizeof(uint64_t)});
  }

 private:
  static uint64_t of_block(std::span<const std::byte> block) {
    constexpr size_t kLanes = 4, kStride = kLanes * sizeof(uint64_t);
    uint64_t lanes[kLanes] = {1, 2, 3, 4};
    const auto mix = [&](const std::byte* from, size_t count) {
      uint64_t words[kLanes] = {};
      std::memcpy(words, from, count);
      for (size_t i = 0; i < kLanes; ++i) lanes[i] = std::rotl((lanes[i] ^ words[i]) * 0x9e3779b97f4a7c15u, 29);
    };
    size_t at = 0;
    for (; at + kStride <= block.size(); at += kStride) mix(block.data() + at, kStride);
    mix(block.data() + at, block.size() - at);
    return hash_of({reinterpret_cast<const char*>(lanes), sizeof(lanes)});
  }

  std::vector<uint64_t> hashes_;  // of the blocks
  uint64_t size_ = 0;
};

inline uint64_t hash_of_large(std::span<const std::byte> bytes) {
  LargeHash hash;
  hash.add(bytes);
  return hash.finish();
}

// The format used in files: 16 hexadecimal digits.
inline std::string hash_text(uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

}  // namespace furious
