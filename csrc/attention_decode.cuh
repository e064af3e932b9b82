// The decode path: teams of four warps stream a piece of a request's keys for one KV head.
//
// Each warp has a slot of its own in shared memory for a tile of K and one for V, filled by cp.async
// from wherever the pages lie: 16 KB in flight a warp, no barrier between warps. Scores are computed
// transposed, S^T = K Q^T (keys on the 16-row side of mma.sync), so that 8 packed rows cost
// no padding to 16; P^T reaches the second product, O^T = V^T P^T, by movmatrix.
#pragma once
#include "attention_merge.cuh"

#ifndef TEAMS
#define TEAMS 3
#endif
#ifndef ROWS8  // groups of 8 packed rows
#define ROWS8 1
#endif

namespace decode {

constexpr int kTeamThreads = 128;
constexpr int kSize = KV8 ? 1 : 2;             // bytes of a cache element
constexpr int kStep = KV8 ? 64 : 32;           // keys of a tile, walked at a time
constexpr int kTiles = kStep / 16;             // row tiles of mma.sync in it
constexpr int kPages = kStep / 32;             // page ids a lane looks up for a step
constexpr int kRowBytes = D * kSize;
constexpr int kChunks = kRowBytes / 16;        // 16-byte chunks of a row
constexpr int kLaneRows = 32 % kChunks == 0 ? 32 / kChunks : 0;  // rows of a warp's copy, if whole
constexpr bool kSwizzled = kRowBytes % 128 == 0;
constexpr int kPitch = kSwizzled ? kRowBytes : kRowBytes + 16;  // an odd count of chunks: no conflicts
constexpr int kSlot = kStep * kPitch;
constexpr int kRing = 2 * kSlot;               // K, V
constexpr int kBlocks = D / 16;                // blocks of 16 dims
constexpr bool kQueryInRegisters = ROWS8 * D <= 256;
constexpr float kSlack = 8.0f;  // a sum is rescaled when its maximum grows by more, in log2 units

// Floats of a team's staged sums: 4 warps, `rows` packed rows; 4 floats more a row spread the banks.
__host__ __device__ constexpr int stage_floats(int rows) { return 4 * rows * (D + 4 + 2); }
__host__ __device__ constexpr int team_bytes(int rows) {
  return (4 * kRing + 4 * stage_floats(rows) + 16 + 127) / 128 * 128;  // the swizzle counts in 128
}

__device__ __forceinline__ void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamThreads) : "memory");
}

// What a team's threads are told between two units: the unit to merge now, or -1.
struct Note {
  int merge;
};

// row / group by a multiplication: exact for the rows of a decode request.
__device__ __forceinline__ int token_of(const AttentionParams& p, int row) {
  return (row * p.group_inverse) >> 16;
}

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

// An item in a register a lane: word i is lane i's.
struct Item {
  int word;
  __device__ __forceinline__ int operator[](int i) const {
    return __shfl_sync(0xffffffffu, word, i);
  }
};

__device__ __forceinline__ Item load_item(const AttentionParams& p, int index, int lane) {
  const int* at = p.plan + p.decode_at + (long long)index * ITEM_WORDS;
  return Item{lane < ITEM_WORDS ? at[lane] : 0};
}

// A warp's keys of a unit: a quarter of the piece, in steps. `last`: the piece's last key.
struct Range {
  int key, end, last;
  __device__ __forceinline__ Range(const AttentionParams& p, Item item, int warp) {
    const int begin = item[KV_BEGIN], stop = item[KV_END], kv_len = item[KV_LEN];
    const int piece = max(512, 1 << (32 - __clz(max(kv_len - 1, 0) >> 7)));  // 128 hold the request
    key = begin + warp * (piece / 4);
    end = min(key + piece / 4, stop);
    if (p.window) {  // below the window of the first query token nothing is seen
      const int low = kv_len - item[Q_LEN] - p.window + 1;
      if (low > key) key += (low - key) / kStep * kStep;
    }
    last = max(stop - 1, 0);
    if (end <= key) end = key + 1;  // a step that is masked whole: every warp walks one
  }
};

// A step of the stream of keys that a warp walks through all its units. Rows of keys at or beyond
// the piece's end are those of its last key, which is finite where the request's own values are.
struct Step {
  Item item;
  int unit, head, key, end, last;
  u32 row[kPages];  // page ids first, then offsets in units of 32 bytes

