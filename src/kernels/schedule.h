// The schedule of a step: which sequences come first, how many tiles each has and how many units of work. It is made
// once by a small kernel (schedule_kernel.h) and read by every layer's kernels. Where all sequences are alike, the same
// numbers are computed instead.
//
// A place is a position in the order of the sequences: those with many queries first (prefill), then those that fit in
// one slab (decode); in each class the longest first. A unit is one key block of a tile, or one split of fixed size
// (batch invariance). Numbers count one head group; all head groups of a place come one after another.
#pragma once

#include "kernels/block_range.h"
#include "kernels/host_device.h"
#include "kernels/sequences.h"
#include "kernels/tile_geometry.h"

namespace hopper_attention {

// Layout of scheduler metadata: a counter of the items that CTAs have drawn (kDecodeCounter is that of the decode
// kernel, where both run; each call leaves them at 0), then four arrays of `stride` int32.
enum ScheduleArray : int {
  kSequenceAt,     // sequence at each place
  kTilesUntil,     // tiles of the places up to and with this one
  kUnitsUntil,     // units of the places up to and with this one
  kScheduleFacts,  // ScheduleFact
};
enum ScheduleFact : int { kPrefillPlaces, kMostUnitsPrefill, kMostUnitsDecode, kDecodeCounter };

HA_HOST_DEVICE constexpr int schedule_stride(int batch) { return (batch + 3) / 4 * 4; }

// Tiles of one kernel family as the schedule counts them.
struct TileShape {
  int queries = 1;      // of a tile
  int keys = 1;         // of a block
  int fixed_split = 0;  // blocks of a unit if splits do not depend on the batch, else 0
};

struct SequenceWork {
  int tiles;
  int units;  // of each tile: at least 1
};

// Units follow from the last tile's blocks: with a causal mask it has the most. They only weigh tiles and place cuts;
// every tile is cut in proportion to its own blocks.
HA_HOST_DEVICE constexpr SequenceWork sequence_work(TileShape const& shape, MaskParams const& mask, SeqlenQK len) {
  if (len.q == 0) { return {0, 1}; }
  int const tiles = ceil_div(len.q, shape.queries);
  int const blocks = block_range(mask, (tiles - 1) * shape.queries, len.q - 1, len, shape.keys).blocks();
  return {tiles, max_of(1, shape.fixed_split > 0 ? ceil_div(blocks, shape.fixed_split) : blocks)};
}

// Which places a kernel takes.
enum class Places { kAll, kPrefill, kDecode };

struct ScheduleParams {
  int* metadata = nullptr;  // null: all sequences are alike
  int batch = 0;
  Places places = Places::kAll;
  SequenceWork alike{};  // without metadata
  int head_groups = 1;
  int ctas = 1;
  bool may_split = false;
  bool always_split = false;     // by units also where the tiles fill the grid
  bool bound_by_memory = false;  // tiles of few queries
  bool fixed_splits = false;     // every unit is a split: its bits depend on its sequence alone
  int least_units = 1;           // of a CTA
  int max_splits = 0;            // 0: no bound
  int most_tiles = 0;            // bounds for what damaged metadata may claim
  int most_units = 0;
};

// Chunk c of the list of units: [begin(c), begin(c + 1)).
struct Chunks {
  int units;
  int size;
  int count;

  HA_HOST_DEVICE constexpr int begin(int chunk) const {
    return clamped(static_cast<long long>(chunk) * size, 0, units);
  }
  HA_HOST_DEVICE constexpr int of(int unit) const { return unit / size; }
};

// Numbers of the places [begin, end) that a kernel takes, relative to the first.
class Schedule {
 public:
  HA_HOST_DEVICE explicit constexpr Schedule(ScheduleParams const& params) : params_(params), end_(params.batch) {
    if (params.metadata == nullptr) { return; }
    if (params.places != Places::kAll) {
      int const prefill = clamped(fact(kPrefillPlaces), 0, params.batch);
      (params.places == Places::kPrefill ? end_ : begin_) = prefill;
    }
    tiles_base_ = begin_ == 0 ? 0 : at(kTilesUntil, begin_ - 1);
    units_base_ = begin_ == 0 ? 0 : at(kUnitsUntil, begin_ - 1);
  }

  HA_HOST_DEVICE constexpr int begin() const { return begin_; }
  HA_HOST_DEVICE constexpr int end() const { return end_; }

  HA_HOST_DEVICE constexpr int tiles_before(int place) const {
    if (params_.metadata == nullptr) { return place * params_.alike.tiles; }
    return place == begin_
               ? 0
               : clamped(static_cast<long long>(at(kTilesUntil, place - 1)) - tiles_base_, 0, bound_tiles());
  }

  HA_HOST_DEVICE constexpr int units_before(int place) const {
    if (params_.metadata == nullptr) { return place * params_.alike.tiles * params_.alike.units; }
    return place == begin_
               ? 0
               : clamped(static_cast<long long>(at(kUnitsUntil, place - 1)) - units_base_, 0, bound_units());
  }

