// Normalising sums to output and merging partials, for decode and prefill alike.
#pragma once
#if OUT8
#include "attention_e4m3.cuh"
#else
#include "attention.cuh"
#endif

// Output position of a request's packed row.
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

// The factor for a row's sum, and its log-sum-exp; the sink is added to the norm. A row that saw no
// keys has scale 0, whatever its sum holds.
struct Final {
  float scale, lse;
  __device__ __forceinline__ Final(const AttentionParams& p, int head, float max2, float norm,
                                   float v_scale) {
    const float sink2 = p.sinks ? p.sinks[head] * kLog2e : kMinusInf;
    const float top = fmaxf(max2, sink2);
    const float base = top == kMinusInf ? 0.0f : top;
    const float weight = exp2_fast(max2 - base);
    const float total = norm * weight + exp2_fast(sink2 - base);
    scale = norm > 0.0f ? v_scale * weight / total : 0.0f;
    lse = total > 0.0f ? (top + log2_fast(total)) / kLog2e : kMinusInf;
  }
};

__device__ __forceinline__ void store_lse(const AttentionParams& p, const Row& row, float lse) {
  if (p.lse) p.lse[(long long)row.token * (p.num_kv_heads * p.group) + row.head] = lse;
}

// Whether a lane's row is stored. With scales lanes of a warp store together: they have the columns
// of one scale, so all rows that they have are there or none is.
__device__ __forceinline__ bool stores(bool valid) { return OUT8 ? uniform(valid) : valid; }

// out = sum / norm in the output's dtype, 4 dims. A warp's lanes have 128 columns one after another.
__device__ __forceinline__ void store_row(const AttentionParams& p, const Row& row, int dim,
                                          float4 sum, float max2, float norm, float v_scale) {
  const Final last(p, row.head, max2, norm, v_scale);
  const float scale = last.scale;
  if (scale == 0.0f) sum = make_float4(0, 0, 0, 0);
  const uint2 packed = make_uint2(pack2(sum.x * scale, sum.y * scale, FP16),
                                  pack2(sum.z * scale, sum.w * scale, FP16));
#if OUT8
  store_quad(p, row.token, row.head, dim, packed.x, packed.y);
#else
  *(uint2*)(p.out + 2 * (row.token * p.out_token + row.head * p.out_head + dim)) = packed;
#endif
  if (dim == 0) store_lse(p, row, last.lse);
}

// How sums of a row that have maxima of their own are added; stats are (max in log2 units, norm).
// Sums that saw no keys have -inf, and are zeros.
struct Weights {
  float high, one, other;
  __device__ __forceinline__ Weights(const float2& a, const float2& b) {
    high = fmaxf(a.x, b.x);
    const float base = high == kMinusInf ? 0.0f : high;
    one = exp2_fast(a.x - base), other = exp2_fast(b.x - base);
  }
  __device__ __forceinline__ float add(float a, float b) const { return fmaf(a, one, other * b); }
  __device__ __forceinline__ float4 add(const float4& a, const float4& b) const {
    return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
  }
  __device__ __forceinline__ float2 add(const float2& a, const float2& b) const {
    return make_float2(high, add(a.y, b.y));
  }
};

// Partials of a row block that become one: `count` slots from `slot` on. The result goes to slot
// `into`, or is the output where that is -1.
struct Partials {
  int slot, count, into;
};

// Merge partials of a row block and head, in index order, by THREADS threads. `item` has the words
// of one of the block's pieces; a partial is [rows, D] fp32 sums and [rows] (max, norm). A thread
// has 4 dims of ROWS rows at a time and asks for several partials at once: few loads wait for each
// other, which is all that a merge costs. More would take registers from its caller.
template <int THREADS, int ROWS = 1, class Item>
__device__ __forceinline__ void merge_rows(const AttentionParams& p, const Item& item, int head,
                                           int rows, Partials part, char* sums_at, char* stats_at,
                                           int thread, float v_scale) {
  constexpr int kAhead = 8 / ROWS, kQuads = D / 4;
  const int q_start = item[Q_START], q_len = item[Q_LEN], first_row = item[FIRST_ROW];
  const int pieces = part.count, heads = p.num_kv_heads;
  const auto stats_of = [&](int slot) {
    return (float2*)stats_at + ((long long)slot * heads + head) * rows;
  };
  const auto sums_of = [&](int slot) {
    return (float*)sums_at + ((long long)slot * heads + head) * rows * D;
  };
  const float2* stats = stats_of(part.slot);
  const float* sums = sums_of(part.slot);
  const long long step = (long long)heads * rows;
  const int used = min(rows, q_len * p.group - first_row) * kQuads;
  for (int i0 = thread; uniform(i0 < used); i0 += THREADS * ROWS) {
    float4 sum[ROWS] = {};
    float2 all[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) all[k] = make_float2(kMinusInf, 0.0f);
    for (int j0 = 0; uniform(j0 < pieces); j0 += kAhead) {
      float2 stat[kAhead][ROWS];
      float4 x[kAhead][ROWS];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
          const int i = min(i0 + k * THREADS, used - 1), at = min(j0 + j, pieces - 1);
          stat[j][k] = load_cg(stats + at * step + i / kQuads);
          x[j][k] = load_cg((const float4*)(sums + at * step * D + i * 4));
        }
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
          if (j0 + j >= pieces || stat[j][k].x == kMinusInf) continue;
          const Weights weights(all[k], stat[j][k]);
          sum[k] = weights.add(sum[k], x[j][k]), all[k] = weights.add(all[k], stat[j][k]);
        }
    }
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const int i = i0 + k * THREADS;
      if (uniform(part.into >= 0)) {
        if (i >= used) continue;
        ((float4*)sums_of(part.into))[i] = sum[k];
        if (i % kQuads == 0) stats_of(part.into)[i / kQuads] = all[k];
        continue;
      }
      const Row row(p, q_start, q_len, first_row + i / kQuads, head);
      if (stores(i < used && row.valid))
        store_row(p, row, i % kQuads * 4, sum[k], all[k].x, all[k].y, v_scale);
    }
  }
}
