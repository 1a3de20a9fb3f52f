// Hashes of bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/parallel.h"

namespace furious {

// 64-bit FNV-1a: for fingerprints and for choosing by content, not against an attacker.
inline uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

// For large data, at the speed of memory: words in four lanes, blocks in parallel. The same for any number of threads.
inline uint64_t hash_of_large(std::span<const std::byte> bytes) {
  constexpr size_t kBlock = 1 << 20, kLanes = 4, kStride = kLanes * sizeof(uint64_t);
  const auto block_hash = [](std::span<const std::byte> block) {
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
  };
  std::vector<uint64_t> hashes((bytes.size() + kBlock - 1) / kBlock + 1, bytes.size());
  parallel_for(static_cast<int64_t>(hashes.size()) - 1, [&](int64_t i) {
    const size_t begin = static_cast<size_t>(i) * kBlock;
    hashes[i] = block_hash(bytes.subspan(begin, std::min(kBlock, bytes.size() - begin)));
  });
  return hash_of({reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(uint64_t)});
}

}  // namespace furious
