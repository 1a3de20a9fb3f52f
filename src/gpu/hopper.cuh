// What only Hopper has (sm_90a): products of a whole warpgroup, and copies of tiles by the bulk copy engine.
//
// A warpgroup (4 warps) multiplies 64 × 16 by 16 × n; warp w holds rows 16w to 16w + 15 of the result and of an operand
// A in registers, in the fragments of mma.cuh. B, and A where it says so, lie in shared memory in panels of 64 columns:
// rows of 128 bytes from an address divisible by 1024, swizzled as Tile<64> of mma.cuh, which is what the copy engine
// writes.
//
// An operand whose row index is summed over is "transposed"; the other kind has the columns summed over. Products are
// asynchronous: their registers must not be touched between fence_products() and the wait_for_products() that covers
// them.
#pragma once

#include <cuda.h>

#include "gpu/mma.cuh"

namespace furious::cuda {

constexpr int kPanelRows = 64;
constexpr int kPanelBytes = kPanelRows * 128;  // 64 rows of 64 columns

// A panel that the copy engine wrote, seen by ldmatrix.
__device__ inline Tile<64> panel_of(unsigned char* panel) {
  return Tile<64>{reinterpret_cast<__nv_bfloat16*>(panel)};
}

// Of the rows from `panel` on, columns [16·step, +16) are summed over.
__device__ inline uint64_t operand(const void* panel, int step) {
  return ((shared_address(panel) + step * 32) & 0x3FFFF) >> 4 | uint64_t{1} << 16 | uint64_t{64} << 32 |
         uint64_t{1} << 62;
}
// Of `panel`, rows [16·step, +16) are summed over; columns after the first 64 lie `next` bytes further on.
__device__ inline uint64_t operand_transposed(const void* panel, int step, uint32_t next = 0) {
  return ((shared_address(panel) + step * 2048) & 0x3FFFF) >> 4 | static_cast<uint64_t>(next >> 4) << 16 |
         uint64_t{64} << 32 | uint64_t{1} << 62;
}

// The operands of further steps from that of the first, whose address takes several instructions: of an operand() that
// may have several panels, and of an operand_transposed().
__device__ inline uint64_t columns_at(uint64_t first, int step) {
  return first + (step / 4 * kPanelBytes + step % 4 * 32) / 16;
}
__device__ inline uint64_t rows_at(uint64_t first, int step) {
  return first + step * 2048 / 16;
}

// d = a·b, added to what d holds where `add` is not 0.
#define FURIOUS_FOUR(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3])
template <int kTransB>
__device__ inline void wgmma(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, %14;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));
}

template <int kTransB>
__device__ inline void wgmma(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, %22;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1]), FURIOUS_FOUR(d[2]), FURIOUS_FOUR(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));
}

template <int kTransB>
__device__ inline void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p, 1, 1, %38;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1]), FURIOUS_FOUR(d[2]), FURIOUS_FOUR(d[3]), FURIOUS_FOUR(d[4]),
        FURIOUS_FOUR(d[5]), FURIOUS_FOUR(d[6]), FURIOUS_FOUR(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));
}

template <int kTransB>
__device__ inline void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p, 1, 1, %70;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1]), FURIOUS_FOUR(d[2]), FURIOUS_FOUR(d[3]), FURIOUS_FOUR(d[4]),
        FURIOUS_FOUR(d[5]), FURIOUS_FOUR(d[6]), FURIOUS_FOUR(d[7]), FURIOUS_FOUR(d[8]), FURIOUS_FOUR(d[9]),
        FURIOUS_FOUR(d[10]), FURIOUS_FOUR(d[11]), FURIOUS_FOUR(d[12]), FURIOUS_FOUR(d[13]), FURIOUS_FOUR(d[14]),
        FURIOUS_FOUR(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));
}

