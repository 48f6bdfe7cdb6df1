// The items of one CTA, one after the other, where each is a whole tile or a cluster's share of one.
#pragma once

#include "kernels/cluster_tiles.h"
#include "kernels/host_device.h"
#include "kernels/paired_tiles.h"
#include "kernels/params.h"
#include "kernels/ranked_tiles.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/sequence_work.h"
#include "kernels/tile_scheduler.h"
#include "kernels/tile_work.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// Of a call whose tiles follow from their index: dense, with lengths that are known or short, of one sequence, or in
// equal parts.
class DenseWorkSource {
 public:
  static constexpr bool kDraws = false;

  // `queries` of a tile, where sequences may have more of them than the bound says: whoever has the last tile of such
  // a sequence takes those behind it, too. 0: none has.
  HA_HOST_DEVICE DenseWorkSource(AttentionParams const& params, int cta, bool in_parts, int queries = 0)
      : params_(params),
        cta_(cta),
        in_parts_(in_parts),
        queries_(in_parts ? 0 : queries),
        scheduler_(params.scheduler, in_parts ? params.parts.of_tile.quotient(cta) : cta) {}

  // The next item and its sequence; item.place is -1 at the end. Returns whether the list ends soon, which counts where
  // items are drawn.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    item.place = -1;
    if (!scheduler_.valid()) { return true; }
    Tile const tile = scheduler_.tile();
    item = {.place = tile.batch, .head = tile.head, .m = tile.m + behind_};
    sequence = sequence_at(params_.sequences, tile.batch);
    bool const is_last = item.m + 1 >= params_.scheduler.m_blocks;
    if (queries_ > 0 && is_last && (item.m + 1) * queries_ < sequence.len.q) {
      ++behind_;
    } else {
      behind_ = 0;
      scheduler_.advance();
    }
    if (in_parts_) {
      item.first = params_.parts.of_tile.remainder(cta_);
      if (!params_.parts.first_takes_all(sequence.len)) {
        item.last = item.first + 1;
        item.units = params_.parts.of_tile.divisor;
        item.slot = cta_;
      } else if (item.first > 0) {
        item.place = -1;
      }
    }
    return true;
  }

 private:
  AttentionParams const& params_;
  int cta_;
  bool in_parts_;
  int queries_;
  int behind_ = 0;  // tiles behind the last one that the bound knows
  TileScheduler scheduler_;
};

// Of a grid for the tiles of few sequences. In the first round the longest ones are taken, in the second one a CTA
// takes the shorter one the longer its first was.
class RankedTileSource {
 public:
  static constexpr bool kDraws = false;

  // `keys` of a block; `room` as RankedTiles wants it.
  HA_HOST_DEVICE RankedTileSource(AttentionParams const& params, int keys, int cta, RankedSequence* room)
      : params_(params), tiles_(params, keys, room), rank_(cta), mirrored_(2 * params.ranked.ctas - 1 - cta) {}

  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    Tile const tile = tiles_.tile(rank_);
    item = {.place = tile.batch, .head = tile.head, .m = tile.m};
    if (tile.batch >= 0) { sequence = sequence_at(params_.sequences, tile.batch); }
    int const next_round = rank_ + 2 * params_.ranked.ctas;
    rank_ = mirrored_;
    mirrored_ = next_round;
    return true;
  }

 private:
  AttentionParams const& params_;
  RankedTiles tiles_;
  int rank_;
  int mirrored_;  // the rank behind it
};

// Of a grid of clusters whose CTAs share two tiles (PairedTiles): the first CTA takes the short one, or all share that,
// too; then the first one's part of the long one, of which the others have the rest. Tiles: AlikeTiles or RankedTiles.
template <class Tiles>
class PairedTileSource {
 public:
  static constexpr bool kDraws = false;

