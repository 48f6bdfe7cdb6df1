// Pieces of tiles, which CTAs compute one at a time, and where the units of a schedule lie in tiles.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/schedule.h"
#include "kernels/sequence_work.h"

namespace hopper_attention {

// What an item is to the tile where it is in parts that follow from it alone (fixed_parts()).
enum class TilePart : std::uint8_t {
  kWhole,    // no such part
  kPart,     // one, which the cluster merges
  kFirst,    // of those that the CTA takes one after the other, and merges by itself
  kBetween,  // of these
  kLast,     // of these
  kGroup,    // the only one of these, or none
};

HA_HOST_DEVICE constexpr bool is_folded(TilePart part) { return part >= TilePart::kFirst; }

// Whether the CTA has had nothing of the tile before, and will have nothing behind it.
HA_HOST_DEVICE constexpr bool begins_tile(TilePart part) {
  return part != TilePart::kBetween && part != TilePart::kLast;
}
HA_HOST_DEVICE constexpr bool ends_tile(TilePart part) {
  return part != TilePart::kFirst && part != TilePart::kBetween;
}

// Item `first` of the items [begin, end) that a CTA takes one after the other.
HA_HOST_DEVICE constexpr TilePart folded_part(int first, int begin, int end) {
  bool const ends = first + 1 >= end;
  return first == begin ? (ends ? TilePart::kGroup : TilePart::kFirst) : ends ? TilePart::kLast : TilePart::kBetween;
}

// How many parts a tile is in, and where they lie: part i in slot `slot(i)`.
struct TileParts {
  int count = 0;
  int first_slot = 0;
  int later_slots = 0;  // of part i > 0: later_slots + i * slot_step
  int slot_step = 1;

  HA_HOST_DEVICE constexpr int slot(int part) const { return part == 0 ? first_slot : later_slots + part * slot_step; }
};

// A piece of a tile: what one CTA computes at a time.
struct WorkItem {
  int place = -1;  // -1: none
  int head = 0;    // head group
  int m = 0;       // query block
  int first = 0;   // units [first, last) of `units`
  int last = 1;
  int units = 1;
  int slot = -1;  // of the workspace that takes the partial result; -1: none, since the CTA has all of the tile
  bool in_cluster = false;  // each CTA of the cluster has a part
  TilePart part = TilePart::kWhole;
};

// A place, and what of the list lies before it and up to its end: tiles or units, of one head group.
struct FoundPlace {
  int place = -1;
  int before = 0;
  int until = 0;

  HA_HOST_DEVICE constexpr bool holds(int x) const { return place >= 0 && before <= x && x < until; }
};

// Where the units of the tile that holds unit `x` of the list begin and end, and which tile it is.
struct UnitTile {
  int place;
  int head;
  int m;
  int begin;
  int units;
};

// What unit_tile() must know of a sequence beside its units, which metadata have.
struct TilesOfUnits {
  int tiles = 0;
  bool rise = false;  // with each tile by as many keys as it has queries; never in decode kernels
  int queries = 1;    // of a tile
  int keys = 1;       // of a block
  int least = 1;      // units of a tile
};

// Tiles share the units of the place, whatever the metadata say: these may count other queries than the call has, as
// they know no seqused_q. What is left over belongs to no tile, and its m is past the last one. Where units rise, a
// tile and its mirror image, the longer one first, have as many as any other two, so that all are found by one
// division. How many the longer one has follows from the keys that a tile has more than the one before it.
template <KernelFamily kFamily>
HA_HOST_DEVICE constexpr UnitTile unit_tile(FoundPlace const& found, TilesOfUnits const& of, int x, int head_groups) {
  auto const quotient = [](int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));  // half of what signed ones take
  };
  int const of_place = max_of(1, found.until - found.before);
  int const within = x - found.before * head_groups;
  int const head = quotient(within, of_place);
  int const in_head = within - head * of_place;
  if (of.tiles <= 1) { return {found.place, head, 0, x - in_head, of_place}; }
  if (kFamily == KernelFamily::kDecode || !of.rise) {
    int const units = max_of(1, quotient(of_place, of.tiles));
    int const m = quotient(in_head, units);
    return {found.place, head, m, x - (in_head - m * units), min_of(units, of_place - m * units)};
  }
  // Of an odd number of tiles the one in the middle has half as many as two, rounded down.
  unsigned const twice = 2U * static_cast<unsigned>(of_place) + static_cast<unsigned>(of.tiles % 2);
  int const of_pair = max_of(2, static_cast<int>(twice / static_cast<unsigned>(of.tiles)));
  int const pair = quotient(in_head, of_pair);
  int const in_pair = in_head - pair * of_pair;
  int const here = min_of(of_pair, of_place - pair * of_pair);
  int const between = of.tiles - 1 - 2 * pair;  // the two, in tiles
  if (between <= 0) { return {found.place, head, between == 0 ? pair : of.tiles, x - in_pair, here}; }
  int const longer = min_of(
      min_of((of_pair + 1) / 2 + quotient(between * of.queries, 2 * of.keys), max_of(1, of_pair - of.least)), here);
  if (in_pair < longer) { return {found.place, head, of.tiles - 1 - pair, x - in_pair, longer}; }
  return {found.place, head, pair, x - (in_pair - longer), here - longer};
}

// The slot of the part of a tile, beginning at `tile_begin`, that lies in `chunk`: a chunk cuts at most two tiles, the
// one it begins in the middle of and the one it ends in the middle of. None, -1, in damaged metadata alone.
HA_HOST_DEVICE constexpr int slot_of(Chunks const& chunks, int chunk, int tile_begin) {
  return chunk < chunks.cutting ? 2 * chunk + (chunks.begin(chunk) >= tile_begin ? 0 : 1) : -1;
}

// All parts of the tile whose units of the list are [tile_begin, tile_end).
HA_HOST_DEVICE constexpr TileParts parts_of_tile(Chunks const& chunks, int tile_begin, int tile_end) {
  int const first = chunks.of(tile_begin);
  int const last = min_of(chunks.of(min_of(tile_end, chunks.units) - 1), chunks.cutting - 1);
  // Every later chunk begins in the tile.
  return {.count = last - first + 1,
          .first_slot = slot_of(chunks, first, tile_begin),
          .later_slots = 2 * first,
          .slot_step = 2};
}

}  // namespace hopper_attention
