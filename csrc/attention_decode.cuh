// The decode path: teams of four warps stream a piece of a request's keys for one KV head.
//
// A team's warps meet only to add their sums of a unit, and seldom wait there: a warp stages its
// sums when it is done, and they are added one step into the next unit.
#pragma once
#include "attention_decode_stream.cuh"

namespace decode {

// Floats of a team's staged sums: 4 warps, `rows` packed rows, 4 extra per row to spread the banks.
__host__ __device__ constexpr int stage_floats(int rows) { return 4 * rows * (D + 4 + 2); }
// Floats of a team's folded sums, one slot per thread; 0 where a thread would need several.
__host__ __device__ constexpr int fold_floats(int rows) {
  return rows * (D / 4) <= kTeamThreads ? 6 * rows * (D / 4) : 0;
}
// 16 bytes are counted for a Note, which takes 24: before it lies an even multiple of 16, so that
// what fills up 128 (the swizzle counts in them) is 16 at least.
__host__ __device__ constexpr int team_bytes(int rows) {
  return (4 * kRing + 4 * (stage_floats(rows) + fold_floats(rows)) + 16 + 127) / 128 * 128;
}

__device__ __forceinline__ void team_barrier(int team) {
  named_barrier<kTeamThreads>(team + 1);
}

// Signals between a team's warps: a unit's sums are all staged, they have all been added (mbarriers
// at which each warp arrives once per unit), and whether partials that become one are complete.
struct Note {
  u64 staged, added;
  int merge;
};

__device__ __forceinline__ void arrive_warp(u64& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&barrier));
}

__device__ __forceinline__ void wait_for(u64& barrier, int parity) {
  while (uniform(!barrier_try(shared_address(&barrier), parity))) {
  }
}

// Partials that counter `number` of a row block counts: 0 all that become the output, or its
// bundles' if it has any, which the next ones count. `item` is one of its pieces.
__device__ __forceinline__ Partials partials_of(const Item& item, int number) {
  const int slot = item[FIRST_SLOT], pieces = item[NUM_PIECES], bundles = bundles_of(pieces);
  const int from = (number - 1) * kBundle;
  if (number) return {slot + from, min(kBundle, pieces - from), slot + pieces + number - 1};
  return bundles ? Partials{slot + pieces, bundles, -1} : Partials{slot, pieces, -1};
}
__device__ __forceinline__ int* counter_of(const AttentionParams& p, const Item& item, int head,
                                           int number) {
  return (int*)p.workspace + (item[COUNTER] + number) * p.num_kv_heads + head;
}

// Whether all partials are there: then others' may be read, and the counter is zero again. For one
// thread.
__device__ __forceinline__ bool complete(int* counter, int counted, int count) {
  if (counted != count) return false;
  fence_arrived();
  *counter = 0;
  return true;
}

// The team that completed a row block's partials merges them.
__device__ __noinline__ void merge(const AttentionParams& p, Item item, int head, int thread,
                                   float v_scale) {
  merge_rows<kTeamThreads>(p, item, head, p.decode_rows, partials_of(item, 0),
                           p.workspace + p.decode_out, p.workspace + p.decode_stats, thread,
                           v_scale);
}
// Or a bundle's: it counts what became of them, and merges the bundles' if this was the last. A
// function of its own, as its registers are its caller's.
__device__ __noinline__ void merge_bundle(const AttentionParams& p, Item item, int head, int number,
                                          int team, int thread, Note& note, float v_scale) {
  merge_rows<kTeamThreads>(p, item, head, p.decode_rows, partials_of(item, number),
                           p.workspace + p.decode_out, p.workspace + p.decode_stats, thread,
                           v_scale);
  int* counter = counter_of(p, item, head, 0);
  const int bundles = partials_of(item, 0).count;
  team_barrier(team);
  if (thread == 0) note.merge = complete(counter, arrive_early(counter, 1) + 1, bundles);
  team_barrier(team);
  if (uniform(note.merge)) merge(p, item, head, thread, v_scale);
}

