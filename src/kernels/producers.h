// The producer warpgroup: its warps bring Q, K and V into shared memory, and one of them finds the work.
#pragma once

#include "kernels/cute.h"

#include "kernels/early_item.h"
#include "kernels/gather_loader.h"
#include "kernels/params.h"
#include "kernels/ring.h"
#include "kernels/scheduler_warp.h"
#include "kernels/start_role.h"
#include "kernels/tile_work.h"
#include "kernels/tma_loader.h"
#include "kernels/warm_schedule.h"
#include "kernels/work_queue.h"

namespace hopper_attention {

// Warps of the producer warpgroup. Each walks the same work, so that none waits for what only another needs. kValues
// hides rows of V, and with pages loads V, too.
enum class ProducerWarp { kKeysValues = 0, kQueries = 1, kValues = 2, kSchedule = 3 };

template <class Traits>
__device__ __forceinline__ void produce(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  TmaLoader<Traits> const loader{params.load, shared, static_cast<int>(threadIdx.x % 32)};
  auto const warp = static_cast<ProducerWarp>(cutlass::canonical_warp_idx_sync());
  constexpr bool kGuesses = Traits::kGuessesEarly && !Traits::kConsumerGuesses;
  bool const guesses = kGuesses && params.guesses && warp == ProducerWarp::kQueries;
  if (warp != ProducerWarp::kSchedule && !guesses) { start_role<Traits>(params); }
  if constexpr (Traits::kGuessesEarly) {
    if (threadIdx.x == kActingLane) { arrive_barrier(shared.early.may_start); }  // of the first warp
  }
  bool const by_cluster = params.cluster.size > 0 && (params.cluster.by_schedule || !params.cluster.draws());
  if (Traits::kDecode && by_cluster && (warp == ProducerWarp::kKeysValues || warp == ProducerWarp::kValues)) {
    int const tile = params.cluster.first_tile(blockIdx.x);
    if (tile < params.cluster.tiles && !params.cluster.packed) {
      warm_pages(params.load.pages, Traits::ClusterTiles::tile(params, tile).batch);
    }
  }
  GatherLoader<Traits> const gather{params.load, shared, loader.lane};
  auto const announce_loads = [&](TileWork const& work) __attribute__((always_inline)) {
    if constexpr (Traits::kDrawn) {
      if (work.announces_loads && loader.lane == kActingLane) { arrive_barrier(shared.loads_issued); }
    }
  };
  bool const gathered = Traits::kGathers && params.load.pages.gathered();
  if (gathered && (warp == ProducerWarp::kKeysValues || warp == ProducerWarp::kValues)) {
    RingState<Traits::kStages> write;
    // A loop for each warp: in a common one prefill on pages of 1 takes 3 to 5 % longer, and nvcc 12.8 to 13.0 spill
    // the warp's index.
    if (warp == ProducerWarp::kKeysValues) {
      for_each_work<Traits>(shared, [&](TileWork const& work) {
        if (!work.range.empty()) { gather.load_keys(work, write); }
        announce_loads(work);
        loader.leave_output(write);
      });
    } else {
      for_each_work<Traits>(shared, [&](TileWork const& work) {
        if (!work.range.empty()) { gather.load_values(work, write); }
        write.advance(Traits::kOutputSlots);
      });
    }
    cp_async_wait<0>();
  } else if (warp == ProducerWarp::kKeysValues) {
    RingState<Traits::kStages> write;
    for_each_work<Traits>(shared, [&](TileWork const& work) {
      if (!work.range.empty()) { loader.load_keys_values(work, write); }
      announce_loads(work);
      loader.leave_output(write);
    });
  } else if (warp == ProducerWarp::kQueries) {
    if constexpr (kGuesses) {
      if (guesses) {
        publish_early<Traits>(params, shared);
        start_role<Traits>(params);
      }
    }
    RingState<Traits::kQueryBuffers> write;
    RingState<Traits::kStages> landed;
    uint32_t landed_phases = 0;
    for_each_work<Traits>(shared, [&](TileWork const& work) {
      if (!Traits::kInParts || begins_tile(work.part)) {
        loader.load_queries(work, write);
        ++write;
      }
      if (gathered && loader.lane == kActingLane) { gather.announce(work, landed, landed_phases); }
      landed.advance(Traits::kOutputSlots);
    });
  } else if (warp == ProducerWarp::kValues) {
    RingState<Traits::kStages> read;
    uint32_t landed_phases = 0;
    for_each_work<Traits>(shared, [&](TileWork const& work) {
      if (!work.range.empty()) { loader.finish_values(work, read, landed_phases); }
      read.advance(Traits::kOutputSlots);
    });
  } else {
    schedule<Traits>(params, shared);
  }
}

}  // namespace hopper_attention
