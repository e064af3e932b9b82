// The prefill path: tiles of 128 packed rows, keys from last to first, on Hopper's matrix unit.
//
// A producer warpgroup gathers K and V rows from their pages by cp.async into two stages each; two
// consumer warpgroups of 64 rows multiply, S = Q K^T for the next keys while the last probabilities
// still multiply V. Items come from the plan, longest first, by a ticket: a CTA that is done takes
// the next, so no CTA waits for another and no second wave is planned.
#pragma once
#include "attention_merge.cuh"
#include "wgmma.cuh"

namespace prefill {

constexpr int kThreads = 384;
constexpr int kRows = 128;                     // packed rows of an item, 64 a consumer
constexpr int kKeys = D == 256 ? 64 : 128;     // keys of a tile
constexpr int kSwizzle = D % 64 == 0 ? 128 : 64;
constexpr int kBlock = kSwizzle / 2;           // dims side by side in shared memory
constexpr int kStages = 2;
constexpr int kTileBytes = kKeys * D * 2;
constexpr int kQueryBytes = kRows * D * 2;
constexpr int kChunks = D / 8;                 // 16-byte chunks of a row of 16-bit values
constexpr int kBlockChunks = kBlock / 8;
constexpr int kSharedBytes = 1024 + kQueryBytes + 2 * kStages * kTileBytes + 256;

struct Shared {
  u32 query, keys, values;   // addresses in shared memory
  u32 full_keys, empty_keys, full_values, empty_values, full_work, empty_work;  // barriers, 2 each
  volatile int* work;        // 2 units, then a flag

