// A decode warp's ring of keys and values in shared memory, and the copies that fill it.
//
// Each warp has a slot for a tile of K and one for V: 16 KB in flight per warp at d = 128, and
// no barrier between warps. Each lane copies 16 bytes (cp.async), wherever the pages are.
#pragma once
#include "attention_merge.cuh"
#include "barrier.cuh"

#ifndef TEAMS
#define TEAMS 3
#endif
#ifndef ROWS8  // groups of 8 packed rows
#define ROWS8 1
#endif
#ifndef ROWS4  // at most 4 packed rows, which then lie in every second column
#define ROWS4 0
#endif

namespace decode {

constexpr int kTeamThreads = 128;
constexpr int kSize = KV8 ? 1 : 2;             // bytes of a cache element
constexpr int kStep = KV8 ? 64 : 32;           // keys of a tile, walked at a time
constexpr int kTiles = kStep / 16;             // row tiles of mma.sync in a step
constexpr int kLookups = kStep / 32;           // rows of a step that a lane looks up, one by one
constexpr int kRowBytes = D * kSize;
constexpr int kChunks = kRowBytes / 16;        // 16-byte chunks of a row
// 16-byte chunks of a row go together in groups of 8, 4 or 2, as divide it. A warp copies a group of
// each of 4 rows at a time (or of 8, 16): whole cache lines of 128 bytes where there are 8, with the
// rest of a row at constant offsets.
constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
constexpr int kLaneRows = 32 / kGroup;
constexpr int kSlot = kStep * kRowBytes;
constexpr int kRing = 2 * kSlot;               // K, V

struct Lane {
  int lane, g, t, warp, thread, team;
  __device__ __forceinline__ Lane() {
    lane = threadIdx.x & 31;
    g = lane >> 2;
    t = lane & 3;
    warp = (threadIdx.x >> 5) & 3;
    thread = threadIdx.x & (kTeamThreads - 1);
    team = threadIdx.x / kTeamThreads;
  }
};

// Makes the compiler keep x in a register; otherwise it recomputes addresses at each step.
__device__ __forceinline__ u32 kept(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }

// Chunks of a group trade places, so that the same chunk of 8 rows in a row meets no bank twice. Rows
// are not padded instead: a sector of memory (32 bytes) that is not one of shared memory is asked
// for twice.
__device__ __forceinline__ int swizzle(int row) { return row / (8 / kGroup); }

// Offset of 16-byte chunk c of row r in a slot.
__device__ __forceinline__ u32 chunk_at(int r, int c) {
  return r * kRowBytes + (c & ~(kGroup - 1)) * 16 + ((c ^ swizzle(r)) & (kGroup - 1)) * 16;
}
// The same `rows` further down and `chunks` (even) further right, of an offset that chunk_at gave
// for a row that has no bit of `rows` below 8, and a chunk no bit of `chunks`: constants, unrolled.
__device__ __forceinline__ u32 moved(u32 at, int rows, int chunks) {
  return (at ^ (((swizzle(rows) ^ chunks) & (kGroup - 1)) * 16)) + rows * kRowBytes +
         (chunks & ~(kGroup - 1)) * 16;
}

// Keys and values are read once, so they are evicted from L2 first and displace nothing else. The
// policy is the value of createpolicy.fractional.L2::evict_first for 1.0; made by that instruction
// it costs each copy a register move.
constexpr u64 kReadOnce = 0x12F0000000000000ull;
__device__ __forceinline__ void copy16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(kReadOnce)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_but_one() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}

// An item spread over the warp: lane i has word i.
struct Item {
  int word;
  __device__ __forceinline__ int operator[](int i) const {
    return __shfl_sync(0xffffffffu, word, i);
  }
};

// Source rows of a step's copies, in units of 32 bytes from the head's first row.
struct Rows {
  int whole;            // 16 keys in a row lie a token apart: `row` is of the first of each 16
  u32 row[kStep / 16];  // else, in the first kLookups: of key 32 * i + lane
};

// A lane looks up the row of every 16th key, every 4th where pages are smaller (log2 of that).
__device__ __forceinline__ int log_looked(const AttentionParams& p) {
  return p.page_shift >= 4 ? 4 : 2;
}
// Keys whose pages a warp looks up at a time: a stretch.
__device__ __forceinline__ int stretch_keys(const AttentionParams& p) {
  return 32 << log_looked(p);
}

// The rows of a whole step, `offset` keys into the stretch of which lane l has the row of key 16 l
// in `words`. Pages have 16 tokens or more.
__device__ __forceinline__ void find_whole(Rows& r, u32 words, int offset) {
  const int from = offset >> 4;
#pragma unroll
  for (int g = 0; g < kStep / 16; ++g)
    r.row[g] = __shfl_sync(~0u, words, from + g);
}

// The rows of any step [key, key + kStep) of the stretch at `stretch`. Keys outside [first, last]
// get the row of the nearest inside: what lies there is finite where the request's own values are,
// and no key outside reaches a result.
__device__ __forceinline__ void find_each(Rows& r, const AttentionParams& p, u32 words, int stretch,
                                          int key, int first, int last, Item item, int lane) {
  if (p.page_shift >= 2) {
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int at = min(max(key + i * 32 + lane, first), last);
      r.row[i] = __shfl_sync(~0u, words, (at - stretch) >> log_looked(p)) +
                 (at & ((1 << log_looked(p)) - 1)) * p.token32;
    }
  } else {  // pages of 1 and 2 tokens: looked up here and now
    const PageRow pages(p, item[REQUEST]);
#pragma unroll
    for (int i = 0; i < kLookups; ++i) {
      const int at = min(max(key + i * 32 + lane, first), last);
      r.row[i] = row32(p, pages.page(p, at), at);
    }
  }
}

// Copies a step's rows into a slot; `to` and `base` (the head's rows) include the lane's offset,
// which of whole steps is that of its row, too.
__device__ __forceinline__ void copy_whole(u32 to, const char* base, const Rows& r,
                                           const AttentionParams& p) {
  const u64 step = p.token32 * (32 * kLaneRows);
#pragma unroll
  for (int g = 0; g < kStep / 16; ++g) {
    const char* from = base + (u64)r.row[g] * 32;
#pragma unroll
    for (int i = 0; i < 16 / kLaneRows; ++i, from += step)
#pragma unroll
      for (int c = 0; c < kChunks; c += kGroup)
        copy16(moved(to, g * 16 + i * kLaneRows, c), from + c * 16);
  }
}
__device__ __forceinline__ void copy_each(u32 to, const char* base, const Rows& r, int lane) {
#pragma unroll
  for (int i = 0; i < kStep / kLaneRows; ++i) {
    const int key = i * kLaneRows + lane / kGroup;
    const u32 row = __shfl_sync(~0u, r.row[kLookups > 1 ? i * kLaneRows / 32 : 0], key & 31);
    const char* from = base + (u64)row * 32;
#pragma unroll
    for (int c = 0; c < kChunks; c += kGroup)
      copy16(moved(to, i * kLaneRows, c), from + c * 16);
  }
}

}  // namespace decode
