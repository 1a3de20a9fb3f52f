// From statements to instructions, and how warps and blocks take turns.
#include "emulator/machine.h"

#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <unordered_map>

namespace furious::emulator {
namespace {

constexpr int kTurn = 4096;             // instructions of a warp before the next one runs
constexpr int kFreeRun = 256;           // instructions of lanes that another group of their warp waited for
constexpr int kBlocksAtOnce = 8;        // unless all of a launch must be
constexpr int64_t kMostIdle = 1 << 22;  // instructions of each warp of a launch without a store, copy or barrier

struct Registry {
  std::list<Module> modules;
  std::unordered_map<std::string, Kernel> kernels;
};
Registry& registry() {
  static Registry& only = []() -> Registry& {
    // The memory of blocks stays with the process: to get it from the system anew takes longer than many a launch.
    constexpr int kLarge = 1 << 30;
    mallopt(M_MMAP_THRESHOLD, kLarge);
    mallopt(M_TRIM_THRESHOLD, kLarge);
    return *new Registry;  // never destroyed: kernels may run during exit
  }();
  return only;
}

void parse(Kernel& kernel) {
  if (kernel.parsed) return;
  scan_declarations(*kernel.module);
  kernel.function = parse_function(*kernel.module, kernel.begin);
  kernel.facts.max_threads = kernel.function.max_threads;
  kernel.facts.static_shared = kernel.function.shared_bytes;
  for (const Variable& p : kernel.function.parameters) kernel.facts.parameter_sizes.push_back(p.bytes);
  kernel.parsed = true;
}

void translate(Kernel& kernel) {
  parse(kernel);
  if (!kernel.code.empty()) return;
  if (kernel.parameters.empty()) {
    kernel.parameters.assign(kernel.function.parameter_bytes + 64, 0);
    add_memory(kernel.parameters.data(), kernel.parameters.size());
  }
  const size_t align = kernel.function.dynamic_align;
  kernel.dynamic_shared = (kernel.function.shared_bytes + align - 1) / align * align;
  kernel.file.clear();
  kernel.specials.clear();
  std::vector<Instruction> code = Translator(kernel).translate();
  // A warp does not look whether it is behind the last instruction.
  const std::vector<Statement>& all = kernel.function.statements;
  if (all.empty() || all.back().guard >= 0 || (all.back().opcode != "ret" && all.back().opcode != "exit"))
    throw std::runtime_error(kernel.function.name + ": its PTX does not end with ret");
  kernel.code = std::move(code);
}

// The place in `parameters` where a kernel reads them: as aligned as a tensor map wants to be.
unsigned char* parameter_base(Kernel& kernel) {
  const auto address = reinterpret_cast<uintptr_t>(kernel.parameters.data());
  return kernel.parameters.data() + (64 - address % 64) % 64;
}

uint32_t special_value(const Warp& w, const std::string& name, int lane) {
  const Block& b = *w.block;
  const Launch& launch = *b.launch;
  const unsigned thread = static_cast<unsigned>(w.index * kLanes + lane);
  const auto of = [&](const Dim& d) { return name.back() == 'x' ? d.x : name.back() == 'y' ? d.y : d.z; };
  const auto begins = [&](std::string_view prefix) { return name.compare(0, prefix.size(), prefix) == 0; };
  if (begins("%tid."))
    return of({thread % launch.block.x, thread / launch.block.x % launch.block.y,
               thread / (launch.block.x * launch.block.y)});
  if (begins("%ntid.")) return of(launch.block);
  if (begins("%ctaid.")) return of(b.index);
  if (begins("%nctaid.")) return of(launch.grid);
  if (name == "%laneid") return static_cast<uint32_t>(lane);
  if (name == "%warpid") return static_cast<uint32_t>(w.index);
  if (name == "%smid") return 0;
  if (name == "%lanemask_eq") return 1u << lane;
  if (name == "%lanemask_lt") return (1u << lane) - 1;
  if (name == "%lanemask_le") return (2u << lane) - 1;
  if (name == "%lanemask_gt") return ~((2u << lane) - 1);
  if (name == "%lanemask_ge") return ~((1u << lane) - 1);
  if (name == "%cluster_ctarank") return b.rank;
  if (name == "%cluster_nctarank") return static_cast<uint32_t>(b.cluster.size());
  if (begins("%clock") || begins("%globaltimer")) return 0;  // read by an instruction of its own
  throw std::runtime_error("PTX: unknown register " + name);
}

// Memory of blocks that have ended, for others of the same launch: that of the system would have to be cleared.
std::vector<unsigned char> taken_from(std::vector<std::vector<unsigned char>>& spare) {
  if (spare.empty()) return {};
  std::vector<unsigned char> taken = std::move(spare.back());
  spare.pop_back();
  return taken;
}

void start_warp(Warp& w, Block& block, int index, int threads) {
  Kernel& kernel = *block.kernel;
  w.block = &block;
  w.index = index;
  w.file = taken_from(kernel.spare_files);
  if (w.file.empty()) w.file = kernel.file;
  w.local.assign(kLanes * ((kernel.function.local_bytes + 15) / 16 * 16), 0xFF);
  if (!w.local.empty()) add_memory(w.local.data(), w.local.size());
  const int lanes = std::min(threads - index * kLanes, kLanes);
  w.alive = w.mask = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
  for (const Kernel::Special& s : kernel.specials) {
    const bool differs = s.name.starts_with("%tid.") || s.name.starts_with("%lane");  // from lane to lane
    uint32_t x = special_value(w, s.name, 0);
    for (int l = 0; l < kLanes; ++l) {
      if (differs) x = special_value(w, s.name, l);
      if (s.bits == 64)
        w.at<uint64_t>(s.offset)[l] = x;
      else
        w.at<uint32_t>(s.offset)[l] = x;
    }
  }
}

// Makes the group with the lowest PC that can run the current one. False if all wait for others.
bool choose_group(Warp& w) {
  // Groups at the same PC reconverge.
  for (size_t n = 0; n < w.others.size();) {
    bool joined = false;
    if (w.mask != 0 && w.others[n].pc == w.pc) {
      w.mask |= w.others[n].lanes;
      joined = true;
    }
    for (size_t m = 0; m < n && !joined; ++m)
      if (w.others[m].pc == w.others[n].pc) {
        w.others[m].lanes |= w.others[n].lanes;
        w.others[m].blocked = false;
        joined = true;
      }
    if (joined)
      w.others.erase(w.others.begin() + static_cast<ptrdiff_t>(n));
    else
      ++n;
  }
  if (w.mask != 0) w.others.push_back({w.pc, w.mask, false});
  w.mask = 0;
  auto best = w.others.end();
  for (auto g = w.others.begin(); g != w.others.end(); ++g)
    if (!g->blocked && (best == w.others.end() || g->pc < best->pc)) best = g;
  if (best == w.others.end()) return false;
  w.pc = best->pc;
  w.mask = best->lanes;
  w.others.erase(best);
  return true;
}

// The PC at which the current group has to wait for others: the lowest of those that can run.
int next_of_others(const Warp& w) {
  int least = INT32_MAX;
  for (const Group& g : w.others)
    if (!g.blocked) least = std::min(least, g.pc);
  return least;
}
bool others_at(const Warp& w, int pc) {
  return std::any_of(w.others.begin(), w.others.end(), [&](const Group& g) { return g.pc == pc; });
}

// After an instruction that waits for lanes of the warp that are elsewhere.
void wait_for_lanes(Warp& w, const Instruction& i) {
  w.others.push_back({w.pc, w.mask, true});
  w.mask = 0;
  if (!choose_group(w)) fail(w, i, fmt::format("lanes {:#x} wait for lanes that never come", w.others.front().lanes));
}

// Counts in `idle` the instructions since the last one that made progress.
void run_warp(Warp& w, int64_t& idle) {
  const std::vector<Instruction>& code = w.block->kernel->code;
  int next = next_of_others(w);
  for (int turn = 0; turn < kTurn; ++turn) {
    if (w.mask == 0 || (w.pc >= next && w.free_run <= 0) || (!w.others.empty() && others_at(w, w.pc))) {
      if (w.alive == 0) {
        w.block->finish(w);
        idle = 0;
        return;
      }
      if (!choose_group(w)) {
        // Lanes that the others waited for have exited.
        for (Group& g : w.others) g.blocked = false;
        choose_group(w);
      }
      next = next_of_others(w);
    }
    --w.free_run;
    const Instruction& i = code[static_cast<size_t>(w.pc)];
    w.active = w.mask;
    if (i.guard >= 0) {
      const uint32_t p = w.predicate(static_cast<uint32_t>(i.guard));
      w.active &= i.guard_negated ? ~p : p;
    }
    ++w.pc;
    ++idle;
    if (w.active == 0) continue;
    if (i.target >= 0) {  // a branch sets where to go on
      i.run(w, i);
      next = next_of_others(w);
      continue;
    }
    --w.pc;
    i.run(w, i);
    if (w.waits) {
      w.waits = false;
      wait_for_lanes(w, i);
      next = next_of_others(w);
      w.free_run = 0;
      continue;
    }
    if (w.repeats) {
      w.repeats = false;
      return;
    }
    ++w.pc;
    if (i.progress) idle = 0;
    if (w.state == State::at_barrier) return;
    if (w.yields) {
      w.yields = false;
      if (!w.others.empty()) {
        // Let the other lanes run for a while, whatever their PC is.
        const auto other = std::find_if(w.others.begin(), w.others.end(), [](const Group& g) { return !g.blocked; });
        if (other != w.others.end()) {
          const Group own{w.pc, w.mask, false};
          w.pc = other->pc;
          w.mask = other->lanes;
          *other = own;
          std::rotate(w.others.begin(), w.others.begin() + 1, w.others.end());
          w.free_run = kFreeRun;
          next = next_of_others(w);
        }
      }
      return;
    }
  }
}

// One turn for each warp; how many had one.
int run_turn(Block& block, int64_t& idle) {
  int count = 0;
  for (Warp& w : block.warps) {
    if (w.state != State::ready) continue;
    run_warp(w, idle);
    ++count;
  }
  return count;
}

// Of a block that has ended: a bulk copy that goes on would write or read the shared memory of another one. What it
// still has to write to global memory goes to `unwritten`.
void end_copies(Block& block, std::vector<PendingStore>& unwritten) {
  bool pending = !block.bulk.empty();
  for (Warp& w : block.warps)
    for (auto& group : w.stores)
      for (PendingStore& store : group) {
        pending = pending || store.read.empty();
        unwritten.push_back(std::move(store));
      }
  if (!pending) return;
  throw std::runtime_error(fmt::format("{}, block ({}, {}, {}) ends before its bulk copies",
                                       block.kernel->function.name, block.index.x, block.index.y, block.index.z));
}

std::string where(const Block& block) {
  std::string text = fmt::format("block ({}, {}, {}),", block.index.x, block.index.y, block.index.z);
  for (const Warp& w : block.warps)
    if (w.state != State::done)
      text += fmt::format(" warp {} at line {}{}", w.index,
                          block.kernel->code[std::min(static_cast<size_t>(w.pc), block.kernel->code.size() - 1)].line,
                          w.state == State::at_barrier ? " (barrier)" : "");
  return text;
}

}  // namespace

void fail(const Warp& warp, const Instruction& i, const std::string& message) {
  const Block& b = *warp.block;
  throw std::runtime_error(fmt::format("{}, block ({}, {}, {}), warp {}, line {} of its PTX: {}",
                                       b.kernel->function.name, b.index.x, b.index.y, b.index.z, warp.index, i.line,
                                       message));
}

Block::Block(Kernel& its_kernel, const Launch& its_launch, uint64_t number) : kernel(&its_kernel), launch(&its_launch) {
  const Dim &grid = launch->grid, &block = launch->block;
  index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
           static_cast<unsigned>(number / (uint64_t{grid.x} * grid.y))};
  shared_bytes =
      launch->dynamic_shared == 0 ? kernel->function.shared_bytes : kernel->dynamic_shared + launch->dynamic_shared;
  // Poisoned: reads before the first write give NaN.
  constexpr size_t kAlignment = 1024;
  shared_memory = taken_from(kernel->spare_memory);
  shared_memory.assign(shared_bytes + kAlignment, 0xFF);
  shared =
      shared_memory.data() + (kAlignment - reinterpret_cast<uintptr_t>(shared_memory.data()) % kAlignment) % kAlignment;
  add_memory(shared, shared_bytes);
  const unsigned threads = block.x * block.y * block.z;
  running = static_cast<int>((threads + kLanes - 1) / kLanes);
  warps.resize(static_cast<size_t>(running));
}

