// Whether the tiles of a step are cut each by itself, and how: rules for the kernel that makes a schedule.
#pragma once

#include "kernels/cutting_pays.h"
#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"
#include "kernels/schedule_layout.h"

namespace hopper_attention {

// Tiles that are cut each by itself, into even parts, in a kernel for few queries where one tile holds any sequence,
// otherwise in one for both classes, or, where head dims have none, in one for many queries. A chunk of equal work
// begins and ends in the middle of a tile, and is two items; where a long tile shifts many short ones, all of these are
// cut. Parts that are drawn, the longest tiles first, leave short tiles whole. All parts of tiles that are cut are in
// front: among the first that CTAs take, one each at most, so that each has a slot of the workspace. Such a part counts
// as kUnitsOfPart, a whole tile as one part, and tiles are cut in proportion to the blocks that they have. Whether to
// cut tiles at all, where each sequence has one, is decided before.
struct EvenParts {
  int ctas = 0;  // of a call of few queries; 0: tiles are never cut so
  int head_groups = 1;
  int least_units = 1;      // of a part
  int queries_of_one = 0;   // that one tile of a kernel for few queries holds, whichever
  int many_ctas = 0;        // of the kernel whose tiles of many queries may be in parts; 0: there is none
  FastDivmod many_queries;  // of its tiles
  int units_of_chunks = 0;  // what chunks of equal work take in it, beside a CTA's share of all
};
inline constexpr int kPartSizes = 8;             // that are tried, a warp each
inline constexpr int kMostEvenUnits = 15 << 14;  // of a tile: longer ones are not sorted
static_assert(kMostEvenUnits <= UnitsAndParts::kMostUnits);

// Of a sequence: tiles of the kernel that may cut them so, all in as many parts as the longest. In as few bytes as
// shared memory has left; numbers that are too large for it stay too large to be cut.
class EvenTiles {
 public:
  HA_HOST_DEVICE constexpr EvenTiles() = default;
  // With units of the longest tile and of the shortest.
  HA_HOST_DEVICE constexpr EvenTiles(int tiles, int units, int least)
      : tiles_(at_most<kTilesBits>(tiles)), units_(at_most<kUnitsBits>(units)), least_(at_most<kUnitsBits>(least)) {}

  HA_HOST_DEVICE constexpr int tiles() const { return static_cast<int>(tiles_); }
  HA_HOST_DEVICE constexpr int units() const { return static_cast<int>(units_); }
  HA_HOST_DEVICE constexpr bool rise() const { return 2 * least_ < units_; }
  HA_HOST_DEVICE constexpr int parts_of_tile(int size) const { return ceil_div_unsigned(units(), size); }
  HA_HOST_DEVICE constexpr int parts(int size) const { return tiles() * parts_of_tile(size); }
  HA_HOST_DEVICE constexpr int length(int size) const { return ceil_div_unsigned(units(), parts_of_tile(size)); }
  HA_HOST_DEVICE constexpr int mean_units() const { return static_cast<int>((units_ + least_ + 1) / 2); }
  HA_HOST_DEVICE constexpr int units_of_all() const { return tiles() * mean_units(); }

 private:
  static constexpr int kTilesBits = 28;
  static constexpr int kUnitsBits = 18;
  static_assert(kMostEvenUnits < (1 << kUnitsBits) - 1);

  template <int kBits>
  HA_HOST_DEVICE static constexpr unsigned at_most(int number) {
    return static_cast<unsigned>(min_of(number, (1 << kBits) - 1));
  }

  unsigned long long tiles_ : kTilesBits = 0;
  unsigned long long units_ : kUnitsBits = 1;
  unsigned long long least_ : kUnitsBits = 1;
};
static_assert(sizeof(EvenTiles) == 8);

// Whether a tile is cut into parts of `size`, or stands before such a one, as tiles are sorted to an eighth of their
// length.
HA_HOST_DEVICE constexpr bool is_nearly_cut(int units, int size) { return 8 * units > 7 * size; }

// The share of one of `ctas` of the units of all head groups, which are not more than kMostUnitsShared.
inline constexpr int kMostUnitsShared = 1 << 30;
HA_HOST_DEVICE constexpr int share_of_cta(EvenParts const& even, int units, int ctas) {
  return max_of(even.least_units, ceil_div_unsigned(units, ctas));
}

// Parts of one size, where there are tiles of few queries alone. Counts are of one head group.
struct PartsOfSize {
  int size;
  int all = 0;
  int in_front = 0;       // those of tiles that are cut, and of all that stand before
  int longest_whole = 0;  // units of a tile