  __device__ __forceinline__ bool ends_unit() const { return key + kStep >= end; }
  __device__ __forceinline__ void ask(const AttentionParams& p, const PageRow& pages, int lane) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) row[i] = pages.page(p, min(key + i * 32 + lane, last));
  }
  __device__ __forceinline__ void resolve(const AttentionParams& p, int lane) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) row[i] = row32(p, row[i], min(key + i * 32 + lane, last));
  }
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// Where 16-byte chunk c of row r of a slot lies.
__device__ __forceinline__ u32 chunk_at(int r, int c) {
  return r * kPitch + (kSwizzled ? (c & ~7) * 16 + ((c ^ r) & 7) * 16 : c * 16);
}
// The same `rows` further down and `chunks` (even) further right, of an offset that chunk_at gave
// for a row below 8 - rows % 8 and chunk 0 or 1: both are constants after unrolling.
__device__ __forceinline__ u32 moved(u32 at, int rows, int chunks) {
  if constexpr (kSwizzled)
    return (at ^ (((rows ^ chunks) & 7) * 16)) + rows * kPitch + (chunks & ~7) * 16;
  return at + rows * kPitch + chunks * 16;
}

__device__ __forceinline__ void copy16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copy a step's rows into a slot. `whole`: pages of 16 tokens and more, all keys before the end; then
// 16 keys in a row lie a token apart. Else each row is looked up, those behind the end are the last.
__device__ __forceinline__ void copy_rows(u32 slot, const char* base, const Step& step, bool whole,
                                          const AttentionParams& p, int lane) {
  if (kLaneRows > 0 && whole) {
    constexpr int rows = kLaneRows > 0 ? kLaneRows : 1;
    const u32 token = p.token32 * 32;
    const u32 to = slot + chunk_at(lane / kChunks, lane % kChunks);
    if (token == kRowBytes) {  // head-major pages: 16 keys are one stretch of memory
#pragma unroll
      for (int g = 0; g < kStep / 16; ++g) {
        const u32 row = __shfl_sync(0xffffffffu, step.row[g / 2], g % 2 * 16);
        const char* from = base + (u64)row * 32 + lane * 16;
#pragma unroll
        for (int i = 0; i < 16 / rows; ++i)
          copy16(moved(to, g * 16 + i * rows, 0), from + i * rows * kRowBytes);
      }
      return;
    }
    base += (lane / kChunks) * token + (lane % kChunks) * 16;
#pragma unroll
    for (int g = 0; g < kStep / 16; ++g) {
      const u32 row = __shfl_sync(0xffffffffu, step.row[g / 2], g % 2 * 16);
      const char* from = base + (u64)row * 32;
#pragma unroll
      for (int i = 0; i < 16 / rows; ++i) {
        copy16(moved(to, g * 16 + i * rows, 0), from);
        from += rows * token;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kStep * kChunks / 32; ++i) {
    const int j = i * 32 + lane, r = j / kChunks, c = j % kChunks;
    u32 row = __shfl_sync(0xffffffffu, step.row[0], r & 31);
    if constexpr (kPages == 2) {
      const u32 second = __shfl_sync(0xffffffffu, step.row[1], r & 31);
      row = r < 32 ? row : second;
    }
    copy16(slot + chunk_at(r, c), base + (u64)row * 32 + c * 16);
  }
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_but_one() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
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

// Query words of one group of 8 packed rows, as the second operand of K Q^T: lane (g, t) has row g.
// With 16-bit caches words 2s, 2s+1 are dims 16s + 2t and 16s + 8 + 2t; with e4m3 ones 16s + 4t and
// the two after, as a 16-bit transposition unit holds two of its values.
__device__ __forceinline__ void load_query(u32 (&q)[D / 8], const AttentionParams& p, Item item,
                                           int head, int n, const Lane& l) {
  const int row = item[FIRST_ROW] + n * 8 + l.g, step = token_of(p, row);
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

// s = K Q^T over a slot's keys. The next fragments are read while these are multiplied.
template <int N>
__device__ __forceinline__ void scores(float (&s)[N][kTiles][4], u32 slot, const u32 (&q)[N][D / 8],
                                       const Lane& l) {
  constexpr int kReads = KV8 ? kBlocks / 2 : kBlocks;
  u32 a[2][kTiles][4];
  const u32 at = slot + chunk_at(l.lane & 15, l.lane >> 4);
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
          const u32 x = a[i & 1][b][2 * h], y = a[i & 1][b][2 * h + 1];
#pragma unroll
          for (int n = 0; n < N; ++n)
            mma16816(s[n][b], e4m3_to_f16(x, false), e4m3_to_f16(y, false), e4m3_to_f16(x, true),
                     e4m3_to_f16(y, true), q[n][4 * i + 2 * h], q[n][4 * i + 2 * h + 1]);
        }
    } else {
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const u32* x = a[i & 1][b];
          mma16816(s[n][b], x[0], x[1], x[2], x[3], q[n][2 * i], q[n][2 * i + 1]);
        }
    }
  }
}