  // `slabs` and `keys` are the tile's; `room` as RankedTiles wants it.
  HA_HOST_DEVICE PairedTileSource(AttentionParams const& params, int slabs, int keys, int cta, RankedSequence* room)
      : params_(params),
        tiles_(params, keys, room),
        slabs_(slabs),
        keys_(keys),
        rank_(params.pairs.size.ctas.remainder(cta)),
        pair_(params.pairs.size.ctas.quotient(cta)) {}

  // What next() has found.
  HA_HOST_DEVICE TileWork work(WorkItem const& item, Sequence const& sequence) const {
    TileWork work{item.head, params_.load.groups_per_head_k.quotient(item.head), queries_, sequence};
    work.range = part_of(range_, item.first, item.last, item.units);
    work.in_cluster = item.in_cluster;
    return work;
  }

  // Each CTA counts the blocks of both tiles, whether it takes a part of them or not.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    ClusterSize const& size = params_.pairs.size;
    int const ctas = size.ctas.divisor;
    for (;;) {
      item = {};
      if (pair_ >= params_.pairs.pairs) { return true; }
      PairOfRanks const ranks = pair_of_ranks(pair_, params_.pairs.pairs, tiles_.count());
      bool const alone = ranks.second < 0;
      Step const step = alone ? Step::kLong : ctas == 2 && step_ == Step::kCountLong ? Step::kShort : step_;
      step_ = step == Step::kCountLong ? Step::kShort : step == Step::kShort ? Step::kLong : Step::kCountLong;
      int const blocks = count(step == Step::kShort ? ranks.second : ranks.first, item, sequence);
      if (step == Step::kCountLong) {
        blocks_of_long_ = blocks;
        continue;
      }
      bool may_share = true;
      int beside = 0;
      if (step == Step::kShort) {
        int const by_one = item.place >= 0 ? blocks + params_.pairs.blocks_of_ends : 0;
        may_share = ctas > 2 && is_short_shared(blocks_of_long_, by_one, size);
        blocks_of_short_ = may_share ? 0 : by_one;
      } else {
        pair_ += params_.pairs.clusters;
        beside = alone ? 0 : blocks_of_short_;
      }
      bool takes = rank_ == (step == Step::kShort ? 0 : ctas - 1);
      if (may_share) {
        TileShares const shares(blocks, beside, size);
        if (shares.shared()) {
          takes = true;
          item.first = shares.begin(rank_);
          item.last = shares.begin(rank_ + 1);
          item.units = blocks;
          item.in_cluster = true;
        }
      }
      if (takes && item.place >= 0) { return true; }
    }
  }

 private:
  enum class Step { kCountLong, kShort, kLong };  // of a pair

  // The tile of a rank, and its blocks. item.place is -1 if there is none.
  HA_HOST_DEVICE int count(int rank, WorkItem& item, Sequence& sequence) {
    Tile const tile = rank >= 0 ? tiles_.tile(rank) : kNoTile;
    if (tile.batch < 0) { return 0; }
    sequence = sequence_at(params_.sequences, tile.batch);
    item = {.place = tile.batch, .head = tile.head, .m = tile.m};
    TileWork const work = tile_work(params_, slabs_, keys_, item, sequence);
    queries_ = work.queries;
    range_ = work.range;
    return range_.blocks();
  }

  AttentionParams const& params_;
  Tiles tiles_;
  int slabs_;
  int keys_;
  int rank_;  // in the cluster
  int pair_;
  Step step_ = Step::kCountLong;
  QueryRange queries_{0, -1};  // of the last tile
  BlockRange range_{};         // of the whole of it
  int blocks_of_long_ = 0;
  int blocks_of_short_ = 0;  // with what starting and ending it takes; 0: all share it
};

// Of a sequence of few queries, one tile after the other: whether tile `m` does not exist, or another kernel has it.
HA_HOST_DEVICE bool is_done(AttentionParams const& params, Sequence const& sequence, int m) {
  return m * params.packing.queries_per_slab >= sequence.len.q || !params.takes(sequence);
}

