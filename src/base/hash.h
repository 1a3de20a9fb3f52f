// Hashes of bytes.
#pragma once

#include <cstdint>
#include <string_view>

namespace furious {

// 64-bit FNV-1a: for fingerprints and for choosing by content, not against an attacker.
inline uint64_t hash_of(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

}  // namespace furious
