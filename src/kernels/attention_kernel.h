// The attention kernel: a persistent grid; in each CTA one producer warpgroup and one to four consumer warpgroups. The
// prefill and the decode family are this kernel with different tiles.
#pragma once

#include "kernels/cute.h"

#include "kernels/cluster_merge.h"
#include "kernels/dependent_launch.h"
#include "kernels/early_prefetch.h"
#include "kernels/epilogue.h"
#include "kernels/gather_loader.h"
#include "kernels/mainloop.h"
#include "kernels/params.h"
#include "kernels/swapped_epilogue.h"
#include "kernels/swapped_mainloop.h"
#include "kernels/tile_exchange.h"
#include "kernels/tile_sources.h"
#include "kernels/tile_work.h"
#include "kernels/tma_loader.h"
#include "kernels/traits.h"
#include "kernels/warm_schedule.h"
#include "kernels/work_queue.h"
#include "kernels/work_source.h"

namespace hopper_attention {

// Warps of the producer warpgroup. Each walks the same work, so that none waits for what only another needs. kValues
// hides rows of V, and with pages loads V, too.
enum class ProducerWarp { kKeysValues = 0, kQueries = 1, kValues = 2, kSchedule = 3 };

// Whether the CTAs of a cluster may share a tile.
template <class Traits>
__device__ __forceinline__ bool may_share_tiles(AttentionParams const& params) {
  return Traits::kPaired || (Traits::kDecode && params.cluster.size > 1);
}

// Whether the other CTA of the cluster merges this part of a tile: it has the last keys.
template <class Traits>
__device__ __forceinline__ bool sends_part(TileWork const& work) {
  return Traits::kPaired && work.in_cluster && work.range.begin == 0;
}

template <class Traits>
__device__ __forceinline__ void setup_barriers(typename Traits::SharedStorage& shared, int cluster, bool gathered) {
  constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup;
  constexpr int kReadersOfWork = kConsumerWarps + 3;  // the producer warps but the scheduler
  for (int w = 0; w < Traits::kConsumerWarpgroups; ++w) {
    for (int b = 0; b < Traits::kQueryBuffers; ++b) {
      init_barrier(shared.q_full[b][w], 1);
      init_barrier(shared.q_empty[b][w], 1);
    }
  }
  for (int s = 0; s < Traits::kStages; ++s) {
    init_barrier(shared.full[s], 1);
    init_barrier(shared.empty[s], kConsumerWarps);
    init_barrier(shared.landed[s], gathered ? GatherLoader<Traits>::kArrivals : 1);
  }
  for (int s = 0; s < Traits::kWorkSlots; ++s) {
    init_barrier(shared.work_full[s], kWritersOfWork<Traits>);
    init_barrier(shared.work_empty[s], kReadersOfWork);
  }
  if constexpr (Traits::kListed) { init_barrier(shared.loads_issued, 1); }
  if constexpr (Traits::kDecode) {
    init_barrier(shared.parts_full, 1);
    init_barrier(shared.parts_empty, max_of(1, cluster));
  }
  if constexpr (Traits::kPaired) {
    for (int w = 0; w < Traits::kConsumerWarpgroups; ++w) {
      init_barrier(shared.exchange.full[w], 1);
      init_barrier(shared.exchange.empty[w], 1);
    }
  }
  cutlass::arch::fence_barrier_init();
}

// Before anything that the kernel before wrote is read, or what that one reads is written.
__device__ __forceinline__ void start(AttentionParams const& params) {
  if (params.wait_at_start) { wait_for_prerequisites(); }
  start_dependents();  // which may read the schedule at once
}

// The same in each role of the warps of a decode kernel: what comes before runs beside the kernel before.
template <class Traits>
__device__ __forceinline__ void start_role(AttentionParams const& params) {
  if constexpr (Traits::kDecode) { start(params); }
}

// The scheduler warp: finds this CTA's work.
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
  ScheduleNumbers numbers;  // of a schedule that has decided
  if constexpr (Traits::kDecode) {
    from = work_from(params);
    if (params.cluster.by_schedule) {
      start_role<Traits>(params);
      warm_schedule(params.schedule, params.sequences);
      Schedule const schedule(params.schedule);
      numbers = schedule.numbers();
      from = work_from(params.cluster, schedule);
    }
  }
  if constexpr (Traits::kPaired) {
    auto const publish_pairs = [&](auto source) { publish<Traits>(params, shared, source, draw); };
    constexpr int kSlabs = Traits::kConsumerWarpgroups;
    if (params.ranked.alike > 0) {
      publish_pairs(PairedTileSource<AlikeTiles>(params, kSlabs, Traits::kKeys, blockIdx.x));
    } else {
      publish_pairs(PairedTileSource<RankedTiles>(params, kSlabs, Traits::kKeys, blockIdx.x));
    }
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
    RankedTileSource source(params, Traits::kKeys, blockIdx.x);
    publish<Traits>(params, shared, source, draw);
  } else if (!Traits::kListed || from == WorkFrom::kTileList) {
    DenseWorkSource source(params, blockIdx.x, Traits::kParts && !Traits::kDecode && params.parts.on());
    start_role<Traits>(params);
    publish<Traits>(params, shared, source, draw);
  } else {
    if (!Traits::kDecode || !params.cluster.by_schedule) {
      start_role<Traits>(params);
      warm_schedule(params.schedule, params.sequences);
      numbers = Schedule(params.schedule).numbers();
    }
    using Source = typename Traits::Source;
    using State = typename Source::State;
    if (threadIdx.x % 32 == 0) { new (shared.source) State(Schedule(params.schedule, numbers)); }
    __syncwarp();
    Source source(params, *reinterpret_cast<State*>(shared.source), Traits::kConsumerWarpgroups, Traits::kKeys);
    publish<Traits>(params, shared, source, draw);
  }
}

