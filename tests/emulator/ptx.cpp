#include "emulator/ptx.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "emulator/emulator.h"

namespace furious::emulator {
namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' || c == '.' || c == ':';
}

size_t bytes_of(std::string_view type) {
  if (type == "pred") return 0;
  const size_t digits = type.find_first_of("0123456789");
  const int bits = digits == std::string_view::npos ? 0 : std::atoi(std::string(type.substr(digits)).c_str());
  if (bits == 0) throw std::runtime_error(fmt::format("PTX: unknown type {}", type));
  return static_cast<size_t>(bits) / 8;
}

// Tokens of PTX: names with their dots, numbers, and single characters.
class Lexer {
 public:
  Lexer(std::string_view text, size_t begin) : text_(text), place_(begin) {
    line_ = 1 + static_cast<int>(std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(begin), '\n'));
  }

  // Empty at the end.
  std::string_view peek() {
    if (!has_next_) next_ = read();
    has_next_ = true;
    return next_;
  }
  std::string_view take() {
    peek();
    has_next_ = false;
    return next_;
  }
  bool accept(std::string_view token) {
    if (peek() != token) return false;
    take();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) fail(fmt::format("expected {}, found {}", token, peek()));
  }
  int line() const { return line_; }
  [[noreturn]] void fail(const std::string& message) const {
    throw std::runtime_error(fmt::format("PTX, line {}: {}", line_, message));
  }

 private:
  void skip() {
    while (place_ < text_.size()) {
      const char c = text_[place_];
      if (c == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(c)) != 0) {
        ++place_;
      } else if (text_.substr(place_, 2) == "//") {
        place_ = std::min(text_.find('\n', place_), text_.size());
      } else if (text_.substr(place_, 2) == "/*") {
        const size_t end = text_.find("*/", place_);
        line_ += static_cast<int>(std::count(text_.begin() + static_cast<ptrdiff_t>(place_),
                                             text_.begin() + static_cast<ptrdiff_t>(end), '\n'));
        place_ = end + 2;
      } else {
        return;
      }
    }
  }
  std::string_view read() {
    skip();
    if (place_ >= text_.size()) return {};
    const size_t begin = place_;
    if (text_[place_] == '"') {
      place_ = text_.find('"', place_ + 1) + 1;
    } else if (is_name(text_[place_]) && text_[place_] != ':') {
      while (place_ < text_.size() && is_name(text_[place_])) {
        // A label's colon ends its name; two of them belong to a modifier (shared::cta).
        if (text_[place_] == ':') {
          if (text_.substr(place_, 2) != "::") break;
          ++place_;
        }
        ++place_;
      }
    } else {
      ++place_;
    }
    return text_.substr(begin, place_ - begin);
  }

  std::string_view text_;
  size_t place_;
  int line_;
  std::string_view next_;
  bool has_next_ = false;
};

// The bits of an integer, of an f32 in hexadecimal (0f...), or of an f64 (0d..., or with a decimal point).
uint64_t number_of(std::string_view token, bool& is_double) {
  const std::string text(token);
  const std::string_view prefix = token.substr(0, 2);
  const bool is_single = prefix == "0f" || prefix == "0F", has_point = token.find('.') != std::string_view::npos;
  is_double = prefix == "0d" || prefix == "0D" || has_point;
  char* end = nullptr;
  uint64_t bits = 0;
  if (has_point)
    bits = std::bit_cast<uint64_t>(std::strtod(text.c_str(), &end));
  else if (is_single || is_double)
    bits = std::strtoull(text.c_str() + 2, &end, 16);
  else
    bits = std::strtoull(text.c_str(), &end, 0);
  if (*end == 'U') ++end;
  if (*end != '\0') throw std::runtime_error(fmt::format("PTX: {} is not a number", token));
  return bits;
}

class Parser {
 public:
  Parser(const Module& module, size_t begin) : module_(module), lexer_(module.text, begin) {
    for (const Variable& v : module.shared) place(function_.shared, function_.shared_bytes, v);
    scopes_.emplace_back();
  }

