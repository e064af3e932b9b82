// A decode warp's computation of a step: scores, softmax, weighted values, by mma.sync.
//
// Scores are computed transposed, S^T = K Q^T (keys on the 16-row side), so that 8 packed rows cost
// no padding to 16; P^T reaches the second product, O^T = V^T P^T, by movmatrix.
#pragma once
#include "attention_decode_copy.cuh"

namespace decode {

constexpr int kBlocks = D / 16;                // blocks of 16 dims
static_assert(ROWS8 * D <= 256, "a thread's registers hold the queries");
// A lane's products are of columns 2t and 2t + 1. Where 4 rows are all, both are of one row, which
// halves a lane's softmax; a row's sums are in one of them, with e4m3 in each of every second dim.
constexpr int kColumns = ROWS4 ? 1 : 2;
constexpr int kSums = KV8 && ROWS4 ? D / 32 : D / 16;  // blocks of a lane's sums
// The packed row in a lane's column c of group n.
__device__ __forceinline__ int row_of(int n, int c, int t) {
  return ROWS4 ? t : n * 8 + 2 * t + c;
}
constexpr float kSlack = 8.0f;  // a sum is rescaled when its maximum grows by more, in log2 units
// The maximum of a row that has seen no keys: finite, so that exponents need no test.
constexpr float kUnseen = -3.402823466e38f;

// row / group by a multiplication: exact for the rows of a decode request.
__device__ __forceinline__ int token_of(const AttentionParams& p, int row) {
  return (row * p.group_inverse) >> 16;
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Query words of one group of 8 packed rows, as the second operand of K Q^T: lane (g, t) has row g,
// or g / 2 of 4.
// With 16-bit caches words 2s, 2s+1 are dims 16s + 2t and 16s + 8 + 2t; with e4m3 ones 16s + 4t and
// the two after, as a 16-bit transposition unit holds two of its values.
__device__ __forceinline__ void load_query(u32 (&q)[D / 8], const AttentionParams& p, Item item,
                                           int head, int n, const Lane& l) {
  const int row = item[FIRST_ROW] + (ROWS4 ? l.g / 2 : n * 8 + l.g), step = token_of(p, row);
  const int token = item[Q_START] + step;
  const bool valid = row < item[Q_LEN] * p.group && token < p.num_tokens;
  const char* at = p.q;
  if (valid)
    at += 2 * (token * p.q_token + (long long)(head * p.group + row - step * p.group) * p.q_head);
#pragma unroll
  for (int s = 0; s < kBlocks; ++s) {
    if constexpr (KV8) {
      uint2 x = make_uint2(0, 0);
      if (valid) x = *(const uint2*)(at + 2 * (16 * s + 4 * l.t));
      q[2 * s] = FP16 ? x.x : bf16_to_f16(x.x);
      q[2 * s + 1] = FP16 ? x.y : bf16_to_f16(x.y);
    } else {
      q[2 * s] = valid ? *(const u32*)(at + 2 * (16 * s + 2 * l.t)) : 0;
      q[2 * s + 1] = valid ? *(const u32*)(at + 2 * (16 * s + 8 + 2 * l.t)) : 0;
    }
  }
}

// Four e4m3 as two f16 pairs. Halves of a register spare the shift that e4m3_to_f16 costs.
__device__ __forceinline__ void unpack4(u32& low, u32& high, u32 x) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}

// Where in a slot a lane reads the first fragments of keys, and of values: 16 keys of 16 dims (32
// with e4m3), of which values are dims 0..7 and 8..15 of keys 0..7, then of keys 8..15; with e4m3
// keys 0..7 and 8..15 of 16 dims, then of the next 16.
__device__ __forceinline__ u32 keys_at(int lane) { return chunk_at(lane & 15, lane >> 4); }
__device__ __forceinline__ u32 values_at(int lane) {
  return KV8 ? keys_at(lane) : chunk_at((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
}

// s = K Q^T over a slot's keys, read from `at`. The next fragments are read while these are
// multiplied. Each score is one sum, so a row's bits do not depend on the number of row groups.
__device__ __forceinline__ void scores(float (&s)[ROWS8][kTiles][4], u32 at,
                                       const u32 (&q)[ROWS8][D / 8]) {
  constexpr int kReads = KV8 ? kBlocks / 2 : kBlocks;
  u32 a[2][kTiles][4];
#pragma unroll
  for (int b = 0; b < kTiles; ++b) load_matrices<false>(a[0][b], moved(at, b * 16, 0));
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    if (i + 1 < kReads)
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
        load_matrices<false>(a[(i + 1) & 1][b], moved(at, b * 16, 2 * i + 2));
    if constexpr (KV8) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int b = 0; b < kTiles; ++b) {
          u32 x[4];  // of the two words of 16 dims: low halves, high halves
          unpack4(x[0], x[2], a[i & 1][b][2 * h]);
          unpack4(x[1], x[3], a[i & 1][b][2 * h + 1]);
#pragma unroll
          for (int n = 0; n < ROWS8; ++n)
            mma16816(s[n][b], x[0], x[1], x[2], x[3], q[n][4 * i + 2 * h],
                     q[n][4 * i + 2 * h + 1]);
        }
    } else {
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
#pragma unroll
        for (int n = 0; n < ROWS8; ++n) {
          const u32* x = a[i & 1][b];
          mma16816(s[n][b], x[0], x[1], x[2], x[3], q[n][2 * i], q[n][2 * i + 1]);
        }
    }
  }
}