// A warp's sums of a unit go to shared memory, rows [decode_rows] of D + 4 floats, then (max, sum).
// A row's floats lie as its lanes have them, four of a lane in a chunk; `in_order` has their dims.
__device__ __forceinline__ void stage_sums(float* stage, const AttentionParams& p,
                                           float (&o)[kBlocks][ROWS8][4],
                                           const float (&top)[ROWS8][kColumns],
                                           const float (&norm)[ROWS8][kColumns], const Lane& l) {
  const int rows = p.decode_rows;
  float* stats = stage + 4 * rows * (D + 4);
#pragma unroll
  for (int n = 0; n < ROWS8; ++n) {
    // lanes of a column add its norms: where it has two, those of even g the first one's
    const int mine = l.g & (kColumns - 1), row = row_of(n, mine, l.t);
    float total = norm[n][0], most = top[n][0];
    if constexpr (kColumns > 1) {
      const float other = mine ? total : norm[n][1];
      if (mine) total = norm[n][1], most = top[n][1];
      total += __shfl_xor_sync(0xffffffffu, other, 4);
    } else {
      total += __shfl_xor_sync(0xffffffffu, total, 4);
    }
    total += __shfl_xor_sync(0xffffffffu, total, 8);
    total += __shfl_xor_sync(0xffffffffu, total, 16);
    if (l.g < kColumns && row < rows)
      *(float2*)(stats + (l.warp * rows + row) * 2) =
          make_float2(most != kUnseen ? most : kMinusInf, total);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (row_of(n, c, l.t) >= rows) continue;
      if (top[n][c] == kUnseen)  // the sums may hold masked values, even NaN
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) o[i][n][c] = o[i][n][c + 2] = 0.0f;
      float* to = stage + (l.warp * rows + row_of(n, c, l.t)) * (D + 4) + 4 * l.g;
#pragma unroll
      for (int i = 0; i < kBlocks; i += 2)
        *(float4*)(to + 16 * i) =
            make_float4(o[i][n][c], o[i][n][c + 2], o[i + 1][n][c], o[i + 1][n][c + 2]);
    }
  }
}

// Swaps, between lanes that differ in bit `with` and within pairs of values, so that bits of the
// lane's number and of the value's trade places.
__device__ __forceinline__ void trade(float& a, float& b, int lane, int with) {
  const bool high = lane & with;
  const float got = __shfl_xor_sync(0xffffffffu, high ? a : b, with);
  if (high)
    a = got;
  else
    b = got;
}

// Turns a chunk of staged floats, of lane g of 8 in a group of 32 dims, into 4 dims in a row;
// returns the first of them.
__device__ __forceinline__ int in_order(float4& x, int chunk, int lane) {
  const int group = chunk / 8 * 32, g = chunk & 7;
  if constexpr (KV8) {  // dims 2g, 2g + 1, 16 + 2g, 16 + 2g + 1
    trade(x.x, x.z, lane, 1), trade(x.y, x.w, lane, 1);
    return group + (g & 1) * 16 + (g >> 1) * 4;
  }
  trade(x.x, x.y, lane, 1), trade(x.z, x.w, lane, 1);  // dims g, 8 + g, 16 + g, 24 + g
  trade(x.x, x.z, lane, 2), trade(x.y, x.w, lane, 2);
  return group + (g & 3) * 8 + (g >> 2) * 4;
}

// Add a piece's sums to this thread's slot `i` of the pieces before, with merge_rows' arithmetic.
__device__ __forceinline__ void fold(float* slots, int rows, int i, bool first, float4& sum,
                                     float& top, float& norm) {
  float4& kept = ((float4*)slots)[i];
  float2& stats = ((float2*)(slots + rows * D))[i];
  const float4 before = first ? make_float4(0, 0, 0, 0) : kept;
  const float2 its = first ? make_float2(kMinusInf, 0) : stats;
  if (top == kMinusInf) {
    sum = before, top = its.x, norm = its.y;
  } else {
    const float high = fmaxf(its.x, top);
    const float shrink = exp2_fast(its.x - high), weight = exp2_fast(top - high);
    top = high;
    norm = fmaf(its.y, shrink, weight * norm);
    sum.x = fmaf(before.x, shrink, weight * sum.x), sum.y = fmaf(before.y, shrink, weight * sum.y);
    sum.z = fmaf(before.z, shrink, weight * sum.z), sum.w = fmaf(before.w, shrink, weight * sum.w);
  }
  kept = sum, stats = make_float2(top, norm);
}

// What becomes of a unit's staged sums.
enum { kStaged = 1, kOwned = 2, kFirst = 4, kWhole = 8, kBundled = 16 };

