// Products of tensor cores (mma.sync, wgmma) and the loads and stores of their fragments (ldmatrix, stmatrix).
#include <fmt/format.h>

#include <cstring>

#include "emulator/formats.h"
#include "emulator/machine.h"

namespace furious::emulator {
namespace {

enum class Format : uint8_t { bf16, f16, tf32 };
template <Format kFormat>
float half_of(uint32_t x) {
  const auto low = static_cast<uint16_t>(x);
  return kFormat == Format::bf16 ? from_bf16(low) : from_f16(low);
}

using Eight [[gnu::vector_size(32)]] = float;

// d = c + a·b for the 16 rows of a warp, or a·b; c and d as registers, `n` columns. A lane has two neighbours of the
// first 8 rows, and two of the others, so that 8 columns of 8 rows are two registers with their lanes interleaved. b:
// groups of 8 columns, each [kInner, 8].
template <int kInner>
void multiply_add(Warp& w, const uint32_t* d, const uint32_t* c, int n, const float (&a)[16][kInner], const float* b,
                  bool zero) {
  for (int j = 0; j < n; j += 8) {
    Eight sums[16] = {};
    for (int k = 0; k < kInner; ++k) {
      Eight row;
      std::memcpy(&row, b + j * kInner + k * 8, sizeof(row));
      for (int r = 0; r < 16; ++r) sums[r] += a[r][k] * row;
    }
    for (int e = 0; e < 4; ++e) {
      const auto* const from = reinterpret_cast<const float*>(&sums[e / 2 * 8]) + e % 2;
      const float* const addend = w.at<float>(c[j / 2 + e]);
      float* const to = w.at<float>(d[j / 2 + e]);
      for (int l = 0; l < kLanes; ++l) to[l] = zero ? from[2 * l] : addend[l] + from[2 * l];
    }
  }
}

// A of 16 × 16 (or × 8) 16-bit numbers in registers.
template <Format kFormat, int kInner>
void unpack_a(Warp& w, const uint32_t* registers, float (&a)[16][kInner]) {
  for (int n = 0; n < kInner / 4; ++n) {
    const uint32_t* const x = w.at<uint32_t>(registers[n]);
    for (int row = 0; row < 8; ++row)
      for (int k = 0; k < 8; ++k)
        a[row + n % 2 * 8][k + n / 2 * 8] = half_of<kFormat>(x[row * 4 + k / 2] >> (16 * (k % 2)));
  }
}

template <Format kFormat, int kInner>
void mma(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  const uint32_t* const r = i.list.data();  // d, a, b, c
  float a[16][kInner], b[kInner][8];
  constexpr int kA = kFormat == Format::tf32 ? kInner / 2 : kInner / 4, kB = kA / 2;
  if constexpr (kFormat == Format::tf32) {
    for (int n = 0; n < kA; ++n) {
      const float* const x = w.at<float>(r[4 + n]);
      for (int row = 0; row < 8; ++row)
        for (int k = 0; k < 4; ++k) a[row + n % 2 * 8][k + n / 2 * 4] = cut_to_tf32(x[row * 4 + k]);
    }
    for (int n = 0; n < kB; ++n) {
      const float* const x = w.at<float>(r[4 + kA + n]);
      for (int k = 0; k < 4; ++k)
        for (int column = 0; column < 8; ++column) b[k + n * 4][column] = cut_to_tf32(x[column * 4 + k]);
    }
  } else {
    unpack_a<kFormat, kInner>(w, r + 4, a);
    for (int n = 0; n < kB; ++n) {
      const uint32_t* const x = w.at<uint32_t>(r[4 + kA + n]);
      for (int k = 0; k < 8; ++k)
        for (int column = 0; column < 8; ++column)
          b[k + n * 8][column] = half_of<kFormat>(x[column * 4 + k / 2] >> (16 * (k % 2)));
    }
  }
  multiply_add<kInner>(w, r, r + 4 + kA + kB, 8, a, &b[0][0], false);
}

// An operand in shared memory that a matrix descriptor describes: rows of 128 bytes, swizzled.
struct MatrixDescriptor {
  Warp& w;
  const Instruction& i;
  uint64_t start, leading, stride;
  bool transposed;  // the index that is summed over goes over rows

