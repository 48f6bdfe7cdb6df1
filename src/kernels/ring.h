// Barriers of the ring of slots through which K and V reach the consumers.
#pragma once

#include "kernels/cute.h"

#include <cstdint>

#include "kernels/ring_order.h"

namespace hopper_attention {

// The lane that acts for a producer warp, and that says of every warp that it is done with an item. It is the last one,
// and reads whatever others read of an item: of a load by several lanes racecheck remembers the last, and it sees no
// order that comes from a __syncwarp and another lane's arrival. If two lanes of a warp said that it is done, an item
// would take 150 cycles more.
inline constexpr int kActingLane = 31;

__device__ __forceinline__ void wait_barrier(uint64_t& barrier, uint32_t phase) {
  cutlass::arch::ClusterBarrier::wait(&barrier, phase);
}

// Whether wait_barrier() would return at once.
__device__ __forceinline__ bool test_barrier(uint64_t& barrier, uint32_t phase) {
  return cutlass::arch::ClusterBarrier::test_wait(&barrier, phase, true);
}

__device__ __forceinline__ void arrive_barrier(uint64_t& barrier) { cutlass::arch::ClusterBarrier::arrive(&barrier); }

__device__ __forceinline__ void expect_bytes(uint64_t& barrier, uint32_t bytes) {
  cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&barrier, bytes);
}

__device__ __forceinline__ void init_barrier(uint64_t& barrier, uint32_t arrivals) {
  cutlass::arch::ClusterBarrier::init(&barrier, arrivals);
}

}  // namespace hopper_attention