// Adds the team's four staged sums in the warps' order and writes output or a partial. Pieces of a
// row block or bundle that all belong to this team (kOwned) leave no partials: a thread folds its
// sums into those of the earlier pieces, as `merge_rows` would, and writes output, or the bundle's
// partial, after the last piece.
__device__ __forceinline__ void combine(float* stage, const AttentionParams& p, Item item, int head,
                                        int staged, const Lane& l, float v_scale) {
  const int rows = p.decode_rows, chunks = rows * (D / 4);
  const float2* stats = (const float2*)(stage + 4 * rows * (D + 4));
  for (int first = 0; first < chunks; first += kTeamThreads) {
    const bool used = first + l.thread < chunks;
    const int i = used ? first + l.thread : chunks - 1, r = i / (D / 4);
    float2 its[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) its[w] = stats[w * rows + r];
    float high = fmaxf(fmaxf(its[0].x, its[1].x), fmaxf(its[2].x, its[3].x));
    const float base = high == kMinusInf ? 0.0f : high;
    float4 sum = make_float4(0, 0, 0, 0);
    float total = 0.0f;
    const float* from = stage + 4 * (i + r);  // a row is D + 4 floats
#pragma unroll
    for (int w = 0; w < 4; ++w, from += rows * (D + 4)) {
      const float weight = exp2_fast(its[w].x - base);
      const float4 x = *(const float4*)from;
      total = fmaf(weight, its[w].y, total);
      sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
    }
    if (uniform(staged & kOwned) && used)
      fold(stage + stage_floats(rows), rows, i, staged & kFirst, sum, high, total);
    if (uniform((staged & (kOwned | kWhole)) == kOwned)) continue;  // more pieces follow
    const int dim = in_order(sum, i % (D / 4), l.lane);
    const int done = staged & (kWhole | kBundled), piece = item[PIECE], pieces = item[NUM_PIECES];
    const Row row(p, item[Q_START], item[Q_LEN], item[FIRST_ROW] + r, head);
    const int place = done == (kWhole | kBundled) ? pieces + piece / kBundle : piece;
    const long long part = (long long)(item[FIRST_SLOT] + place) * p.num_kv_heads + head;
    if (uniform(done == kWhole)) {
      if (stores(used && row.valid)) store_row(p, row, dim, sum, high, total, v_scale);
    } else if (used) {
      *(float4*)((float*)(p.workspace + p.decode_out) + (part * rows + r) * D + dim) = sum;
      if (dim == 0)
        ((float2*)(p.workspace + p.decode_stats))[part * rows + r] = make_float2(high, total);
    }
  }
}