  HA_HOST_DEVICE constexpr void add(EvenTiles const& of) {
    int const parts = of.parts(size);
    all += parts;
    in_front += is_nearly_cut(of.units(), size) ? parts : 0;
    if (parts == of.tiles() && parts > 0) { longest_whole = max_of(longest_whole, of.units()); }
  }
};

// The size to try as number `i`, the smallest first.
HA_HOST_DEVICE constexpr int size_of_parts(int share, int i) { return share + i * (1 + share / 64); }

// Whether metadata can hold so many, and each of `ctas` takes one of those in front at most.
HA_HOST_DEVICE constexpr bool parts_fit(EvenParts const& even, int ctas, int all, int in_front) {
  return all <= UnitsAndParts::kMostParts && in_front > 0 && even.head_groups * in_front <= ctas;
}

// Whether such parts, which fit, are as good as chunks of equal work. Those that are drawn end as late behind each
// other as the longest whole tile takes: no longer than merging does, and each CTA has at least two of these.
HA_HOST_DEVICE constexpr bool even_parts_pay(EvenParts const& even, int share, PartsOfSize const& parts) {
  constexpr int kUnitsOfAnItem = 4;  // an item less takes no more time off than so many units
  bool const one_each = even.head_groups * parts.all <= even.ctas;
  return parts.size <= share + kUnitsOfAnItem &&
         (one_each || parts.longest_whole <= min_of(share / 2, kUnitsOfCuttingAlone));
}

// Those that are compared by what they cost may also be shorter than a CTA's share, where many are drawn behind them,
// and much longer, where that saves merging; the last number is that of whole tiles. `most`: units of the longest.
HA_HOST_DEVICE constexpr int size_by_cost(EvenParts const& even, int share, int most, int i) {
  return i + 1 < kPartSizes ? max_of(even.least_units, 3 * share / 4) + i * (1 + share / 5) : most;
}

// Of the list of parts up to some place: how many, and their units, of all head groups.
struct PartsUntil {
  int parts = 0;
  int units = 0;
};

// When the last part of a place is done, in units. CTAs take one part each, and then draw; until those in `front` are
// done the other CTAs have to themselves what follows. The one that draws is ahead of the mean of all by three eighths
// of what it draws: the others are in the middle of something about as long.
HA_HOST_DEVICE constexpr int end_of_parts(int ctas, PartsUntil const& front, PartsUntil const& until, int length) {
  if (until.parts <= ctas) { return length; }
  int const before = until.units - length;
  int start = static_cast<int>(static_cast<unsigned>(max_of(before, 0)) / static_cast<unsigned>(ctas));
  if (front.parts < ctas) {
    auto const behind = static_cast<unsigned>(max_of(before - front.units, 0));
    start = min_of(start, static_cast<int>(behind / static_cast<unsigned>(ctas - front.parts)));
  }
  return max_of(start - 3 * length / 8, 0) + length;
}

// What merging takes: a kernel behind the other, and for each part of tiles that are cut.
HA_HOST_DEVICE constexpr int units_of_merging(int parts, int ctas) {
  constexpr int kUnitsOfKernel = 3;
  constexpr int kUnitsOfPartEach = 9;  // for each CTA
  return parts == 0 ? 0 : kUnitsOfKernel + kUnitsOfPartEach * parts / ctas;
}

// What decides whether the tiles of a step are parted so: units.
struct CostedStep {
  bool one_each;  // one tile of a kernel for few queries holds any sequence
  int ctas;
  int most;                   // of the longest tile
  int share;                  // of one CTA
  long long counted;          // of all tiles, as metadata count them
  long long queries_counted;  // of a tile of many as metadata count it
  long long queries;          // of one as it is cut
  int units_of_chunks;        // EvenParts
};

// Whether parts pay that are all done and merged after `cost` units, `cut` of them of tiles that are cut: over whole
// tiles, and over chunks, of tiles that are as large as those that are cut. Whole tiles of which each CTA has one at
// most are found faster as parts: these leave nobody a tile of a prompt that does not exist. Where there are no
// prompts, it is known that cutting pays. Figures: docs/performance-notes.md, steps 279, 286 and 288.
HA_HOST_DEVICE constexpr bool parts_pay_by_cost(CostedStep const& step, int cost, int cut, bool each_takes_one) {
  constexpr int kUnitsOfChunksOfFew = 20;
  bool const over_whole = cost <= max_of(step.most, step.share);
  if (step.one_each) { return cut > 0 && over_whole && cost <= step.share + kUnitsOfChunksOfFew; }
  long long const of_share = cost - step.units_of_chunks;
  bool const over_chunks = step.queries * step.ctas * of_share <= step.queries_counted * step.counted;
  return over_chunks && ((cut == 0 && each_takes_one) || over_whole);
}

}  // namespace hopper_attention
