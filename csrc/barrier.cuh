// Barriers in shared memory and by name, in PTX.
#pragma once
#include "attention.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// An arrival that also says how many bytes the copy engine will bring.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Whether the phase of `parity` is over; may wait for a while before it gives up.
__device__ __forceinline__ bool barrier_try(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Its memory may be used for something else.
__device__ __forceinline__ void barrier_drop(u32 barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

template <int COUNT>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}
