// Prefill's producer: draws work by ticket and gathers queries and pages into shared memory.
//
// A producer posts a unit of work and its queries, then fills two stages of keys and two of values.
// TMA 1: two warps request one box per page and 64 dims, which takes few instructions; rows that a
// request must not read (past its end, before its window) are written as zeros.
// TMA 0 (e4m3 caches, which must be converted; tiny pages): four warps copy row by row. What is e4m3
// lies beside the stages first, so that a tile is on its way while the one before is converted.
#pragma once
#include "attention_merge.cuh"
#include "wgmma.cuh"

#ifndef TMA
#define TMA 0
#endif

namespace prefill {

constexpr int kThreads = 384;
constexpr int kRows = 128;                     // packed rows of an item, 64 a consumer
constexpr int kKeys = D == 256 ? 64 : 128;     // keys of a tile
constexpr int kSwizzle = D % 64 == 0 ? 128 : 64;
constexpr int kBlock = kSwizzle / 2;           // dims side by side in shared memory
constexpr int kBlocks = D / kBlock;
constexpr int kStages = 2;
constexpr int kPosts = D == 256 ? 1 : 2;       // units of work that are posted ahead, with queries
constexpr int kTileBytes = kKeys * D * 2;
constexpr int kQueryBytes = kRows * D * 2;
constexpr int kChunks = D / 8;                 // 16-byte chunks of a row of 16-bit values
constexpr int kBlockChunks = kBlock / 8;
constexpr int kRawBytes = KV8 ? kKeys * D : 0;  // e4m3 of a tile, before they are converted
constexpr int kRaw = kPosts * kQueryBytes + 2 * kStages * kTileBytes;
constexpr int kBuffers = kRaw + kStages * kRawBytes;
constexpr int kSharedBytes = 1024 + kBuffers + 320;
static_assert(kSharedBytes <= 232448, "more shared memory than a CTA may have");
constexpr int kMinBox = 16;                    // keys of a page from which TMA is used
// Warps that signal that they have read a posted unit: consumers, the value warp or all that copy.
constexpr int kReaders = 8 + (TMA ? 1 : 4);

// A place in a ring of STAGES and its barrier's parity.
template <int STAGES>
struct Turn {
  u32 count = 0;
  __device__ __forceinline__ u32 stage() const { return count % STAGES; }
  __device__ __forceinline__ u32 parity() const { return count / STAGES & 1; }
};

// At a full tile: a copy's, each converting warp's, or each thread's, as threads of 16-bit caches may
// announce a tile at different times.
constexpr int kArrivals = TMA ? 1 : KV8 ? 4 : 128;

struct Shared {
  u32 query, keys, values, raw;  // addresses in shared memory
  u32 full_keys, empty_keys, full_values, empty_values, full_work, empty_work;  // barriers, 2 each
  int* work;                // a slot of 16 words for each unit that is posted: its item, the unit
  volatile int* last;       // whether this CTA merges

