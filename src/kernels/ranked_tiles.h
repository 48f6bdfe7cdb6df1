// The tiles of a few sequences in order of their length, without a schedule. A tile's rank counts the tiles before it.
#pragma once

#include "kernels/cluster_tiles.h"
#include "kernels/lanes.h"
#include "kernels/params.h"
#include "kernels/sequence_work.h"
#include "kernels/sequences.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

// Whether tiles get longer along a sequence until they are as long as a window lets them be.
HA_HOST_DEVICE constexpr bool tiles_rise(MaskParams const& mask) {
  return mask.right != kUnlimited && mask.chunk == 0 && mask.cp_world <= 1;
}

// Of sequences that are alike: a rank is a query block of all of them, and no length is asked.
class AlikeTiles {
 public:
  HA_HOST_DEVICE AlikeTiles(AttentionParams const& params, int /*keys*/, RankedSequence* /*room*/)
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

// Of others: the lanes of a warp have a few sequences each, and sums over the lanes tell which tile has a rank. Those
// that the kernel does not take have no tiles.
// Before a tile come longer ones, in key blocks, and of those that are as long the ones of sequences before; the head
// groups of a tile come one after another. Under a causal mask or a window tiles get longer by as many keys as they
// have queries; under others those of a sequence count as alike. Where blocks and slabs begin is not asked: a tile may
// have a block more or fewer. All lanes. How long the code is counts for more than how often it runs: a CTA needs it
// two to four times, and fetches it on the way to its first keys.
class RankedTiles {
 public:
  // `keys` of a block; `room`, in shared memory, for kMostRankedSequences: registers have none.
  HA_HOST_DEVICE RankedTiles(AttentionParams const& params, int keys, RankedSequence* room)
      : params_(params), room_(room), keys_(keys), rise_(tiles_rise(params.mask)) {
    PerLane<int> tiles;
    PerLane<int> most_blocks;
    in_each_lane([&](int lane) {
      HA_NO_UNROLL
      for (int i = of_lane() - 1; i >= 0; --i) {
        int const index = lane * of_lane() + i;
        RankedSequence const s = index < params_.sequences.batch ? ranked_sequence(index) : RankedSequence{};
        at(lane, i) = s;
        first_[lane] = s;
        tiles[lane] += static_cast<int>(s.tiles);
        most_blocks[lane] = max_of(most_blocks[lane], static_cast<int>(s.most_blocks));
      }
    });
    of_group_ = sum_over_lanes([&](int lane) { return tiles[lane]; });
    most_blocks_ = most_of_lanes([&](int lane) { return most_blocks[lane]; });
  }

  HA_HOST_DEVICE int count() const { return of_group_ * params_.ranked.head_groups.divisor; }

  // kNoTile if there are not so many.
  HA_HOST_DEVICE Tile tile(int rank) const {
    FastDivmod const& head_groups = params_.ranked.head_groups;
    int const index = head_groups.quotient(rank);
    if (index >= of_group_) { return kNoTile; }
    int blocks = -1;  // of the tile: more than `index` tiles have at least as many
    int too_many = most_blocks_ + 1;
    PerLane<int> with_blocks;  // tiles of a lane's sequences
    PerLane<int> longer;
    HA_NO_UNROLL
    while (too_many - blocks > 1) {
      int const middle = (blocks + too_many) >> 1;
      PerLane<int> tiles;
      in_each_lane([&](int lane) { tiles[lane] = tiles_of_lane(lane, middle); });
      bool const is_reached = sum_over_lanes([&](int lane) { return tiles[lane]; }) > index;
      blocks = is_reached ? middle : blocks;
      too_many = is_reached ? too_many : middle;
      in_each_lane([&](int lane) {
        with_blocks[lane] = is_reached ? tiles[lane] : with_blocks[lane];
        longer[lane] = is_reached ? longer[lane] : tiles[lane];
      });
    }
    int const among_alike = index - sum_over_lanes([&](int lane) { return longer[lane]; });
    int place = 0;  // the last lane before which there are no more
    int before = 0;
    HA_NO_UNROLL
    for (int step = params_.ranked.of_lanes.half; step > 0; step /= 2) {
      int const there =
          sum_over_lanes([&](int lane) { return lane < place + step ? with_blocks[lane] - longer[lane] : 0; });
      place += there <= among_alike ? step : 0;
      before = there <= among_alike ? there : before;
    }
    for (int i = 0;; ++i) {  // of its sequences the last one before which there are no more
      RankedSequence const s = at(place, i);
      int const longer_ones = tiles_with(s, too_many);
      int const after = before + tiles_with(s, blocks) - longer_ones;
      if (after > among_alike || i + 1 >= of_lane()) {
        int const m = among_alike - before + longer_ones;
        return {rise_ ? static_cast<int>(s.tiles) - 1 - m : m, rank - index * head_groups.divisor,
                place * of_lane() + i};
      }
      before = after;
    }
  }

 private:
  HA_HOST_DEVICE int of_lane() const { return params_.ranked.of_lanes.each; }
  HA_HOST_DEVICE RankedSequence& at(int lane, int i) const { return room_[i * kLanes + lane]; }

  HA_HOST_DEVICE RankedSequence ranked_sequence(int index) const {
    Sequence const sequence = sequence_at(params_.sequences, index);
    if (!params_.takes(sequence)) { return {}; }
    SeqlenQK const len = sequence.len;
    SequenceWork const work = even_work(TileShape{params_.ranked.queries.divisor, keys_}, params_.mask, len);
    // Beside the keys of the sequence, of which the last tile cannot see more.
    int const beyond = rise_ ? min_of(params_.mask.right, len.q) : 0;
    return {len.k + beyond, static_cast<unsigned>(min_of(work.tiles, kMostRankedTiles)),
            static_cast<unsigned>(len.k > 0 ? min_of(work.units, kMostRankedBlocks) : 0)};
  }

  // Tiles with at least `blocks` key blocks, of one head group.
  HA_HOST_DEVICE int tiles_with(RankedSequence const& s, int blocks) const {
    auto const all = static_cast<int>(s.tiles);
    if (blocks <= 0) { return all; }
    if (blocks > static_cast<int>(s.most_blocks)) { return 0; }
    return rise_ ? min_of(params_.ranked.queries.quotient(s.reach - (blocks - 1) * keys_ - 1) + 1, all) : all;
  }
  HA_HOST_DEVICE int tiles_of_lane(int lane, int blocks) const {
    int sum = tiles_with(first_[lane], blocks);
    HA_NO_UNROLL
    for (int i = 1; i < of_lane(); ++i) { sum += tiles_with(at(lane, i), blocks); }
    return sum;
  }

  AttentionParams const& params_;
  RankedSequence* room_;
  int keys_;
  bool rise_;
  int of_group_ = 0;  // tiles of one head group
  int most_blocks_ = 0;
  PerLane<RankedSequence> first_;  // of `room_`, what calls of few sequences need
};

}  // namespace hopper_attention
