// Prefill's producer of e4m3 caches and of tiny pages: four warps, each for rows of its own.
//
// Tiny pages are copied row by row, e4m3 of larger ones (TMA 1) by boxes. What is e4m3 lies beside
// the stages first, so that a tile is on its way while the one before is converted.
#pragma once
#include "attention_prefill_gather.cuh"

namespace prefill {

constexpr int kTileRows = kKeys / 4;                 // of a warp
constexpr int kRowChunks = KV8 ? D / 16 : kChunks;   // 16-byte chunks of a row in the cache
constexpr int kCopies = kTileRows * kRowChunks / 32;  // of a thread

// A thread's chunk in copy i of a warp's rows. In e4m3 it becomes two: eight threads write 16-byte
// chunks of two rows of a block, even ones of one and odd ones of the other, to all banks. Boxes of
// 128 bytes are swizzled, so rows that differ in 5 are read from all banks, too.
constexpr bool kSwizzled = TMA && D % 128 == 0;
struct Chunk {
  int row, chunk;
  __device__ __forceinline__ Chunk(int i) {
    const int lane = threadIdx.x & 31, j = i * 32 + lane;
    if constexpr (KV8 && kSwizzle == 128) {
      constexpr int blocks = kRowChunks / 4;
      const int q = j / 8;
      row = q / blocks * 2 ^ (lane >> 2 & 1) * (kSwizzled ? 5 : 1);
      chunk = q % blocks * 4 + (lane & 3);
    } else {
      row = j / kRowChunks, chunk = j % kRowChunks;
    }
  }
};

// Where a thread's e4m3 of copy i lies: a warp converts what it has asked for itself.
__device__ __forceinline__ u32 raw_at(int i) {
  if constexpr (!TMA) return (i * 128 + (threadIdx.x & 127)) * 16;
  const Chunk x(i);
  const int row = (threadIdx.x >> 5 & 3) * kTileRows + x.row;
  if constexpr (!kSwizzled) return row * D + x.chunk * 16;
  return x.chunk / 8 * (kKeys * 128) + row * 128 + ((x.chunk ^ row) & 7) * 16;
}

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

// Ask for a warp's rows of a tile in e4m3, from `key0`, by boxes, of which a lane has the page.
__device__ __forceinline__ void copy_boxes(const AttentionParams& p, const TensorMap* map, u32 raw,
                                           u32 full, int page_of_lane, int key0, int head) {
  constexpr int kWide = kSwizzled ? 128 : D;
  const int warp = (threadIdx.x >> 5) & 3, box_keys = min(1 << p.page_shift, kTileRows);
  if ((threadIdx.x & 31) == 0) barrier_expect(full, kTileRows * D);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kTileRows / kMinBox; ++j) {
    const int page = __shfl_sync(0xffffffffu, page_of_lane, j * kMinBox);
    const int from = j * kMinBox, in_page = (key0 + from) & ((1 << p.page_shift) - 1);
    if (from % box_keys == 0 && elected())
#pragma unroll
      for (int x = 0; x < D; x += kWide)
        copy_box(raw + x * kKeys + (warp * kTileRows + from) * kWide, map, full, x, in_page, head,
                 clamp_int(page, 0, p.num_pages - 1));
  }
}

// A tile in e4m3 to f16; rows outside [first, last) become zeros where it is an EDGE.
template <bool EDGE>
__device__ __forceinline__ void convert_tile(u32 to, u32 raw, int first, int last) {
  const int warp = (threadIdx.x >> 5) & 3;
  constexpr int kAtOnce = kCopies % 4 ? 2 : 4;  // in flight from shared memory
#pragma unroll
  for (int begin = 0; begin < kCopies; begin += kAtOnce) {
    u32 words[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3])
                   : "r"(raw + raw_at(begin + i))
                   : "memory");
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Chunk x(begin + i);
      const int row = warp * kTileRows + x.row;
      if (EDGE && (row < first || row >= last))
#pragma unroll
        for (int w = 0; w < 4; ++w) words[i][w] = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 low = words[i][2 * h], high = words[i][2 * h + 1];
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(
                         to + chunk_at(kKeys, row, x.chunk * 2 + h)),
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
  u32 full_raw, raw_parity;             // when its boxes are there,
  int first, last;                      // and which of its rows may be read
};

__device__ __forceinline__ void produce(const AttentionParams& p, const TensorMap* maps,
                                        const Shared& s, int units) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, heads = p.num_kv_heads;
  Tickets tickets(p);
  Turn<kPosts> work;
  Turn<kStages> keys, values, raws;
  // A tile is announced when the next one's copies are in flight: these are ordinary writes, which
  // the matrix unit sees only after a fence by the writing threads.
  Held held;
  const auto announce = [&] {
    if (held.full) {
      if constexpr (KV8) {
        if constexpr (TMA) barrier_wait(held.full_raw, held.raw_parity);
        barrier_wait(held.free, held.parity);
        if (TMA && (held.first > 0 || held.last < kKeys))
          convert_tile<true>(held.to, held.raw, held.first, held.last);
        else
          convert_tile<false>(held.to, held.raw, 0, kKeys);
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
    const auto fill = [&](Turn<kStages>& turn, bool of_keys, int page, int tile) {
      const u32 ring = of_keys ? s.keys : s.values, stage = turn.stage(), raw_stage = raws.stage();
      const u32 full = of_keys ? s.full_keys : s.full_values;
      const u32 free = (of_keys ? s.empty_keys : s.empty_values) + 8 * stage;
      const u32 to = ring + stage * kTileBytes, raw = s.raw + raw_stage * kRawBytes;
      const u32 full_raw = s.full_raw + 8 * raw_stage, parity = turn.parity() ^ 1;
      const int key0 = item.begin + tile * kKeys;
      if constexpr (!KV8) {
        if (held.full && !barrier_try(free, parity)) drain();  // others may wait for the tile held
        barrier_wait(free, parity);
      }
      if constexpr (TMA) {
        copy_boxes(p, maps + (of_keys ? 1 : 2), raw, full_raw, page, key0 + warp * kTileRows, head);
      } else {
        copy_tile(KV8 ? raw : to, (of_keys ? p.k : p.v) + head * p.head_bytes,
                  row32(p, page, key_of_lane(tile)), key0, low, item.end);
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
      }
      announce();
      held = {full + 8 * stage, to, raw, free, parity, full_raw, raws.parity(), low - key0,
              item.end - key0};
      ++turn.count, ++raws.count;
    };
    if (tiles == 0) continue;
    // Keys one tile ahead of values, as the consumers take them; pages are asked for a tile before
    // their rows are.
    int page = 0, page_after = look_up(tiles - 1);
    for (int tile = tiles; tile >= 0; --tile) {
      const int page_then = look_up(tile - 2);
      if (tile > 0) fill(keys, true, page_after, tile - 1);
      if (tile < tiles) fill(values, false, page, tile);
      page = page_after, page_after = page_then;
    }
  }
  drain();
}

}  // namespace prefill
