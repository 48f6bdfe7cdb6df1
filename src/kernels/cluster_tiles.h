// Which tile a cluster takes, where sequences of few queries have one for each head group or several.
#pragma once

#include "kernels/lanes.h"
#include "kernels/params.h"
#include "kernels/sequences.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

inline constexpr Tile kNoTile{0, 0, -1};

// Of packed sequences, each with as many tiles as hold its queries, tile `index` of one head group: kNoTile if there
// are not so many. Each lane has a sequence. All lanes.
HA_HOST_DEVICE Tile packed_tile(SequenceParams const& sequences, Packing const& packing, int index) {
  HA_NO_UNROLL
  for (int first = 0; first < sequences.batch; first += kLanes) {
    PerLane<int> tiles;
    in_each_lane([&](int lane) {
      int const b = first + lane;
      if (b >= sequences.batch) { return; }
      long long const queries = static_cast<long long>(sequences.cu_seqlens_q[b + 1]) - sequences.cu_seqlens_q[b];
      int const more = packing.queries_per_slab - 1;
      tiles[lane] = packing.slab.quotient(clamped(queries, 0, sequences.seqlen_q) + more);
    });
    PerLane<int> const until = sums_until_lane(tiles);
    int const earlier = number_of_lanes_where([&](int lane) { return until[lane] <= index; });
    if (earlier < kLanes) {
      int const before = value_of_lane(earlier, [&](int lane) { return until[lane] - tiles[lane]; });
      return {.m = index - before, .head = 0, .batch = first + earlier};
    }
    index -= value_of_lane(kLanes - 1, [&](int lane) { return until[lane]; });
  }
  return kNoTile;
}

// Tile `index` of several for a sequence and head group, which follow each other, so that the keys which they share are
// read at about the same time. All lanes.
HA_HOST_DEVICE Tile tile_of_several(ClusterParams const& cluster, SequenceParams const& sequences,
                                    Packing const& packing, int index) {
  if (!cluster.packed) {
    int const group = cluster.tiles_of_group.quotient(index);
    Tile tile = cluster.tile(group);
    tile.m = index - group * cluster.tiles_of_group.divisor;
    return tile;
  }
  int const of_group = cluster.head_groups.quotient(index);
  Tile tile = packed_tile(sequences, packing, of_group);
  tile.head = index - of_group * cluster.head_groups.divisor;
  return tile;
}

// What kernels have code for. With it in those of 16 rows, calls of 4 to 9 us take 1 to 4 % longer.
struct OneTileEach {
  static constexpr bool kSeveral = false;
  HA_HOST_DEVICE static Tile tile(AttentionParams const& params, int index) { return params.cluster.tile(index); }
};
struct SeveralTilesEach {
  static constexpr bool kSeveral = true;
  HA_HOST_DEVICE static Tile tile(AttentionParams const& params, int index) {
    return tile_of_several(params.cluster, params.sequences, params.packing, index);
  }
};

}  // namespace hopper_attention
