// The items of one CTA, one after the other, from the schedule of a step.
#pragma once

#include "kernels/few_tiles.h"
#include "kernels/host_device.h"
#include "kernels/lanes.h"
#include "kernels/params.h"
#include "kernels/places.h"
#include "kernels/schedule.h"
#include "kernels/work_item.h"

namespace hopper_attention {

// What a CTA of a kernel of few queries takes its work from.
enum class WorkFrom { kTileList, kClusters, kDrawnTiles, kSchedule };

// Where that follows from the plan.
HA_HOST_DEVICE WorkFrom work_from(AttentionParams const& params) {
  ClusterParams const& cluster = params.cluster;
  if (cluster.on()) { return cluster.draws() ? WorkFrom::kDrawnTiles : WorkFrom::kClusters; }
  return params.listed ? WorkFrom::kSchedule : WorkFrom::kTileList;
}

// Where the schedule decides, for the attention kernel and the one that merges behind it. Clusters and whole tiles are
// found with nothing else of it. `metadata`: those of `schedule`, or the one fact of them that says it.
template <class Metadata>
HA_HOST_DEVICE WorkFrom work_from(ClusterParams const& cluster, ScheduleParams const& schedule, Metadata metadata) {
  if (cuts_tiles(schedule, metadata, cluster.size > 1 ? kCutsClusters : kCutsWholeTiles)) {
    return WorkFrom::kSchedule;
  }
  return cluster.size > 0 ? WorkFrom::kClusters : WorkFrom::kDrawnTiles;
}

// Units of a chunk that a CTA has not taken yet.
struct RestOfChunk {
  int chunk = 0;
  int next = 0;
  int end = 0;
};

// For unit_tile(). `even`: all tiles of a sequence are in as many parts; those of few queries are even anyway.
HA_HOST_DEVICE TilesOfUnits tiles_of_units(ScheduleParams const& schedule, MaskParams const& mask,
                                           Packing const& packing, int slabs, int keys, int queries, bool even) {
  int const slabs_of_all = packing.slab.quotient(queries + packing.queries_per_slab - 1);
  return {ceil_div(slabs_of_all, slabs), !even && !schedule.bound_by_memory && units_rise(mask),
          packing.queries_per_slab * slabs, keys, 1 + schedule.ends};
}

// What a source of work remembers of the schedule. On the device it lies in shared memory, since producers have no
// registers for it. It does not refer to the parameters: through an address that comes from memory, each of them would
// be a load instead of an operand.
template <int kPlaces, class Few = FewAsMany>
struct WorkSourceState {
  ScheduleNumbers schedule;
  [[no_unique_address]] Few few;
  Chunks chunks;
  Draws draws;
  RestOfChunk rest;
  int window = 0;        // the first of the places that are near
  int window_count = 0;  // how many
  int before = 0;        // entries before the first
  unsigned starts = 0;   // places that have other work than the one before, a bit each
  unsigned turned = 0;   // places whose longest tiles are the last, a bit each
  int until[kPlaces];    // entries up to and with each
  int units[kPlaces];    // of each
  Sequence sequence[kPlaces];

  // One lane makes it.
  HA_HOST_DEVICE explicit WorkSourceState(Schedule const& made) : schedule(made.numbers()), few(made) {
    if (made.by_units()) { chunks = made.chunks(); }
    draws = made.draws(made.by_units() ? chunks.count : few.tiles_of_all(made));
    window = made.begin();
  }
};

// Of the schedule, for tiles of many queries. All lanes of a warp call it. They bring `kPlaces` places with their
// sequences near at a time, each lane one, so that most items are found without waiting for memory; with FewAlone one
// of few queries, since the next tile is mostly elsewhere. Load: how lengths are read.
template <int kPlaces, class Few = FewAsMany, class Load = PlainLoad>
class WorkSource {
  static_assert(kPlaces >= 1 && kPlaces <= 32);

 public:
  using State = WorkSourceState<kPlaces, Few>;
  static constexpr bool kDraws = true;  // items that another CTA could have

  // `metadata`: those of `params`, or a copy.
  HA_HOST_DEVICE WorkSource(AttentionParams const& params, int const* metadata, State& state, int slabs, int keys)
      : params_(params), metadata_(metadata), state_(state), slabs_(slabs), keys_(keys) {}

