// The plan of an attention step, made on the device from its lengths: one CTA, no host read.
//
// It writes what smkern/kernels/attention/items.py's plan_items spells out; prefill items of equal
// length may come in another order.
//
// A thread works out a unit (attention_plan_units.cuh), one scan over the units gives every one its
// place. The kernel is latency alone: a length is loaded once, warps without work only meet the
// barriers, and a step of up to 1024 units (of up to 32: one warp's) is walked once. More go chunk
// by chunk.
#include "attention_plan_units.cuh"

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ int scan_warp(int x, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int y = __shfl_up_sync(kAll, x, by);
    if (lane >= by) x += y;
  }
  return x;
}

// The last of `count` ascending starts that is at most x; the first always is.
__device__ __forceinline__ int find(const int* starts, int count, int x) {
  int low = 0;
#pragma unroll 1
  for (int step = count > 1 ? 1 << (31 - __clz(count - 1)) : 0; step; step >>= 1)
    if (low + step < count && starts[low + step] <= x) low += step;
  return low;
}

// A sum for every warp. The sum of those before one is a single instruction for its lanes.
struct WarpSums {
  int of[kWarps];

  __device__ __forceinline__ int before(int warp, int lane) const {
    return __reduce_add_sync(kAll, lane < warp ? of[lane] : 0);
  }
  __device__ __forceinline__ int all(int lane) const { return before(kWarps, lane); }
};

struct Shared {
  WarpSums units, items, slots, costs, prefill_slots, counters, sorted;
  u64 decode_cost[kWarps], prefill_cost[kWarps];
  int bucket[kThreads];  // prefill items by length, the longest first: counts, then places
  int start[kThreads];   // a chunk's units: decode items before each
  // of decode units: request, kv_len, q_start, bytes of q_len, shift, first piece and pieces
  int4 who[kThreads];    // before that, of requests: kv_len, q_start, q_len
  int4 where[kThreads];  // of decode units: slot, counter, cost before
  Cut cut;     // where not all fits: what is kept,
  Totals all;  // and what there was
};

// Tiles of a piece to its bucket: the last lengths that are told apart are 1023 tiles.
__device__ __forceinline__ int bucket_of(int tiles) {
  return kThreads - 1 - min(tiles, kThreads - 1);
}

// The last warps zero counters first, as the first warps have requests to process.
__device__ __forceinline__ void zero_counters(const PlanParams& p) {
  const int from = kThreads - 1 - threadIdx.x;
  const int count = p.num_counters * p.num_kv_heads, quads = ((u64)p.counters & 15) ? 0 : count / 4;
  int4* at = (int4*)p.counters;
#pragma unroll 1
  for (int i = from; i < quads; i += kThreads) at[i] = make_int4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = quads * 4 + from; i < count; i += kThreads) p.counters[i] = 0;
}

// Writes the number of units before each request to starts[batch]; returns the total, at least 1.
__device__ __forceinline__ int count_units(const PlanParams& p, Shared& s, int* starts,
                                           const Lengths& mine) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int total = 0;
#pragma unroll 1
  for (int i0 = 0; i0 < p.batch; i0 += kThreads) {
    const int i = i0 + thread, count = min(p.batch - i0, kThreads);
    const bool works = warp * 32 < count;
    int units = 0, upto = 0;
    if (thread < count) {
      const Request r = Request::of(p, i0 ? Lengths::load(p, i) : mine);
      units = r.decode(p) ? r.q_len > 0 : r.blocks(p);
      s.who[thread] = make_int4(r.kv_len, r.q_start, r.q_len, 0);
    }
    if (works) upto = scan_warp(units, lane);
    if (lane == 31) s.units.of[warp] = upto;
    int before = total + upto - units;
    if (count > 32) {
      __syncthreads();
      if (works) before += s.units.before(warp, lane);
    }
    if (thread < count) starts[i] = before;
    __syncthreads();
    total += s.units.all(lane);
    if (i0 + kThreads < p.batch) __syncthreads();
  }
  return max(total, 1);
}

