// Shared memory of the other CTAs of a cluster.
#pragma once

#include "kernels/cute.h"

#include <cstdint>

namespace hopper_attention {

// Where `pointer` of this CTA's shared memory lies in that of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in_cluster(void const* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(cute::cast_smem_ptr_to_uint(pointer)), "r"(rank));
  return address;
}

// Stores whose bytes `barrier`, in the same CTA as `address`, counts.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float a) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(a),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float a, float b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(a), "f"(b), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float4 const& a) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(a.x), "f"(a.y), "f"(a.z), "f"(a.w), "r"(barrier)
      : "memory");
}

// wait_barrier() for what other CTAs of the cluster have written or read.
__device__ __forceinline__ void wait_barrier_of_cluster(uint64_t& barrier, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(cute::cast_smem_ptr_to_uint(&barrier)), "r"(phase)
        : "memory");
  }
}

__device__ __forceinline__ void arrive_in_cluster(uint64_t& barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in_cluster(&barrier, rank))
               : "memory");
}

// Where `member` of a CTA's shared memory lies behind the beginning `shared` of it.
__device__ __forceinline__ uint32_t offset_in_shared(void const* shared, void const* member) {
  return cute::cast_smem_ptr_to_uint(member) - cute::cast_smem_ptr_to_uint(shared);
}

}  // namespace hopper_attention
