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

// The places of the batch and their tiles, by one warp.
struct StepToCut {
  EvenParts const& even;
  EvenTiles const* at;
  int batch;
  int prefill;  // places of that class
  int most;     // units of the longest tile
  int most_decode;
  bool one_each;  // one tile of a kernel for few queries holds any sequence
  int ctas;
  int queries_counted;  // of a tile of many as metadata count it
  int counted;          // units, as metadata count them
  int share;            // of one CTA

  __device__ __forceinline__ EvenTiles tiles_at(int place) const { return place < batch ? at[place] : EvenTiles{}; }
  // Whether tiles of few queries that are cut stand behind a place.
  __device__ __forceinline__ bool stands_before_cut(int place, int size) const {
    return place < prefill && is_nearly_cut(most_decode, size);
  }
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
      parts_fit(step.even, step.ctas, parts.all, parts.in_front) && even_parts_pay(step.even, step.share, parts);
  return pay ? TriedParts{parts.size, parts.in_front, parts.size} : TriedParts{};
}

// The same of any tiles, by what they cost. Not those of a fresh prompt, which would all be in as many parts as the
// longest.
__device__ __forceinline__ TriedParts try_parts_by_cost(StepToCut const& step, int i) {
  EvenParts const& even = step.even;
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const size = size_by_cost(even, step.share, step.most, i);
  int all = 0;
  int cut = 0;
  PartsUntil front;
  bool cuts_rising = false;
#pragma unroll 4
  for (int place = lane; place < step.batch; place += 32) {
    EvenTiles const of = step.at[place];
    int const parts = of.parts(size);
    all += parts;
    if (is_nearly_cut(of.units(), size) || step.stands_before_cut(place, size)) {
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
  if (!parts_fit(even, step.ctas, all, front.parts) || __any_sync(kAllLanes, cuts_rising) != 0) { return {}; }
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
    if (until.parts > step.ctas) {  // otherwise nothing has been drawn yet
      until = {done.parts + sum_until_lane(parts), done.units + sum_until_lane(units)};
    }
    done = next;
    if (parts > 0) { end = max_of(end, end_of_parts(step.ctas, front, until, of.length(size))); }
  }
  int const cost = __reduce_max_sync(kAllLanes, end) + units_of_merging(cut, step.ctas);
  CostedStep const of_step{.one_each = step.one_each,
                           .ctas = step.ctas,
                           .most = step.most,
                           .share = step.share,
                           .counted = static_cast<long long>(even.head_groups) * step.counted,
                           .queries_counted = step.queries_counted,
                           .queries = even.many_queries.divisor,
                           .units_of_chunks = even.units_of_chunks};
  bool const pay = parts_pay_by_cost(of_step, cost, cut, done.parts <= step.ctas);
  return pay ? TriedParts{size, in_front, cost} : TriedParts{};
}

// What all threads know of a step whose units are noted.
struct NotedStep {
  int warps;        // that have noted units
  int prefill;      // places of that class
  int most;         // units of the longest tile
  int most_decode;  // of few queries
  bool one_each;    // one tile of a kernel for few queries holds any sequence
};

// Those of the size that costs least, by all threads; of several the last one, which is least to merge. `try_parts`: of
// a step and a number of a size.
template <class TryParts>
__device__ __forceinline__ TriedParts best_parts(ScheduleKernelParams const& params, SequencesToCut& shared,
                                                 NotedStep const& noted, TryParts try_parts) {
  EvenParts const& even = params.even_parts;
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  __syncthreads();  // units are noted, and nobody reads what was tried before
  if (warp < kPartSizes) {
    int const ctas = noted.one_each ? even.ctas : even.many_ctas;
    int const counted = sum_of_warp(lane < noted.warps ? shared.units_counted[lane] : 0);
    long long const units =
        static_cast<long long>(even.head_groups) * sum_of_warp(lane < noted.warps ? shared.units_cut[lane] : 0);
    TriedParts tried;
    if (counted <= UnitsAndParts::kMostUnits && units > 0 && units <= kMostUnitsShared) {
      int const share = share_of_cta(even, static_cast<int>(units), ctas);
      tried = try_parts(StepToCut{.even = even,
                                  .at = shared.at,
                                  .batch = params.sequences.batch,
                                  .prefill = noted.prefill,
                                  .most = noted.most,
                                  .most_decode = noted.most_decode,
                                  .one_each = noted.one_each,
                                  .ctas = ctas,
                                  .queries_counted = params.prefill.queries,
                                  .counted = counted,
                                  .share = share},
                        warp);
    }
    if (lane == 0) { shared.tried[warp] = tried; }
  }
  __syncthreads();
  int const cost = lane < kPartSizes ? shared.tried[lane].cost : TriedParts::kNever;
  int const least = __reduce_min_sync(kAllLanes, cost);
  unsigned const found = __ballot_sync(kAllLanes, cost == least) & ((1U << kPartSizes) - 1);
  return shared.tried[log2_of(static_cast<int>(found))];
}

}  // namespace hopper_attention::schedule_detail
