// One CTA chooses a row's token, once all of its groups and sums have been written.
#pragma once
#include "sample_select.cuh"

// Where the row's own memory lies: keys of all groups, over them the tokens that are looked at,
// behind both places of the groups that are read again. As smkern/kernels/sample.py counts.
struct Room {
  u32* keys;
  u64* orders;
  unsigned short* listed;
  int groups;
  __device__ __forceinline__ Room(char* dynamic, int pieces) {
    groups = 32 * pieces;
    keys = (u32*)dynamic;
    orders = (u64*)dynamic;
    listed = (unsigned short*)(dynamic + max(8 * kCandidates, 4 * groups));
  }
};

struct Bounds {
  u32 least, most;
};

// All keys to shared memory, unless they are there; the row's largest, and the least of a group with
// any token.
__device__ __forceinline__ Bounds load_keys(const SampleParams& p, int row, bool are_there,
                                            const Room& room, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32* from = p.groups + (long long)row * room.groups;
  u32 most = 0, least = kAll;
#pragma unroll 4
  for (int i = threadIdx.x; i < room.groups; i += THREADS) {
    const u32 key = are_there ? room.keys[i] : __ldcg(from + i);
    if (!are_there) room.keys[i] = key;
    most = max(most, key);
    if (key > kNothing) least = min(least, key);
  }
  most = __reduce_max_sync(kAll, most), least = __reduce_min_sync(kAll, least);
  if (lane == 0) s.warp_sums[warp] = (u64)most << 32 | least;
  __syncthreads();
  const u64 both = s.warp_sums[lane < kWarps ? lane : 0];
  most = __reduce_max_sync(kAll, (u32)(both >> 32));
  least = __reduce_min_sync(kAll, (u32)both);
  __syncthreads();
  return {least, most};
}

// Lists the groups that reach `least`; returns how many.
__device__ __forceinline__ int list_groups(const Room& room, u32 least, Shared& s) {
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < room.groups; i += THREADS)
    if (room.keys[i] >= least) room.listed[atomicAdd(&s.listed, 1)] = (unsigned short)i;
  __syncthreads();
  return s.listed;
}

// Collects every token of the listed groups that reaches `least`.
template <class Visit>
__device__ __forceinline__ void visit_listed(const SampleParams& p, const char* logits,
                                             const Room& room, int listed, u32 least,
                                             const Visit& visit) {
  constexpr int kAhead = 3;  // independent loads in flight
#pragma unroll 1
  for (int i0 = threadIdx.x; i0 < listed * kGroupVectors; i0 += kAhead * THREADS) {
    u32 raw[kAhead][4];
    int v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = i0 + k * THREADS;
      v[k] = kNowhere;
      if (i < listed * kGroupVectors) {
        const int group = room.listed[i / kGroupVectors];
        v[k] = group / 32 * kPieceVectors + group % 32 + 32 * (i % kGroupVectors);
      }
      load_vector(logits, v[k], p.vocab, raw[k]);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      visit_vector(raw[k], v[k], [&](u64 order) {
        if (key_in(order) >= least) visit(order);
      });
  }
}

// The lowest id among the row's largest logits.
__device__ __forceinline__ int best_token(const SampleParams& p, const char* logits,
                                          const Room& room, u32 most, Shared& s) {
  if (threadIdx.x == 0) s.token = p.vocab;
  const int listed = list_groups(room, most, s);
  visit_listed(p, logits, room, listed, most, [&](u64 order) { atomicMin(&s.token, id_of(order)); });
  __syncthreads();
  return s.token;
}

// Weights of all pieces, relative to the row's best token, to s.pieces; their sum.
__device__ __forceinline__ u64 load_sums(const SampleParams& p, int row, const Room& room,
                                         float top, float scale, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float* from = p.sums + (long long)row * p.pieces;
  u64 sum = 0;
#pragma unroll 1
  for (int piece = warp; piece < p.pieces; piece += kWarps) {
    const u32 most = __reduce_max_sync(kAll, room.keys[piece * 32 + lane]);
    const float share = most == kNothing ? 0.0f : ratio(value_of(most), top, scale);
    const u64 all = __float2ull_rn(share * __ldcg(from + piece) * kUnit);
    if (lane == 0) s.pieces[piece] = all, sum += all;
  }
  if (lane == 0) s.warp_sums[warp] = sum;
  __syncthreads();
  sum = sum_warp(lane < kWarps ? s.warp_sums[lane] : 0);
  __syncthreads();
  return sum;
}

