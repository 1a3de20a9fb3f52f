// What executes a kernel: warps with their registers, blocks with their shared memory and barriers, and instructions.
#pragma once

#include <bit>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/ptx.h"

namespace furious::emulator {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct Block;
struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

enum class Space : uint8_t { global, shared, local };

// Registers are arrays over the lanes of a warp in its register file; operands are byte offsets into it, of constants
// too. A predicate is a mask.
struct Instruction {
  Handler run = nullptr;
  uint32_t d = 0, a = 0, b = 0, c = 0, e = 0;
  int32_t guard = -1;  // offset of a predicate
  bool guard_negated = false;
  bool waits = false;           // of an arrival at a barrier of the block: bar.sync and bar.red
  bool progress = false;        // a loop that executes it is not one that only waits
  Space space = Space::global;  // of an address
  uint8_t wide = 0;             // whether the register of an address has 64 bits
  uint8_t count = 1;            // elements of a vector
  uint8_t bytes = 0;            // of an element
  int32_t target = -1;          // of a branch
  int64_t offset = 0;           // of an address
  uint64_t extra = 0;           // depends on the handler
  std::vector<uint32_t> list;   // further operands
  int line = 0;
};

struct Kernel {
  Module* module = nullptr;
  size_t begin = 0;
  bool parsed = false;
  Function function;
  KernelFacts facts;
  std::vector<Instruction> code;
  std::vector<unsigned char> file;  // registers as they are when a warp starts: constants have their values
  struct Special {
    std::string name;
    uint32_t offset;
    int bits;
  };
  std::vector<Special> specials;
  std::vector<unsigned char> parameters;  // where kernels read them; of the launch that runs
  size_t dynamic_shared = 0;              // where dynamic shared memory begins, behind the static one
  std::vector<std::vector<unsigned char>> spare_files, spare_memory;  // of blocks of the launch that runs
};

// Copies that a warp has begun and not yet waited for.
struct PendingCopy {
  uint32_t lanes;
  int bytes;
  unsigned char* to[kLanes];
  const unsigned char* from[kLanes];  // nullptr: zeros
  uint8_t valid[kLanes];              // bytes that are copied; the rest becomes zeros
};
struct PendingStore {
  unsigned char* to;
  const unsigned char* from;
  size_t bytes;
  bool add;                         // of f32
  std::vector<unsigned char> read;  // the source as it was when it had to be read
};
// A bulk copy into shared memory, performed at a wait for the mbarrier whose tx-count it decreases.
struct BulkCopy {
  uint32_t barrier;  // address of the mbarrier
  std::vector<unsigned char*> to;
  std::vector<const unsigned char*> from;  // nullptr: zeros
  size_t piece;                            // bytes of each
};

// Converged lanes: those with the same PC.
struct Group {
  int pc;
  uint32_t lanes;
  bool blocked;  // waits for other lanes
};

enum class State : uint8_t { ready, at_barrier, done };

struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::vector<unsigned char> file;
  std::vector<unsigned char> local;  // of the lanes, one after another
  int pc = 0;
  uint32_t mask = 0;    // lanes of the current group
  uint32_t active = 0;  // those of them that execute the instruction
  uint32_t alive = 0;
  std::vector<Group> others;
  State state = State::ready;
  bool waits = false;            // set by a handler: repeat the instruction when more lanes have reached it
  bool yields = false;           // set by a handler: other warps should run
  bool repeats = false;          // the same, and the instruction is to be repeated
  uint64_t cluster_phase = 0;    // of the cluster's barrier when the warp arrived
  bool cluster_arrived = false;  // has arrived at that barrier and not yet waited
  int free_run = 0;              // instructions before lanes further ahead have to wait again
  uint32_t red_result = 0;       // register that receives the result of a barrier
  int red_kind = 0;
  std::vector<std::vector<PendingCopy>> copies;  // committed groups, then the open one
  std::vector<std::vector<PendingStore>> stores;

  template <class T>
  T* at(uint32_t offset) {
    return reinterpret_cast<T*>(file.data() + offset);
  }
  uint32_t& predicate(uint32_t offset) { return *at<uint32_t>(offset); }
  // Whether these lanes have converged at this instruction; otherwise the active ones wait for the others.
  bool converged(uint32_t lanes) {
    if ((active & lanes & alive) == (lanes & alive)) return true;
    waits = true;
    return false;
  }
};

