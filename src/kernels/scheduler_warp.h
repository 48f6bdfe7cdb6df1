// The scheduler warp: finds the work of its CTA, whatever a call has it follow from, and publishes it.
#pragma once

#include "kernels/cute.h"

#include <type_traits>

#include "kernels/params.h"
#include "kernels/ranked_tiles.h"
#include "kernels/schedule.h"
#include "kernels/start_role.h"
#include "kernels/tile_sources.h"
#include "kernels/warm_schedule.h"
#include "kernels/work_queue.h"
#include "kernels/work_source.h"

namespace hopper_attention {

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
  WorkFrom from = Traits::kListed && params.listed ? WorkFrom::kSchedule : WorkFrom::kTileList;
  if constexpr (Traits::kDecode) {
    from = work_from(params);
    if (params.cluster.by_schedule) {
      start_role<Traits>(params);
      warm_schedule(params.schedule, params.sequences);
      from = work_from(params.cluster, params.schedule);
    }
  }
  [[maybe_unused]] auto* const room = reinterpret_cast<RankedSequence*>(shared.source);
  if constexpr (Traits::kPaired) {
    auto const publish_pairs = [&]<class Tiles>(std::type_identity<Tiles>) {
      PairedTileSource<Tiles> source(params, Traits::kConsumerWarpgroups, Traits::kKeys, blockIdx.x, room);
      publish<Traits>(params, shared, source, draw);
    };
    if (params.ranked.alike > 0) {
      publish_pairs(std::type_identity<AlikeTiles>{});
    } else {
      publish_pairs(std::type_identity<RankedTiles>{});
    }
  } else if (Traits::kInParts && from == WorkFrom::kClusters && params.cluster.size > 1) {
    start_role<Traits>(params);
    ClusterPartsSource source(params, Traits::kKeys, blockIdx.x);
    publish<Traits>(params, shared, source, draw);
  } else if (Traits::kInParts && from == WorkFrom::kDrawnTiles) {
    start_role<Traits>(params);
    warm_lengths(params.sequences);
    FoldedTileSource source(params, Traits::kKeys);
    publish<Traits>(params, shared, source, draw);
  } else if (Traits::kDecode && from == WorkFrom::kClusters) {
    ClusterWorkSource source(params, blockIdx.x);
    start_role<Traits>(params);
    publish<Traits>(params, shared, source, draw);
  } else if (Traits::kDecode && from == WorkFrom::kDrawnTiles) {
    start_role<Traits>(params);
    warm_lengths(params.sequences);
    DrawnTileSource source(params);
    publish<Traits>(params, shared, source, draw);
  } else if (Traits::kRanked && params.ranked.ctas > 0) {
    RankedTileSource source(params, Traits::kKeys, blockIdx.x, room);
    publish<Traits>(params, shared, source, draw);
  } else if (!Traits::kListed || from == WorkFrom::kTileList) {
    DenseWorkSource source(params, blockIdx.x, Traits::kParts && !Traits::kDecode && params.parts.on());
    start_role<Traits>(params);
    publish<Traits>(params, shared, source, draw);
  } else {
    if (!Traits::kDecode || !params.cluster.by_schedule) {
      start_role<Traits>(params);
      warm_schedule(params.schedule, params.sequences);
    }
    using Source = typename Traits::Source;
    using State = typename Source::State;
    if (threadIdx.x % 32 == 0) { new (shared.source) State(Schedule(params.schedule)); }
    __syncwarp();
    Source source(params, *reinterpret_cast<State*>(shared.source), Traits::kConsumerWarpgroups, Traits::kKeys);
    publish<Traits>(params, shared, source, draw);
  }
}

}  // namespace hopper_attention
