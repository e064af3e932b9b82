// The decode path: teams of four warps stream a piece of a request's keys for one KV head.
//
// Keys and values are loaded straight into the fragments of mma.sync, 16 bytes a lane, the next
// tile's while this one is multiplied, so no shared memory is on the way and 12 to 16 warps keep
// 60 to 100 KB in flight. Scores are computed transposed, S^T = K Q^T (keys on the 16-row side), so
// 8 packed rows cost no padding to 16; P^T reaches the second product by movmatrix. Which dims a
// lane's 16 bytes are to the matrix unit is free as long as both operands agree.
#pragma once
#include "attention.cuh"

#ifndef TEAMS
#define TEAMS 4
#endif
#ifndef ROWS8  // groups of 8 packed rows
#define ROWS8 1
#endif

namespace decode {

constexpr int kTeamThreads = 128;
constexpr int kSize = KV8 ? 1 : 2;                  // bytes of a cache element
constexpr int kTile = 32 / kSize;                   // keys of a tile: 32 registers of K a lane
constexpr int kStep = 32;                           // keys whose page ids a warp fetches at once
constexpr int kTilesPerStep = kStep / kTile;
constexpr int kPhases = D > 128 ? D / 128 : 1;      // a tile's dims are loaded in phases of 128
constexpr int DP = D / kPhases;
constexpr int kRowBytes = DP * kSize;               // of a phase
constexpr int kKeyLoad = (kRowBytes % 64 == 0) ? 16 : 8;   // 4 lanes share a key's row
constexpr int kKeyLoads = kRowBytes / (4 * kKeyLoad);
constexpr int kKeyRows = kTile / 8;
constexpr int kKeyWords = kRowBytes / 16;           // of a row and lane
constexpr int kValueLoad = (kRowBytes % 128 == 0) ? 16 : (kRowBytes % 64 == 0) ? 8 : 4;
constexpr int kValueLoads = kRowBytes / (8 * kValueLoad);  // 8 lanes share a value's row
constexpr int kValueKeys = kTile / 4;
constexpr int kValueWords = kRowBytes / 32;
constexpr int kPairs = DP / 16;                     // dim pairs of a lane and phase: row tiles
constexpr int kPairsPerLoad = kValueLoad / kSize / 2;
constexpr int kQueryWords = D / 8;
constexpr bool kQueryInRegisters = ROWS8 == 1 && D <= 128;
constexpr int kRows = 8 * ROWS8;
constexpr int kStride = D + 4;                      // floats of a staged row; 4 spread the banks
constexpr int kStageFloats = 4 * kRows * (kStride + 2);
constexpr int kStages = 2 * kStageFloats * TEAMS * 4 <= 200 * 1024 ? 2 : 1;
constexpr int kTeamBytes = kStages * kStageFloats * 4 + 64;
constexpr float kSlack = 8.0f;  // a sum is rescaled when its maximum grows by more, in log2 units

// First dim of the pair that a lane of group `g` holds.
__device__ __forceinline__ int pair_dim(int phase, int pair, int g) {
  constexpr int elements = kValueLoad / kSize;
  return phase * DP + (pair / kPairsPerLoad) * 8 * elements + g * elements +
         2 * (pair % kPairsPerLoad);
}

__device__ __forceinline__ void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamThreads) : "memory");
}

// What a team hands from one unit to the next: units whose partials are written but not announced,
// and the unit whose last piece this team brought. Two of each, by parity.
struct Handover {
  int written, counter, pieces, pad;
  int finished[2];
};

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

// The keys of an item that one warp walks: a quarter of the piece, in steps of 32.
struct Range {
  int key, end, last;
  __device__ __forceinline__ Range(const AttentionParams& p, Item item, int warp) {
    const int begin = item[KV_BEGIN], stop = item[KV_END], kv_len = item[KV_LEN];
    int piece = 256;
    while (piece * 128 < kv_len) piece *= 2;
    const int mine = begin + warp * (piece / 4);
    key = mine;
    end = min(mine + piece / 4, stop);
    if (p.window) {  // below the window of the first query token nothing is seen
      const int low = kv_len - item[Q_LEN] - p.window + 1;
      if (low > key) key += (low - key) / kStep * kStep;
    }
    last = max(stop - 1, 0);
    if (end <= key) end = key + 1;  // a step that is masked whole: every warp walks one
  }
};