  // The next item and its sequence; item.place is -1 at the end. `draw(Draws)` hands out 0, 1, 2, ... among all CTAs.
  // Returns whether the list ends soon.
  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    bool ends_soon = true;
    if (schedule().by_units()) {
      next_units(item, draw);
    } else {
      int const index = draw(state_.draws);
      ends_soon = state_.draws.end_soon(index);
      next_tile(item, index);
    }
    // Behind both, since producers have no registers for it any earlier; any one if there is no item.
    sequence = state_.sequence[item.place < 0 ? 0 : item.place - state_.window];
    return ends_soon;
  }

  // Whether the sequences that are near have the lengths that they had. All lanes of a warp.
  HA_HOST_DEVICE bool lengths_hold() const {
    return lanes_where([&](int lane) {
             int const i = kPlaces == 1 ? 0 : lane;
             return i < state_.window_count && !(sequence_of(state_.window + i) == state_.sequence[i]);
           }) == 0;
  }

 private:
  HA_HOST_DEVICE Schedule schedule() const { return {params_.schedule, metadata_, state_.schedule}; }

  HA_HOST_DEVICE Sequence sequence_of(int place) const {
    return sequence_at<Load>(params_.sequences, schedule().sequence(place));
  }

  HA_HOST_DEVICE void next_tile(WorkItem& item, int drawn) {
    item.place = -1;  // all of it at once, when it is known: producers have few registers
    if (drawn < 0 || drawn >= state_.draws.count) { return; }
    int const index = state_.few.entry(drawn);
    FastDivmod const& groups = params_.schedule.head_groups;
    int const in_group = groups.quotient(index);
    int const i = find(in_group, false);
    if (i < 0) { return; }
    if constexpr (Few::kAlone) {
      if (state_.window + i >= state_.few.begin) {
        // In damaged metadata a place may have more than one tile, which then do not exist.
        item = {.place = state_.window + i, .head = index - in_group * groups.divisor, .m = in_group - before(i)};
        return;
      }
    }
    // Places that have the same work run together, [begin, end) of the window.
    int begin = 0;
    int end = 1;
    if constexpr (kPlaces > 1) {
      unsigned const later = state_.starts >> i >> 1;
      begin = log2_of(static_cast<int>(state_.starts & ~(~0U << i << 1)));
      end = later == 0 ? state_.window_count : i + 1 + log2_of(static_cast<int>(later & -later));
    }
    int const tiles = state_.until[begin] - before(begin);
    int const within = index - before(begin) * groups.divisor;
    int const heads = (end - begin) * groups.divisor;
    // Head groups whose K and V fit in L2 run together; in a pass query block by query block. Every other pass begins
    // with the shortest, so that lengths change slowly along the list; the last one ends with it, but at turned places.
    int width = heads;
    int pass = 0;
    int passes = 1;
    int in_pass = within;
    int const keys = state_.sequence[begin].len.k;
    if (static_cast<long long>(keys) * heads > static_cast<long long>(params_.keys_in_l2) * params_.sharing) {
      int const fitting = params_.keys_in_l2 / max_of(1, keys) * params_.sharing;
      width = min_of(heads, max_of(params_.sharing, fitting));
      pass = within / (width * tiles);
      passes = ceil_div(heads, width);
      in_pass = within - pass * width * tiles;
    }
    int const pass_width = min_of(width, heads - pass * width);
    int const m = tiles == 1 ? 0 : in_pass / pass_width;
    int const of_places = pass * width + in_pass - m * pass_width;
    int const place = groups.quotient(of_places);
    bool const turned = ((state_.turned >> (end - 1)) + static_cast<unsigned>(passes - 1 - pass)) % 2 != 0;
    // The last ones of resized tiles may not exist.
    int const existing = params_.schedule.resized.on() ? tiles_of(begin + place).tiles : tiles;
    bool const in_order = first_tiles_are_shortest(params_.mask) == turned || m >= existing;
    item = {.place = state_.window + begin + place,
            .head = of_places - place * groups.divisor,
            .m = in_order ? m : existing - 1 - m};
  }