  __device__ __forceinline__ Shared(char* shared) {
    char* at = (char*)(((u64)shared + 1023) / 1024 * 1024);
    query = (u32)__cvta_generic_to_shared(at);
    keys = query + kQueryBytes;
    values = keys + kStages * kTileBytes;
    full_keys = values + kStages * kTileBytes;
    empty_keys = full_keys + 16, full_values = full_keys + 32, empty_values = full_keys + 48;
    full_work = full_keys + 64, empty_work = full_keys + 80;
    work = (volatile int*)(at + kQueryBytes + 2 * kStages * kTileBytes + 96);
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2; ++i) {
      barrier_init(full_keys + 8 * i, 128), barrier_init(full_values + 8 * i, 128);
      barrier_init(empty_keys + 8 * i, 8), barrier_init(empty_values + 8 * i, 8);
      barrier_init(full_work + 8 * i, 1), barrier_init(empty_work + 8 * i, kThreads / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// Where chunk c of row r lies in a matrix of `rows` rows.
__device__ __forceinline__ u32 chunk_at(int rows, int r, int c) {
  const int low = kSwizzle == 128 ? r & 7 : (r >> 1) & 3;
  return c / kBlockChunks * (rows * kSwizzle) + r * kSwizzle + ((c % kBlockChunks) ^ low) * 16;
}

struct Item {
  int request, begin, end, kv_len, q_start, q_len, first_row, first_slot, pieces, piece, counter;
  __device__ __forceinline__ Item(const AttentionParams& p, int index) {
    const int4* at = (const int4*)(p.plan + p.prefill_at + (long long)index * ITEM_WORDS);
    const int4 a = at[0], b = at[1], c = at[2];
    request = a.x, begin = a.y, end = a.z, kv_len = a.w;
    q_start = b.x, q_len = b.y, first_row = b.z, first_slot = b.w;
    pieces = c.x, piece = c.y, counter = c.z;
  }
  __device__ __forceinline__ int tiles() const { return (max(end - begin, 0) + kKeys - 1) / kKeys; }
};

// The next unit of a thread's CTA, or -1. Producers' thread 0 draws tickets one ahead.
struct Tickets {
  int turn = 0, drawn = 0;
  __device__ __forceinline__ int next(const AttentionParams& p, const Shared& s, int units,
                                      bool draws) {
    const int slot = turn & 1, parity = (turn >> 1) & 1;
    if (draws) {
      if (turn == 0) drawn = atomicAdd(p.plan + TICKET, 1);
      barrier_wait(s.empty_work + 8 * slot, parity ^ 1);
      s.work[slot] = drawn < units ? drawn : -1;
      barrier_arrive(s.full_work + 8 * slot);
      if (drawn < units) drawn = atomicAdd(p.plan + TICKET, 1);
    }
    barrier_wait(s.full_work + 8 * slot, parity);
    const int unit = s.work[slot];
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(s.empty_work + 8 * slot);
    ++turn;
    return unit;
  }
};

// A stage of a ring of two and its parity.
struct Turn {
  u32 count = 0;
  __device__ __forceinline__ u32 stage() const { return count & 1; }
  __device__ __forceinline__ u32 parity() const { return (count >> 1) & 1; }
};

// Gather one tile's rows, 32 (16) of them a warp; keys at or behind `end` become zeros.
__device__ __forceinline__ void copy_tile(u32 to, const char* base, u32 row32_of_lane, int key0,
                                          int end) {
  constexpr int rows = kKeys / 4;  // of a warp
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int i = 0; i < rows * kChunks / 32; ++i) {
    const int j = i * 32 + lane, r = j / kChunks, c = j % kChunks;
    const u32 row = __shfl_sync(0xffffffffu, row32_of_lane, r);
    const int bytes = key0 + warp * rows + r < end ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     to + chunk_at(kKeys, warp * rows + r, c)),
                 "l"(base + (u64)row * 32 + c * 16), "r"(bytes)
                 : "memory");
  }
}

// The same from an e4m3 cache: f16 in shared memory.
__device__ __forceinline__ void convert_tile(u32 to, const char* base, u32 row32_of_lane, int key0,
                                             int end) {
  constexpr int rows = kKeys / 4, chunks = D / 16, loads = rows * chunks / 32;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  uint4 x[loads];
#pragma unroll
  for (int i = 0; i < loads; ++i) {
    const int j = i * 32 + lane, r = j / chunks, c = j % chunks;
    const u32 row = __shfl_sync(0xffffffffu, row32_of_lane, r);
    x[i] = make_uint4(0, 0, 0, 0);
    if (key0 + warp * rows + r < end) x[i] = *(const uint4*)(base + (u64)row * 32 + c * 16);
  }
#pragma unroll
  for (int i = 0; i < loads; ++i) {
    const int j = i * 32 + lane, r = warp * rows + j / chunks, c = j % chunks * 2;
    const u32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + chunk_at(kKeys, r, c + h)),
                   "r"(e4m3_to_f16(words[2 * h], false)), "r"(e4m3_to_f16(words[2 * h], true)),
                   "r"(e4m3_to_f16(words[2 * h + 1], false)),
                   "r"(e4m3_to_f16(words[2 * h + 1], true))
                   : "memory");
  }
}

