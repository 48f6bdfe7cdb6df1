// Where the numbers of a schedule lie in scheduler metadata, and what its facts hold.
#pragma once

#include "kernels/host_device.h"

namespace hopper_attention {

// Layout of scheduler metadata: a counter of the items that CTAs have drawn (kDecodeCounter is that of the decode
// kernel, where both run; each call leaves them at 0), then four arrays of `stride` int32.
enum ScheduleArray : int {
  kSequenceAt,     // sequence at each place
  kTilesUntil,     // tiles of the places up to and with this one
  kUnitsUntil,     // units of the places up to and with this one
  kScheduleFacts,  // ScheduleFact
};
enum ScheduleFact : int {
  kPlacesAndCuts,
  kMostUnitsPrefill,  // key blocks of the longest tile, in whatever parts, of each class; its units where these are
                      // rounded
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

// A fact of two: how many places are of prefill, and Cuts, of the places of decode and of all as tiles of few queries.
struct PlacesAndCuts {
  static constexpr int kBits = 2;         // of Cuts
  static constexpr int kPlacesBits = 26;  // 4 bits are left over, the sign among them

  int prefill = 0;
  int cuts_decode = 0;
  int cuts_all = 0;

  HA_HOST_DEVICE static constexpr PlacesAndCuts of(int fact) {
    constexpr int kCuts = (1 << kBits) - 1;
    return {fact & ((1 << kPlacesBits) - 1), fact >> kPlacesBits & kCuts, fact >> (kPlacesBits + kBits) & kCuts};
  }
  HA_HOST_DEVICE constexpr int fact() const {
    return prefill | cuts_decode << kPlacesBits | cuts_all << (kPlacesBits + kBits);
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
