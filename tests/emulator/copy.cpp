// Asynchronous copies, and mbarriers. A copy is performed when a wait requires it, not before.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "emulator/machine.h"

namespace furious::emulator {
namespace {

// The register of [register]; addresses in shared memory have 32 bits, others 64.
uint32_t plain_address(Translator& t, const Operand& o, int bits) {
  if (o.kind != Operand::Kind::address || o.reg < 0 || o.offset != 0)
    throw std::runtime_error("an address of a copy that is not a register alone");
  Operand base;
  base.kind = Operand::Kind::reg;
  base.reg = o.reg;
  return t.value(base, bits);
}
constexpr int kSharedBits = 32, kGlobalBits = 64;

uint64_t number_of(const Operand& o) {
  if (o.kind != Operand::Kind::number) throw std::runtime_error("a copy of a size that is not a constant");
  return o.bits;
}

void perform(const PendingCopy& copy) {
  each_lane(copy.lanes, [&](int l) {
    const size_t valid = copy.valid[l];
    if (valid == 16) {  // mostly: a size that the compiler knows
      std::memcpy(copy.to[l], copy.from[l], 16);
      return;
    }
    if (valid > 0) std::memcpy(copy.to[l], copy.from[l], valid);
    std::memset(copy.to[l] + valid, 0, static_cast<size_t>(copy.bytes) - valid);
  });
}

// The number of groups that are complete once no more than `pending` committed ones are not. Groups are those of a
// warp: where its lanes have committed apart from each other, these are more than each of them waits for, never fewer.
template <class Copy>
size_t complete(const std::vector<std::vector<Copy>>& groups, size_t pending) {
  const size_t committed = groups.empty() ? 0 : groups.size() - 1;
  return committed - std::min(committed, pending);
}
template <class Copy>
void wait_for(std::vector<std::vector<Copy>>& groups, size_t pending) {
  const size_t done = complete(groups, pending);
  for (size_t g = 0; g < done; ++g)
    for (const Copy& copy : groups[g]) perform(copy);
  groups.erase(groups.begin(), groups.begin() + static_cast<ptrdiff_t>(done));
}
// wait_group.read: the sources may be overwritten, nothing is written yet.
void wait_for_sources(std::vector<std::vector<PendingStore>>& groups, size_t pending) {
  const size_t done = complete(groups, pending);
  for (size_t g = 0; g < done; ++g)
    for (PendingStore& store : groups[g])
      if (store.read.empty()) store.read.assign(store.from, store.from + store.bytes);
}
template <class Copy>
void perform_all(std::vector<std::vector<Copy>>& groups) {
  for (auto& group : groups) {
    for (const Copy& copy : group) perform(copy);
    group.clear();
  }
}
template <class Copy>
std::vector<Copy>& open_group(std::vector<std::vector<Copy>>& groups) {
  if (groups.empty()) groups.emplace_back();
  return groups.back();
}

void begin_copy(Warp& w, const Instruction& i) {
  PendingCopy copy{};
  copy.lanes = w.active;
  copy.bytes = i.bytes;
  each_lane(w.active, [&](int l) {
    const uint32_t valid = i.c != 0 ? w.at<uint32_t>(i.c)[l] : i.bytes;
    copy.to[l] = resolve_shared(w, i, w.at<uint32_t>(i.a)[l], i.bytes);
    copy.from[l] = reinterpret_cast<const unsigned char*>(w.at<uint64_t>(i.b)[l]);
    copy.valid[l] = static_cast<uint8_t>(std::min<uint32_t>(valid, i.bytes));
    if (copy.valid[l] == 0) return;
    if (reinterpret_cast<uintptr_t>(copy.from[l]) % i.bytes != 0)
      fail(w, i,
           fmt::format("misaligned: a copy of {} bytes from {}", i.bytes, static_cast<const void*>(copy.from[l])));
    check_global(w, i, copy.from[l], copy.valid[l]);
  });
  open_group(w.copies).push_back(copy);
}

// An mbarrier in shared memory: arrivals that this phase waits for, arrivals of a phase, bytes that it waits for.
struct MBarrier {
  uint16_t pending, expected;
  int32_t tx_count : 31;
  uint32_t phase : 1;
};
static_assert(sizeof(MBarrier) == 8);
constexpr int64_t kMostBytes = (1 << 20) - 1;  // of a tx-count

MBarrier read_barrier(Warp& w, const Instruction& i, uint32_t address) {
  MBarrier b;
  std::memcpy(&b, resolve_shared(w, i, address, sizeof(b)), sizeof(b));
  if (!w.block->mbarriers.contains(address))
    fail(w, i, fmt::format("the mbarrier at {} has not been initialised", address));
  return b;
}
void write_barrier(Warp& w, const Instruction& i, uint32_t address, MBarrier b) {
  if (b.pending == 0 && b.tx_count == 0) {
    b.pending = b.expected;
    b.phase ^= 1;
  }
  std::memcpy(resolve_shared(w, i, address, sizeof(b)), &b, sizeof(b));
}
void arrive(Warp& w, const Instruction& i, uint32_t address) {
  MBarrier b = read_barrier(w, i, address);
  if (b.pending == 0) fail(w, i, fmt::format("an arrival too many at the mbarrier at {}", address));
  --b.pending;
  write_barrier(w, i, address, b);
}
void expect(Warp& w, const Instruction& i, uint32_t address, int64_t bytes) {
  MBarrier b = read_barrier(w, i, address);
  const int64_t sum = b.tx_count + bytes;
  if (std::abs(sum) > kMostBytes || (b.pending == 0 && sum < 0))
    fail(w, i, fmt::format("a tx-count of {} at the mbarrier at {}", sum, address));
  b.tx_count = static_cast<int32_t>(sum);
  write_barrier(w, i, address, b);
}

void init_barrier(Warp& w, const Instruction& i) {
  each_lane(w.active, [&](int l) {
    const uint32_t count = w.at<uint32_t>(i.b)[l];
    if (count == 0 || count > UINT16_MAX) fail(w, i, fmt::format("a barrier of {} arrivals", count));
    const uint32_t address = w.at<uint32_t>(i.a)[l];
    const auto expected = static_cast<uint16_t>(count);
    const MBarrier b{expected, expected, 0, 0};
    std::memcpy(resolve_shared(w, i, address, sizeof(b)), &b, sizeof(b));
    w.block->mbarriers.insert(address);
  });
}
void arrive_at_barrier(Warp& w, const Instruction& i) {
  each_lane(w.active, [&](int l) {
    const uint32_t address = w.at<uint32_t>(i.a)[l];
    if (i.b != 0) expect(w, i, address, w.at<uint32_t>(i.b)[l]);
    arrive(w, i, address);
  });
}
void expect_bytes(Warp& w, const Instruction& i) {
  each_lane(w.active, [&](int l) { expect(w, i, w.at<uint32_t>(i.a)[l], w.at<uint32_t>(i.b)[l]); });
}

void perform_bulk(Warp& w, const Instruction& i, uint32_t address) {
  std::deque<BulkCopy>& bulk = w.block->bulk;
  for (auto copy = bulk.begin(); copy != bulk.end();) {
    if (copy->barrier != address) {
      ++copy;
      continue;
    }
    for (size_t n = 0; n < copy->to.size(); ++n) {
      if (copy->from[n] != nullptr)
        std::memcpy(copy->to[n], copy->from[n], copy->piece);
      else
        std::memset(copy->to[n], 0, copy->piece);
    }
    const auto bytes = static_cast<int64_t>(copy->to.size() * copy->piece);
    copy = bulk.erase(copy);
    expect(w, i, address, -bytes);
  }
}
void try_wait(Warp& w, const Instruction& i) {
  uint32_t done = 0;
  each_lane(w.active, [&](int l) {
    const uint32_t address = w.at<uint32_t>(i.a)[l], parity = w.at<uint32_t>(i.b)[l] & 1;
    const auto is_complete = [&] { return read_barrier(w, i, address).phase != parity; };
    if (!is_complete()) perform_bulk(w, i, address);
    if (is_complete()) done |= 1u << l;
  });
  w.predicate(i.d) = (w.predicate(i.d) & ~w.active) | done;
  if ((w.active & ~done) != 0) w.yields = true;
}

// Begins a copy, which arrives at the mbarrier of its lane.
void begin_bulk(Warp& w, const Instruction& i, BulkCopy copy) {
  read_barrier(w, i, copy.barrier);
  w.block->bulk.push_back(std::move(copy));
}

void copy_tensor(Warp& w, const Instruction& i) {
  each_lane(w.active, [&](int l) {
    const uint64_t at = w.at<uint64_t>(i.b)[l];
    check_global(w, i, reinterpret_cast<const void*>(at), sizeof(TensorMap));
    TensorMap map;
    std::memcpy(&map, reinterpret_cast<const void*>(at), sizeof(map));
    if (map.rank != i.list.size()) fail(w, i, fmt::format("a tensor map of rank {}", map.rank));
    const uint32_t to = w.at<uint32_t>(i.a)[l];
    const size_t row_bytes = size_t{map.box[0]} * map.element_bytes;
    size_t rows = 1;
    for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
    if (to % 128 != 0 || (map.swizzle != 0 && to % 1024 != 0))
      fail(w, i, fmt::format("misaligned: a tile at {} of shared memory", to));
    BulkCopy copy{w.at<uint32_t>(i.c)[l], {}, {}, 16};
    for (size_t row = 0; row < rows; ++row) {
      size_t rest = row;
      const unsigned char* from = reinterpret_cast<const unsigned char*>(map.address);
      bool inside = true;
      for (int d = 1; d < map.rank; ++d) {
        const int64_t place = static_cast<int32_t>(w.at<uint32_t>(i.list[static_cast<size_t>(d)])[l]) +
                              static_cast<int64_t>(rest % map.box[d]);
        rest /= map.box[d];
        inside = inside && place >= 0 && place < static_cast<int64_t>(map.sizes[d]);
        from += place * static_cast<int64_t>(map.strides[d]);
      }
      const int64_t column = static_cast<int32_t>(w.at<uint32_t>(i.list[0])[l]);
      for (size_t byte = 0; byte < row_bytes; byte += 16) {
        const int64_t element = column + static_cast<int64_t>(byte / map.element_bytes);
        const int64_t elements = 16 / map.element_bytes, size = static_cast<int64_t>(map.sizes[0]);
        const bool all = inside && element >= 0 && element + elements <= size;
        if (inside && !all && element < size && element + elements > 0)
          fail(w, i, "a tensor whose rows are no multiple of 16 bytes");
        size_t place = to + row * row_bytes + byte;
        if (map.swizzle == 128) place ^= (place >> 7 & 7) << 4;
        copy.to.push_back(resolve_shared(w, i, place, 16));
        copy.from.push_back(all ? from + element * map.element_bytes : nullptr);
        if (all) check_global(w, i, copy.from.back(), 16);
      }
    }
    begin_bulk(w, i, std::move(copy));
  });
}

void check_bulk(Warp& w, const Instruction& i, uint64_t global, uint32_t shared, uint32_t bytes) {
  if (bytes % 16 != 0 || global % 16 != 0 || shared % 16 != 0)
    fail(w, i, fmt::format("a bulk copy of {} bytes between {:#x} and {} of shared memory", bytes, global, shared));
  check_global(w, i, reinterpret_cast<const void*>(global), bytes);
}
void copy_bulk(Warp& w, const Instruction& i) {
  each_lane(w.active, [&](int l) {
    const uint32_t to = w.at<uint32_t>(i.a)[l], bytes = w.at<uint32_t>(i.c)[l];
    const uint64_t from = w.at<uint64_t>(i.b)[l];
    check_bulk(w, i, from, to, bytes);
    begin_bulk(w, i,
               {w.at<uint32_t>(i.e)[l],
                {resolve_shared(w, i, to, bytes)},
                {reinterpret_cast<const unsigned char*>(from)},
                bytes});
  });
}
void store_bulk(Warp& w, const Instruction& i) {
  each_lane(w.active, [&](int l) {
    const uint64_t to = w.at<uint64_t>(i.a)[l];
    const uint32_t from = w.at<uint32_t>(i.b)[l], bytes = w.at<uint32_t>(i.c)[l];
    check_bulk(w, i, to, from, bytes);
    open_group(w.stores).push_back(
        {reinterpret_cast<unsigned char*>(to), resolve_shared(w, i, from, bytes), bytes, i.extra != 0, {}});
  });
}

bool translate_barrier(Translator& t, const Statement& s, Instruction& i) {
  if (s.has("init")) {
    i.run = init_barrier;
    i.a = plain_address(t, s.operands[0], kSharedBits);
    i.b = t.value(s.operands[1], 32);
  } else if (s.has("arrive")) {
    // One arrival; its state is not returned.
    const size_t operands = s.has("expect_tx") ? 3 : 2;
    if (s.operands.size() != operands || s.operands[0].kind != Operand::Kind::none) return false;
    i.run = arrive_at_barrier;
    i.a = plain_address(t, s.operands[1], kSharedBits);
    if (s.has("expect_tx")) i.b = t.value(s.operands[2], 32);
  } else if (s.has("expect_tx")) {
    i.run = expect_bytes;
    i.a = plain_address(t, s.operands[0], kSharedBits);
    i.b = t.value(s.operands[1], 32);
  } else if (s.has("parity")) {
    i.run = try_wait;
    i.d = t.predicate(s.operands[0]);
    i.a = plain_address(t, s.operands[1], kSharedBits);
    i.b = t.value(s.operands[2], 32);
  }
  return i.run != nullptr;
}

bool translate_bulk(Translator& t, const Statement& s, Instruction& i) {
  // To the shared memory of this block, with an arrival at a barrier of it; or from there, in a group.
  const bool loads = s.has("mbarrier::complete_tx::bytes") && s.has("shared::cluster");
  const bool stores = s.has("bulk_group") && s.has("shared::cta");
  const bool adds = s.has("reduce");
  if (s.has("commit_group")) {
    i.run = [](Warp& w, const Instruction&) {
      open_group(w.stores);
      w.stores.emplace_back();
    };
  } else if (s.has("wait_group")) {
    i.extra = number_of(s.operands.at(0));
    i.run = s.has("read") ? Handler([](Warp& w, const Instruction& n) { wait_for_sources(w.stores, n.extra); })
                          : Handler([](Warp& w, const Instruction& n) { wait_for(w.stores, n.extra); });
  } else if (s.has("tensor") && loads && !adds) {
    i.run = copy_tensor;
    i.a = plain_address(t, s.operands[0], kSharedBits);
    Operand map = s.operands[1];
    map.parts.clear();
    i.b = plain_address(t, map, kGlobalBits);
    i.c = plain_address(t, s.operands[2], kSharedBits);
    for (const Operand& o : s.operands[1].parts) i.list.push_back(t.value(o, 32));
  } else if (!s.has("tensor") && stores && (!adds || (s.has("add") && s.modifiers.back() == "f32"))) {
    i.run = store_bulk;
    i.a = plain_address(t, s.operands[0], kGlobalBits);
    i.b = plain_address(t, s.operands[1], kSharedBits);
    i.c = t.value(s.operands[2], 32);
    i.extra = adds;
  } else if (!s.has("tensor") && loads && !adds) {
    i.run = copy_bulk;
    i.a = plain_address(t, s.operands[0], kSharedBits);
    i.b = plain_address(t, s.operands[1], kGlobalBits);
    i.c = t.value(s.operands[2], 32);
    i.e = plain_address(t, s.operands[3], kSharedBits);
  }
  return i.run != nullptr;
}

}  // namespace

void perform(const PendingStore& store) {
  const unsigned char* const from = store.read.empty() ? store.from : store.read.data();
  if (!store.add) {
    std::memcpy(store.to, from, store.bytes);
    return;
  }
  for (size_t n = 0; n < store.bytes; n += sizeof(float)) {
    float sum, x;
    std::memcpy(&sum, store.to + n, sizeof(sum));
    std::memcpy(&x, from + n, sizeof(x));
    sum += x;
    std::memcpy(store.to + n, &sum, sizeof(sum));
  }
}

bool translate_copy(Translator& t, const Statement& s, Instruction& i) {
  i.progress = !s.has("try_wait") && !s.has("test_wait");
  if (s.opcode == "mbarrier") return translate_barrier(t, s, i);
  if (s.opcode != "cp" || !s.has("async")) return false;
  if (s.has("bulk")) return translate_bulk(t, s, i);
  if (s.has("commit_group")) {
    i.run = [](Warp& w, const Instruction&) {
      open_group(w.copies);
      w.copies.emplace_back();
    };
  } else if (s.has("wait_group")) {
    i.extra = number_of(s.operands.at(0));
    i.run = [](Warp& w, const Instruction& n) { wait_for(w.copies, n.extra); };
  } else if (s.has("wait_all")) {
    i.run = [](Warp& w, const Instruction&) { perform_all(w.copies); };
  } else if (s.has("mbarrier")) {
    if (!s.has("noinc")) return false;
    i.a = plain_address(t, s.operands[0], kSharedBits);
    i.run = [](Warp& w, const Instruction& n) {
      perform_all(w.copies);
      each_lane(w.active, [&](int l) { arrive(w, n, w.at<uint32_t>(n.a)[l]); });
    };
  } else {
    const uint64_t bytes = number_of(s.operands.at(2));
    if (bytes != 16 && (!s.has("ca") || (bytes != 4 && bytes != 8))) return false;
    i.run = begin_copy;
    i.a = plain_address(t, s.operands[0], kSharedBits);
    i.b = plain_address(t, s.operands[1], kGlobalBits);
    i.bytes = static_cast<uint8_t>(bytes);
    if (s.operands.size() > 3) i.c = t.value(s.operands[3], 32);
  }
  return true;
}

}  // namespace furious::emulator