Block::~Block() {
  remove_memory(shared);
  kernel->spare_memory.push_back(std::move(shared_memory));
  for (Warp& w : warps) {
    if (!w.local.empty()) remove_memory(w.local.data());
    if (!w.file.empty()) kernel->spare_files.push_back(std::move(w.file));
  }
}

void Block::start() {
  const Dim& d = launch->block;
  for (size_t n = 0; n < warps.size(); ++n)
    start_warp(warps[n], *this, static_cast<int>(n), static_cast<int>(d.x * d.y * d.z));
}

Translator::Translator(Kernel& kernel) : kernel_(kernel), offsets_(kernel.function.registers.size(), -1) {
  allocate(64);  // offset 0 means that there is no operand
}

uint32_t Translator::allocate(int width) {
  if (width != 1 && width != 16 && width != 32 && width != 64)
    throw std::runtime_error(fmt::format("PTX: a register of {} bits is not emulated", width));
  const size_t offset = kernel_.file.size(), bytes = width == 1 ? 64 : static_cast<size_t>(width) / 8 * kLanes;
  kernel_.file.resize(offset + bytes, 0);
  return static_cast<uint32_t>(offset);
}

uint32_t Translator::sink(int bits) {
  return allocate(bits);
}

int Translator::bits_of(const Operand& operand) const {
  return kernel_.function.registers[static_cast<size_t>(operand.reg)].bits;
}

