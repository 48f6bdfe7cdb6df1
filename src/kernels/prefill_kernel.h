// The prefill kernel: a persistent grid; in each CTA one producer warpgroup and one to three consumer warpgroups.
#pragma once

#include "kernels/cute.h"

#include "kernels/epilogue.h"
#include "kernels/mainloop.h"
#include "kernels/params.h"
#include "kernels/tile_scheduler.h"
#include "kernels/tile_work.h"
#include "kernels/tma_loader.h"
#include "kernels/traits.h"

namespace hopper_attention {

// Warps of the producer warpgroup. Each walks the same tiles, so that none waits for what only another needs.
enum class ProducerWarp { kKeysValues = 0, kQueries = 1, kHideValues = 2 };

// Calls `body(work)` for every tile of this CTA.
template <class Traits, class Body>
__device__ __forceinline__ void for_each_tile(PrefillParams const& params, Body body) {
  for (TileScheduler scheduler(params.scheduler, blockIdx.x); scheduler.valid(); scheduler.advance()) {
    body(tile_work(params, Traits::kConsumerWarpgroups, Traits::kKeys, scheduler.tile()));
  }
}

template <class Traits>
__device__ __forceinline__ void setup_barriers(typename Traits::SharedStorage& shared) {
  for (int w = 0; w < Traits::kConsumerWarpgroups; ++w) {
    init_barrier(shared.q_full[w], 1);
    init_barrier(shared.q_empty[w], 1);
  }
  for (int s = 0; s < Traits::kStages; ++s) {
    init_barrier(shared.full[s], 1);
    init_barrier(shared.empty[s], Traits::kConsumerWarpgroups * cutlass::NumWarpsPerWarpGroup);
    init_barrier(shared.landed[s], 1);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Traits>
__device__ __forceinline__ void produce(PrefillParams const& params, typename Traits::SharedStorage& shared) {
  TmaLoader<Traits> const loader{params.load, shared};
  auto const warp = static_cast<ProducerWarp>(cutlass::canonical_warp_idx_sync());
  bool const leader = cute::elect_one_sync();
  if (warp == ProducerWarp::kKeysValues && leader) {
    RingState<Traits::kStages> write;
    for_each_tile<Traits>(params, [&](TileWork const& work) {
      if (!work.range.empty()) { loader.load_keys_values(work, write); }
    });
  } else if (warp == ProducerWarp::kQueries && leader) {
    uint32_t phase = 0;
    for_each_tile<Traits>(params, [&](TileWork const& work) {
      loader.load_queries(work, phase);
      phase ^= 1;
    });
  } else if (warp == ProducerWarp::kHideValues) {
    RingState<Traits::kStages> read;
    uint32_t landed_phases = 0;
    for_each_tile<Traits>(params, [&](TileWork const& work) {
      if (!work.range.empty()) { loader.hide_values(work, read, landed_phases); }
    });
  }
}

template <class Traits>
__device__ __forceinline__ void consume(PrefillParams const& params, typename Traits::SharedStorage& shared) {
  int const warpgroup = cutlass::canonical_warp_group_idx() - 1;
  int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
  Turns<Traits> const turns{warpgroup};
  CollectiveMainloop<Traits> const mainloop{params, shared, warpgroup, thread, turns};
  CollectiveEpilogue<Traits> const epilogue{params, shared, warpgroup, thread};

  turns.setup();
  RingState<Traits::kStages> read;
  uint32_t q_phase = 0;

  for_each_tile<Traits>(params, [&](TileWork const& work) __attribute__((always_inline)) {
    typename Traits::Softmax softmax(params.softmax.scale_log2);
    cute::Tensor tOrO = partition_fragment_C(typename Traits::MmaPv{}, Shape<Int<kSlabRows>, Int<Traits::kHeadDimV>>{});
    auto const release_q = [&]() {
      sync_warpgroup(warpgroup);
      if (thread == 0) { arrive_barrier(shared.q_empty[warpgroup]); }
    };
    auto const after_scores = [&]() {
      if constexpr (Traits::kOwnOutputBuffer) { release_q(); }
    };
    // Also for a tile without keys: where O takes the place of Q, the slab must be this tile's.
    wait_barrier(shared.q_full[warpgroup], q_phase);
    q_phase ^= 1;
    if (!work.range.empty()) {
      mainloop.mma(work, read, softmax, tOrO, after_scores);
    } else {
      clear(tOrO);
      after_scores();
    }
    epilogue.store(work, softmax, tOrO);
    if constexpr (!Traits::kOwnOutputBuffer) {
      epilogue.wait_stores();
      release_q();
    }
  });
  epilogue.wait_stores();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) prefill_kernel(__grid_constant__ PrefillParams const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) { setup_barriers<Traits>(shared); }
  __syncthreads();

  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    produce<Traits>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    consume<Traits>(params, shared);
  }
#endif
}

}  // namespace hopper_attention