// Runs all units of one of the `num_teams` teams that share the plan's decode items.
__device__ __forceinline__ void run(const AttentionParams& p, char* shared, int num_teams,
                                    int team_index) {
  const Lane l;
  if (p.plan[NUM_DECODE] == 0) return;
  const Share share(p, team_index, num_teams, l.lane);
  const int first_unit = share.first, end_unit = share.end;
  if (uniform(first_unit == end_unit)) return;

  char* mine = shared + l.team * team_bytes(p.decode_rows);
  const u32 ring = shared_address(mine) + l.warp * kRing;
  const u32 keys = kept(ring + keys_at(l.lane), l.lane);
  const u32 values = kept(ring + kSlot + values_at(l.lane), l.lane);
  const u32 lane_at = kept(ring + chunk_at(l.lane / kGroup, l.lane % kGroup), l.lane);
  float* stage = (float*)(mine + 4 * kRing);
  Note& note = *(Note*)(stage + stage_floats(p.decode_rows) + fold_floats(p.decode_rows));
  if (l.thread == 0) {
    barrier_init(shared_address(&note.staged), 4);
    barrier_init(shared_address(&note.added), 4);
  }
  team_barrier(l.team);

  const float v_scale = KV8 ? cache_scale(p.v_scale, p.v_scale_ptr) : 1.0f;
  const float score_scale = KV8 ? cache_scale(p.scale_log2, p.k_scale_ptr) : p.scale_log2;
  const float scale2 = SOFTCAP ? 1.0f : score_scale;

  Stream stream(p, first_unit, end_unit, l);
  Item item = stream.source.item;  // of the unit being multiplied
  int unit = first_unit, head = stream.source.head, key = stream.at, end = stream.source.end;
  u32 q[ROWS8][D / 8];
#pragma unroll
  for (int n = 0; n < ROWS8; ++n) load_query(q[n], p, item, head, n, l);
  stream.copy_keys(p, lane_at, l);
  stream.copy_values(p, lane_at + kSlot, l);

  // The unit whose sums are staged but not yet added, and how many units have been staged.
  Item staged_item = item;
  int staged_head = 0, parity = 0;
  int staged = 0;
  int owned_end = first_unit;  // earlier units' row blocks, or bundles, are this team's alone
  const auto add_staged = [&] {
    wait_for(note.staged, parity ^ 1);
    combine(stage, p, staged_item, staged_head, staged, l, v_scale);
    arrive_warp(note.added, l.lane);
    staged = 0;
  };

  // A run: consecutive units of one row block and head that count at one of its counters (`number`).
  // Its partials are counted at its end; one unit later, when the old count has arrived, the team
  // that completed what the counter counts merges it.
  Item run_item = item, counted_item = item;
  int run_number = -1, run_length = 0, run_head = 0;
  int number = -1, counted_head = 0, counted_length = 0, counted = 0;  // by all teams before
  const auto count_run = [&] {
    if (uniform(run_number < 0)) return;
    counted_item = run_item, counted_head = run_head;
    number = run_number, counted_length = run_length;
    int* counter = counter_of(p, counted_item, counted_head, number);
    team_barrier(l.team);
    if (l.thread == 0) counted = arrive_early(counter, run_length);
  };
  const auto settle = [&] {
    if (uniform(number < 0)) return;
    const int count = partials_of(counted_item, number).count;
    int* counter = counter_of(p, counted_item, counted_head, number);
    if (l.thread == 0) note.merge = complete(counter, counted + counted_length, count);
    team_barrier(l.team);
    if (uniform(note.merge && number == 0))
      merge(p, counted_item, counted_head, l.thread, v_scale);
    else if (uniform(note.merge))
      merge_bundle(p, counted_item, counted_head, number, l.team, l.thread, note, v_scale);
    number = -1;
  };

  arrive_warp(note.added, l.lane);  // before the first unit there is nothing to add
  while (uniform(unit < end_unit)) {  // one unit per iteration
    int kind = kStaged;
    {
      const int pieces = item[NUM_PIECES];
      int piece = item[PIECE], together = pieces;
      if (bundles_of(pieces)) {
        kind |= kBundled;
        together = min(kBundle, pieces - piece / kBundle * kBundle), piece %= kBundle;
      }
      if (piece == 0 && pieces > 1 && unit + together <= end_unit && fold_floats(p.decode_rows))
        owned_end = unit + together;
      if (unit < owned_end) kind |= kOwned;
      if (piece == 0) kind |= kFirst;
      if (pieces == 1 || (unit < owned_end && piece == together - 1)) kind |= kWhole;
    }
    float o[kBlocks][ROWS8][4] = {};
    float top[ROWS8][kColumns], norm[ROWS8][kColumns];
#pragma unroll
    for (int n = 0; n < ROWS8; ++n)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) top[n][c] = kUnseen, norm[n][c] = 0.0f;
    int whole_from = 0, whole_to = end;  // keys that all rows see
    if (p.causal) whole_to = min(whole_to, item[KV_LEN] - item[Q_LEN] + 1);
    if (p.window) whole_from = item[KV_LEN] - p.window;
    int fresh = 1;
    bool last;
    do {  // one step per iteration
      last = uniform(key + kStep >= end);
      float s[ROWS8][kTiles][4] = {};
      stream.advance(p, l);  // before the wait, which hides it: a free slot is filled at once
      wait_but_one();
      scores(s, keys, q);
      __syncwarp();
      stream.copy_keys(p, lane_at, l);
      // later pieces have the same query as the first
      if (last && stream.live() && uniform(stream.source.item[PIECE] == 0))
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
          load_query(q[n], p, stream.source.item, stream.source.head, n, l);
      if constexpr (SOFTCAP)
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
#pragma unroll
          for (int b = 0; b < kTiles; ++b)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[n][b][c] = logit2(s[n][b][c], score_scale, p.softcap);
      if (uniform(key < whole_from || key + kStep > whole_to)) mask(s, p, item, key, end, l);
      u32 probability[ROWS8][kTiles][2];
      soften(s, o, top, norm, probability, fresh, scale2);
      wait_but_one();
      weigh(o, values, probability);
      __syncwarp();
      stream.copy_values(p, lane_at + kSlot, l);
      if (uniform(staged)) add_staged();
      fresh = 0;
      key += kStep;
    } while (!last);

    wait_for(note.added, parity);  // the unit before is added by this warp, here by all
    parity ^= 1;
    stage_sums(stage, p, o, top, norm, l);
    arrive_warp(note.staged, l.lane);
    staged = kind, staged_item = item, staged_head = head;

    // a row block that is this team's alone is not counted, a bundle as one partial
    const bool counts = (kind & kBundled) || !(kind & (kOwned | kWhole));
    if (uniform(counts || number >= 0 || run_number >= 0)) {
      settle();
      const int piece = item[PIECE];
      int next = (kind & (kBundled | kOwned)) == kBundled ? 1 + piece / kBundle : 0;
      if (!counts) next = -1;
      if (uniform(next != run_number || piece == 0)) {
        count_run();
        run_number = next, run_length = 0, run_item = item, run_head = head;
      }
      run_length += !(kind & kOwned) || (kind & kWhole);
    }
    item = stream.source.item, unit = stream.source.unit, head = stream.source.head;
    key = stream.at, end = stream.source.end;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  add_staged();
  settle();
  count_run();
  settle();
  team_barrier(l.team);  // no warp is waiting at the mbarriers any more
  if (l.thread == 0) {
    barrier_drop(shared_address(&note.staged));
    barrier_drop(shared_address(&note.added));
  }
}

}  // namespace decode