  Function parse() {
    while (lexer_.peek() != ".entry") lexer_.take();
    lexer_.take();
    function_.name = lexer_.take();
    if (lexer_.accept("(")) parameters();
    while (lexer_.peek() != "{") {
      const std::string_view directive = lexer_.take();
      if (directive == ".reqnctapercluster" || directive == ".explicitcluster")
        lexer_.fail("a kernel that declares the size of its clusters is not emulated");
      if (directive == ".maxntid" || directive == ".reqntid") {
        function_.max_threads = std::atoi(std::string(lexer_.take()).c_str());
        while (lexer_.accept(",")) function_.max_threads *= std::atoi(std::string(lexer_.take()).c_str());
      }
    }
    body();
    for (const auto& [statement, label, scope] : branches_) {
      int target = -1;
      for (int s = scope; s >= 0 && target < 0; s = scopes_[static_cast<size_t>(s)].parent) {
        const auto& labels = scopes_[static_cast<size_t>(s)].labels;
        if (const auto found = labels.find(label); found != labels.end()) target = found->second;
      }
      if (target < 0) throw std::runtime_error(fmt::format("PTX of {}: no label {}", function_.name, label));
      function_.statements[static_cast<size_t>(statement)].target = target;
    }
    return std::move(function_);
  }

 private:
  struct Scope {
    int parent = -1;
    bool called = false;  // the body of a function that is called
    std::map<std::string, int, std::less<>> registers, labels;
    std::map<std::string, std::string, std::less<>> symbols;  // names of parameters of calls, as unique ones
  };
  struct Branch {
    int statement;
    std::string label;
    int scope;
  };

  // .align 4 .b8 name[12], with what stands before it already read.
  Variable variable() {
    Variable v{{}, 1, 0, 0};
    bool pointer = false;
    for (;;) {
      const std::string_view token = lexer_.take();
      if (token == ".align") {
        const int align = std::atoi(std::string(lexer_.take()).c_str());
        if (!pointer) v.align = static_cast<size_t>(align);  // otherwise that of what it points to
      } else if (token == ".ptr" || token == ".global") {
        pointer = true;
      } else if (token[0] == '.') {
        v.bytes = bytes_of(token.substr(1));
        if (v.align == 0) v.align = v.bytes;
      } else {
        v.name = token;
        break;
      }
    }
    while (lexer_.accept("[")) {
      if (lexer_.accept("]")) {
        v.bytes = 0;
        break;
      }
      v.bytes *= std::strtoull(std::string(lexer_.take()).c_str(), nullptr, 0);
      lexer_.expect("]");
    }
    if (v.align == 0) v.align = 1;
    return v;
  }
  static void place(std::vector<Variable>& all, size_t& total, Variable v) {
    v.offset = (total + v.align - 1) / v.align * v.align;
    total = v.offset + v.bytes;
    all.push_back(std::move(v));
  }

  void parameters() {
    while (!lexer_.accept(")")) {
      lexer_.accept(",");
      lexer_.expect(".param");
      place(function_.parameters, function_.parameter_bytes, variable());
    }
  }

  void declare_registers() {
    const std::string_view type = lexer_.take();
    const int bits = type == ".pred" ? 1 : static_cast<int>(8 * bytes_of(type.substr(1)));
    do {
      const std::string name(lexer_.take());
      if (lexer_.accept("<")) {
        const int count = std::atoi(std::string(lexer_.take()).c_str());
        lexer_.expect(">");
        for (int i = 0; i < count; ++i) add_register(fmt::format("{}{}", name, i), bits);
      } else {
        add_register(name, bits);
      }
    } while (lexer_.accept(","));
    lexer_.expect(";");
  }
  int add_register(std::string name, int bits) {
    const int index = static_cast<int>(function_.registers.size());
    scopes_[static_cast<size_t>(scope_)].registers[name] = index;
    function_.registers.push_back({std::move(name), bits});
    return index;
  }
  int find_register(std::string_view name) {
    for (int s = scope_; s >= 0; s = scopes_[static_cast<size_t>(s)].parent) {
      const auto& names = scopes_[static_cast<size_t>(s)].registers;
      if (const auto found = names.find(name); found != names.end()) return found->second;
    }
    if (name[0] != '%') return -1;
    // A special register: it has the same value in all scopes.
    const int own = std::exchange(scope_, 0);
    const bool wide = name.substr(0, 7) == "%clock6" || name.substr(0, 12) == "%globaltimer";
    const int index = add_register(std::string(name), wide ? 64 : 32);
    function_.registers.back().special = true;
    scope_ = own;
    return index;
  }

