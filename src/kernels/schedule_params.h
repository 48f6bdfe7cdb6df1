// What the host hands to the kernel that makes the schedule.
#pragma once

#include "hopper_attention/types.h"
#include "kernels/schedule.h"
#include "kernels/schedule_layout.h"
#include "kernels/sequence_work.h"

namespace hopper_attention {

// Tiles of few queries, of all head groups: how many, their units together, and those of the longest.
struct WholeTiles {
  long long tiles = 0;
  long long units = 0;
  int most = 0;
};

// Of CTAs, so many that read as fast as all. Those that merge parts of their tile on the way need all others, too.
HA_HOST_DEVICE constexpr int enough_readers(int ctas, bool folds) { return folds ? ctas : max_of(1, 6 * ctas / 13); }

// Units that take as long as finding and merging parts: where a combine kernel merges them, and where the CTAs that
// leave them do, in a decode kernel that is alone. Parts that follow from their tile are never left to these.
inline constexpr int kUnitsOfCutting = 14;
inline constexpr int kUnitsOfCuttingAlone = 10;
HA_HOST_DEVICE constexpr int units_of_cutting(bool alone, bool fixed_parts) {
  return alone && !fixed_parts ? kUnitsOfCuttingAlone : kUnitsOfCutting;
}

// Whether tiles that `size` CTAs take each, the longest first, are done so late that it pays to share out their units
// among all `ctas` and to merge the parts of tiles. `enough` read as fast as all; a unit takes one of so many
// 0.9 us. Figures: docs/performance-notes.md, steps 172 and 199.
HA_HOST_DEVICE constexpr bool cutting_pays(WholeTiles const& of, int size, int ctas, int enough,
                                           int cutting = kUnitsOfCutting) {
  constexpr int kUnitsOfMerging = 2;  // in a cluster
  long long const readers = of.tiles * size;
  long long const longest = (of.most + size - 1) / size;
  int const worth = cutting - (size > 1 ? kUnitsOfMerging : 0);
  // The longest is read by one CTA when all others are done. Where CTAs have several tiles, chunks with many short ones
  // end late: the more of a chunk, the more there may be.
  long long const at_once = readers < enough ? enough : readers < ctas ? readers : ctas;
  long long const lost = (longest - worth) * at_once - of.units;
  if (lost > (readers > ctas ? of.units / 2 : 0)) { return true; }
  bool const alike = 4 * of.units >= 3 * readers * longest;
  if (!alike || 2 * readers <= ctas) { return false; }
  // Some share a pair of SMs, which have one way to memory, and the others are done earlier. Clusters lose a third.
  if (readers <= ctas) {
    int const nearly_all = 22 * ctas / 25;
    return longest * (nearly_all - readers) > worth * enough * (size == 1 ? 1 : 3);
  }
  // Those behind the last full round are too few to read as fast as memory allows.
  int const in_last_round = static_cast<int>(static_cast<unsigned>(readers) % static_cast<unsigned>(ctas));
  bool const few = 0 < in_last_round && 2 * in_last_round < ctas;
  return few && 4 * longest * (ctas - 2 * in_last_round) > 5LL * worth * ctas;
}
HA_HOST_DEVICE constexpr bool cutting_pays(WholeTiles const& of, int size, int ctas) {
  return cutting_pays(of, size, ctas, enough_readers(ctas, false));
}

// The same of decode beside a kernel that has `prefill` units: it takes SMs, and those that are left read more slowly.
// Where it is more than an eighth, a whole tile longer than two CTAs' shares of all is cut, too, if all are done before
// one CTA would be that reads it alone, as slowly as the slowest there (on an H200 memory brings what 99 of these
// read): 64 tiles of 16k keys beside a prompt of 2k took 220 us whole and 187 in parts, of 4k keys beside one of 8k 251
// and 259.
HA_HOST_DEVICE constexpr bool cutting_pays_beside(WholeTiles const& of, long long prefill, int size,
                                                  FewReaders const& readers, int enough,
                                                  int cutting = kUnitsOfCutting) {
  bool const is_long = size == 1 && static_cast<long long>(of.most) * readers.ctas > 2 * of.units;
  bool const sooner = static_cast<long long>(readers.beside_prefill) * (of.most - cutting) > of.units;
  return (is_long && sooner && 8 * prefill > of.units) || cutting_pays(of, size, readers.ctas, enough, cutting);
}

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
  HA_HOST_DEVICE constexpr int parts(int size) const { return tiles * ceil_div(units(), size); }
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
    bool const is_nearly_cut = 8LL * of.units() > 7LL * size;
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

// The size to try as number `i`, the smallest first; `units`: of all head groups. In a kernel for both classes parts
// may be much longer than a CTA's share, where they save merging more of them.
HA_HOST_DEVICE constexpr int size_of_parts(EvenParts const& even, long long units, bool mixed, int i) {
  int const ctas = even.ctas_for(mixed);
  int const share = static_cast<int>((units + ctas - 1) / ctas);
  return max_of(even.least_units, share) + i * (1 + share / (mixed ? 16 : 64));
}

// Whether such parts are as good as chunks of equal work. Those that are drawn end as late behind each other as the
// longest whole tile takes: no longer than merging does, and each CTA has at least two of these.
HA_HOST_DEVICE constexpr bool even_parts_pay(EvenParts const& even, int share, PartsOfSize const& parts) {
  constexpr int kUnitsOfAnItem = 4;  // an item less takes no more time off than so many units
  bool const one_each = static_cast<long long>(even.head_groups) * parts.sum() <= even.ctas;
  return parts.size <= share + kUnitsOfAnItem &&
         (one_each || parts.longest_whole <= min_of(share / 2, kUnitsOfCuttingAlone));
}

// In a kernel for both classes: when the last CTA is done, in units, if each takes a part and then draws. Those that
// are done first have taken tiles about as short as what they draw.
HA_HOST_DEVICE constexpr int end_of_mixed_parts(EvenParts const& even, int share, PartsOfSize const& parts) {
  auto const rounds =
      ceil_div<long long>(static_cast<long long>(even.head_groups) * parts.sum(), max_of(1, even.mixed_ctas));
  if (rounds <= 1) { return parts.size; }
  long long const drawn = min_of(rounds * parts.first_drawn, static_cast<long long>(share) + parts.first_drawn);
  return max_of(parts.size, static_cast<int>(drawn));
}

// Whether those pay, whose parts another kernel merges: over whole tiles, of which the longest has `most` units, and
// over chunks, by which CTAs would have more items, and the other kernel more tiles. Not tiles of a fresh prompt, which
// would all be in as many parts as the longest. Figures: docs/performance-notes.md, step 274.
HA_HOST_DEVICE constexpr bool mixed_parts_pay(int end, int share, int most, PartsOfSize const& parts) {
  constexpr int kUnitsOfMixedCutting = 12;
  return !parts.cuts_rising && most >= end + kUnitsOfMixedCutting && end <= share + kUnitsOfCutting;
}

struct ScheduleKernelParams {
  SequenceParams sequences;
  MaskParams mask;
  TileShape prefill;
  TileShape decode;
  EvenParts even_parts;
  FewReaders readers;
  int* metadata;  // as schedule.h lays it out
};

inline constexpr int kScheduleThreads = 1024;  // of a CTA, at most; the last warp takes no sequences
inline constexpr int kScheduleBuckets = 256;   // of the sort: a CTA has at least as many threads
inline constexpr int kScheduleCluster = 8;     // CTAs that share a large batch
inline constexpr int kMostPlacesOfOneCta = 512;

struct ScheduleGrid {
  int ctas;  // 1 or kScheduleCluster
  int threads;
};

// A thread takes one sequence where there are enough threads. What a sequence takes are instructions of its SM, so that
// a large batch is shared by several; a small one is faster without waiting for other CTAs.
inline ScheduleGrid schedule_grid(int batch) {
  int const ctas = batch <= kMostPlacesOfOneCta ? 1 : kScheduleCluster;
  int const wanted = ceil_div(ceil_div(batch, ctas), 32) * 32;
  return {ctas, min_of(kScheduleThreads, max_of(kScheduleBuckets, wanted) + 32)};
}

}  // namespace hopper_attention