  // Of all head groups.
  HA_HOST_DEVICE constexpr int tiles() const { return tiles_before(end_) * params_.head_groups; }
  HA_HOST_DEVICE constexpr int units() const { return units_before(end_) * params_.head_groups; }

  HA_HOST_DEVICE constexpr int sequence(int place) const {
    return params_.metadata == nullptr ? place : clamped(at(kSequenceAt, place), 0, params_.batch - 1);
  }

  // Work is shared out by units and tiles are cut; otherwise CTAs take whole tiles.
  HA_HOST_DEVICE constexpr bool by_units() const {
    if (!params_.may_split) { return false; }
    if (params_.fixed_splits) { return true; }
    if (!units_fit()) { return false; }
    if (params_.always_split) { return true; }
    int const all = max_of(1, tiles());
    // A tile that takes longer than a block's share of all work.
    if (params_.metadata != nullptr && most_units() > 2 * ceil_div(units(), params_.ctas)) { return true; }
    // Memory is nearly as fast for four ninths of the SMs as for all; arithmetic is not: whole tiles are as good where
    // they leave less than a seventh of the grid idle.
    if (params_.bound_by_memory) { return 9LL * all < 4LL * params_.ctas; }
    long long const rounds = ceil_div(all, params_.ctas);
    return 7LL * all < 6 * rounds * params_.ctas;
  }

  HA_HOST_DEVICE constexpr int* counter() const {
    if (params_.metadata == nullptr || params_.places != Places::kDecode) { return params_.metadata; }
    return params_.metadata + 1 + kScheduleFacts * schedule_stride(params_.batch) + kDecodeCounter;
  }

  // How the units are cut into chunks: one for each CTA, or each unit by itself.
  HA_HOST_DEVICE constexpr Chunks chunks() const {
    int const all = units();
    if (params_.fixed_splits) { return {all, 1, all}; }
    int size = max_of(max_of(1, params_.least_units), ceil_div(all, params_.ctas));
    if (params_.max_splits >= 2) { size = max_of(size, ceil_div(most_units(), params_.max_splits - 1)); }
    return {all, size, ceil_div(all, size)};
  }

 private:
  HA_HOST_DEVICE constexpr int at(ScheduleArray array, int i) const {
    return params_.metadata[1 + array * schedule_stride(params_.batch) + i];
  }
  // Sums that the bound cuts off would lose tiles.
  HA_HOST_DEVICE constexpr bool units_fit() const {
    if (params_.metadata == nullptr || begin_ == end_) { return true; }
    return static_cast<long long>(at(kUnitsUntil, end_ - 1)) - units_base_ <= bound_units();
  }
  HA_HOST_DEVICE constexpr int fact(ScheduleFact which) const { return at(kScheduleFacts, which); }
  HA_HOST_DEVICE constexpr int bound_tiles() const { return params_.most_tiles / params_.head_groups; }
  HA_HOST_DEVICE constexpr int bound_units() const { return params_.most_units / params_.head_groups; }

  HA_HOST_DEVICE constexpr int most_units() const {
    if (params_.metadata == nullptr) { return params_.alike.units; }
    int const prefill = fact(kMostUnitsPrefill);
    int const decode = fact(kMostUnitsDecode);
    return params_.places == Places::kPrefill  ? prefill
           : params_.places == Places::kDecode ? decode
                                               : max_of(prefill, decode);
  }

  ScheduleParams const& params_;
  int begin_ = 0;
  int end_;
  int tiles_base_ = 0;
  int units_base_ = 0;
};

// A piece of a tile: what one CTA computes at a time.
struct WorkItem {
  int place = -1;  // -1: none
  int head = 0;    // head group
  int m = 0;       // query block
  int first = 0;   // units [first, last) of `units`
  int last = 1;
  int units = 1;
  int slot = -1;  // of the workspace that takes the partial result; -1: the item is the whole tile
};

// Where the units of the tile that holds unit `x` of the list begin and end, and which tile it is.
struct UnitTile {
  int place;
  int head;
  int m;
  int begin;
  int units;
};

// `tiles_of(place)`: query blocks of the sequence at a place. The units of a place are shared evenly among its tiles,
// whatever the metadata says; what is left over belongs to no tile (m is past the last one).
HA_HOST_DEVICE constexpr UnitTile unit_tile(Schedule const& schedule, int place, int tiles_of_place, int x,
                                            int head_groups) {
  int const before = schedule.units_before(place);
  int const of_place = max_of(1, schedule.units_before(place + 1) - before);
  int const within = x - before * head_groups;
  int const head = within / of_place;
  int const in_head = within - head * of_place;
  int const units = max_of(1, of_place / max_of(1, tiles_of_place));
  int const m = in_head / units;
  return {place, head, m, x - (in_head - m * units), min_of(units, of_place - m * units)};
}

// The slot of the part of a tile, beginning at `tile_begin`, that lies in `chunk`: a chunk cuts at most two tiles, the
// one it begins in the middle of and the one it ends in the middle of.
HA_HOST_DEVICE constexpr int slot_of(Chunks const& chunks, int chunk, int tile_begin) {
  return 2 * chunk + (chunks.begin(chunk) >= tile_begin ? 0 : 1);
}

}  // namespace hopper_attention
