// What the sampler's kernels share: parameters, logits as keys, weights, random numbers.
//
// A row is cut into pieces of 32 groups of 8 vectors of 16 bytes, whatever the batch and the budget:
// lane l of a warp reads vectors l, l + 32, ... of its piece, and these are group l. Nothing is
// included, so nvrtc compiles the files as they stand.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// DTYPE 0 bf16, 1 fp16, 2 fp32; ALIGNED: rows begin and end at whole 16 bytes; PDL: may be launched
// before the kernel ahead has ended.
#ifndef DTYPE
#define DTYPE 0
#endif
#ifndef ALIGNED
#define ALIGNED 1
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef PDL
#define PDL 0
#endif

constexpr int kWarps = THREADS / 32;
constexpr int kVector = DTYPE == 2 ? 4 : 8;  // elements of 16 bytes
constexpr int kGroupVectors = 8;
constexpr int kPieceVectors = 32 * kGroupVectors;
constexpr int kIdBits = 18;  // vocabularies of up to 262,144 tokens
constexpr u32 kIdMask = (1u << kIdBits) - 1;
constexpr int kMostPieces = (1 << kIdBits) / (kPieceVectors * 4);
constexpr int kNowhere = 1 << 24;  // a vector behind every vocabulary
constexpr u32 kAll = 0xffffffffu;
constexpr u32 kNothing = 0x007fffffu;   // the key of -inf
constexpr u32 kGreatest = 0xff7fffffu;  // the key of the largest finite float
constexpr float kUnit = 1099511627776.0f;  // 2^40: the weight of a row's best token
constexpr float kLog2e = 1.4426950408889634f;

// Addresses (null: absent, then the number of the same name counts), sizes in elements.
struct SampleParams {
  const char* logits;
  int* out;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const long long* seeds;
  const int* steps;
  unsigned char* finished;
  int* lengths;
  const int* max_lengths;
  const int* stop_tokens;
  int* counters;  // [rows]: pieces that are done; 0 before and after every launch
  u32* groups;    // [rows, 32 * pieces]: the largest key of each group
  float* sums;    // [rows, pieces]: weights of a piece, its best token's being 1
  long long row_bytes, stop_stride, seed;
  int rows, vocab, pieces, ctas_per_row, num_stop, pad_token, all_top_k, step;
  float all_temperature, all_top_p, all_min_p;
};

#include "sample_math.cuh"

// Floats in the order of unsigned integers.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = __float_as_uint(x);
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key ^ ((u32)((int)~key >> 31) | 0x80000000u));
}

// One zero, no NaN (it counts as -inf), no +inf (it counts as the largest finite float).
__device__ __forceinline__ float plain(float x) {
  const float y = x != x ? -INFINITY_F : x;
  return fminf(y, 3.4028234663852886e38f) + 0.0f;
}

// Value first, then the lower id: no two tokens of a row are equal.
__device__ __forceinline__ u64 order_of(u32 key, int id) {
  return (u64)key << kIdBits | (~(u32)id & kIdMask);
}
__device__ __forceinline__ int id_of(u64 order) { return (int)(~(u32)order & kIdMask); }
__device__ __forceinline__ u32 key_in(u64 order) { return (u32)(order >> kIdBits); }

// A token's share of its row, in units of 2^-40 of the best token's: an integer, so that sums do not
// depend on the order in which they are made.
__device__ __forceinline__ float ratio(float x, float top, float scale) {
  return exp2_fast(fmaxf((x - top) * scale, -150.0f));
}
__device__ __forceinline__ u64 weight(float x, float top, float scale) {
  return __float2ull_rn(ratio(x, top, scale) * kUnit);
}

// Vector `v` of a row: elements from v * kVector, -inf behind the vocabulary.
__device__ __forceinline__ void load_vector(const char* row, int v, int vocab, u32 (&raw)[4]) {
  constexpr u32 kEmpty = DTYPE == 0 ? 0xff80ff80u : DTYPE == 1 ? 0xfc00fc00u : 0xff800000u;
  const int first = v * kVector;
#pragma unroll
  for (int i = 0; i < 4; ++i) raw[i] = kEmpty;
  if constexpr (ALIGNED) {
    if (first < vocab) load_once(row + v * 16ll, raw);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (DTYPE == 2) {
        if (first + i < vocab) raw[i] = *(const u32*)(row + 4ll * (first + i));
      } else {
        const unsigned short* at = (const unsigned short*)row + first + 2 * i;
        if (first + 2 * i < vocab) raw[i] = (raw[i] & 0xffff0000u) | at[0];
        if (first + 2 * i + 1 < vocab) raw[i] = (raw[i] & 0xffffu) | (u32)at[1] << 16;
      }
  }
}

// Element `e` of a word, and of a vector.
constexpr int kPerWord = kVector / 4;
__device__ __forceinline__ float part(u32 word, int e) {
  if constexpr (DTYPE == 2) return __uint_as_float(word);
  if constexpr (DTYPE == 0) return __uint_as_float(e ? word & 0xffff0000u : word << 16);
  return half_to_float(e ? word >> 16 : word & 0xffffu);
}
__device__ __forceinline__ float element(const u32 (&raw)[4], int e) {
  return part(raw[e / kPerWord], e % kPerWord);
}

// The larger of each element; NaN loses.
__device__ __forceinline__ u32 max_raw(u32 a, u32 b) {
  if constexpr (DTYPE == 0) return max_bf16x2(a, b);
  if constexpr (DTYPE == 1) return max_f16x2(a, b);
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}

// Random bits of (seed, step): Philox4x32-10 (Salmon et al., SC11).
struct Random {
  u64 first, second;
  __device__ __forceinline__ Random(u64 seed, u32 step) {
    u32 c0 = step, c1 = 0, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
      const u64 a = (u64)c0 * 0xd2511f53u, b = (u64)c2 * 0xcd9e8d57u;
      c0 = (u32)(b >> 32) ^ c1 ^ k0, c1 = (u32)b;
      c2 = (u32)(a >> 32) ^ c3 ^ k1, c3 = (u32)a;
      k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    first = (u64)c1 << 32 | c0, second = (u64)c3 << 32 | c2;
  }
};

// How a row's token is chosen, with what cannot be clamped to what can.
struct Choice {
  bool greedy;
  int top_k;       // 0: all
  float scale;     // of logits, to log2 units
  float top_p;     // 1: all
  float min_log2;  // -inf: all
  __device__ __forceinline__ Choice(const SampleParams& p, int row) {
    const float t = p.temperature ? p.temperature[row] : p.all_temperature;
    const float least = p.min_p ? p.min_p[row] : p.all_min_p;
    const int k = p.top_k ? p.top_k[row] : p.all_top_k;
    top_p = p.top_p ? p.top_p[row] : p.all_top_p;
    greedy = !(t >= 1e-5f);
    scale = greedy ? 0.0f : kLog2e / fminf(t, 1e30f);
    top_k = k > 0 && k < p.vocab ? k : 0;
    top_p = top_p < 1.0f ? fmaxf(top_p, 0.0f) : 1.0f;
    min_log2 = least > 0.0f ? log2_fast(fminf(least, 1.0f)) : -INFINITY_F;
  }
  __device__ __forceinline__ bool nucleus() const { return top_p < 1.0f; }
  __device__ __forceinline__ bool filtered() const {
    return top_k || nucleus() || min_log2 > -INFINITY_F;
  }
  // Whether what all tokens weigh plays a part.
  __device__ __forceinline__ bool sums() const {
    return !greedy && !top_k && (nucleus() || min_log2 == -INFINITY_F);
  }
};