template <int kTransB>
__device__ inline void wgmma(float (&d)[24][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %101, 0;"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, "
      "{%96,%97,%98,%99}, %100, p, 1, 1, %102;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1]), FURIOUS_FOUR(d[2]), FURIOUS_FOUR(d[3]), FURIOUS_FOUR(d[4]),
        FURIOUS_FOUR(d[5]), FURIOUS_FOUR(d[6]), FURIOUS_FOUR(d[7]), FURIOUS_FOUR(d[8]), FURIOUS_FOUR(d[9]),
        FURIOUS_FOUR(d[10]), FURIOUS_FOUR(d[11]), FURIOUS_FOUR(d[12]), FURIOUS_FOUR(d[13]), FURIOUS_FOUR(d[14]),
        FURIOUS_FOUR(d[15]), FURIOUS_FOUR(d[16]), FURIOUS_FOUR(d[17]), FURIOUS_FOUR(d[18]), FURIOUS_FOUR(d[19]),
        FURIOUS_FOUR(d[20]), FURIOUS_FOUR(d[21]), FURIOUS_FOUR(d[22]), FURIOUS_FOUR(d[23])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));
}

template <int kTransB>
__device__ inline void wgmma(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %133, 0;"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
      "{%128,%129,%130,%131}, %132, p, 1, 1, %134;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1]), FURIOUS_FOUR(d[2]), FURIOUS_FOUR(d[3]), FURIOUS_FOUR(d[4]),
        FURIOUS_FOUR(d[5]), FURIOUS_FOUR(d[6]), FURIOUS_FOUR(d[7]), FURIOUS_FOUR(d[8]), FURIOUS_FOUR(d[9]),
        FURIOUS_FOUR(d[10]), FURIOUS_FOUR(d[11]), FURIOUS_FOUR(d[12]), FURIOUS_FOUR(d[13]), FURIOUS_FOUR(d[14]),
        FURIOUS_FOUR(d[15]), FURIOUS_FOUR(d[16]), FURIOUS_FOUR(d[17]), FURIOUS_FOUR(d[18]), FURIOUS_FOUR(d[19]),
        FURIOUS_FOUR(d[20]), FURIOUS_FOUR(d[21]), FURIOUS_FOUR(d[22]), FURIOUS_FOUR(d[23]), FURIOUS_FOUR(d[24]),
        FURIOUS_FOUR(d[25]), FURIOUS_FOUR(d[26]), FURIOUS_FOUR(d[27]), FURIOUS_FOUR(d[28]), FURIOUS_FOUR(d[29]),
        FURIOUS_FOUR(d[30]), FURIOUS_FOUR(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransB));
}

template <int kTransA, int kTransB>
__device__ inline void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, %35, %36;}\n"
      : FURIOUS_FOUR(d[0]), FURIOUS_FOUR(d[1]), FURIOUS_FOUR(d[2]), FURIOUS_FOUR(d[3]), FURIOUS_FOUR(d[4]),
        FURIOUS_FOUR(d[5]), FURIOUS_FOUR(d[6]), FURIOUS_FOUR(d[7])
      : "l"(a), "l"(b), "r"(add), "n"(kTransA), "n"(kTransB));
}

// The same where d holds nothing yet: its registers are free until the product.
#define FURIOUS_NEW_FOUR(x) "=f"((x)[0]), "=f"((x)[1]), "=f"((x)[2]), "=f"((x)[3])
template <int kTransA, int kTransB>
__device__ inline void wgmma_new(float (&d)[8][4], uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 0, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, %34, %35;}\n"
      : FURIOUS_NEW_FOUR(d[0]), FURIOUS_NEW_FOUR(d[1]), FURIOUS_NEW_FOUR(d[2]), FURIOUS_NEW_FOUR(d[3]),
        FURIOUS_NEW_FOUR(d[4]), FURIOUS_NEW_FOUR(d[5]), FURIOUS_NEW_FOUR(d[6]), FURIOUS_NEW_FOUR(d[7])
      : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));
}

