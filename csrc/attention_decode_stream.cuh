// The stream of keys that a decode warp walks through all of its team's units.
//
// A unit is an item (a piece of a request's keys) and a KV head; each of a team's four warps takes
// a quarter of its keys. A warp multiplies one step while the next is copied and the page ids of the
// next stretch are loaded, across unit boundaries.
#pragma once
#include "attention_decode_math.cuh"

namespace decode {

__device__ __forceinline__ Item load_item(const AttentionParams& p, int index, int lane) {
  const int* at = p.plan + p.decode_at + (long long)index * ITEM_WORDS;
  return Item{lane < ITEM_WORDS ? at[lane] : 0};
}

// Units [first, end) of a team: teams share the total cost, not the number, as lengths differ.
// The units before an offset on the line of costs (row block by row block, each as often as there
// are heads) are found by the warp, both ends at a time, in a search of 32 branches.
struct Share {
  int first, end;

  __device__ __forceinline__ Share(const AttentionParams& p, int team, int teams, int lane) {
    const int heads = p.num_kv_heads, items = p.plan[NUM_DECODE], total = p.plan[DECODE_COST];
    if (p.plan[FIRST_COST] * (long long)items == total) {  // as if all cost the same
      first = (int)((long long)items * heads * team / teams);
      end = (int)((long long)items * heads * (team + 1) / teams);
      return;
    }
    const int* words = p.plan + p.decode_at;
    const auto cost_before = [&](int item) {
      return item < items ? words[(long long)item * ITEM_WORDS + COST] : total;
    };
    long long offset[2];
    int low[2] = {0, 0}, unit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) offset[i] = (long long)total * heads * (team + i) / teams;
    for (int count = items, step; count > 1; count = step) {
      step = (count + 31) / 32;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = low[i] + lane * step;
        const bool before = at < items && (long long)cost_before(at) * heads <= offset[i];
        low[i] += max(__popc(__ballot_sync(0xffffffffu, before)) - 1, 0) * step;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int* item = words + (long long)low[i] * ITEM_WORDS;
      const int pieces = item[NUM_PIECES], block = low[i] - item[PIECE];  // its first item
      const int base = cost_before(block), whole = cost_before(block + pieces) - base;
      const int local = (int)(offset[i] - (long long)heads * base), head = local / whole;
      const int each = cost_before(block + 1) - base;  // all pieces but the last cost the same
      const int piece = min((local - head * whole) / each, pieces - 1);
      unit[i] = block * heads + head * pieces + piece;
    }
    first = unit[0], end = unit[1];
  }
};

// A team's position in the plan: items of a row block are adjacent, with its pieces in order. Units
// go through a row block's pieces for one KV head, then for the next: a run is announced once.
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

// A stretch of a unit's keys, and what is left of the unit from there.
struct Stretch {
  Item item;
  int unit, head;
  int key, end;     // the warp's keys of the unit: from this stretch on
  int first, last;  // keys that may be read: from the window's begin to the piece's end
  u32 row;          // of this lane's key: a page id first, then the offset in units of 32 bytes

  // A quarter of the unit's keys, in whole steps, so that the four warps take about as long in a
  // request's last piece. A warp without keys walks one fully masked step.
  __device__ __forceinline__ void begin(const AttentionParams& p, int warp) {
    const int stop = item[KV_END];
    int begin = item[KV_BEGIN];
    first = begin;
    if (p.window) {  // nothing before the first query token's window is visible
      const int low = min(item[KV_LEN] - item[Q_LEN] - p.window + 1, stop - 1);
      if (low > begin) begin += (low - begin) / kStep * kStep, first = low;
    }
    const int quarter = max((stop - begin + 4 * kStep - 1) / (4 * kStep), 1) * kStep;
    key = begin + warp * quarter;
    end = max(min(key + quarter, stop), key + 1);
    last = max(stop - 1, 0);
  }
  // The first of the keys whose rows follow from this lane's; they are in one page.
  __device__ __forceinline__ int lane_key(const AttentionParams& p, int lane) const {
    return min(key + (lane << log_looked(p)), last) & -(1 << log_looked(p));
  }
};

