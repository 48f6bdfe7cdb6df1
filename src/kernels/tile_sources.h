// The items of one CTA, one after the other, where each is a whole tile or a cluster's share of one.
#pragma once

#include "kernels/host_device.h"
#include "kernels/paired_tiles.h"
#include "kernels/params.h"
#include "kernels/schedule.h"
#include "kernels/tile_scheduler.h"
#include "kernels/tile_work.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// Of a call whose tiles follow from their index: dense, with lengths that are known, of one sequence, or in equal
// parts.
class DenseWorkSource {
 public:
  static constexpr bool kDraws = false;

  HA_HOST_DEVICE DenseWorkSource(AttentionParams const& params, int cta, bool in_parts)
      : params_(params),
        cta_(cta),
        in_parts_(in_parts),
        scheduler_(params.scheduler, in_parts ? params.parts.of_tile.quotient(cta) : cta) {}

  // The next item and its sequence; item.place is -1 at the end. Returns whether the list ends soon, which counts where
  // items are drawn.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    item.place = -1;
    if (!scheduler_.valid()) { return true; }
    Tile const tile = scheduler_.tile();
    scheduler_.advance();
    item = {.place = tile.batch, .head = tile.head, .m = tile.m};
    sequence = sequence_at(params_.sequences, tile.batch);
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
  TileScheduler scheduler_;
};

// Of a grid of clusters of two CTAs, which share two tiles (PairedTiles): under a causal mask a short one and a long
// one. The first CTA takes the short one, then the first keys of the long one, and sends the other CTA its part; that
// one takes the rest and merges. Lengths on the device are asked, so that tiles may be others than the host believed.
class PairedTileSource {
 public:
  static constexpr bool kDraws = false;

  // `slabs` and `keys` are the tile's.
  HA_HOST_DEVICE PairedTileSource(AttentionParams const& params, int slabs, int keys, int cta)
      : params_(params), slabs_(slabs), keys_(keys), second_(cta % 2 != 0), pair_(cta / 2) {}

  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    item = {};
    PairedTiles const& pairs = params_.pairs;
    if (!is_between_ && pair_ >= pairs.pairs) { return true; }
    if (!is_between_) { find_pair(); }
    sequence = sequence_;
    item.place = place_;
    item.head = head_;
    if (!second_ && !is_between_) {
      is_between_ = true;
      item.m = short_m_;  // of an odd number of tiles the one in the middle has no other: none
      return true;
    }
    is_between_ = false;
    pair_ += pairs.clusters;
    item.m = second_ || shared_ > 0 ? long_m_ : pairs.count;
    if (shared_ > 0) {
      item.first = second_ ? shared_ : 0;
      item.last = second_ ? long_blocks_ : shared_;
      item.units = long_blocks_;
      item.in_cluster = true;
    }
    return true;
  }

 private:
  HA_HOST_DEVICE void find_pair() {
    PairedTiles const& pairs = params_.pairs;
    int const group = pairs.pairs_of_group.quotient(pair_);
    int const m = pair_ - group * pairs.pairs_of_group.divisor;
    int const mirror = pairs.count - 1 - m;
    place_ = pairs.head_groups.quotient(group);
    head_ = group - place_ * pairs.head_groups.divisor;
    sequence_ = sequence_at(params_.sequences, place_);
    int blocks = 0;
    int blocks_of_mirror = 0;
    HA_NO_UNROLL
    for (int i = 0; i < 2; ++i) {  // a loop, since what takes time is bringing instructions that run once
      WorkItem const whole{.place = place_, .head = head_, .m = i == 0 ? m : mirror};
      blocks = blocks_of_mirror;
      blocks_of_mirror = tile_work(params_, slabs_, keys_, whole, sequence_).range.blocks();
    }
    bool const has_short = m != mirror;
    bool const mirror_is_long = blocks_of_mirror >= blocks;
    long_m_ = mirror_is_long ? mirror : m;
    short_m_ = !has_short ? pairs.count : mirror_is_long ? m : mirror;
    long_blocks_ = max_of(blocks, blocks_of_mirror);
    shared_ = has_short ? blocks_to_share(long_blocks_, min_of(blocks, blocks_of_mirror), pairs.blocks_of_ends)
                        : blocks_to_share(long_blocks_, 0, 0);
  }

  AttentionParams const& params_;
  int slabs_;
  int keys_;
  bool second_;  // CTA of its cluster
  int pair_;
  bool is_between_ = false;  // the first CTA has begun the pair, and has not been given its part of the long tile
  int place_ = 0;
  int head_ = 0;
  Sequence sequence_{};
  int long_m_ = 0;
  int short_m_ = 0;
  int long_blocks_ = 0;
  int shared_ = 0;  // blocks of the long tile that the first CTA takes
};