  void body() {
    const int outermost = scope_;
    lexer_.expect("{");
    for (;;) {
      const std::string_view token = lexer_.peek();
      if (token.empty()) lexer_.fail("the function does not end");
      if (token == "{") {
        lexer_.take();
        const int parent = scope_;
        scope_ = static_cast<int>(scopes_.size());
        scopes_.emplace_back();
        scopes_.back().parent = parent;
      } else if (token == "}") {
        lexer_.take();
        if (scope_ == outermost) return;
        scope_ = scopes_[static_cast<size_t>(scope_)].parent;
      } else if (token == ";") {
        lexer_.take();
      } else if (token[0] == '.') {
        directive();
      } else {
        statement();
      }
    }
  }

  void directive() {
    const std::string_view token = lexer_.take();
    if (token == ".reg") {
      declare_registers();
    } else if (token == ".shared") {
      place(function_.shared, function_.shared_bytes, variable());
      lexer_.expect(";");
    } else if (token == ".param") {
      add_call_parameter(variable(), scope_);
      lexer_.expect(";");
    } else if (token == ".local") {
      place(function_.local, function_.local_bytes, variable());
      lexer_.expect(";");
    } else if (token == ".loc") {  // ends with its line
      for (const int line = lexer_.line(); !lexer_.peek().empty() && lexer_.line() == line;) lexer_.take();
    } else if (token == ".pragma") {
      while (lexer_.take() != ";") {
      }
    } else {
      lexer_.fail(fmt::format("the directive {} is not emulated", token));
    }
  }

  void statement() {
    Statement s;
    if (lexer_.accept("@")) {
      s.guard_negated = lexer_.accept("!");
      s.guard = find_register(lexer_.take());
    }
    const std::string opcode(lexer_.take());
    s.line = lexer_.line();
    if (s.guard < 0 && lexer_.accept(":")) {
      scopes_[static_cast<size_t>(scope_)].labels[opcode] = static_cast<int>(function_.statements.size());
      return;
    }
    size_t begin = 0;
    for (size_t end = 0; end != std::string::npos; begin = end + 1) {
      end = opcode.find('.', begin);
      std::string part = opcode.substr(begin, end == std::string::npos ? end : end - begin);
      if (begin == 0)
        s.opcode = std::move(part);
      else
        s.modifiers.push_back(std::move(part));
    }
    if (s.opcode == "call") {
      if (s.guard >= 0) lexer_.fail("a call that depends on a predicate is not emulated");
      call();
      return;
    }
    int called = scope_;
    while (called >= 0 && !scopes_[static_cast<size_t>(called)].called)
      called = scopes_[static_cast<size_t>(called)].parent;
    if (s.opcode == "ret" && called >= 0) {
      s.opcode = "bra";
      branches_.push_back({static_cast<int>(function_.statements.size()), kReturn, called});
    } else if (s.opcode == "bra") {
      branches_.push_back({static_cast<int>(function_.statements.size()), std::string(lexer_.take()), scope_});
    } else {
      while (lexer_.peek() != ";") {
        s.operands.push_back(operand());
        if (!lexer_.accept(",")) break;
      }
    }
    lexer_.expect(";");
    function_.statements.push_back(std::move(s));
  }

