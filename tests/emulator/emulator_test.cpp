// Kernels written in PTX. What they expect is what an H200 gives.
#include "emulator/emulator.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/formats.h"

namespace furious::emulator {
namespace {

using Words = std::array<uint32_t, 4>;

// Memory of the device as long as it is in scope.
template <class T>
struct DeviceArray {
  explicit DeviceArray(size_t count, T value = {}) : values(count, value) {
    add_memory(values.data(), count * sizeof(T));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { remove_memory(values.data()); }
  std::vector<T> values;
};

constexpr int kMemoryBytes = 16384;

// A kernel of a module of its own. Its body finds the thread in %r0, 16 bytes of the input of its thread at %d0 and
// also in %r1 to %r4, and leaves 64 bits in %d4, which go to the output of its thread.
Kernel& kernel_of(const std::string& body, const std::string& declarations = "") {
  static int count = 0;
  const std::string name = fmt::format("emulator_test_{}", count++);
  add_module(fmt::format(R"(
.version 8.0
.target sm_90a
.address_size 64
{}
.visible .entry {}(.param .u64 in, .param .u64 out) {{
  .reg .pred %p<8>;
  .reg .b16 %h<8>;
  .reg .b32 %r<16>;
  .reg .f32 %f<8>;
  .reg .b64 %d<16>;
  .reg .f64 %x<8>;
  .shared .align 1024 .b8 memory[{}];
  ld.param.u64 %d0, [in];
  ld.param.u64 %d1, [out];
  mov.u32 %r5, %ctaid.x;
  mov.u32 %r6, %ntid.x;
  mov.u32 %r7, %tid.x;
  mad.lo.s32 %r0, %r5, %r6, %r7;
  mad.wide.u32 %d0, %r0, 16, %d0;
  mad.wide.u32 %d1, %r0, 8, %d1;
  ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%d0];
  {}
  st.global.u64 [%d1], %d4;
  ret;
}}
)",
                         declarations, name, kMemoryBytes, body));
  return *find_kernel(name);
}

// What each thread leaves.
std::vector<uint64_t> outputs_of(const std::string& body, const std::vector<Words>& inputs, unsigned blocks = 1) {
  DeviceArray<Words> in(inputs.size());
  in.values = inputs;
  DeviceArray<uint64_t> out(inputs.size());
  const void *const from = in.values.data(), *const to = out.values.data();
  const void* const arguments[] = {&from, &to};
  run(kernel_of(body), {.grid = {blocks, 1, 1},
                        .block = {static_cast<unsigned>(inputs.size()) / blocks, 1, 1},
                        .cluster = {},
                        .arguments = arguments});
  return out.values;
}

// Eight bf16.
template <class F>
Words bf16_words(F&& value) {
  Words words{};
  for (uint32_t n = 0; n < 8; ++n) words[n / 2] |= uint32_t{to_bf16(static_cast<float>(value(n)))} << (n % 2 * 16);
  return words;
}

float low_float(uint64_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x));
}
float high_float(uint64_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x >> 32));
}

uint64_t output_of(const std::string& body, const Words& input) {
  return outputs_of(body + "\n cvt.u64.u32 %d4, %r5;", {input})[0];
}

