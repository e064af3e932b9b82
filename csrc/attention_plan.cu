// The plan of an attention step, made on the device from its lengths: one CTA, no host read.
//
// It writes what smkern/kernels/attention_items.py's plan_items spells out; prefill items of equal
// length may come in another order.
#include "attention.cuh"

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBuckets = 1024;  // lengths of prefill items, in tiles, that are told apart

struct PlanParams {
  const int* kv_lens;
  const int* cu_q_lens;
  int* plan;
  int* counters;
  int batch, group, num_kv_heads, max_q_len, max_kv_len, max_tokens, causal, window;
  int decode_rows, decode_at, prefill_at, max_decode_items, max_prefill_items, num_counters;
  int num_ctas;
};

struct Request {
  int kv_len, q_start, q_len, blocks, block_rows;
  bool decode;

  __device__ __forceinline__ Request(const PlanParams& p, int i) {
    kv_len = clamp_int(p.kv_lens[i], 0, p.max_kv_len);
    q_start = i;
    q_len = 1;
    if (p.cu_q_lens) {
      q_start = clamp_int(p.cu_q_lens[i], 0, p.max_tokens);
      const int stop = clamp_int(p.cu_q_lens[i + 1], q_start, p.max_tokens);
      q_len = min(stop - q_start, p.max_q_len);
    }
    decode = q_len <= 8;
    block_rows = decode ? p.decode_rows : 128;
    blocks = (q_len * p.group + block_rows - 1) / block_rows;
  }
};

// A row block of a request: the keys it walks and how they are cut.
struct Block {
  int begin, end, piece, first, pieces;

  __device__ __forceinline__ Block(const PlanParams& p, const Request& r, int block) {
    const int rows = r.q_len * p.group, row = block * r.block_rows;
    const int last_token = r.decode ? r.q_len - 1 : (min(row + r.block_rows, rows) - 1) / p.group;
    const int first_token = r.decode ? 0 : row / p.group;
    const int start = r.kv_len - r.q_len;
    end = p.causal ? min(r.kv_len, max(start + last_token + 1, 0)) : r.kv_len;
    begin = p.window ? max(0, start + first_token - p.window + 1) : 0;
    begin = min(begin, end);
    piece = 512;
    if (r.decode) {
      while (piece * 128 < r.kv_len) piece *= 2;
    } else if (r.blocks * p.num_kv_heads >= 1024) {
      piece = max(8192, r.kv_len);
    } else {
      piece = 8192;
      while (piece * 4 < r.kv_len) piece *= 2;
    }
    first = begin / piece;
    pieces = max(begin, end - 1) / piece - first + 1;
  }
  __device__ __forceinline__ int key0(const Request& r, int i) const {
    const int cut = (first + i) * piece;
    return r.decode ? cut : max(begin / 128 * 128, cut);
  }
  __device__ __forceinline__ int key1(int i) const { return min(end, (first + i + 1) * piece); }
  __device__ __forceinline__ int tiles(const Request& r, int i) const {
    return (max(key1(i) - key0(r, i), 0) + 127) / 128;
  }
};

// Sums that are scanned together over row blocks, and totals.
struct Sums {
  int decode_items, prefill_items, decode_slots, prefill_slots, counters;

  __device__ __forceinline__ void add(const Sums& x) {
    decode_items += x.decode_items, prefill_items += x.prefill_items;
    decode_slots += x.decode_slots, prefill_slots += x.prefill_slots, counters += x.counters;
  }
  __device__ __forceinline__ Sums up(int by) const {
    return {__shfl_up_sync(~0u, decode_items, by), __shfl_up_sync(~0u, prefill_items, by),
            __shfl_up_sync(~0u, decode_slots, by), __shfl_up_sync(~0u, prefill_slots, by),
            __shfl_up_sync(~0u, counters, by)};
  }
};

__device__ __forceinline__ int scan_warp(int x, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int y = __shfl_up_sync(~0u, x, by);
    if (lane >= by) x += y;
  }
  return x;
}

// Exclusive sum of x over the CTA's threads, plus `base`, which grows by the total.
__device__ int scan_block(int x, int* warp_sums, int* base) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int inclusive = scan_warp(x, lane);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = scan_warp(warp_sums[lane], lane);
  __syncthreads();
  const int before = *base + (warp ? warp_sums[warp - 1] : 0) + inclusive - x;
  __syncthreads();
  if (threadIdx.x == kThreads - 1) *base = before + x;
  __syncthreads();
  return before;
}