struct Stream {
  Stretch source, asked;     // what is copied, and what follows it
  int at, stop;              // the step of `source` that is copied; where the stretch ends
  int whole_from, whole_to;  // steps of `source` that begin there are whole
  const char *k, *v;         // its head's rows, at this lane's chunk and row of a whole step
  Rows rows;
  int end_unit;
  Place place;               // the unit after `asked`, and its item: asked for a unit ahead
  Item after;
  PageRow pages;             // of `asked`

  __device__ __forceinline__ Stream(const AttentionParams& p, int first_unit, int end_unit,
                                    const Lane& l)
      : end_unit(end_unit),
        place(p, first_unit),
        after(load_item(p, place.item(), l.lane)),
        pages(p, after[REQUEST]) {
    asked.unit = first_unit;
    begin_unit(p, l);
    turn(p, l);
    find(p, l);
  }
  // Bytes from a whole step's first row to this lane's.
  __device__ __forceinline__ static u64 lane_row(const AttentionParams& p, const Lane& l) {
    return (u64)(l.lane / kGroup * p.token32) * 32;
  }
  // Whether anything is left to copy.
  __device__ __forceinline__ bool live() const { return uniform(source.unit < end_unit); }

  __device__ __forceinline__ void begin_unit(const AttentionParams& p, const Lane& l) {
    asked.item = after;
    asked.head = place.head;
    asked.begin(p, l.warp);
    if (uniform(++place.piece == place.pieces)) {
      place.piece = 0;
      if (uniform(++place.head == p.num_kv_heads)) {
        place.head = 0;
        place.first_item = min(place.first_item + place.pieces, p.plan[NUM_DECODE] - 1);
        place.pieces = -1;  // known when the item is here
      }
    }
    after = load_item(p, place.item(), l.lane);
    asked.row = pages.page(p, asked.lane_key(p, l.lane));
  }
  // Start copying the requested stretch, and request the next one.
  __device__ __forceinline__ void turn(const AttentionParams& p, const Lane& l) {
    constexpr int kNever = 0x7fffffff;
    source = asked;
    source.row = row32(p, asked.row, asked.lane_key(p, l.lane));
    at = source.key;
    // the end has no more turns
    stop = live() ? min(source.key + stretch_keys(p), source.end) : kNever;
    whole_from = live() && p.page_shift >= 4 ? source.first : kNever;
    whole_to = source.last + 1 - kStep;
    const u64 lane_at = source.head * p.head_bytes + l.lane % kGroup * 16 + lane_row(p, l);
    k = p.k + lane_at;
    v = p.v + lane_at;
    if (uniform(asked.key + stretch_keys(p) < asked.end)) {
      asked.key += stretch_keys(p);
      asked.row = pages.page(p, asked.lane_key(p, l.lane));
    } else if (uniform(++asked.unit < end_unit)) {
      if (uniform(place.pieces < 0)) {
        place.pieces = after[NUM_PIECES];
        pages = PageRow(p, after[REQUEST]);
      }
      begin_unit(p, l);
    }
  }
  // Go to the next step and find its rows.
  __device__ __forceinline__ void advance(const AttentionParams& p, const Lane& l) {
    at += kStep;
    if (uniform(at >= stop)) turn(p, l);
    find(p, l);
  }
  __device__ __forceinline__ void find(const AttentionParams& p, const Lane& l) {
    rows.whole = uniform(at >= whole_from && at <= whole_to);
    if (rows.whole)
      find_whole(rows, source.row, at - source.key);
    else if (live())
      find_each(rows, p, source.row, source.key, at, source.first, whole_to + kStep - 1,
                source.item, l.lane);
  }
  // Copies the step's keys to a slot; `to` includes this lane's offset.
  __device__ __forceinline__ void copy_keys(const AttentionParams& p, u32 to, const Lane& l) {
    if (rows.whole)
      copy_whole(to, k, rows, p);
    else if (live())
      copy_each(to, k - lane_row(p, l), rows, l.lane);
    commit();
  }
  // Then its values.
  __device__ __forceinline__ void copy_values(const AttentionParams& p, u32 to, const Lane& l) {
    if (rows.whole)
      copy_whole(to, v, rows, p);
    else if (live())
      copy_each(to, v - lane_row(p, l), rows, l.lane);
    commit();
  }
};

}  // namespace decode
