// What one tile, or a part of it, has to do. The scheduler warp computes it; all other warps read it, so that all
// agree.
#pragma once

#include "kernels/block_range.h"
#include "kernels/params.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// Aligned for wide copies.
struct alignas(8) TileWork {
  int head = 0;  // head group
  int head_k = 0;
  QueryRange queries{0, -1};
  Sequence sequence{};
  BlockRange range{};
  int slot = -1;                 // of the workspace that takes a partial result; -1: this is the whole tile
  bool last = false;             // there is no more work, and nothing else in here counts
  bool announces_loads = false;  // the scheduler waits until all of its keys have been asked for
  bool in_cluster = false;       // the CTAs of the cluster have a part of the tile each, which they merge
  TilePart part = TilePart::kWhole;

  HA_HOST_DEVICE int first_key(int n, int block) const { return range.origin + n * block; }

  // Rows of block n that hold keys which the tile sees.
  HA_HOST_DEVICE KeyInterval rows_to_keep(int n, int block) const {
    int const first = first_key(n, block);
    return {max_of(range.keys.begin - first, 0), min_of(range.keys.end - first, block)};
  }

  // Keys past the end of the page table arrive as zeros; keys that exist but are outside the tile's view must be
  // zeroed.
  HA_HOST_DEVICE bool hides_rows_of_pages(int n, int block) const {
    KeyInterval const keep = rows_to_keep(n, block);
    int const arriving = min_of(sequence.k_memory - first_key(n, block), block);
    return keep.begin > 0 || keep.end < arriving;
  }
};

// `slabs` and `keys` are the tile's. Without queries (queries.last < queries.first) there is nothing to do.
HA_HOST_DEVICE TileWork tile_work(AttentionParams const& p, int slabs, int keys, WorkItem const& item,
                                  Sequence const& sequence) {
  QueryRange const queries = query_range(p.packing, slabs, item.m, sequence.len.q);
  TileWork work{item.head, p.load.groups_per_head_k.quotient(item.head), queries, sequence};
  work.slot = item.slot;
  work.in_cluster = item.in_cluster;
  work.part = item.part;
  if (queries.last < queries.first) { return work; }
  BlockAlignment const alignment{p.alignment.unit, sequence.k_row};
  BlockRange const range = block_range(p.mask, queries.first, queries.last, sequence.len, keys, alignment);
  work.range = part_of(range, item.first, item.last, item.units);
  return work;
}

// Whether slab `slab` holds no query of it.
HA_HOST_DEVICE bool lies_behind(TileWork const& work, int slab, int queries_per_slab) {
  return work.queries.first + slab * queries_per_slab > work.queries.last;
}

// What slab `slab` visits of it.
HA_HOST_DEVICE SlabRange slab_range(AttentionParams const& p, int keys, TileWork const& work, int slab) {
  QueryRange const queries = queries_of_slab(p.packing, work.queries, slab);
  return slab_range(work.range, p.mask, queries.first, queries.last, work.sequence.len, keys);
}

#if defined(__CUDACC__)

// An item as a whole. Where fields are read from shared memory one by one as they are needed, each costs its latency:
// the 35 of a tile took 3 % of the time at 512 tokens.
__device__ __forceinline__ TileWork read_at_once(TileWork const& work) {
  static_assert(sizeof(TileWork) % sizeof(int2) == 0);
  constexpr int kVectors = sizeof(TileWork) / sizeof(int2);
  int2 words[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) { words[i] = reinterpret_cast<int2 const*>(&work)[i]; }
#pragma unroll
  for (int2& w : words) { asm volatile("" : "+r"(w.x), "+r"(w.y)); }
  TileWork result;
  memcpy(&result, words, sizeof(result));
  return result;
}

#endif

}  // namespace hopper_attention
