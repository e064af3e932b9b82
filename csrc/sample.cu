// Samples one token per row of logits (greedy, temperature, top-k, top-p, min-p); updates state.
//
// The logits are read once: of each group its largest key, and where all tokens' weights matter the
// sum of each piece. The CTA that brings a row's last piece chooses its token: the k-th largest
// group (for a nucleus the 64th, then the 1024th) bounds from below what can be kept, only groups
// that reach the bound are read again, and their tokens above it are resolved in shared memory. A
// row of which more is kept than fits there is walked whole, from L2: one walk tells a filter's bin,
// one brings that bin's tokens, a last one draws. No CTA waits.
#include "sample_row.cuh"

using Piece = u32[kGroupVectors][4];  // a lane's share of one: a group

__device__ __forceinline__ bool is_whole(const SampleParams& p, int piece) {
  return ALIGNED && (piece + 1) * kPieceVectors * kVector <= p.vocab;
}

__device__ __forceinline__ void load_piece(const SampleParams& p, const char* row, int piece,
                                           int lane, Piece& raw) {
  const int first = piece * kPieceVectors + lane;
  if (is_whole(p, piece)) {
#pragma unroll
    for (int j = 0; j < kGroupVectors; ++j) load_once(row + (first + 32 * j) * 16ll, raw[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kGroupVectors; ++j) load_vector(row, first + 32 * j, p.vocab, raw[j]);
  }
}

__device__ __forceinline__ u32 best_of(const u32 (&raw)[4]) {
  return max_raw(max_raw(raw[0], raw[1]), max_raw(raw[2], raw[3]));
}

// A warp's piece: the keys of its groups (also to `near`, if there), and where `scale` is not 0 the
// sum of its weights, its best token's being 1.
__device__ __forceinline__ void read_piece(const SampleParams& p, const char* row, u32* keys,
                                           u32* near, float* sum_at, int piece, float scale,
                                           int lane) {
  Piece raw;
  load_piece(p, row, piece, lane, raw);
  u32 best = raw[0][0];
#pragma unroll
  for (int j = 0; j < kGroupVectors; ++j) best = max_raw(best, best_of(raw[j]));
  const u32 both[4] = {best, best, best, best};
  const u32 key = max(key_of(plain(element(both, 0))), key_of(plain(element(both, 1))));
  keys[lane] = key;
  if (near) near[lane] = key;
  if (scale == 0.0f) return;

  const u32 most = __reduce_max_sync(kAll, key);
  const float top = value_of(most);
  float sums[4] = {};
  if (most == kGreatest) {  // +inf, of which differences would be NaN: nothing else counts then
#pragma unroll
    for (int j = 0; j < kGroupVectors; ++j)
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e % 4] += element(raw[j], e) >= top ? 1.0f : 0.0f;
  } else if (most > kNothing) {
#pragma unroll
    for (int j = 0; j < kGroupVectors; ++j)
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e % 4] += ratio(element(raw[j], e), top, scale);
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int by = 16; by; by /= 2) sum += __shfl_xor_sync(kAll, sum, by);
  if (lane == 0) *sum_at = sum;
}

// The pieces of a CTA, from `begin` to `end` of all rows' one after the other.
struct Range {
  int begin, end;
  __device__ __forceinline__ Range(const SampleParams& p, int cta, int ctas) {
    if (p.ctas_per_row) {  // each row has CTAs of its own
      const int row = cta / p.ctas_per_row, part = cta % p.ctas_per_row;
      begin = row * p.pieces + part * p.pieces / p.ctas_per_row;
      end = row * p.pieces + (part + 1) * p.pieces / p.ctas_per_row;
    } else {
      const long long all = (long long)p.rows * p.pieces;
      begin = (int)(all * cta / ctas), end = (int)(all * (cta + 1) / ctas);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ Shared s;
  if (PDL) {
    start_next();
    wait_for_previous();
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Range mine(p, blockIdx.x, gridDim.x);
  const Room room(dynamic, p.pieces);
  int at = mine.begin;
#pragma unroll 1
  while (at < mine.end) {
    const int row = at / p.pieces, first = at - row * p.pieces;
    const int count = min(p.pieces - first, mine.end - at);
    const char* logits = p.logits + row * p.row_bytes;
    const bool over = p.finished && p.finished[row], alone = count == p.pieces;
    const Choice choice(p, row);
    if (!over) {
      const float scale = choice.sums() ? choice.scale : 0.0f;
#pragma unroll 1
      for (int piece = first + warp; piece < first + count; piece += kWarps) {
        const long long place = (long long)row * p.pieces + piece;
        u32* const near = alone ? room.keys + piece * 32 : nullptr;
        read_piece(p, logits, p.groups + place * 32, near, p.sums + place, piece, scale, lane);
      }
    }
    __syncthreads();
    if (!alone) {  // the last to arrive sees what all have written: fences on both sides of the count
      if (threadIdx.x == 0) {
        __threadfence();
        s.last = atomicAdd(p.counters + row, count) + count == p.pieces;
        __threadfence();
        if (s.last) p.counters[row] = 0;
      }
      __syncthreads();
    }
    if (alone || s.last) {
      int token = p.pad_token;
      if (!over) token = choose(p, row, logits, choice, alone, room, s);
      if (threadIdx.x == 0) finish(p, row, token, over);
      __syncthreads();
    }
    at += count;
  }
}
