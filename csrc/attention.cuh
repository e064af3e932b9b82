// What the attention kernels share: the launch's parameters, the plan's items, small PTX.
//
// The layouts are smkern/kernels/attention/items.py's and args.py's. Nothing is included,
// so nvrtc compiles the files as they stand.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// HEAD_DIM 64, 96, 128, 256; FP16 (else bf16) queries and outputs; KV8: e4m3 caches; OUT8: outputs
// in e4m3 with scales (attention_e4m3.cuh); BRIEF: requests of few tokens are prefill's, too.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef FP16
#define FP16 0
#endif
#ifndef KV8
#define KV8 0
#endif
#ifndef OUT8
#define OUT8 0
#endif
#ifndef BRIEF
#define BRIEF 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif

constexpr int D = HEAD_DIM;
#define kMinusInf __int_as_float(0xff800000)
constexpr float kLog2e = 1.4426950408889634f;

// Addresses, strides in elements (for the cache in units of 32 bytes), offsets in bytes or words.
struct AttentionParams {
  const char* q;
  const char* k;
  const char* v;
  char* out;
  float* lse;
  const int* page_table;
  const int* page_indptr;
  const float* sinks;
  const float* k_scale_ptr;
  const float* v_scale_ptr;
  int* plan;
  char* workspace;
  long long q_token, q_head, out_token, out_head, table_stride, head_bytes;
  long long decode_out, decode_stats, prefill_out, prefill_stats;
  u32 page32, token32;
  int table_len, num_pages, num_tokens, num_kv_heads, group, page_shift;
  int causal, window, decode_rows, decode_at, prefill_at, group_inverse;
  float scale_log2, softcap, k_scale, v_scale;
#if OUT8
  float* out_scale;
  long long scale_token, scale_block;
#endif
};

enum {
  NUM_DECODE, NUM_PREFILL, DECODE_CTAS, OVERFLOWED, DECODE_SLOTS, PREFILL_SLOTS, DECODE_COST,
  FIRST_COST
};
enum { TICKET = 8, DEPARTED = 9, HEADER_WORDS = 64 };
enum {
  REQUEST, KV_BEGIN, KV_END, KV_LEN, Q_START, Q_LEN, FIRST_ROW, FIRST_SLOT, NUM_PIECES, PIECE,
  COUNTER, TILES, ITEM_WORDS, COST = TILES  // tiles of a prefill item, cost before a decode item
};

// Partials of a decode row block are merged by its last piece's team. Where there are more than
// kMergedAtOnce, each bundle of kBundle pieces is merged into one partial first, by its last
// team, and the last bundle's merges those: slots and counters of bundles follow the row block's.
constexpr int kMergedAtOnce = 16, kBundle = 8;
__device__ __forceinline__ int bundles_of(int pieces) {
  return pieces > kMergedAtOnce ? (pieces + kBundle - 1) / kBundle : 0;
}

// Lets the next kernel on the stream be set up (if it was launched to overlap), and waits until the
// previous one has ended and its writes are visible. Without such launches it does nothing.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Logits in log2 units: the scale, and the soft cap (c * tanh(s / c) by one exponential).
__device__ __forceinline__ float logit2(float s, float scale_log2, float softcap) {
  if constexpr (SOFTCAP) {
    const float e = exp2_fast(s * scale_log2 * (2.0f / softcap));
    return softcap * kLog2e * (1.0f - 2.0f * rcp_fast(1.0f + e));
  }
  return s * scale_log2;
}

// Two floats as a 16-bit pair, `lo` in the low half.
__device__ __forceinline__ u32 pack2(float lo, float hi, bool half) {
  u32 r;
  if (half)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// bf16 pair to f16 pair: for queries with an fp8 cache, whose values f16 holds exactly.
__device__ __forceinline__ u32 bf16_to_f16(u32 x) {
  return pack2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u), true);
}

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
  return __byte_perm(a, b, selector);
}

// Two e4m3 of half `high` of x as an f16 pair.
__device__ __forceinline__ u32 e4m3_to_f16(u32 x, bool high) {
  u32 r;
  unsigned short pair = high ? (unsigned short)(x >> 16) : (unsigned short)x;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
  return r;
}

// Whether a product's 16-bit operands are f16: for fp16 queries and for fp8 caches.
constexpr bool kHalf = FP16 || KV8;

// c += a b; a [16, 16] row-major fragments, b [16, 8].
__device__ __forceinline__ void mma16816(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  if constexpr (kHalf)
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The transpose of an 8x8 matrix of 16-bit values spread over the warp.
__device__ __forceinline__ u32 transpose8x8(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// A condition that is the same in all lanes, so that the compiler knows: what follows needs no code
// to bring the lanes together again.
__device__ __forceinline__ bool uniform(bool x) { return __any_sync(~0u, x); }

__device__ __forceinline__ int clamp_int(int x, int low, int high) {
  return x < low ? low : (x > high ? high : x);
}

// A request's row of the page table; entries are clamped, so nothing is read out of bounds.
struct PageRow {
  const int* base;
  int len;

  __device__ __forceinline__ PageRow(const AttentionParams& p, int request) {
    if (p.page_indptr) {
      const int from = clamp_int(p.page_indptr[request], 0, p.table_len - 1);
      const int to = clamp_int(p.page_indptr[request + 1], from + 1, p.table_len);
      base = p.page_table + from;
      len = to - from;
    } else {
      base = p.page_table + (long long)request * p.table_stride;
      len = p.table_len;
    }
  }
  __device__ __forceinline__ int page(const AttentionParams& p, int key) const {
    return base[clamp_int(key >> p.page_shift, 0, len - 1)];
  }
};

// A key's row in units of 32 bytes from the cache's base.
__device__ __forceinline__ u32 row32(const AttentionParams& p, int page, int key) {
  return (u32)clamp_int(page, 0, p.num_pages - 1) * p.page32 +
         (u32)(key & ((1 << p.page_shift) - 1)) * p.token32;
}

__device__ __forceinline__ float cache_scale(float value, const float* pointer) {
  return pointer ? value * *pointer : value;
}

// Arrivals: the last to arrive sees everything that was written before the block's barrier.
__device__ __forceinline__ int arrive(int* counter, int count) {
  int old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(count)
               : "memory");
  return old;
}

// The same without waiting for the old count: its reader must fence before it reads others' writes.
__device__ __forceinline__ int arrive_early(int* counter, int count) {
  int old;
  asm volatile("atom.release.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(count)
               : "memory");
  return old;
}
__device__ __forceinline__ void fence_arrived() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ float4 load_cg(const float4* address) {
  float4 r;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "l"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ float2 load_cg(const float2* address) {
  float2 r;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];"
               : "=f"(r.x), "=f"(r.y)
               : "l"(address)
               : "memory");
  return r;
}
