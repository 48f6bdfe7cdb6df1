// Which key blocks a tile visits, and which of them need no mask. Derived from visible() alone, on the host and on the
// device.
#pragma once

#include <cstdint>

#include "kernels/interval_mask.h"

namespace hopper_attention {

// What a slab of a tile's rows visits: blocks [begin, end) from the right, of which every row of the slab sees all keys
// of [full_begin, full_end). Blocks are numbered as in the tile's BlockRange.
struct alignas(16) SlabRange {
  int begin;
  int full_begin;
  int full_end;
  int end;

  HA_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  HA_HOST_DEVICE constexpr int blocks() const { return end - begin; }
};

// Block n holds keys [origin + n * keys, origin + (n + 1) * keys). A tile visits [begin, end) from the right; every row
// of the tile sees all keys of the blocks [full_begin, full_end).
struct BlockRange {
  int origin;  // key at which block 0 starts: the first key that the tile sees, or the aligned one before it, so that
               // a window costs no extra block
  int begin;
  int full_begin;
  int full_end;
  int end;
  KeyInterval keys;  // the union of the rows' intervals; memory outside must not reach the result

  HA_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  HA_HOST_DEVICE constexpr int blocks() const { return end - begin; }
  HA_HOST_DEVICE constexpr SlabRange of_all_slabs() const { return {begin, full_begin, full_end, end}; }
};

// Where blocks may start: at keys whose place in memory, key + shift, is a multiple of `unit`, a power of 2. Boxes of
// pages must not cross a page.
struct BlockAlignment {
  int unit = 1;
  int shift = 0;
};

// The range of the rows [first_row, last_row], both existing queries of the sequence.
HA_HOST_DEVICE constexpr BlockRange block_range(MaskParams const& mask, int first_row, int last_row, SeqlenQK len,
                                                int block, BlockAlignment alignment = {}) {
  auto const [first, last] = visible(mask, first_row, last_row, len);
  KeyInterval const seen{first.begin, last.end};
  if (seen.empty()) { return {0, 0, 0, 0, 0, {0, 0}}; }
  int const origin = seen.begin - ((seen.begin + alignment.shift) & (alignment.unit - 1));
  int const end = ceil_div(seen.end - origin, block);
  // Rows see [last.begin, first.end) in common.
  int const full_begin = min_of(ceil_div(last.begin - origin, block), end);
  int const full_end = max_of(full_begin, floor_div(first.end - origin, block));
  return {origin, 0, full_begin, full_end, end, seen};
}

// Of the slab with the rows [first_row, last_row] of the tile, all of them existing queries, or none: from the tile's
// first block to the last that some of these rows see. Without a way out before the end, so that lanes that each
// have a slab stay together.
HA_HOST_DEVICE constexpr SlabRange slab_range(BlockRange const& tile, MaskParams const& mask, int first_row,
                                              int last_row, SeqlenQK len, int block) {
  auto const [first, last] = visible(mask, first_row, last_row, len);
  bool const sees = first_row <= last_row && first.begin < last.end;
  int const end = max_of(min_of(ceil_div(last.end - tile.origin, block), tile.end), tile.begin);
  int const full_begin = min_of(max_of(ceil_div(last.begin - tile.origin, block), tile.begin), end);
  int const full_end = max_of(min_of(floor_div(first.end - tile.origin, block), end), full_begin);
  return {sees ? tile.begin : tile.end, sees ? full_begin : tile.end, sees ? full_end : tile.end,
          sees ? end : tile.end};
}

// Where in a tile's only block the slab that begins with query `row` begins to read: at the first key that it sees, but
// with as many rows behind it as its products read, for which it may begin at `most`.
HA_HOST_DEVICE constexpr int first_key_of_slab(BlockRange const& tile, MaskParams const& mask, int row, SeqlenQK len,
                                               int most) {
  int const first = visible({.left = mask.left}, row, len).begin - tile.origin;
  return min_of(max_of(first, 0), most);
}

// Whether a tile is computed in turns by the warpgroups of its slabs, of which the first skips most. Not where a large
// share of the blocks is skipped: who computes would wait for others that are still at the end of the tile before.
HA_HOST_DEVICE constexpr bool is_in_turns(BlockRange const& tile, SlabRange const& first_slab, int slabs) {
  bool const skips = first_slab.empty() || first_slab.end < tile.end;
  return !skips || tile.blocks() >= 4 * slabs;
}

// Where unit `x` of `units` begins among `blocks`: 0 for the first, `blocks` for the end, never decreasing. 32-bit
// arithmetic, since a division of 64 bits is a call that producers have no registers for.
HA_HOST_DEVICE constexpr int scaled_cut(int x, int units, int blocks) {
  if (units == blocks || x == 0) { return x; }
  if (x >= units) { return blocks; }
  if ((units & (units - 1)) == 0) {  // as the CTAs of clusters: a division takes as long as all else here
    return static_cast<int>(static_cast<std::int64_t>(x) * blocks >> log2_of(units));
  }
  int shift = 0;
  while ((max_of(units, blocks) >> shift) >= 1 << 16) { ++shift; }
  unsigned const product = static_cast<unsigned>(x >> shift) * static_cast<unsigned>(blocks >> shift);
  return static_cast<int>(product / static_cast<unsigned>(max_of(1, units >> shift))) << shift;
}

// Part [first, last) of `parts` of a range, in whole blocks: parts of a range are disjoint and cover it.
HA_HOST_DEVICE constexpr BlockRange part_of(BlockRange range, int first, int last, int parts) {
  if (first == 0 && last == parts) { return range; }
  int begin = 0;
  int end = 0;
  HA_NO_UNROLL
  for (int i = 0; i < 2; ++i) {  // a loop, since what takes time is bringing instructions that run once
    begin = end;
    end = scaled_cut(i == 0 ? first : last, parts, range.blocks());
  }
  if (begin >= end) { return {0, 0, 0, 0, 0, {0, 0}}; }
  range.begin = begin;
  range.end = end;
  range.full_begin = min_of(max_of(range.full_begin, begin), end);
  range.full_end = max_of(range.full_begin, min_of(range.full_end, end));
  return range;
}

}  // namespace hopper_attention