__device__ __forceinline__ void write_item(int* item, const int4& keys, const int4& rows,
                                           const int4& pieces) {
  int4* at = (int4*)item;
  at[0] = keys, at[1] = rows, at[2] = pieces;
}

// Writes decode items [0, items) of the chunk's `units`, one per thread.
__device__ __forceinline__ void write_decode(const PlanParams& p, const Shared& s, int base,
                                             int items, int units) {
  const int limit = min(items, p.max_decode_items - base);
#pragma unroll 1
  for (int j = threadIdx.x; j < limit; j += kThreads) {
    const int unit = find(s.start, units, j);
    const int4 who = s.who[unit];
    const int4 where = s.where[unit];
    const int kv_len = who.y, shift = (who.w >> 8) & 255, pieces = (u32)who.w >> 24;
    int block = 0, i = j - s.start[unit];
    if (i >= pieces) {  // most requests have one row block
      block = (u32)i / (u32)pieces;
      i -= block * pieces;
    }
    const int first = (who.w >> 16) & 255, number = first + i, key0 = number << shift;
    const int key1 = i + 1 < pieces ? (number + 1) << shift : kv_len;
    const bool cut = pieces > 1;
    const int bundles = bundles_of(pieces);
    // all pieces but the last cost the same; a row block's cost is that of its request's others
    const int tiles = max((kv_len - (first << shift) + 127) >> 7, 1), each = (1 << shift >> 7) + 2;
    const int before = where.z + block * (tiles + 2 * pieces) + i * each;
    if (base + j == 0) p.plan[FIRST_COST] = max((key1 - key0 + 127) >> 7, 1) + 2;
    write_item(p.plan + p.decode_at + (long long)(base + j) * ITEM_WORDS,
               make_int4(who.x, key0, key1, kv_len),
               make_int4(who.z, who.w & 255, block * p.decode_rows,
                         cut ? where.x + block * (pieces + bundles) : -1),
               make_int4(pieces, i, cut ? where.y + block * (1 + bundles) : 0, before));
  }
}

// A prefill unit's items, at most 32, by the warp together. The next place of a length is that
// of its bucket among its warp's buckets, plus what lies in the warps before.
__device__ __forceinline__ void write_prefill(const PlanParams& p, Shared& s, const Unit& u,
                                              int slot, int counter, int lane) {
  const int mine = u.decode ? 0 : u.pieces;
  const int most = __reduce_max_sync(kAll, mine);
  if (most == 0) return;
  const int sum = s.sorted.of[lane], before = scan_warp(sum, lane) - sum;
#pragma unroll 1
  for (int i = 0; i < most; ++i) {
    const int tiles = u.tiles(i), bucket = i < mine ? bucket_of(tiles) : 0;
    int place = __shfl_sync(kAll, before, bucket >> 5);
    if (i >= mine) continue;
    place += atomicAdd(&s.bucket[bucket], 1);
    if (place >= p.max_prefill_items) continue;
    write_item(p.plan + p.prefill_at + (long long)place * ITEM_WORDS,
               make_int4(u.request, u.key0(i), u.key1(i), u.r.kv_len),
               make_int4(u.r.q_start, u.r.q_len, u.block * 128, u.cut() ? slot : -1),
               make_int4(u.pieces, i, u.cut() ? counter : 0, tiles));
  }
}

__device__ __forceinline__ u64 sum_warp(u64 x) {
#pragma unroll
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(kAll, x, by);
  return x;
}

