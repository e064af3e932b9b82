// How sums become output, and partial sums one: the same for decode and prefill.
#pragma once
#include "attention.cuh"

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

// What a row's sum is multiplied by, and its log-sum-exp: the sink joins the norm. A row that saw
// nothing has scale 0, whatever its sum holds.
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

// out = sum / norm in the output's dtype, 4 dims.
__device__ __forceinline__ void store_row(const AttentionParams& p, const Row& row, int dim,
                                          float4 sum, float max2, float norm, float v_scale) {
  const Final last(p, row.head, max2, norm, v_scale);
  const float scale = last.scale;
  if (scale == 0.0f) sum = make_float4(0, 0, 0, 0);
  char* at = p.out + 2 * (row.token * p.out_token + row.head * p.out_head + dim);
  *(uint2*)at = make_uint2(pack2(sum.x * scale, sum.y * scale, FP16),
                           pack2(sum.z * scale, sum.w * scale, FP16));
  if (dim == 0) store_lse(p, row, last.lse);
}

// Merge all partials of a row block and head, in index order, by THREADS threads. `item` is one of
// the block's pieces; a partial is [rows, D] fp32 sums and [rows] (max, norm).
template <int THREADS>
__device__ __forceinline__ void merge_rows(const AttentionParams& p, const int* item, int head,
                                           int rows, const char* sums_at, const char* stats_at,
                                           int thread, float v_scale) {
  const int q_start = item[Q_START], q_len = item[Q_LEN], first_row = item[FIRST_ROW];
  const int slot = item[FIRST_SLOT], pieces = item[NUM_PIECES], heads = p.num_kv_heads;
  const float* sums = (const float*)sums_at;
  const float2* stats = (const float2*)stats_at;
  for (int i = thread; i < rows * (D / 4); i += THREADS) {
    const int r = i / (D / 4), dim = i % (D / 4) * 4;
    const Row row(p, q_start, q_len, first_row + r, head);
    if (!row.valid) continue;
    const long long first = ((long long)slot * heads + head) * rows + r;
    const long long step = (long long)heads * rows;
    float top = kMinusInf;
#pragma unroll 8
    for (int j = 0; j < pieces; ++j) top = fmaxf(top, load_cg(stats + first + j * step).x);
    const float base = top == kMinusInf ? 0.0f : top;
    float4 sum = make_float4(0, 0, 0, 0);
    float norm = 0.0f;
#pragma unroll 8
    for (int j = 0; j < pieces; ++j) {
      const float2 stat = load_cg(stats + first + j * step);
      const float4 x = load_cg((const float4*)(sums + (first + j * step) * D + dim));
      const float weight = exp2_fast(stat.x - base);
      if (weight == 0.0f) continue;  // saw nothing that counts
      norm = fmaf(weight, stat.y, norm);
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
    }
    store_row(p, row, dim, sum, top, norm, v_scale);
  }
}
