// The units of a plan: a decode request (all of its row blocks walk the same keys) or a prefill row
// block; how their keys are cut, and what is dropped if the host's bounds do not hold.
#pragma once
#include "attention.cuh"

constexpr u32 kAll = ~0u;

struct PlanParams {
  const int* kv_lens;
  const int* cu_q_lens;
  int* plan;
  int* counters;
  int batch, group, num_kv_heads, max_q_len, max_kv_len, max_tokens, causal, window;
  int decode_rows, decode_at, prefill_at, max_decode_items, max_prefill_items;
  int max_decode_slots, max_prefill_slots, num_counters;  // counters: of row blocks, for a KV head
  int num_ctas;
};

// A request's raw lengths, loaded ahead of their use: other work hides the loads.
struct Lengths {
  int kv_len, from, to;

  __device__ __forceinline__ static Lengths load(const PlanParams& p, int request) {
    Lengths x{p.kv_lens[request], request, request + 1};
    if (p.cu_q_lens) x.from = p.cu_q_lens[request], x.to = p.cu_q_lens[request + 1];
    return x;
  }
};

struct Request {
  int kv_len, q_start, q_len;

  __device__ __forceinline__ static Request of(const PlanParams& p, const Lengths& x) {
    Request r{clamp_int(x.kv_len, 0, p.max_kv_len), x.from, min(1, p.max_q_len)};
    if (p.cu_q_lens) {
      r.q_start = clamp_int(x.from, 0, p.max_tokens);
      r.q_len = min(clamp_int(x.to, r.q_start, p.max_tokens) - r.q_start, p.max_q_len);
    }
    return r;
  }
  // DECODE_MAX_Q and DECODE_MAX_GROUP of shapes.py
  __device__ __forceinline__ bool brief() const { return q_len <= 8; }
  __device__ __forceinline__ bool decode(const PlanParams& p) const {
    return brief() && p.group <= 16;
  }

  __device__ __forceinline__ int blocks(const PlanParams& p) const {
    const int rows = q_len * p.group;
    if (!decode(p)) return (rows + 127) >> 7;
    if (rows <= p.decode_rows) return rows > 0;
    return (u32)(rows + p.decode_rows - 1) / (u32)p.decode_rows;
  }
};

// Pieces are powers of two, except for uncut requests, whose piece is longer than any power used,
// and for the last one, which has all keys that are left.
__device__ __forceinline__ int doublings(int kv_len, int log_most) {
  return 32 - __clz(max(kv_len - 1, 0) >> log_most);
}

// A decode request or a prefill row block: the keys it walks and how they are cut.
struct Unit {
  int request = 0, block = 0;  // block: of a prefill request
  Request r{0, 0, 0};
  int blocks = 0, pieces = 0;  // blocks: of a decode request, else 1
  int begin = 0, end = 0, first = 0, shift = 0;
  bool decode = true;

  __device__ __forceinline__ void set(const PlanParams& p, const Request& given) {
    r = given;
    decode = r.decode(p);
    const int start = r.kv_len - r.q_len;
    int first_token = 0;
    blocks = r.blocks(p);
    end = r.kv_len;
    if (decode) {
      shift = 9 + max((int)(r.kv_len > 3072), doublings(r.kv_len, 16));  // decode_cut of shapes.py
    } else {
      const u32 row = (u32)block * 128, rows = r.q_len * p.group;
      if (p.causal) {
        const int last_token = (min(row + 128, rows) - 1) / (u32)p.group;
        end = min(end, max(start + last_token + 1, 0));
      }
      if (p.window) first_token = row / (u32)p.group;
      // prefill_piece of shapes.py
      const bool whole = blocks * p.num_kv_heads >= 1024;
      shift = whole ? 31 : (r.brief() ? 10 : 13) + doublings(r.kv_len, 15);
      blocks = min(blocks, 1);  // none of a request without queries
    }
    if (p.window) begin = min(max(start + first_token - p.window + 1, 0), end);
    // a rest of up to a quarter of a piece joins decode's last whole piece
    const int last = decode ? max(end - (1 << shift >> 2) - 1, 0) : max(begin, end - 1);
    first = min(begin, last) >> shift;
    if (blocks) pieces = (last >> shift) - first + 1;
    // decode walks whole pieces, prefill whole tiles
    begin = decode ? first << shift : begin & ~127;
  }
  __device__ __forceinline__ bool cut() const { return pieces > 1; }
  // of all row blocks
  __device__ __forceinline__ int slots() const {
    if (!cut()) return 0;
    return blocks * (pieces + (decode ? bundles_of(pieces) : 0));
  }
  __device__ __forceinline__ int counters() const {
    return cut() ? blocks * (1 + (decode ? bundles_of(pieces) : 0)) : 0;
  }
  __device__ __forceinline__ int key0(int i) const { return i ? (first + i) << shift : begin; }
  __device__ __forceinline__ int key1(int i) const {
    return i + 1 < pieces ? (first + i + 1) << shift : end;
  }
  __device__ __forceinline__ int tiles(int i) const { return (key1(i) - key0(i) + 127) >> 7; }
  // of all pieces, plus one a piece: all cuts lie between tiles
  __device__ __forceinline__ u32 cost() const {
    return blocks * (((u32)(end - begin) + 127) / 128 + pieces);
  }
  // of decode, by which teams share: a piece counts two tiles more, one without keys a tile itself
  __device__ __forceinline__ int shared_cost() const {
    return decode ? cost() + blocks * (pieces + (end == 0)) : 0;
  }
};

