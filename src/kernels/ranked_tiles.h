// The tiles of a few sequences in order of their length, without a schedule. A tile's rank counts the tiles before it.
#pragma once

#include "kernels/lanes.h"
#include "kernels/params.h"
#include "kernels/schedule.h"
#include "kernels/sequences.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

inline constexpr Tile kNoTile{0, 0, -1};

// Whether tiles get longer along a sequence until they are as long as a window lets them be.
HA_HOST_DEVICE constexpr bool tiles_rise(MaskParams const& mask) {
  return mask.right != kUnlimited && mask.chunk == 0 && mask.cp_world <= 1;
}

// Of sequences that are alike: a rank is a query block of all of them, and no length is asked.
class AlikeTiles {
 public:
  HA_HOST_DEVICE AlikeTiles(AttentionParams const& params, int /*keys*/)
      : ranked_(params.ranked), rise_(tiles_rise(params.mask)) {}

  HA_HOST_DEVICE int count() const { return ranked_.alike * ranked_.groups.divisor; }

  // kNoTile if there are not so many.
  HA_HOST_DEVICE Tile tile(int rank) const {
    int const index = ranked_.groups.quotient(rank);
    if (index >= ranked_.alike) { return kNoTile; }
    int const group = rank - index * ranked_.groups.divisor;
    int const sequence = ranked_.head_groups.quotient(group);
    return {rise_ ? ranked_.alike - 1 - index : index, group - sequence * ranked_.head_groups.divisor, sequence};
  }

 private:
  RankedTileParams const& ranked_;
  bool rise_;
};

// Of others: the lanes of a warp have a sequence each, and sums over the lanes tell which tile has a rank. Before a
// tile come longer ones, in key blocks, and of those that are as long the ones of sequences before; the head groups of
// a tile come one after another. Under a causal mask or a window tiles get longer by as many keys as they have queries;
// under others those of a sequence count as alike. Where blocks and slabs begin is not asked: a tile may have a block
// more or fewer. All lanes.
class RankedTiles {
 public:
  // `keys` of a block.
  HA_HOST_DEVICE RankedTiles(AttentionParams const& params, int keys)
      : params_(params), keys_(keys), rise_(tiles_rise(params.mask)) {
    in_each_lane([&](int lane) {
      if (lane >= params_.sequences.batch) { return; }
      SeqlenQK const len = sequence_at(params_.sequences, lane).len;
      SequenceWork const work = even_work({params_.ranked.queries.divisor, keys_}, params_.mask, len);
      // Beside the keys of the sequence, of which the last tile cannot see more.
      int const beyond = rise_ ? min_of(params_.mask.right, len.q) : 0;
      sequence_[lane] = {work.tiles, len.k > 0 ? work.units : 0, len.k + beyond};
    });
    of_group_ = tiles_with(0);
  }

  HA_HOST_DEVICE int count() const { return of_group_ * params_.ranked.head_groups.divisor; }

  // kNoTile if there are not so many.
  HA_HOST_DEVICE Tile tile(int rank) const {
    FastDivmod const& head_groups = params_.ranked.head_groups;
    int const index = head_groups.quotient(rank);
    if (index >= of_group_) { return kNoTile; }
    int blocks = 0;  // of the tile: more than `index` tiles have at least as many
    int too_many = 1 + most_of_lanes([&](int lane) { return sequence_[lane].most_blocks; });
    HA_NO_UNROLL
    while (too_many - blocks > 1) {
      int const middle = (blocks + too_many) / 2;
      bool const is_reached = tiles_with(middle) > index;
      blocks = is_reached ? middle : blocks;
      too_many = is_reached ? too_many : middle;
    }
    PerLane<int> longer;
    PerLane<int> as_long;
    in_each_lane([&](int lane) {
      longer[lane] = tiles_of_sequence(lane, blocks + 1);
      as_long[lane] = tiles_of_sequence(lane, blocks) - longer[lane];
    });
    int const among_alike = index - sum_over_lanes([&](int lane) { return longer[lane]; });
    int place = 0;  // the last one before which there are no more
    int before = 0;
    HA_NO_UNROLL
    for (int step = kLanes / 2; step > 0; step /= 2) {
      int const there = sum_over_lanes([&](int lane) { return lane < place + step ? as_long[lane] : 0; });
      place += there <= among_alike ? step : 0;
      before = there <= among_alike ? there : before;
    }
    int const m = among_alike - before + value_of_lane(place, [&](int lane) { return longer[lane]; });
    return {rise_ ? value_of_lane(place, [&](int lane) { return sequence_[lane].tiles; }) - 1 - m : m,
            rank - index * head_groups.divisor, place};
  }

 private:
  struct OfSequence {
    int tiles = 0;
    int most_blocks = 0;  // of its last tile
    int reach = 0;        // keys before which the last tile's view ends, if there were so many
  };

  // With at least `blocks` key blocks, of one head group.
  HA_HOST_DEVICE int tiles_of_sequence(int lane, int blocks) const {
    OfSequence const& s = sequence_[lane];
    if (blocks <= 0) { return s.tiles; }
    if (blocks > s.most_blocks) { return 0; }
    return rise_ ? min_of(params_.ranked.queries.quotient(s.reach - (blocks - 1) * keys_ - 1) + 1, s.tiles) : s.tiles;
  }
  HA_HOST_DEVICE int tiles_with(int blocks) const {
    return sum_over_lanes([&](int lane) { return tiles_of_sequence(lane, blocks); });
  }

  AttentionParams const& params_;
  int keys_;
  bool rise_;
  int of_group_ = 0;  // tiles of one head group
  PerLane<OfSequence> sequence_;
};

}  // namespace hopper_attention
