// Prefill's producer: draws work by ticket and gathers queries and pages into shared memory.
//
// A producer posts a unit of work and its queries, then fills two stages of keys and two of values:
// by two warps that ask TMA for boxes (attention_prefill_boxes.cuh), or by four that copy rows of
// tiny pages or convert e4m3 (attention_prefill_copy.cuh). Rows that a request must not read, past
// its end or before its window, become zeros.
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
constexpr bool kDirect = TMA && !KV8;          // TMA brings tiles as they are multiplied
// Warps that signal that they have read a posted unit: consumers, the value warp or all that copy.
constexpr int kReaders = 8 + (kDirect ? 1 : 4);

// A place in a ring of STAGES and its barrier's parity.
template <int STAGES>
struct Turn {
  u32 count = 0;
  __device__ __forceinline__ u32 stage() const { return count % STAGES; }
  __device__ __forceinline__ u32 parity() const { return count / STAGES & 1; }
};

// At a full tile: a copy's, each converting warp's, or each thread's, as threads of 16-bit caches may
// announce a tile at different times.
constexpr int kArrivals = kDirect ? 1 : KV8 ? 4 : 128;

struct Shared {
  u32 query, keys, values, raw;  // addresses in shared memory
  // barriers, 2 each
  u32 full_keys, empty_keys, full_values, empty_values, full_work, empty_work, full_raw;
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
    full_work = full_keys + 64, empty_work = full_keys + 80, full_raw = full_keys + 96;
    work = (int*)(at + kBuffers + 128);
    last = work + 32;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2; ++i) {
      barrier_init(full_keys + 8 * i, kArrivals), barrier_init(full_values + 8 * i, kArrivals);
      barrier_init(empty_keys + 8 * i, 8), barrier_init(empty_values + 8 * i, 8);
      barrier_init(full_work + 8 * i, 1);
      barrier_init(empty_work + 8 * i, kReaders);
      barrier_init(full_raw + 8 * i, 4);
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
  return kDirect && kRows % p.group == 0;
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

// The last CTA to have drawn its last ticket resets the counters.
__device__ __forceinline__ void depart(const AttentionParams& p) {
  if (arrive(p.plan + DEPARTED, 1) == (int)gridDim.x - 1) p.plan[TICKET] = p.plan[DEPARTED] = 0;
}

}  // namespace prefill
