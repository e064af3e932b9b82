// Gives every GPU of a host the columns of all: each has computed its part of every row.
//
// As in one_shot.cu every GPU writes into the others' memory, and a CTA waits for its twins alone.
#include "all_reduce/exchange.cuh"

constexpr int kThreads = 512;
constexpr int kUnrolled = 4;  // vectors of a thread that are under way at a time

// Copies a rank's part of the rows from or to rows of all parts: `place` of a vector in each.
__device__ __forceinline__ long long in_rows(const Params& p, long long at, int part) {
  const long long row = at / p.width;
  return row * p.width * RANKS + (long long)part * p.width + (at - row * p.width);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) gather(const __grid_constant__ Params p) {
  const u32 call = begin_call(p);
  uint4* x = (uint4*)p.x;
  const long long count = (long long)p.rows * p.width, step = (long long)gridDim.x * kThreads;
  const long long first = (long long)blockIdx.x * kThreads + threadIdx.x;
  for (long long at = first; at < count; at += kUnrolled * step) {
    uint4 values[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i)
      if (at + i * step < count) values[i] = x[in_rows(p, at + i * step, p.rank)];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i)
#pragma unroll
      for (int to = 0; to < RANKS; ++to)
        if (to != p.rank && at + i * step < count) slot(p, to, call, p.rank)[at + i * step] = values[i];
  }
  exchange(p, call);
#pragma unroll
  for (int from = 0; from < RANKS; ++from) {
    if (from == p.rank) continue;
    const uint4* given = slot(p, p.rank, call, from);
    for (long long at = first; at < count; at += kUnrolled * step) {
      uint4 values[kUnrolled];
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i)
        if (at + i * step < count) values[i] = __ldcg(given + at + i * step);
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i)
        if (at + i * step < count) x[in_rows(p, at + i * step, from)] = values[i];
    }
  }
}