// o += V^T P^T, values read from `at`; p[n][b] holds P^T of 16 keys and 8 packed rows. With e4m3 a
// word of values is two dims of a key and of the next, and is multiplied as it is, by probabilities
// with zeros for the other dim: else the keys of a dim would have to be brought together. Products
// of 8 keys are of 32 dims then: of even ones and, in other columns or beside them, of odd ones.
__device__ __forceinline__ void weigh(float (&o)[kSums][ROWS8][4], u32 at,
                                      const u32 (&p)[ROWS8][kTiles][2], const Lane& l) {
  constexpr int kReads = (KV8 ? kBlocks / 2 : kBlocks) * kTiles;
  const auto read = [&](u32 (&r)[4], int j) {
    constexpr int kInner = KV8 ? kBlocks / 2 : kTiles;
    const int b = KV8 ? j / kInner : j % kInner, i = KV8 ? j % kInner : j / kInner;
    load_matrices<true>(r, moved(at, b * 16, i * 2));
  };
  u32 a[2][4];
  read(a[0], 0);
  if constexpr (KV8) {
    const u32 odd = ROWS4 ? l.g & 1 : 0, low = odd ? 0x1044 : 0x4410, high = odd ? 0x3244 : 0x4432;
#pragma unroll
    for (int b = 0; b < kTiles; ++b) {
      u32 even_p[ROWS8][2][2], odd_p[ROWS8][2][2];  // of 8 keys each: keys 2t, keys 2t + 1
#pragma unroll
      for (int n = 0; n < ROWS8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 keys = p[n][b][h];
          even_p[n][h][0] = permute(keys, 0, low), even_p[n][h][1] = permute(keys, 0, high);
          if (!ROWS4) odd_p[n][h][0] = keys << 16, odd_p[n][h][1] = keys & 0xffff0000u;
        }
#pragma unroll
      for (int i = 0; i < kBlocks / 2; ++i) {
        const int j = b * (kBlocks / 2) + i;
        if (j + 1 < kReads) read(a[(j + 1) & 1], j + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 y[4];
          unpack4(y[0], y[2], a[j & 1][h]);
          unpack4(y[1], y[3], a[j & 1][2 + h]);
#pragma unroll
          for (int n = 0; n < ROWS8; ++n) {
            const int k = ROWS4 ? i : 2 * i;
            mma16816(o[k][n], y[0], y[1], y[2], y[3], even_p[n][h][0], even_p[n][h][1]);
            if constexpr (!ROWS4)
              mma16816(o[k + 1][n], y[0], y[1], y[2], y[3], odd_p[n][h][0], odd_p[n][h][1]);
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int i = j / kTiles, b = j % kTiles;
      if (j + 1 < kReads) read(a[(j + 1) & 1], j + 1);
      const u32* x = a[j & 1];
#pragma unroll
      for (int n = 0; n < ROWS8; ++n)
        mma16816(o[i][n], x[0], x[1], x[2], x[3], p[n][b][0], p[n][b][1]);
    }
  }
}

// Sets the scores of keys that a row does not see to -inf: at or beyond `stop`, after the row's own
// position if causal, before its window.
__device__ __forceinline__ void mask(float (&s)[ROWS8][kTiles][4], const AttentionParams& p,
                                     Item item, int key, int stop, const Lane& l) {
  const int first_token = item[KV_LEN] - item[Q_LEN], first_row = item[FIRST_ROW];
  stop = min(stop, item[KV_END]);
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int position = first_token + token_of(p, first_row + row_of(n, c, l.t));
      const int limit = (p.causal ? min(stop, position + 1) : stop) - key - l.g;
      const int low = (p.window ? position - p.window + 1 : 0) - key - l.g;
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = b * 16 + h * 8;
          if (at >= limit || at < low) s[n][b][c + 2 * h] = kMinusInf;
        }
    }
}

// The softmax of a tile: scores become P^T, sums are rescaled if a maximum grew (unless `fresh`,
// when they are zeros). Lanes of a column (a packed row) differ in g. Each column uses its own
// maximum, so a row's bits depend on that row only. Scores are unscaled until the exponent, where
// the scale is positive; with a soft cap they are logits already.
__device__ __forceinline__ void soften(float (&s)[ROWS8][kTiles][4], float (&o)[kSums][ROWS8][4],
                                       float (&top)[ROWS8][kColumns],
                                       float (&norm)[ROWS8][kColumns],
                                       u32 (&probability)[ROWS8][kTiles][2], bool fresh,
                                       float scale2) {
  float high[ROWS8][kColumns];
  bool grows = false;
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      high[n][c] = fmaxf(s[n][0][c], s[n][0][c + 2]);
#pragma unroll
      for (int b = 1; b < kTiles; ++b)
        high[n][c] = fmaxf(high[n][c], fmaxf(s[n][b][c], s[n][b][c + 2]));
      grows |= fmaf(high[n][c], scale2, -top[n][c]) > kSlack;
    }
  if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float most = high[n][c];
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 4));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 8));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 16));
        const float was = top[n][c];
        if (fmaf(most, scale2, -was) > kSlack) top[n][c] = most * scale2;
        high[n][c] = exp2_fast(was - top[n][c]);  // factor for the old sums
        norm[n][c] *= high[n][c];
      }
    if (!fresh)
#pragma unroll
      for (int n = 0; n < ROWS8; ++n)
#pragma unroll
        for (int i = 0; i < kSums; ++i)
#pragma unroll
          for (int c = 0; c < (KV8 ? 2 : kColumns); ++c)
            o[i][n][c] *= high[n][c % kColumns], o[i][n][c + 2] *= high[n][c % kColumns];
  }
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int b = 0; b < kTiles; ++b) {
      float e[4] = {};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        e[c] = exp2_fast(fmaf(s[n][b][c], scale2, -top[n][c]));
        e[c + 2] = exp2_fast(fmaf(s[n][b][c + 2], scale2, -top[n][c]));
        norm[n][c] += e[c] + e[c + 2];
      }
      if (KV8 && ROWS4) e[1] = e[0], e[3] = e[2];  // for both columns of a row
      probability[n][b][0] = transpose8x8(pack2(e[0], e[1], kHalf));
      probability[n][b][1] = transpose8x8(pack2(e[2], e[3], kHalf));
    }
}

}  // namespace decode