// The place in which a target falls, of `count` places that weigh s.pieces: to s.bin, what remains of
// the target to s.before. `target_of` tells it, of what all weigh. By the first warp; all wait.
template <class Target>
__device__ __forceinline__ void find_place(int count, const Target& target_of, Shared& s) {
  const int lane = threadIdx.x;
  if (lane < 32) {
    const int mine = (count + 31) / 32, first = lane * mine;
    u64 sum = 0;
#pragma unroll 1
    for (int i = first; i < min(first + mine, count); ++i) sum += s.pieces[i];
    const u64 upto = scan_warp(sum, lane);
    const u64 target = target_of(__shfl_sync(kAll, upto, 31));
    u64 before = upto - sum;
    if (before <= target && target < upto) {
      int place = first;
#pragma unroll 1
      while (target >= before + s.pieces[place]) before += s.pieces[place++];
      s.bin = place, s.before = target - before;
    }
  }
  __syncthreads();
}

// The token of a piece in which a target falls, tokens in the order of their ids: by their vectors.
template <class Target>
__device__ __forceinline__ int draw_of_piece(const SampleParams& p, const char* logits, int piece,
                                             const Measure& measure, const Target& target_of,
                                             Shared& s) {
  static_assert(kMostPieces >= kPieceVectors, "vectors take the pieces' room");
#pragma unroll 1
  for (int i = threadIdx.x; i < kPieceVectors; i += THREADS) {
    const int v = piece * kPieceVectors + i;
    u64 sum = 0;
    u32 raw[4];
    load_vector(logits, v, p.vocab, raw);
    visit_vector(raw, v, [&](u64 order) { sum += measure(order); });
    s.pieces[i] = sum;
  }
  __syncthreads();
  find_place(kPieceVectors, target_of, s);
  if (threadIdx.x == 0) {
    const int v = piece * kPieceVectors + s.bin;
    const u64 target = s.before;
    u64 before = 0;
    u32 raw[4];
    load_vector(logits, v, p.vocab, raw);
    visit_vector(raw, v, [&](u64 order) {
      const u64 here = measure(order);
      if (before <= target && target < before + here) s.token = id_of(order);
      before += here;
    });
  }
  __syncthreads();
  return s.token;
}

// Without filters: a piece by its weight (in s.pieces), then a token of it by its own.
__device__ __forceinline__ int draw_of_all(const SampleParams& p, const char* logits,
                                           const Room& room, float scale, const Random& random,
                                           Shared& s) {
  find_place(p.pieces, [&](u64 all) { return __umul64hi(random.first, all); }, s);
  const int piece = s.bin;
  __syncthreads();
  const u32 most = __reduce_max_sync(kAll, room.keys[piece * 32 + (threadIdx.x & 31)]);
  const Measure measure{0, value_of(most), scale, -INFINITY_F, false};
  return draw_of_piece(p, logits, piece, measure,
                       [&](u64 all) { return __umul64hi(random.second, all); }, s);
}

// Of more tokens than fit: what is kept of each piece, then the draw as above, by one number.
__device__ __forceinline__ int draw_of_row(const SampleParams& p, const char* logits,
                                           const Measure& measure, u64 random, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int piece = warp; piece < p.pieces; piece += kWarps) {
    const int first = piece * kPieceVectors + lane;
    u64 sum = 0;
    u32 raw[4], next[4];
    load_vector(logits, first, p.vocab, next);
#pragma unroll 1
    for (int v = first; v < first + kPieceVectors; v += 32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = next[i];
      load_vector(logits, v + 32, p.vocab, next);
      visit_vector(raw, v, [&](u64 order) { sum += measure(order); });
    }
    sum = sum_warp(sum);
    if (lane == 0) s.pieces[piece] = sum;
  }
  __syncthreads();
  find_place(p.pieces, [&](u64 all) { return __umul64hi(random, all); }, s);
  const int piece = s.bin;
  const u64 rest = s.before;
  __syncthreads();
  return draw_of_piece(p, logits, piece, measure, [&](u64) { return rest; }, s);
}