struct Shared {
  int warp_sums[kWarps];
  Sums warp_totals[kWarps];
  Sums base;
  int blocks;
  unsigned long long decode_tiles, prefill_tiles;
  int overflow;
  int bucket[kBuckets];
  // a chunk's row blocks: offsets of their items, slots and counters
  int request[kThreads], block[kThreads];
  Sums before[kThreads];
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_plan(const __grid_constant__ PlanParams p) {
  extern __shared__ int block_starts[];  // [batch + 1]: row blocks before each request
  __shared__ Shared s;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  if (thread == 0) {
    s.base = Sums{0, 0, 0, 0, 0};
    s.blocks = s.overflow = 0;
    s.decode_tiles = s.prefill_tiles = 0;
  }
  for (int i = thread; i < kBuckets; i += kThreads) s.bucket[i] = 0;
  for (int i = thread; i < p.num_counters; i += kThreads) p.counters[i] = 0;
  __syncthreads();

  for (int i0 = 0; i0 < p.batch; i0 += kThreads) {
    const int i = i0 + thread;
    const int mine = i < p.batch ? Request(p, i).blocks : 0;
    const int before = scan_block(mine, s.warp_sums, &s.blocks);
    if (i < p.batch) block_starts[i] = before;
  }
  const int blocks = s.blocks;
  if (thread == 0) block_starts[p.batch] = blocks;
  __syncthreads();

  // The prefill items' lengths are counted first, so that a second pass can place the longest first.
  const bool sorted = p.max_prefill_items > 0;
  for (int pass = sorted ? 0 : 1; pass < 2; ++pass) {
    for (int b0 = 0; b0 < blocks; b0 += kThreads) {
      const int count = min(blocks - b0, kThreads);
      Sums mine{0, 0, 0, 0, 0};
      if (thread < count) {
        int low = 0, high = p.batch;  // the last request that starts at or before this block
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          if (block_starts[middle] <= b0 + thread) low = middle; else high = middle;
        }
        const Request r(p, low);
        const Block b(p, r, b0 + thread - block_starts[low]);
        s.request[thread] = low;
        s.block[thread] = b0 + thread - block_starts[low];
        const int slots = b.pieces > 1 ? b.pieces : 0;
        mine = r.decode ? Sums{b.pieces, 0, slots, 0, slots > 0} : Sums{0, b.pieces, 0, slots, slots > 0};
        if (pass == 0 || !sorted) {
          unsigned long long tiles = 0;
          for (int i = 0; i < b.pieces; ++i) {
            const int its = b.tiles(r, i);
            tiles += its + 1;
            if (!r.decode) atomicAdd(&s.bucket[kBuckets - 1 - min(its, kBuckets - 1)], 1);
          }
          atomicAdd(r.decode ? &s.decode_tiles : &s.prefill_tiles, tiles);
        }
      }
      if (pass == 0) continue;
      // exclusive scan of the five sums
      Sums inclusive = mine;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const Sums other = inclusive.up(by);
        if (lane >= by) inclusive.add(other);
      }
      if (lane == 31) s.warp_totals[warp] = inclusive;
      __syncthreads();
      if (warp == 0) {
        Sums total = s.warp_totals[lane];
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const Sums other = total.up(by);
          if (lane >= by) total.add(other);
        }
        s.warp_totals[lane] = total;
      }
      __syncthreads();
      Sums before = s.base;
      if (warp) before.add(s.warp_totals[warp - 1]);
      before.decode_items += inclusive.decode_items - mine.decode_items;
      before.prefill_items += inclusive.prefill_items - mine.prefill_items;
      before.decode_slots += inclusive.decode_slots - mine.decode_slots;
      before.prefill_slots += inclusive.prefill_slots - mine.prefill_slots;
      before.counters += inclusive.counters - mine.counters;
      s.before[thread] = before;
      __syncthreads();
      if (thread == kThreads - 1) {
        before.add(mine);
        s.base = before;
      }
      // a warp writes a row block's items, a lane an item
      for (int j = warp; j < count; j += kWarps) {
        const Request r(p, s.request[j]);
        const Block b(p, r, s.block[j]);
        const Sums at = s.before[j];
        const bool cut = b.pieces > 1;
        for (int i = lane; i < b.pieces; i += 32) {
          const int tiles = b.tiles(r, i);
          int index = at.decode_items + i, limit = p.max_decode_items, from = p.decode_at;
          if (!r.decode) {
            index = atomicAdd(&s.bucket[kBuckets - 1 - min(tiles, kBuckets - 1)], 1);
            limit = p.max_prefill_items, from = p.prefill_at;
          }
          if (index >= limit) {
            atomicAdd(&s.overflow, 1);
            continue;
          }
          int4* item = (int4*)(p.plan + from + (long long)index * ITEM_WORDS);
          const int slot = !cut ? -1 : r.decode ? at.decode_slots : at.prefill_slots;
          item[0] = make_int4(s.request[j], b.key0(r, i), b.key1(i), r.kv_len);
          item[1] = make_int4(r.q_start, r.q_len, s.block[j] * r.block_rows, slot);
          item[2] = make_int4(b.pieces, i, cut ? at.counters : 0, tiles);
        }
      }
      __syncthreads();
    }
    __syncthreads();
    if (pass == 0) {  // counts to places, the longest first
      int zero = 0;
      const int mine = s.bucket[thread];
      if (thread == 0) s.blocks = 0;
      __syncthreads();
      zero = scan_block(mine, s.warp_sums, &s.blocks);
      s.bucket[thread] = zero;
      __syncthreads();
    }
  }

  if (thread < HEADER_WORDS) {
    const int decode = min(s.base.decode_items, p.max_decode_items);
    const int prefill = min(s.base.prefill_items, p.max_prefill_items);
    int ctas = 0;
    if (decode) {
      // a tile costs a prefill CTA 7 where the same keys cost a decode CTA 3: see plan_items
      const unsigned long long d = 3 * s.decode_tiles, f = 7 * s.prefill_tiles;
      ctas = p.num_ctas;
      if (prefill) {
        const int share = (int)((d * p.num_ctas + d + f - 1) / (d + f));
        ctas = min(max(share, 1), p.num_ctas > 1 ? p.num_ctas - 1 : 1);
      }
    }
    int word = 0;
    if (thread == NUM_DECODE) word = decode;
    if (thread == NUM_PREFILL) word = prefill;
    if (thread == DECODE_CTAS) word = ctas;
    if (thread == OVERFLOWED) word = s.overflow;
    if (thread == DECODE_SLOTS) word = s.base.decode_slots;
    if (thread == PREFILL_SLOTS) word = s.base.prefill_slots;
    p.plan[thread] = word;
  }
}
