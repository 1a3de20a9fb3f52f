// Loads, stores, atomics and addresses.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <type_traits>

#include "emulator/machine.h"

namespace furious::emulator {
namespace {

// Never destroyed, like all that the end of a tensor with static lifetime needs.
std::map<uintptr_t, size_t>& allocations() {
  static auto& all = *new std::map<uintptr_t, size_t>;
  return all;
}
uintptr_t known_begin = 0;  // the allocation that was used last
size_t known_bytes = 0;

// Whether [begin, begin + bytes) lies in [first, first + size); none of the sums may wrap around.
bool within(uintptr_t begin, size_t bytes, uintptr_t first, size_t size) {
  return begin >= first && bytes <= size && begin - first <= size - bytes;
}

bool inside(uintptr_t begin, size_t bytes) {
  if (within(begin, bytes, known_begin, known_bytes)) return true;
  const auto next = allocations().upper_bound(begin);
  if (next == allocations().begin()) return false;
  const auto& [first, size] = *std::prev(next);
  if (!within(begin, bytes, first, size)) return false;
  known_begin = first;
  known_bytes = size;
  return true;
}

template <class Memory, class Register>
void load(Warp& w, const Instruction& i) {
  unsigned char* address[kLanes];
  resolve(w, i, i.a, sizeof(Memory) * i.count, address);
  for (int n = 0; n < i.count; ++n)
    for_lanes<Register>(w, i.list[static_cast<size_t>(n)], [&](int l) {
      Memory x;
      std::memcpy(&x, address[l] + static_cast<size_t>(n) * sizeof(Memory), sizeof(x));
      return static_cast<Register>(x);
    });
}
template <class Memory, class Register>
void store(Warp& w, const Instruction& i) {
  unsigned char* address[kLanes];
  resolve(w, i, i.a, sizeof(Memory) * i.count, address);
  for (int n = 0; n < i.count; ++n) {
    const Register* const from = w.at<Register>(i.list[static_cast<size_t>(n)]);
    each_lane(w.active, [&](int l) {
      const auto x = static_cast<Memory>(from[l]);
      std::memcpy(address[l] + static_cast<size_t>(n) * sizeof(Memory), &x, sizeof(x));
    });
  }
}

template <class Memory>
Handler access(int bits, bool writes) {
  switch (bits) {
    case 16:
      return writes ? Handler(store<Memory, uint16_t>) : Handler(load<Memory, uint16_t>);
    case 32:
      return writes ? Handler(store<Memory, uint32_t>) : Handler(load<Memory, uint32_t>);
    default:
      return writes ? Handler(store<Memory, uint64_t>) : Handler(load<Memory, uint64_t>);
  }
}
Handler access(const std::string& type, int bits, bool writes) {
  const int size = std::stoi(type.substr(type.find_first_of("0123456789")));
  if (type == "s8") return access<int8_t>(bits, writes);
  if (type == "s16") return access<int16_t>(bits, writes);
  if (type == "s32") return access<int32_t>(bits, writes);
  if (size == 8) return access<uint8_t>(bits, writes);
  if (size == 16) return access<uint16_t>(bits, writes);
  if (size == 32) return access<uint32_t>(bits, writes);
  return access<uint64_t>(bits, writes);
}

bool translate_access(Translator& t, const Statement& s, Instruction& i) {
  const bool writes = s.opcode == "st";
  const std::string& type = s.modifiers.back();
  t.address(s, s.operands[writes ? 0 : 1], i);
  const Operand& values = s.operands[writes ? 1 : 0];
  const bool vector = values.kind == Operand::Kind::vector;
  const std::vector<Operand> all = vector ? values.parts : std::vector<Operand>{values};
  if (all.size() != (s.has("v2") ? 2u : s.has("v4") ? 4u : 1u)) return false;
  const int size = std::stoi(type.substr(type.find_first_of("0123456789")));
  int bits = size < 16 ? 16 : size;
  for (const Operand& o : all)
    if (o.kind == Operand::Kind::reg) bits = t.bits_of(o);
  for (const Operand& o : all) i.list.push_back(o.kind == Operand::Kind::none ? t.sink(bits) : t.value(o, bits));
  i.count = static_cast<uint8_t>(all.size());
  i.bytes = static_cast<uint8_t>(size / 8);
  i.progress = writes;
  i.run = access(type, bits, writes);
  if (!writes && (s.has("volatile") || s.has("acquire") || s.has("relaxed"))) {
    i.extra = reinterpret_cast<uint64_t>(i.run);
    i.run = [](Warp& w, const Instruction& n) {
      reinterpret_cast<Handler>(n.extra)(w, n);
      w.yields = true;
    };
  }
  return true;
}

template <class T, auto kOp>
void atomic(Warp& w, const Instruction& i) {
  unsigned char* address[kLanes];
  resolve(w, i, i.a, sizeof(T), address);
  const T *b = w.at<T>(i.b), *c = w.at<T>(i.c);
  each_lane(w.active, [&](int l) {
    T old;
    std::memcpy(&old, address[l], sizeof(T));
    const T changed = kOp(old, b[l], c[l]);
    std::memcpy(address[l], &changed, sizeof(T));
    if (i.d != 0) w.at<T>(i.d)[l] = old;
  });
}
// Of integers it wraps around.
template <class T>
T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
  else
    return a + b;
}
template <class T>
Handler atomic_handler(const Statement& s) {
  if (s.has("add")) return atomic<T, [](T old, T b, T) { return sum(old, b); }>;
  if constexpr (std::is_integral_v<T>) {
    if (s.has("exch")) return atomic<T, [](T, T b, T) { return b; }>;
    if (s.has("cas")) return atomic<T, [](T old, T b, T c) { return old == b ? c : old; }>;
    if (s.has("max")) return atomic<T, [](T old, T b, T) { return old < b ? b : old; }>;
    if (s.has("min")) return atomic<T, [](T old, T b, T) { return old < b ? old : b; }>;
    if (s.has("and")) return atomic<T, [](T old, T b, T) { return static_cast<T>(old & b); }>;
    if (s.has("or")) return atomic<T, [](T old, T b, T) { return static_cast<T>(old | b); }>;
    if (s.has("inc")) return atomic<T, [](T old, T b, T) { return old >= b ? T{0} : static_cast<T>(old + 1); }>;
  }
  return nullptr;
}

bool translate_atomic(Translator& t, const Statement& s, Instruction& i) {
  const std::string& type = s.modifiers.back();
  i.run = type == "u32" || type == "b32"   ? atomic_handler<uint32_t>(s)
          : type == "s32"                  ? atomic_handler<int32_t>(s)
          : type == "u64" || type == "b64" ? atomic_handler<uint64_t>(s)
          : type == "f32"                  ? atomic_handler<float>(s)
          : type == "f64"                  ? atomic_handler<double>(s)
                                           : nullptr;
  if (!i.run) return false;
  const size_t first = s.opcode == "red" ? 0 : 1;
  const int bits = std::stoi(type.substr(1));
  if (first == 1 && s.operands[0].kind == Operand::Kind::reg) i.d = t.value(s.operands[0], bits);
  t.address(s, s.operands[first], i);
  i.b = t.value(s.operands[first + 1], bits);
  i.c = s.operands.size() > first + 2 ? t.value(s.operands[first + 2], bits) : i.b;
  return true;
}

bool translate_cvta(Translator& t, const Statement& s, Instruction& i) {
  i.d = t.value(s.operands[0], 64);
  i.a = t.value(s.operands[1], 64);
  const bool to = s.has("to");
  if (s.has("shared") || s.has("shared::cta"))
    i.run = to ? Handler([](Warp& w, const Instruction& n) {
      const uint64_t* const a = w.at<uint64_t>(n.a);
      const auto base = reinterpret_cast<uint64_t>(w.block->shared);
      for_lanes<uint64_t>(w, n.d, [=](int l) { return a[l] - base; });
    })
               : Handler([](Warp& w, const Instruction& n) {
                   const uint64_t* const a = w.at<uint64_t>(n.a);
                   const auto base = reinterpret_cast<uint64_t>(w.block->shared);
                   for_lanes<uint64_t>(w, n.d, [=](int l) { return a[l] + base; });
                 });
  else if (s.has("local"))
    i.run = to ? Handler([](Warp& w, const Instruction& n) {
      const uint64_t* const a = w.at<uint64_t>(n.a);
      const auto base = reinterpret_cast<uint64_t>(w.local.data());
      const uint64_t each = w.local.size() / kLanes;
      for_lanes<uint64_t>(w, n.d, [=](int l) { return a[l] - base - each * static_cast<uint64_t>(l); });
    })
               : Handler([](Warp& w, const Instruction& n) {
                   const uint64_t* const a = w.at<uint64_t>(n.a);
                   const auto base = reinterpret_cast<uint64_t>(w.local.data());
                   const uint64_t each = w.local.size() / kLanes;
                   for_lanes<uint64_t>(w, n.d, [=](int l) { return a[l] + base + each * static_cast<uint64_t>(l); });
                 });
  else
    i.run = [](Warp& w, const Instruction& n) {
      const uint64_t* const a = w.at<uint64_t>(n.a);
      for_lanes<uint64_t>(w, n.d, [=](int l) { return a[l]; });
    };
  return true;
}

// The address of the same variable in the shared memory of another block of the cluster. nvcc also moves mapa before
// the branch that decides whether there is such a block: without one, the address is in no allocation.
void map_address(Warp& w, const Instruction& i) {
  const uint64_t* const a = w.at<uint64_t>(i.a);
  const uint32_t* const rank = w.at<uint32_t>(i.b);
  const std::vector<Block*>& cluster = w.block->cluster;
  const auto own = reinterpret_cast<uint64_t>(w.block->shared);
  for_lanes<uint64_t>(w, i.d, [&](int l) {
    return a[l] - own + (rank[l] < cluster.size() ? reinterpret_cast<uint64_t>(cluster[rank[l]]->shared) : 0);
  });
}

void nothing(Warp&, const Instruction&) {}

}  // namespace