// Of a grid of clusters: tiles follow from their index. Sequences with more queries than a tile holds give it more
// tiles.
class ClusterWorkSource {
 public:
  static constexpr bool kDraws = false;

  HA_HOST_DEVICE ClusterWorkSource(AttentionParams const& params, int cta)
      : params_(params), tile_(params.cluster.first_tile(cta)) {
    int const ctas = params.cluster.ctas_of_tile.divisor;
    int const rank = ctas == 1 ? 0 : cta - tile_ * ctas;
    item_ = {.first = rank,
             .last = rank + 1,
             .units = ctas,
             .slot = params.cluster.slot(cta),
             .in_cluster = params.cluster.size > 1};
  }

  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    ClusterParams const& cluster = params_.cluster;
    // A slot of the workspace takes one tile.
    if (item_.m > 0 && (item_.slot >= 0 || item_.m * params_.packing.queries_per_slab >= sequence_.len.q)) {
      item_.m = 0;
      tile_ += cluster.at_once;
    }
    item = {};
    if (tile_ >= cluster.tiles) { return true; }
    if (item_.m == 0) {
      item_.place = cluster.sequence(tile_);
      item_.head = tile_ - item_.place * cluster.tiles_of_sequence.divisor;
      sequence_ = sequence_at(params_.sequences, item_.place);
    }
    item = item_;
    sequence = sequence_;
    if (cluster.first_takes_all(sequence_.len)) {
      item.units = cluster.size;
      item.slot = -1;
      if (item.first >= cluster.size) { item = {}; }  // nothing for the others, which have no second tile
    }
    ++item_.m;
    return true;
  }

 private:
  AttentionParams const& params_;
  int tile_;
  WorkItem item_;
  Sequence sequence_{};
};

// Of a grid whose CTAs draw whole tiles, one for each sequence and head group, in the order of the schedule. Nothing
// else of it is needed: a call of 255 us takes 2.5 less than with WorkSource.
class DrawnTileSource {
 public:
  static constexpr bool kDraws = true;

  HA_HOST_DEVICE explicit DrawnTileSource(AttentionParams const& params)
      : params_(params),
        draws_{.count = params.cluster.tiles, .ctas = params.cluster.at_once, .counter = params.cluster.metadata} {}

  // Sequences with more queries than a tile holds give it more tiles.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    ClusterParams const& cluster = params_.cluster;
    ++item_.m;
    if (item_.place < 0 || item_.m * params_.packing.queries_per_slab >= sequence_.len.q) {
      item_ = {};
      int const tile = draw(draws_);
      if (tile >= 0 && tile < cluster.tiles) {
        item_.place = cluster.sequence(tile);
        item_.head = tile - item_.place * cluster.tiles_of_sequence.divisor;
        int const* const order = cluster.metadata + 1 + kSequenceAt * schedule_stride(params_.sequences.batch);
        sequence_ = sequence_at(params_.sequences, clamped(order[item_.place], 0, params_.sequences.batch - 1));
      }
    }
    item = item_;
    sequence = sequence_;
    return true;
  }

 private:
  AttentionParams const& params_;
  Draws draws_;
  WorkItem item_;
  Sequence sequence_{};
};

}  // namespace hopper_attention