std::string error_of(const std::string& body, size_t threads = 32) {
  try {
    outputs_of(body, std::vector<Words>(threads));
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Emulator, Integers) {
  EXPECT_EQ(output_of("shl.b32 %r5, %r1, %r2;", {1, 32}), 0u);
  EXPECT_EQ(output_of("shr.s32 %r5, %r1, %r2;", {0x80000000, 255}), 0xFFFFFFFFu);
  EXPECT_EQ(output_of("shf.r.clamp.b32 %r5, %r1, %r2, %r3;", {1, 2, 40}), 2u);
  EXPECT_EQ(output_of("shf.l.wrap.b32 %r5, %r1, %r2, %r3;", {0x80000000, 2, 33}), 5u);
  EXPECT_EQ(output_of("prmt.b32 %r5, %r1, %r2, %r3;", {0x83828180, 0x04030201, 0x740B}), 0x040180FFu);
  EXPECT_EQ(output_of("bfi.b32 %r5, %r1, %r2, %r3, %r4;", {0xFF, 0, 28, 8}), 0xF0000000u);
  EXPECT_EQ(output_of("mul.hi.s32 %r5, %r1, %r2;", {0x80000000, 0x80000000}), 0x40000000u);
  EXPECT_EQ(output_of("div.u32 %r5, %r1, %r2;", {7, 0}), 0xFFFFFFFFu);
}

TEST(Emulator, FloatsAreRoundedOnce) {
  constexpr uint32_t kOne = 0x3F800000, kTiny = 0x24000000;
  const auto rounded = [](const char* opcode, uint32_t a, uint32_t b, uint32_t c) {
    return output_of(fmt::format("mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3; {}; mov.b32 %r5, %f4;", opcode),
                     {a, b, c});
  };
  // 1 − 2^-55 is no f64 either.
  EXPECT_EQ(rounded("sub.rz.f32 %f4, %f1, %f2", kOne, kTiny, 0), kOne - 1);
  EXPECT_EQ(rounded("add.rz.f32 %f4, %f1, %f2", kOne, kTiny, 0), kOne);
  EXPECT_EQ(rounded("add.rp.f32 %f4, %f1, %f2", kOne, kTiny, 0), kOne + 1);
  EXPECT_EQ(rounded("sub.rm.f32 %f4, %f1, %f2", kOne, kOne, 0), 0x80000000u);
  EXPECT_EQ(rounded("fma.rm.f32 %f4, %f1, %f2, %f3", kTiny, 0xBF800000, kOne), kOne - 1);
  EXPECT_EQ(rounded("min.f32 %f4, %f1, %f2", 0x7FC00000, kOne, 0), kOne);
  EXPECT_EQ(rounded("max.f32 %f4, %f1, %f2", 0x80000000, 0, 0), 0u);
  // 15 · 19 is in the middle of two bf16, and 2^-30 more is not, which f32 does not see.
  EXPECT_EQ(output_of("fma.rn.bf16x2 %r5, %r1, %r2, %r3;", {0x4170, 0x4198, 0}), 0x438Eu);
  EXPECT_EQ(output_of("fma.rn.bf16x2 %r5, %r1, %r2, %r3;", {0x4170, 0x4198, 0x3080}), 0x438Fu);
}

TEST(Emulator, Conversions) {
  const auto converted = [](const char* opcode, uint32_t x) {
    return output_of(fmt::format("mov.b32 %f1, %r1; {};", opcode), {x});
  };
  EXPECT_EQ(converted("cvt.rzi.s32.f32 %r5, %f1", 0x4F000000), 0x7FFFFFFFu);
  EXPECT_EQ(converted("cvt.rni.s32.f32 %r5, %f1", 0x40200000), 2u);  // 2.5
  EXPECT_EQ(converted("cvt.rzi.u32.f32 %r5, %f1", 0xBF800000), 0u);
  EXPECT_EQ(converted("cvt.rzi.s32.f32 %r5, %f1", 0x7FC00000), 0u);
  EXPECT_EQ(converted("cvt.rzi.s64.f32 %d5, %f1; shr.u64 %d5, %d5, 32; cvt.u32.u64 %r5, %d5", 0x7FC00000), 0x80000000u);
  EXPECT_EQ(converted("cvt.rn.bf16x2.f32 %r5, %f1, %f1", 0x3F808000), 0x3F803F80u);  // a tie, to even
  EXPECT_EQ(converted("cvt.rna.tf32.f32 %r5, %f1", 0x3F801000), 0x3F802000u);        // a tie, away from zero
  EXPECT_EQ(converted("cvt.rn.tf32.f32 %r5, %f1", 0x3F801000), 0x3F800000u);         // a tie, to even
  EXPECT_EQ(converted("cvt.rn.tf32.f32 %r5, %f1", 0x3F803000), 0x3F804000u);
  EXPECT_EQ(converted("cvt.rn.tf32.f32 %r5, %f1", 0x3F801001), 0x3F802000u);
  EXPECT_EQ(converted("cvt.rn.tf32.f32 %r5, %f1", 0x7F7FFFFF), 0x7F800000u);
  EXPECT_EQ(converted("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f1; cvt.u32.u16 %r5, %h1", 0x7F800000), 0x7E7Eu);
  EXPECT_EQ(converted("cvt.sat.f32.f32 %f2, %f1; mov.b32 %r5, %f2", 0x7FC00000), 0u);
}

TEST(Emulator, LanesThatDivergeMeetAgain) {
  const std::vector<Words> inputs(32);
  // Each lane leaves the loop after another number of rounds.
  const std::vector<uint64_t> turns = outputs_of(R"(
    mov.u32 %r5, 0;
    again: setp.ge.u32 %p1, %r5, %r0;
    @%p1 bra out;
    add.u32 %r5, %r5, 1;
    bra again;
    out: shfl.sync.down.b32 %r6|%p2, %r5, 1, 31, 0xffffffff;
    cvt.u64.u32 %d4, %r6;)",
                                                 inputs);
  for (size_t l = 0; l < 32; ++l) EXPECT_EQ(turns[l], std::min<size_t>(l + 1, 31));
  // Two sets of lanes at one instruction.
  const std::vector<uint64_t> votes = outputs_of(R"(
    setp.lt.u32 %p1, %r0, 13;
    selp.b32 %r5, 0x1fff, 0xffffe000, %p1;
    setp.ne.u32 %p2, %r0, 5;
    vote.sync.ballot.b32 %r6, %p2, %r5;
    cvt.u64.u32 %d4, %r6;)",
                                                 inputs);
  for (size_t l = 0; l < 32; ++l) EXPECT_EQ(votes[l], l < 13 ? 0x1FDFu : 0xFFFFE000u);
  EXPECT_TRUE(contains(error_of(R"(
    setp.lt.u32 %p1, %r0, 13;
    @%p1 bra end;
    bar.warp.sync 0xffffffff;
    bra more;
    end: bar.sync 0;
    more: mov.u64 %d4, 0;)"),
                       "wait for lanes"));
}