// In how many parts each tile of a sequence of few queries is, if they follow from it alone.
HA_HOST_DEVICE int parts_of_tile(AttentionParams const& params, int keys, Sequence const& sequence) {
  TileShape const shape{.queries = max_of(1, sequence.len.q), .keys = keys, .fixed_split = params.cluster.longest_part};
  bool const may_have_several = params.cluster.longest_part > 0 && params.takes(sequence);
  return may_have_several ? sequence_work(shape, params.mask, sequence.len).units : 1;
}

// Of a grid of clusters: tiles follow from their index (`Tiles`: OneTileEach or SeveralTilesEach). Where these are a
// number for each sequence, those with more queries than they hold give their clusters more tiles.
template <class Tiles>
class ClusterWorkSource {
 public:
  static constexpr bool kDraws = false;

  HA_HOST_DEVICE ClusterWorkSource(AttentionParams const& params, int cta)
      : params_(params), tile_(params.cluster.first_tile(cta)) {
    int const ctas = params.cluster.ctas_of_tile.divisor;
    int const rank = ctas == 1 ? 0 : cta - tile_ * ctas;
    item_.first = rank;
    item_.last = rank + 1;
    item_.units = ctas;
    item_.slot = params.cluster.slot(cta);
    item_.in_cluster = params.cluster.size > 1;
  }

  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    ClusterParams const& cluster = params_.cluster;
    int const step = Tiles::kSeveral ? cluster.tiles_of_group.divisor : 1;
    // A slot of the workspace takes one tile.
    bool const takes_one = item_.slot >= 0 || (Tiles::kSeveral && cluster.packed);
    if (item_.m >= step && (takes_one || is_done(params_, sequence_, item_.m))) {
      item_.m = 0;
      tile_ += cluster.at_once;
    }
    item = {};
    if (tile_ >= cluster.tiles) { return true; }
    if (item_.m < step) {
      Tile const tile = Tiles::tile(params_, tile_);
      if (Tiles::kSeveral && tile.batch < 0) { return true; }
      item_.place = tile.batch;
      item_.head = tile.head;
      item_.m = tile.m;
      sequence_ = sequence_at(params_.sequences, item_.place);
    }
    item = item_;
    sequence = sequence_;
    if (cluster.first_takes_all(sequence_.len)) {
      item.units = cluster.size;
      item.slot = -1;
      if (item.first >= cluster.size) { item = {}; }  // nothing for the others, which have no second tile
    }
    item_.m += step;
    return true;
  }

 private:
  AttentionParams const& params_;
  int tile_;
  WorkItem item_;
  Sequence sequence_{};
};

// Of a grid of clusters, all at once, whose tiles are in parts that follow from them alone: a CTA takes one part where
// the cluster has one for each, else a group of them, one after the other (merged_row.h). `keys` of a block.
class ClusterPartsSource {
 public:
  static constexpr bool kDraws = false;

  HA_HOST_DEVICE ClusterPartsSource(AttentionParams const& params, int keys, int cta) : params_(params) {
    ClusterParams const& cluster = params.cluster;
    int const index = cluster.first_tile(cta);
    int const rank = cta - index * cluster.size;
    if (index >= cluster.tiles) { return; }
    Tile const tile = cluster.tile(index);
    item_.place = tile.batch;
    item_.head = tile.head;
    sequence_ = sequence_at(params.sequences, item_.place);
    item_.units = parts_of_tile(params, keys, sequence_);
    item_.in_cluster = item_.units > 1;
    one_each_ = item_.units <= cluster.size;
    int const parts = one_each_ ? 1 : kPartsOfGroup;
    begin_ = min_of(rank * parts, item_.units);
    // The last one takes what there is, if the bound was too small.
    end_ = rank + 1 == cluster.size ? item_.units : min_of(begin_ + parts, item_.units);
    item_.first = begin_;
    if (!item_.in_cluster && rank > 0) { item_.place = -1; }
  }

  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    item_.last = min_of(item_.first + 1, end_);
    item_.part = !item_.in_cluster ? TilePart::kWhole
                 : one_each_       ? TilePart::kPart
                                   : folded_part(item_.first, begin_, end_);
    item = item_;
    sequence = sequence_;
    if (item_.place < 0) { return true; }
    item_.first = item_.last < end_ ? item_.last : begin_;
    // Sequences with more queries than a tile holds give it more tiles.
    if (item_.first == begin_ && is_done(params_, sequence_, ++item_.m)) { item_.place = -1; }
    return true;
  }

 private:
  AttentionParams const& params_;
  int begin_ = 0;  // of the CTA's parts
  int end_ = 0;
  bool one_each_ = false;
  WorkItem item_;
  Sequence sequence_{};
};

