// What kernels that exchange rows between the GPUs of a host share: numbers, memory, flags.
#pragma once
#ifndef RANKS
#define RANKS 2
#endif
#ifndef DTYPE  // 0: bf16, 1: fp16
#define DTYPE 0
#endif
#ifndef PDL
#define PDL 1
#endif
#ifndef SLOTS  // calls whose rows a rank has room for
#define SLOTS 2
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

// Two numbers in a word, the first in its low half.
__device__ __forceinline__ float2 wide(u32 word) {
  float2 f;
#if DTYPE == 0
  f.x = __uint_as_float(word << 16), f.y = __uint_as_float(word & 0xffff0000u);
#else
  asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b; }"
      : "=f"(f.x), "=f"(f.y)
      : "r"(word));
#endif
  return f;
}
__device__ __forceinline__ u32 narrow(float2 f) {
  u32 word;
#if DTYPE == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(f.y), "f"(f.x));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(f.y), "f"(f.x));
#endif
  return word;
}

constexpr int kMaxCtas = 256;

// What each GPU has in memory that all can reach; zeroed when it is made.
struct Shared {
  u32 flags[RANKS][kMaxCtas];  // by sender and CTA: the last call whose rows have come
  u32 calls;                   // calls that all CTAs have begun here
  u32 counted;                 // CTAs that have begun this one
  u32 pad[62];
};

struct Params {
  u64 shared[8];  // address of each rank's `Shared`, its slots behind it, as this GPU sees them
  u64 x, residual, weight, out;
  u64 slot_bytes;  // of one rank's rows of one call
  u64 limit_ns;    // a wait of so long ends the launch: a peer is gone
  int rank, rows, width;  // width: vectors of a row, or of a rank's part of it
  float eps;
  u32 call;  // where the host counts calls
};

// Where rank `at` is given the rows of rank `from`. Two halves of the memory take turns: a call's
// half was read by the call two before it, which ended everywhere before any GPU began the one in
// between, whose flags this GPU has seen.
__device__ __forceinline__ uint4* slot(const Params& p, int at, u32 call, int from) {
  const int index = (int)(call % SLOTS) * (RANKS - 1) + from - (from > at);
  return (uint4*)(p.shared[at] + sizeof(Shared) + index * p.slot_bytes);
}
__device__ __forceinline__ void publish(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ u32 seen(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ u64 now_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}
__device__ __forceinline__ void wait_for(const u32* flag, u32 call, u64 limit_ns) {
  const u64 began = now_ns();
  while ((int)(seen(flag) - call) < 0)
    if (now_ns() - began > limit_ns) __trap();
}

// What came before on the stream is there; the next launch may be set up.
__device__ __forceinline__ void begin() {
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The number of this call.
__device__ __forceinline__ u32 begin_call(const Params& p) {
  begin();
  return *(volatile u32*)&((Shared*)p.shared[p.rank])->calls + 1;
}

// The last CTA counts the call: all have read what it changes.
__device__ __forceinline__ void count_call(const Params& p, u32 call) {
  Shared* own = (Shared*)p.shared[p.rank];
  __threadfence();
  if (atomicAdd(&own->counted, 1) == gridDim.x - 1) {
    own->counted = 0;
    own->calls = call;
  }
}

// All that this CTA has sent is there, and what its twins on the other GPUs have sent is here. The
// call is counted meanwhile.
__device__ __forceinline__ void exchange(const Params& p, u32 call) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < RANKS && other != p.rank) {
    publish(&((Shared*)p.shared[other])->flags[p.rank][blockIdx.x], call);
    wait_for(&((Shared*)p.shared[p.rank])->flags[other][blockIdx.x], call, p.limit_ns);
  } else if (threadIdx.x == blockDim.x - 1) {
    count_call(p, call);
  }
  __syncthreads();
}