TEST(Emulator, CopiesHappenWhenTheyAreWaitedFor) {
  const std::string copy = R"(
    mov.u32 %r6, memory;
    cp.async.cg.shared.global [%r6], [%d0], 16, %r2;
    cp.async.commit_group;
    {}
    ld.shared.v2.u32 {{%r7, %r8}}, [%r6];
    mov.b64 %d4, {{%r7, %r8}};)";
  const Words input{3, 4, 5, 6};  // of which 4 bytes are copied, followed by zeros
  const std::string early = fmt::format(fmt::runtime(copy), ""),
                    late = fmt::format(fmt::runtime(copy), "cp.async.wait_group 0;");
  EXPECT_EQ(outputs_of(early, {input})[0], ~uint64_t{0});
  EXPECT_EQ(outputs_of(late, {input})[0], 3u);
  const std::string bulk = R"(
    mov.u32 %r6, memory;
    add.u32 %r7, %r6, 1024;
    mbarrier.init.shared::cta.b64 [%r7], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%d0], 16, [%r7];
    {}
    ld.shared.u64 %d4, [%r6];)";
  const char* const wait = "again: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r7], 0; @!%p1 bra again;";
  EXPECT_EQ(outputs_of(fmt::format(fmt::runtime(bulk), wait), {input})[0], uint64_t{4} << 32 | 3);
  EXPECT_TRUE(contains(error_of(fmt::format(fmt::runtime(bulk), ""), 1), "ends before its bulk copies"));
}

TEST(Emulator, BulkStoresAreWrittenWhenTheyAreWaitedFor) {
  const std::string store = R"(
    mov.u32 %r6, memory;
    st.shared.v4.u32 [%r6], {{7, 8, 9, 10}};
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r6], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group{} 0;
    st.shared.u32 [%r6], 11;
    ld.global.u64 %d4, [%d0];)";
  const Words input{1, 2, 3, 4};
  EXPECT_EQ(outputs_of(fmt::format(fmt::runtime(store), ".read"), {input})[0], uint64_t{2} << 32 | 1);
  EXPECT_EQ(outputs_of(fmt::format(fmt::runtime(store), ""), {input})[0], uint64_t{8} << 32 | 7);
}