bool Translator::is_clock(const Operand& operand) const {
  const Register& r = kernel_.function.registers[static_cast<size_t>(operand.reg)];
  return r.special && (r.name.starts_with("%clock") || r.name.starts_with("%globaltimer"));
}

uint32_t Translator::constant(uint64_t bits, int width) {
  const auto [known, is_new] = constants_.try_emplace({bits, width}, 0);
  if (!is_new) return known->second;
  const uint32_t offset = known->second = allocate(width);
  unsigned char* const to = kernel_.file.data() + offset;
  if (width == 1) {
    const uint32_t mask = bits != 0 ? kAllLanes : 0;
    std::memcpy(to, &mask, sizeof(mask));
    return offset;
  }
  const size_t bytes = static_cast<size_t>(width) / 8;
  for (size_t l = 0; l < kLanes; ++l) std::memcpy(to + l * bytes, &bits, bytes);
  return offset;
}

uint64_t Translator::symbol(const std::string& name, Space& space) const {
  const Function& f = kernel_.function;
  const auto find = [&](const std::vector<Variable>& all) {
    return std::find_if(all.begin(), all.end(), [&](const Variable& v) { return v.name == name; });
  };
  if (const auto v = find(f.parameters); v != f.parameters.end()) {
    space = Space::global;
    return reinterpret_cast<uint64_t>(parameter_base(kernel_)) + v->offset;
  }
  space = Space::shared;
  if (const auto v = find(f.shared); v != f.shared.end()) return v->offset;
  if (find(kernel_.module->dynamic_shared) != kernel_.module->dynamic_shared.end()) return kernel_.dynamic_shared;
  space = Space::local;
  if (const auto v = find(f.local); v != f.local.end()) return v->offset;
  space = Space::global;
  for (const ModuleVariable& v : kernel_.module->variables)
    if (v.name == name) return v.address;
  throw std::runtime_error(fmt::format("PTX of {}: unknown symbol {}", f.name, name));
}

