// What becomes of the sums that a team's four warps have of a unit: in shared memory they are added
// in the warps' order, and, where a row block's or bundle's pieces are all the team's, to those of
// earlier pieces.
#pragma once
#include "attention_decode_math.cuh"

namespace decode {

// Rows of a team's sums: a constant where a thread has one chunk of 4 rows, which is often.
__device__ __forceinline__ int rows_of(const AttentionParams& p) {
  return ROWS4 && D <= 128 ? 4 : p.decode_rows;
}
// Copies of a unit's sums. With one for each warp none waits for another, but of more rows they
// leave an SM room for two teams only: with three a warp adds its sums to those of the warp before.
// The bits are the same.
constexpr int kCopies = ROWS4 || TEAMS <= 2 ? 4 : 1;
// Floats of the copies with their (max, sum), in fours, and of the sums of the pieces before.
__host__ __device__ constexpr int sum_floats(int rows) {
  return (kCopies * rows * (D + 2) + 3) / 4 * 4;
}
__host__ __device__ constexpr int fold_floats(int rows) { return 6 * rows * (D / 4); }
// Chunks of 4 floats of a row trade places, so that a chunk of rows that lanes write at once meets
// no bank twice.
__device__ __forceinline__ int chunk_place(int row, int chunk) {
  return chunk ^ ((ROWS4 ? row : row >> 1) & 3) << 1;
}

// Adds a warp's sums of a unit to those in its copy (none if it is the first), when `await` says
// that they are there. A row's floats lie as its lanes have them, four of a lane in a chunk;
// `in_order` has their dims.
template <class Await>
__device__ __forceinline__ void add_sums(float* sums, const AttentionParams& p,
                                         float (&o)[kSums][ROWS8][4],
                                         const float (&top)[ROWS8][kColumns],
                                         float (&norm)[ROWS8][kColumns], const Lane& l,
                                         const Await& await) {
  const bool first = kCopies == 4 || l.warp == 0;
#pragma unroll
  for (int with = 4; with < 32; with *= 2)  // lanes of a row add its norms
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        norm[n][c] += __shfl_xor_sync(0xffffffffu, norm[n][c], with);
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (top[n][c] == kUnseen)  // the sums may hold masked values, even NaN
#pragma unroll
        for (int i = 0; i < kSums; ++i)
#pragma unroll
          for (int j = c; j < 4; j += kColumns) o[i][n][j] = 0.0f;
  await();
  const int rows = rows_of(p), copy = kCopies == 4 ? l.warp : 0;
  float2* stats = (float2*)(sums + kCopies * rows * D) + copy * rows;
  sums += copy * rows * D;
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = row_of(n, c, l.t);
      const bool adds = !first && row < p.decode_rows;
      const float2 before = adds ? stats[row] : make_float2(kMinusInf, 0.0f);
      __syncwarp();
      if (row >= p.decode_rows) continue;
      const float2 mine = make_float2(top[n][c] == kUnseen ? kMinusInf : top[n][c], norm[n][c]);
      const Weights weights(before, mine);
      float* to = sums + row * D + 4 * chunk_place(row, l.g);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const float(&x)[4] = o[kSums == D / 32 ? i : 2 * i][n];
        const float(&y)[4] = o[kSums == D / 32 ? i : 2 * i + 1][n];
        const float4 its = kSums == D / 32 ? make_float4(x[0], x[1], x[2], x[3])
                           : KV8           ? make_float4(x[c], y[c], x[c + 2], y[c + 2])
                                           : make_float4(x[c], x[c + 2], y[c], y[c + 2]);
        float4& sum = *(float4*)(to + 32 * i);
        sum = kCopies == 4 ? its : weights.add(first ? make_float4(0, 0, 0, 0) : sum, its);
      }
      if (l.g == 0) stats[row] = kCopies == 4 ? mine : weights.add(before, mine);
    }
}

// Swaps, between lanes that differ in bit `with` and within pairs of values, so that bits of the
// lane's number and of the value's trade places.
__device__ __forceinline__ void trade(float& a, float& b, int lane, int with) {
  const bool high = lane & with;
  const float got = __shfl_xor_sync(0xffffffffu, high ? a : b, with);
  if (high)
    a = got;
  else
    b = got;
}