  __device__ __forceinline__ Shared(char* shared) {
    char* at = (char*)(((u64)shared + 1023) / 1024 * 1024);
    query = (u32)__cvta_generic_to_shared(at);
    keys = query + kPosts * kQueryBytes;
    values = keys + kStages * kTileBytes;
    raw = query + kRaw;
    full_keys = query + kBuffers;
    empty_keys = full_keys + 16, full_values = full_keys + 32, empty_values = full_keys + 48;
    full_work = full_keys + 64, empty_work = full_keys + 80;
    work = (int*)(at + kBuffers + 128);
    last = work + 32;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2; ++i) {
      barrier_init(full_keys + 8 * i, kArrivals), barrier_init(full_values + 8 * i, kArrivals);
      barrier_init(empty_keys + 8 * i, 8), barrier_init(empty_values + 8 * i, 8);
      barrier_init(full_work + 8 * i, 1);
      barrier_init(empty_work + 8 * i, kReaders);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// Where chunk c of row r lies in a matrix of `rows` rows.
__device__ __forceinline__ u32 chunk_at(int rows, int r, int c) {
  const int low = kSwizzle == 128 ? r & 7 : (r >> 1) & 3;
  return c / kBlockChunks * (rows * kSwizzle) + r * kSwizzle + ((c % kBlockChunks) ^ low) * 16;
}

// 16 bytes to shared memory, or zeros in their place.
__device__ __forceinline__ void copy_chunk(u32 to, const char* from, bool seen) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(seen ? 16 : 0)
               : "memory");
}

struct Item {
  int request, begin, end, kv_len, q_start, q_len, first_row, first_slot, pieces, piece, counter;
  int unit;
  __device__ __forceinline__ Item(const int* slot) {
    const int4* at = (const int4*)slot;
    const int4 a = at[0], b = at[1], c = at[2];
    request = a.x, begin = a.y, end = a.z, kv_len = a.w;
    q_start = b.x, q_len = b.y, first_row = b.z, first_slot = b.w;
    pieces = c.x, piece = c.y, counter = c.z;
    unit = slot[12];
  }
  __device__ __forceinline__ int tiles() const { return (max(end - begin, 0) + kKeys - 1) / kKeys; }
  // The first key that any row of the block sees.
  __device__ __forceinline__ int low(const AttentionParams& p) const {
    return p.window ? max(0, kv_len - q_len + first_row / p.group - p.window + 1) : 0;
  }
};

// Whether TMA can fetch a block's queries as one box: it must have whole tokens.
__device__ __forceinline__ bool query_is_box(const AttentionParams& p) {
  return TMA && kRows % p.group == 0;
}

// The CTA's units by tickets, drawn one ahead; by one warp.
struct Tickets {
  Turn<kPosts> turn;
  int drawn;
  __device__ __forceinline__ Tickets(const AttentionParams& p) {
    drawn = 0;
    if (threadIdx.x == 0) drawn = atomicAdd(p.plan + TICKET, 1);
  }
  // Post the next unit, or -1; its queries come with it where they are a box.
  __device__ __forceinline__ void post(const AttentionParams& p, const Shared& s, int units,
                                       const TensorMap* queries) {
    const int lane = threadIdx.x & 31, slot = turn.stage();
    const int ticket = __shfl_sync(0xffffffffu, drawn, 0), unit = ticket < units ? ticket : -1;
    const int head = unit % p.num_kv_heads;
    int word = unit;
    if (unit >= 0 && lane < ITEM_WORDS)
      word = p.plan[p.prefill_at + (long long)(unit / p.num_kv_heads) * ITEM_WORDS + lane];
    if (unit >= 0 && lane == 0) drawn = atomicAdd(p.plan + TICKET, 1);
    const int first_token = __shfl_sync(0xffffffffu, word, Q_START) +
                            __shfl_sync(0xffffffffu, word, FIRST_ROW) / p.group;
    barrier_wait(s.empty_work + 8 * slot, turn.parity() ^ 1);
    if (lane <= ITEM_WORDS) s.work[16 * slot + lane] = word;
    __syncwarp();
    const u32 full = s.full_work + 8 * slot;
    if (unit >= 0 && query_is_box(p)) {
      if (lane == 0) barrier_expect(full, kQueryBytes);
      __syncwarp();
      if (elected())
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
          copy_box(s.query + slot * kQueryBytes + b * kRows * kSwizzle, queries, full, b * kBlock,
                   head * p.group, first_token);
    } else if (lane == 0) {
      barrier_arrive(full);
    }
    ++turn.count;
  }
};

#if TMA

// Rows of a tile outside every page's box: copied where the request may read them, else zeros.
__device__ __forceinline__ void copy_edges(const AttentionParams& p, const PageRow& pages,
                                           const char* base, u32 to, int key0, int first, int last,
                                           int low, int kv_len) {
  const int lane = threadIdx.x & 31;
#pragma unroll 4
  for (int j = lane; j < (first + kKeys - last) * kChunks; j += 32) {
    const int c = j % kChunks, r = j / kChunks < first ? j / kChunks : j / kChunks - first + last;
    const int key = key0 + r;
    const bool seen = key >= low && key < kv_len;
    u32 row = 0;
    if (seen) row = row32(p, pages.page(p, key), key);
    copy_chunk(to + chunk_at(kKeys, r, c), base + (u64)row * 32 + c * 16, seen);
  }
}

// One warp brings keys and posts the work, another brings values.
__device__ __forceinline__ void produce(const AttentionParams& p, const TensorMap* maps,
                                        const Shared& s, int units) {
  if (threadIdx.x >= 64) return;
  const int lane = threadIdx.x & 31, heads = p.num_kv_heads;
  const bool of_keys = threadIdx.x < 32;
  const int box_keys = min(1 << p.page_shift, kKeys), boxes = kKeys / box_keys;
  const u32 ring = of_keys ? s.keys : s.values;
  const u32 full_ring = of_keys ? s.full_keys : s.full_values;
  const u32 empty_ring = of_keys ? s.empty_keys : s.empty_values;
  const TensorMap* map = maps + (of_keys ? 1 : 2);
  Tickets tickets(p);
  Turn<kPosts> work;
  Turn<kStages> turn;
  for (;;) {
    const int slot = work.stage();
    if (of_keys)
      tickets.post(p, s, units, maps);
    else
      barrier_wait(s.full_work + 8 * slot, work.parity());
    const Item item(s.work + 16 * slot);
    __syncwarp();
    if (!of_keys && lane == 0) barrier_arrive(s.empty_work + 8 * slot);
    ++work.count;
    if (item.unit < 0) break;
    const int head = item.unit % heads, tiles = item.tiles(), low = item.low(p);
    const PageRow pages(p, item.request);
    const char* base = (of_keys ? p.k : p.v) + head * p.head_bytes;
    const auto look_up = [&](int tile) {  // a lane a page of the tile
      const int key = item.begin + tile * kKeys + lane * box_keys;
      return clamp_int(pages.page(p, min(key, item.kv_len - 1)), 0, p.num_pages - 1);
    };
    if (tiles == 0) continue;
    int id = look_up(tiles - 1);
    for (int tile = tiles - 1; tile >= 0; --tile) {
      const int id_after = look_up(max(tile - 1, 0));
      const int key0 = item.begin + tile * kKeys, in_page = key0 & ((1 << p.page_shift) - 1);
      const u32 stage = turn.stage(), to = ring + stage * kTileBytes, full = full_ring + 8 * stage;
      barrier_wait(empty_ring + 8 * stage, turn.parity() ^ 1);
      ++turn.count;
      int first = 0, last = boxes;
      if (key0 < low || key0 + kKeys > item.kv_len) {
        first = min((max(low - key0, 0) + box_keys - 1) / box_keys, boxes);
        last = max(first, min(item.kv_len - key0, kKeys) / box_keys);
        copy_edges(p, pages, base, to, key0, first * box_keys, last * box_keys, low, item.kv_len);
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async();
        __syncwarp();
      }
      if (lane == 0) barrier_expect(full, (last - first) * box_keys * D * 2);
#pragma unroll
      for (int j = 0; j < kKeys / kMinBox; ++j) {
        const int page = __shfl_sync(0xffffffffu, id, j);
        if (j >= first && j < last && elected())
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            copy_box(to + (b * kKeys + j * box_keys) * kSwizzle, map, full, b * kBlock, in_page,
                     head, page);
      }
      id = id_after;
    }
  }
}

#else

constexpr int kTileRows = kKeys / 4;                 // of a warp
constexpr int kRowChunks = KV8 ? D / 16 : kChunks;   // 16-byte chunks of a row in the cache
constexpr int kCopies = kTileRows * kRowChunks / 32;  // of a thread

// A thread's chunk in copy i of a warp's rows. In e4m3 it becomes two: eight threads write 16-byte
// chunks of two rows of a block, even ones of one and odd ones of the other, to all banks.
struct Chunk {
  int row, chunk;
  __device__ __forceinline__ Chunk(int i) {
    const int lane = threadIdx.x & 31, j = i * 32 + lane;
    if constexpr (KV8 && kSwizzle == 128) {
      constexpr int blocks = kRowChunks / 4;
      const int q = j / 8;
      row = q / blocks * 2 + (lane >> 2 & 1), chunk = q % blocks * 4 + (lane & 3);
    } else {
      row = j / kRowChunks, chunk = j % kRowChunks;
    }
  }
};

// Where a thread's e4m3 of copy i lies: it converts what it has copied itself.
__device__ __forceinline__ u32 raw_at(int i) { return (i * 128 + (threadIdx.x & 127)) * 16; }

// Gather one tile's rows, 32 (16) of them a warp; keys outside [low, end) become zeros.
__device__ __forceinline__ void copy_tile(u32 to, const char* base, u32 row32_of_lane, int key0,
                                          int low, int end) {
  const int warp = (threadIdx.x >> 5) & 3;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const Chunk x(i);
    const u32 row = __shfl_sync(0xffffffffu, row32_of_lane, x.row);
    const int key = key0 + warp * kTileRows + x.row;
    const u32 at = KV8 ? raw_at(i) : chunk_at(kKeys, warp * kTileRows + x.row, x.chunk);
    copy_chunk(to + at, base + (u64)row * 32 + x.chunk * 16, key >= low && key < end);
  }
}