__device__ __forceinline__ void produce(const AttentionParams& p, const Shared& s, int units) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, heads = p.num_kv_heads;
  Tickets tickets;
  Turn keys, values;
  const auto fill = [&](Turn& turn, u32 ring, u32 full, u32 empty, const char* base, u32 rows,
                        int key0, int end) {
    const u32 stage = turn.stage();
    barrier_wait(empty + 8 * stage, turn.parity() ^ 1);
    if constexpr (KV8) {
      convert_tile(ring + stage * kTileBytes, base, rows, key0, end);
      fence_async();
      barrier_arrive(full + 8 * stage);
    } else {
      copy_tile(ring + stage * kTileBytes, base, rows, key0, end);
      barrier_arrive_copied(full + 8 * stage);
    }
    ++turn.count;
  };
  for (;;) {
    const int unit = tickets.next(p, s, units, threadIdx.x == 0);
    if (unit < 0) break;
    const Item item(p, unit / heads);
    const int head = unit % heads, tiles = item.tiles();
    const PageRow pages(p, item.request);
    const char* k = p.k + head * p.head_bytes;
    const char* v = p.v + head * p.head_bytes;
    const auto look_up = [&](int tile) {
      const int key = item.begin + tile * kKeys + warp * (kKeys / 4) + (lane & (kKeys / 4 - 1));
      return row32(p, pages.page(p, min(key, item.end - 1)), key);
    };
    if (tiles == 0) continue;
    u32 rows = look_up(tiles - 1), rows_after = rows;
    for (int tile = tiles - 1; tile >= 0; --tile) {
      // keys one tile ahead of values, as the consumers take them
      const int key0 = item.begin + tile * kKeys;
      if (tile == tiles - 1)
        fill(keys, s.keys, s.full_keys, s.empty_keys, k, rows, key0, item.end);
      if (tile > 0) {
        rows_after = look_up(tile - 1);
        fill(keys, s.keys, s.full_keys, s.empty_keys, k, rows_after, key0 - kKeys, item.end);
      }
      fill(values, s.values, s.full_values, s.empty_values, v, rows, key0, item.end);
      rows = rows_after;
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (threadIdx.x == 0) {  // the last CTA to have drawn its last ticket resets the counters
    if (arrive(p.plan + DEPARTED, 1) == (int)gridDim.x - 1) p.plan[TICKET] = p.plan[DEPARTED] = 0;
  }
}

// Two rows of a thread: g and g + 8 of its warp's 16.
struct Rows {
  float top[2] = {kMinusInf, kMinusInf}, norm[2] = {0.0f, 0.0f};
  int limit[2], low[2];
};

// Probabilities of a tile in place of its scores; returns what older sums shrink by.
__device__ __forceinline__ void soften(float (&s)[kKeys / 2], Rows& rows, float (&shrink)[2],
                                       int key0, bool whole, float scale2, float softcap) {
  const int t = threadIdx.x & 3;
  if constexpr (SOFTCAP) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = logit2(s[i], scale2, softcap);
    scale2 = 1.0f;
  }
  if (!whole) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = key0 + i / 4 * 8 + 2 * t + (i & 1), r = (i >> 1) & 1;
      if (key >= rows.limit[r] || key < rows.low[r]) s[i] = kMinusInf;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float high = rows.top[r];
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
    const float base = high == kMinusInf ? 0.0f : high * scale2;
    shrink[r] = exp2_fast(fmaf(rows.top[r], scale2, -base));
    rows.top[r] = high;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * i + 2 * r + c];
        x = exp2_fast(fmaf(x, scale2, -base));
        sum += x;
      }
    rows.norm[r] = fmaf(rows.norm[r], shrink[r], sum);
  }
}

__device__ __forceinline__ void pack(u32 (&p)[kKeys / 4], const float (&s)[kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) p[i] = pack2(s[2 * i], s[2 * i + 1], kHalf);
}

__device__ __forceinline__ void multiply_keys(float (&s)[kKeys / 2], u32 query, u32 keys) {
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const int block = i * 16 / kBlock, within = i * 16 % kBlock * 2;
    multiply_shared(s, matrix<kSwizzle>(query + block * kRows * kSwizzle + within, 16, 8 * kSwizzle),
                    matrix<kSwizzle>(keys + block * kKeys * kSwizzle + within, 16, 8 * kSwizzle),
                    i > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&o)[D / 2], const u32 (&p)[kKeys / 4],
                                                u32 values, bool keep) {
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i)
    multiply_held(o, p + 4 * i,
                  matrix<kSwizzle>(values + i * 16 * kSwizzle, kKeys * kSwizzle, 8 * kSwizzle),
                  i > 0 || keep);
  wgmma_commit();
}

