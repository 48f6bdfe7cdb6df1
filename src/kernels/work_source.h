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

// Of a dense call whose CTAs take whole tiles: they follow from their index.
class DenseWorkSource {
 public:
  static constexpr bool kDraws = false;

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
  static constexpr bool kDraws = false;

  HA_HOST_DEVICE ClusterWorkSource(AttentionParams const& params, int cta)
      : params_(params), tile_(params.cluster.first_tile(cta)) {
    int const ctas = params.cluster.ctas_of_tile.divisor;
    int const rank = cta - tile_ * ctas;
    item_ = {.first = rank, .last = rank + 1, .units = ctas, .slot = params.cluster.slot(cta)};
  }

  template <class Draw>
  HA_HOST_DEVICE void next(WorkItem& item, Sequence& sequence, Draw /*draw*/) {
    ClusterParams const& cluster = params_.cluster;
    // A slot of the workspace takes one tile.
    if (item_.m > 0 && (item_.slot >= 0 || item_.m * params_.packing.queries_per_slab >= sequence_.len.q)) {
      item_.m = 0;
      tile_ += cluster.at_once;
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
  HA_HOST_DEVICE void next(WorkItem& item, Sequence& sequence, Draw draw) {
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
  }

 private:
  AttentionParams const& params_;
  Draws draws_;
  WorkItem item_;
  Sequence sequence_{};
};

// What a warp keeps in shared memory: all lanes read it, one writes.
template <class T>
class Kept {
 public:
  HA_HOST_DEVICE constexpr explicit Kept(T const& value) : value_(value) {}

  HA_HOST_DEVICE T const& operator*() const { return value_; }
  HA_HOST_DEVICE T const* operator->() const { return &value_; }

  HA_HOST_DEVICE void set(T const& value) {
#if defined(__CUDA_ARCH__)
    __syncwarp();
    if (threadIdx.x % 32 == 0) { value_ = value; }
    __syncwarp();
#else
    value_ = value;
#endif
  }

 private:
  T value_;
};

// Of the schedule. On the device it lies in shared memory, since producers have no registers for it; one lane makes it.
class WorkSource {
 public:
  static constexpr bool kDraws = true;  // items that another CTA could have

  HA_HOST_DEVICE WorkSource(AttentionParams const& params, int slabs)
      : params_(params), schedule_(params.schedule), queries_per_tile_(params.packing.queries_per_slab * slabs) {
    if (schedule_.by_units()) { chunks_ = schedule_.chunks(); }
    draws_ = schedule_.draws(schedule_.by_units() ? chunks_.count : schedule_.tiles());
  }

  // The next item and its sequence; item.place is -1 at the end. `draw(Draws)` hands out 0, 1, 2, ... among all CTAs.
  // All lanes of a warp.
  template <class Draw>
  HA_HOST_DEVICE void next(WorkItem& item, Sequence& sequence, Draw draw) {
    if (schedule_.by_units()) {
      next_units(item, sequence, draw);
    } else {
      next_tile(item, sequence, draw(draws_));
    }
  }

 private:
  // Units of a chunk that the CTA has not taken yet.
  struct Rest {
    int chunk;
    int next;
    int end;
  };

  HA_HOST_DEVICE void next_tile(WorkItem& item, Sequence& sequence, int index) {
    item = {};
    if (index < 0 || index >= draws_.count) { return; }
    int const in_group = params_.schedule.head_groups.quotient(index);
    // A place of few queries has one tile.
    int const guess = params_.schedule.bound_by_memory ? schedule_.begin() + in_group : schedule_.end();
    FoundPlace const found = find(in_group, guess, [&](int place) { return schedule_.tiles_before(place); });
    if (!found.holds(in_group)) { return; }
    sequence = sequence_at(params_.sequences, schedule_.sequence(found.place));
    item.place = found.place;
    int const heads = params_.schedule.head_groups.divisor;
    int const within = index - found.before * heads;
    int const tiles = found.until - found.before;
    if (tiles == 1) {
      item.head = within;
      return;
    }
    // Head groups whose K and V fit in L2 run together; in a pass query block by query block.
    int m = params_.schedule.head_groups.quotient(within);
    int head = within - m * heads;
    if (static_cast<long long>(sequence.len.k) * heads > static_cast<long long>(params_.keys_in_l2) * params_.sharing) {
      int const fitting = params_.keys_in_l2 / max_of(1, sequence.len.k) * params_.sharing;
      int const width = min_of(heads, max_of(params_.sharing, fitting));
      int const pass = within / (width * tiles);
      int const in_pass = within - pass * width * tiles;
      int const pass_width = min_of(width, heads - pass * width);
      m = in_pass / pass_width;
      head = pass * width + in_pass - m * pass_width;
    }
    item.head = head;
    // In every other place the shortest first: a CTA's tiles are about a grid apart in the list, and those of
    // neighbouring places would be alike. The last place ends with its shortest.
    bool const turned = (schedule_.end() - found.place) % 2 == 0;
    item.m = (params_.mask.right == kUnlimited) != turned ? m : tiles - 1 - m;
  }

  template <class Draw>
  HA_HOST_DEVICE void next_units(WorkItem& item, Sequence& sequence, Draw draw) {
    item = {};
    Rest rest = *rest_;
    if (rest.next >= rest.end) {
      rest.chunk = draw(draws_);
      if (rest.chunk < 0 || rest.chunk >= chunks_.count) { return; }
      rest.next = chunks_.begin(rest.chunk);
      rest.end = chunks_.begin(rest.chunk + 1);
      if (rest.next >= rest.end) { return; }
    }
    int const in_group = params_.schedule.head_groups.quotient(rest.next);
    FoundPlace const found = find(in_group, schedule_.end(), [&](int place) { return schedule_.units_before(place); });
    if (!found.holds(in_group)) { return; }
    sequence = sequence_at(params_.sequences, schedule_.sequence(found.place));
    int const tiles =
        sequence.len.q <= queries_per_tile_ ? min_of(sequence.len.q, 1) : ceil_div(sequence.len.q, queries_per_tile_);
    UnitTile const tile = unit_tile(found, tiles, rest.next, params_.schedule.head_groups.divisor);
    int const first = rest.next - tile.begin;
    int const last = params_.schedule.fixed_splits ? first + 1 : min_of(tile.units, rest.end - tile.begin);
    bool const whole = first == 0 && last == tile.units;
    int const slot = params_.schedule.fixed_splits ? rest.next : slot_of(chunks_, rest.chunk, tile.begin);
    item = {found.place, tile.head, tile.m, first, last, tile.units, whole ? -1 : slot};
    rest.next = tile.begin + last;
    rest_.set(rest);
  }

  // The place that holds entry `x` of the list of one head group: mostly that of the entry before, else mostly `guess`
  // (the end: there is none). In damaged metadata none may hold it.
  template <class Before>
  HA_HOST_DEVICE FoundPlace find(int x, int guess, Before before) {
    if (found_->holds(x)) { return *found_; }
    auto const at = [&](int place) { return FoundPlace{place, before(place), before(place + 1)}; };
    FoundPlace found;
    if (params_.schedule.metadata == nullptr) {
      found = at(x / max_of(1, before(1)));
    } else {
      if (guess < schedule_.end()) { found = at(guess); }
      if (!found.holds(x)) {
        int const place = find_place(schedule_.begin(), schedule_.end(), x, [&](int p) { return before(p + 1); });
        found = place < schedule_.end() ? at(place) : FoundPlace{};
      }
    }
    found_.set(found);
    return found;
  }

  AttentionParams const& params_;
  Schedule schedule_;
  int queries_per_tile_;
  Chunks chunks_{};
  Draws draws_;
  Kept<Rest> rest_{Rest{0, 0, 0}};
  Kept<FoundPlace> found_{FoundPlace{}};
};

}  // namespace hopper_attention
