// Which modifiers the handlers of an opcode know. Most modifiers change the result: one that is ignored would give
// wrong results without an error.
#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "emulator/machine.h"

namespace furious::emulator {
namespace {

using Names = std::vector<std::string_view>;

bool contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Types are checked where the handler is chosen.
bool is_type(std::string_view name) {
  static const Names all = {"b8",  "b16", "b32", "b64",  "u8",    "u16",  "u32",    "u64",    "s8",     "s16", "s32",
                            "s64", "f16", "f32", "bf16", "f16x2", "tf32", "bf16x2", "e4m3x2", "e5m2x2", "f64", "pred"};
  return contains(all, name);
}

Names joined(std::initializer_list<Names> parts) {
  Names all;
  for (const Names& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

using Table = std::unordered_map<std::string_view, Names>;

Table modifiers_of_arithmetic() {
  const Names none, approximate = {"rn", "approx"}, directed = {"rn", "rz", "rm", "rp"};
  const Names comparisons = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "lo",  "ls",  "hi", "hs", "equ",
                             "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "and", "or", "xor"};
  Table table = {{"add", directed},
                 {"sub", directed},
                 {"mul", joined({directed, {"lo", "hi", "wide"}})},
                 {"fma", directed},
                 {"mad", {"rn", "lo", "hi", "wide"}},
                 {"div", {"rn", "approx", "full"}},
                 {"rcp", {"rn", "approx", "ftz"}},
                 {"sqrt", approximate},
                 {"rsqrt", approximate},
                 {"ex2", {"approx", "ftz"}},
                 {"setp", comparisons},
                 {"cvt", {"rn", "rna", "rni", "rzi", "rmi", "rpi", "sat", "satfinite"}},
                 {"bmsk", {"clamp"}},
                 {"shf", {"l", "r", "wrap", "clamp"}}};
  for (const char* const name : {"lg2", "sin", "cos", "tanh"}) table[name] = {"approx"};
  for (const char* const name : {"rem", "min",      "max",  "abs", "neg",  "and",  "or",  "xor", "not",  "shl",
                                 "shr", "copysign", "popc", "clz", "brev", "prmt", "bfi", "bfe", "selp", "mov"})
    table[name] = none;
  return table;
}

Table modifiers_of_memory() {
  const Names spaces = {"global", "shared", "shared::cta", "local", "param", "const"};
  const Names order = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys"};
  const Names caches = {"ca", "cg", "cs", "cv", "lu", "nc", "wb", "wt"}, vectors = {"v2", "v4"};
  const Names atomics = {"add", "exch", "cas", "max", "min", "and", "or", "inc"};
  const Names barriers = {"sync", "arrive", "red", "popc", "and", "or", "aligned", "cta"};
  return {{"ld", joined({spaces, order, caches, vectors})},
          {"st", joined({spaces, order, caches, vectors})},
          {"atom", joined({spaces, order, atomics})},
          {"red", joined({spaces, order, atomics})},
          {"cvta", joined({spaces, {"to"}})},
          {"mapa", {}},
          {"cp", {"async",       "ca",
                  "cg",          "shared",
                  "shared::cta", "shared::cluster",
                  "global",      "commit_group",
                  "wait_group",  "wait_all",
                  "mbarrier",    "arrive",
                  "noinc",       "bulk",
                  "tensor",      "1d",
                  "2d",          "3d",
                  "4d",          "5d",
                  "tile",        "mbarrier::complete_tx::bytes",
                  "bulk_group",  "read",
                  "reduce",      "add"}},
          {"mbarrier",
           {"init", "arrive", "expect_tx", "try_wait", "test_wait", "parity", "shared", "shared::cta", "release",
            "acquire", "relaxed", "cta", "cluster"}},
          {"mma", {"sync", "aligned", "m16n8k16", "m16n8k8", "row", "col"}},
          {"ldmatrix", {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta"}},
          {"stmatrix", {"sync", "aligned", "m8n8", "x1", "x2", "x4", "shared", "shared::cta"}},
          {"shfl", {"sync", "up", "down", "bfly", "idx"}},
          {"vote", {"sync", "ballot", "any", "all"}},
          {"redux", {"sync", "add", "min", "max", "and", "or", "xor"}},
          {"bar", joined({barriers, {"warp"}})},
          {"barrier", joined({barriers, {"cluster", "wait", "acquire", "release", "relaxed"}})},
          {"bra", {"uni"}},
          {"ret", {"uni"}},
          {"nanosleep", {}},
          {"activemask", {}},
          {"exit", {}},
          {"trap", {}}};
}

Table all_modifiers() {
  Table table = modifiers_of_arithmetic();
  table.merge(modifiers_of_memory());
  return table;
}

}  // namespace

bool has_no_effect(std::string_view opcode) {
  static const Names all = {"prefetch", "membar", "fence", "createpolicy", "griddepcontrol", "setmaxnreg"};
  return contains(all, opcode);
}

bool knows_modifiers(const Statement& s) {
  static const Table table = all_modifiers();
  if (has_no_effect(s.opcode)) return true;
  const auto found = table.find(s.opcode);
  // Those of wgmma name a shape, which its handler checks.
  if (found == table.end()) return s.opcode == "wgmma";
  return std::all_of(s.modifiers.begin(), s.modifiers.end(), [&](std::string_view m) {
    return is_type(m) || contains(found->second, m) || m.starts_with("L1::") || m.starts_with("L2::");
  });
}

}  // namespace furious::emulator