// A consumer's 64 query rows into shared memory.
__device__ __forceinline__ void load_query(const AttentionParams& p, const Item& item, int head,
                                           u32 to, int row0) {
  const int thread = threadIdx.x & 127;
#pragma unroll
  for (int i = 0; i < 64 * kChunks / 128; ++i) {
    const int j = i * 128 + thread, r = row0 + j / kChunks, c = j % kChunks;
    const Row row(p, item.q_start, item.q_len, item.first_row + r, head);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row.valid)
      x = *(const uint4*)(p.q + 2 * (row.token * p.q_token + row.head * p.q_head + c * 8));
    if constexpr (KV8 && !FP16)
      x = make_uint4(bf16_to_f16(x.x), bf16_to_f16(x.y), bf16_to_f16(x.z), bf16_to_f16(x.w));
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + chunk_at(kRows, r, c)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  fence_async();
}

// Four lanes exchange their words of four blocks of 8 dims: lane t then has all of block t.
__device__ __forceinline__ void exchange(u32 (&w)[4], int t) {
#pragma unroll
  for (int by = 1; by < 3; ++by)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = by == 1 ? 2 * i : i, high = low + by;
      const bool upper = t & by;
      const u32 sent = upper ? w[low] : w[high];
      const u32 got = __shfl_xor_sync(0xffffffffu, sent, by);
      if (upper) w[low] = got; else w[high] = got;
    }
}

// A row half's output, 16 bytes a lane; dims of D % 32 == 0 in blocks of 32.
__device__ __forceinline__ void store_output(const AttentionParams& p, const Item& item, int head,
                                             const float (&o)[D / 2], const Rows& rows, int row0,
                                             float scale2, float v_scale) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Row row(p, item.q_start, item.q_len, item.first_row + row0 + 8 * r, head);
    const Final last(p, row.head, rows.top[r] * scale2, rows.norm[r], v_scale);
    char* at = p.out + 2 * (row.token * p.out_token + row.head * p.out_head);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      u32 w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        float x = o[16 * i + 4 * b + 2 * r] * last.scale, y = o[16 * i + 4 * b + 2 * r + 1] * last.scale;
        if (last.scale == 0.0f) x = y = 0.0f;
        w[b] = pack2(x, y, FP16);
      }
      exchange(w, t);
      if (row.valid) *(uint4*)(at + 2 * (32 * i + 8 * t)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
    if (row.valid && t == 0) store_lse(p, row, last.lse);
  }
}

// A piece's sums, not normalised, for the last piece's CTA to merge.
__device__ __forceinline__ void store_partial(const AttentionParams& p, const Item& item, int head,
                                              const float (&o)[D / 2], const Rows& rows, int row0,
                                              float scale2) {
  const int t = threadIdx.x & 3;
  const long long part = ((long long)(item.first_slot + item.piece) * p.num_kv_heads + head) * kRows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* at = (float*)(p.workspace + p.prefill_out) + (part + row0 + 8 * r) * D;
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      *(float2*)(at + 8 * i + 2 * t) = make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]);
    if (t == 0)
      *((float2*)(p.workspace + p.prefill_stats) + part + row0 + 8 * r) =
          make_float2(rows.top[r] * scale2, rows.norm[r]);
  }
}