// The header, by one warp. CTAs that begin with decode items: see decode_ctas in
// kernels/attention/items.py (a tile costs a prefill CTA 10, the same keys a decode CTA 3).
__device__ __forceinline__ void write_header(const PlanParams& p, const Shared& s,
                                             const Totals& kept, const Totals& all, int lane) {
  const int decode = kept.decode_items, prefill = kept.prefill_items;
  int ctas = decode ? p.num_ctas : 0;
  if (decode && prefill) {
    const u64 cost = sum_warp(s.decode_cost[lane]);
    const u64 d = 3 * cost, f = 10 * sum_warp(s.prefill_cost[lane]);
    const u64 above = d * p.num_ctas + d + f - 1;
    const int share = above >> 32 ? (int)(above / (d + f)) : (int)((u32)above / (u32)(d + f));
    const int blocks = (p.group + p.decode_rows - 1) / p.decode_rows;
    const u64 tiles = cost - decode, enough = 77 * blocks * cost / (2 * (tiles ? tiles : 1));
    const long long idle = p.num_ctas - (long long)prefill * p.num_kv_heads;
    const int least = (int)(idle > 1 ? idle : 1);
    ctas = enough < (u64)share ? (int)enough : share;
    ctas = min(max(ctas, least), max(p.num_ctas - 1, 1));
  }
  int word = 0;
  if (lane == NUM_DECODE) word = decode;
  if (lane == NUM_PREFILL) word = prefill;
  if (lane == DECODE_CTAS) word = ctas;
  if (lane == OVERFLOWED) word = all.decode_items - decode + all.prefill_items - prefill;
  if (lane == DECODE_SLOTS) word = all.decode_slots;
  if (lane == PREFILL_SLOTS) word = all.prefill_slots;
  if (lane == DECODE_COST) word = kept.decode_cost;
  if (lane != FIRST_COST || !decode) p.plan[lane] = word;  // else the first item's writer does
  p.plan[32 + lane] = 0;
}

// Places all items, in the second pass only those before s.cut; returns whether they fit. `all` is
// the total to be placed: slots and counters in the last warp, which writes the header.
__device__ __forceinline__ bool place(const PlanParams& p, Shared& s, const int* starts,
                                      const Lengths& lengths, int units, int turn, Totals& all) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const bool has_prefill = p.max_prefill_items > 0, once = units <= kThreads;
  u64 decode_cost = 0, prefill_cost = 0;  // of this warp's units
  bool fits = true;
  Unit unit;
  Sums mine, upto;
  // Prefill items are counted by length first, so that a second pass can place the longest first.
  // With a single chunk, that pass finds everything in registers.
