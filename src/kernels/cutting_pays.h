// Whether tiles of few queries that CTAs take whole are done so late that it pays to cut them.
#pragma once

#include "hopper_attention/types.h"
#include "kernels/host_device.h"

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

}  // namespace hopper_attention
