// Prefill's producer of 16-bit caches: two warps request one box per page and 64 dims, which takes
// few instructions; rows outside every box are copied, or written as zeros.
#pragma once
#include "attention_prefill_gather.cuh"

namespace prefill {

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

}  // namespace prefill
