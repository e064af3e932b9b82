// Selection without a sort: where a row's order, walked from the top, has had a given count or mass.
//
// All sums are of integers, so that what is found depends on the row alone.
#pragma once
#include "sample.cuh"

constexpr int kBins = 256;
constexpr int kBinBits = 8;
constexpr int kCandidates = 2048;  // tokens that are looked at in shared memory
constexpr int kParts = THREADS >= 512 ? 4 : THREADS >= 256 ? 2 : 1;
constexpr int kFew = THREADS / kParts;  // tokens of which each, by kParts threads, looks at all

struct Shared {
  u32 number[kBins], low[kBins], high[kBins];  // tokens and their weight (64 bits) in each bin
  u64 warp_sums[32], pieces[kMostPieces];
  u64 before, at;  // what lies above the bin that was found; the token that was found
  u64 kept[2];     // what top-k leaves, what all filters leave
  int bin, in_bin;
  int listed, candidates, token;
  bool last;
};

__device__ __forceinline__ u64 sum_warp(u64 x) {
#pragma unroll
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(kAll, x, by);
  return x;
}
__device__ __forceinline__ u64 scan_warp(u64 x, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u64 y = __shfl_up_sync(kAll, x, by);
    if (lane >= by) x += y;
  }
  return x;
}

// What a token counts for: 1, or its weight; 0 below the cuts.
struct Measure {
  u64 cut;         // lowest order that counts
  float top, scale, min_log2;
  bool count;
  __device__ __forceinline__ u64 operator()(u64 order) const {
    if (order < cut) return 0;
    if (count) return 1;
    const float x = value_of(key_in(order));
    return (x - top) * scale < min_log2 ? 0 : weight(x, top, scale);
  }
};

// Tokens in shared memory.
struct Candidates {
  const u64* orders;
  int count;
  static constexpr bool kInMemory = false;
  template <class Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) visit(orders[i]);
  }
};

// The largest of each group, which has no id.
struct Groups {
  const u32* keys;
  int count;
  static constexpr bool kInMemory = false;
  template <class Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) visit((u64)keys[i] << kIdBits);
  }
};

// The tokens of a vector, those of -inf left out; word by word, or the code would be long.
template <class Visit>
__device__ __forceinline__ void visit_vector(u32 (&raw)[4], int v, const Visit& visit) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) {
      const u32 key = key_of(plain(part(raw[0], e)));
      if (key > kNothing) visit(order_of(key, v * kVector + i * kPerWord + e));
    }
    raw[0] = raw[1], raw[1] = raw[2], raw[2] = raw[3];
  }
}

// All tokens of a row, in global memory.
struct Row {
  const char* at;
  int vocab;
  static constexpr bool kInMemory = true;
  template <class Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    const int vectors = (vocab + kVector - 1) / kVector;
    u32 raw[4], next[4];
    load_vector(at, threadIdx.x, vocab, next);
#pragma unroll 1
    for (int v = threadIdx.x; v < vectors; v += THREADS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = next[i];
      load_vector(at, v + THREADS, vocab, next);
      visit_vector(raw, v, visit);
    }
  }
};

// The sum of all measures, for every thread.
template <class Source>
__device__ __forceinline__ u64 total(const Source& source, const Measure& measure, Shared& s) {
  u64 sum = 0;
  source.each([&](u64 order) { sum += measure(order); });
  sum = sum_warp(sum);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
  if (lane == 0) s.warp_sums[warp] = sum;
  __syncthreads();
  return sum_warp(lane < kWarps ? s.warp_sums[lane] : 0);
}

// The bin in which `target` falls, bins walked from the last, by one warp; -1 where they end above.
__device__ __forceinline__ void find_bin(u64 target, Shared& s, int lane) {
  constexpr int kMine = kBins / 32;
  const int last = kBins - 1 - kMine * lane;
  u64 mine = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) mine += (u64)s.high[last - i] << 32 | s.low[last - i];
  const u64 upto = scan_warp(mine, lane);
  u64 before = upto - mine;
  const bool here = before <= target && target < upto;
  const u32 any = __ballot_sync(kAll, here);
  if (any == 0 && lane == 0) s.bin = -1;
  if (!here) return;
  int bin = last;
#pragma unroll 1
  for (;; --bin) {
    const u64 in_bin = (u64)s.high[bin] << 32 | s.low[bin];
    if (target < before + in_bin) break;
    before += in_bin;
  }
  s.bin = bin, s.before = before, s.in_bin = (int)s.number[bin];
}

// Bits of the orders that are known of what is looked for, and what remains above it. With a `mask`
// of kIdMask tokens are walked by their ids, the lowest first.
struct Search {
  u64 target, mask, prefix;
  int shift;
  // All that the orders from `low` to `high` have in common is known from the start.
  __device__ __forceinline__ Search(u64 target, u64 low, u64 high, u64 mask = ~0ull)
      : target(target), mask(mask) {
    shift = low == high ? 0 : 64 - __clzll((long long)(low ^ high));
    prefix = high >> shift;
  }
  __device__ __forceinline__ bool has(u64 order) const { return (order & mask) >> shift == prefix; }
  // Learns bits down to bit `stop`, until at most `few` tokens share them. False: the target lies
  // behind all tokens.
  template <class Source>
  __device__ __forceinline__ bool narrow(const Source& source, const Measure& measure, int stop,
                                         int few, Shared& s) {
#pragma unroll 1
    while (shift > stop) {
      const int bits = min(kBinBits, shift - stop);
#pragma unroll 1
      for (int i = threadIdx.x; i < kBins; i += THREADS) s.number[i] = s.low[i] = s.high[i] = 0;
      __syncthreads();
      source.each([&](u64 order) {
        if (!has(order)) return;
        const u64 counts = measure(order);
        if (counts == 0) return;
        const int bin = (int)(order >> (shift - bits)) & ((1 << bits) - 1);
        const u32 low = (u32)counts, old = atomicAdd(&s.low[bin], low);
        const u32 high = (u32)(counts >> 32) + (old + low < low);
        if (high) atomicAdd(&s.high[bin], high);
        atomicAdd(&s.number[bin], 1u);
      });
      __syncthreads();
      if (threadIdx.x < 32) find_bin(target, s, threadIdx.x);
      __syncthreads();
      if (s.bin < 0) return false;
      target -= s.before;
      prefix = prefix << bits | (u32)s.bin;
      shift -= bits;
      if (s.in_bin <= few) break;
    }
    return true;
  }
};

// The token of `source` at which the measure passes the search's target: what lies above measures at
// most that, and with it more. False: all measure no more than that. `buffer` has room for
// kCandidates, which may be those of `source`.
template <class Source>
__device__ __forceinline__ bool find(const Source& source, const Measure& measure, Search search,
                                     u64* buffer, Shared& s, u64& found) {
  Candidates few{buffer, 0};
  if constexpr (Source::kInMemory) {
    if (!search.narrow(source, measure, 0, kCandidates, s)) return false;
    if (threadIdx.x == 0) s.candidates = 0;
    __syncthreads();
    source.each([&](u64 order) {
      if (!search.has(order) || measure(order) == 0) return;
      const int slot = atomicAdd(&s.candidates, 1);
      if (slot < kCandidates) buffer[slot] = order;
    });
    __syncthreads();
    few.count = min(s.candidates, kCandidates);
  } else {
    few = source;
  }
  if (!search.narrow(few, measure, 0, 1, s)) return false;
  few.each([&](u64 order) {
    if (search.has(order) && measure(order)) s.at = order;
  });
  __syncthreads();
  found = s.at;
  __syncthreads();
  return true;
}