__device__ __forceinline__ int page_of(const AttentionParams& p, const PageRow& row, int key,
                                       int last) {
  return row.page(p, min(key, last));
}

__device__ __forceinline__ void load_keys(u32 (&k)[kKeyRows][kKeyWords], const char* base, u32 rows,
                                          int tile, int phase, const Lane& l) {
#pragma unroll
  for (int r = 0; r < kKeyRows; ++r) {
    const u32 at = __shfl_sync(0xffffffffu, rows, tile * kTile + r * 8 + l.g);
    const char* address = base + (u64)at * 32 + phase * kRowBytes + l.t * kKeyLoad;
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i)
      load_once<kKeyLoad>(&k[r][i * kKeyLoad / 4], address + i * 4 * kKeyLoad);
  }
}

__device__ __forceinline__ void load_values(u32 (&v)[kValueKeys][kValueWords], const char* base,
                                            u32 rows, int tile, int phase, const Lane& l) {
#pragma unroll
  for (int r = 0; r < kValueKeys; ++r) {
    // keys 2t, 2t+1, 2t+8, 2t+9 of each 16
    const int key = (r >> 2) * 16 + 2 * l.t + (r & 1) + ((r & 2) ? 8 : 0);
    const u32 at = __shfl_sync(0xffffffffu, rows, tile * kTile + key);
    const char* address = base + (u64)at * 32 + phase * kRowBytes + l.g * kValueLoad;
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i)
      load_once<kValueLoad>(&v[r][i * kValueLoad / 4], address + i * 8 * kValueLoad);
  }
}

// The query words of one group of 8 packed rows: lane (g, t) holds row g's dims as it holds keys'.
__device__ __forceinline__ void load_query(u32* q, const AttentionParams& p, Item item, int head,
                                           int nt, const Lane& l) {
  const int row = item[FIRST_ROW] + nt * 8 + l.g;
  const int rows = item[Q_LEN] * p.group;
  const int token = item[Q_START] + row / p.group;
  const bool valid = row < rows && token < p.num_tokens;
  const char* at = p.q;
  if (valid)
    at += 2 * (token * p.q_token + (long long)(head * p.group + row % p.group) * p.q_head);
  constexpr int dims = 4 * kKeyLoad / kSize;  // of a round of loads, 4 lanes together
#pragma unroll
  for (int i = 0; i < D / dims; ++i)
#pragma unroll
    for (int j = 0; j < dims / 32; ++j) {
      u32* word = q + i * (dims / 8) + j * 4;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (valid) x = *(const uint4*)(at + 2 * (i * dims + l.t * (dims / 4) + j * 8));
      word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
      if constexpr (KV8 && !FP16)
        for (int w = 0; w < 4; ++w) word[w] = bf16_to_f16(word[w]);
    }
}

// s += K Q^T over one phase's dims.
__device__ __forceinline__ void scores(float (&s)[kTile / 16][4], const u32 (&k)[kKeyRows][kKeyWords],
                                       const u32* q) {
#pragma unroll
  for (int b = 0; b < kTile / 16; ++b) {
    if constexpr (KV8) {
#pragma unroll
      for (int w = 0; w < kKeyWords; ++w)
        mma16816(s[b], e4m3_to_f16(k[2 * b][w], false), e4m3_to_f16(k[2 * b + 1][w], false),
                 e4m3_to_f16(k[2 * b][w], true), e4m3_to_f16(k[2 * b + 1][w], true), q[2 * w],
                 q[2 * w + 1]);
    } else {
#pragma unroll
      for (int w = 0; w < kKeyWords; w += 2)
        mma16816(s[b], k[2 * b][w], k[2 * b + 1][w], k[2 * b][w + 1], k[2 * b + 1][w + 1], q[w],
                 q[w + 1]);
    }
  }
}

