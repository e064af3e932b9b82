// Hopper's warpgroup matrix product and copy engine, in PTX: what the prefill path is made of.
#pragma once
#include "barrier.cuh"

// Accumulators of a product with N columns: N / 2 floats a thread.
#define ACC4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define ACC16(a, i) ACC4(a, i), ACC4(a, i + 4), ACC4(a, i + 8), ACC4(a, i + 12)
#define ACC32(a, i) ACC16(a, i), ACC16(a, i + 16)
#define ACC64(a, i) ACC32(a, i), ACC32(a, i + 32)
#define ACC48(a) ACC32(a, 0), ACC16(a, 32)
#define ACC128(a) ACC64(a, 0), ACC64(a, 64)
#define NAMES32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES48 \
  NAMES32 "," "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES64 \
  NAMES48 "," "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES128 \
  NAMES64 "," "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
  "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103," \
  "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119," \
  "%120,%121,%122,%123,%124,%125,%126,%127"

#if FP16 || KV8
#define PAIR_TYPE "f16.f16"
#else
#define PAIR_TYPE "bf16.bf16"
#endif

// c (+)= A B^T with A [64, 16] and B [N, 16] in shared memory, 16-bit, rows along K.
#define WGMMA_SS(N, NAMES, A, B, P, ...)                                                     \
  __device__ __forceinline__ void multiply_shared(float (&c)[N / 2], u64 a, u64 b, int keep) { \
    asm volatile(                                                                            \
        "{.reg .pred p; setp.ne.b32 p, " P ", 0;"                                            \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PAIR_TYPE " {" NAMES "}, " A ", " B \
        ", p, 1, 1, 0, 0;}"                                                                  \
        : __VA_ARGS__                                                                                \
        : "l"(a), "l"(b), "r"(keep));                                                        \
  }
WGMMA_SS(64, NAMES32, "%32", "%33", "%34", ACC32(c, 0))
WGMMA_SS(128, NAMES64, "%64", "%65", "%66", ACC64(c, 0))

// c (+)= A B with A [64, 16] in registers and B [16, N] in shared memory, rows along N.
#define WGMMA_RS(N, NAMES, A, B, P, ...)                                                         \
  __device__ __forceinline__ void multiply_held(float (&c)[N / 2], const u32* a, u64 b, int keep) { \
    asm volatile(                                                                                \
        "{.reg .pred p; setp.ne.b32 p, " P ", 0;"                                                \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PAIR_TYPE " {" NAMES "}, {" A "}, " B   \
        ", p, 1, 1, 1;}"                                                                         \
        : __VA_ARGS__                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                        \
  }
WGMMA_RS(64, NAMES32, "%32,%33,%34,%35", "%36", "%37", ACC32(c, 0))
WGMMA_RS(96, NAMES48, "%48,%49,%50,%51", "%52", "%53", ACC48(c))
WGMMA_RS(128, NAMES64, "%64,%65,%66,%67", "%68", "%69", ACC64(c, 0))
WGMMA_RS(256, NAMES128, "%128,%129,%130,%131", "%132", "%133", ACC128(c))

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Products write registers asynchronously: the compiler must not read them before the wait.
template <int N>
__device__ __forceinline__ void pin(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// A matrix in shared memory, swizzled by SWIZZLE bytes: `lead` bytes from one swizzle-wide block of
// the contiguous dimension to the next (of rows along N), `stride` from 8 rows to the next 8.
template <int SWIZZLE>
__device__ __forceinline__ u64 matrix(u32 address, u32 lead, u32 stride) {
  const u64 mode = SWIZZLE == 128 ? 1 : 2;
  return (u64)((address & 0x3ffff) >> 4) | (u64)(lead >> 4) << 16 | (u64)(stride >> 4) << 32 |
         mode << 62;
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// True in one lane of a converged warp: tells the compiler that a single lane issues the TMA copy.
__device__ __forceinline__ bool elected() {
  u32 yes;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(yes));
  return yes;
}

// A tensor map as the driver encodes it.
struct alignas(64) TensorMap {
  u64 words[16];
};

// Requests a TMA copy of a box of a map with 3 or 4 dimensions, innermost coordinate first.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int x, int y,
                                         int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
