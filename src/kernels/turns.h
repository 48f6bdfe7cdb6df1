// Ping-pong: consumer warpgroups take turns at the tensor cores, so that one multiplies while another computes
// exponentials.
#pragma once

#include "kernels/cute.h"

namespace hopper_attention {

using namespace cute;

// Named barriers of a CTA, four for turns and four for slabs, behind those that CUTLASS keeps for itself: it adds their
// number. The hardware has 16.
enum NamedBarrierId : uint32_t { kTurnBarrier = 0, kSlabBarrier = 4 };
static_assert(kSlabBarrier + 4 + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount <= 16);

// Barrier kTurnBarrier + w opens for warpgroup w when the warpgroup before it in its cycle passes the turn on. All
// warpgroups have equally many turns of a tile, or none.
template <class Traits>
struct Turns {
  int warpgroup;

  static constexpr int kThreads = 2 * cutlass::NumThreadsPerWarpGroup;  // the one that passes and the one that waits

  // The first of each cycle goes first. Called once by every warpgroup.
  __device__ __forceinline__ void setup() const {
    if constexpr (Traits::kPingPong) {
      if (warpgroup >= Traits::kConsumerWarpgroups - Traits::kTurnCycles) { pass(true_type{}); }
    }
  }

  __device__ __forceinline__ void wait(auto in_turns) const {
    if constexpr (Traits::kPingPong) {
      if (in_turns) { cutlass::arch::NamedBarrier::sync(kThreads, kTurnBarrier + warpgroup); }
    }
  }

  __device__ __forceinline__ void pass(auto in_turns) const {
    if constexpr (Traits::kPingPong) {
      int const behind = warpgroup + Traits::kTurnCycles;
      int const next = behind >= Traits::kConsumerWarpgroups ? behind - Traits::kConsumerWarpgroups : behind;
      if (in_turns) { cutlass::arch::NamedBarrier::arrive(kThreads, kTurnBarrier + next); }
    }
  }
};

// All threads of one consumer warpgroup.
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup, kSlabBarrier + warpgroup);
}

}  // namespace hopper_attention