// o += V^T P^T over one phase's dims; p[b] holds P^T of 16 keys and 8 packed rows.
__device__ __forceinline__ void weigh(float (&o)[kPairs][ROWS8][4],
                                      const u32 (&v)[kValueKeys][kValueWords],
                                      const u32 (&p)[ROWS8][kTile / 16][2]) {
#pragma unroll
  for (int b = 0; b < kTile / 16; ++b)
#pragma unroll
    for (int w = 0; w < kValueWords; ++w) {
      const u32 v0 = v[4 * b][w], v1 = v[4 * b + 1][w], v2 = v[4 * b + 2][w], v3 = v[4 * b + 3][w];
      if constexpr (KV8) {
        const u32 low = permute(v0, v1, 0x5140), high = permute(v0, v1, 0x7362);
        const u32 low8 = permute(v2, v3, 0x5140), high8 = permute(v2, v3, 0x7362);
#pragma unroll
        for (int n = 0; n < ROWS8; ++n) {
          mma16816(o[2 * w][n], e4m3_to_f16(low, false), e4m3_to_f16(low, true),
                   e4m3_to_f16(low8, false), e4m3_to_f16(low8, true), p[n][b][0], p[n][b][1]);
          mma16816(o[2 * w + 1][n], e4m3_to_f16(high, false), e4m3_to_f16(high, true),
                   e4m3_to_f16(high8, false), e4m3_to_f16(high8, true), p[n][b][0], p[n][b][1]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
          mma16816(o[w][n], permute(v0, v1, 0x5410), permute(v0, v1, 0x7632),
                   permute(v2, v3, 0x5410), permute(v2, v3, 0x7632), p[n][b][0], p[n][b][1]);
      }
    }
}

// Where a packed row of a request goes.
struct Row {
  int token, head;
  bool valid;
  __device__ __forceinline__ Row(const AttentionParams& p, int q_start, int q_len, int row, int h) {
    valid = row < q_len * p.group;
    token = q_start + row / p.group;
    valid = valid && token < p.num_tokens;
    head = h * p.group + row % p.group;
  }
};

// out = sum / norm in the output's dtype, 4 dims; the sink joins the norm.
__device__ __forceinline__ void store_row(const AttentionParams& p, const Row& row, int dim,
                                          float4 sum, float max2, float norm, float v_scale) {
  float sink2 = kMinusInf;
  if (p.sinks) sink2 = p.sinks[row.head] * kLog2e;
  const float top = fmaxf(max2, sink2);
  const float base = top == kMinusInf ? 0.0f : top;
  const float weight = exp2_fast(max2 - base);
  const float total = norm * weight + exp2_fast(sink2 - base);
  const float scale = norm > 0.0f ? v_scale * weight / total : 0.0f;
  if (!(norm > 0.0f)) sum = make_float4(0, 0, 0, 0);
  char* at = p.out + 2 * (row.token * p.out_token + row.head * p.out_head + dim);
  *(uint2*)at = make_uint2(pack2(sum.x * scale, sum.y * scale, FP16),
                           pack2(sum.z * scale, sum.w * scale, FP16));
  if (p.lse && dim == 0)
    p.lse[(long long)row.token * (p.num_kv_heads * p.group) + row.head] =
        total > 0.0f ? (top + log2_fast(total)) / kLog2e : kMinusInf;
}

// The last piece's team merges all partials of a row block, in index order.
__device__ __noinline__ void merge(const AttentionParams& p, int unit, int thread, float v_scale) {
  const int index = unit / p.num_kv_heads, head = unit % p.num_kv_heads;
  const int* item = p.plan + p.decode_at + (long long)index * ITEM_WORDS;
  const int q_start = item[Q_START], q_len = item[Q_LEN], first_row = item[FIRST_ROW];
  const int slot = item[FIRST_SLOT], pieces = item[NUM_PIECES];
  const int rows = p.decode_rows, heads = p.num_kv_heads;
  const float* sums = (const float*)(p.workspace + p.decode_out);
  const float* stats = (const float*)(p.workspace + p.decode_stats);
  for (int i = thread; i < rows * (D / 4); i += kTeamThreads) {
    const int r = i / (D / 4), dim = i % (D / 4) * 4;
    const Row row(p, q_start, q_len, first_row + r, head);
    if (!row.valid) continue;
    float top = kMinusInf;
#pragma unroll 8
    for (int j = 0; j < pieces; ++j) {
      const long long part = ((long long)(slot + j) * heads + head) * rows + r;
      top = fmaxf(top, load_cg((const float2*)stats + part).x);
    }
    const float base = top == kMinusInf ? 0.0f : top;
    float4 sum = make_float4(0, 0, 0, 0);
    float norm = 0.0f;
#pragma unroll 8
    for (int j = 0; j < pieces; ++j) {
      const long long part = ((long long)(slot + j) * heads + head) * rows + r;
      const float2 stat = load_cg((const float2*)stats + part);
      const float4 x = load_cg((const float4*)(sums + part * D + dim));
      const float weight = exp2_fast(stat.x - base);
      norm = fmaf(weight, stat.y, norm);
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
    }
    store_row(p, row, dim, sum, top, norm, v_scale);
  }
}

// Announce the unit written before; if its row block is complete, remember to merge it.
__device__ __forceinline__ void announce(const AttentionParams& p, Handover& h, int parity) {
  int finished = -1;
  if (h.written >= 0) {
    int* counter = (int*)p.workspace + h.counter;
    if (arrive(counter) == h.pieces - 1) {
      finished = h.written;
      *counter = 0;
    }
  }
  h.finished[parity] = finished;
}

// All of a team's units, of `num_teams` that share the plan's decode items.
__device__ __forceinline__ void run(const AttentionParams& p, char* shared, int num_teams,
                                    int team_index) {
  const Lane l;
  const int heads = p.num_kv_heads;
  const long long units = (long long)p.plan[NUM_DECODE] * heads;
  int unit = (int)(units * team_index / num_teams);
  const int end_unit = (int)(units * (team_index + 1) / num_teams);
  if (unit == end_unit) return;

  float* stage = (float*)(shared + l.team * kTeamBytes);
  Handover& handover = *(Handover*)(stage + kStages * kStageFloats);
  if (l.thread == 0) handover.written = handover.finished[0] = handover.finished[1] = -1;

  const float v_scale = KV8 ? cache_scale(p.v_scale, p.v_scale_ptr) : 1.0f;
  const float scale2 = KV8 ? cache_scale(p.scale_log2, p.k_scale_ptr) : p.scale_log2;

  const int end_item = (end_unit - 1) / heads;
  int index = unit / heads, head = unit % heads;
  Item item = load_item(p, index, l.lane);
  Item after = load_item(p, min(index + 1, end_item), l.lane);
  PageRow pages(p, item[REQUEST]);
  Range range(p, item, l.warp);
  u32 rows = row32(p, page_of(p, pages, range.key + l.lane, range.last),
                   min(range.key + l.lane, range.last));

  u32 k[kKeyRows][kKeyWords], v[kValueKeys][kValueWords];
  u32 q[kQueryInRegisters ? kQueryWords : 1];
  const char* kbase = p.k + (long long)head * p.head_bytes;
  const char* vbase = p.v + (long long)head * p.head_bytes;
  load_keys(k, kbase, rows, 0, 0, l);
  if constexpr (kQueryInRegisters) load_query(q, p, item, head, 0, l);
  load_values(v, vbase, rows, 0, 0, l);

  int parity = 0;
  for (;;) {  // a unit a turn
    float o[kPhases][kPairs][ROWS8][4];
    float top[ROWS8][2], norm[ROWS8][2];
    int limit[ROWS8][2], low[ROWS8][2];
    {
      const int kv_len = item[KV_LEN], q_len = item[Q_LEN], first = item[FIRST_ROW];
      const int stop = min(item[KV_END], range.end);
#pragma unroll
      for (int n = 0; n < ROWS8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int token = (first + n * 8 + 2 * l.t + c) / p.group;
          const int position = kv_len - q_len + token;
          limit[n][c] = p.causal ? min(stop, position + 1) : stop;
          low[n][c] = p.window ? position - p.window + 1 : 0;
          top[n][c] = kMinusInf;
          norm[n][c] = 0.0f;
        }
#pragma unroll
      for (int f = 0; f < kPhases; ++f)
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
#pragma unroll
          for (int n = 0; n < ROWS8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) o[f][i][n][c] = 0.0f;
    }

    const Item mine = item;
    const int my_head = head;
    bool more = true;
    for (bool last = false; !last;) {  // a step of 32 keys a turn
      const int key = range.key;
      last = key + kStep >= range.end;
      // Where the next step's rows lie: page ids are asked for a step ahead.
      if (!last) {
        range.key += kStep;
      } else if (unit + 1 < end_unit) {
        if (++head == heads) {
          head = 0;
          ++index;
          item = after;
          after = load_item(p, min(index + 1, end_item), l.lane);
          pages = PageRow(p, item[REQUEST]);
        }
        range = Range(p, item, l.warp);
        kbase = p.k + (long long)head * p.head_bytes;
        vbase = p.v + (long long)head * p.head_bytes;
      } else {
        more = false;
      }
      const int next_key = min(range.key + l.lane, range.last);
      const int next_page = more ? pages.page(p, next_key) : 0;
      u32 next_rows = rows;

#pragma unroll
      for (int tile = 0; tile < kTilesPerStep; ++tile) {
        const bool across = tile + 1 == kTilesPerStep;  // the tile after is the next step's
        float s[ROWS8][kTile / 16][4];
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
#pragma unroll
          for (int b = 0; b < kTile / 16; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[n][b][c] = 0.0f;
#pragma unroll
        for (int f = 0; f < kPhases; ++f) {
          if constexpr (kQueryInRegisters) {
            scores(s[0], k, q);
          } else {
#pragma unroll
            for (int n = 0; n < ROWS8; ++n) {
              u32 words[kQueryWords];
              load_query(words, p, mine, my_head, n, l);
              scores(s[n], k, words + f * (DP / 8));
            }
          }
          if (f + 1 < kPhases) {
            // keys of this step were the old base's: the head may have moved on already
            load_keys(k, p.k + (long long)my_head * p.head_bytes, rows, tile, f + 1, l);
          } else if (!across) {
            load_keys(k, p.k + (long long)my_head * p.head_bytes, rows, tile + 1, 0, l);
          } else if (more) {
            next_rows = row32(p, next_page, next_key);
            load_keys(k, kbase, next_rows, 0, 0, l);
            if constexpr (kQueryInRegisters)
              if (last) load_query(q, p, item, head, 0, l);
          }
        }

        // Softmax: a column is a packed row; lanes of a column differ in g.
        u32 probability[ROWS8][kTile / 16][2];
        bool grows = false;
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
#pragma unroll
          for (int b = 0; b < kTile / 16; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const int at = key + tile * kTile + b * 16 + l.g + (c >> 1) * 8, column = c & 1;
              const bool seen = at < limit[n][column] && at >= low[n][column];
              s[n][b][c] = seen ? logit2(s[n][b][c], scale2, p.softcap) : kMinusInf;
              grows |= s[n][b][c] > top[n][column] + kSlack;
            }
        if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
          for (int n = 0; n < ROWS8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float high = fmaxf(s[n][0][c], s[n][0][c + 2]);
              if constexpr (kTile == 32) high = fmaxf(high, fmaxf(s[n][1][c], s[n][1][c + 2]));
              high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 4));
              high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 8));
              high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 16));
              // each column by its own maximum: a row's bits are its own
              const float now = high > top[n][c] + kSlack ? high : top[n][c];
              const float shrink = now == kMinusInf ? 1.0f : exp2_fast(top[n][c] - now);
              top[n][c] = now;
              norm[n][c] *= shrink;
#pragma unroll
              for (int f = 0; f < kPhases; ++f)
#pragma unroll
                for (int i = 0; i < kPairs; ++i) {
                  o[f][i][n][c] *= shrink;
                  o[f][i][n][c + 2] *= shrink;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < ROWS8; ++n) {
          const float base0 = top[n][0] == kMinusInf ? 0.0f : top[n][0];
          const float base1 = top[n][1] == kMinusInf ? 0.0f : top[n][1];
#pragma unroll
          for (int b = 0; b < kTile / 16; ++b) {
            const float p0 = exp2_fast(s[n][b][0] - base0), p1 = exp2_fast(s[n][b][1] - base1);
            const float p2 = exp2_fast(s[n][b][2] - base0), p3 = exp2_fast(s[n][b][3] - base1);
            norm[n][0] += p0 + p2;
            norm[n][1] += p1 + p3;
            probability[n][b][0] = transpose8x8(pack2(p0, p1, kHalf));
            probability[n][b][1] = transpose8x8(pack2(p2, p3, kHalf));
          }
        }

#pragma unroll
        for (int f = 0; f < kPhases; ++f) {
          weigh(o[f], v, probability);
          if (f + 1 < kPhases)
            load_values(v, p.v + (long long)my_head * p.head_bytes, rows, tile, f + 1, l);
          else if (!across)
            load_values(v, p.v + (long long)my_head * p.head_bytes, rows, tile + 1, 0, l);
          else if (more)
            load_values(v, vbase, next_rows, 0, 0, l);
        }
      }
      rows = next_rows;
    }

    // The four warps' sums meet in shared memory and are added in their order.
    float* buffer = stage + (kStages == 2 ? parity * kStageFloats : 0);
    float* stats = buffer + 4 * kRows * kStride;
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = norm[n][c];
        total += __shfl_xor_sync(0xffffffffu, total, 4);
        total += __shfl_xor_sync(0xffffffffu, total, 8);
        total += __shfl_xor_sync(0xffffffffu, total, 16);
        const int r = n * 8 + 2 * l.t + c;
        if (r >= p.decode_rows) continue;
        if (l.g == 0) {
          stats[(l.warp * kRows + r) * 2] = top[n][c];
          stats[(l.warp * kRows + r) * 2 + 1] = total;
        }
        float* to = buffer + (l.warp * kRows + r) * kStride;