struct NamedBarrier {
  int arrived = 0, expected = 0;  // threads; expected 0: all of the block
  int count = 0;                  // of threads whose predicate holds
  bool any = false, all = true;
  std::vector<Warp*> waiting;
};

struct Block {
  Block(Kernel& its_kernel, const Launch& its_launch, uint64_t number);
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();
  void start();  // once its cluster is known

  Kernel* kernel = nullptr;
  const Launch* launch = nullptr;
  Dim index;
  unsigned rank = 0;            // in its cluster
  std::vector<Block*> cluster;  // blocks of it by rank
  std::vector<unsigned char> shared_memory;
  unsigned char* shared = nullptr;  // aligned
  size_t shared_bytes = 0;
  std::set<uint32_t> mbarriers;  // addresses of those that have been initialised
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::deque<BulkCopy> bulk;
  int running = 0;
  uint64_t cluster_phase = 0;  // of the barrier of a cluster, at its first block

  void arrive(Warp& warp, int id, int expected, bool waits);
  void finish(Warp& warp);

 private:
  void release_if_complete(int id);
};

[[noreturn]] void fail(const Warp& warp, const Instruction& i, const std::string& message);

template <class F>
inline void each_lane(uint32_t lanes, F&& f) {
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) f(std::countr_zero(rest));
}

// f(lane) for the active lanes, its result to the register d.
template <class T, class F>
inline void for_lanes(Warp& w, uint32_t d, F&& f) {
  T* const out = w.at<T>(d);
  if (w.active == kAllLanes) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) out[l] = f(l);
    return;
  }
  each_lane(w.active, [&](int l) { out[l] = f(l); });
}

void perform(const PendingStore& store);

// Host addresses of `bytes` bytes of each active lane, checked.
void resolve(Warp& w, const Instruction& i, uint32_t base, size_t bytes, unsigned char* (&address)[kLanes]);
unsigned char* resolve_shared(Warp& w, const Instruction& i, uint64_t address, size_t bytes);
void check_global(Warp& w, const Instruction& i, const void* begin, size_t bytes);

// Makes instructions of statements.
class Translator {
 public:
  Translator(Kernel& kernel);
  std::vector<Instruction> translate();

  // Byte offset of a register, or of a constant with this many bits.
  uint32_t value(const Operand& operand, int bits);
  uint32_t predicate(const Operand& operand) { return value(operand, 1); }
  // The same where the handler knows what !p is.
  uint32_t predicate_or_opposite(Operand operand) {
    operand.negated = false;
    return predicate(operand);
  }
  int bits_of(const Operand& operand) const;
  void address(const Statement& s, const Operand& operand, Instruction& i);
  // Where a symbol lies in its space; sets what kind it is.
  uint64_t symbol(const std::string& name, Space& space) const;
  uint32_t sink(int bits);
  bool is_clock(const Operand& operand) const;

 private:
  uint32_t constant(uint64_t bits, int width);
  uint32_t allocate(int width);
  Kernel& kernel_;
  std::vector<int64_t> offsets_;                            // of registers
  std::map<std::pair<uint64_t, int>, uint32_t> constants_;  // by bits and width
};

// Whether the statement has only modifiers that its handler reads or that have no effect here.
bool knows_modifiers(const Statement& s);
// Of opcodes that concern caches, the order of memory operations or the number of registers, which are not emulated.
bool has_no_effect(std::string_view opcode);

// Each fills `i` and returns true if the statement is one of its own.
bool translate_arithmetic(Translator& t, const Statement& s, Instruction& i);
bool translate_conversion(Translator& t, const Statement& s, Instruction& i);
bool translate_memory(Translator& t, const Statement& s, Instruction& i);
bool translate_copy(Translator& t, const Statement& s, Instruction& i);
bool translate_tensor_core(Translator& t, const Statement& s, Instruction& i);
bool translate_warp(Translator& t, const Statement& s, Instruction& i);

}  // namespace furious::emulator