  template <class Draw>
  HA_HOST_DEVICE void next_units(WorkItem& item, Draw draw) {
    item.place = -1;
    RestOfChunk rest = state_.rest;
    bool const follows = rest.next < rest.end;
    if (!follows) {
      rest.chunk = draw(state_.draws);
      if (rest.chunk < 0 || rest.chunk >= state_.chunks.count) { return; }
      rest.next = state_.chunks.begin(rest.chunk);
      rest.end = state_.chunks.begin(rest.chunk + 1);
      if (rest.next >= rest.end) { return; }
    }
    int const i = find(params_.schedule.head_groups.quotient(rest.next), follows);
    if (i < 0) { return; }
    FoundPlace const found{state_.window + i, before(i), state_.until[i]};
    UnitTile const tile =
        unit_tile<KernelFamily::kPrefill>(found, tiles_of(i), rest.next, params_.schedule.head_groups.divisor);
    int const first = rest.next - tile.begin;
    int const last = params_.schedule.fixed_splits ? first + 1 : min_of(tile.units, rest.end - tile.begin);
    bool const whole = first == 0 && last == tile.units;
    int const slot = params_.schedule.fixed_splits ? rest.next : slot_of(state_.chunks, rest.chunk, tile.begin);
    item = {found.place, tile.head, tile.m, first, last, tile.units, whole ? -1 : slot};
    rest.next = tile.begin + last;
    in_each_lane([&](int lane) {
      if (lane == 0) { state_.rest = rest; }
    });
  }

  HA_HOST_DEVICE TilesOfUnits tiles_of(int i) const {
    return tiles_of_units(params_.schedule, params_.mask, params_.packing, slabs_, keys_, state_.sequence[i].len.q,
                          state_.schedule.even_parts());
  }

  // Entries of the list, tiles or units of one head group, before a place of the schedule, and of the window.
  HA_HOST_DEVICE int entries_before(int place) const {
    if (schedule().by_units()) { return schedule().units_before(place); }
    return state_.few.tiles_before(schedule(), place);
  }
  HA_HOST_DEVICE int before(int i) const { return i == 0 ? state_.before : state_.until[i - 1]; }

  // Which place of the window, which it moves there, holds entry `x`; -1 if none does, in damaged metadata. `follows`:
  // whether `x` is the entry behind what the CTA took last.
  HA_HOST_DEVICE int find(int x, bool follows) {
    // It is mostly in the places that follow, but for the first one.
    int place = state_.window + state_.window_count;
    bool anywhere = kPlaces == 1 && state_.window_count == 0;
    bool alone = false;
    if constexpr (Few::kAlone) {
      alone = !follows && x >= state_.few.entries;
      if (alone) {
        place = state_.few.begin + (x - state_.few.entries);
        anywhere = schedule().by_units();
      } else if (x < state_.few.entries && state_.window >= state_.few.begin) {
        place = schedule().begin();
      }
    }
    HA_NO_UNROLL
    for (int attempt = anywhere ? 1 : 0; !may_hold(x); ++attempt) {
      if (attempt == 2) { return -1; }
      if (attempt == 1) {
        place = find_place(first_place(alone), schedule().end(), x, [&](int p) { return entries_before(p + 1); });
      }
      if (place >= schedule().end()) { continue; }
      if (alone) {
        bring(place);
      } else {
        move(place);
      }
    }
    if constexpr (kPlaces == 1) { return 0; }
    unsigned const earlier =
        lanes_where([&](int lane) { return lane < state_.window_count && state_.until[lane] <= x; });
    int const i = earlier == ~0U ? kPlaces : log2_of(static_cast<int>(~earlier & -~earlier));
    return i < state_.window_count && before(i) <= x && x < state_.until[i] ? i : -1;
  }
  HA_HOST_DEVICE int first_place(bool of_few) const {
    if constexpr (Few::kAlone) {
      if (of_few) { return state_.few.begin; }
    }
    return schedule().begin();
  }
  HA_HOST_DEVICE bool may_hold(int x) const {
    return state_.window_count > 0 && state_.before <= x && x < state_.until[state_.window_count - 1];
  }

  // A place of few queries alone: which ones are near changes no item of theirs, and nothing that is left of earlier
  // places about runs is read for them. One number after the other, for want of registers.
  HA_HOST_DEVICE void bring(int place) {
    int const first = entries_before(place);
    in_each_lane([&](int lane) {
      if (lane > 0) { return; }
      state_.window = place;
      state_.window_count = 1;
      state_.before = first;
    });
    int const until = entries_before(place + 1);
    in_each_lane([&](int lane) {
      if (lane == 0) { state_.until[0] = until; }
    });
    Sequence const sequence = sequence_of(place);
    in_each_lane([&](int lane) {
      if (lane == 0) { state_.sequence[0] = sequence; }
    });
  }

