// The attention kernel: a persistent grid; in each CTA one producer warpgroup and one to four consumer warpgroups. The
// prefill and the decode family are this kernel with different tiles.
#pragma once

#include "kernels/cute.h"

#include "kernels/consumers.h"
#include "kernels/dependent_launch.h"
#include "kernels/early_item.h"
#include "kernels/early_prefetch.h"
#include "kernels/params.h"
#include "kernels/producers.h"
#include "kernels/start_role.h"
#include "kernels/traits.h"

namespace hopper_attention {

template <class Traits>
__device__ __forceinline__ void setup_barriers(AttentionParams const& params, typename Traits::SharedStorage& shared) {
  bool const gathered = Traits::kGathers && params.load.pages.gathered();
  constexpr int kReadersOfWork = Traits::kConsumerWarps + 3;  // the producer warps but the scheduler
  for (int w = 0; w < Traits::kConsumerWarpgroups; ++w) {
    for (int b = 0; b < Traits::kQueryBuffers; ++b) {
      init_barrier(shared.q_full[b][w], 1);
      init_barrier(shared.q_empty[b][w], 1);
    }
  }
  for (int s = 0; s < Traits::kStages; ++s) {
    init_barrier(shared.full[s], 1);
    init_barrier(shared.empty[s], Traits::kConsumerWarps);
    init_barrier(shared.landed[s], gathered ? GatherLoader<Traits>::kArrivals : 1);
  }
  for (int s = 0; s < Traits::kWorkSlots; ++s) {
    init_barrier(shared.work_full[s], kWritersOfWork<Traits>);
    init_barrier(shared.work_empty[s], kReadersOfWork);
  }
  if constexpr (Traits::kDrawn) { init_barrier(shared.loads_issued, 1); }
  if constexpr (Traits::kGuessesEarly) {
    init_barrier(shared.early.may_start, 1);
    init_barrier(shared.early.known, kLanes);
  }
  if constexpr (Traits::kDecode) {
    init_barrier(shared.parts_full, 1);
    init_barrier(shared.parts_empty, max_of(1, params.cluster.size));
  }
  if constexpr (Traits::kPaired) {
    for (int w = 0; w < Traits::kConsumerWarps; ++w) {
      init_barrier(shared.exchange.full[w], 1);
      init_barrier(shared.exchange.empty[w], 1);
    }
  }
  cutlass::arch::fence_barrier_init();
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

  if (threadIdx.x == 0) { setup_barriers<Traits>(params, shared); }
  if (threadIdx.x == 32) { prefetch_maps(params); }
  __syncthreads();
  if (may_share_tiles<Traits>(params)) { cute::cluster_arrive_relaxed(); }
  if constexpr (!Traits::kRolesStart) { start(params); }
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
    if constexpr (Traits::kConsumerGuesses) {
      if (params.guesses && cutlass::canonical_warp_idx_sync() == cutlass::NumWarpsPerWarpGroup) {
        publish_early<Traits>(params, shared);
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