void add_memory(const void* begin, size_t bytes) {
  allocations()[reinterpret_cast<uintptr_t>(begin)] = bytes;
}
void remove_memory(const void* begin) {
  allocations().erase(reinterpret_cast<uintptr_t>(begin));
  known_begin = known_bytes = 0;
}

size_t memory_count() {
  return allocations().size();
}

void check_global(Warp& w, const Instruction& i, const void* begin, size_t bytes) {
  if (inside(reinterpret_cast<uintptr_t>(begin), bytes)) return;
  fail(w, i, fmt::format("{} bytes at {} are in no allocation", bytes, begin));
}

unsigned char* resolve_shared(Warp& w, const Instruction& i, uint64_t address, size_t bytes) {
  if (!within(address, bytes, 0, w.block->shared_bytes))
    fail(w, i, fmt::format("{} bytes at {} of shared memory, which has {}", bytes, address, w.block->shared_bytes));
  if (address % std::clamp<size_t>(bytes, 1, 16) != 0)
    fail(w, i, fmt::format("misaligned: {} bytes at {} of shared memory", bytes, address));
  return w.block->shared + address;
}

// The addresses of all lanes at once, which is most of what a kernel does; false if they need a closer look.
template <class Address>
bool resolve_warp(Warp& w, const Instruction& i, const Address* from, size_t bytes, unsigned char* (&address)[kLanes]) {
  const bool is_shared = i.space == Space::shared;
  const auto offset = static_cast<uint64_t>(i.offset);
  const uint64_t wrapped = is_shared && sizeof(Address) == 4 ? UINT32_MAX : UINT64_MAX;
  uint64_t value[kLanes], low = UINT64_MAX, high = 0, all = 0;
  for (int l = 0; l < kLanes; ++l) value[l] = (from[l] + offset) & wrapped;
  for (int l = 0; l < kLanes; ++l) {
    low = std::min(low, value[l]);
    high = std::max(high, value[l]);
    all |= value[l];
  }
  if ((all & (bytes - 1)) != 0) return false;
  const uint64_t span = high - low + bytes;
  if (is_shared ? !within(low, span, 0, w.block->shared_bytes) : !inside(low, span)) return false;
  const auto base = is_shared ? reinterpret_cast<uint64_t>(w.block->shared) : 0;
  for (int l = 0; l < kLanes; ++l) address[l] = reinterpret_cast<unsigned char*>(base + value[l]);
  return true;
}

