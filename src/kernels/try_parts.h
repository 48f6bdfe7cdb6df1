// Finds for a schedule the size of even parts that its tiles are cut into, if any: several are tried, by a warp each.
#pragma once

#include "kernels/even_parts.h"
#include "kernels/lanes.h"
#include "kernels/schedule_params.h"

namespace hopper_attention::schedule_detail {

// Even parts of one size: `end` is when all are done, in units.
struct TriedParts {
  static constexpr int kNever = 1 << 30;  // they do not fit, or do not pay

  int size = 0;
  int in_front = 0;  // PartsOfSize
  int end = kNever;
};

// In shared memory: all sequences of the batch, where one CTA makes the schedule and each thread has one at most.
struct SequencesToCut {
  static constexpr int kWarps = kMostPlacesOfOneCta / 32;

  EvenTiles at[kMostPlacesOfOneCta];  // each place
  int units_counted[kWarps];          // of metadata, by the warps
  int units_cut[kWarps];              // of the tiles as they would be cut
  TriedParts tried[kPartSizes];
};

// By a warp that has some places: `units` of the one that this lane has, as metadata count them, and its tiles as they
// would be cut. Sums that are too large stay so.
__device__ __forceinline__ void note_units(SequencesToCut& shared, int warp, int units, EvenTiles const& of) {
  constexpr int kTooMany = 1 << 22;
  long long const cut = static_cast<long long>(of.tiles) * of.units();
  int const counted_of_warp = sum_of_warp(min_of(units, kTooMany));
  int const cut_of_warp = sum_of_warp(cut < kTooMany ? static_cast<int>(cut) : kTooMany);
  if (threadIdx.x % 32 > 0) { return; }
  shared.units_counted[warp] = counted_of_warp;
  shared.units_cut[warp] = cut_of_warp;
}

// By one warp: parts of size number `i`. `warps` have noted units; `prefill`: places of that class; `most`: units of
// the longest tile.
__device__ __forceinline__ TriedParts try_parts(ScheduleKernelParams const& params, SequencesToCut const& shared,
                                                int warps, int prefill, int most, int i) {
  EvenParts const& even = params.even_parts;
  int const batch = params.sequences.batch;
  int const lane = static_cast<int>(threadIdx.x % 32);
  bool const mixed = prefill > 0;
  int const counted = sum_of_warp(lane < warps ? shared.units_counted[lane] : 0);
  long long const units =
      static_cast<long long>(even.head_groups) * sum_of_warp(lane < warps ? shared.units_cut[lane] : 0);
  if (counted > UnitsAndParts::kMostUnits || units == 0 || units > kMostUnitsShared) { return {}; }
  int const share = share_of_cta(even, static_cast<int>(units), mixed);
  PartsOfSize parts{size_of_parts(even, share, mixed, i)};
  auto const tiles_at = [&](int place) { return place < batch ? shared.at[place] : EvenTiles{}; };
  // Parts that CTAs have from the start, and of the 32 places that have the next one: the first, and parts before it.
  int const drawn_behind = even.ctas_for(mixed) / even.head_groups;
  int first_of_drawn = batch;
  int before_drawn = 0;
  int before = 0;
#pragma unroll 4
  for (int first = 0; first < batch; first += 32) {
    EvenTiles const of = tiles_at(first + lane);
    parts.add(of, first + lane >= prefill);
    int const until = before + sum_of_warp(of.parts(parts.size));
    if (before <= drawn_behind && drawn_behind < until) {
      first_of_drawn = first;
      before_drawn = before;
    }
    before = until;
  }
  EvenTiles const of = tiles_at(first_of_drawn + lane);
  int const until = before_drawn + sum_until_lane(of.parts(parts.size));
  bool const is_next = until - of.parts(parts.size) <= drawn_behind && drawn_behind < until;
  parts = {.size = parts.size,
           .prefill = {sum_of_warp(parts.prefill.all), sum_of_warp(parts.prefill.nearly_cut)},
           .decode = {sum_of_warp(parts.decode.all), sum_of_warp(parts.decode.nearly_cut)},
           .longest_whole = __reduce_max_sync(kAllLanes, parts.longest_whole),
           .cuts_rising = __any_sync(kAllLanes, parts.cuts_rising) != 0,
           .first_drawn = sum_of_warp(is_next ? min_of(of.units(), parts.size) : 0)};
  if (!parts_fit(even, mixed, parts)) { return {}; }
  int const least = size_of_parts(even, share, mixed, 0);
  int const end = mixed ? end_of_mixed_parts(even, least, parts) : parts.size;
  bool const pay = mixed ? mixed_parts_pay(end, least, most, parts) : even_parts_pay(even, least, parts);
  return pay ? TriedParts{parts.size, parts.in_front(), end} : TriedParts{};
}

// Those of the size with which all are done first, the smallest of such; by all threads.
__device__ __forceinline__ TriedParts best_parts(ScheduleKernelParams const& params, SequencesToCut& shared, int warps,
                                                 int prefill, int most) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  if (warp < kPartSizes) {
    TriedParts const tried = try_parts(params, shared, warps, prefill, most, warp);
    if (lane == 0) { shared.tried[warp] = tried; }
  }
  __syncthreads();
  int const end = lane < kPartSizes ? shared.tried[lane].end : TriedParts::kNever;
  int const soonest = __reduce_min_sync(kAllLanes, end);
  return shared.tried[__ffs(static_cast<int>(__ballot_sync(kAllLanes, end == soonest))) - 1];
}

}  // namespace hopper_attention::schedule_detail