// A tile in e4m3 to f16.
__device__ __forceinline__ void convert_tile(u32 to, u32 raw) {
  const int warp = (threadIdx.x >> 5) & 3;
  constexpr int kAtOnce = 2;  // in flight from shared memory
#pragma unroll
  for (int first = 0; first < kCopies; first += kAtOnce) {
    u32 words[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3])
                   : "r"(raw + raw_at(first + i))
                   : "memory");
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Chunk x(first + i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 low = words[i][2 * h], high = words[i][2 * h + 1];
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(
                         to + chunk_at(kKeys, warp * kTileRows + x.row, x.chunk * 2 + h)),
                     "r"(e4m3_to_f16(low, false)), "r"(e4m3_to_f16(low, true)),
                     "r"(e4m3_to_f16(high, false)), "r"(e4m3_to_f16(high, true))
                     : "memory");
      }
    }
  }
}

// A tile whose copies were asked for, and which consumers do not know of yet.
struct Held {
  u32 full = 0, to, raw, free, parity;  // its barrier, place, e4m3; when its place is free
};

__device__ __forceinline__ void produce(const AttentionParams& p, const TensorMap* maps,
                                        const Shared& s, int units) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, heads = p.num_kv_heads;
  Tickets tickets(p);
  Turn<kPosts> work;
  Turn<kStages> keys, values;
  // A tile is announced when the next one's copies are in flight: these are ordinary writes, which
  // the matrix unit sees only after a fence by the writing threads.
  Held held;
  u32 tiles_copied = 0;
  const auto announce = [&] {
    if (held.full) {
      if constexpr (KV8) {
        barrier_wait(held.free, held.parity);
        convert_tile(held.to, held.raw);
      }
      fence_async();
      if constexpr (KV8) __syncwarp();
      if (!KV8 || lane == 0) barrier_arrive(held.full);
    }
    held.full = 0;
  };
  const auto drain = [&] {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    announce();
  };
  for (;;) {
    const u32 slot = work.stage();
    if (warp == 0) tickets.post(p, s, units, maps);
    barrier_wait(s.full_work + 8 * slot, work.parity());
    const Item item(s.work + 16 * slot);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.empty_work + 8 * slot);
    ++work.count;
    if (item.unit < 0) break;
    const int head = item.unit % heads, tiles = item.tiles(), low = item.low(p);
    const PageRow pages(p, item.request);
    const auto key_of_lane = [&](int tile) {
      return item.begin + tile * kKeys + warp * kTileRows + (lane & (kTileRows - 1));
    };
    const auto look_up = [&](int tile) {
      return pages.page(p, min(key_of_lane(max(tile, 0)), item.end - 1));
    };
    const auto fill = [&](Turn<kStages>& turn, u32 ring, u32 full, u32 empty, const char* base,
                          int page, int tile) {
      const u32 stage = turn.stage(), free = empty + 8 * stage, parity = turn.parity() ^ 1;
      const u32 to = ring + stage * kTileBytes, raw = s.raw + tiles_copied % kStages * kRawBytes;
      if constexpr (!KV8) {
        if (held.full && !barrier_try(free, parity)) drain();  // others may wait for the tile held
        barrier_wait(free, parity);
      }
      copy_tile(KV8 ? raw : to, base + head * p.head_bytes, row32(p, page, key_of_lane(tile)),
                item.begin + tile * kKeys, low, item.end);
      asm volatile("cp.async.commit_group;" ::: "memory");
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      announce();
      held = {full + 8 * stage, to, raw, free, parity};
      ++turn.count, ++tiles_copied;
    };
    if (tiles == 0) continue;
    // pages are asked for a tile before their rows are
    int page = look_up(tiles - 1), page_after = look_up(tiles - 2);
    for (int tile = tiles - 1; tile >= 0; --tile) {
      // keys one tile ahead of values, as the consumers take them
      if (tile == tiles - 1) fill(keys, s.keys, s.full_keys, s.empty_keys, p.k, page, tile);
      const int page_then = look_up(tile - 2);
      if (tile > 0)
        fill(keys, s.keys, s.full_keys, s.empty_keys, p.k, page_after, tile - 1);
      fill(values, s.values, s.full_values, s.empty_values, p.v, page, tile);
      page = page_after, page_after = page_then;
    }
  }
  drain();
}

#endif

// The last CTA to have drawn its last ticket resets the counters.
__device__ __forceinline__ void depart(const AttentionParams& p) {
  if (arrive(p.plan + DEPARTED, 1) == (int)gridDim.x - 1) p.plan[TICKET] = p.plan[DEPARTED] = 0;
}

}  // namespace prefill