// o += V^T P^T; p[n][b] holds P^T of 16 keys and 8 packed rows.
__device__ __forceinline__ void weigh(float (&o)[kBlocks][ROWS8][4], u32 slot,
                                      const u32 (&p)[ROWS8][kTiles][2], const Lane& l) {
  constexpr int kReads = (KV8 ? kBlocks / 2 : kBlocks) * kTiles;
  u32 a[2][4];
  // 16 keys of 16 dims (32 with e4m3): dims 0..7 and 8..15 of keys 0..7, then of keys 8..15; with
  // e4m3 keys 0..7 and 8..15 of 16 dims, then of the next 16
  const int half = (l.lane >> 3) & 1, last = l.lane >> 4;
  const u32 at = slot + (KV8 ? chunk_at(l.lane & 15, last) : chunk_at((l.lane & 7) + last * 8, half));
  load_matrices<true>(a[0], at);
#pragma unroll
  for (int j = 0; j < kReads; ++j) {
    const int i = j / kTiles, b = j % kTiles;
    if (j + 1 < kReads)
      load_matrices<true>(a[(j + 1) & 1], moved(at, (j + 1) % kTiles * 16, (j + 1) / kTiles * 2));
    const u32* x = a[j & 1];
    if constexpr (KV8) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 low = permute(x[2 * h], 0, 0x3120), high = permute(x[2 * h + 1], 0, 0x3120);
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
          mma16816(o[2 * i + h][n], e4m3_to_f16(low, false), e4m3_to_f16(low, true),
                   e4m3_to_f16(high, false), e4m3_to_f16(high, true), p[n][b][0], p[n][b][1]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < ROWS8; ++n)
        mma16816(o[i][n], x[0], x[1], x[2], x[3], p[n][b][0], p[n][b][1]);
    }
  }
}

// Where a team is in the plan: items of a row block lie together, its pieces in order. Units go
// through a row block's pieces for one KV head, then for the next: a run is announced once.
struct Place {
  int unit, first_item, pieces, piece, head;

  __device__ __forceinline__ Place(const AttentionParams& p, int at) {
    unit = at;
    const int index = at / p.num_kv_heads;
    const int* item = p.plan + p.decode_at + (long long)index * ITEM_WORDS;
    pieces = item[NUM_PIECES];
    first_item = index - item[PIECE];
    const int local = at - first_item * p.num_kv_heads;
    head = local / pieces;
    piece = local % pieces;
  }
  __device__ __forceinline__ int item() const { return first_item + piece; }
};

// The last piece's team merges all partials of a row block.
__device__ __noinline__ void merge(const AttentionParams& p, int unit, int thread, float v_scale) {
  const Place place(p, unit);
  const int* item = p.plan + p.decode_at + (long long)place.first_item * ITEM_WORDS;
  merge_rows<kTeamThreads>(p, item, place.head, p.decode_rows, p.workspace + p.decode_out,
                           p.workspace + p.decode_stats, thread, v_scale);
}

