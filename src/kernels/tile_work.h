// What one tile has to do. Every warp derives it by the same function, so that all agree on how many blocks there are.
#pragma once

#include "kernels/block_range.h"
#include "kernels/params.h"

namespace hopper_attention {

struct TileWork {
  Tile tile;
  QueryRange queries;
  int queries_per_slab;
  int head_k;
  int seqlen_k;
  BlockRange range;

  HA_HOST_DEVICE int first_key(int n, int block) const { return range.origin + n * block; }

  // Rows of block n that hold keys which the tile sees.
  HA_HOST_DEVICE KeyInterval rows_to_keep(int n, int block) const {
    int const first = first_key(n, block);
    return {max_of(range.keys.begin - first, 0), min_of(range.keys.end - first, block)};
  }

  // Keys past the end of the tensor arrive as zeros; keys that exist but are outside the tile's view must be zeroed.
  HA_HOST_DEVICE bool hides_rows(int n, int block) const {
    KeyInterval const keep = rows_to_keep(n, block);
    int const arriving = min_of(seqlen_k - first_key(n, block), block);
    return keep.begin > 0 || keep.end < arriving;
  }
};

HA_HOST_DEVICE TileWork tile_work(PrefillParams const& p, int slabs, int keys, Tile tile) {
  QueryRange const queries = query_range(p.packing, slabs, tile.m, p.len.q);
  return {tile,
          queries,
          p.packing.queries_per_slab,
          p.load.groups_per_head_k.quotient(tile.head),
          p.len.k,
          block_range(p.mask, queries.first, queries.last, p.len, keys)};
}

}  // namespace hopper_attention