  MatrixDescriptor(Warp& warp, const Instruction& instruction, uint64_t bits, bool is_transposed)
      : w(warp),
        i(instruction),
        start((bits & 0x3FFF) << 4),
        leading((bits >> 16 & 0x3FFF) << 4),
        stride((bits >> 32 & 0x3FFF) << 4),
        transposed(is_transposed) {
    if (bits >> 62 != 1) fail(w, i, "a matrix descriptor without a swizzle of 128 bytes is not emulated");
    if ((bits >> 49 & 7) != 0) fail(w, i, "a matrix descriptor with a base offset is not emulated");
  }
  // f(outer, inner, elements) for rows or columns [first, first + count), of 16 elements each: 8 of them at once, which
  // the swizzle leaves together. They have indices inner, inner + 1, ... of one row or column; transposed, they are of
  // outer, outer + 1, ... Both first and count are multiples of 8.
  template <class F>
  void each(int first, int count, F&& f) const {
    for (int outer = first; outer < first + count; outer += transposed ? 8 : 1)
      for (int inner = 0; inner < 16; inner += transposed ? 1 : 8) {
        const auto o = static_cast<uint64_t>(outer), k = static_cast<uint64_t>(inner);
        uint64_t address = transposed ? start + o / 64 * leading + k / 8 * stride + k % 8 * 128 + o % 64 * 2
                                      : start + o / 8 * stride + o % 8 * 128 + k * 2;
        address ^= (address >> 7 & 7) << 4;
        uint16_t x[8];
        std::memcpy(x, resolve_shared(w, i, address, sizeof(x)), sizeof(x));
        float elements[8];
        for (int e = 0; e < 8; ++e) elements[e] = from_bf16(x[e]);
        f(outer, inner, elements);
      }
  }
};

// extra: bit 0, A is in shared memory; 1, A is transposed; 2, B is. count: columns / 8.
void wgmma(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  const int n = i.count * 8;
  const uint32_t* const r = i.list.data();  // d, then the registers of a
  float a[16][16];
  std::vector<float> b(16 * static_cast<size_t>(n));
  if (i.extra & 1) {
    const MatrixDescriptor operand(w, i, w.at<uint64_t>(i.a)[0], (i.extra & 2) != 0);
    operand.each(w.index % 4 * 16, 16, [&](int row, int k, const float(&x)[8]) {
      for (int e = 0; e < 8; ++e) (operand.transposed ? a[row % 16 + e][k] : a[row % 16][k + e]) = x[e];
    });
  } else {
    unpack_a<Format::bf16, 16>(w, r + n / 2, a);
  }
  const MatrixDescriptor operand(w, i, w.at<uint64_t>(i.b)[0], (i.extra & 4) != 0);
  operand.each(0, n, [&](int column, int k, const float(&x)[8]) {
    float* const to = b.data() + static_cast<ptrdiff_t>(column / 8 * 128 + k * 8 + column % 8);
    const int step = operand.transposed ? 1 : 8;
    for (int e = 0; e < 8; ++e) to[e * step] = x[e];
  });
  multiply_add<16>(w, r, r, n, a, b.data(), (w.predicate(i.c) & 1) == 0);
}

bool translate_wgmma(Translator& t, const Statement& s, Instruction& i) {
  if (s.has("fence") || s.has("commit_group") || s.has("wait_group")) {
    i.run = [](Warp&, const Instruction&) {};
    return true;
  }
  // d, a, b, whether d is added, signs of a and b, transposition of a (in shared memory) and b.
  const std::vector<Operand>& o = s.operands;
  const size_t columns = o.empty() ? 0 : o[0].parts.size() * 2;
  const bool in_registers = o.size() == 7 && o[1].kind == Operand::Kind::vector && o[1].parts.size() == 4;
  const std::string name = fmt::format("wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16", columns);
  if (s.text() != name || (!in_registers && o.size() != 8) || o[4].bits != 1 || o[5].bits != 1) return false;
  for (const Operand& d : o[0].parts) i.list.push_back(t.value(d, 32));
  i.count = static_cast<uint8_t>(columns / 8);
  if (in_registers)
    for (const Operand& a : o[1].parts) i.list.push_back(t.value(a, 32));
  else
    i.a = t.value(o[1], 64);
  i.b = t.value(o[2], 64);
  i.c = t.predicate(o[3]);
  i.extra = in_registers ? o[6].bits << 2 : 1 | o[6].bits << 1 | o[7].bits << 2;
  i.run = wgmma;
  return true;
}

void load_matrices(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  uint32_t result[4][kLanes];
  for (int m = 0; m < i.count; ++m) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row)
      std::memcpy(matrix[row], resolve_shared(w, i, w.at<uint32_t>(i.a)[m * 8 + row], 16), 16);
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4, column = l % 4 * 2;
      const uint32_t low = i.extra ? matrix[column][row] : matrix[row][column];
      const uint32_t high = i.extra ? matrix[column + 1][row] : matrix[row][column + 1];
      result[m][l] = low | high << 16;
    }
  }
  for (int m = 0; m < i.count; ++m)
    std::memcpy(w.at<uint32_t>(i.list[static_cast<size_t>(m)]), result[m], sizeof(result[m]));
}
void store_matrices(Warp& w, const Instruction& i) {
  if (!w.converged(kAllLanes)) return;
  for (int m = 0; m < i.count; ++m) {
    const uint32_t* const x = w.at<uint32_t>(i.list[static_cast<size_t>(m)]);
    for (int row = 0; row < 8; ++row)
      std::memcpy(resolve_shared(w, i, w.at<uint32_t>(i.a)[m * 8 + row], 16), x + 4 * row, 16);
  }
}

