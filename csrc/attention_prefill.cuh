// The prefill path: tiles of 128 packed rows, keys from last to first, on Hopper's matrix unit.
//
// A producer fills shared memory (attention_prefill_gather.cuh). Two consumer warpgroups of 64 rows
// compute S = Q K^T for the next keys while the last probabilities still multiply V, and alternate:
// one's exponentials overlap the other's products. Items come from the plan, longest first, by
// ticket: a CTA takes the next one when it is done, so no CTA waits for another and no second wave
// is planned.
#pragma once
#include "attention_prefill_gather.cuh"
#if TMA && !KV8
#include "attention_prefill_boxes.cuh"
#else
#include "attention_prefill_copy.cuh"
#endif

namespace prefill {

// Two rows of a thread: g and g + 8 of its warp's 16.
struct Rows {
  float top[2] = {kMinusInf, kMinusInf}, norm[2] = {0.0f, 0.0f};
  int limit[2], low[2];
};

// Replaces a tile's scores by probabilities; returns the factor for older sums.
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
    for (int i = 0; i < kKeys / 8; ++i)
      high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
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
    const u32 q = query + block * kRows * kSwizzle + within;
    const u32 k = keys + block * kKeys * kSwizzle + within;
    multiply_shared(s, matrix<kSwizzle>(q, 16, 8 * kSwizzle), matrix<kSwizzle>(k, 16, 8 * kSwizzle),
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

// A thread's two dims of a row in a block of 8, in 16 bits.
__device__ __forceinline__ u32 output_pair(const float (&o)[D / 2], int block, int r, float scale) {
  float x = o[4 * block + 2 * r] * scale, y = o[4 * block + 2 * r + 1] * scale;
  if (scale == 0.0f) x = y = 0.0f;
  return pack2(x, y, FP16);
}

#if OUT8
// A row half's output in e4m3, 16 bytes a lane for blocks of 64 dims. Two heads of 64 dims that share
// a scale are rows of neighbouring quads.
__device__ __forceinline__ void store_dims(const AttentionParams& p, const Row& row,
                                           const float (&o)[D / 2], int r, float scale) {
  constexpr int kDims = D < kScaled ? D : kScaled;
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int d = 0; d < D; d += kDims) {
    u32 pair[kDims / 8], most = 0;
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
      pair[i] = output_pair(o, d / 8 + i, r, scale);
      most = larger(most, pair[i]);
    }
    most = larger_half(most);
#pragma unroll
    for (int by = 1; by < 4 * (kScaled / kDims); by *= 2)
      most = max(most, __shfl_xor_sync(0xffffffffu, most, by));
    const BlockScale block(most);
    char* at = p.out + row.token * p.out_token + row.head * p.out_head + d;
#pragma unroll
    for (int i = 0; i < kDims / 64; ++i) {
      u32 w[4];
#pragma unroll
      for (int b = 0; b < 4; ++b)
        w[b] = to_e4m3(pair[8 * i + 2 * b], block.inverse) |
               to_e4m3(pair[8 * i + 2 * b + 1], block.inverse) << 16;
      exchange(w, t);
      if (row.valid)
        *(uint4*)(at + 64 * i + 16 * t) =
            make_uint4(permute(w[0], w[1], 0x5410), permute(w[2], w[3], 0x5410),
                       permute(w[0], w[1], 0x7632), permute(w[2], w[3], 0x7632));
    }
    const int column = row.head * D + d;
    if (row.valid && t == 0 && column % kScaled == 0) store_scale(p, row.token, column, block.scale);
  }
}
#else
// A row half's output, 16 bytes a lane; dims of D % 32 == 0 in blocks of 32.
__device__ __forceinline__ void store_dims(const AttentionParams& p, const Row& row,
                                           const float (&o)[D / 2], int r, float scale) {
  const int t = threadIdx.x & 3;
  char* at = p.out + 2 * (row.token * p.out_token + row.head * p.out_head);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    u32 w[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) w[b] = output_pair(o, 4 * i + b, r, scale);
    exchange(w, t);
    if (row.valid) *(uint4*)(at + 2 * (32 * i + 8 * t)) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
#endif

// Two rows' output and log-sum-exp.
__device__ __forceinline__ void store_output(const AttentionParams& p, const Item& item, int head,
                                             const float (&o)[D / 2], const Rows& rows, int row0,
                                             float scale2, float v_scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Row row(p, item.q_start, item.q_len, item.first_row + row0 + 8 * r, head);
    const Final last(p, row.head, rows.top[r] * scale2, rows.norm[r], v_scale);
    store_dims(p, row, o, r, last.scale);
    if (row.valid && (threadIdx.x & 3) == 0) store_lse(p, row, last.lse);
  }
}

