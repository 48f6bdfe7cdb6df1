// How many tiles a sequence has, and how many units of work these are. A unit is one key block of a tile, or as much as
// one for what a tile takes beside its blocks; or one of its parts if these follow from it alone (batch_invariant).
#pragma once

#include "kernels/block_range.h"
#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"

namespace hopper_attention {

// Tiles of one kernel family as the schedule counts them.
struct TileShape {
  int queries = 1;      // of a tile
  int keys = 1;         // of a block
  int fixed_split = 0;  // blocks of the longest tile in one part, if parts do not depend on the batch; else 0
  int least_units = 1;  // of a tile: what it takes to bring even one block
  int ends = 0;         // units for what starting and ending a tile takes beside its blocks

  HA_HOST_DEVICE constexpr int tiles_of(int rows) const { return ceil_div(rows, queries); }
  HA_HOST_DEVICE constexpr int blocks_of(int length) const { return ceil_div(length, keys); }
};

// The same with multiplications instead of divisions, of as many queries and keys as there may be.
struct FastTileShape : TileShape {
  FastDivmod by_queries;
  FastDivmod by_keys;

  FastTileShape() = default;
  constexpr FastTileShape(TileShape const& shape) : TileShape(shape), by_queries(shape.queries), by_keys(shape.keys) {}

  HA_HOST_DEVICE constexpr int tiles_of(int rows) const { return by_queries.quotient(rows + queries - 1); }
  HA_HOST_DEVICE constexpr int blocks_of(int length) const { return by_keys.quotient(length + keys - 1); }
};

// The tiles of a sequence. With a causal mask their units rise from the first to the last.
struct SequenceWork {
  int tiles = 0;
  int units = 1;      // of the last tile: at least 1
  int least = units;  // of the first tile: from 1 to units

  HA_HOST_DEVICE constexpr bool even() const { return least == units; }

  // Of tile m of them; of the tiles m and tiles - 1 - m together as many as of the first and the last.
  HA_HOST_DEVICE constexpr int units_of(int m) const {
    if (even() || tiles <= 1) { return units; }
    int const mirrored = tiles - 1 - m;
    if (m == mirrored) { return in_the_middle(); }
    return m <= mirrored ? least + scaled_cut(m, tiles - 1, units - least)
                         : units - scaled_cut(mirrored, tiles - 1, units - least);
  }
  // Of all tiles. More than can be counted are a number that is too large for any call, alone or with a few others.
  HA_HOST_DEVICE constexpr int sum() const {
    constexpr long long kTooMany = 5LL << 28;
    long long const in_pairs = static_cast<long long>(tiles / 2) * (units + least);
    long long const all =
        even() ? static_cast<long long>(tiles) * units : in_pairs + (tiles % 2 == 0 ? 0 : in_the_middle());
    return static_cast<int>(all < kTooMany ? all : kTooMany);
  }

 private:
  HA_HOST_DEVICE constexpr int in_the_middle() const { return least + (units - least) / 2; }
};

// Parts of a tile if they do not depend on the batch: of a quarter of the longest tile in one part (a power of 2), but
// no more than 32 as long as none is longer than that.
HA_HOST_DEVICE constexpr int fixed_parts(int blocks, int longest) {
  constexpr int kMostParts = 32;
  if (blocks <= longest) { return 1; }
  int const bits = log2_of(longest);
  return max_of(min_of((4 * blocks + longest - 1) >> bits, kMostParts), (blocks + longest - 1) >> bits);
}

// Units are the blocks of the first and the last tile, and rise evenly between them; of few queries at least some.
// They weigh tiles and place cuts; every tile is cut in proportion to its own blocks, of which it may have some more or
// fewer than units. This is as if all tiles were like the last one.
template <class Shape>
HA_HOST_DEVICE constexpr SequenceWork even_work(Shape const& shape, MaskParams const& mask, SeqlenQK len) {
  if (len.q == 0) { return {0, 1}; }
  int const blocks = shape.blocks_of(seen_by_rows(mask, max_of(len.q - shape.queries, 0), len.q - 1, len).length());
  return {shape.tiles_of(len.q), max_of(shape.least_units, blocks) + shape.ends};
}

// Whether units rise along a sequence.
HA_HOST_DEVICE constexpr bool units_rise(MaskParams const& mask) {
  return mask.left == kUnlimited && mask.right != kUnlimited && mask.chunk == 0 && mask.cp_world <= 1;
}

// In blocks, in whatever parts they are.
template <class Shape>
HA_HOST_DEVICE constexpr SequenceWork work_in_blocks(Shape const& shape, MaskParams const& mask, SeqlenQK len) {
  SequenceWork const even = even_work(shape, mask, len);
  if (even.tiles <= 1 || shape.fixed_split > 0 || !units_rise(mask)) { return even; }
  int const last_row = len.q - (even.tiles - 1) * shape.queries - 1;  // of the first tile
  int const least = shape.blocks_of(seen_by_rows(mask, 0, last_row, len).length());
  return {even.tiles, even.units, min_of(max_of(1, least) + shape.ends, even.units)};
}

HA_HOST_DEVICE constexpr SequenceWork work_in_units(TileShape const& shape, SequenceWork const& in_blocks) {
  if (shape.fixed_split == 0) { return in_blocks; }
  return {in_blocks.tiles, fixed_parts(in_blocks.units, shape.fixed_split)};
}

HA_HOST_DEVICE constexpr SequenceWork sequence_work(TileShape const& shape, MaskParams const& mask, SeqlenQK len) {
  return work_in_units(shape, work_in_blocks(shape, mask, len));
}

}  // namespace hopper_attention