// 8 rows of 64 16-bit numbers, of which the last two lie outside of the tensor; thread t reads from row t.
TEST(Emulator, TensorCopiesSwizzleTheirRows) {
  DeviceArray<uint16_t> tensor(10 * 64);
  for (size_t n = 0; n < tensor.values.size(); ++n) tensor.values[n] = static_cast<uint16_t>(n);
  const TensorMap map{.address = reinterpret_cast<uint64_t>(tensor.values.data()),
                      .sizes = {64, 10},
                      .strides = {2, 128},
                      .box = {64, 8},
                      .rank = 2,
                      .element_bytes = 2,
                      .swizzle = 128};
  std::vector<Words> input(8);
  static_assert(sizeof(TensorMap) <= 8 * sizeof(Words));
  std::memcpy(input.data(), &map, sizeof(map));
  const std::vector<uint64_t> rows = outputs_of(R"(
    mov.u32 %r6, memory;
    add.u32 %r7, %r6, 1024;
    mov.u32 %r8, 0;
    mov.u32 %r9, 4;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra wait;
    mbarrier.init.shared::cta.b64 [%r7], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 1024;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%d0, {%r8, %r9}], [%r7];
    wait: bar.warp.sync 0xff;
    again: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0;
    @!%p2 bra again;
    xor.b32 %r10, %r0, 3;
    mad.lo.u32 %r6, %r0, 128, %r6;
    mad.lo.u32 %r6, %r10, 16, %r6;
    ld.shared.u64 %d4, [%r6];)",
                                                input);
  for (uint64_t t = 0; t < 8; ++t) {
    const uint64_t first = (t + 4) * 64 + 24;  // the fourth 16 bytes
    EXPECT_EQ(rows[t], t < 6 ? first | (first + 1) << 16 | (first + 2) << 32 | (first + 3) << 48 : 0) << t;
  }
}

TEST(Emulator, LoadsMatrices) {
  std::vector<Words> input(32);  // lane l has row l % 8 of matrix l / 8: numbers from 8 l on
  for (uint32_t l = 0; l < 32; ++l)
    for (uint32_t n = 0; n < 4; ++n) input[l][n] = (8 * l + 2 * n) | (8 * l + 2 * n + 1) << 16;
  const auto loaded = [&](const char* modifier) {
    return outputs_of(fmt::format(R"(
      mov.u32 %r6, memory;
      mad.lo.u32 %r6, %r0, 16, %r6;
      st.shared.v4.u32 [%r6], {{%r1, %r2, %r3, %r4}};
      bar.warp.sync 0xffffffff;
      ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r6];
      mov.b64 %d4, {{%r7, %r10}};)",
                                  modifier),
                      input);
  };
  const std::vector<uint64_t> rows = loaded(""), columns = loaded(".trans");
  for (uint64_t l = 0; l < 32; ++l) {
    const uint64_t row = l / 4 * 8 + l % 4 * 2, column = l % 4 * 16 + l / 4, last = 3 * 64;
    EXPECT_EQ(rows[l], row | (row + 1) << 16 | (last + row) << 32 | (last + row + 1) << 48) << l;
    EXPECT_EQ(columns[l], column | (column + 8) << 16 | (last + column) << 32 | (last + column + 8) << 48) << l;
  }
}

// Of B, [16, 8], the first 8 rows are the identity, and the others twice that.
TEST(Emulator, MultipliesFragments) {
  std::vector<Words> a(32);
  for (uint32_t l = 0; l < 32; ++l)
    a[l] = bf16_words([&](uint32_t n) {
      const uint32_t row = l / 4 + n / 2 % 2 * 8, column = l % 4 * 2 + n / 4 * 8 + n % 2;
      return 16 * row + column;
    });
  const std::vector<uint64_t> d = outputs_of(R"(
    shr.u32 %r5, %r0, 2;
    and.b32 %r6, %r0, 3;
    shl.b32 %r6, %r6, 1;
    setp.eq.u32 %p1, %r5, %r6;
    add.u32 %r6, %r6, 1;
    setp.eq.u32 %p2, %r5, %r6;
    selp.b32 %r7, 0x3f80, 0, %p1;
    selp.b32 %r7, 0x3f800000, %r7, %p2;
    selp.b32 %r8, 0x4000, 0, %p1;
    selp.b32 %r8, 0x40000000, %r8, %p2;
    mov.f32 %f4, 0f3f800000;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
      {%f0, %f1, %f2, %f3}, {%r1, %r2, %r3, %r4}, {%r7, %r8}, {%f4, %f4, %f4, %f4};
    mov.b32 %r5, %f0;
    mov.b32 %r6, %f3;
    mov.b64 %d4, {%r5, %r6};)",
                                             a);
  for (size_t l = 0; l < 32; ++l) {
    const auto expected = [](size_t row, size_t n) { return static_cast<float>(48 * row + 3 * n + 17); };
    EXPECT_EQ(low_float(d[l]), expected(l / 4, l % 4 * 2)) << l;
    EXPECT_EQ(high_float(d[l]), expected(l / 4 + 8, l % 4 * 2 + 1)) << l;
  }
}