// The softmax of a tile: scores become P^T, sums are rescaled where a maximum grew. Lanes of a column
// (a packed row) differ in g. Each column goes by its own maximum: a row's bits are its own.
__device__ __forceinline__ void soften(float (&s)[ROWS8][kTiles][4], float (&o)[kBlocks][ROWS8][4],
                                       float (&top)[ROWS8][2], float (&norm)[ROWS8][2],
                                       u32 (&probability)[ROWS8][kTiles][2],
                                       const int (&limit)[ROWS8][2], const int (&low)[ROWS8][2],
                                       int key, bool seen_whole, const Lane& l, float scale2,
                                       float softcap) {
  // Scores stay as the product gave them, and are scaled (by a positive number) in the exponent;
  // a soft cap makes logits of them first.
  if constexpr (SOFTCAP) {
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][b][c] = logit2(s[n][b][c], scale2, softcap);
    scale2 = 1.0f;
  }
  if (!seen_whole) {
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int b = 0; b < kTiles; ++b)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int at = key + b * 16 + l.g + (c >> 1) * 8, column = c & 1;
          const bool seen = at < limit[n][column] && at >= low[n][column];
          if (!seen) s[n][b][c] = kMinusInf;
        }
  }
  bool grows = false;
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float high = fmaxf(s[n][0][c], s[n][0][c + 2]);
#pragma unroll
      for (int b = 1; b < kTiles; ++b) high = fmaxf(high, fmaxf(s[n][b][c], s[n][b][c + 2]));
      grows |= high * scale2 > top[n][c] + kSlack;
    }
  if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float high = fmaxf(s[n][0][c], s[n][0][c + 2]);
#pragma unroll
        for (int b = 1; b < kTiles; ++b)
          high = fmaxf(high, fmaxf(s[n][b][c], s[n][b][c + 2]));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 4));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 8));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 16));
        high *= scale2;
        const float now = high > top[n][c] + kSlack ? high : top[n][c];
        const float shrink = now == kMinusInf ? 1.0f : exp2_fast(top[n][c] - now);
        top[n][c] = now;
        norm[n][c] *= shrink;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          o[i][n][c] *= shrink;
          o[i][n][c + 2] *= shrink;
        }
      }
  }
#pragma unroll
  for (int n = 0; n < ROWS8; ++n) {
    const float base0 = top[n][0] == kMinusInf ? 0.0f : top[n][0];
    const float base1 = top[n][1] == kMinusInf ? 0.0f : top[n][1];
#pragma unroll
    for (int b = 0; b < kTiles; ++b) {
      const float p0 = exp2_fast(fmaf(s[n][b][0], scale2, -base0));
      const float p1 = exp2_fast(fmaf(s[n][b][1], scale2, -base1));
      const float p2 = exp2_fast(fmaf(s[n][b][2], scale2, -base0));
      const float p3 = exp2_fast(fmaf(s[n][b][3], scale2, -base1));
      norm[n][0] += p0 + p2;
      norm[n][1] += p1 + p3;
      probability[n][b][0] = transpose8x8(pack2(p0, p1, kHalf));
      probability[n][b][1] = transpose8x8(pack2(p2, p3, kHalf));
    }
  }
}

// A warp's sums of a unit go to shared memory, rows [decode_rows] of D + 4 floats, then (max, sum).
__device__ __forceinline__ void stage_sums(float* stage, const AttentionParams& p,
                                           const float (&o)[kBlocks][ROWS8][4],
                                           const float (&top)[ROWS8][2],
                                           const float (&norm)[ROWS8][2], const Lane& l) {
  const int rows = p.decode_rows;
  float* stats = stage + 4 * rows * (D + 4);
#pragma unroll
  for (int n = 0; n < ROWS8; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float total = norm[n][c];
      total += __shfl_xor_sync(0xffffffffu, total, 4);
      total += __shfl_xor_sync(0xffffffffu, total, 8);
      total += __shfl_xor_sync(0xffffffffu, total, 16);
      const int r = n * 8 + 2 * l.t + c;
      if (r >= rows) continue;
      if (l.g == 0) *(float2*)(stats + (l.warp * rows + r) * 2) = make_float2(top[n][c], total);
      float* to = stage + (l.warp * rows + r) * (D + 4);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if constexpr (KV8) {
          *(float2*)(to + 16 * i + 2 * l.g) = make_float2(o[i][n][c], o[i][n][c + 2]);
        } else {
          to[16 * i + l.g] = o[i][n][c];
          to[16 * i + 8 + l.g] = o[i][n][c + 2];
        }
      }
    }
}