// Where the nucleus ends, of what weighs `sum`: its tokens have less than that above them.
__device__ __forceinline__ u64 share_of(float top_p, u64 sum) {
  return max(__double2ull_ru((double)top_p * (double)sum), 1ull);
}

// The filters in their order: to `measure` what they keep. False where the tokens of `source` do not
// reach as far down as the nucleus of a row, all of whose tokens weigh `all`.
template <class Source>
__device__ __forceinline__ bool filter(const Source& source, const Choice& choice, bool complete,
                                       u32 most, u64 all, u64* buffer, Shared& s,
                                       Measure& measure) {
  u64 low = Source::kInMemory ? 0 : (u64)kNothing << kIdBits;
  const u64 rows = Source::kInMemory ? (1 << kRowBits) - 1 : 0;
  const u64 high = rows << kOrderBits | order_of(most, 0);
#pragma unroll 1
  for (int stage = 0; stage < 2; ++stage) {
    if (stage ? !choice.nucleus() : !choice.top_k) continue;
    measure.count = stage == 0;
    u64 target = choice.top_k - 1;
    if (stage) {
      const u64 sum = choice.top_k ? total(source, measure, s) : all;
      target = share_of(choice.top_p, sum) - 1;
    }
    u64 found;
    if (find(source, measure, Search(target, low, high), buffer, s, found))
      measure.cut = low = found;
    else if (stage && !complete)
      return false;
  }
  measure.count = false;
  measure.min_log2 = choice.min_log2;
  return true;
}

// Filters and draw where there is a few tokens: each by kParts threads, which look at all others. The
// same integers as above, in two steps instead of a dozen. False as above.
__device__ __forceinline__ bool draw_of_few(const Candidates& few, const Choice& choice,
                                            bool complete, float top, u64 all, u64 random,
                                            u64* weights, Shared& s) {
  const int mine = threadIdx.x / kParts, part = threadIdx.x % kParts, count = few.count;
  const bool here = mine < count;
  const u64 order = here ? few.orders[mine] : 0;
  const float x = value_of(key_in(order));
  const u64 own = here ? weight(x, top, choice.scale) : 0;
  if (here && part == 0) weights[mine] = own;
  __syncthreads();
  u64 above = 0;
  u32 rank = 0;
#pragma unroll 1
  for (int i = part; i < count; i += kParts)
    if (few.orders[i] > order) above += weights[i], ++rank;
#pragma unroll
  for (int by = 1; by < kParts; by *= 2) {
    above += __shfl_xor_sync(kAll, above, by);
    rank += __shfl_xor_sync(kAll, rank, by);
  }
  const u32 left = choice.top_k ? min(choice.top_k, count) : count;
  if (here && part == 0 && rank == left - 1) s.kept[0] = above + own;
  __syncthreads();
  const u64 sum = s.kept[0];
  bool keep = here && rank < left;
  if (choice.nucleus()) {
    const u64 share = share_of(choice.top_p, choice.top_k ? sum : all);
    if (!complete && sum < share) return false;
    keep = keep && above < share;
  }
  keep = keep && (x - top) * choice.scale >= choice.min_log2;
  // what is kept is the upper part of the order: the lowest of it knows what all of it weighs
  const u32 kept = (u32)__syncthreads_count(keep) / kParts;
  if (here && part == 0 && rank == kept - 1) s.kept[1] = above + own, s.at = order;
  __syncthreads();
  const u64 target = __umul64hi(random, s.kept[1]), cut = s.at;
  u64 before = 0;
#pragma unroll 1
  for (int i = part; i < count; i += kParts) {
    const u64 other = few.orders[i];
    if (other >= cut && id_of(other) < id_of(order)) before += weights[i];
  }
#pragma unroll
  for (int by = 1; by < kParts; by *= 2) before += __shfl_xor_sync(kAll, before, by);
  if (keep && part == 0 && before <= target && target < before + own) s.token = id_of(order);
  __syncthreads();
  return true;
}

