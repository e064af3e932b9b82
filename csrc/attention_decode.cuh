// The decode path: teams of four warps stream a piece of a request's keys for one KV head.
//
// A team's warps meet only to add their sums of a unit, and seldom wait there: a warp leaves its
// sums in shared memory, where it may have to add them to an earlier warp's, which began as much
// earlier, and what all have left is written one step into the next unit.
#pragma once
#include "attention_decode_stream.cuh"
#include "attention_decode_sums.cuh"

namespace decode {

// Signals between a team's warps: the sums of a unit are left, by each warp to the next and by all,
// they have been written by all, and whether partials that become one are complete.
struct Note {
  u64 next[3], left, written;
  int merge;
};
__host__ __device__ constexpr int team_bytes(int rows) {
  return (4 * kRing + 4 * (sum_floats(rows) + fold_floats(rows)) + 48 + 127) / 128 * 128;
}

__device__ __forceinline__ void team_barrier(int team) {
  named_barrier<kTeamThreads>(team + 1);
}

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

// Runs all units of one of the `num_teams` teams that share the plan's decode items.
__device__ __forceinline__ void run(const AttentionParams& p, char* shared, int num_teams,
                                    int team_index) {
  const Lane l;
  if (p.plan[NUM_DECODE] == 0) return;
  const Share share(p, team_index, num_teams, l.lane);
  const int first_unit = share.first, end_unit = share.end;
  if (uniform(first_unit == end_unit)) return;

  const int rows = rows_of(p);
  char* mine = shared + l.team * team_bytes(rows);
  const u32 ring = shared_address(mine) + l.warp * kRing;
  const u32 keys = kept(ring + keys_at(l.lane), l.lane);
  const u32 values = kept(ring + kSlot + values_at(l.lane), l.lane);
  const u32 lane_at = kept(ring + chunk_at(l.lane / kGroup, l.lane % kGroup), l.lane);
  float* sums = (float*)(mine + 4 * kRing);
  Note& note = *(Note*)(sums + sum_floats(rows) + fold_floats(rows));
  if (l.thread == 0) {
#pragma unroll
    for (int w = 0; w < 3; ++w) barrier_init(shared_address(&note.next[w]), 1);
    barrier_init(shared_address(&note.left), kCopies);
    barrier_init(shared_address(&note.written), 4);
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

  // The unit whose sums are left but not yet written, and the parity of the barriers' phase.
  Item left_item = item;
  int left_head = 0, parity = 0;
  int left = 0;
  int owned_end = first_unit;  // earlier units' row blocks, or bundles, are this team's alone
  const auto write_left = [&] {
    wait_for(note.left, parity ^ 1);
    finish(sums, p, left_item, left_head, left, l, v_scale);
    arrive_warp(note.written, l.lane);
    left = 0;
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

  arrive_warp(note.written, l.lane);  // before the first unit there is nothing to write
  while (uniform(unit < end_unit)) {  // one unit per iteration
    int kind = kLeft;
    {
      const int pieces = item[NUM_PIECES];
      int piece = item[PIECE], together = pieces;
      if (bundles_of(pieces)) {
        kind |= kBundled;
        together = min(kBundle, pieces - piece / kBundle * kBundle), piece %= kBundle;
      }
      if (piece == 0 && pieces > 1 && unit + together <= end_unit) owned_end = unit + together;
      if (unit < owned_end) kind |= kOwned;
      if (piece == 0) kind |= kFirst;
      if (pieces == 1 || (unit < owned_end && piece == together - 1)) kind |= kWhole;
    }
    float o[kSums][ROWS8][4] = {};
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
      // Later pieces have the first's query. This is here because it is a branch: without one the
      // compiler puts half of the step's transpositions behind the other half's products, where
      // nothing hides them.
      if (last && stream.live() && uniform(stream.source.item[PIECE] == 0))
#pragma unroll
        for (int n = 0; n < ROWS8; ++n)
          load_query(q[n], p, stream.source.item, stream.source.head, n, l);
      wait_but_one();
      weigh(o, values, probability, l);
      __syncwarp();
      stream.copy_values(p, lane_at + kSlot, l);
      if (uniform(left)) write_left();
      fresh = 0;
      key += kStep;
    } while (!last);

    const bool begins = kCopies == 4 || l.warp == 0, ends = kCopies == 4 || l.warp == 3;
    add_sums(sums, p, o, top, norm, l,
             [&] { wait_for(begins ? note.written : note.next[l.warp - 1], parity); });
    parity ^= 1;
    arrive_warp(ends ? note.left : note.next[l.warp], l.lane);
    left = kind, left_item = item, left_head = head;

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
  write_left();
  settle();
  count_run();
  settle();
  team_barrier(l.team);  // no warp is waiting at the mbarriers any more
  if (l.thread == 0) {
#pragma unroll
    for (int w = 0; w < 3; ++w) barrier_drop(shared_address(&note.next[w]));
    barrier_drop(shared_address(&note.left));
    barrier_drop(shared_address(&note.written));
  }
}

}  // namespace decode
