// Sums rows over the GPUs of a host in one launch, and adds and norms what comes of it.
//
// Every GPU writes its rows into the others' memory and reads the others' rows from its own, so that
// a sum takes one way over the links. Rows are added in the order of ranks: all GPUs get the same
// bits, whatever the grid.
//
// A CTA waits for the CTA of the same index on the other GPUs, never for one of its own launch; CTAs
// start in the order of their index, so those of one index always come to run together.
//
// Two halves of the memory take turns: a call's half was read by the call two before it, which ended
// everywhere before any GPU began the one in between, whose flags this GPU has seen.
#ifndef RANKS
#define RANKS 2
#endif
#ifndef DTYPE  // 0: bf16, 1: fp16
#define DTYPE 0
#endif
#ifndef MODE  // 0: x = sum; 1: residual += sum; 2: and out = norm of that
#define MODE 2
#endif
#ifndef VECTORS  // 16 bytes each that a thread holds of a row
#define VECTORS 4
#endif
#ifndef PDL
#define PDL 1
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

constexpr int kGroup = 128;  // threads of a row
constexpr int kGroups = 4;   // rows of a CTA at a time
constexpr int kMaxCtas = 256;

// What each GPU has in memory that all can reach; zeroed when it is made.
struct Shared {
  u32 flags[RANKS][kMaxCtas];  // by sender and CTA: the last call whose rows have come
  u32 calls;                   // calls that are over here
  u32 ended;                   // CTAs of this call that are over
  u32 pad[62];
};

struct Params {
  u64 shared[8];  // address of each rank's `Shared`, its slots behind it, as this GPU sees them
  u64 x, residual, weight, out;
  u64 slot_bytes;  // of one rank's rows of one call
  u64 limit_ns;    // a wait of so long ends the launch: a peer is gone
  int rank, rows, width;  // width: vectors of a row
  float eps;
};

__device__ __forceinline__ uint4* slot(const Params& p, int at, u32 call, int from) {
  return (uint4*)(p.shared[at] + sizeof(Shared) + ((call & 1) * RANKS + from) * p.slot_bytes);
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

__device__ __forceinline__ void add(float2 (&sum)[4], const uint4& v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = wide(words[i]);
    sum[i].x += f.x, sum[i].y += f.y;
  }
}
__device__ __forceinline__ uint4 packed(const float2 (&sum)[4]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = narrow(sum[i]);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The sum over a group's threads; `sums` has a word a warp.
__device__ __forceinline__ float group_sum(float value, float* sums, int group) {
#pragma unroll
  for (int by = 16; by; by /= 2) value += __shfl_xor_sync(0xffffffffu, value, by);
  const int lane = threadIdx.x % kGroup;
  if (lane % 32 == 0) sums[group * 4 + lane / 32] = value;
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroup) : "memory");
  const float* own = sums + group * 4;
  const float total = (own[0] + own[1]) + (own[2] + own[3]);
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroup) : "memory");
  return total;
}

__device__ __forceinline__ void send(const Params& p, u32 call, int first, int step, int lane) {
  const uint4* x = (const uint4*)p.x;
  for (int row = first; row < p.rows; row += step)
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int at = lane + i * kGroup;
      if (at >= p.width) continue;
      const long long place = (long long)row * p.width + at;
      const uint4 value = x[place];
#pragma unroll
      for (int to = 0; to < RANKS; ++to)
        if (to != p.rank) slot(p, to, call, p.rank)[place] = value;
    }
}

// A row: the sum over ranks, added and normed as MODE says.
__device__ __forceinline__ void finish(const Params& p, u32 call, int row, int lane, int group,
                                       float* sums) {
  uint4 kept[VECTORS];  // what the norm is of: the sum as it was rounded
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = lane + i * kGroup;
    if (at >= p.width) continue;
    const long long place = (long long)row * p.width + at;
    float2 sum[4] = {};
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      const uint4* rows = from == p.rank ? (const uint4*)p.x : slot(p, p.rank, call, from);
      add(sum, __ldcg(rows + place));
    }
    if (MODE == 0) {
      ((uint4*)p.x)[place] = packed(sum);
      continue;
    }
    uint4* residual = (uint4*)p.residual + place;
    add(sum, *residual);
    kept[i] = packed(sum);
    *residual = kept[i];
    if (MODE == 2) {
      float2 rounded[4] = {};
      add(rounded, kept[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) squares += rounded[j].x * rounded[j].x + rounded[j].y * rounded[j].y;
    }
  }
  if (MODE != 2) return;
  const float scale = rsqrtf(group_sum(squares, sums, group) / (8.0f * p.width) + p.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = lane + i * kGroup;
    if (at >= p.width) continue;
    float2 row_part[4] = {}, weight[4] = {};
    add(row_part, kept[i]);
    add(weight, __ldg((const uint4*)p.weight + at));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      row_part[j].x *= scale * weight[j].x;
      row_part[j].y *= scale * weight[j].y;
    }
    ((uint4*)p.out)[(long long)row * p.width + at] = packed(row_part);
  }
}

extern "C" __global__ void __launch_bounds__(kGroup* kGroups)
all_reduce(const __grid_constant__ Params p) {
  __shared__ float sums[kGroups * 4];
#if PDL
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  Shared* own = (Shared*)p.shared[p.rank];
  const u32 call = *(volatile u32*)&own->calls + 1;
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int first = blockIdx.x + group * gridDim.x, step = gridDim.x * kGroups;
  send(p, call, first, step, lane);
  __syncthreads();
  const int other = threadIdx.x;
  if (other < RANKS && other != p.rank) {
    __threadfence_system();
    publish(&((Shared*)p.shared[other])->flags[p.rank][blockIdx.x], call);
    wait_for(&own->flags[other][blockIdx.x], call, p.limit_ns);
  }
  __syncthreads();
  for (int row = first; row < p.rows; row += step) finish(p, call, row, lane, group, sums);
  __syncthreads();
  if (threadIdx.x == 0) {  // the last CTA ends the call: all have read `calls`
    __threadfence();
    if (atomicAdd(&own->ended, 1) == gridDim.x - 1) {
      own->ended = 0;
      own->calls = call;
    }
  }
}