// The row's token with any filter.
__device__ __forceinline__ int draw_of_kept(const SampleParams& p, int row, const char* logits,
                                            const Room& room, const Choice& choice, Bounds keys,
                                            u64 all, u64 random, Shared& s) {
  const u32 most = keys.most;
  const bool nucleus = choice.nucleus();
  const float top = value_of(most);
  u32 floor = kNothing + 1;  // reached by all that min-p keeps, and perhaps by a little more
  if (choice.min_log2 > -INFINITY_F && !(choice.top_k && nucleus)) {
    const float apart = choice.min_log2 / choice.scale * 1.00001f;
    floor = max(floor, key_of(plain(top + apart - fabsf(top) * 1e-6f - 1e-30f)));
  }
  Measure measure{0, top, choice.scale, -INFINITY_F, false};
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    if (turn) load_keys(p, row, false, room, s);  // tokens lie over them
    const int wanted = choice.top_k ? choice.top_k : nucleus ? turn ? 1024 : 64 : 0;
    u32 least = floor;
    if (wanted && wanted < room.groups && p.vocab > kCandidates) {
      const Measure groups{(u64)(kNothing + 1) << kIdBits, 0.0f, 0.0f, 0.0f, true};
      Search search(wanted - 1, (u64)keys.least << kIdBits, order_of(most, 0));
      // a bound that 32 more groups reach serves as well
      const Bins bins{s.bins, kBinBits};
      if (search.narrow(Groups{room.keys, room.groups}, groups, kIdBits, 32, bins, s))
        least = max(least, (u32)(search.prefix << search.shift >> kIdBits));
    }
    const bool complete = choice.top_k || least <= floor;
    const int listed = list_groups(room, least, s);
    if (listed > kCandidates) break;
    if (threadIdx.x == 0) s.candidates = 0;
    __syncthreads();
    visit_listed(p, logits, room, listed, least, [&](u64 order) {
      const int slot = atomicAdd(&s.candidates, 1);
      if (slot < kCandidates) room.orders[slot] = order;
    });
    __syncthreads();
    const int count = s.candidates;
    __syncthreads();
    if (count > kCandidates) break;
    const Candidates found{room.orders, count};
    if (count <= kFew) {
      u64* weights = room.orders + kCandidates / 2;
      if (draw_of_few(found, choice, complete, top, all, random, weights, s)) return s.token;
    } else if (filter(found, choice, complete, most, all, room.orders, s, measure)) {
      const u64 target = __umul64hi(random, total(found, measure, s));
      u64 order = 0;
      find(found, measure, Search(target, 0, kIdMask, kIdMask), room.orders, s, order);
      return id_of(order);
    }
    __syncthreads();
  }
  // groups reach as far as the upper half of a row's spread, or so: three times that is all of it
  const float rate = (1 << kRowBits) / (3.0f * (top - value_of(keys.least)));
  filter(Row{logits, p.vocab, top, rate}, choice, true, most, all, room.orders, s, measure);
  measure.cut &= (1ull << kOrderBits) - 1;
  __syncthreads();
  return draw_of_row(p, logits, measure, random, s);
}

__device__ __forceinline__ int choose(const SampleParams& p, int row, const char* logits,
                                      const Choice& choice, bool keys_are_there,
                                      const Room& room, Shared& s) {
  const u64 seed = p.seeds ? p.seeds[row] : p.seed;
  const u32 step = p.steps ? p.steps[row] : p.step;
  const Bounds keys = load_keys(p, row, keys_are_there, room, s);
  const u32 most = keys.most;
  if (most == kNothing) return 0;
  if (choice.greedy) return best_token(p, logits, room, most, s);
  const Random random(seed, step);
  u64 all = 0;
  if (choice.sums()) all = load_sums(p, row, room, value_of(most), choice.scale, s);
  if (!choice.filtered()) return draw_of_all(p, logits, room, choice.scale, random, s);
  return draw_of_kept(p, row, logits, room, choice, keys, all, random.first, s);
}

// Updates the request's state with the drawn token; run by one thread.
__device__ __forceinline__ void finish(const SampleParams& p, int row, int token, bool over) {
  p.out[row] = token;
  if (over) return;
  bool ends = false;
  for (int i = 0; i < p.num_stop; ++i) ends |= p.stop_tokens[row * p.stop_stride + i] == token;
  if (p.lengths) {
    const int length = p.lengths[row] + 1;
    p.lengths[row] = length;
    ends |= p.max_lengths && length >= p.max_lengths[row];
  }
  if (p.finished && ends) p.finished[row] = 1;
}
