// The items of one CTA, one after the other, from the list of tiles of a dense call or from the schedule of a step.
#pragma once

#include "kernels/host_device.h"
#include "kernels/params.h"
#include "kernels/schedule.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

// The first place in [begin, end) whose `until(place)` is greater than `x`; `end` if there is none; some place where
// `until` decreases. All lanes of a warp ask together and look at 32 places at a time; the host does what they do.
template <class Until>
HA_HOST_DEVICE int find_place(int begin, int end, int x, Until until) {
  while (begin < end) {
    int const step = ceil_div(end - begin, 32);
    auto const lies_before = [&](int lane) {
      int const probe = begin + (lane + 1) * step - 1;
      return probe < end && until(probe) <= x;
    };
#if defined(__CUDA_ARCH__)
    int const count = __popc(__ballot_sync(0xffffffff, lies_before(static_cast<int>(threadIdx.x % 32))));
#else
    int count = 0;
    for (int lane = 0; lane < 32; ++lane) { count += lies_before(lane) ? 1 : 0; }
#endif
    begin += count * step;
    if (step == 1) { break; }
    end = min_of(end, begin + step - 1);
  }
  return begin;
}

// A place, and what of the list lies before it and up to its end (tiles or units, of all head groups).
struct FoundPlace {
  int place = -1;
  int before = 0;
  int until = 0;

  HA_HOST_DEVICE constexpr bool holds(int x) const { return place >= 0 && before <= x && x < until; }
};

// What CTAs draw from: tiles or chunks.
struct Draws {
  int count = 0;
  int* counter = nullptr;
};

// Of a dense call whose CTAs take whole tiles: they follow from their index.
class DenseWorkSource {
 public:
  HA_HOST_DEVICE DenseWorkSource(AttentionParams const& params, int cta)
      : params_(params), scheduler_(params.scheduler, cta) {}

  template <class Draw>
  HA_HOST_DEVICE void next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    item = {};
    if (!scheduler_.valid()) { return; }
    Tile const tile = scheduler_.tile();
    scheduler_.advance();
    item.place = tile.batch;
    item.head = tile.head;
    item.m = tile.m;
    sequence = sequence_at(params_.sequences, tile.batch);
  }

 private:
  AttentionParams const& params_;
  TileScheduler scheduler_;
};

// Of a grid of clusters: tiles follow from their index. Sequences with more queries than a tile holds give it more
// tiles.
class ClusterWorkSource {
 public:
  HA_HOST_DEVICE ClusterWorkSource(AttentionParams const& params, int cta)
      : params_(params), tile_(params.cluster.first_tile(cta)) {
    int const rank = cta - tile_ * params.cluster.size;
    item_ = {.first = rank, .last = rank + 1, .units = params.cluster.size};
  }

  template <class Draw>
  HA_HOST_DEVICE void next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    ClusterParams const& cluster = params_.cluster;
    if (item_.m > 0 && item_.m * params_.packing.queries_per_slab >= sequence_.len.q) {
      item_.m = 0;
      tile_ += cluster.clusters;
    }
    item = {};
    if (tile_ >= cluster.tiles) { return; }
    if (item_.m == 0) {
      item_.place = cluster.sequence(tile_);
      item_.head = tile_ - item_.place * cluster.tiles_of_sequence.divisor;
      sequence_ = sequence_at(params_.sequences, item_.place);
    }
    item = item_;
    sequence = sequence_;
    ++item_.m;
  }

 private:
  AttentionParams const& params_;
  int tile_;
  WorkItem item_;
  Sequence sequence_{};
};

class WorkSource {
 public:
  HA_HOST_DEVICE WorkSource(AttentionParams const& params, int slabs)
      : params_(params), schedule_(params.schedule), queries_per_tile_(params.packing.queries_per_slab * slabs) {
    by_units_ = schedule_.by_units();
    if (by_units_) { chunks_ = schedule_.chunks(); }
    draws_ = {by_units_ ? chunks_.count : schedule_.tiles(), schedule_.counter()};
  }