// Writes a piece's unnormalised sums, which the CTA of the last piece merges.
__device__ __forceinline__ void store_partial(const AttentionParams& p, const Item& item, int head,
                                              const float (&o)[D / 2], const Rows& rows, int row0,
                                              float scale2) {
  const int t = threadIdx.x & 3;
  const long long slot = item.first_slot + item.piece;
  const long long part = (slot * p.num_kv_heads + head) * kRows;
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

__device__ __forceinline__ void consume(const AttentionParams& p, const Shared& s) {
  const int consumer = threadIdx.x / 128 - 1, heads = p.num_kv_heads;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int row0 = 64 * consumer + 16 * warp + lane / 4;  // and 8 rows further
  const float v_scale = KV8 ? cache_scale(p.v_scale, p.v_scale_ptr) : 1.0f;
  const float scale2 = KV8 ? cache_scale(p.scale_log2, p.k_scale_ptr) : p.scale_log2;
  const float stat_scale = SOFTCAP ? 1.0f : scale2;
  Turn<kPosts> work;
  Turn<kStages> keys, values;
  const auto await = [&](const auto& turn, u32 full) {
    barrier_wait(full + 8 * turn.stage(), turn.parity());
  };
  const auto release = [&](auto& turn, u32 empty) {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * turn.stage());
    ++turn.count;
  };
  const auto take_turn = [&] { named_barrier<256>(1 + consumer); };
  const auto give_turn = [&] { named_barrier_arrive<256>(2 - consumer); };
  // the CTA of a row block's last piece merges them all
  const auto finish_piece = [&](const Item& item, int head) {
    named_barrier<256>(6);
    if (threadIdx.x == 128) {
      int* counter = (int*)p.workspace + item.counter * heads + head;
      *s.last = arrive(counter, 1) == item.pieces - 1;
      if (*s.last) *counter = 0;
    }
    named_barrier<256>(6);
    if (*s.last)
      merge_rows<256, 4>(
          p, p.plan + p.prefill_at + (long long)(item.unit / heads) * ITEM_WORDS, head, kRows,
          Partials{item.first_slot, item.pieces, -1}, p.workspace + p.prefill_out,
          p.workspace + p.prefill_stats, threadIdx.x - 128, v_scale);
    named_barrier<256>(6);  // the flag is free again
  };
  if (consumer == 1) give_turn();
  for (;;) {
    await(work, s.full_work);
    const Item item(s.work + 16 * work.stage());
    if (item.unit < 0) break;
    const u32 query = s.query + work.stage() * kQueryBytes + 64 * consumer * kSwizzle;
    const int head = item.unit % heads, tiles = item.tiles();
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

    if (!query_is_box(p)) {
      load_query(p, item, head, s.query + work.stage() * kQueryBytes, 64 * consumer);
      named_barrier<128>(4 + consumer);
    }
    if constexpr (BRIEF) {  // a half without rows lets everything pass, in its turns
      if (item.first_row + 64 * consumer >= item.q_len * p.group) {
        for (int tile = tiles - 1; tile >= 0; --tile) {
          await(keys, s.full_keys);
          release(keys, s.empty_keys);
          if (tile < tiles - 1) take_turn(), give_turn();
          await(values, s.full_values);
          release(values, s.empty_values);
        }
        release(work, s.empty_work);
        if (item.pieces > 1) finish_piece(item, head);
        continue;
      }
    }
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
        take_turn();
        multiply_keys(score, query, s.keys + keys.stage() * kTileBytes);
        await(values, s.full_values);
        multiply_values(o, probability, s.values + values.stage() * kTileBytes, tile < tiles - 2);
        give_turn();
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
      release(work, s.empty_work);
      await(values, s.full_values);
      multiply_values(o, probability, s.values + values.stage() * kTileBytes, tiles > 1);
      wgmma_wait<0>();
      pin(o);
      release(values, s.empty_values);
    } else {
      release(work, s.empty_work);
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
    finish_piece(item, head);
  }
  if (consumer == 0) take_turn();  // the other's last turn
}

// Of a thread. More than the launch gave, 168 each, would be waited for for ever.
constexpr int kProducerRegisters = KV8 ? (D == 256 ? 72 : 88) : 56;
constexpr int kConsumerRegisters = KV8 ? (D == 256 ? 216 : 208) : 224;
static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 168 * kThreads);

__device__ __forceinline__ void run(const AttentionParams& p, const TensorMap* maps, char* shared) {
  const Shared s(shared);
  if (threadIdx.x == 0) s.init();
  __syncthreads();
  const int units = p.plan[NUM_PREFILL] * p.num_kv_heads;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    produce(p, maps, s, units);
    if (threadIdx.x == 0) depart(p);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume(p, s);
  }
}

}  // namespace prefill