#undef FURIOUS_NEW_FOUR
#undef FURIOUS_FOUR

__device__ inline void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kPending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of a result across the wait before it.
template <int kN>
__device__ inline void settle(float (&d)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[i][e])::"memory");
}

// A barrier in shared memory. `phase` counts its completions: wait(phase) returns when phase + 1 of them have happened.
struct Barrier {
  uint64_t word;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&word)), "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&word)) : "memory");
  }
  // Arrives, and expects `bytes` from the copy engine.
  __device__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }
  // Expects more of them, before it arrives.
  __device__ void expect(int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }
  __device__ void wait(int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra out;\n"
        "bra again;\n"
        "out:\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(phase & 1)
        : "memory");
  }
};

// The stages of the tiles in shared memory, one after the other, and how often they were used.
template <int kStages>
struct Pipe {
  int stage = 0, phase = 0;

  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    ++phase;
  }
};

// Brings bytes, a multiple of 16 from and to addresses that are, which need not stay in the L2 cache.
__device__ inline void stream_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile(
      "{\n"
      ".reg .b64 once;\n"
      "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once;\n"
      "}\n" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier.word))
      : "memory");
}

// Arrives when the copies that this thread has begun are done.
__device__ inline void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&barrier.word))
               : "memory");
}

// Bytes that follow each other, in multiples of 16, to and from shared memory.
__device__ inline void copy_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier.word))
               : "memory");
}
__device__ inline void store_bytes(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
// The same, but f32 numbers are added to what is there.
__device__ inline void add_bytes(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until the stores have read shared memory, or are done.
__device__ inline void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

// After init, before the block's barrier.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Between ordinary reads and writes of shared memory and a product that reads, or a copy that reads or overwrites it.
__device__ inline void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Between copies to or from global memory that another block has made, or makes, and the word that says so.
__device__ inline void fence_global_copies() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}
__device__ inline int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ inline void store_release(int* to, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(to), "r"(x) : "memory");
}

// Four 8 × 8 blocks to shared memory; `row` is the one whose 16 bytes this lane names, as for load_matrices().
__device__ inline void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// A barrier of the threads of one warpgroup.
template <int kGroup>
__device__ inline void warpgroup_barrier() {
  asm volatile("bar.sync %0, 128;\n" ::"n"(kGroup + 1) : "memory");
}

// Warpgroups with the same work come to the end of each piece of it, where no products run, at the same time, unless
// each begins a little later than the one before.
__device__ inline void begin_later(int group, int nanoseconds) {
  if (group > 0) __nanosleep(static_cast<unsigned>(group * nanoseconds));
}

// Two warpgroups in turns: wait_at() returns when the other has called arrive_at() with the same number, 0 or 1.
__device__ inline void wait_at(int number) {
  asm volatile("bar.sync %0, 256;\n" ::"r"(number + 1) : "memory");
}
__device__ inline void arrive_at(int number) {
  asm volatile("bar.arrive %0, 256;\n" ::"r"(number + 1) : "memory");
}

// Whether a block of `groups` warpgroups that increase their registers to `more` and `others` that decrease them to
// `fewer` was launched with as many as they then have: otherwise the increase waits forever. A thread starts with a
// multiple of 8.
constexpr bool registers_suffice(int groups, int more, int fewer, int others = 1) {
  const int at_start = 65536 / (128 * (groups + others)) / 8 * 8;
  return groups * more + others * fewer <= (groups + others) * at_start;
}

// Registers of a thread move from warpgroups that need few to those that need many.
template <int kCount>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

// Copies a box of a tensor [batch, length, heads, dim] at (column, token, head, row of the batch); rows outside are
// zeros.
__device__ inline void copy_tile(void* to, const CUtensorMap& map, Barrier& barrier, int column, int token, int head,
                                 int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier.word)), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

}  // namespace furious::cuda