// Turns a chunk of a row, as lane g of 8 has it of a group of 32 dims, into 4 dims in a row; returns
// the first of them.
__device__ __forceinline__ int in_order(float4& x, int chunk, int lane) {
  const int group = chunk / 8 * 32, g = chunk & 7;
  if constexpr (KV8) {  // dims 2g, 2g + 1, 16 + 2g, 16 + 2g + 1
    trade(x.x, x.z, lane, 1), trade(x.y, x.w, lane, 1);
    return group + (g & 1) * 16 + (g >> 1) * 4;
  }
  trade(x.x, x.y, lane, 1), trade(x.z, x.w, lane, 1);  // dims g, 8 + g, 16 + g, 24 + g
  trade(x.x, x.z, lane, 2), trade(x.y, x.w, lane, 2);
  return group + (g & 3) * 8 + (g >> 2) * 4;
}

// Add a piece's sums to slot `i` of the pieces before, with merge_rows' arithmetic.
__device__ __forceinline__ void fold(float* slots, int rows, int i, bool first, float4& sum,
                                     float2& stat) {
  float4& kept = ((float4*)slots)[i];
  float2& stats = ((float2*)(slots + rows * D))[i];
  const float4 before = first ? make_float4(0, 0, 0, 0) : kept;
  const float2 its = first ? make_float2(kMinusInf, 0) : stats;
  if (stat.x == kMinusInf) {
    sum = before, stat = its;
  } else {
    const Weights weights(its, stat);
    sum = weights.add(before, sum), stat = weights.add(its, stat);
  }
  kept = sum, stats = stat;
}

// What becomes of a unit's sums when all warps have left theirs.
enum { kLeft = 1, kOwned = 2, kFirst = 4, kWhole = 8, kBundled = 16 };

// Writes a unit's sums as output or as a partial. Pieces of a row block or bundle that all belong
// to this team (kOwned) leave no partials: a thread folds its sums into those of the earlier
// pieces, as `merge_rows` would, and writes output, or the bundle's partial, after the last piece.
__device__ __forceinline__ void finish(float* sums, const AttentionParams& p, Item item, int head,
                                       int kind, const Lane& l, float v_scale) {
  const int rows = rows_of(p), chunks = rows * (D / 4);
  for (int first = 0; first < chunks; first += kTeamThreads) {
    const int i = min(first + l.thread, chunks - 1), r = i / (D / 4);
    const bool used = first + l.thread < chunks && r < p.decode_rows;
    const float* from = sums + r * D + 4 * chunk_place(r, i % (D / 4));
    const float2* stats = (const float2*)(sums + kCopies * rows * D) + r;
    float4 its[kCopies];
    float2 each[kCopies];
#pragma unroll
    for (int w = 0; w < kCopies; ++w)
      its[w] = *(const float4*)(from + w * rows * D), each[w] = stats[w * rows];
    float4 sum = its[0];
    float2 stat = each[0];
#pragma unroll
    for (int w = 1; w < kCopies; ++w) {
      const Weights weights(stat, each[w]);
      sum = weights.add(sum, its[w]), stat = weights.add(stat, each[w]);
    }
    if (uniform(kind & kOwned) && used)
      fold(sums + sum_floats(rows), rows, i, kind & kFirst, sum, stat);
    if (uniform((kind & (kOwned | kWhole)) == kOwned)) continue;  // more pieces follow
    const int dim = in_order(sum, i % (D / 4), l.lane);
    const int done = kind & (kWhole | kBundled), piece = item[PIECE], pieces = item[NUM_PIECES];
    const Row row(p, item[Q_START], item[Q_LEN], item[FIRST_ROW] + r, head);
    const int place = done == (kWhole | kBundled) ? pieces + piece / kBundle : piece;
    const long long part = (long long)(item[FIRST_SLOT] + place) * p.num_kv_heads + head;
    const long long at = part * p.decode_rows + r;
    if (uniform(done == kWhole)) {
      if (stores(used && row.valid)) store_row(p, row, dim, sum, stat.x, stat.y, v_scale);
    } else if (used) {
      *(float4*)((float*)(p.workspace + p.decode_out) + at * D + dim) = sum;
      if (dim == 0) ((float2*)(p.workspace + p.decode_stats))[at] = stat;
    }
  }
}

}  // namespace decode
