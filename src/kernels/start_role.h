// What all roles of the warps of a CTA begin with.
#pragma once

#include "kernels/cute.h"

#include "kernels/dependent_launch.h"
#include "kernels/params.h"

namespace hopper_attention {

// Whether the CTAs of a cluster may share a tile.
template <class Traits>
__device__ __forceinline__ bool may_share_tiles(AttentionParams const& params) {
  return Traits::kPaired || (Traits::kDecode && params.cluster.size > 1);
}

// Before anything that the kernel before wrote is read, or what that one reads is written.
__device__ __forceinline__ void start(AttentionParams const& params) {
  if (params.wait_at_start) { wait_for_prerequisites(); }
  if (params.signals) { start_dependents(); }  // which may read the schedule at once
}

// The same in each role of the warps of a kernel whose roles start by themselves: what comes before runs beside the
// kernel before.
template <class Traits>
__device__ __forceinline__ void start_role(AttentionParams const& params) {
  if constexpr (Traits::kRolesStart) { start(params); }
}

}  // namespace hopper_attention
