// A function of a PTX module as text says it: its registers, variables and statements.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace furious::emulator {

struct Operand {
  enum class Kind : uint8_t { none, reg, number, symbol, vector, address };
  Kind kind = Kind::none;
  bool negated = false;        // a predicate
  int reg = -1;                // of Function::registers; of an address, its base
  uint64_t bits = 0;           // of a number: two's complement, or those of a float
  bool is_double = false;      // the number is an f64
  std::string symbol;          // of an address, its base
  int64_t offset = 0;          // of an address
  std::vector<Operand> parts;  // of a vector, or of a pair p|q; of an address, the coordinates of a tensor
};

struct Statement {
  int line = 0;
  int guard = -1;  // the register of a predicate
  bool guard_negated = false;
  std::string opcode;
  std::vector<std::string> modifiers;  // what follows the opcode, without dots
  std::vector<Operand> operands;
  int target = -1;  // of a branch: a statement

  bool has(std::string_view modifier) const;
  std::string text() const;  // the opcode and its modifiers
};

struct Register {
  std::string name;
  int bits;              // 1 for a predicate
  bool special = false;  // not declared: the device defines its value
};

struct Variable {
  std::string name;
  size_t bytes, align, offset;
};

struct Function {
  std::string name;
  int max_threads = 1024;
  std::vector<Variable> parameters, shared, local;
  size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  size_t dynamic_align = 16;  // of dynamic shared memory, if no array that the function uses has more
  std::vector<Register> registers;
  std::vector<Statement> statements;
};

// Constants and variables of a module in global memory; they live as long as the process.
struct ModuleVariable {
  std::string name;
  uint64_t address;
};

struct Module {
  std::string text;
  bool scanned = false;
  std::vector<ModuleVariable> variables;
  std::vector<Variable> dynamic_shared;  // arrays without a size
  std::vector<Variable> shared;          // every kernel has them all
};

// Names of the kernels in `text`, and where each begins.
struct Entry {
  std::string name;
  size_t begin;
};
std::vector<Entry> entries_of(std::string_view text);

// What the module declares outside of its functions.
void scan_declarations(Module& module);

Function parse_function(const Module& module, size_t begin);

}  // namespace furious::emulator
