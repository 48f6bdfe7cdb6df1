// Where the numbers of a schedule lie in scheduler metadata, and what its facts hold.
#pragma once

#include <limits>

#include "kernels/host_device.h"

namespace hopper_attention {

// Layout of scheduler metadata: a counter of the items that CTAs have drawn, then four arrays of `stride` int32.
// kDecodeCounter is that of the decode kernel, where both run; of CTAs that have begun, where one kernel merges parts
// of its tiles (part_arrivals.h). Each call leaves both at 0.
enum ScheduleArray : int {
  kSequenceAt,     // sequence at each place
  kTilesUntil,     // tiles of the places up to and with this one, and in which order CTAs take its own (TilesUntil)
  kUnitsUntil,     // units of the places up to and with this one, and parts (UnitsAndParts)
  kScheduleFacts,  // ScheduleFact
};
enum ScheduleFact : int {
  kPlacesAndCuts,
  kMostUnitsPrefill,  // key blocks of the longest tile, in whatever parts, of each class (UnitsAndParts)
  kMostUnitsDecode,
  kDecodeCounter,
  kScheduleFactCount
};

// Engines have buffers for round_up(batch, 4) numbers in each array, as FlashAttention-3's metadata have.
template <class Count>
HA_HOST_DEVICE constexpr Count schedule_stride(Count batch) {
  constexpr Count kMultiple = 4;  // a power of 2
  return (batch + kMultiple - 1) & ~(kMultiple - 1);
}
static_assert(schedule_stride(1) >= kScheduleFactCount);

// Of metadata in all.
template <class Count>
HA_HOST_DEVICE constexpr Count schedule_words(Count stride) {
  return 1 + (kScheduleFacts + 1) * stride;
}

// Whether it pays to cut tiles of few queries: bits.
enum Cuts : int {
  kCutsWholeTiles = 1,  // over CTAs that take a tile each
  kCutsClusters = 2,    // over clusters that do
};

// Facts in one: how many places are of prefill; Cuts, of the places of decode and of all as tiles of few queries; and
// whether there are even parts (EvenParts), and of sequences of many queries that are one tile each in a kernel for
// few.
struct PlacesAndCuts {
  static constexpr int kBits = 2;  // of Cuts
  static constexpr int kPlacesBits = 26;
  static constexpr int kEvenBit = kPlacesBits + 2 * kBits;
  static constexpr int kEven = 1 << kEvenBit;
  static constexpr int kOneEach = std::numeric_limits<int>::min();  // the sign

  int prefill = 0;
  int cuts_decode = 0;
  int cuts_all = 0;
  bool even_parts = false;
  bool one_each = false;

  HA_HOST_DEVICE static constexpr PlacesAndCuts of(int fact) {
    constexpr int kCuts = (1 << kBits) - 1;
    return {fact & ((1 << kPlacesBits) - 1), fact >> kPlacesBits & kCuts, fact >> (kPlacesBits + kBits) & kCuts,
            (fact & kEven) != 0, (fact & kOneEach) != 0};
  }
  HA_HOST_DEVICE constexpr int fact() const {
    return prefill | cuts_decode << kPlacesBits | cuts_all << (kPlacesBits + kBits) | (even_parts ? kEven : 0) |
           (one_each ? kOneEach : 0);
  }
};

// Tiles up to and with a place, and whether CTAs that take them whole end with the longest of the place. As every other
// place does, lengths change slowly along the list. But CTAs that are free before the longest are done must find enough
// to do at the places behind it, for the kernel itself or for the next one; otherwise the shortest come last.
struct TilesUntil {
  static constexpr int kTilesBits = 29;

  int tiles = 0;
  bool turned_in_class = false;  // where the places of its class count
  bool turned_in_all = false;    // where all places do

  HA_HOST_DEVICE static constexpr TilesUntil of(int word) {
    return {word & ((1 << kTilesBits) - 1), (word >> kTilesBits & 1) != 0, (word >> (kTilesBits + 1) & 1) != 0};
  }
  HA_HOST_DEVICE constexpr int word() const {
    return tiles | int{turned_in_class} << kTilesBits | int{turned_in_all} << (kTilesBits + 1);
  }
};

// Where tiles are in even parts: of each part, and of a tile that is whole. Several, since a kernel whose tiles hold
// fewer queries than metadata count has some in the place of one.
inline constexpr int kUnitsOfPart = 4;

// Units, which are key blocks, and above them parts, where there are even ones, so that kernels of both kinds read the
// same metadata. Sums of such numbers are those of units and those of parts. Of the facts about the longest tiles
// that of prefill has the parts in front (EvenParts), that of decode those of the tile which is in most.
struct UnitsAndParts {
  static constexpr int kUnitsBits = 20;
  static constexpr int kMostUnits = (1 << kUnitsBits) - 1;
  static constexpr int kMostParts = (1 << (31 - kUnitsBits)) - 1;

  HA_HOST_DEVICE static constexpr int of(int units, int parts) { return units | parts << kUnitsBits; }
  HA_HOST_DEVICE static constexpr int units(int both) { return both & kMostUnits; }
  HA_HOST_DEVICE static constexpr int parts(int both) {
    return static_cast<int>(static_cast<unsigned>(both) >> kUnitsBits);
  }
};

// In metadata, or a copy of them.
template <class Integer>
HA_HOST_DEVICE constexpr Integer* where_is(Integer* metadata, int stride, ScheduleArray array) {
  return metadata + 1 + array * stride;
}
template <class Integer>
HA_HOST_DEVICE constexpr Integer* where_is(Integer* metadata, int stride, ScheduleFact fact) {
  return where_is(metadata, stride, kScheduleFacts) + fact;
}

}  // namespace hopper_attention
