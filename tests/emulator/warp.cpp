// Branches, barriers, and operations between the lanes of a warp.
#include <fmt/format.h>

#include <algorithm>

#include "emulator/machine.h"

namespace furious::emulator {
namespace {

void branch(Warp& w, const Instruction& i) {
  const uint32_t stay = w.mask & ~w.active;
  if (stay == 0) {
    w.pc = i.target;
    return;
  }
  w.others.push_back({i.target, w.active, false});
  w.mask = stay;
}

void leave(Warp& w, const Instruction&) {
  w.alive &= ~w.active;
  w.mask &= ~w.active;
}

// f() for each member mask among the active lanes, once its lanes have converged; they alone are active meanwhile.
template <class F>
void for_members(Warp& w, const Instruction& i, F&& f) {
  const uint32_t* const named = w.at<uint32_t>(i.e);
  const uint32_t all = w.active;
  if (all == kAllLanes && std::count(named, named + kLanes, kAllLanes) == kLanes) return f();
  for (uint32_t rest = all; rest != 0;) {
    const int first = std::countr_zero(rest);
    const uint32_t members = named[first];
    if (!w.converged(members)) return;
    each_lane(rest, [&](int l) {
      const bool is_member = (members >> l & 1) != 0;
      if (is_member != (named[l] == members) || (named[l] >> l & 1) == 0)
        fail(w, i,
             fmt::format("lane {} takes part among lanes {:#x}, lane {} among {:#x}", first, members, l, named[l]));
    });
    rest &= ~members;
  }
  for (uint32_t rest = all; rest != 0;) {
    w.active = named[std::countr_zero(rest)] & rest;
    rest &= ~w.active;
    f();
  }
  w.active = all;
}

template <int kMode>  // up, down, bfly, idx
void shuffle_members(Warp& w, const Instruction& i) {
  const uint32_t *a = w.at<uint32_t>(i.a), *b = w.at<uint32_t>(i.b), *c = w.at<uint32_t>(i.c);
  int from[kLanes];
  bool valid[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int by = static_cast<int>(b[l] & 31), clamp = static_cast<int>(c[l] & 31);
    const int segment = static_cast<int>(c[l] >> 8 & 31), least = l & segment, most = least | (clamp & ~segment);
    const int source = kMode == 0 ? l - by : kMode == 1 ? l + by : kMode == 2 ? l ^ by : least | (by & ~segment);
    valid[l] = kMode == 0 ? source >= most : source <= most;
    from[l] = (valid[l] ? source : l) & 31;
  }
  uint32_t result[kLanes];
  // What a lane that does not take part would give is not defined.
  for (int l = 0; l < kLanes; ++l) result[l] = w.active >> from[l] & 1 ? a[from[l]] : 0x7FBADBAD;
  for_lanes<uint32_t>(w, i.d, [&](int l) { return result[l]; });
  if (i.list.empty()) return;
  uint32_t inside = 0;
  for (int l = 0; l < kLanes; ++l) inside |= uint32_t{valid[l]} << l;
  w.predicate(i.list[0]) = (w.predicate(i.list[0]) & ~w.active) | (inside & w.active);
}

template <int kMode>
void shuffle(Warp& w, const Instruction& i) {
  for_members(w, i, [&] { shuffle_members<kMode>(w, i); });
}

bool translate_shuffle(Translator& t, const Statement& s, Instruction& i) {
  if (s.operands.size() != 5) return false;  // without the lanes that take part
  i.run = s.has("up") ? shuffle<0> : s.has("down") ? shuffle<1> : s.has("bfly") ? shuffle<2> : shuffle<3>;
  const Operand& to = s.operands[0];
  if (to.kind == Operand::Kind::vector) {
    i.d = t.value(to.parts[0], 32);
    i.list = {t.predicate(to.parts[1])};
  } else {
    i.d = t.value(to, 32);
  }
  i.a = t.value(s.operands[1], 32);
  i.b = t.value(s.operands[2], 32);
  i.c = t.value(s.operands[3], 32);
  i.e = t.value(s.operands[4], 32);
  return true;
}

template <int kMode>  // ballot, any, all
void vote(Warp& w, const Instruction& i) {
  const uint32_t p = i.extra ? ~w.predicate(i.a) : w.predicate(i.a);
  for_members(w, i, [&] {
    const uint32_t holds = p & w.active;
    if (kMode == 0) {
      for_lanes<uint32_t>(w, i.d, [=](int) { return holds; });
      return;
    }
    const bool result = kMode == 1 ? holds != 0 : holds == w.active;
    w.predicate(i.d) = (w.predicate(i.d) & ~w.active) | (result ? w.active : 0);
  });
}

template <class T, auto kOp>
void reduce(Warp& w, const Instruction& i) {
  for_members(w, i, [&] {
    const T* const a = w.at<T>(i.a);
    T result = a[std::countr_zero(w.active)];
    each_lane(w.active & (w.active - 1), [&](int l) { result = static_cast<T>(kOp(result, a[l])); });
    for_lanes<T>(w, i.d, [=](int) { return result; });
  });
}
template <class T>
Handler reduction(const Statement& s) {
  if (s.has("add")) return reduce<T, [](T a, T b) { return static_cast<uint32_t>(a) + static_cast<uint32_t>(b); }>;
  if (s.has("min")) return reduce<T, [](T a, T b) { return std::min(a, b); }>;
  if (s.has("max")) return reduce<T, [](T a, T b) { return std::max(a, b); }>;
  if (s.has("and")) return reduce<T, [](T a, T b) { return a & b; }>;
  if (s.has("or")) return reduce<T, [](T a, T b) { return a | b; }>;
  if (s.has("xor")) return reduce<T, [](T a, T b) { return a ^ b; }>;
  return nullptr;
}

// In extra: how bar.red reduces the predicates of the threads.
enum Reduction : uint8_t { kNone, kCount, kAnd, kOr };

void barrier(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  const int lane = std::countr_zero(w.active);
  const uint32_t id = w.at<uint32_t>(i.a)[lane], expected = i.b != 0 ? w.at<uint32_t>(i.b)[lane] : 0;
  if (id >= std::size(w.block->barriers)) fail(w, i, fmt::format("there is no barrier {}", id));
  NamedBarrier& b = w.block->barriers[id];
  if (expected % kLanes != 0 || (b.arrived > 0 && b.expected != static_cast<int>(expected)))
    fail(w, i, fmt::format("barrier {} of {} threads, others expect {}", id, expected, b.expected));
  if (i.extra != kNone) {
    const uint32_t p = (i.list[0] ? ~w.predicate(i.c) : w.predicate(i.c)) & w.active;
    b.count += std::popcount(p);
    b.any = b.any || p != 0;
    b.all = b.all && p == w.active;
  }
  w.red_kind = static_cast<int>(i.extra);
  w.red_result = i.d;
  w.block->arrive(w, static_cast<int>(id), static_cast<int>(expected), i.waits);
}

// The barrier of a cluster is complete once all of its warps have arrived, but for those that have exited.
void complete_cluster(Block& block) {
  uint64_t& phase = block.cluster[0]->cluster_phase;
  const auto arrived = [&](const Warp& w) {
    return w.state == State::done || (w.cluster_arrived && w.cluster_phase == phase);
  };
  for (const Block* const b : block.cluster)
    if (!std::all_of(b->warps.begin(), b->warps.end(), arrived)) return;
  ++phase;
}
void arrive_at_cluster(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  if (w.cluster_arrived) fail(w, i, "arrives twice at the barrier of its cluster without a wait");
  w.cluster_arrived = true;
  w.cluster_phase = w.block->cluster[0]->cluster_phase;
  complete_cluster(*w.block);
}
void wait_for_cluster(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  if (!w.cluster_arrived) fail(w, i, "waits at the barrier of its cluster without a new arrival");
  w.repeats = w.block->cluster[0]->cluster_phase == w.cluster_phase;
  w.cluster_arrived = w.repeats;
}

bool translate_bar(Translator& t, const Statement& s, Instruction& i) {
  if (s.has("cluster")) {
    i.run = s.has("arrive") ? arrive_at_cluster : wait_for_cluster;
    return true;
  }
  if (s.has("warp")) {
    i.run = [](Warp& w, const Instruction& n) { for_members(w, n, [] {}); };
    i.e = t.value(s.operands[0], 32);
    return true;
  }
  if (!s.has("sync") && !s.has("arrive") && !s.has("red")) return false;
  i.run = barrier;
  i.waits = !s.has("arrive");
  i.progress = true;
  size_t next = 0;
  if (s.has("red")) {
    i.extra = s.has("popc") ? kCount : s.has("and") ? kAnd : kOr;
    i.d = i.extra == kCount ? t.value(s.operands[0], 32) : t.predicate(s.operands[0]);
    const Operand& p = s.operands.back();
    i.c = t.predicate_or_opposite(p);
    i.list = {p.negated};
    next = 1;
  }
  const size_t end = s.operands.size() - (s.has("red") ? 1 : 0);
  i.a = t.value(s.operands[next], 32);
  if (next + 1 < end) i.b = t.value(s.operands[next + 1], 32);
  return true;
}

void sleep(Warp& w, const Instruction&) {
  w.yields = true;
}

}  // namespace

void Block::arrive(Warp& warp, int id, int expected, bool waits) {
  NamedBarrier& b = barriers[id];
  b.arrived += kLanes;
  b.expected = expected;
  if (waits) {
    b.waiting.push_back(&warp);
    warp.state = State::at_barrier;
  }
  release_if_complete(id);
}

void Block::release_if_complete(int id) {
  NamedBarrier& b = barriers[id];
  const int expected = b.expected > 0 ? b.expected : running * kLanes;
  if (b.arrived == 0 || b.arrived < expected) return;
  for (Warp* const w : b.waiting) {
    w->state = State::ready;
    if (w->red_kind == kCount)
      std::fill_n(w->at<uint32_t>(w->red_result), kLanes, static_cast<uint32_t>(b.count));
    else if (w->red_kind != kNone)
      w->predicate(w->red_result) = (w->red_kind == kAnd ? b.all : b.any) ? kAllLanes : 0;
  }
  b = NamedBarrier();
}

void Block::finish(Warp& warp) {
  warp.state = State::done;
  --running;
  if (running > 0)
    for (int id = 0; id < 16; ++id)
      if (barriers[id].expected == 0) release_if_complete(id);
  complete_cluster(*this);
}

bool translate_warp(Translator& t, const Statement& s, Instruction& i) {
  const std::string& op = s.opcode;
  if (op == "bra") {
    i.run = branch;
    i.target = s.target;
    return true;
  }
  if (op == "ret" || op == "exit") {
    i.run = leave;
    return true;
  }
  if (op == "nanosleep") {
    i.run = sleep;
    return true;
  }
  if (op == "trap") {
    i.run = [](Warp& w, const Instruction& n) { fail(w, n, "trap"); };
    return true;
  }
  if (op == "bar" || op == "barrier") return translate_bar(t, s, i);
  if (op == "shfl") return translate_shuffle(t, s, i);
  if (op == "activemask") {
    i.d = t.value(s.operands[0], 32);
    i.run = [](Warp& w, const Instruction& n) { for_lanes<uint32_t>(w, n.d, [&](int) { return w.active; }); };
    return true;
  }
  if (op == "vote" && s.operands.size() == 3) {
    const bool ballot = s.has("ballot");
    i.run = ballot ? vote<0> : s.has("any") ? vote<1> : s.has("all") ? vote<2> : nullptr;
    i.d = ballot ? t.value(s.operands[0], 32) : t.predicate(s.operands[0]);
    i.a = t.predicate_or_opposite(s.operands[1]);
    i.extra = s.operands[1].negated;
    i.e = t.value(s.operands[2], 32);
    return i.run != nullptr;
  }
  if (op == "redux") {
    const std::string& type = s.modifiers.back();
    i.run = type == "s32" ? reduction<int32_t>(s) : type == "u32" || type == "b32" ? reduction<uint32_t>(s) : nullptr;
    i.d = t.value(s.operands[0], 32);
    i.a = t.value(s.operands[1], 32);
    i.e = t.value(s.operands[2], 32);
    return i.run != nullptr;
  }
  return false;
}

}  // namespace furious::emulator