template <class Traits>
__device__ __forceinline__ void produce(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  TmaLoader<Traits> const loader{params.load, shared, static_cast<int>(threadIdx.x % 32)};
  auto const warp = static_cast<ProducerWarp>(cutlass::canonical_warp_idx_sync());
  if (warp != ProducerWarp::kSchedule) { start_role<Traits>(params); }
  bool const by_cluster = params.cluster.size > 0 && (params.cluster.by_schedule || !params.cluster.draws());
  if (Traits::kDecode && by_cluster && (warp == ProducerWarp::kKeysValues || warp == ProducerWarp::kValues)) {
    int const tile = params.cluster.first_tile(blockIdx.x);
    if (tile < params.cluster.tiles) { warm_pages(params.load.pages, params.cluster.sequence(tile)); }
  }
  GatherLoader<Traits> const gather{params.load, shared, loader.lane};
  auto const announce_loads = [&](TileWork const& work) __attribute__((always_inline)) {
    if constexpr (Traits::kListed) {
      if (work.announces_loads && loader.lane == kActingLane) { arrive_barrier(shared.loads_issued); }
    }
  };
  bool const gathered = Traits::kPages && params.load.pages.gathered();
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
    RingState<Traits::kQueryBuffers> write;
    RingState<Traits::kStages> landed;
    uint32_t landed_phases = 0;
    for_each_work<Traits>(shared, [&](TileWork const& work) {
      loader.load_queries(work, write);
      ++write;
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

// Tiles of at most 16 rows.
template <class Traits>
__device__ __forceinline__ void consume_swapped(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  SwappedMainloop<Traits> mainloop(params, shared, thread);
  SwappedEpilogue<Traits> const epilogue{params, shared, thread};
  ClusterMerge<Traits> merge(params, shared, thread);
  RingState<Traits::kStages> read;
  uint32_t q_phase = 0;
  start_role<Traits>(params);
  for_each_work<Traits>(shared, [&](TileWork const& work) __attribute__((always_inline)) {
    wait_barrier(shared.q_full[0][0], q_phase);
    q_phase ^= 1;
    mainloop.mma(work, read, [&]() {
      if (thread == 0) { arrive_barrier(shared.q_empty[0][0]); }
    });
    PartEnd ends[kColumnsPerThread];
    mainloop.finish(ends);
    if (work.in_cluster) {
      merge(work, [&](int rows) { epilogue.send(merge, ends, mainloop.output(), rows); });
    } else if (work.slot >= 0) {
      epilogue.store_part(work, ends, mainloop.output());
    } else {
      epilogue.store(work, ends, mainloop.output());
    }
  });
  if (may_share_tiles<Traits>(params)) { merge.finish(); }
}

template <class Traits>
__device__ __forceinline__ void consume(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;
  int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  Turns<Traits> const turns{warpgroup};
  CollectiveMainloop<Traits> const mainloop{params, shared, warpgroup, thread, turns};
  CollectiveEpilogue<Traits> const epilogue{params, shared, warpgroup, thread};
  ClusterMerge<Traits> merge(params, shared, thread);
  TileExchange<Traits> exchange(params, shared, warpgroup, thread);
  constexpr bool kItemInRegisters = Traits::kHeadDimV <= 192;  // wider heads have none left
  constexpr bool kTwoBuffers = Traits::kQueryBuffers == 2;
  constexpr bool kOutputInRing = Traits::kOutputSlots > 0;

  cute::Tensor tSrS = partition_fragment_C(typename Traits::MmaQk{}, Shape<Int<kSlabRows>, Int<Traits::kKeys>>{});
  cute::Tensor tOrO = partition_fragment_C(typename Traits::MmaPv{}, Shape<Int<kSlabRows>, Int<Traits::kHeadDimV>>{});
  start_role<Traits>(params);
  turns.setup();
  RingState<Traits::kStages> read;
  RingState<Traits::kQueryBuffers> q;

  RingState<Traits::kStages> output;  // slots of the tile before
  bool is_first = true;
  ThreadKeys seen;
  // Waits for Q also for work without keys: O may take its place, so the slab must be this tile's.
  auto const begin = [&](TileWork const& work, SlabRange const& slab, auto in_turns) __attribute__((always_inline)) {
    if (!work.last) { wait_barrier(shared.q_full[q.slot][warpgroup], q.phase); }
    // Blocks that are skipped may need the slots that O of the tile before is in.
    bool const skips_far = Traits::kSkips && !work.last && !slab.empty() && work.range.end - slab.end > 1;
    if (kOutputInRing && skips_far) { mainloop.release_output(output, !is_first); }
    seen = mainloop.issue_first_scores(work, slab, in_turns, q.slot, read, tSrS);
    if (kOutputInRing && !skips_far) { mainloop.release_output(output, !is_first); }
  };
  auto const release_q = [&](int buffer) __attribute__((always_inline)) {
    sync_warpgroup(warpgroup);
    if (thread == 0) { arrive_barrier(shared.q_empty[buffer][warpgroup]); }
  };

  WorkState<Traits> items;
  // What this warpgroup's slab visits of an item.
  auto const slab_of = [&](WorkState<Traits> const& item) __attribute__((always_inline)) {
    if constexpr (Traits::kSkips) {
      return shared.slabs[item.slot][warpgroup];
    } else {
      return shared.work[item.slot].range.of_all_slabs();
    }
  };
  auto const takes_turns = [&](WorkState<Traits> const& item) __attribute__((always_inline)) {
    if constexpr (Traits::kTurnsInSomeTiles) {
      return is_in_turns(shared.work[item.slot].range, shared.slabs[item.slot][0], Traits::kConsumerWarpgroups);
    } else {
      return true_type{};
    }
  };
  TileWork const* work = &wait_work<Traits>(shared, items);
  if constexpr (Traits::kScoresEarly) {
    begin(*work, slab_of(items), takes_turns(items));
    mainloop.wait_first_scores(tSrS);
  }
  while (!work->last) {
    int const buffer = q.slot;
    TileWork at_start;
    if constexpr (kItemInRegisters) { at_start = read_at_once(*work); }
    TileWork const& now = kItemInRegisters ? at_start : *work;
    SlabRange const visited = slab_of(items);
    auto const in_turns = takes_turns(items);
    if constexpr (!Traits::kScoresEarly) {
      begin(now, visited, in_turns);
      mainloop.wait_first_scores(tSrS);
    }
    TileWork finished;  // the same, read again under the last product: before, there are no registers for all of it
    typename Traits::Softmax softmax(params.softmax);
    // The tile before has O in the other buffer, whose store is done long ago.
    auto const after_first = [&]() __attribute__((always_inline)) {
      if (kTwoBuffers && thread == 0 && !is_first) {
        epilogue.wait_stores();
        arrive_barrier(shared.q_empty[buffer ^ 1][warpgroup]);
      }
    };
    auto const after_scores = [&]() __attribute__((always_inline)) {
      if constexpr (!kTwoBuffers) { release_q(buffer); }
      finished = read_at_once(*work);
    };
    if (!visited.empty()) {
      mainloop.mma(now, visited, in_turns, seen, buffer, read, softmax, tSrS, tOrO, after_first, after_scores);
    } else {
      clear(tOrO);
      after_first();
      after_scores();
      if (Traits::kSkips && !finished.range.empty()) { mainloop.skip_tile(finished, in_turns, read); }
    }
    is_first = false;
    ++q;
    WorkState<Traits> const item = items;
    ++items;
    if constexpr (Traits::kScoresEarly) {
      work = &wait_work<Traits>(shared, items);
      begin(*work, slab_of(items), takes_turns(items));
    }
    typename Traits::Element* slab = shared.q[buffer][warpgroup];
    if constexpr (kOutputInRing) {
      output = read;
      slab = mainloop.wait_output(read);
      read.advance(Traits::kOutputSlots);
    }
    if (Traits::kDecode && finished.in_cluster) {
      if constexpr (Traits::kDecode) {
        merge(finished, [&](int row_count) { epilogue.send(merge, softmax, tOrO, row_count); });
      }
    } else if (sends_part<Traits>(finished)) {
      if constexpr (Traits::kPaired) { exchange.send(softmax, tOrO); }
    } else {
      if constexpr (Traits::kPaired) {
        if (finished.in_cluster) { exchange.take(softmax, tOrO); }
      }
      epilogue.store(finished, slab, softmax, tOrO);
    }
    release_work<Traits>(shared, item);
    if constexpr (Traits::kScoresEarly) {
      mainloop.wait_first_scores(tSrS);
    } else {
      work = &wait_work<Traits>(shared, items);
    }
  }
  epilogue.wait_stores();
  if constexpr (Traits::kDecode) {
    if (may_share_tiles<Traits>(params)) { merge.finish(); }
  }
  if constexpr (Traits::kPaired) { exchange.finish(blockIdx.x % 2 == 0); }
}

__device__ __forceinline__ void prefetch_maps(AttentionParams const& params) {
  auto const prefetch = [](CUtensorMap const& map) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&map));
  };
  prefetch(params.load.q);
  prefetch(params.load.k);
  prefetch(params.load.v);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kTile.per_sm)
    attention_kernel(__grid_constant__ AttentionParams const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) { setup_barriers<Traits>(shared, params.cluster.size, params.load.pages.gathered()); }
  if (threadIdx.x == 32) { prefetch_maps(params); }
  __syncthreads();
  if (may_share_tiles<Traits>(params)) { cute::cluster_arrive_relaxed(); }
  if constexpr (!Traits::kDecode) { start(params); }
  // All threads at once, since racecheck lets none go on before all that are left wait, too.
  if constexpr (Traits::kPaired) { cute::cluster_wait(); }

  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    produce<Traits>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kDecode) {
      if (params.cluster.fetches_early && cutlass::canonical_warp_idx_sync() == cutlass::NumWarpsPerWarpGroup) {
        EarlyPrefetch<Traits>::fetch(params, static_cast<int>(threadIdx.x % 32));
        __syncwarp();
      }
    }
    if constexpr (Traits::kSwapped) {
      consume_swapped<Traits>(params, shared);
    } else {
      consume<Traits>(params, shared);
    }
  }
  // One CTA is enough; the others make room for the kernel that follows.
  if (!params.wait_at_start && blockIdx.x == 0) { wait_for_prerequisites(); }
#endif
}

}  // namespace hopper_attention
