// Problem -> what a plan and its kernel know of tiles of which two blocks share two.
#pragma once

#include <cstdint>

#include "hopper_attention/forward.h"
#include "host/schedule_shape.h"
#include "kernels/paired_tiles.h"
#include "kernels/tile_config.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

// `most_ctas`: of the grid.
inline PairedTiles paired_tiles(Problem const& problem, TileConfig const& tile, int packed_heads, int most_ctas) {
  TileCost const cost = find_tile(tile.head_dim, tile.head_dim_v, TileUse::kPaired)->cost;
  Packing const packing = make_packing(packed_heads, rows_of_slab(tile));
  int const head_groups = problem.heads_q / packed_heads;
  PairedTiles p;
  p.count = ceil_div(query_rows_of_sequence(problem), packing.queries_per_slab * slabs_of(tile));
  p.pairs_of_group = FastDivmod(max_of(1, ceil_div(p.count, 2)));
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  p.pairs = static_cast<int>(min_of(kMost, std::int64_t{p.pairs_of_group.divisor} * head_groups * problem.batch));
  p.clusters = min_of(p.pairs, max_of(1, most_ctas / 2));
  p.blocks_of_ends = (2 * cost.tile + cost.block) / (2 * cost.block);
  p.head_groups = FastDivmod(head_groups);
  return p;
}

}  // namespace hopper_attention