// The team's four staged sums, added in the warps' order, become output or a partial.
__device__ __forceinline__ void combine(const float* stage, const AttentionParams& p, Item item,
                                        int head, const Lane& l, float v_scale) {
  const int rows = p.decode_rows, pieces = item[NUM_PIECES];
  const int slot = item[FIRST_SLOT] + item[PIECE];
  const int q_start = item[Q_START], q_len = item[Q_LEN], first_row = item[FIRST_ROW];
  const float2* stats = (const float2*)(stage + 4 * rows * (D + 4));
  for (int i = l.thread; i < rows * (D / 4); i += kTeamThreads) {
    const int r = i / (D / 4), dim = i % (D / 4) * 4;
    float high = kMinusInf;
#pragma unroll
    for (int w = 0; w < 4; ++w) high = fmaxf(high, stats[w * rows + r].x);
    float4 sum = make_float4(0, 0, 0, 0);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 its = stats[w * rows + r];
      if (its.x == kMinusInf) continue;  // saw nothing; its sum may hold what it must not see
      const float weight = exp2_fast(its.x - high);
      const float4 x = *(const float4*)(stage + (w * rows + r) * (D + 4) + dim);
      total = fmaf(weight, its.y, total);
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
    }
    if (pieces == 1) {
      const Row row(p, q_start, q_len, first_row + r, head);
      if (row.valid) store_row(p, row, dim, sum, high, total, v_scale);
    } else {
      const long long part = ((long long)slot * p.num_kv_heads + head) * rows + r;
      *(float4*)((float*)(p.workspace + p.decode_out) + part * D + dim) = sum;
      if (dim == 0) *((float2*)(p.workspace + p.decode_stats) + part) = make_float2(high, total);
    }
  }
}

