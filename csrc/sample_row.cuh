// A row's token, by one CTA: once all of its groups and sums are there.
#pragma once
#include "sample_select.cuh"

// Where the row's own memory lies: keys of all groups, places of those that are read again, tokens.
struct Room {
  u32* keys;
  u64* orders;
  unsigned short* listed;
  int groups;
  __device__ __forceinline__ Room(char* dynamic, int pieces) {
    groups = 32 * pieces;
    orders = (u64*)dynamic;
    keys = (u32*)(orders + kCandidates);
    listed = (unsigned short*)(keys + groups);
  }
};

// All keys to shared memory; the row's largest.
__device__ __forceinline__ u32 load_keys(const SampleParams& p, int row, const Room& room,
                                         Shared& s) {
  const u32* from = p.groups + (long long)row * room.groups;
  u32 most = 0;
  for (int i = threadIdx.x; i < room.groups; i += THREADS) {
    room.keys[i] = __ldcg(from + i);
    most = max(most, room.keys[i]);
  }
  most = __reduce_max_sync(kAll, most);
  if ((threadIdx.x & 31) == 0) s.warp_sums[threadIdx.x >> 5] = most;
  __syncthreads();
  most = (threadIdx.x & 31) < kWarps ? (u32)s.warp_sums[threadIdx.x & 31] : 0;
  most = __reduce_max_sync(kAll, most);
  __syncthreads();
  return most;
}

// Lists the groups that reach `least`; returns how many.
__device__ __forceinline__ int list_groups(const Room& room, u32 least, Shared& s) {
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < room.groups; i += THREADS)
    if (room.keys[i] >= least) room.listed[atomicAdd(&s.listed, 1)] = (unsigned short)i;
  __syncthreads();
  return s.listed;
}

// Every token of the listed groups that reaches `least`.
template <class Visit>
__device__ __forceinline__ void visit_listed(const SampleParams& p, const char* logits,
                                             const Room& room, int listed, u32 least,
                                             const Visit& visit) {
#pragma unroll 1
  for (int i = threadIdx.x; i < listed * kGroupVectors; i += THREADS) {
    const int group = room.listed[i / kGroupVectors];
    const int v = group / 32 * kPieceVectors + group % 32 + 32 * (i % kGroupVectors);
    u32 raw[4];
    load_vector(logits, v, p.vocab, raw);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const u32 key = key_of(plain(element(raw, e)));
      if (key >= least) visit(key, v * kVector + e);
    }
  }
}

// The lowest id among the row's largest logits.
__device__ __forceinline__ int best_token(const SampleParams& p, const char* logits,
                                          const Room& room, u32 most, Shared& s) {
  if (threadIdx.x == 0) s.token = p.vocab;
  const int listed = list_groups(room, most, s);
  visit_listed(p, logits, room, listed, most, [&](u32, int id) { atomicMin(&s.token, id); });
  __syncthreads();
  return s.token;
}

// Weights of all pieces, relative to the row's best token, to room.orders; their sum.
__device__ __forceinline__ u64 load_sums(const SampleParams& p, int row, const Room& room,
                                         float top, float scale, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const float* from = p.sums + (long long)row * p.pieces;
  u64 sum = 0;
  for (int piece = warp; piece < p.pieces; piece += kWarps) {
    const u32 most = __reduce_max_sync(kAll, room.keys[piece * 32 + lane]);
    const float share = most == kNothing ? 0.0f : ratio(value_of(most), top, scale);
    const u64 all = __float2ull_rn(share * __ldcg(from + piece) * kUnit);
    if (lane == 0) room.orders[piece] = all, sum += all;
  }
  if (lane == 0) s.warp_sums[warp] = sum;
  __syncthreads();
  sum = sum_warp(lane < kWarps ? s.warp_sums[lane] : 0);
  __syncthreads();
  return sum;
}

// Without filters: a piece by its weight (in room.orders), then a token of it by its own.
__device__ __forceinline__ int draw_of_all(const SampleParams& p, const char* logits,
                                           const Room& room, u64 all, float scale,
                                           const Random& random, Shared& s) {
  const int lane = threadIdx.x;
  if (lane < 32) {
    const int mine = (p.pieces + 31) / 32, first = lane * mine;
    const u64 piece_target = __umul64hi(random.first, all);
    u64 sum = 0;
    for (int i = first; i < min(first + mine, p.pieces); ++i) sum += room.orders[i];
    u64 upto = scan_warp(sum, lane), before = upto - sum;
    if (before <= piece_target && piece_target < upto) {
      int piece = first;
      while (piece_target >= before + room.orders[piece]) before += room.orders[piece++];
      s.bin = piece;
    }
    __syncwarp();
    const int piece = s.bin;
    const u32 most = __reduce_max_sync(kAll, room.keys[piece * 32 + lane]);
    const float top = value_of(most);
    // a lane has neighbouring vectors here, so that tokens come in the order of their ids
    const int v0 = piece * kPieceVectors + lane * kGroupVectors;
    u64 weights = 0;
#pragma unroll 1
    for (int j = 0; j < kGroupVectors; ++j) {
      u32 raw[4];
      load_vector(logits, v0 + j, p.vocab, raw);
#pragma unroll
      for (int e = 0; e < kVector; ++e) weights += weight(plain(element(raw, e)), top, scale);
    }
    upto = scan_warp(weights, lane), before = upto - weights;
    const u64 target = __umul64hi(random.second, __shfl_sync(kAll, upto, 31));
    if (before <= target && target < upto) {
#pragma unroll 1
      for (int j = 0; j < kGroupVectors; ++j) {
        u32 raw[4];
        load_vector(logits, v0 + j, p.vocab, raw);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const u64 here = weight(plain(element(raw, e)), top, scale);
          if (before <= target && target < before + here) s.token = (v0 + j) * kVector + e;
          before += here;
        }
      }
    }
  }
  __syncthreads();
  return s.token;
}