Handler mma_handler(const Statement& s) {
  const auto& m = s.modifiers;
  if (m.size() < 4 || m[m.size() - 4] != "f32" || m.back() != "f32") return nullptr;
  const std::string& format = m[m.size() - 2];
  if (m[m.size() - 3] != format) return nullptr;
  if (s.has("m16n8k16") && format == "bf16") return mma<Format::bf16, 16>;
  if (s.has("m16n8k16") && format == "f16") return mma<Format::f16, 16>;
  if (s.has("m16n8k8") && format == "bf16") return mma<Format::bf16, 8>;
  if (s.has("m16n8k8") && format == "f16") return mma<Format::f16, 8>;
  if (s.has("m16n8k8") && format == "tf32") return mma<Format::tf32, 8>;
  return nullptr;
}

}  // namespace

bool translate_tensor_core(Translator& t, const Statement& s, Instruction& i) {
  if (s.opcode == "wgmma") return translate_wgmma(t, s, i);
  const auto registers = [&](const Operand& o) {
    if (o.kind != Operand::Kind::vector) {
      i.list.push_back(t.value(o, 32));
      return;
    }
    for (const Operand& p : o.parts) i.list.push_back(t.value(p, 32));
  };
  if (s.opcode == "mma") {
    i.run = mma_handler(s);
    for (const Operand& o : s.operands) registers(o);
    // All that is emulated adds four f32 of each lane.
    const std::vector<Operand>& o = s.operands;
    return i.run != nullptr && o.size() == 4 && o[0].parts.size() == 4 && o[3].parts.size() == 4;
  }
  if (s.opcode != "ldmatrix" && s.opcode != "stmatrix") return false;
  const bool loads = s.opcode == "ldmatrix";
  i.run = loads ? load_matrices : store_matrices;
  registers(s.operands[loads ? 0 : 1]);
  i.count = static_cast<uint8_t>(i.list.size());
  if (!s.has(fmt::format("x{}", i.count)) || s.modifiers.back() != "b16") return false;
  if (!s.has("shared") && !s.has("shared::cta")) return false;
  const Operand& from = s.operands[loads ? 1 : 0];
  Operand base;
  base.kind = Operand::Kind::reg;
  base.reg = from.reg;
  i.a = t.value(base, 32);
  i.extra = s.has("trans");
  return from.offset == 0 && (loads || !s.has("trans"));
}

}  // namespace furious::emulator
