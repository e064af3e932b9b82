// CUDA for one CTA at a time on a CPU: what csrc/sample*.cu* use of it, and no more.
//
// A thread of the CTA is a fiber, THREADS a power of two. At a barrier, or at an exchange within a
// warp, a fiber gives way until all others are there; which goes first changes from turn to turn. CTAs run one after another, so one that waited for another would hang.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
using std::max;
using std::min;

struct Index {
  int x;
};
static Index threadIdx, blockIdx, gridDim;

namespace host {
constexpr int kStack = 256 * 1024;
static ucontext_t fibers[THREADS];  // to begin one
// From then on by jumps: swapcontext asks the kernel for its signals each time.
static jmp_buf home, jumps[THREADS];
static bool begun[THREADS];
static char* stacks;
static bool done[THREADS];
static int arrived[THREADS / 32 + 1], turn[THREADS / 32 + 1];
static uint64_t slots[THREADS];
static long long loaded;  // bytes of logits, where rows are whole 16 bytes

inline void give_way() {
  const int mine = threadIdx.x;
  if (!_setjmp(jumps[mine])) _longjmp(home, 1);
  threadIdx.x = mine;
}
// Until it gives way, or ends.
__attribute__((noinline)) inline void run_fiber(int i) {
  threadIdx.x = i;
  if (_setjmp(home)) return;
  if (begun[i]) _longjmp(jumps[i], 1);
  begun[i] = true;
  setcontext(&fibers[i]);
}
// All `count` fibers of a group are here.
inline void meet(int group, int count) {
  const int now = turn[group];
  if (++arrived[group] == count) {
    arrived[group] = 0, ++turn[group];
    return;
  }
  while (turn[group] == now) give_way();
}
template <class T, class Pick>
inline auto exchange(T x, const Pick& pick) {
  const int warp = threadIdx.x / 32;
  slots[threadIdx.x] = 0;
  memcpy(&slots[threadIdx.x], &x, sizeof(T));
  meet(warp, 32);
  T all[32];
  for (int i = 0; i < 32; ++i) memcpy(&all[i], &slots[warp * 32 + i], sizeof(T));
  meet(warp, 32);
  return pick(all, threadIdx.x & 31);
}
template <class Body>
inline void run(int ctas, const Body& body) {
  static const Body* current;
  current = &body;
  if (!stacks) stacks = (char*)malloc((size_t)THREADS * kStack);
  gridDim.x = ctas;
  for (int cta = 0; cta < ctas; ++cta) {
    blockIdx.x = cta;
    for (int i = 0; i < THREADS; ++i) {
      done[i] = begun[i] = false;
      getcontext(&fibers[i]);
      fibers[i].uc_stack = {stacks + (size_t)i * kStack, 0, kStack};
      fibers[i].uc_link = nullptr;
      makecontext(&fibers[i], (void (*)()) + [] {
        (*current)();
        done[threadIdx.x] = true;
        _longjmp(home, 1);
      }, 0);
    }
    for (bool any = true; any;) {
      any = false;
      const int flip = rand() % THREADS;  // an order that no program may count on
      for (int n = 0; n < THREADS; ++n) {
        const int i = n ^ flip;
        if (!done[i]) any = true, run_fiber(i);
      }
    }
  }
}
}  // namespace host

inline void __syncthreads() { host::meet(THREADS / 32, THREADS); }
inline void __syncwarp() { host::meet(threadIdx.x / 32, 32); }
inline void __threadfence() {}
inline int __syncthreads_count(int x) {
  static int count;
  __syncthreads();
  count = 0;
  __syncthreads();
  count += x != 0;
  __syncthreads();
  return count;
}
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int by) {
  return host::exchange(x, [by](T* all, int lane) { return all[lane ^ by]; });
}
template <class T>
inline T __shfl_up_sync(unsigned, T x, int by) {
  return host::exchange(x, [by](T* all, int lane) { return all[lane < by ? lane : lane - by]; });
}
template <class T>
inline T __shfl_sync(unsigned, T x, int from) {
  return host::exchange(x, [from](T* all, int) { return all[from]; });
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return host::exchange((int)x, [](int* all, int) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (unsigned)all[i] << i;
    return bits;
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  return host::exchange(x, [](unsigned* all, int) { return *std::max_element(all, all + 32); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  return host::exchange(x, [](unsigned* all, int) { return *std::min_element(all, all + 32); });
}
template <class T>
inline T atomicAdd(T* at, T by) {
  const T old = *at;
  *at += by;
  return old;
}
inline int atomicMin(int* at, int by) {
  const int old = *at;
  *at = min(old, by);
  return old;
}
template <class T>
inline T __ldcg(const T* at) {
  return *at;
}
inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
inline unsigned long long __float2ull_rn(float x) { return llrintf(x); }
inline unsigned long long __double2ull_ru(double x) { return ceil(x); }

// What stands in for csrc/sample_math.cuh.
#define INFINITY_F INFINITY
inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline float log2_fast(float x) { return log2f(x); }
inline float half_to_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return __uint_as_float(sign | rest << 13) * 5.192296858534828e33f;  // 2^112
}
template <class Value, class Bits>
inline uint32_t larger_halves(uint32_t a, uint32_t b, const Value& value, const Bits&) {
  uint32_t y = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t x0 = a >> shift & 0xffffu, x1 = b >> shift & 0xffffu;
    const float v0 = value(x0), v1 = value(x1);
    y |= (v0 != v0 || v1 > v0 ? x1 : x0) << shift;
  }
  return y;
}
inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  return larger_halves(a, b, [](uint32_t x) { return __uint_as_float(x << 16); }, 0);
}
inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
  return larger_halves(a, b, [](uint32_t x) { return half_to_float(x); }, 0);
}
inline void load_once(const char* at, uint32_t (&raw)[4]) {
  host::loaded += 16;
  memcpy(raw, at, 16);
}
inline void wait_for_previous() {}
inline void start_next() {}