// The filters in their order, then the draw: false where the tokens of `source` do not reach as far
// down as the nucleus of a row, all of whose tokens weigh `all`.
template <class Source>
__device__ __forceinline__ bool resolve(const Source& source, const Choice& choice, bool complete,
                                        u32 most, u64 all, u64 random, u64* buffer, Shared& s,
                                        int& token) {
  Measure measure{0, value_of(most), choice.scale, -INFINITY_F, false};
  u64 low = (u64)kNothing << kIdBits, high = order_of(most, 0);
#pragma unroll 1
  for (int stage = choice.top_k ? 0 : choice.nucleus() ? 1 : 2; stage < 3; ++stage) {
    if (stage == 1 && !choice.nucleus()) continue;
    if (stage == 2) measure.min_log2 = choice.min_log2;
    measure.count = stage == 0;
    u64 target = choice.top_k - 1;
    if (stage > 0) {
      u64 sum = all;
      if (stage == 2 || choice.top_k) sum = total(source, measure, s);
      // the nucleus is what begins below its share: it ends with the token that reaches it
      const u64 share = __double2ull_ru((double)choice.top_p * (double)sum);
      target = stage == 2 ? __umul64hi(random, sum) : max(share, 1ull) - 1;
    }
    u64 found;
    if (find(source, measure, target, low, high, buffer, s, found))
      measure.cut = low = found;
    else if (stage == 1 && !complete)
      return false;
  }
  token = id_of(measure.cut);
  return true;
}

// The row's token with any filter.
__device__ __forceinline__ int draw_of_kept(const SampleParams& p, const char* logits,
                                            const Room& room, const Choice& choice, u32 most,
                                            u64 all, u64 random, Shared& s) {
  const bool nucleus = choice.nucleus();
  const float top = value_of(most);
  u32 floor = kNothing + 1;  // reached by all that min-p keeps, and perhaps by a little more
  if (choice.min_log2 > -INFINITY_F && !(choice.top_k && nucleus)) {
    const float apart = choice.min_log2 / choice.scale * 1.00001f;
    floor = max(floor, key_of(plain(top + apart - fabsf(top) * 1e-6f - 1e-30f)));
  }
  int token = 0;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const int wanted = choice.top_k ? choice.top_k : nucleus ? turn ? 1024 : 128 : 0;
    u32 least = floor;
    if (wanted && wanted < room.groups && p.vocab > kCandidates) {
      const Measure groups{(u64)(kNothing + 1) << kIdBits, 0.0f, 0.0f, 0.0f, true};
      Search search(wanted - 1, (u64)kNothing << kIdBits, order_of(most, 0));
      // a bound that 32 more groups reach serves as well
      if (search.narrow(Groups{room.keys, room.groups}, groups, kIdBits, 32, s))
        least = max(least, (u32)(search.prefix << search.shift >> kIdBits));
    }
    const bool complete = choice.top_k || least <= floor;
    const int listed = list_groups(room, least, s);
    if (listed > kCandidates) break;
    if (threadIdx.x == 0) s.candidates = 0;
    __syncthreads();
    visit_listed(p, logits, room, listed, least, [&](u32 key, int id) {
      const int slot = atomicAdd(&s.candidates, 1);
      if (slot < kCandidates) room.orders[slot] = order_of(key, id);
    });
    __syncthreads();
    const int count = s.candidates;
    __syncthreads();
    if (count > kCandidates) break;
    const Candidates candidates{room.orders, count};
    if (resolve(candidates, choice, complete, most, all, random, room.orders, s, token))
      return token;
  }
  resolve(Row{logits, p.vocab}, choice, true, most, all, random, room.orders, s, token);
  return token;
}

__device__ __forceinline__ int choose(const SampleParams& p, int row, const char* logits,
                                      char* dynamic, Shared& s) {
  const Choice choice(p, row);
  const Room room(dynamic, p.pieces);
  const u32 most = load_keys(p, row, room, s);
  if (most == kNothing) return 0;
  if (choice.greedy) return best_token(p, logits, room, most, s);
  const u64 seed = p.seeds ? p.seeds[row] : p.seed;
  const Random random(seed, p.steps ? p.steps[row] : p.step);
  u64 all = 0;
  if (choice.sums()) all = load_sums(p, row, room, value_of(most), choice.scale, s);
  if (!choice.filtered()) return draw_of_all(p, logits, room, all, choice.scale, random, s);
  return draw_of_kept(p, logits, room, choice, most, all, random.first, s);
}

// What a drawn token does to its request; by one thread.
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