  Operand operand() {
    Operand o = single();
    if (!lexer_.accept("|")) return o;
    Operand pair;
    pair.kind = Operand::Kind::vector;
    pair.parts = {std::move(o), single()};
    return pair;
  }
  Operand single() {
    Operand o;
    if (lexer_.accept("{")) {
      o.kind = Operand::Kind::vector;
      while (!lexer_.accept("}")) {
        o.parts.push_back(single());
        lexer_.accept(",");
      }
      return o;
    }
    if (lexer_.accept("[")) return address();
    if (lexer_.accept("!")) {
      o = single();
      o.negated = true;
      return o;
    }
    const bool minus = lexer_.accept("-");
    const std::string_view token = lexer_.take();
    if (std::isdigit(static_cast<unsigned char>(token[0])) != 0) {
      o.kind = Operand::Kind::number;
      o.bits = number_of(token, o.is_double);
      if (minus) o.bits = ~o.bits + 1;
      return o;
    }
    if (token == "_") return o;
    o.reg = find_register(token);
    o.kind = o.reg >= 0 ? Operand::Kind::reg : Operand::Kind::symbol;
    if (o.reg < 0) o.symbol = unique_name(token);
    for (const Variable& v : module_.dynamic_shared)
      if (v.name == o.symbol) function_.dynamic_align = std::max(function_.dynamic_align, v.align);
    return o;
  }
  // [register or symbol or number + offset, {coordinates}]
  Operand address() {
    Operand o = single();
    if (o.kind == Operand::Kind::number) o.offset = static_cast<int64_t>(o.bits);
    o.kind = Operand::Kind::address;
    if (lexer_.accept("+")) {
      const Operand number = single();
      o.offset += static_cast<int64_t>(number.bits);
    }
    if (lexer_.accept(",")) o.parts = single().parts;
    lexer_.expect("]");
    return o;
  }

  // Parameters of calls lie in local memory.
  std::string add_call_parameter(Variable v, int scope) {
    const std::string unique = fmt::format("{}#{}", v.name, function_.local.size());
    scopes_[static_cast<size_t>(scope)].symbols[v.name] = unique;
    v.name = unique;
    place(function_.local, function_.local_bytes, v);
    return unique;
  }
  std::string unique_name(std::string_view name) const {
    for (int s = scope_; s >= 0; s = scopes_[static_cast<size_t>(s)].parent) {
      const auto& symbols = scopes_[static_cast<size_t>(s)].symbols;
      if (const auto found = symbols.find(name); found != symbols.end()) return found->second;
    }
    return std::string(name);
  }
  std::vector<std::string> names_in_parentheses() {
    std::vector<std::string> names;
    if (!lexer_.accept("(")) return names;
    while (!lexer_.accept(")")) {
      names.push_back(unique_name(lexer_.take()));
      lexer_.accept(",");
    }
    return names;
  }
  // call (result), function, (arguments): the function's body in its place.
  void call() {
    const std::vector<std::string> results = names_in_parentheses();
    if (!results.empty()) lexer_.expect(",");
    const std::string name(lexer_.take());
    const std::vector<std::string> arguments = lexer_.accept(",") ? names_in_parentheses() : std::vector<std::string>();
    lexer_.expect(";");
    constexpr int kDeepest = 64;
    if (++depth_ > kDeepest) lexer_.fail("calls too deep, or recursive");
    const Lexer after = lexer_;
    const int outer = std::exchange(scope_, static_cast<int>(scopes_.size()));
    scopes_.emplace_back();
    scopes_.back().called = true;
    find_function(name, results, arguments);
    body();
    scopes_[static_cast<size_t>(scope_)].labels[kReturn] = static_cast<int>(function_.statements.size());
    scope_ = outer;
    lexer_ = after;
    --depth_;
  }
  // Moves to the body of a function, and gives its parameters the names of the arguments.
  void find_function(const std::string& name, const std::vector<std::string>& results,
                     const std::vector<std::string>& arguments) {
    const std::string& text = module_.text;
    for (size_t at = text.find(".func"); at != std::string::npos; at = text.find(".func", at + 1)) {
      lexer_ = Lexer(text, at);
      lexer_.take();
      const std::vector<std::string> own_results = formal_parameters();
      if (lexer_.take() != name) continue;
      const std::vector<std::string> own = formal_parameters();
      if (lexer_.peek() != "{") continue;
      auto& symbols = scopes_.back().symbols;
      for (size_t n = 0; n < results.size(); ++n) symbols[own_results.at(n)] = results[n];
      for (size_t n = 0; n < arguments.size(); ++n) symbols[own.at(n)] = arguments[n];
      return;
    }
    throw std::runtime_error("PTX: no body of the function " + name);
  }
  std::vector<std::string> formal_parameters() {
    std::vector<std::string> names;
    if (!lexer_.accept("(")) return names;
    while (!lexer_.accept(")")) {
      lexer_.accept(",");
      lexer_.expect(".param");
      names.push_back(variable().name);
    }
    return names;
  }