uint32_t Translator::value(const Operand& operand, int bits) {
  if (operand.negated) throw std::runtime_error("PTX: the opposite of a predicate as an operand");
  if (operand.kind == Operand::Kind::number) {
    if (operand.is_double && bits != 64) throw std::runtime_error("PTX: an f64 where fewer bits are wanted");
    return constant(bits < 64 ? operand.bits & ((uint64_t{1} << bits) - 1) : operand.bits, bits);
  }
  if (operand.kind == Operand::Kind::symbol) {
    Space space;
    return constant(symbol(operand.symbol, space), bits);
  }
  if (operand.kind != Operand::Kind::reg) throw std::runtime_error("PTX: an operand that is not a register");
  int64_t& offset = offsets_[static_cast<size_t>(operand.reg)];
  const Register& reg = kernel_.function.registers[static_cast<size_t>(operand.reg)];
  if (offset < 0) {
    offset = allocate(reg.bits);
    if (reg.special) kernel_.specials.push_back({reg.name, static_cast<uint32_t>(offset), reg.bits});
  }
  if (reg.bits != bits)
    throw std::runtime_error(fmt::format("PTX: register {} has {} bits, its instruction {}", reg.name, reg.bits, bits));
  return static_cast<uint32_t>(offset);
}

void Translator::address(const Statement& s, const Operand& operand, Instruction& i) {
  i.space = s.has("shared") || s.has("shared::cta") ? Space::shared : s.has("local") ? Space::local : Space::global;
  i.offset = operand.offset;
  if (operand.reg >= 0) {
    Operand base;
    base.kind = Operand::Kind::reg;
    base.reg = operand.reg;
    i.wide = bits_of(base) == 64;
    i.a = value(base, bits_of(base));
    return;
  }
  i.wide = 1;
  Space space = i.space;
  const uint64_t at = operand.symbol.empty() ? 0 : symbol(operand.symbol, space);
  if (s.has("param")) i.space = space;
  i.a = constant(at, 64);
}