// Sums that are scanned together over the units of a warp. Prefill slots, at most 32 a unit and so
// 1024 a warp, share a word with the counters.
constexpr int kCounter = 1 << 12;

struct Sums {
  int items, slots, cost, joint;  // of decode; counters * kCounter + prefill slots

  __device__ __forceinline__ static Sums of(const Unit& u) {
    const int joint = u.counters() * kCounter;
    if (!u.decode) return {0, 0, 0, joint + u.slots()};
    return {u.blocks * u.pieces, u.slots(), u.shared_cost(), joint};
  }
  __device__ __forceinline__ int prefill_slots() const { return joint & (kCounter - 1); }
  __device__ __forceinline__ int counters() const { return joint / kCounter; }
  __device__ __forceinline__ Sums scan(int lane) const {
    Sums x = *this;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int a = __shfl_up_sync(kAll, x.items, by), b = __shfl_up_sync(kAll, x.slots, by),
                c = __shfl_up_sync(kAll, x.cost, by), d = __shfl_up_sync(kAll, x.joint, by);
      if (lane >= by) x.items += a, x.slots += b, x.cost += c, x.joint += d;
    }
    return x;
  }
};

struct Totals {
  int decode_items, prefill_items, decode_slots, prefill_slots, counters, decode_cost;

  __device__ __forceinline__ void add(const Unit& u) {
    (u.decode ? decode_items : prefill_items) += u.blocks * u.pieces;
    (u.decode ? decode_slots : prefill_slots) += u.slots();
    counters += u.counters();
  }
  __device__ __forceinline__ bool fit(const PlanParams& p) const {
    return decode_items <= p.max_decode_items && decode_slots <= p.max_decode_slots &&
           prefill_items <= p.max_prefill_items && prefill_slots <= p.max_prefill_slots &&
           counters <= p.num_counters;
  }
};

// The first unit of each path that is dropped, if the host's bounds do not hold.
struct Cut {
  int decode, prefill;
  __device__ __forceinline__ bool drops(const Unit& u, int index) const {
    return index >= (u.decode ? decode : prefill);
  }
};

// A unit is dropped with all later ones on its path. One thread does this, as it is an error path.
__device__ __noinline__ Cut find_cut(const PlanParams& p) {
  Cut cut{1 << 30, 1 << 30};
  Totals all{};
  int index = 0;
  for (int request = 0; request < p.batch; ++request) {
    const Request r = Request::of(p, Lengths::load(p, request));
    const int units = r.decode(p) ? r.q_len > 0 || !p.max_prefill_items : r.blocks(p);
    for (int block = 0; block < units; ++block, ++index) {
      Unit u;
      u.block = block;
      u.set(p, r);
      all.add(u);
      const bool fits = u.decode ? all.decode_items <= p.max_decode_items &&
                                       all.decode_slots <= p.max_decode_slots
                                 : all.prefill_items <= p.max_prefill_items &&
                                       all.prefill_slots <= p.max_prefill_slots;
      int& first = u.decode ? cut.decode : cut.prefill;
      if (!fits || all.counters > p.num_counters) first = min(first, index);
    }
  }
  return cut;
}