  // The next item and its sequence; item.place is -1 at the end. `draw(Draws)` hands out 0, 1, 2, ... among all CTAs.
  template <class Draw>
  HA_HOST_DEVICE void next(WorkItem& item, Sequence& sequence, Draw draw) {
    if (by_units_) {
      next_units(item, sequence, draw);
    } else {
      next_tile(item, sequence, draw(draws_));
    }
  }

 private:
  HA_HOST_DEVICE void next_tile(WorkItem& item, Sequence& sequence, int index) {
    item = {};
    if (index < 0 || index >= draws_.count) { return; }
    find(index, [&](int place) { return schedule_.tiles_before(place); });
    if (!found_.holds(index)) { return; }
    sequence = sequence_at(params_.sequences, schedule_.sequence(found_.place));
    item.place = found_.place;
    int const heads = params_.schedule.head_groups;
    int const within = index - found_.before;
    if (found_.until - found_.before == heads) {  // one tile for each
      item.head = within;
      return;
    }
    // Head groups whose K and V fit in L2 run together; in a pass query block by query block, the longest first.
    int const tiles = (found_.until - found_.before) / heads;
    int const fitting = params_.keys_in_l2 / max_of(1, sequence.len.k) * params_.sharing;
    int const width = min_of(heads, max_of(params_.sharing, fitting));
    int const pass = within / (width * tiles);
    int const in_pass = within - pass * width * tiles;
    int const pass_width = min_of(width, heads - pass * width);
    int const m = in_pass / pass_width;
    item.head = pass * width + in_pass - m * pass_width;
    item.m = params_.mask.right == kUnlimited ? m : tiles - 1 - m;
  }

  template <class Draw>
  HA_HOST_DEVICE void next_units(WorkItem& item, Sequence& sequence, Draw draw) {
    item = {};
    if (next_ >= end_) {
      chunk_ = draw(draws_);
      if (chunk_ < 0 || chunk_ >= chunks_.count) { return; }
      next_ = chunks_.begin(chunk_);
      end_ = chunks_.begin(chunk_ + 1);
      if (next_ >= end_) { return; }
    }
    int const heads = params_.schedule.head_groups;
    find(next_, [&](int place) { return schedule_.units_before(place); });
    if (!found_.holds(next_)) { return; }
    sequence = sequence_at(params_.sequences, schedule_.sequence(found_.place));
    int const tiles = ceil_div(sequence.len.q, queries_per_tile_);
    UnitTile const tile = unit_tile(schedule_, found_.place, tiles, next_, heads);
    int const first = next_ - tile.begin;
    int const last = params_.schedule.fixed_splits ? first + 1 : min_of(tile.units, end_ - tile.begin);
    bool const whole = first == 0 && last == tile.units;
    int const slot = params_.schedule.fixed_splits ? next_ : slot_of(chunks_, chunk_, tile.begin);
    item = {found_.place, tile.head, tile.m, first, last, tile.units, whole ? -1 : slot};
    next_ = tile.begin + last;
  }

  // Sets found_ to the place that holds entry `x` of the list. Mostly it is the one of the entry before. In damaged
  // metadata none may hold it.
  template <class Before>
  HA_HOST_DEVICE void find(int x, Before before) {
    if (found_.holds(x)) { return; }
    int const heads = params_.schedule.head_groups;
    if (params_.schedule.metadata == nullptr) {
      int const each = max_of(1, before(1) * heads);
      int const place = x / each;
      found_ = {place, place * each, (place + 1) * each};
      return;
    }
    int const place = find_place(schedule_.begin(), schedule_.end(), x / heads, [&](int p) { return before(p + 1); });
    found_ = {place, 0, 0};
    if (place < schedule_.end()) { found_ = {place, before(place) * heads, before(place + 1) * heads}; }
  }

  AttentionParams const& params_;
  Schedule schedule_;
  int queries_per_tile_;
  bool by_units_ = false;
  Chunks chunks_{};
  Draws draws_{};
  int chunk_ = 0;
  int next_ = 0;  // unit at which the CTA goes on
  int end_ = 0;
  FoundPlace found_;
};

}  // namespace hopper_attention