// The same B; A is [64, 16]. A thread writes 16 bytes of A where the swizzle of 128 bytes puts them.
TEST(Emulator, MultipliesSharedMemory) {
  std::vector<Words> a(128);
  for (uint32_t t = 0; t < 128; ++t) a[t] = bf16_words([&](uint32_t n) { return t / 2 + 4 * (t % 2 * 8 + n); });
  const std::vector<uint64_t> d = outputs_of(R"(
    shr.u32 %r5, %r0, 1;
    and.b32 %r6, %r0, 1;
    and.b32 %r7, %r5, 7;
    xor.b32 %r8, %r6, %r7;
    mov.u32 %r9, memory;
    mad.lo.u32 %r10, %r5, 128, %r9;
    mad.lo.u32 %r10, %r8, 16, %r10;
    st.shared.v4.u32 [%r10], {%r1, %r2, %r3, %r4};
    setp.ge.u32 %p1, %r0, 16;
    @%p1 bra multiply;
    st.shared.v4.u32 [%r10+8192], {0, 0, 0, 0};
    mad.lo.u32 %r10, %r5, 2, %r10;
    setp.eq.u32 %p2, %r6, 0;
    selp.b32 %r8, 0x3f80, 0x4000, %p2;
    cvt.u16.u32 %h0, %r8;
    st.shared.u16 [%r10+8192], %h0;
    multiply: fence.proxy.async;
    bar.sync 0;
    cvt.u64.u32 %d5, %r9;
    shr.u64 %d5, %d5, 4;
    or.b64 %d5, %d5, 0x4000004000010000;
    add.u64 %d6, %d5, 512;
    setp.ne.u32 %p3, %r0, %r0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d5, %d6, %p3, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mov.b32 %r5, %f0;
    mov.b32 %r6, %f3;
    mov.b64 %d4, {%r5, %r6};)",
                                             a);
  for (size_t t = 0; t < 128; ++t) {
    const auto expected = [](size_t row, size_t n) { return static_cast<float>(3 * row + 12 * n + 64); };
    const size_t l = t % 32, row = t / 32 * 16 + l / 4;
    EXPECT_EQ(low_float(d[t]), expected(row, l % 4 * 2)) << t;
    EXPECT_EQ(high_float(d[t]), expected(row + 8, l % 4 * 2 + 1)) << t;
  }
}

TEST(Emulator, BarriersReducePredicates) {
  const std::vector<uint64_t> results = outputs_of(R"(
    rem.u32 %r5, %r0, 3;
    setp.eq.u32 %p1, %r5, 0;
    bar.red.popc.u32 %r6, 0, %p1;
    bar.red.and.pred %p2, 0, %p1;
    bar.red.or.pred %p3, 0, %p1;
    selp.b32 %r7, 100, 0, %p2;
    selp.b32 %r8, 1000, 0, %p3;
    add.u32 %r6, %r6, %r7;
    add.u32 %r6, %r6, %r8;
    cvt.u64.u32 %d4, %r6;)",
                                                   std::vector<Words>(64));
  for (const uint64_t x : results) EXPECT_EQ(x, 1022u);  // 22 of 64 are multiples of 3; not all are, but some
}

TEST(Emulator, DynamicSharedMemoryFollowsTheStaticOne) {
  const auto place_of = [](int align) {
    Kernel& kernel = kernel_of(
        ".shared .align 4 .b8 odd[20]; mov.u32 %r5, odd; mov.u32 %r5, dynamic;"
        "cvt.u64.u32 %d4, %r5;",
        fmt::format(".extern .shared .align {} .b8 dynamic[];", align));
    DeviceArray<Words> in(1);
    DeviceArray<uint64_t> out(1);
    const void *const from = in.values.data(), *const to = out.values.data();
    const void* const arguments[] = {&from, &to};
    run(kernel, {.grid = {}, .block = {}, .cluster = {}, .dynamic_shared = 64, .arguments = arguments});
    return out.values[0];
  };
  EXPECT_EQ(place_of(4), kMemoryBytes + 32u);
  EXPECT_EQ(place_of(128), kMemoryBytes + 128u);
}