// Whole tiles of few queries that CTAs draw, one for each place of the schedule and head group.
struct DrawnTiles {
  Draws draws;
  int first = 0;               // place
  int const* order = nullptr;  // sequence at each place; nullptr: places are sequences
};

// Of all places, where nothing but their order is asked of the schedule: a call of 255 us takes 2.5 less so than where
// its numbers are read.
HA_HOST_DEVICE DrawnTiles drawn_tiles(ClusterParams const& cluster, int batch) {
  return {.draws = {.count = cluster.tiles,
                    .ctas = cluster.at_once,
                    .own_item = cluster.own_first,
                    .counter = cluster.metadata},
          .order = where_is(cluster.metadata, schedule_stride(batch), kSequenceAt)};
}

// Of the places that a kernel takes. Those without queries are the last, and none is drawn for them.
HA_HOST_DEVICE DrawnTiles drawn_tiles(Schedule const& schedule, ScheduleParams const& params) {
  int const places = schedule.end() - schedule.begin();
  return {.draws = schedule.draws(min_of(places * params.head_groups.divisor, schedule.tiles())),
          .first = schedule.begin(),
          .order = params.metadata == nullptr ? nullptr : where_is(params.metadata, params.stride, kSequenceAt)};
}

class DrawnTileSource {
 public:
  static constexpr bool kDraws = true;

  HA_HOST_DEVICE DrawnTileSource(AttentionParams const& params, DrawnTiles const& tiles)
      : params_(params), tiles_(tiles) {}

  // Sequences with more queries than a tile holds give it more tiles.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    ++item_.m;
    if (item_.place < 0 || is_done(params_, sequence_, item_.m)) {
      item_ = {};
      int const tile = draw(tiles_.draws);
      if (tile >= 0 && tile < tiles_.draws.count) {
        FastDivmod const& head_groups = params_.cluster.head_groups;
        int const of_list = head_groups.quotient(tile);
        item_.place = tiles_.first + of_list;
        item_.head = tile - of_list * head_groups.divisor;
        int const b = tiles_.order == nullptr ? item_.place : tiles_.order[item_.place];
        sequence_ = sequence_at(params_.sequences, clamped(b, 0, params_.sequences.batch - 1));
      }
    }
    item = item_;
    sequence = sequence_;
    return true;
  }

 private:
  AttentionParams const& params_;
  DrawnTiles tiles_;
  WorkItem item_;
  Sequence sequence_{};
};

// The same of tiles in parts that follow from them alone: an item for each, one after the other. `keys` of a block.
class FoldedTileSource {
 public:
  static constexpr bool kDraws = true;

  HA_HOST_DEVICE FoldedTileSource(AttentionParams const& params, DrawnTiles const& tiles, int keys)
      : params_(params), keys_(keys), tiles_(params, tiles) {}

  // The list may end soon behind a whole tile.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    if (item_.last < item_.units) {
      item_.first = item_.last++;
    } else {
      tiles_.next(item_, sequence_, draw);
      if (item_.place >= 0) { item_.units = parts_of_tile(params_, keys_, sequence_); }
    }
    if (item_.units > 1) { item_.part = folded_part(item_.first, 0, item_.units); }
    item = item_;
    sequence = sequence_;
    return item_.last == item_.units;
  }

 private:
  AttentionParams const& params_;
  int keys_;
  DrawnTileSource tiles_;
  WorkItem item_;
  Sequence sequence_{};
};

}  // namespace hopper_attention