__device__ __forceinline__ void consume(const AttentionParams& p, const Shared& s, int units) {
  const int consumer = threadIdx.x / 128 - 1, heads = p.num_kv_heads;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int row0 = 64 * consumer + 16 * warp + lane / 4;  // and 8 rows further
  const float v_scale = KV8 ? cache_scale(p.v_scale, p.v_scale_ptr) : 1.0f;
  const float scale2 = KV8 ? cache_scale(p.scale_log2, p.k_scale_ptr) : p.scale_log2;
  const float stat_scale = SOFTCAP ? 1.0f : scale2;
  const u32 query = s.query + 64 * consumer * kSwizzle;
  Tickets tickets;
  Turn keys, values;
  const auto await = [&](const Turn& turn, u32 full) {
    barrier_wait(full + 8 * turn.stage(), turn.parity());
    fence_async();
  };
  const auto release = [&](Turn& turn, u32 empty) {
    if (lane == 0) barrier_arrive(empty + 8 * turn.stage());
    ++turn.count;
  };
  for (;;) {
    const int unit = tickets.next(p, s, units, false);
    if (unit < 0) break;
    const Item item(p, unit / heads);
    const int head = unit % heads, tiles = item.tiles();
    const int first_position = item.kv_len - item.q_len;
    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = first_position + (item.first_row + row0 + 8 * r) / p.group;
      rows.limit[r] = p.causal ? min(item.end, position + 1) : item.end;
      rows.low[r] = p.window ? position - p.window + 1 : 0;
    }
    // keys that all rows of the tile see
    const int first_token = item.first_row / p.group;
    const int last_token = (min(item.first_row + kRows, item.q_len * p.group) - 1) / p.group;
    const int all_limit = p.causal ? min(item.end, first_position + first_token + 1) : item.end;
    const int all_low = p.window ? first_position + last_token - p.window + 1 : 0;

    load_query(p, item, head, s.query, 64 * consumer);
    named_barrier<128>(4 + consumer);
    float o[D / 2], score[kKeys / 2], shrink[2];
    u32 probability[kKeys / 4];
    const auto soften_tile = [&](int tile) {
      const int key0 = item.begin + tile * kKeys;
      soften(score, rows, shrink, key0, key0 + kKeys <= all_limit && key0 >= all_low, scale2,
             p.softcap);
    };
    if (tiles > 0) {
      await(keys, s.full_keys);
      multiply_keys(score, query, s.keys + keys.stage() * kTileBytes);
      wgmma_wait<0>();
      pin(score);
      release(keys, s.empty_keys);
      soften_tile(tiles - 1);
      pack(probability, score);
      for (int tile = tiles - 2; tile >= 0; --tile) {
        await(keys, s.full_keys);
        multiply_keys(score, query, s.keys + keys.stage() * kTileBytes);
        await(values, s.full_values);
        multiply_values(o, probability, s.values + values.stage() * kTileBytes, tile < tiles - 2);
        wgmma_wait<1>();
        pin(score);
        release(keys, s.empty_keys);
        soften_tile(tile);
        wgmma_wait<0>();
        pin(o);
        release(values, s.empty_values);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] *= shrink[(i >> 1) & 1];
        pack(probability, score);
      }
      await(values, s.full_values);
      multiply_values(o, probability, s.values + values.stage() * kTileBytes, tiles > 1);
      wgmma_wait<0>();
      pin(o);
      release(values, s.empty_values);
    } else {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.norm[r] += __shfl_xor_sync(0xffffffffu, rows.norm[r], 1);
      rows.norm[r] += __shfl_xor_sync(0xffffffffu, rows.norm[r], 2);
    }
    if (item.pieces == 1) {
      store_output(p, item, head, o, rows, row0, stat_scale, v_scale);
      continue;
    }
    store_partial(p, item, head, o, rows, row0, stat_scale);
    named_barrier<256>(6);
    volatile int* last = s.work + 2;
    if (threadIdx.x == 128) {
      int* counter = (int*)p.workspace + item.counter * heads + head;
      *last = arrive(counter, 1) == item.pieces - 1;
      if (*last) *counter = 0;
    }
    named_barrier<256>(6);
    if (*last)
      merge_rows<256>(p, p.plan + p.prefill_at + (long long)(unit / heads) * ITEM_WORDS, head, kRows,
                      p.workspace + p.prefill_out, p.workspace + p.prefill_stats,
                      threadIdx.x - 128, v_scale);
    named_barrier<256>(6);  // the flag is free again
  }
}

__device__ __forceinline__ void run(const AttentionParams& p, char* shared) {
  const Shared s(shared);
  if (threadIdx.x == 0) s.init();
  __syncthreads();
  const int units = p.plan[NUM_PREFILL] * p.num_kv_heads;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(KV8 ? 72 : 40));
    produce(p, s, units);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(KV8 ? 216 : 232));
    consume(p, s, units);
  }
}

}  // namespace prefill
