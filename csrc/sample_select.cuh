// Selection without sorting: the position from the top at which a count or mass is reached.
//
// All sums are of integers, so the result depends on the row only.
#pragma once
#include "sample.cuh"

constexpr int kBinBits = 8;
constexpr int kRowBits = 10;  // where a row is walked whole, in as few walks as can be
constexpr int kOrderBits = 32 + kIdBits;
constexpr int kCandidates = 2048;  // tokens that are looked at in shared memory
constexpr int kParts = THREADS >= 512 ? 4 : THREADS >= 256 ? 2 : 1;
constexpr int kFew = THREADS / kParts;  // tokens of which each, by kParts threads, looks at all

struct Shared {
  u32 bins[3 << kBinBits];
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

// Bins of tokens, and 64 bits of what they count for.
struct Bins {
  u32* at;
  int bits;
  __device__ __forceinline__ u32& number(int bin) const { return at[bin]; }
  __device__ __forceinline__ u32& low(int bin) const { return at[bin + (1 << bits)]; }
  __device__ __forceinline__ u32& high(int bin) const { return at[bin + (2 << bits)]; }
  __device__ __forceinline__ u64 sum(int bin) const { return (u64)high(bin) << 32 | low(bin); }
  __device__ __forceinline__ void add(int bin, u64 counts) const {
    const u32 more = (u32)counts, old = atomicAdd(&low(bin), more);
    const u32 carried = (u32)(counts >> 32) + (old + more < more);
    if (carried) atomicAdd(&high(bin), carried);
    atomicAdd(&number(bin), 1u);
  }
};

static_assert(12 << kRowBits <= 8 * kCandidates, "a row's bins take its tokens' room");

// A token's measure: 1, or its weight; 0 below the cuts.
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

// All tokens of a row, in global memory. Their orders begin with a bin of their distance from the
// top, which says nothing new: one walk of even bins then tells more than the bits of floats would.
struct Row {
  const char* at;
  int vocab;
  float top, rate;  // bins of a logit's distance
  static constexpr bool kInMemory = true;
  __device__ __forceinline__ u64 place(u64 order) const {
    const float bin = fminf((top - value_of(key_in(order))) * rate, (1 << kRowBits) - 1.0f);
    return (u64)((1 << kRowBits) - 1 - (int)bin) << kOrderBits | order;
  }
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
      visit_vector(raw, v, [&](u64 order) { visit(place(order)); });
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
__device__ __forceinline__ void find_bin(u64 target, const Bins& bins, Shared& s, int lane) {
  const int mine = 1 << bins.bits >> 5, last = (1 << bins.bits) - 1 - mine * lane;
  u64 sum = 0;
#pragma unroll 4
  for (int i = 0; i < mine; ++i) sum += bins.sum(last - i);
  const u64 upto = scan_warp(sum, lane);
  u64 before = upto - sum;
  const bool here = before <= target && target < upto;
  const u32 any = __ballot_sync(kAll, here);
  if (any == 0 && lane == 0) s.bin = -1;
  if (!here) return;
  int bin = last;
#pragma unroll 1
  for (;; --bin) {
    const u64 in_bin = bins.sum(bin);
    if (target < before + in_bin) break;
    before += in_bin;
  }
  s.bin = bin, s.before = before, s.in_bin = (int)bins.number(bin);
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
                                         int few, const Bins& bins, Shared& s) {
#pragma unroll 1
    while (shift > stop) {
      const int bits = min(bins.bits, shift - stop);
#pragma unroll 1
      for (int i = threadIdx.x; i < 3 << bins.bits; i += THREADS) bins.at[i] = 0;
      __syncthreads();
      source.each([&](u64 order) {
        if (!has(order)) return;
        const u64 counts = measure(order);
        if (counts) bins.add((int)((order & mask) >> (shift - bits)) & ((1 << bits) - 1), counts);
      });
      __syncthreads();
      if (threadIdx.x < 32) find_bin(target, bins, s, threadIdx.x);
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
// kCandidates, which may be those of `source`; for a row's bins, too.
template <class Source>
__device__ __forceinline__ bool find(const Source& source, const Measure& measure, Search search,
                                     u64* buffer, Shared& s, u64& found) {
  Candidates few{buffer, 0};
  if constexpr (Source::kInMemory) {
    const Bins wide{(u32*)buffer, kRowBits};
    if (!search.narrow(source, measure, 0, kCandidates, wide, s)) return false;
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
  if (!search.narrow(few, measure, 0, 1, Bins{s.bins, kBinBits}, s)) return false;
  few.each([&](u64 order) {
    if (search.has(order) && measure(order)) s.at = order;
  });
  __syncthreads();
  found = s.at;
  __syncthreads();
  return true;
}
