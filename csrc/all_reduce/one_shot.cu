// Sums rows over the GPUs of a host in one launch, and adds and norms what comes of it.
//
// Every GPU writes its rows into the others' memory and reads the others' rows from its own, so that
// a sum takes one way over the links. Rows are added in the order of ranks: all GPUs get the same
// bits, whatever the grid, and whatever the rows beside them.
//
// A CTA waits for the CTA of the same index on the other GPUs, never for one of its own launch; CTAs
// start in the order of their index, so those of one index always come to run together.
#ifndef MODE  // 0: x = sum; 1: residual += sum; 2: and out = norm of that
#define MODE 2
#endif
#ifndef VECTORS  // 16 bytes each that a thread holds of a row
#define VECTORS 4
#endif
#include "all_reduce/exchange.cuh"

constexpr int kGroup = 256;  // threads of a row
constexpr int kGroups = 2;   // rows of a CTA at a time
constexpr int kWarps = kGroup / 32;
constexpr int kAtOnce = RANKS * VECTORS > 16 ? 1 : RANKS;  // ranks whose rows are loaded together

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
  if (lane % 32 == 0) sums[group * kWarps + lane / 32] = value;
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroup) : "memory");
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += sums[group * kWarps + i];
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroup) : "memory");
  return total;
}

// Loads come before stores, which the compiler cannot tell apart: each would wait for the one before.
__device__ __forceinline__ void send(const Params& p, u32 call, int row, int lane) {
  const uint4* x = (const uint4*)p.x + (long long)row * p.width;
  uint4 values[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    if (lane + i * kGroup < p.width) values[i] = x[lane + i * kGroup];
#pragma unroll kAtOnce
  for (int to = 0; to < RANKS; ++to) {
    if (to == p.rank) continue;
    uint4* given = slot(p, to, call, p.rank) + (long long)row * p.width;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (lane + i * kGroup < p.width) given[lane + i * kGroup] = values[i];
  }
}

// What the products before have pushed out of the L2 cache comes back while rows are on their way.
__device__ __forceinline__ void fetch(const Params& p, int row, int lane) {
  const uint4* residual = (const uint4*)p.residual + (long long)row * p.width;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = lane + i * kGroup;
    if (at >= p.width || row >= p.rows) continue;
    if (MODE != 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual + at));
    if (MODE == 2) asm volatile("prefetch.global.L2 [%0];" ::"l"((const uint4*)p.weight + at));
  }
}

// A row: the sum over ranks, added and normed as MODE says.
__device__ __forceinline__ void finish(const Params& p, u32 call, int row, int lane, int group,
                                       float* sums) {
  const long long first = (long long)row * p.width;
  uint4* into = (uint4*)(MODE == 0 ? p.x : p.residual) + first;
  uint4 kept[VECTORS] = {};  // the residual; then what the norm is of, the sum as it was rounded
  float2 sum[VECTORS][4] = {};
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    if (MODE != 0 && lane + i * kGroup < p.width) kept[i] = into[lane + i * kGroup];
#pragma unroll kAtOnce
  for (int from = 0; from < RANKS; ++from) {
    const uint4* rows = (from == p.rank ? (const uint4*)p.x : slot(p, p.rank, call, from)) + first;
    uint4 given[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (lane + i * kGroup < p.width) given[i] = __ldcg(rows + lane + i * kGroup);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) add(sum[i], given[i]);
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (MODE != 0) add(sum[i], kept[i]);
    kept[i] = packed(sum[i]);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = lane + i * kGroup;
    if (at >= p.width) continue;
    into[at] = kept[i];
    if (MODE != 2) continue;
    float2 rounded[4] = {};
    add(rounded, kept[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) squares += rounded[j].x * rounded[j].x + rounded[j].y * rounded[j].y;
  }
  if (MODE != 2) return;
  const float scale = rsqrtf(group_sum(squares, sums, group) / (8.0f * p.width) + p.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = lane + i * kGroup;
    if (at >= p.width) continue;
    float2 row_part[4] = {}, weight[4] = {};
    add(row_part, kept[i]);
    add(weight, __ldg((const uint4*)p.weight + at));  // read-only: loaded ahead of the stores
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      row_part[j].x *= scale * weight[j].x;
      row_part[j].y *= scale * weight[j].y;
    }
    ((uint4*)p.out)[first + at] = packed(row_part);
  }
}

// Of two ranks two such CTAs fit an SM where rows are not very wide: sums of both lanes can always run
// together.
#ifndef COPIED
extern "C" __global__ void __launch_bounds__(kGroup* kGroups, VECTORS > 3 || RANKS > 2 ? 1 : 2)
one_shot(const __grid_constant__ Params p) {
  __shared__ float sums[kGroups * kWarps];
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int first = blockIdx.x + group * gridDim.x, step = gridDim.x * kGroups;
  fetch(p, first, lane);
  const u32 call = begin_call(p);
  for (int row = first; row < p.rows; row += step) send(p, call, row, lane);
  exchange(p, call);
  for (int row = first; row < p.rows; row += step) finish(p, call, row, lane, group, sums);
}
#else
// Copy engines bring the others' rows, and the number of this call behind them.
extern "C" __global__ void __launch_bounds__(kGroup* kGroups, VECTORS > 3 || RANKS > 2 ? 1 : 2)
one_shot(const __grid_constant__ Params p) {
  __shared__ float sums[kGroups * kWarps];
  begin();
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup, other = threadIdx.x;
  if (other < RANKS && other != p.rank)
    wait_for(&((Shared*)p.shared[p.rank])->flags[other][0], p.call, p.limit_ns);
  __syncthreads();
  for (int row = blockIdx.x + group * gridDim.x; row < p.rows; row += gridDim.x * kGroups)
    finish(p, p.call, row, lane, group, sums);
}
#endif
