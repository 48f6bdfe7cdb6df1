// Plan -> what a kernel is told about tiles of few sequences that are found by their rank, and shared in clusters.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hopper_attention/forward.h"
#include "host/schedule_shape.h"
#include "kernels/paired_tiles.h"
#include "kernels/tile_config.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

// Tiles that sequences of a call have at most: each may end with one that is not full.
inline std::int64_t most_tiles(Problem const& problem, TileConfig const& tile, int packed_heads) {
  std::int64_t const queries = tile_shape(tile, packed_heads, false).queries;
  std::int64_t const of_group = problem.packed_q ? (problem.total_q + problem.batch * (queries - 1)) / queries
                                                 : problem.batch * ceil_div<std::int64_t>(problem.seqlen_q, queries);
  return of_group * (problem.heads_q / packed_heads);
}

// Whether the lanes of a warp can hold the sequences of a call and count their tiles.
inline bool tiles_have_ranks(Problem const& problem, TileConfig const& tile, int packed_heads) {
  return problem.batch <= kMostRankedSequences &&
         most_tiles(problem, tile, packed_heads) <= std::int64_t{kMostRankedTiles} * (problem.heads_q / packed_heads);
}

// Whether the tiles of a prompt get longer from the first to the last: a window that no sequence fills hides nothing.
inline bool tiles_rise_to_the_last(Problem const& problem) {
  MaskParams mask = problem.mask;
  if (mask.left >= problem.seqlen_k) { mask.left = kUnlimited; }
  return units_rise(mask);
}

// A cluster runs within a group of SMs (GPC) and leaves some of them over: 132 SMs hold 66 clusters of 2, 38 to 40 of
// 3, 30 of 4, 15 of 8; one more would run after the others.
constexpr int clusters_at_once(int blocks, int sms) { return (blocks <= 2 ? sms : sms * 7 / 8) / blocks; }

// One for each cluster, or as many as `tiles` are, two at a time, whatever part of the SMs the call may use: which
// tiles are shared decides bits.
inline std::int64_t number_of_pairs(std::int64_t tiles, int blocks_of_pair, int sm_count) {
  return std::max(std::min<std::int64_t>(tiles, clusters_at_once(blocks_of_pair, sm_count)),
                  ceil_div<std::int64_t>(tiles, 2));
}

// What a tile takes beside its blocks, in blocks.
inline int blocks_of_ends(TileConfig const& tile) {
  TileCost const cost = find_tile(tile.head_dim, tile.head_dim_v, TileUse::kPaired)->cost;
  return (2 * cost.tile + cost.block) / (2 * cost.block);
}

inline PairedTiles paired_tiles(KernelPlan const& kernel) {
  int const warps = slabs_of(kernel.tile) * kSlabRows / kRowsOfWarp;
  bool const alone = kernel.most_tiles <= kernel.pairs;
  return {.pairs = kernel.pairs,
          .clusters = kernel.ctas / kernel.blocks_of_pair,
          .size = ClusterSize(kernel.blocks_of_pair),
          .warps = FastDivmod(warps_of_owner(warps, kernel.blocks_of_pair, alone)),
          .blocks_of_ends = blocks_of_ends(kernel.tile)};
}

inline RankedTileParams ranked_tiles(Plan const& plan, KernelPlan const& kernel, Problem const& problem) {
  int const queries = tile_shape(kernel.tile, plan.packed_heads, false).queries;
  int const head_groups = problem.heads_q / plan.packed_heads;
  bool const alike = is_paired(kernel) && tiles_are_known(problem);
  return {.queries = FastDivmod(queries),
          .head_groups = FastDivmod(head_groups),
          .of_lanes = SequencesOfLanes(problem.batch),
          .groups = FastDivmod(head_groups * problem.batch),
          .alike = alike ? ceil_div(query_rows_of_sequence(problem), queries) : 0,
          .ctas = kernel.ranked ? kernel.ctas : 0};
}

}  // namespace hopper_attention