#pragma unroll 1
  for (int pass = has_prefill ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int u0 = 0; u0 < units; u0 += kThreads) {
      const int count = min(units - u0, kThreads);
      const bool works = warp * 32 < count, found = has_prefill && pass == 1 && once;
      if (!found) {
        unit = Unit{};
        mine = upto = Sums{0, 0, 0};
        if (thread < count) {
          Request r;
          unit.request = u0 + thread;
          if (has_prefill) {
            unit.request = find(starts, p.batch, u0 + thread);
            unit.block = u0 + thread - starts[unit.request];
          }
          if (has_prefill && once && p.batch <= kThreads) {
            const int4 known = s.who[unit.request];
            r = Request{known.x, known.y, known.z};
          } else {
            r = Request::of(p, has_prefill || u0 ? Lengths::load(p, unit.request) : lengths);
          }
          unit.set(p, r);
          if (turn && s.cut.drops(unit, u0 + thread)) unit.blocks = unit.pieces = 0;
          if (pass == 0 && !unit.decode)
#pragma unroll 1
            for (int i = 0; i < unit.pieces; ++i) atomicAdd(&s.bucket[bucket_of(unit.tiles(i))], 1);
        }
        if (works) {
          mine = Sums::of(unit);
          upto = mine.scan(lane);
          if (has_prefill && (pass == 1 || once)) {  // sums by halves, which cannot overflow
            const u32 d = unit.decode ? unit.cost() : 0, f = unit.decode ? 0 : unit.cost();
            decode_cost += __reduce_add_sync(kAll, d & 0xffff);
            decode_cost += (u64)__reduce_add_sync(kAll, d >> 16) << 16;
            prefill_cost += __reduce_add_sync(kAll, f & 0xffff);
            prefill_cost += (u64)__reduce_add_sync(kAll, f >> 16) << 16;
          }
        }
        if (lane == 31) {
          s.items.of[warp] = upto.items, s.slots.of[warp] = upto.slots;
          s.costs.of[warp] = upto.cost;
          s.prefill_slots.of[warp] = upto.prefill_slots(), s.counters.of[warp] = upto.counters();
          s.decode_cost[warp] = decode_cost, s.prefill_cost[warp] = prefill_cost;
        }
      }
      if (pass == 0) continue;

      if (!found && count > 32) __syncthreads();
      int item = upto.items - mine.items, slot = all.decode_slots + upto.slots - mine.slots;
      int prefill_slot = all.prefill_slots + upto.prefill_slots() - mine.prefill_slots();
      int counter = all.counters + upto.counters() - mine.counters();
      int cost = all.decode_cost + upto.cost - mine.cost;
      if (works && count > 32) {
        cost += s.costs.before(warp, lane);
        item += s.items.before(warp, lane), slot += s.slots.before(warp, lane);
        counter += s.counters.before(warp, lane);
        if (has_prefill) prefill_slot += s.prefill_slots.before(warp, lane);
      }
      if (thread < count) {
        s.start[thread] = item;
        if (unit.decode) {
          s.who[thread] = make_int4(unit.request, unit.r.kv_len, unit.r.q_start,
                                    unit.r.q_len | unit.shift << 8 | unit.first << 16 |
                                        unit.pieces << 24);
          s.where[thread] = make_int4(slot, counter, cost, 0);
        }
      }
      const bool over = works && (all.decode_items + item + mine.items > p.max_decode_items ||
                                  slot + mine.slots > p.max_decode_slots ||
                                  prefill_slot + mine.prefill_slots() > p.max_prefill_slots ||
                                  counter + mine.counters() > p.num_counters);
      fits &= !__syncthreads_or(over);
      if (has_prefill && works) write_prefill(p, s, unit, prefill_slot, counter, lane);
      const int more = s.items.all(lane);
      write_decode(p, s, all.decode_items, more, count);
      all.decode_items += more;
      const bool last = u0 + kThreads >= units;
      if (!last || warp == kWarps - 1) {
        all.decode_cost += s.costs.all(lane);
        all.decode_slots += s.slots.all(lane), all.prefill_slots += s.prefill_slots.all(lane);
        all.counters += s.counters.all(lane);
      }
      if (!last) __syncthreads();
    }
    if (pass == 0) {  // counts to places among the buckets of a warp
      __syncthreads();
      const int here = s.bucket[thread];
      int upto_here = 0;
      if (__any_sync(kAll, here)) upto_here = scan_warp(here, lane);
      s.bucket[thread] = upto_here - here;
      if (lane == 31) s.sorted.of[warp] = upto_here;
    }
  }
  if (has_prefill) all.prefill_items = s.sorted.all(lane);
  return fits && all.prefill_items <= p.max_prefill_items;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_plan(const __grid_constant__ PlanParams p) {
  extern __shared__ int starts[];  // [batch]: units before each request, where there is prefill
  __shared__ Shared s;
  await_previous_kernel();
  const int thread = threadIdx.x;
  const bool has_prefill = p.max_prefill_items > 0;
  // a second pass only if the host's bounds do not hold; it starts from scratch
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    Lengths lengths{};
    if (thread < p.batch) lengths = Lengths::load(p, thread);
    zero_counters(p);
    int units = p.batch;
    if (has_prefill) {
      s.bucket[thread] = 0;
      units = count_units(p, s, starts, lengths);
    }
    Totals kept{};
    if (place(p, s, starts, lengths, units, turn, kept) || turn) {
      if (thread >= kThreads - 32) write_header(p, s, kept, turn ? s.all : kept, thread & 31);
      return;
    }
    __syncthreads();
    if (thread == kThreads - 1) s.all = kept, s.cut = find_cut(p);
    __syncthreads();
  }
}