// All of a team's units, of `num_teams` that share the plan's decode items.
__device__ __forceinline__ void run(const AttentionParams& p, char* shared, int num_teams,
                                    int team_index) {
  const Lane l;
  const int heads = p.num_kv_heads, num_items = p.plan[NUM_DECODE];
  const long long units = (long long)num_items * heads;
  const int first_unit = (int)(units * team_index / num_teams);
  const int end_unit = (int)(units * (team_index + 1) / num_teams);
  if (first_unit == end_unit) return;

  char* mine = shared + l.team * team_bytes(p.decode_rows);
  const u32 ring = shared_address(mine) + l.warp * kRing;
  float* stage = (float*)(mine + 4 * kRing);
  Note& note = *(Note*)(stage + stage_floats(p.decode_rows));

  const float v_scale = KV8 ? cache_scale(p.v_scale, p.v_scale_ptr) : 1.0f;
  const float scale2 = KV8 ? cache_scale(p.scale_log2, p.k_scale_ptr) : p.scale_log2;
  const bool large_pages = p.page_shift >= 4;

  // Three steps are under way: one multiplied, one copied, one whose page ids are asked for.
  Place place(p, first_unit);
  Step now, next, later;
  now.unit = first_unit, now.head = place.head;
  now.item = load_item(p, place.item(), l.lane);
  PageRow pages(p, now.item[REQUEST]);
  // the unit after: its item is asked for a unit ahead
  Item after;
  const auto look_ahead = [&] {
    if (++place.piece == place.pieces) {
      place.piece = 0;
      if (++place.head == heads) {
        place.head = 0;
        place.first_item = min(place.first_item + place.pieces, num_items - 1);
        place.pieces = -1;  // known when the item is here
      }
    }
    after = load_item(p, place.item(), l.lane);
  };
  look_ahead();
  const auto advance = [&](Step& step) {
    if (!step.ends_unit()) {
      step.key += kStep;
    } else {
      if (++step.unit >= end_unit) return;
      step.item = after;
      step.head = place.head;
      pages = PageRow(p, after[REQUEST]);
      if (place.pieces < 0) place.pieces = after[NUM_PIECES];
      look_ahead();
      const Range range(p, step.item, l.warp);
      step.key = range.key, step.end = range.end, step.last = range.last;
    }
    step.ask(p, pages, l.lane);
  };
  const auto copy = [&](u32 slot, const char* base, const Step& step) {
    if (step.unit < end_unit)
      copy_rows(slot, base + step.head * p.head_bytes, step,
                large_pages && step.key + kStep <= step.last + 1, p, l.lane);
    commit();
  };

  {
    const Range range(p, now.item, l.warp);
    now.key = range.key, now.end = range.end, now.last = range.last;
  }
  now.ask(p, pages, l.lane);
  next = now;
  advance(next);
  u32 q[ROWS8][D / 8];
  if constexpr (kQueryInRegisters)
#pragma unroll
    for (int n = 0; n < ROWS8; ++n) load_query(q[n], p, now.item, now.head, n, l);
  now.resolve(p, l.lane);
  copy(ring, p.k, now);
  copy(ring + kSlot, p.v, now);

  int run_counter = -1, run_length = 0, run_pieces = 0, run_unit = 0;
  // Counts a run's partials; the one that completes its row block merges it.
  const auto announce = [&] {
    note.merge = -1;
    if (run_counter < 0) return;
    int* counter = (int*)p.workspace + run_counter;
    if (arrive(counter, run_length) + run_length == run_pieces) {
      note.merge = run_unit;
      *counter = 0;
    }
  };

  while (now.unit < end_unit) {  // a unit a turn
    float o[kBlocks][ROWS8][4] = {};
    float top[ROWS8][2], norm[ROWS8][2];
    int limit[ROWS8][2], low[ROWS8][2], all_low = 0, all_limit;
    {
      const int kv_len = now.item[KV_LEN], first_token = kv_len - now.item[Q_LEN];
      const int stop = min(now.item[KV_END], now.end), first_row = now.item[FIRST_ROW];
      all_limit = p.causal ? min(stop, first_token + 1) : stop;  // all rows see what the first does
      if (p.window) all_low = kv_len - p.window;                 // and what the last does
#pragma unroll
      for (int n = 0; n < ROWS8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int position = first_token + token_of(p, first_row + n * 8 + 2 * l.t + c);
          limit[n][c] = p.causal ? min(stop, position + 1) : stop;
          low[n][c] = p.window ? position - p.window + 1 : 0;
          top[n][c] = kMinusInf;
          norm[n][c] = 0.0f;
        }
    }
    for (bool last = false; !last;) {  // a step a turn
      last = now.ends_unit();
      later = next;
      if (next.unit < end_unit) {
        next.resolve(p, l.lane);
        advance(later);
      }
      float s[ROWS8][kTiles][4] = {};
      wait_but_one();
      if constexpr (kQueryInRegisters) {
        scores<ROWS8>(s, ring, q, l);
      } else {
#pragma unroll
        for (int n = 0; n < ROWS8; ++n) {
          u32 words[1][D / 8];
          load_query(words[0], p, now.item, now.head, n, l);
          float its[1][kTiles][4] = {};
          scores<1>(its, ring, words, l);
#pragma unroll
          for (int b = 0; b < kTiles; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[n][b][c] = its[0][b][c];
        }
      }
      __syncwarp();
      copy(ring, p.k, next);
      if constexpr (kQueryInRegisters)
        if (last && next.unit < end_unit)
#pragma unroll
          for (int n = 0; n < ROWS8; ++n) load_query(q[n], p, next.item, next.head, n, l);
      u32 probability[ROWS8][kTiles][2];
      soften(s, o, top, norm, probability, limit, low, now.key,
             now.key + kStep <= all_limit && now.key >= all_low, l, scale2, p.softcap);
      wait_but_one();
      weigh(o, ring + kSlot, probability, l);
      __syncwarp();
      copy(ring + kSlot, p.v, next);
      if (!last) {
        now = next;
        next = later;
      }
    }

    const int pieces = now.item[NUM_PIECES], counter = now.item[COUNTER] * heads + now.head;
    const bool joins = pieces > 1 && counter == run_counter;
    team_barrier(l.team);  // the stage is free again, the last unit's partials are written
    if (!joins && l.thread == 0) announce();
    stage_sums(stage, p, o, top, norm, l);
    team_barrier(l.team);
    if (!joins) {
      const int finished = note.merge;
      if (finished >= 0) merge(p, finished, l.thread, v_scale);
      run_counter = pieces > 1 ? counter : -1;
      run_length = 0;
      run_pieces = pieces;
      run_unit = now.unit;
    }
    ++run_length;
    combine(stage, p, now.item, now.head, l, v_scale);
    now = next;
    next = later;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  team_barrier(l.team);
  if (l.thread == 0) announce();
  team_barrier(l.team);
  if (note.merge >= 0) merge(p, note.merge, l.thread, v_scale);
}

}  // namespace decode
