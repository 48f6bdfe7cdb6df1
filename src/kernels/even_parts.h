// Whether the tiles of a step are cut each by itself, and how: rules for the kernel that makes a schedule.
#pragma once

#include "kernels/cutting_pays.h"
#include "kernels/host_device.h"
#include "kernels/schedule_layout.h"

namespace hopper_attention {

// Tiles that are cut each by itself, into even parts of up to so many units as a CTA has to do, in a kernel for few
// queries where no sequence has many, otherwise in one for both classes. A chunk of equal work begins and ends in the
// middle of a tile, and is two items; where a long tile shifts many short ones, all of these are cut. Parts that are
// drawn, the longest tiles first, leave short tiles whole. All parts of tiles that are cut are among the first that
// CTAs take, one each at most: each has a slot of the workspace. Such a part counts as kUnitsOfPart, a whole tile as
// one part, and tiles are cut in proportion to the blocks that they have. Whether to cut tiles of few queries at all is
// decided before.
struct EvenParts {
  int ctas = 0;  // of a call of few queries; 0: tiles are never cut so
  int head_groups = 1;
  int least_units = 1;    // of a part
  int mixed_ctas = 0;     // of a kernel for both classes; 0: there is none
  int mixed_queries = 1;  // of its tiles

  HA_HOST_DEVICE constexpr int ctas_for(bool mixed) const { return mixed ? mixed_ctas : ctas; }
};
inline constexpr int kPartSizes = 8;             // that are tried, a warp each
inline constexpr int kMostEvenUnits = 15 << 14;  // of a tile: longer ones are not sorted
static_assert(kMostEvenUnits <= UnitsAndParts::kMostUnits);

// Of a sequence: tiles of the kernel that may cut them so, all in as many parts as the longest.
struct EvenTiles {
  int tiles = 0;
  int tile_units : 31 = 1;
  bool rise : 1 = false;  // of the shortest less than half as many

  HA_HOST_DEVICE constexpr int units() const { return tile_units; }  // of the longest
  HA_HOST_DEVICE constexpr int parts(int size) const { return tiles * ceil_div_unsigned(units(), size); }
};

// Of a class: all, and those of tiles that are cut or stand before such a one, as tiles are sorted to an eighth of
// their length.
struct PartsOfClass {
  int all = 0;
  int nearly_cut = 0;

  HA_HOST_DEVICE constexpr void add(int parts, bool of_nearly_cut) {
    all += parts;
    nearly_cut += of_nearly_cut ? parts : 0;
  }
};

// How many parts there are if none has more units than that: of one head group.
struct PartsOfSize {
  int size;
  PartsOfClass prefill;
  PartsOfClass decode;
  int longest_whole = 0;  // units of a tile
  bool cuts_rising = false;
  int first_drawn = 0;  // in a kernel for both classes: units of what is taken when each CTA has a part

  HA_HOST_DEVICE constexpr void add(EvenTiles const& of, bool is_decode) {
    int const parts = of.parts(size);
    bool const is_nearly_cut = 8 * of.units() > 7 * size;
    if (is_decode) {
      decode.add(parts, is_nearly_cut);
    } else {
      prefill.add(parts, is_nearly_cut);
    }
    if (parts > of.tiles) { cuts_rising = cuts_rising || of.rise; }
    if (parts == of.tiles && parts > 0) { longest_whole = max_of(longest_whole, of.units()); }
  }

  HA_HOST_DEVICE constexpr int sum() const { return prefill.all + decode.all; }
  // Those of tiles that are cut, and of all that stand before.
  HA_HOST_DEVICE constexpr int in_front() const {
    return decode.nearly_cut > 0 ? prefill.all + decode.nearly_cut : prefill.nearly_cut;
  }
};

// The share of one CTA of the units of all head groups, which are not more than kMostUnitsShared.
inline constexpr int kMostUnitsShared = 1 << 30;
HA_HOST_DEVICE constexpr int share_of_cta(EvenParts const& even, int units, bool mixed) {
  return ceil_div_unsigned(units, even.ctas_for(mixed));
}

// The size to try as number `i`, the smallest first. In a kernel for both classes parts may be much longer than a CTA's
// share, where they save merging more of them.
HA_HOST_DEVICE constexpr int size_of_parts(EvenParts const& even, int share, bool mixed, int i) {
  return max_of(even.least_units, share) + i * (1 + share / (mixed ? 16 : 64));
}

// Whether metadata can hold so many, and each CTA takes one of those in front at most.
HA_HOST_DEVICE constexpr bool parts_fit(EvenParts const& even, bool mixed, PartsOfSize const& parts) {
  return parts.sum() <= UnitsAndParts::kMostParts && parts.in_front() > 0 &&
         even.head_groups * parts.in_front() <= even.ctas_for(mixed);
}

// Whether such parts, which fit, are as good as chunks of equal work. `share`: size number 0. Those that are drawn end
// as late behind each other as the longest whole tile takes: no longer than merging does, and each CTA has at least two
// of these.
HA_HOST_DEVICE constexpr bool even_parts_pay(EvenParts const& even, int share, PartsOfSize const& parts) {
  constexpr int kUnitsOfAnItem = 4;  // an item less takes no more time off than so many units
  bool const one_each = even.head_groups * parts.sum() <= even.ctas;
  return parts.size <= share + kUnitsOfAnItem &&
         (one_each || parts.longest_whole <= min_of(share / 2, kUnitsOfCuttingAlone));
}

// In a kernel for both classes: when the last CTA is done, in units, if each takes a part and then draws. Those that
// are done first have taken tiles about as short as what they draw.
HA_HOST_DEVICE constexpr int end_of_mixed_parts(EvenParts const& even, int share, PartsOfSize const& parts) {
  int const rounds = ceil_div_unsigned(even.head_groups * parts.sum(), even.mixed_ctas);
  if (rounds <= 1) { return parts.size; }
  return max_of(parts.size, min_of(rounds * parts.first_drawn, share + parts.first_drawn));
}

// Whether those pay, whose parts another kernel merges: over whole tiles, of which the longest has `most` units, and
// over chunks, by which CTAs would have more items, and the other kernel more tiles. Not tiles of a fresh prompt, which
// would all be in as many parts as the longest. Figures: docs/performance-notes.md, step 274.
HA_HOST_DEVICE constexpr bool mixed_parts_pay(int end, int share, int most, PartsOfSize const& parts) {
  constexpr int kUnitsOfMixedCutting = 12;
  return !parts.cuts_rising && most >= end + kUnitsOfMixedCutting && end <= share + kUnitsOfCutting;
}

}  // namespace hopper_attention