TEST(Emulator, EndlessLoopsAreErrors) {
  for (const char* const loop : {"again: bra again;", "again: ld.volatile.global.u32 %r5, [%d0]; bra again;",
                                 "again: atom.global.add.u32 %r5, [%d0], 1; bra again;",
                                 "again: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r6], 0; @!%p1 bra again;",
                                 "setp.gt.u32 %p1, %r0, 31; @%p1 bra out; bar.sync 0, 96; out: mov.u64 %d4, 0;"}) {
    const std::string error =
        error_of(std::string("mov.u32 %r6, memory; mbarrier.init.shared::cta.b64 [%r6], 99;") + loop, 64);
    EXPECT_TRUE(contains(error, "emulator_test_") && contains(error, "no warp makes progress") &&
                contains(error, "warp 0 at line"))
        << loop << ": " << error;
  }
}

TEST(Emulator, MistakesOfKernelsAreErrors) {
  EXPECT_TRUE(contains(error_of("ld.global.u32 %r5, [%d0+4096];"), "in no allocation"));
  EXPECT_TRUE(contains(error_of("ld.global.u32 %r5, [%d0+-0x7ffffffffffffff0];"), "in no allocation"));
  EXPECT_TRUE(contains(error_of("ld.global.u32 %r5, [%d0+2];"), "misaligned"));
  EXPECT_TRUE(contains(error_of("ld.shared.u32 %r5, [memory+16384];"), "of shared memory"));
  EXPECT_TRUE(
      contains(error_of("mov.u32 %r6, memory; mbarrier.arrive.shared::cta.b64 _, [%r6];"), "has not been initialised"));
  EXPECT_TRUE(contains(error_of("barrier.cluster.wait.acquire.aligned;"), "without a new arrival"));
  EXPECT_TRUE(contains(error_of("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.arrive.relaxed.aligned;"),
                       "without a wait"));
  EXPECT_TRUE(contains(error_of("trap;"), "of its PTX: trap"));
}

TEST(Emulator, NamesWhatItDoesNotEmulate) {
  for (const char* const statement :
       {"add.cc.u32 %r5, %r1, %r2", "add.sat.s32 %r5, %r1, %r2", "mul.ftz.f32 %f1, %f2, %f3",
        "add.rz.f64 %x1, %x2, %x3", "cvt.rz.f32.f64 %f1, %x1", "cvt.rz.bf16x2.f32 %r5, %f1, %f2",
        "prmt.b32.f4e %r5, %r1, %r2, %r3", "lop3.b32 %r5, %r1, %r2, %r3, 0x80",
        "atom.global.add.noftz.f16x2 %r5, [%d0], %r1", "elect.sync %r5|%p1, 0xffffffff", "min.NaN.f32 %f1, %f2, %f3",
        "ld.shared::cluster.u32 %r5, [%r6]"}) {
    const std::string name(statement, std::string(statement).find(' '));
    EXPECT_TRUE(contains(error_of(std::string(statement) + ";"), name + " is not emulated")) << error_of(statement);
  }
}

TEST(Emulator, AFailedKernelFailsAgain) {
  Kernel& kernel = kernel_of("mov.u64 %d4, 1; add.sat.s32 %r5, %r1, %r2;");
  DeviceArray<Words> memory(1);
  const void* const place = memory.values.data();
  const void* const arguments[] = {&place, &place};
  for (int i = 0; i < 2; ++i)
    EXPECT_THROW(run(kernel, {.grid = {}, .block = {}, .cluster = {}, .arguments = arguments}), std::runtime_error);
}

// Blocks that take different times end in another order than they began.
TEST(Emulator, ForgetsTheMemoryOfBlocks) {
  Kernel& kernel = kernel_of(R"(
    and.b32 %r6, %r5, 1;
    setp.eq.u32 %p1, %r6, 1;
    mov.u32 %r7, 0;
    again: add.u32 %r7, %r7, 1;
    setp.lt.and.u32 %p2, %r7, 9999, %p1;
    @%p2 bra again;
    mov.u64 %d4, 0;)");
  DeviceArray<Words> in(40);
  DeviceArray<uint64_t> out(40);
  const void *const from = in.values.data(), *const to = out.values.data();
  const void* const arguments[] = {&from, &to};
  const auto count_after_launch = [&](unsigned blocks) {
    run(kernel, {.grid = {blocks, 1, 1}, .block = {}, .cluster = {}, .arguments = arguments});
    return memory_count();
  };
  const size_t count = count_after_launch(1);  // the memory of its parameters remains
  EXPECT_EQ(count_after_launch(40), count);
}

}  // namespace
}  // namespace furious::emulator