  // Windows begin at multiples of their size, so that all CTAs see the same places together.
  HA_HOST_DEVICE void move(int place) {
    int const window = place - (place - schedule().begin()) % kPlaces;
    int const count = min_of(kPlaces, schedule().end() - window);
    // One after the other: producers have no registers for all of it. A single place is the same for all lanes, which
    // then need one register for all.
    auto const in_place_of_lane = [&](auto body) {
      in_each_lane([&](int lane) {
        int const i = kPlaces == 1 ? 0 : lane;
        if (i < count) { body(i, i == lane); }
      });
    };
    in_place_of_lane([&](int i, bool writes) {
      int const until = entries_before(window + i + 1);
      if (writes) { state_.until[i] = until; }
    });
    in_place_of_lane([&](int i, bool writes) {
      Sequence const sequence = sequence_of(window + i);
      if (writes) { state_.sequence[i] = sequence; }
    });
    int const first = entries_before(window);
    unsigned const turned = lanes_where([&](int lane) { return lane < count && schedule().is_turned(window + lane); });
    in_each_lane([&](int lane) {
      if (lane > 0) { return; }
      state_.window = window;
      state_.window_count = count;
      state_.before = first;
      state_.turned = turned;
    });
    if constexpr (kPlaces > 1) {
      if (!schedule().by_units()) { find_starts(); }
    }
  }

  // Places that have other work than the one before them.
  HA_HOST_DEVICE void find_starts() {
    in_each_lane([&](int lane) {
      if (lane < state_.window_count) { state_.units[lane] = schedule().units_of(state_.window + lane); }
    });
    auto const differs = [&](int a, int b) {
      return state_.until[a] - before(a) != state_.until[b] - before(b) || state_.units[a] != state_.units[b];
    };
    unsigned const starts =
        lanes_where([&](int lane) { return lane < state_.window_count && (lane == 0 || differs(lane, lane - 1)); });
    in_each_lane([&](int lane) {
      if (lane == 0) { state_.starts = starts; }
    });
  }

  AttentionParams const& params_;
  int const* metadata_;
  State& state_;
  int slabs_;
  int keys_;
};

// Of the schedule, where it shares out units of tiles of few queries. All lanes of a warp. What it remembers is in
// registers, and it looks for each place anew: a step of few sequences is mostly the time in which the instructions up
// to the first item arrive. Load: how lengths are read.
template <class Load = PlainLoad>
class UnitSource {
 public:
  static constexpr bool kDraws = true;

  // `keys` of a block.
  HA_HOST_DEVICE UnitSource(AttentionParams const& params, Schedule const& schedule, int keys)
      : params_(params), schedule_(schedule), chunks_(schedule.chunks()), keys_(keys) {}

  template <class Draw>
  HA_HOST_DEVICE bool next(WorkItem& item, Sequence& sequence, Draw draw) {
    item = {};
    if (rest_.next >= rest_.end) {
      rest_.chunk = draw(schedule_.draws(chunks_.count));
      if (rest_.chunk < 0 || rest_.chunk >= chunks_.count) { return true; }
      rest_.next = chunks_.begin(rest_.chunk);
      rest_.end = chunks_.begin(rest_.chunk + 1);
      if (rest_.next >= rest_.end) { return true; }
    }
    ScheduleParams const& params = params_.schedule;
    int const in_group = params.head_groups.quotient(rest_.next);
    FoundPlace const found = place_of_unit(schedule_, in_group);
    if (!found.holds(in_group)) { return true; }  // in damaged metadata none may hold it
    sequence = sequence_at(found.place);
    TilesOfUnits const tiles = tiles_of_units(params, params_.mask, params_.packing, 1, keys_, sequence.len.q, true);
    UnitTile const tile = unit_tile<KernelFamily::kDecode>(found, tiles, rest_.next, params.head_groups.divisor);
    int const first = rest_.next - tile.begin;
    int const last = params.fixed_splits ? first + 1 : min_of(tile.units, rest_.end - tile.begin);
    bool const whole = first == 0 && last == tile.units;
    int const slot = params.fixed_splits ? rest_.next : slot_of(chunks_, rest_.chunk, tile.begin);
    item = {found.place, tile.head, tile.m, first, last, tile.units, whole ? -1 : slot};
    rest_.next = tile.begin + last;
    return true;
  }

  HA_HOST_DEVICE Sequence sequence_at(int place) const {
    return hopper_attention::sequence_at<Load>(params_.sequences, schedule_.sequence(place));
  }

  HA_HOST_DEVICE void read_from(int const* metadata) { schedule_.read_from(metadata); }

  HA_HOST_DEVICE Chunks const& chunks() const { return chunks_; }

  // Of the list, where the tile of the item that was the last begins.
  HA_HOST_DEVICE int tile_begin(WorkItem const& item) const { return rest_.next - item.last; }

 private:
  AttentionParams const& params_;
  Schedule schedule_;
  Chunks chunks_;
  RestOfChunk rest_;
  int keys_;
};

}  // namespace hopper_attention
