// The scheduler warp: finds the work of its CTA, whatever a call has it follow from, and publishes it.
#pragma once

#include "kernels/cute.h"

#include "kernels/guessed_work.h"
#include "kernels/params.h"
#include "kernels/ranked_tiles.h"
#include "kernels/schedule.h"
#include "kernels/start_role.h"
#include "kernels/tile_sources.h"
#include "kernels/warm_schedule.h"
#include "kernels/work_queue.h"
#include "kernels/work_source.h"

namespace hopper_attention {

// Of a kernel of few queries whose tiles follow from the index of the CTA. `publish_items` takes a source of work, and
// begins with the first item of the CTA.
template <class Traits, class Publish>
__device__ __forceinline__ void publish_by_index(AttentionParams const& params, Publish publish_items) {
  int const cta = static_cast<int>(blockIdx.x);
  if (params.cluster.on()) {
    ClusterWorkSource<typename Traits::ClusterTiles> source(params, cta);
    start_role<Traits>(params);
    publish_items(source);
  } else {
    DenseWorkSource source(params, cta, false);
    start_role<Traits>(params);
    publish_items(source);
  }
}

// Of one that looks for its work in a schedule, if there is one. With `guesses` what the schedule says is read before
// the wait for the kernel before; false, and nothing is published, if that was wrong or is of no use.
template <class Traits, class Publish>
__device__ __forceinline__ bool publish_few_queries(AttentionParams const& params,
                                                    typename Traits::SharedStorage& shared, Publish publish_items,
                                                    bool guesses) {
  ClusterParams const& cluster = params.cluster;
  ScheduleParams const& schedule = params.schedule;
  WorkFrom from = work_from(params);
  GuessedFact fact;
  DrawnTiles tiles;
  if (from == WorkFrom::kSchedule) {
    if (guesses) {
      fact = GuessedFact(schedule);
      from = work_from(cluster, schedule, fact.guess);
    } else {
      start_role<Traits>(params);
      warm_schedule(schedule, params.sequences);
      if (cluster.by_schedule) { from = work_from(cluster, schedule, schedule.metadata); }
    }
    if (from == WorkFrom::kSchedule) {
      ScheduleCopy const copy(schedule, shared.schedule_copy());
      int const* metadata = schedule.metadata;
      if (guesses) {
        copy.refresh();
        metadata = copy.words();
        // What is confirmed behind the wait must all be of one copy.
        if (work_from(cluster, schedule, metadata) != WorkFrom::kSchedule) { return false; }
      }
      Schedule const made(schedule, metadata);
      if (made.by_units()) {
        if (!params.signals) { start_dependents(); }
        return publish_items(GuessedUnitSource(params, copy, made, Traits::kKeys, Traits::kMayGuess && guesses));
      }
      tiles = drawn_tiles(made, schedule);
    }
    if (guesses && from != WorkFrom::kClusters) {
      start_role<Traits>(params);
      if (from != WorkFrom::kDrawnTiles || !fact.holds()) { return false; }
    }
  }
  if (Traits::kInParts && from == WorkFrom::kClusters && cluster.size > 1) {
    start_role<Traits>(params);
    return publish_items(ClusterPartsSource(params, Traits::kKeys, blockIdx.x));
  }
  if (from == WorkFrom::kClusters) {
    GuessedClusterSource<typename Traits::ClusterTiles> source(params, fact);
    start_role<Traits>(params);
    return publish_items(source);
  }
  if (!params.listed && !cluster.on()) {
    DenseWorkSource source(params, blockIdx.x, false);
    start_role<Traits>(params);
    return publish_items(source);
  }
  start_role<Traits>(params);
  warm_lengths(params.sequences);
  if (from == WorkFrom::kDrawnTiles) { tiles = drawn_tiles(cluster, params.sequences.batch); }
  if constexpr (Traits::kInParts) {
    return publish_items(FoldedTileSource(params, tiles, Traits::kKeys));
  } else {
    return publish_items(DrawnTileSource(params, tiles));
  }
}

// Of a kernel of many queries.
template <class Traits, class Publish>
__device__ __forceinline__ void publish_many_queries(AttentionParams const& params,
                                                     typename Traits::SharedStorage& shared, Publish publish_items) {
  [[maybe_unused]] auto* const room = reinterpret_cast<RankedSequence*>(shared.source);
  int const cta = static_cast<int>(blockIdx.x);
  start_role<Traits>(params);
  if constexpr (Traits::kPaired) {
    if (params.ranked.alike > 0) {
      publish_items(PairedTileSource<AlikeTiles>(params, Traits::kConsumerWarpgroups, Traits::kKeys, cta, room));
    } else {
      publish_items(PairedTileSource<RankedTiles>(params, Traits::kConsumerWarpgroups, Traits::kKeys, cta, room));
    }
  } else if (Traits::kRanked && params.ranked.ctas > 0) {
    publish_items(RankedTileSource(params, Traits::kKeys, cta, room));
  } else if (!Traits::kListed || !params.listed) {
    int const queries = Traits::kListed ? Traits::kConsumerWarpgroups * params.packing.queries_per_slab : 0;
    publish_items(DenseWorkSource(params, cta, Traits::kParts && params.parts.on(), queries));
  } else {
    ScheduleParams const& schedule = params.schedule;
    using Source = WorkSource<Traits::kPlacesNear, typename Traits::Few>;
    using State = typename Source::State;
    auto* const state = reinterpret_cast<State*>(shared.source);
    warm_schedule(schedule, params.sequences);
    bool begun = false;
    if constexpr (Traits::kGuessesEarly) {
      if (params.guesses) {
        wait_barrier(shared.early.known, 0);
        begun = shared.early.published;
      }
    }
    if (!begun) {
      if (threadIdx.x % 32 == 0) {
        new (state) State(Schedule(schedule, schedule.metadata, may_part_in_prefill_kernel));
      }
      __syncwarp();
    }
    publish_items(Source(params, schedule.metadata, *state, Traits::kConsumerWarpgroups, Traits::kKeys), begun);
  }
}

template <class Traits>
__device__ __forceinline__ void schedule(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  int round = 0;
  auto const draw = [&](Draws const& draws) {
    int index = draws.item(static_cast<int>(blockIdx.x), round++);
    if (index != Draws::kFromCounter) { return index; }
    if (threadIdx.x % 32 == 0) {
      auto* const counter = reinterpret_cast<unsigned*>(draws.counter);
      index = draws.first_of_counter() + static_cast<int>(atomicInc(counter, draws.last_of_counter()));
    }
    return __shfl_sync(0xffffffff, index, 0);
  };
  auto const publish_items = [&](auto source, bool begun = false) __attribute__((always_inline)) {
    round = begun ? 1 : 0;
    return publish<Traits>(params, shared, source, draw, begun);
  };
  if constexpr (Traits::kByIndex) {
    publish_by_index<Traits>(params, publish_items);
  } else if constexpr (Traits::kDecode) {
    // Only those by a schedule guess, which ptxas must see: otherwise the search has two bodies, of 600 instructions.
    bool guesses = Traits::kMayGuess && params.cluster.by_schedule && params.guesses;
    while (!publish_few_queries<Traits>(params, shared, publish_items, guesses)) {
      guesses = false;
      leave_schedule_copy<Traits>();
    }
  } else {
    publish_many_queries<Traits>(params, shared, publish_items);
  }
}

}  // namespace hopper_attention