#pragma unroll
        for (int f = 0; f < kPhases; ++f)
#pragma unroll
          for (int i = 0; i < kPairs; i += 2)
            *(float4*)(to + pair_dim(f, i, l.g)) = make_float4(
                o[f][i][n][c], o[f][i][n][c + 2], o[f][i + 1][n][c], o[f][i + 1][n][c + 2]);
      }
    team_barrier(l.team);
    const int finished = handover.finished[parity];
    const int pieces = mine[NUM_PIECES];
    const int slot = mine[FIRST_SLOT] + mine[PIECE];
    const int q_start = mine[Q_START], q_len = mine[Q_LEN], first_row = mine[FIRST_ROW];
    const int counter = mine[COUNTER] * heads + my_head;
    for (int i = l.thread; i < p.decode_rows * (D / 4); i += kTeamThreads) {
      const int r = i / (D / 4), dim = i % (D / 4) * 4;
      float high = kMinusInf;
#pragma unroll
      for (int w = 0; w < 4; ++w) high = fmaxf(high, stats[(w * kRows + r) * 2]);
      float4 sum = make_float4(0, 0, 0, 0);
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float its = stats[(w * kRows + r) * 2];
        if (its == kMinusInf) continue;  // saw nothing; its sum may hold what it must not see
        const float weight = exp2_fast(its - high);
        const float4 x = *(const float4*)(buffer + (w * kRows + r) * kStride + dim);
        total = fmaf(weight, stats[(w * kRows + r) * 2 + 1], total);
        sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
        sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
      }
      if (pieces == 1) {
        const Row row(p, q_start, q_len, first_row + r, my_head);
        if (row.valid) store_row(p, row, dim, sum, high, total, v_scale);
      } else {
        const long long part = ((long long)slot * heads + my_head) * p.decode_rows + r;
        *(float4*)((float*)(p.workspace + p.decode_out) + part * D + dim) = sum;
        if (dim == 0)
          *((float2*)(p.workspace + p.decode_stats) + part) = make_float2(high, total);
      }
    }
    if (finished >= 0) merge(p, finished, l.thread, v_scale);
    if constexpr (kStages == 1) team_barrier(l.team);
    if (l.thread == 0) {
      announce(p, handover, parity ^ 1);
      handover.written = pieces > 1 ? unit : -1;
      handover.counter = counter;
      handover.pieces = pieces;
    }
    parity ^= 1;
    if (++unit == end_unit) break;
  }

  // What the last two units left: announce, merge.
  team_barrier(l.team);
  if (handover.finished[parity] >= 0) merge(p, handover.finished[parity], l.thread, v_scale);
  if (l.thread == 0) announce(p, handover, parity ^ 1);
  team_barrier(l.team);
  if (handover.finished[parity ^ 1] >= 0)
    merge(p, handover.finished[parity ^ 1], l.thread, v_scale);
}

}  // namespace decode