  static constexpr const char* kReturn = "$return";
  const Module& module_;
  Lexer lexer_;
  Function function_;
  std::vector<Scope> scopes_;
  int scope_ = 0;
  int depth_ = 0;  // of calls
  std::vector<Branch> branches_;
};

// Memory of a module's variable, which is never given back; `values` are its first elements.
uint64_t new_variable(size_t bytes, size_t element, const std::vector<uint64_t>& values) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  auto* const memory = static_cast<unsigned char*>(std::aligned_alloc(256, rounded));
  std::memset(memory, 0, rounded);
  for (size_t i = 0; i < values.size() && (i + 1) * element <= bytes; ++i)
    std::memcpy(memory + i * element, &values[i], element);
  add_memory(memory, bytes);
  return reinterpret_cast<uint64_t>(memory);
}

}  // namespace

bool Statement::has(std::string_view modifier) const {
  return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

std::string Statement::text() const {
  std::string all = opcode;
  for (const std::string& m : modifiers) all += "." + m;
  return all;
}

std::vector<Entry> entries_of(std::string_view text) {
  std::vector<Entry> entries;
  constexpr std::string_view kWord = ".entry ";
  for (size_t at = text.find(kWord); at != std::string_view::npos; at = text.find(kWord, at + 1)) {
    size_t begin = at + kWord.size(), end = begin;
    while (end < text.size() && is_name(text[end])) ++end;
    entries.push_back({std::string(text.substr(begin, end - begin)), at});
  }
  return entries;
}

void scan_declarations(Module& module) {
  if (module.scanned) return;
  module.dynamic_shared.clear();  // of a scan that has failed
  module.shared.clear();
  module.variables.clear();
  Lexer lexer(module.text, 0);
  int depth = 0;  // of bodies and lists of parameters
  while (!lexer.peek().empty()) {
    const std::string_view token = lexer.take();
    if (token == "{" || token == "(") ++depth;
    if (token == "}" || token == ")") --depth;
    if (depth > 0 || (token != ".shared" && token != ".global" && token != ".const")) continue;
    size_t element = 1, count = 1, align = 0;
    std::string name;
    bool sized = true;
    while (name.empty()) {
      const std::string_view part = lexer.take();
      if (part == ".align")
        align = std::strtoull(std::string(lexer.take()).c_str(), nullptr, 0);
      else if (part[0] == '.')
        element = bytes_of(part.substr(1));
      else
        name = part;
    }
    while (lexer.accept("[")) {
      sized = lexer.peek() != "]";
      if (sized) count *= std::strtoull(std::string(lexer.take()).c_str(), nullptr, 0);
      lexer.expect("]");
    }
    if (token == ".shared") {
      (sized ? module.shared : module.dynamic_shared)
          .push_back({name, element * count, align != 0 ? align : element, 0});
      continue;
    }
    std::vector<uint64_t> values;
    if (lexer.accept("=")) {
      const bool list = lexer.accept("{");
      do {
        const bool minus = lexer.accept("-");
        bool is_double = false;
        // Throws at the address of another variable, which is not emulated.
        const uint64_t value = number_of(lexer.take(), is_double);
        values.push_back(minus ? ~value + 1 : value);
      } while (lexer.accept(","));
      if (list) lexer.expect("}");
    }
    module.variables.push_back({name, new_variable(element * count, element, values)});
  }
  module.scanned = true;
}

Function parse_function(const Module& module, size_t begin) {
  return Parser(module, begin).parse();
}

}  // namespace furious::emulator
