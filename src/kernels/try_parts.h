// Finds for a schedule the size of even parts that its tiles are cut into, if any: several are tried, by a warp each.
#pragma once

#include "kernels/even_parts.h"
#include "kernels/lanes.h"
#include "kernels/schedule_params.h"

namespace hopper_attention::schedule_detail {

// Even parts of one size: `cost` is when all are done and merged, in units.
struct TriedParts {
  static constexpr int kNever = 1 << 30;  // they do not fit, or do not pay

  int size = 0;
  int in_front = 0;  // parts of one head group, EvenParts
  int cost = kNever;
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
  constexpr int kTooMany = (1 << 30) / kMostPlacesOfOneCta;
  static_assert(kTooMany > UnitsAndParts::kMostUnits);
  long long const cut = static_cast<long long>(of.tiles()) * of.mean_units();
  int const counted_of_warp = sum_of_warp(min_of(units, kTooMany));
  int const cut_of_warp = sum_of_warp(cut < kTooMany ? static_cast<int>(cut) : kTooMany);
  if (threadIdx.x % 32 > 0) { return; }
  shared.units_counted[warp] = counted_of_warp;
  shared.units_cut[warp] = cut_of_warp;
}

// The places of the batch and their tiles, by one warp: a step of a kernel for few queries, or one for both classes.
struct StepToCut {
  EvenParts const& even;
  EvenTiles const* at;
  int batch;
  int prefill;  // places of that class
  int most;     // units of the longest tile
  int most_decode;
  int counted;  // units, as metadata count them
  int share;    // of one CTA

  __device__ __forceinline__ EvenTiles tiles_at(int place) const { return place < batch ? at[place] : EvenTiles{}; }
};

// Parts of size number `i` of tiles of few queries alone.
__device__ __forceinline__ TriedParts try_parts_of_few(StepToCut const& step, int i) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  PartsOfSize parts{size_of_parts(step.share, i)};
#pragma unroll 4
  for (int first = 0; first < step.batch; first += 32) { parts.add(step.tiles_at(first + lane)); }
  parts = {parts.size, sum_of_warp(parts.all), sum_of_warp(parts.in_front),
           __reduce_max_sync(kAllLanes, parts.longest_whole)};
  bool const pay =
      parts_fit(step.even, false, parts.all, parts.in_front) && even_parts_pay(step.even, step.share, parts);
  return pay ? TriedParts{parts.size, parts.in_front, parts.size} : TriedParts{};
}

// The same in a kernel for both classes. Not tiles of a fresh prompt, which would all be in as many parts as the
// longest.
__device__ __forceinline__ TriedParts try_mixed_parts(StepToCut const& step, int i) {
  EvenParts const& even = step.even;
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const size = size_of_mixed_parts(even, step.share, step.most, i);
  bool const cuts_decode = is_nearly_cut(step.most_decode, size);
  int all = 0;
  int cut = 0;
  PartsUntil front;
  bool cuts_rising = false;
#pragma unroll 4
  for (int place = lane; place < step.batch; place += 32) {
    EvenTiles const of = step.at[place];
    int const parts = of.parts(size);
    all += parts;
    if (is_nearly_cut(of.units(), size) || (place < step.prefill && cuts_decode)) {
      front.parts += parts;
      front.units += of.units_of_all();
    }
    if (of.units() > size) {
      cut += parts;
      cuts_rising = cuts_rising || (parts > 0 && of.rise());
    }
  }
  all = sum_of_warp(all);
  cut = even.head_groups * sum_of_warp(cut);
  front = {sum_of_warp(front.parts), even.head_groups * sum_of_warp(front.units)};
  if (!parts_fit(even, true, all, front.parts) || __any_sync(kAllLanes, cuts_rising) != 0) { return {}; }
  int const in_front = front.parts;
  front.parts *= even.head_groups;

  PartsUntil done;
  int end = 0;
  for (int first = 0; first < step.batch; first += 32) {
    EvenTiles const of = step.tiles_at(first + lane);
    int const parts = even.head_groups * of.parts(size);
    int const units = even.head_groups * of.units_of_all();
    PartsUntil until{done.parts + sum_of_warp(parts), done.units + sum_of_warp(units)};
    PartsUntil const next = until;
    if (until.parts > even.mixed_ctas) {  // otherwise nothing has been drawn yet
      until = {done.parts + sum_until_lane(parts), done.units + sum_until_lane(units)};
    }
    done = next;
    if (parts > 0) { end = max_of(end, end_of_parts(even.mixed_ctas, front, until, of.length(size))); }
  }
  int const cost = __reduce_max_sync(kAllLanes, end) + units_of_merging(cut, even.mixed_ctas);
  MixedStep const of_step{even.mixed_ctas, step.most, step.share,
                          static_cast<long long>(even.head_groups) * step.counted};
  bool const pay = mixed_parts_pay(of_step, cost, cut == 0 && done.parts <= even.mixed_ctas);
  return pay ? TriedParts{size, in_front, cost} : TriedParts{};
}

// Those of the size with which all are done and merged first, by all threads; of several in a kernel for both classes
// the last one, which is least to merge. `warps` have noted units.
__device__ __forceinline__ TriedParts best_parts(ScheduleKernelParams const& params, SequencesToCut& shared, int warps,
                                                 int prefill, int most, int most_decode) {
  EvenParts const& even = params.even_parts;
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  if (warp < kPartSizes) {
    bool const mixed = prefill > 0;
    int const counted = sum_of_warp(lane < warps ? shared.units_counted[lane] : 0);
    long long const units =
        static_cast<long long>(even.head_groups) * sum_of_warp(lane < warps ? shared.units_cut[lane] : 0);
    TriedParts tried;
    if (counted <= UnitsAndParts::kMostUnits && units > 0 && units <= kMostUnitsShared) {
      int const share = share_of_cta(even, static_cast<int>(units), mixed);
      StepToCut const step{even, shared.at, params.sequences.batch, prefill, most, most_decode, counted, share};
      tried = mixed ? try_mixed_parts(step, warp) : try_parts_of_few(step, warp);
    }
    if (lane == 0) { shared.tried[warp] = tried; }
  }
  __syncthreads();
  int const cost = lane < kPartSizes ? shared.tried[lane].cost : TriedParts::kNever;
  int const least = __reduce_min_sync(kAllLanes, cost);
  unsigned const found = __ballot_sync(kAllLanes, cost == least) & ((1U << kPartSizes) - 1);
  return shared.tried[prefill > 0 ? log2_of(static_cast<int>(found)) : __ffs(static_cast<int>(found)) - 1];
}

}  // namespace hopper_attention::schedule_detail