void resolve(Warp& w, const Instruction& i, uint32_t base, size_t bytes, unsigned char* (&address)[kLanes]) {
  if (w.active == kAllLanes && i.space != Space::local) {
    if (i.wide ? resolve_warp(w, i, w.at<uint64_t>(base), bytes, address)
               : resolve_warp(w, i, w.at<uint32_t>(base), bytes, address))
      return;
  }
  const uint64_t* const wide = w.at<uint64_t>(base);
  const uint32_t* const narrow = w.at<uint32_t>(base);
  each_lane(w.active, [&](int l) {
    const uint64_t value = (i.wide ? wide[l] : narrow[l]) + static_cast<uint64_t>(i.offset);
    if (i.space == Space::shared) {
      address[l] = resolve_shared(w, i, i.wide ? value : static_cast<uint32_t>(value), bytes);
      return;
    }
    if (i.space == Space::local) {
      const size_t each = w.local.size() / kLanes;
      if (!within(value, bytes, 0, each) || value % bytes != 0)
        fail(w, i, fmt::format("{} bytes at {} of local memory, which has {}", bytes, value, each));
      address[l] = w.local.data() + each * static_cast<size_t>(l) + value;
      return;
    }
    if (value % bytes != 0) fail(w, i, fmt::format("misaligned: {} bytes at {:#x}", bytes, value));
    if (!inside(value, bytes))
      fail(w, i, fmt::format("lane {}: {} bytes at {:#x} are in no allocation", l, bytes, value));
    address[l] = reinterpret_cast<unsigned char*>(value);
  });
}

bool translate_memory(Translator& t, const Statement& s, Instruction& i) {
  const std::string& op = s.opcode;
  if (op == "ld" || op == "st") return translate_access(t, s, i);
  if (op == "atom" || op == "red") return translate_atomic(t, s, i);
  if (op == "cvta") return translate_cvta(t, s, i);
  if (op == "mapa" && s.has("u64")) {
    i.d = t.value(s.operands[0], 64);
    i.a = t.value(s.operands[1], 64);
    i.b = t.value(s.operands[2], 32);
    i.run = map_address;
    return true;
  }
  if (has_no_effect(op)) {
    i.run = nothing;
    return true;
  }
  return false;
}

}  // namespace furious::emulator
