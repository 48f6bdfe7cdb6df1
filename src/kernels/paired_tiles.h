// Tiles of few sequences that are found by their rank, and of which the CTAs of a cluster share two, so that all have
// as much to do.
#pragma once

#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"
#include "kernels/lanes.h"

namespace hopper_attention {

// Sequences whose tiles are found by their rank: a lane of a warp holds a few of them. As many as shared memory has
// room for, in the kernels that rank tiles.
inline constexpr int kMostRankedSequences = 160;

// Of a head group all sequences together have no more tiles, and of a tile no more blocks are told apart.
inline constexpr int kMostRankedTiles = (1 << 10) - 1;
inline constexpr int kMostRankedBlocks = (1 << 22) - 1;

// What a rank follows from, of a sequence.
struct RankedSequence {
  int reach = 0;  // keys before which the last tile's view ends, if there were so many
  unsigned tiles : 10 = 0;
  unsigned most_blocks : 22 = 0;  // of the last tile
};

// How the lanes of a warp hold sequences.
struct SequencesOfLanes {
  int each = 1;
  int half = kLanes / 2;  // a power of 2: at least half of the lanes that hold any

  SequencesOfLanes() = default;
  explicit SequencesOfLanes(int batch) : each(max_of(1, ceil_div(batch, kLanes))) {
    while (half > 0 && half * each >= batch) { half /= 2; }
  }
};

// Tiles of up to kMostRankedSequences that are found by their rank, the longest first (RankedTiles).
struct RankedTileParams {
  FastDivmod queries;  // of a tile
  FastDivmod head_groups;
  SequencesOfLanes of_lanes;
  FastDivmod groups;  // head groups of all sequences, where these are alike
  int alike = 0;      // tiles that each of these has at most; 0: lengths on the device tell
  int ctas = 0;       // that take whole tiles, by turns from either end; 0: those of a cluster share two
};

// CTAs of a cluster that may share tiles.
inline constexpr int kPairClusters[] = {2, 3, 4, 8};

// CTAs of a cluster, and those but its first: divisions by them are on the way to a CTA's first keys.
struct ClusterSize {
  FastDivmod ctas;
  FastDivmod others;

  ClusterSize() = default;
  explicit ClusterSize(int size) : ctas(size), others(size - 1) {}
};

// Tiles by their rank, two for each cluster: a long one and the shortest that is left. Where there are fewer than twice
// as many tiles as pairs, the longest ones are alone in theirs. Clusters take pairs in turn.
struct PairedTiles {
  int pairs = 0;
  int clusters = 0;
  ClusterSize size;
  FastDivmod warps;        // of a tile, whose rows one of them merges
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

// In blocks: what sharing a tile must save, since parts are merged, and what that takes.
inline constexpr int kWorthSharing = 2;

// How `ctas` of a cluster share a tile of `blocks`. The first one, which has the short tile of the pair, takes fewer of
// them, so that all end at once; `short_blocks` is how long it is at the short one, 0 where all share that, too. If
// that saves too little, the tile stays whole: a long one is the last CTA's, a short one the first's.
class TileShares {
 public:
  HA_HOST_DEVICE constexpr TileShares(int blocks, int short_blocks, ClusterSize const& size)
      : blocks_(blocks), others_(size.others) {
    first_ = size.ctas.quotient(max_of(0, blocks - others_.divisor * short_blocks));
    int const longest_of_others = others_.quotient(blocks - first_ + others_.divisor - 1);
    shared_ = blocks - max_of(first_, longest_of_others) >= kWorthSharing;
  }

  HA_HOST_DEVICE constexpr bool shared() const { return shared_; }
  // The blocks of a CTA, if they are shared: [begin(cta), begin(cta + 1)).
  HA_HOST_DEVICE constexpr int begin(int cta) const {
    return cta == 0 ? 0 : first_ + others_.quotient((cta - 1) * (blocks_ - first_));
  }

 private:
  int blocks_;
  FastDivmod const& others_;  // CTAs
  int first_;                 // blocks of the first CTA
  bool shared_;
};

// Whether all CTAs share the short tile, too: where one alone would still be at it when the others are done. Of two,
// none would.
HA_HOST_DEVICE constexpr bool is_short_shared(int long_blocks, int short_blocks, ClusterSize const& size) {
  return short_blocks > size.ctas.quotient(long_blocks + short_blocks) + 2 * kWorthSharing;
}

// Of `warps` that hold a tile's rows in each CTA, those whose rows one of the CTAs merges: the first so many are the
// last CTA's. Of two it merges all where the first one has a tile before, since what that sends is then mostly on its
// way while the last one still computes.
HA_HOST_DEVICE constexpr int warps_of_owner(int warps, int ctas, bool alone) {
  return ctas == 2 && !alone ? warps : ceil_div(warps, ctas);
}

// What the others send to an owner: of so many warps, all CTAs together.
HA_HOST_DEVICE constexpr int most_parts_of_owner(int warps) {
  int most = 0;
  for (int const ctas : kPairClusters) { most = max_of(most, warps_of_owner(warps, ctas, false) * (ctas - 1)); }
  return most;
}

}  // namespace hopper_attention
