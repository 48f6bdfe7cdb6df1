// Tiles of few sequences that are found by their rank, and of which the two CTAs of a cluster share two, so that both
// have as much to do.
#pragma once

#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"

namespace hopper_attention {

// Tiles of up to kLanes sequences that are found by their rank, the longest first (RankedTiles).
struct RankedTileParams {
  FastDivmod queries;  // of a tile
  FastDivmod head_groups;
  FastDivmod groups;  // head groups of all sequences, where these are alike
  int alike = 0;      // tiles that each of these has at most; 0: lengths on the device tell
  int ctas = 0;       // that take whole tiles, by turns from either end; 0: two share two
};

// Tiles by their rank, two for each cluster of two CTAs: a long one and the shortest that is left.
// Where there are fewer than twice as many tiles as pairs, the longest ones are alone in theirs. Clusters take pairs in
// turn.
struct PairedTiles {
  int pairs = 0;
  int clusters = 0;
  int blocks_of_ends = 0;  // what starting and ending a tile takes beside its blocks of keys: as long as so many
};

// Of a pair, ranks among `tiles`.
struct PairOfRanks {
  int first;
  int second;  // -1: none
};
HA_HOST_DEVICE constexpr PairOfRanks pair_of_ranks(int pair, int pairs, int tiles) {
  int const alone = max_of(0, 2 * pairs - tiles);
  return {pair, alone <= pair && pair < tiles ? tiles - 1 - (pair - alone) : -1};
}

// Of a long tile, in blocks: how many of them the CTA takes that has the short one, which takes as long as
// `short_blocks`, so that both end at once. 0: none, since they are about as long as each other.
HA_HOST_DEVICE constexpr int blocks_to_share(int long_blocks, int short_blocks) {
  constexpr int kLeast = 2;  // as long as it takes to exchange them
  int const shared = (long_blocks - short_blocks) / 2;
  return shared < kLeast ? 0 : shared;
}

}  // namespace hopper_attention