std::vector<Instruction> Translator::translate() {
  const std::string& name = kernel_.function.name;
  std::vector<Instruction> code;
  for (const Statement& s : kernel_.function.statements) {
    Instruction i;
    i.line = s.line;
    bool known = false;
    try {
      known = knows_modifiers(s) && (translate_arithmetic(*this, s, i) || translate_conversion(*this, s, i) ||
                                     translate_memory(*this, s, i) || translate_copy(*this, s, i) ||
                                     translate_tensor_core(*this, s, i) || translate_warp(*this, s, i));
    } catch (const std::exception& e) {
      throw std::runtime_error(fmt::format("{}, line {} of its PTX: {}: {}", name, s.line, s.text(), e.what()));
    }
    if (!known)
      throw std::runtime_error(fmt::format("{}, line {} of its PTX: {} is not emulated", name, s.line, s.text()));
    if (s.guard >= 0) {
      Operand guard;
      guard.kind = Operand::Kind::reg;
      guard.reg = s.guard;
      i.guard = static_cast<int32_t>(value(guard, 1));
      i.guard_negated = s.guard_negated;
    }
    code.push_back(std::move(i));
  }
  return code;
}

void add_module(std::string ptx) {
  Registry& r = registry();
  Module& module = r.modules.emplace_back();
  module.text = std::move(ptx);
  for (Entry& entry : entries_of(module.text)) {
    Kernel kernel;
    kernel.module = &module;
    kernel.begin = entry.begin;
    r.kernels.try_emplace(std::move(entry.name), std::move(kernel));
  }
}

Kernel* find_kernel(std::string_view name) {
  Registry& r = registry();
  const auto found = r.kernels.find(std::string(name));
  return found == r.kernels.end() ? nullptr : &found->second;
}

const KernelFacts& facts_of(Kernel& kernel) {
  parse(kernel);
  return kernel.facts;
}

void run(Kernel& kernel, const Launch& launch) {
  translate(kernel);
  kernel.spare_files.clear();
  kernel.spare_memory.clear();
  for (size_t n = 0; n < kernel.function.parameters.size(); ++n) {
    const Variable& p = kernel.function.parameters[n];
    std::memcpy(parameter_base(kernel) + p.offset, launch.arguments[n], p.bytes);
  }
  if (launch.cluster.y != 1 || launch.cluster.z != 1)
    throw std::runtime_error(kernel.function.name + ": clusters that extend along y or z are not emulated");
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  const uint64_t per_cluster = uint64_t{launch.cluster.x} * launch.cluster.y * launch.cluster.z;
  const uint64_t at_once =
      launch.cooperative ? blocks : std::max<uint64_t>(kBlocksAtOnce / per_cluster, 1) * per_cluster;
  std::vector<std::unique_ptr<Block>> running;
  std::vector<PendingStore> unwritten;
  uint64_t next = 0;
  int64_t idle = 0;
  while (next < blocks || !running.empty()) {
    while (next < blocks && running.size() + per_cluster <= at_once) {
      std::vector<Block*> cluster;
      for (uint64_t n = 0; n < per_cluster; ++n) {
        running.push_back(std::make_unique<Block>(kernel, launch, next++));
        running.back()->rank = static_cast<unsigned>(n);
        cluster.push_back(running.back().get());
      }
      for (uint64_t n = 0; n < per_cluster; ++n) {
        cluster[n]->cluster = cluster;
        cluster[n]->start();
      }
    }
    int turns = 0;
    for (const auto& block : running) turns += run_turn(*block, idle);
    if (turns == 0 || idle > kMostIdle * turns) {
      const auto blocked = std::find_if(running.begin(), running.end(), [](const auto& b) { return b->running > 0; });
      if (blocked != running.end())
        throw std::runtime_error(fmt::format("{}: no warp makes progress: {}", kernel.function.name, where(**blocked)));
    }
    // A cluster leaves together, since its blocks may read each other's shared memory.
    for (size_t first = 0; first < running.size();) {
      bool done = true;
      for (size_t n = 0; n < per_cluster; ++n) done = done && running[first + n]->running == 0;
      for (size_t n = 0; n < per_cluster && done; ++n) end_copies(*running[first + n], unwritten);
      if (done)
        running.erase(running.begin() + static_cast<ptrdiff_t>(first),
                      running.begin() + static_cast<ptrdiff_t>(first + per_cluster));
      else
        first += per_cluster;
    }
  }
  for (const PendingStore& store : unwritten) perform(store);
  kernel.spare_files.clear();
  kernel.spare_memory.clear();
}

}  // namespace furious::emulator
