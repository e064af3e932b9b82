// The sampler's PTX only, which tests replace to compile the sampler without CUDA.
#pragma once

#define INFINITY_F __int_as_float(0x7f800000)

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float half_to_float(u32 bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)bits));
  return y;
}
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
  u32 y;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
  u32 y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// 16 bytes past L1: a row is read once, but for a few groups. Not by the read-only path: with PDL
// the logits may be written after this kernel began.
__device__ __forceinline__ void load_once(const char* address, u32 (&raw)[4]) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw[0]), "=r"(raw[1]), "=r"(raw[2]), "=r"(raw[3])
               : "l"(address)
               : "memory");
}

// Waits until the previous kernel is done and its writes are visible; lets the next one begin.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void start_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
